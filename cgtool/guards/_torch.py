"""The private names of torch that guards need, each read in 2.13.0 and unchanged since 2.11."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch
from torch._C import _functorch  # the stack of transforms; torch.func shows no public way to ask
from torch._library import simple_registry
from torch._library.custom_ops import OPDEFS
from torch.utils._config_module import _UNSET_SENTINEL as _UNSET  # where a setting has no value of some origin


def any_autocast_enabled() -> bool:
    """Return whether autocast is on for any device type."""
    return bool(torch._C._is_any_autocast_enabled())


@functools.cache
def autocast_device_types() -> tuple[str, ...]:
    """Return every device type that autocast knows, whether or not this build of torch has it."""
    return tuple(torch._C._autocast_supported_devices())


def num_torch_function_modes() -> int:
    """Return how many torch function modes are active, a default device's included."""
    return int(torch._C._len_torch_function_stack())


def _modes() -> list[Any]:
    return [torch._C._get_function_stack_at(i) for i in range(num_torch_function_modes())]


def torch_function_modes() -> list[Any]:
    """Return the active torch function modes, outermost first, without those that only choose a default device."""
    return [mode for mode in _modes() if not _chooses_a_device(mode)]


def default_device_of_modes() -> torch.device | None:
    """Return the device that the innermost active default-device mode chose, or None."""
    return next((mode.device for mode in reversed(_modes()) if _chooses_a_device(mode)), None)


def _chooses_a_device(mode: Any) -> bool:
    from torch.utils._device import DeviceContext  # what torch.set_default_device enters; a start has no modes

    return isinstance(mode, DeviceContext)


def num_torch_dispatch_modes() -> int:
    """Return how many torch dispatch modes are active, fake tensors' included."""
    # Infra modes (fake, proxy, functional) stand in slots of their own beside the user's stack.
    return int(torch._C._len_torch_dispatch_stack())


def in_functorch() -> bool:
    """Return whether a functorch transform is active."""
    return _functorch.peek_interpreter_stack() is not None


def changed_inductor_settings() -> dict[str, Any]:
    """Return the settings of Inductor that were changed in this process, by name; {} where it was never imported.

    Places, logs and what else torch itself keeps out of the keys of its caches are left out. Values that the
    environment gave are not changes: they are named as variables.
    """
    config: Any = sys.modules.get("torch._inductor.config")
    if config is None:
        return {}
    ignored = tuple(config._cache_config_ignore_prefix)
    values = config.get_config_copy()
    found = {}
    for name, entry in config._config.items():
        if name.startswith(("_", *ignored)) or entry.alias is not None or name not in values:
            continue
        given = [entry.env_value_force, entry.env_value_default, entry.default]
        start = next((value for value in given if value is not _UNSET), None)
        if type(values[name]) is not type(start) or values[name] != start:
            found[name] = values[name]
    return found


def find_op(name: str) -> Any:
    """Return the overload `ns::op.overload` (`ns::op` is its default overload), or None where nobody registered it."""
    namespace, _, rest = name.partition("::")
    op, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), op, None)
    return getattr(packet, overload or "default", None)


def fake_implementation(op: Any) -> Any:
    """Return the Python function that tells what an op gives for fake tensors, or None where there is none to see."""
    qualname = str(op._schema.name) + (f".{op._schema.overload_name}" if op._schema.overload_name else "")
    definition = OPDEFS.get(qualname)  # @torch.library.custom_op registers a wrapper of its own
    if definition is not None and definition._abstract_fn is not None:
        return definition._abstract_fn
    entry = simple_registry.singleton._data.get(qualname)  # `get` came after 2.11
    kernel = None if entry is None else entry.fake_impl.kernel
    return None if kernel is None else _unwrapped(kernel.func)


def _unwrapped(function: Any) -> Any:
    """Return what the author wrote: torch wraps it in checks that remember whether they ran.

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
    """Return whether the dispatcher has a kernel of the op's own for a dispatch key ("CompositeImplicitAutograd")."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def schema_of(op: Any) -> Any:
    """Return the schema of an overload."""
    return op._schema


def is_op(value: Any) -> bool:
    """Return whether `value` is an op of `torch.ops`, one of its overloads, or their namespace."""
    return isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops._OpNamespace))
