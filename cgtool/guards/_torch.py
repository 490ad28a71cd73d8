"""Private names of torch that guards need, as of 2.13.0 and unchanged since 2.11 unless a comment says otherwise."""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch._library import simple_registry
from torch._library.custom_ops import OPDEFS
from torch.utils._config_module import _UNSET_SENTINEL as _UNSET  # marks an origin that gives a setting no value

#: Whether autocast is on for any device type; not wrapped in a function because each call of a model calls it.
any_autocast_enabled = torch._C._is_any_autocast_enabled
#: The number of active torch function modes, including that of a default device; not wrapped for the same reason.
num_torch_function_modes = torch._C._len_torch_function_stack


def process_group_is_initialized() -> bool:
    """Return whether torch.distributed has a default process group; some builds of torch have no torch.distributed."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_default_group(value: Any) -> bool:
    """Return whether a value is the default process group."""
    return process_group_is_initialized() and value is torch.distributed.group.WORLD


def exchanges() -> bool:
    """Return whether there is a default process group, and a real one, whose ranks exchange data."""
    return process_group_is_initialized() and torch.distributed.get_backend() != "fake"


def join_fake_group(rank: int, size: int) -> None:
    """Initialize a fake default process group of `size`, which exchanges nothing, with this process as `rank`."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


def store_of_group() -> Any:
    """Return the store of the default process group on a separate connection; a waiting group blocks its own."""
    store: Any = torch.distributed.distributed_c10d._get_default_store()
    return store.clone()


#: Encoded device meshes by id: each sharded weight refers to its mesh, and encoding one takes 50 µs.
_meshes: dict[int, tuple[weakref.ref[Any], list[Any]]] = {}


def shared_by_processes(value: Any) -> list[Any] | None:
    """Return a process group, a device mesh or a DTensor's sharding as a literal (see `kinds`); None for the rest."""
    if not torch.distributed.is_available():
        return None
    if isinstance(value, torch.distributed.ProcessGroup):
        return ["group", _ranks_of(value), value.rank(), value.size()]
    if isinstance(value, torch.distributed.DeviceMesh):
        reference, literal = _meshes.get(id(value), (None, []))
        if reference is None or reference() is not value:
            literal = _mesh(value)
            _meshes[id(value)] = weakref.ref(value), literal
        return literal
    specs: Any = sys.modules.get("torch.distributed.tensor._dtensor_spec")
    if specs is None or not isinstance(value, specs.DTensorSpec):
        return None
    order = [[entry.tensor_dim, *entry.mesh_dims] for entry in getattr(value, "shard_order", None) or ()]
    return ["sharding", shared_by_processes(value.mesh), [*map(repr, value.placements)], [*value.shape], order]


def _ranks_of(group: Any) -> list[int] | str:
    """Return the ranks of a group, in its order; its name if torch.distributed did not create it."""
    known = torch.distributed.distributed_c10d._world.pg_group_ranks.get(group)
    return group.group_name if known is None else [*known]


def _mesh(value: Any) -> list[Any]:
    groups = [shared_by_processes(group) for group in value.get_all_groups()]
    return ["mesh", value.device_type, value.mesh.flatten().tolist(), [*(value.mesh_dim_names or ())], groups]


def placements_of(tensor: Any) -> tuple[str, ...]:
    """Return the placement of a DTensor on each dimension of its mesh; empty for other tensors."""
    spec = getattr(tensor, "_spec", None)
    literal = None if spec is None else shared_by_processes(spec)
    return () if literal is None else tuple(literal[2])


def group_named(name: str) -> Any:
    """Return the group registered with torch under this name in this process, or None."""
    if not torch.distributed.is_available():
        return None
    registry: Any = torch._C._distributed_c10d
    try:
        return registry._resolve_process_group(name)
    except RuntimeError:
        return None


def size_of_group(name: str) -> int | None:
    """Return the number of processes in the group of this name, or None if there is no such group."""
    group = group_named(name)
    return None if group is None else int(group.size())


