"""Global state of torch that compiled code depends on, as data: the source `state:<name>` refers to it.

Owns the list of names, when each matters and how it is read. A table in the tests records for every setter of torch
which name covers it, or why none has to. Most names are settings that one call of torch reads, listed in
`cgtool.guards._torch`. The others::

    autocast               {device type: dtype} of the device types with autocast on
    default_device         None, or the device type set by `torch.set_default_device` or `with device`
    torch_function_mode    names of the active modes, outermost first, without that of a default device
    recursion_limit        Python's recursion limit
    distributed            None, or the rank and the size of the default process group
    distributed_backend    None, or its backend
    machine                `platform.uname()`: system, node name, release, version, hardware
    accelerators           name, memory, architecture and multiprocessors of the visible devices, without duplicates

Entries are for inference, so `no_grad` and `inference_mode` share one. Each call checks the names that matter to its
model: always those of `STATE_NAMES`, and others if traced code reads them or a compiled piece depends on them.
"""

from __future__ import annotations

import functools
import json
import platform
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from cgtool.errors import GuardError
from cgtool.guards import _torch as private
from cgtool.plan.pieces import Json, PieceGraph


def _autocast() -> Json:
    if not private.any_autocast_enabled():
        return {}
    on = [kind for kind in private.autocast_device_types() if torch.is_autocast_enabled(kind)]
    return {kind: _as_json(torch.get_autocast_dtype(kind)) for kind in on}


def _default_device() -> Json:
    if not private.num_torch_function_modes():
        return None
    device = private.default_device_of_modes()
    return None if device is None else device.type


def _torch_function_mode() -> Json:
    if not private.num_torch_function_modes():
        return []
    return [f"{type(mode).__module__}:{type(mode).__qualname__}" for mode in private.torch_function_modes()]


def _distributed() -> Json:
    if not private.process_group_is_initialized():
        return None
    group = torch.distributed
    return {"rank": group.get_rank(), "world_size": group.get_world_size()}


def _backend() -> Json:
    return torch.distributed.get_backend() if private.process_group_is_initialized() else None


def _machine() -> Json:
    machine = platform.uname()
    return [machine.system, machine.node, machine.release, machine.version, machine.machine]


@functools.cache
def _accelerators() -> Json:
    if not torch.cuda.is_available():
        return []
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    rows = ([p.name, p.total_memory, p.major, p.minor, p.multi_processor_count] for p in devices)
    return [json.loads(text) for text in dict.fromkeys(map(json.dumps, rows))]


#: State that takes more than one call to read: name → label in messages, and reader.
_COMPUTED: dict[str, tuple[str, Callable[[], Json]]] = {
    "autocast": ("autocast", _autocast),
    "default_device": ("torch's default device", _default_device),
    "torch_function_mode": ("the list of active torch function modes", _torch_function_mode),
    "recursion_limit": ("Python's recursion limit", sys.getrecursionlimit),
    "distributed": ("the default process group of torch.distributed", _distributed),
    "distributed_backend": ("the backend of the default process group", _backend),
    "machine": ("platform.uname()", _machine),
    "accelerators": ("the list of torch.cuda.get_device_properties", _accelerators),
}
#: State that is usually inactive: name → its value then, and a cheap call that returns False or 0 then.
_INACTIVE: dict[str, tuple[Json, Callable[[], Any]]] = {
    "autocast": ({}, private.any_autocast_enabled),
    "default_device": (None, private.num_torch_function_modes),
    "torch_function_mode": ([], private.num_torch_function_modes),
    "distributed": (None, private.process_group_is_initialized),
    "distributed_backend": (None, private.process_group_is_initialized),
}
#: An unset fp32_precision means IEEE, so setting it to IEEE changes nothing.
_UNSET, _IEEE = "none", "ieee"
#: The float32 precision settings of all backends and ops.
FP32_NAMES: tuple[str, ...] = tuple(name for name in private.SETTINGS if "fp32_precision" in name)
#: The names that matter to every model, in the order in which the tracer records them.
STATE_NAMES: tuple[str, ...] = (
    "autocast",
    "autocast_cache",
    "default_device",
    "default_tensor_type",
    "default_dtype",
    "torch_function_mode",
    "torch_dispatch_mode",
    "functorch",
    "deterministic",
    "deterministic_warn_only",
    "fill_uninitialized",
    "mkldnn_enabled",
    "mkldnn_fp32_precision",
    "mkldnn_fp32_precision_matmul",
)
_AUTOCAST_DTYPES = ("autocast_dtype_cpu", "autocast_dtype_cuda")
#: Names by which code reads state → the state that it reads.
_READ_BY: dict[str, tuple[str, ...]] = {
    "is_grad_enabled": ("grad_mode",),
    "is_inference_mode_enabled": ("inference_mode",),
    "getrecursionlimit": ("recursion_limit",),
    "get_num_threads": ("num_threads",),
    **dict.fromkeys(("is_initialized", "get_rank", "get_world_size"), ("distributed",)),
    "get_backend": ("distributed", "distributed_backend"),
    **dict.fromkeys(("get_node_local_rank", "get_process_group_ranks", "get_group_rank"), ("distributed",)),
    "uname": ("machine",),
    "get_device_properties": ("accelerators",),
    "get_autocast_dtype": _AUTOCAST_DTYPES,
    "get_autocast_cpu_dtype": _AUTOCAST_DTYPES,
    "get_autocast_gpu_dtype": _AUTOCAST_DTYPES,
    "get_float32_matmul_precision": ("float32_matmul_precision", *FP32_NAMES),
    "allow_tf32": ("float32_matmul_precision", *FP32_NAMES),
    "fp32_precision": FP32_NAMES,
    "allow_fp16_reduced_precision_reduction": ("cuda_fp16_reduction",),
    "allow_bf16_reduced_precision_reduction": ("cuda_bf16_reduction",),
    "allow_fp16_accumulation": ("cuda_fp16_accumulation",),
    "flash_sdp_enabled": ("sdp_flash",),
    "mem_efficient_sdp_enabled": ("sdp_mem_efficient",),
    "math_sdp_enabled": ("sdp_math",),
    "cudnn_sdp_enabled": ("sdp_cudnn",),
    "fp16_bf16_reduction_math_sdp_allowed": ("sdp_math_reduction",),
}
#: Prefix of state names that affect compiled pieces → substrings of the ops or devices that are affected.
_USED_BY_PIECES: dict[str, tuple[str, ...]] = {
    "sdp_": ("scaled_dot_product", "multi_head_attention", "_transformer_encoder_layer_fwd"),
    "autocast_dtype_": ("_enter_autocast",),
    "cuda_": ("device cuda",),
}


