"""What one call of a model returns and writes, and how two calls differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cgtool.compiler.proof import judge
from cgtool.compiler.proof.prove import same_bytes


@dataclass(frozen=True, kw_only=True)
class Run:
    """The results of one call.

    Args:
        outputs: The values that it returned, by name.
        writes: The values that it may have written in place or left in the model, by name.
    """

    outputs: Mapping[str, Any]
    writes: Mapping[str, Any]

    def sharing(self) -> dict[str, tuple[str, ...]]:
        """Return for each tensor the names of all tensors in the same storage, itself included."""
        storages: dict[int, list[str]] = {}
        for name, value in {**self.outputs, **self.writes}.items():
            if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.untyped_storage().nbytes():
                storages.setdefault(value.untyped_storage().data_ptr(), []).append(name)
        return {name: tuple(names) for names in storages.values() for name in names}


def differing_tensors(compiled: Run, eager: Run) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Yield the pairs of tensors whose bytes differ, by name.

    Raises:
        judge.WrongError: The runs differ in something else: names, plain values, shapes, dtypes or devices.
    """
    if list(compiled.outputs) != list(eager.outputs):
        msg = f"it returns {_listed(compiled.outputs)} and the model {_listed(eager.outputs)}"
        raise judge.WrongError(msg)
    if more := compiled.writes.keys() - eager.writes.keys():
        msg = f"it leaves {', '.join(sorted(more))} in the model, and the model does not"
        raise judge.WrongError(msg)
    for name, expected in {**eager.outputs, **eager.writes}.items():
        actual = {**compiled.outputs, **compiled.writes}.get(name)
        if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor):
            if not _equal_values(actual, expected):
                msg = f"{name} is {_shown(actual)} where the model has {_shown(expected)}"
                raise judge.WrongError(msg)
            continue
        for what, one, other in (
            ("shape", tuple(actual.shape), tuple(expected.shape)),
            ("dtype", actual.dtype, expected.dtype),
            ("device", actual.device, expected.device),
        ):
            if one != other:
                msg = f"{name} has the {what} {one} where the model's has {other}"
                raise judge.WrongError(msg)
        if not same_bytes(actual, expected):
            yield name, (actual, expected)


def check_sharing(compiled: Run, eager: Run) -> None:
    """Check that tensors share memory in one run exactly if they do in the other.

    Raises:
        judge.WrongError: They do not.
    """
    actual, expected = compiled.sharing(), eager.sharing()
    for name, names in expected.items():
        if actual.get(name, (name,)) != names:
            msg = f"{name} shares memory with {_others(name, actual)} and the model's with {_others(name, expected)}"
            raise judge.WrongError(msg)


def _others(name: str, sharing: Mapping[str, tuple[str, ...]]) -> str:
    return ", ".join(other for other in sharing.get(name, ()) if other != name) or "nothing else"


def _equal_values(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-3) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, int | str | bool | complex | None) or isinstance(other, torch.Tensor):
        return type(one) is type(other) and one == other
    return type(one) is type(other)  # an object of the user's, whose visible parts are compared by themselves


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(names) or "nothing"


def _shown(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:80]
