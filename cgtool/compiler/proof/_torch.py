"""Every private torch name that only the proof touches. Read in torch 2.13.0, written for 2.11 and newer."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import patch

import torch

_ALLOCATING = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
)


class FilledMemory(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]  # 2.11 to 2.15
    """Sets memory that an op leaves uninitialised to one value while it is active."""

    supports_higher_order_operators = True

    def __init__(self, value: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._value = value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, and fill what it allocated alone."""
        del types
        result = func(*args, **(kwargs or {}))
        return result.fill_(self._value) if getattr(func, "overloadpacket", None) in _ALLOCATING else result


def told_that_it_compiles() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which `torch.compiler.is_compiling` is true, as it is in a trace."""
    return patch.object(torch.compiler, "_is_compiling_flag", new=True)


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no values."""
    return torch._subclasses.fake_tensor.is_fake(tensor)