def register_groups() -> dict[str, str]:
    """Register each group with torch under its name in plans, made of its ranks; return {torch's name: that name}.

    The first of several groups of the same ranks is registered.
    """
    if not process_group_is_initialized():
        return {}
    registry: Any = torch._C._distributed_c10d
    names: dict[str, str] = {}
    first: set[str] = set()
    for group in torch.distributed.distributed_c10d._world.pg_map:
        names[group.group_name] = name = f"ranks {_ranks_of(group)}"
        known = group_named(name)
        if name not in first and (known is None or known.group_name != group.group_name):
            registry._unregister_process_group(name)
            registry._register_process_group(name, group)
        first.add(name)
    return names


#: Keeps the fake groups alive, which torch's registry does not.
_fake_groups: dict[str, Any] = {}


def register_fake_group(name: str, size: int) -> None:
    """Register a group of this name that cannot exchange anything, unless one of this size is registered."""
    if size_of_group(name) != size:
        registry: Any = torch._C._distributed_c10d
        registry._unregister_process_group(name)
        _fake_groups[name] = registry.ProcessGroup(0, size)
        registry._register_process_group(name, _fake_groups[name])


@functools.cache
def autocast_device_types() -> tuple[str, ...]:
    """Return every device type that autocast supports, whether or not this build of torch includes it."""
    return tuple(torch._C._autocast_supported_devices())


def _modes() -> list[Any]:
    return [torch._C._get_function_stack_at(i) for i in range(num_torch_function_modes())]


def torch_function_modes() -> list[Any]:
    """Return the active torch function modes, outermost first, without those that only choose a default device."""
    return [mode for mode in _modes() if not _is_device_mode(mode)]


def default_device_of_modes() -> torch.device | None:
    """Return the device of the innermost active default-device mode, or None."""
    return next((mode.device for mode in reversed(_modes()) if _is_device_mode(mode)), None)


def _is_device_mode(mode: Any) -> bool:
    from torch.utils._device import DeviceContext  # entered by torch.set_default_device; rare, so imported lazily

    return isinstance(mode, DeviceContext)


def _float32_matmul_precision() -> str:
    try:
        return torch._C._get_float32_matmul_precision()
    except RuntimeError:  # the backends differ, because their fp32_precision was set one by one
        return "mixed"


class Setting(NamedTuple):
    """A setting of torch that one call reads.

    Args:
        label: Its name in messages: the public setter.
        function: The getter.
        arguments: The getter's arguments.
    """

    label: str
    function: Callable[..., Any]
    arguments: tuple[str, ...]


def _settings(rows: Iterable[tuple[str, ...]]) -> dict[str, Setting]:
    """Return {name: setting} for the getters that this torch has."""
    settings = {}
    for name, label, getter, *arguments in rows:
        function = getattr(torch._C, getter, None)
        if function is not None:
            settings[name] = Setting(label, function, tuple(arguments))
    return settings


_FP32 = "_get_fp32_precision_getter"
_MATMUL = "torch.backends.cuda.matmul."
_MKLDNN = "torch.backends.mkldnn."
_OLD_MATMUL = " (torch.set_float32_matmul_precision)"
_OLD_CUDNN = " (torch.backends.cudnn.allow_tf32)"