def names_for_code(words: Iterable[str]) -> list[str]:
    """Return the state beyond `STATE_NAMES` that matters to traced code with these names."""
    read = dict.fromkeys(name for word in sorted(words) for name in _READ_BY.get(word, ()))
    return [name for name in read if name not in STATE_NAMES]


def names_for_pieces(graphs: Iterable[PieceGraph]) -> list[str]:
    """Return the state beyond `STATE_NAMES` that matters to compiled pieces."""
    used: set[str] = set()
    for graph in graphs:
        used.update(str(node.target) for node in graph.every_node())
        used.update(f"device {meta.device}" for meta in (*graph.inputs, *graph.results))
    prefixes = tuple(
        prefix for prefix, parts in _USED_BY_PIECES.items() if any(part in name for part in parts for name in used)
    )
    return [name for name in private.SETTINGS if name.startswith(prefixes)]


def current(name: str) -> Json:
    """Return the current value of the named state, as JSON data.

    Raises:
        GuardError: The name is unknown.
    """
    if name in private.SETTINGS:
        setting = private.SETTINGS[name]
        return _as_json(setting.function(*setting.arguments))
    if name not in _COMPUTED:
        msg = (
            f"The plan checks the state {name!r}, which this version of cgtool does not know; "
            "warm again with this version."
        )
        raise GuardError(msg, path=f"state:{name}", expected=list(STATE_NAMES), actual=name)
    return _COMPUTED[name][1]()


def condition(name: str, expected: Json, constant: Callable[[Any], str]) -> str:
    """Return a Python expression that checks the named state; each call of a model evaluates all of them.

    Args:
        name: The state.
        expected: The value that it had when the model was compiled.
        constant: Binds a value in the namespace of the expression and returns its name.

    Raises:
        GuardError: The name is unknown.
    """
    if name in private.SETTINGS:
        setting = private.SETTINGS[name]
        arguments = ", ".join(map(constant, setting.arguments))
        now = f"{constant(setting.function)}({arguments})"
        if expected == _IEEE:
            return f"{now} in {constant((_IEEE, _UNSET))}"
        return f"{now} == {constant(_as_raw(expected, like=setting.function(*setting.arguments)))}"
    current(name)
    holds = f"{constant(_COMPUTED[name][1])}() == {constant(expected)}"
    inactive, is_active = _INACTIVE.get(name, (None, None))
    return f"(not {constant(is_active)}() or {holds})" if is_active is not None and expected == inactive else holds


def explain_state(name: str, expected: Json, actual: Json) -> str:
    """Return how the state differs from what it was when the model was compiled, as a sentence."""
    if name == "autocast":
        return f"autocast is {_autocast_text(actual)} and was {_autocast_text(expected)} when this was compiled"
    if name == "functorch":
        return "a functorch transform (vmap, grad) is active, and compiled code cannot be transformed"
    label = private.SETTINGS[name].label if name in private.SETTINGS else _COMPUTED[name][0]
    return f"{label} is {actual!r} and was {expected!r} when this was compiled"


def _autocast_text(value: Any) -> str:
    return ", ".join(f"on for {kind} with {dtype}" for kind, dtype in sorted(value.items())) if value else "off"


def _as_json(value: Any) -> Json:
    if type(value) is str and value == _UNSET:
        return _IEEE
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return list(value) if isinstance(value, tuple) else value


def _as_raw(expected: Json, *, like: Any) -> Any:
    """Return the expected value in the form that the setting's getter returns; `like` is its current value."""
    if isinstance(like, torch.dtype) and type(expected) is str:
        return getattr(torch, expected, None)
    return tuple(expected) if isinstance(like, tuple) and type(expected) is list else expected
