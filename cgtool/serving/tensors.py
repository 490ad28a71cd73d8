"""Tensors in what a model takes and returns, and the memory of those that belong to the model."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import nn

from cgtool.errors import UsageError
from cgtool.plan.records import source_words

#: Reads a tensor's address; `map` over it costs about 50 ns a tensor.
data_ptr = torch.Tensor.data_ptr

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return a value with every tensor in it replaced by what `function` returns for it.

    Tensors may lie in tuples, lists, dicts and dataclasses, beside plain values.

    Raises:
        UsageError: It holds something that tensors might hide in.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple):
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [map_tensors(function, item) for item in value]
    if isinstance(value, dict):
        mapped = copy.copy(value)
        for key, item in value.items():
            mapped[key] = map_tensors(function, item)
        return mapped
    if is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field in fields(value):
            object.__setattr__(changed, field.name, map_tensors(function, getattr(value, field.name)))
        return changed
    msg = (
        f"The model returns a {type(value).__qualname__}, in which cgtool cannot find the tensors: return tensors, or "
        "tuples, lists, dicts and dataclasses of them."
    )
    raise UsageError(msg, actual=type(value).__qualname__)


def copied(value: Any) -> Any:
    """Return `value` with copies of its tensors, in memory of their own."""
    return map_tensors(torch.Tensor.clone, value)


class HeldTensors(Protocol):
    """Tensors that a function reads without getting them as arguments."""

    def addresses(self) -> tuple[int, ...]:
        """Return where each tensor lies now."""

    def changed(self, before: tuple[int, ...]) -> str:
        """Name the first tensor that does not lie where it lay before."""


class ReadTensors:
    """What calls of a loaded model read of it, by source, wherever it holds it, read anew at each look."""

    def __init__(self, read: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self._read = read

    def addresses(self) -> tuple[int, ...]:
        """See `HeldTensors`."""
        return tuple(map(data_ptr, self._read().values()))

    def changed(self, before: tuple[int, ...]) -> str:
        """See `HeldTensors`."""
        return source_words(_first_changed(self._read(), before, self.addresses()))


class ModelTensors:
    """The tensors that the modules of a model hold: parameters, buffers and attributes, read anew at each look."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._bind()

    def addresses(self) -> tuple[int, ...]:
        """See `HeldTensors`; 0.1 µs a tensor."""
        # Equality of dicts compares modules by identity.
        if self._children != self._children_then:
            self._bind()
        try:
            return tuple(map(data_ptr, map(operator.getitem, self._holders, self._keys)))
        except (KeyError, TypeError):  # one was deleted, or is no tensor now
            self._bind()
            return self.addresses()

    def changed(self, before: tuple[int, ...]) -> str:
        """See `HeldTensors`."""
        return _first_changed(self._names, before, self.addresses())

    def _bind(self) -> None:
        found = list(_holders(self._module))
        self._names = [name for name, _, _ in found]
        self._holders = [holder for _, holder, _ in found]
        self._keys = [key for _, _, key in found]
        children = [module._modules for module in self._module.modules() if module._modules]  # noqa: SLF001 - see below
        self._children: list[dict[str, nn.Module | None]] = children
        self._children_then = [dict(item) for item in children]


def _first_changed(names: Iterable[str], before: tuple[int, ...], now: tuple[int, ...]) -> str:
    changed = (name for name, was, is_ in zip(names, before, now, strict=False) if was != is_)
    return next(changed, "the set of the model's tensors")


def _holders(module: nn.Module) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    # The dicts themselves: a tensor that is assigned later is found under the same key.
    for prefix, part in module.named_modules():
        for held in (part._parameters, part._buffers, vars(part)):  # noqa: SLF001 - nn.Module hands out copies alone
            for name, tensor in held.items():
                if isinstance(tensor, torch.Tensor):
                    yield f"{prefix}.{name}".lstrip("."), held, name