#: Settings by their names in a plan, as of 2.13.0; those for which this torch has no getter are left out.
SETTINGS: dict[str, Setting] = {
    "float32_matmul_precision": Setting("the float32 matmul precision", _float32_matmul_precision, ()),
    **_settings(
        [
            ("fp32_precision", "torch.backends.fp32_precision", _FP32, "generic", "all"),
            ("cuda_fp32_precision", "torch.backends.cudnn.fp32_precision", _FP32, "cuda", "all"),
            ("cuda_fp32_precision_matmul", f"{_MATMUL}fp32_precision{_OLD_MATMUL}", _FP32, "cuda", "matmul"),
            (
                "cuda_fp32_precision_conv",
                f"torch.backends.cudnn.conv.fp32_precision{_OLD_CUDNN}",
                _FP32,
                "cuda",
                "conv",
            ),
            ("cuda_fp32_precision_rnn", f"torch.backends.cudnn.rnn.fp32_precision{_OLD_CUDNN}", _FP32, "cuda", "rnn"),
            ("mkldnn_fp32_precision", "torch.backends.mkldnn.fp32_precision", _FP32, "mkldnn", "all"),
            ("mkldnn_fp32_precision_matmul", f"{_MKLDNN}matmul.fp32_precision{_OLD_MATMUL}", _FP32, "mkldnn", "matmul"),
            ("mkldnn_fp32_precision_conv", f"{_MKLDNN}conv.fp32_precision", _FP32, "mkldnn", "conv"),
            ("mkldnn_fp32_precision_rnn", f"{_MKLDNN}rnn.fp32_precision", _FP32, "mkldnn", "rnn"),
            # a pair in 2.13: the reduction, and whether it may be split; a single value in older torch
            (
                "cuda_fp16_reduction",
                f"{_MATMUL}allow_fp16_reduced_precision_reduction",
                "_get_cublas_allow_fp16_reduced_precision_reduction",
            ),
            (
                "cuda_bf16_reduction",
                f"{_MATMUL}allow_bf16_reduced_precision_reduction",
                "_get_cublas_allow_bf16_reduced_precision_reduction",
            ),
            ("cuda_fp16_accumulation", f"{_MATMUL}allow_fp16_accumulation", "_get_cublas_allow_fp16_accumulation"),
            ("mkldnn_enabled", "torch.backends.mkldnn.enabled", "_get_mkldnn_enabled"),
            ("deterministic", "torch.use_deterministic_algorithms", "_get_deterministic_algorithms"),
            (
                "deterministic_warn_only",
                "warn_only of torch.use_deterministic_algorithms",
                "_get_deterministic_algorithms_warn_only",
            ),
            (
                "fill_uninitialized",
                "torch.utils.deterministic.fill_uninitialized_memory",
                "_get_deterministic_fill_uninitialized_memory",
            ),
            ("default_dtype", "torch's default dtype", "get_default_dtype"),
            ("default_tensor_type", "the device of torch.set_default_tensor_type", "_get_default_device"),
            # `with torch.autocast("cpu")` uses it, whether autocast is on now or not
            ("autocast_dtype_cpu", "torch.get_autocast_dtype('cpu')", "get_autocast_dtype", "cpu"),
            ("autocast_dtype_cuda", "torch.get_autocast_dtype('cuda')", "get_autocast_dtype", "cuda"),
            ("autocast_cache", "torch.set_autocast_cache_enabled", "is_autocast_cache_enabled"),
            # Infra modes (fake, proxy, functional) have separate slots beside the user's stack.
            ("torch_dispatch_mode", "the number of active torch dispatch modes", "_len_torch_dispatch_stack"),
            ("functorch", "a functorch transform", "_are_functorch_transforms_active"),
            ("grad_mode", "grad mode", "is_grad_enabled"),
            ("inference_mode", "inference mode", "is_inference_mode_enabled"),
            ("num_threads", "torch.get_num_threads()", "get_num_threads"),
            ("sdp_flash", "torch.backends.cuda.enable_flash_sdp", "_get_flash_sdp_enabled"),
            ("sdp_mem_efficient", "torch.backends.cuda.enable_mem_efficient_sdp", "_get_mem_efficient_sdp_enabled"),
            ("sdp_math", "torch.backends.cuda.enable_math_sdp", "_get_math_sdp_enabled"),
            (
                "sdp_math_reduction",
                "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp",
                "_get_math_sdp_allow_fp16_bf16_reduction",
            ),
            ("sdp_cudnn", "torch.backends.cuda.enable_cudnn_sdp", "_get_cudnn_sdp_enabled"),
            ("sdp_fa3", "the use of FlashAttention 3", "_get_fa3_sdp_enabled"),
            ("sdp_fa4", "the use of FlashAttention 4", "_get_fa4_sdp_enabled"),  # from 2.15
            ("sdp_overrideable", "the use of an overridden attention kernel", "_get_overrideable_sdp_enabled"),
            ("sdp_priority", "the order of torch.nn.attention.sdpa_kernel", "_get_sdp_priority_order"),
        ]
    ),
}


