"""Global state of torch that compiled code was made under, by name, as data: what the source `state:<name>` speaks of.

Owns the list of names and what each is now. Grad mode is looked at only where a model asks for it: entries are for
inference, and a call that needs gradients is refused whatever was traced; `inference_mode` and `no_grad` share one
entry.

==========================  ==================================================================================
autocast                    {} or {device type: dtype} of the types that are on
float32_matmul_precision    "highest", "high" or "medium"
deterministic               whether deterministic algorithms are asked for
default_dtype               "float32"
default_device              None, or the type that `torch.set_default_device` or `with device` chose
torch_function_mode         names of the active modes, outermost first; a default device is not one
torch_dispatch_mode         how many dispatch modes are active
functorch                   whether a transform (vmap, grad) is active
grad_mode                   whether gradients are recorded
==========================  ==================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cgtool.errors import GuardError
from cgtool.guards import _torch as private
from cgtool.pieces import Json

_WORDS = {
    "autocast": "autocast",
    "float32_matmul_precision": "the float32 matmul precision",
    "deterministic": "torch.use_deterministic_algorithms",
    "default_dtype": "torch's default dtype",
    "default_device": "torch's default device",
    "torch_function_mode": "the list of active torch function modes",
    "torch_dispatch_mode": "the number of active torch dispatch modes",
    "functorch": "a functorch transform",
    "grad_mode": "grad mode",
}


def _autocast() -> Json:
    if not private.any_autocast_enabled():
        return {}
    on = [kind for kind in private.autocast_device_types() if torch.is_autocast_enabled(kind)]
    return {kind: str(torch.get_autocast_dtype(kind)).removeprefix("torch.") for kind in on}


def _default_device() -> Json:
    if not private.num_torch_function_modes():
        return None
    device = private.default_device_of_modes()
    return None if device is None else device.type


def _torch_function_mode() -> Json:
    if not private.num_torch_function_modes():
        return []
    return [f"{type(mode).__module__}:{type(mode).__qualname__}" for mode in private.torch_function_modes()]


_CURRENT: dict[str, Callable[[], Json]] = {
    "autocast": _autocast,
    "float32_matmul_precision": torch.get_float32_matmul_precision,
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "default_dtype": lambda: str(torch.get_default_dtype()).removeprefix("torch."),
    "default_device": _default_device,
    "torch_function_mode": _torch_function_mode,
    "torch_dispatch_mode": private.num_torch_dispatch_modes,
    "functorch": private.in_functorch,
    "grad_mode": torch.is_grad_enabled,
}

#: The names that matter to every model, in the order in which the tracer writes them down.
STATE_NAMES: tuple[str, ...] = tuple(name for name in _CURRENT if name != "grad_mode")


def current(name: str) -> Json:
    """Return the named state as it is now, as JSON data.

    Raises:
        GuardError: There is no such state; `name` is not one of `STATE_NAMES`.
    """
    return reader(name)()


def reader(name: str) -> Callable[[], Json]:
    """Return the function that reads the named state.

    Raises:
        GuardError: There is no such state; `name` is not one of `STATE_NAMES`.
    """
    if name not in _CURRENT:
        msg = (
            f"The plan names a state {name!r} that this version of cgtool does not know; warm again with this version."
        )
        raise GuardError(msg, path=f"state:{name}", expected=list(STATE_NAMES), actual=name)
    return _CURRENT[name]


def explain_state(name: str, expected: Json, actual: Json) -> str:
    """Return a sentence that says what the state was when compiled, what it is, and what to do about it."""
    what = _WORDS.get(name, name)
    if name == "autocast":
        return f"autocast is {_autocast_words(actual)} and was {_autocast_words(expected)} when this was compiled"
    if name == "functorch":
        return "a functorch transform (vmap, grad) is active, and compiled code cannot be transformed"
    return f"{what} is {actual!r} and was {expected!r} when this was compiled"


def _autocast_words(value: Any) -> str:
    return ", ".join(f"on for {kind} with {dtype}" for kind, dtype in sorted(value.items())) if value else "off"
