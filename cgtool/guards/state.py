"""Global state of torch that compiled code was made under, by name, as data: what the source `state:<name>` speaks of.

Owns which names there are, when each matters and what it is now; the tests have a table that says of every setter of
torch which name sees it, or why none has to. Most names are settings that one call of torch reads: what people call
them stands in `cgtool.guards._torch`. The others::

    autocast               {} or {device type: dtype} of the types that are on
    default_device         None, or the type that `torch.set_default_device` or `with device` chose
    torch_function_mode    names of the active modes, outermost first; a default device is not one
    recursion_limit        how deep Python may call
    distributed            None, or the rank and the size of the default process group
    distributed_backend    None, or its backend
    machine                what `platform.uname()` tells: system, name, release, version, hardware
    accelerators           name, memory, architecture and multiprocessors of the visible devices, equal ones once

Entries are for inference, so `no_grad` and `inference_mode` share one. Each call looks at the names that matter to its
model: those of `STATE_NAMES` always, others where traced code asks for them or a compiled piece is made by them.
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
    told = platform.uname()
    return [told.system, told.node, told.release, told.version, told.machine]


@functools.cache
def _accelerators() -> Json:
    if not torch.cuda.is_available():
        return []
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    told = ([p.name, p.total_memory, p.major, p.minor, p.multi_processor_count] for p in devices)
    return [json.loads(text) for text in dict.fromkeys(map(json.dumps, told))]


#: What takes more than one call: name → what people call it, and what reads it.
_COMPUTED: dict[str, tuple[str, Callable[[], Json]]] = {
    "autocast": ("autocast", _autocast),
    "default_device": ("torch's default device", _default_device),
    "torch_function_mode": ("the list of active torch function modes", _torch_function_mode),
    "recursion_limit": ("Python's recursion limit", sys.getrecursionlimit),
    "distributed": ("the default process group of torch.distributed", _distributed),
    "distributed_backend": ("the backend of the default process group", _backend),
    "machine": ("what platform.uname() tells of the machine", _machine),
    "accelerators": ("what torch.cuda.get_device_properties tells", _accelerators),
}
#: What is inactive as a rule: name → its value then, and the one call that gives `False` or 0 then.
_IDLE: dict[str, tuple[Json, Callable[[], Any]]] = {
    "autocast": ({}, private.any_autocast_enabled),
    "default_device": (None, private.num_torch_function_modes),
    "torch_function_mode": ([], private.num_torch_function_modes),
    "distributed": (None, private.process_group_is_initialized),
    "distributed_backend": (None, private.process_group_is_initialized),
}
#: An fp32_precision that nobody set is that of IEEE; setting it so changes nothing.
_UNSET, _IEEE = "none", "ieee"
#: The precision of float32 in every backend and op.
FP32_NAMES: tuple[str, ...] = tuple(name for name in private.SETTINGS if "fp32_precision" in name)
#: The names that matter to every model, in the order in which the tracer writes them down.
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
#: By which names code asks, and for what.
_ASKED: dict[str, tuple[str, ...]] = {
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
#: How the names begin of what pieces are made by, and the words in the names of their ops or devices that tell.
_CHOSEN: dict[str, tuple[str, ...]] = {
    "sdp_": ("scaled_dot_product", "multi_head_attention", "_transformer_encoder_layer_fwd"),
    "autocast_dtype_": ("_enter_autocast",),
    "cuda_": ("device cuda",),
}


def names_for_code(words: Iterable[str]) -> list[str]:
    """Return which further state matters where traced code holds these words as names."""
    asked = dict.fromkeys(name for word in sorted(words) for name in _ASKED.get(word, ()))
    return [name for name in asked if name not in STATE_NAMES]


def names_for_pieces(graphs: Iterable[PieceGraph]) -> list[str]:
    """Return which further state matters to compiled pieces."""
    has: set[str] = set()
    for graph in graphs:
        has.update(str(node.target) for node in graph.every_node())
        has.update(f"device {meta.device}" for meta in (*graph.inputs, *graph.results))
    begins = tuple(begin for begin, words in _CHOSEN.items() if any(word in name for word in words for name in has))
    return [name for name in private.SETTINGS if name.startswith(begins)]


def current(name: str) -> Json:
    """Return the named state as it is now, as JSON data.

    Raises:
        GuardError: There is no such state.
    """
    if name in private.SETTINGS:
        setting = private.SETTINGS[name]
        return _as_json(setting.function(*setting.arguments))
    if name not in _COMPUTED:
        msg = (
            f"The plan names a state {name!r} that this version of cgtool does not know; warm again with this version."
        )
        raise GuardError(msg, path=f"state:{name}", expected=list(STATE_NAMES), actual=name)
    return _COMPUTED[name][1]()


def condition(name: str, expected: Json, constant: Callable[[Any], str]) -> str:
    """Return the Python of a condition that the named state is as expected; each call of a model evaluates all of them.

    Args:
        name: The state.
        expected: What it was.
        constant: Gives a value a name in the namespace of the condition.

    Raises:
        GuardError: There is no such state.
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
    idle, is_active = _IDLE.get(name, (None, None))
    return f"(not {constant(is_active)}() or {holds})" if is_active is not None and expected == idle else holds


def explain_state(name: str, expected: Json, actual: Json) -> str:
    """Return a sentence that says what the state was when compiled, what it is, and what to do about it."""
    if name == "autocast":
        return f"autocast is {_autocast_words(actual)} and was {_autocast_words(expected)} when this was compiled"
    if name == "functorch":
        return "a functorch transform (vmap, grad) is active, and compiled code cannot be transformed"
    what = private.SETTINGS[name].words if name in private.SETTINGS else _COMPUTED[name][0]
    return f"{what} is {actual!r} and was {expected!r} when this was compiled"


def _autocast_words(value: Any) -> str:
    return ", ".join(f"on for {kind} with {dtype}" for kind, dtype in sorted(value.items())) if value else "off"


def _as_json(value: Any) -> Json:
    if type(value) is str and value == _UNSET:
        return _IEEE
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return list(value) if isinstance(value, tuple) else value


def _as_raw(expected: Json, *, like: Any) -> Any:
    """Return what a setting's own getter gives where it is as expected; `like` is what it gives now."""
    if isinstance(like, torch.dtype) and type(expected) is str:
        return getattr(torch, expected, None)
    return tuple(expected) if isinstance(like, tuple) and type(expected) is list else expected