def changed_inductor_settings() -> dict[str, Any]:
    """Return the settings of Inductor that were changed in this process, by name; {} if it was never imported.

    Leaves out paths, logs and the other settings that torch keeps out of its own cache keys. Values set through the
    environment are not changes: they are tracked as environment variables.
    """
    config: Any = sys.modules.get("torch._inductor.config")
    if config is None:
        return {}
    ignored = tuple(config._cache_config_ignore_prefix)
    values = config.get_config_copy()
    changed = {}
    for name, entry in config._config.items():
        if name.startswith(("_", *ignored)) or entry.alias is not None or name not in values:
            continue
        origins = [entry.env_value_force, entry.env_value_default, entry.default]
        initial = next((value for value in origins if value is not _UNSET), None)
        if type(values[name]) is not type(initial) or values[name] != initial:
            changed[name] = values[name]
    return changed


def is_fake(value: Any) -> bool:
    """Return whether a value is a fake tensor, without importing torch's fake tensors."""
    fakes: Any = sys.modules.get("torch._subclasses.fake_tensor")
    return fakes is not None and isinstance(value, fakes.FakeTensor)


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a view of another one."""
    return tensor._is_view()


def find_op(name: str) -> Any:
    """Return the overload `ns::op.overload` (`ns::op` is its default overload), or None if it is not registered."""
    namespace, _, rest = name.partition("::")
    op, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), op, None)
    return getattr(packet, overload or "default", None)


def fake_implementation(op: Any) -> Any:
    """Return the Python function that implements an op on fake tensors, or None if there is none in Python."""
    qualname = str(op._schema.name) + (f".{op._schema.overload_name}" if op._schema.overload_name else "")
    definition = OPDEFS.get(qualname)  # @torch.library.custom_op registers a wrapper
    if definition is not None and definition._abstract_fn is not None:
        return definition._abstract_fn
    entry = simple_registry.singleton._data.get(qualname)  # `get` came after 2.11
    kernel = None if entry is None else entry.fake_impl.kernel
    return None if kernel is None else _unwrapped(kernel.func)


def _unwrapped(function: Any) -> Any:
    """Return the author's function without torch's wrappers, which check once and remember that they ran.

    torch.library's `_check_pystubs_once` keeps the author's function in its closure and sets no `__wrapped__` (2.13.0).
    """
    while getattr(function, "__globals__", {}).get("__name__", "").partition(".")[0] == "torch":
        inner = getattr(function, "__wrapped__", None) or inspect.getclosurevars(function).nonlocals.get("func")
        if inner is None:
            break
        function = inner
    return function


def python_kernels(op: Any) -> dict[str, Any]:
    """Return {dispatch key: function} of the kernels that Python registered on the overload itself (`py_impl`)."""
    return {str(key): function for key, function in op.py_kernels.items()}


def has_kernel(op: Any, key: str) -> bool:
    """Return whether the op itself has a kernel for a dispatch key such as "CompositeImplicitAutograd"."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def schema_of(op: Any) -> Any:
    """Return the schema of an overload."""
    return op._schema


def is_op(value: Any) -> bool:
    """Return whether `value` is an op of `torch.ops`, one of its overloads, or their namespace."""
    return isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops._OpNamespace))


def autocast_text(value: Any) -> str | None:
    """Return the device, dtype and flags of an autocast region as text; None for other values."""
    if type(value) is not torch.autocast:
        return None
    return repr((value.device, value.fast_dtype, value._enabled, value._cache_enabled))
