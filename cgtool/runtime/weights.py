"""The tensors that belong to the model and not to a call: read at every call, and never stale.

What may change after load, and what happens then:

- A parameter or buffer is assigned, or its values are loaded: the next call reads the new tensor.
- Its dtype, shape, strides, device or class changes, also in place as `module.half()` does: the next call raises.
- A submodule is added, replaced or removed, or tied weights are untied: the next call checks every guard on the model
  again, as `recheck()` does, and raises when one fails.
- A plain attribute (`layer.eps`), a hook or the `training` flag of a submodule changes: `recheck()` sees it, a call
  does not.

One call in C compares all tensors with those of the last full check; it costs about 0.1 µs a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from cgtool.errors import GuardError
from cgtool.graph.metas import device_of, dtype_of, dtype_text
from cgtool.guards.sources import parse_source, words
from cgtool.pieces import TensorMeta
from cgtool.plan import Guard, Input
from cgtool.runtime import _torch as private
from cgtool.runtime.generate import Code
from cgtool.runtime.paths import Reader

_ADVICE = "Put it back as it was, or warm again with the model as it is now."


class StructureChangedError(Exception):
    """The module tree is not the one that was bound; raised and caught within the runtime."""


class Weights:
    """The inputs of a variant that come from the model, in order.

    Args:
        module: The live model.
        method: Its bound method that was traced.
        inputs: Inputs whose sources are no arguments and whose shapes have no symbols.
        same: Guards of the kind "same:..." on the model.
        device_index: What a device without an index means; None: any.

    Raises:
        GuardError: A tensor is gone or of another make than when the model was compiled.
    """

    def __init__(
        self,
        module: nn.Module,
        method: Any,
        inputs: Sequence[Input],
        same: Iterable[Guard] = (),
        device_index: int | None = None,
    ) -> None:
        self._inputs = tuple(inputs)
        self._device_index = device_index
        self._read = self._reader(module, method, tuple(same))
        #: By inference mode: the check in C, and whether any of the tensors requires grad.
        self._checks: dict[bool, tuple[Callable[..., bool], bool]] = {}
        try:
            self.read()
        except StructureChangedError as error:
            raise GuardError(f"Tensors of the model that were one are now several. {_ADVICE}") from error

    def read(self) -> tuple[list[torch.Tensor], bool]:
        """Return the tensors as they are now, and whether any of them requires grad.

        Raises:
            StructureChangedError: The module tree changed, or tied weights are no longer one.
            GuardError: A tensor is gone or of another make than when the model was compiled.
        """
        try:
            tensors = self._read()
        except (KeyError, AttributeError, IndexError, TypeError) as error:
            raise self._gone(error) from error
        if tensors is None:
            raise StructureChangedError
        known = self._checks.get(torch.is_inference_mode_enabled())
        if known is not None and known[0](*tensors):
            return tensors, known[1]
        return tensors, self._check(tensors)

    def _check(self, tensors: list[torch.Tensor]) -> bool:
        for item, tensor in zip(self._inputs, tensors, strict=True):
            problem = make_problem(tensor, item.meta, self._device_index) or _shape_problem(tensor, item.meta)
            if problem is not None:
                raise GuardError(
                    f"{words(item.source)} {problem}. {_ADVICE}",
                    path=words(item.source),
                    expected=item.meta.to_json(),
                    actual=repr(type(tensor)),
                )
        needs_grad = any(tensor.requires_grad for tensor in tensors)
        check = private.tensors_unchanged(tensors) if tensors else _nothing_to_check
        self._checks[torch.is_inference_mode_enabled()] = (check, needs_grad)
        return needs_grad

    def _reader(
        self, module: nn.Module, method: Any, same: tuple[Guard, ...]
    ) -> Callable[[], list[torch.Tensor] | None]:
        code = Code("weights")
        reader = Reader(code, module, method)
        # Equality of dicts compares the values by identity first, and modules by nothing else.
        for holder in _child_holders(module):
            code.add(f"if {code.constant(holder)} != {code.constant(dict(holder))}: return None")
        for guard in same:
            other = guard.kind.removeprefix("same:")
            if parse_source(guard.source).is_call or parse_source(other).is_call:
                continue
            word = "is not" if guard.expected else "is"
            code.add(f"if {reader.read(guard.source)} {word} {reader.read(other)}: return None")
        code.add(f"return [{', '.join(reader.read(item.source) for item in self._inputs)}]")
        return code.define("weights")

    def _gone(self, error: Exception) -> GuardError:
        name = error.args[0] if error.args else "a tensor"
        return GuardError(
            f"A tensor of the model that was compiled in is gone ({type(error).__name__}: {name}). {_ADVICE}", path=name
        )


def _nothing_to_check() -> bool:
    return True


def _child_holders(module: nn.Module) -> list[dict[str, Any]]:
    return [part._modules for part in module.modules() if part._modules]  # noqa: SLF001 - as named_modules reads them


def is_weight(item: Input) -> bool:
    """Return whether an input belongs to the model and has one shape for all calls."""
    return not parse_source(item.source).is_call and all(type(d) is int for d in (*item.meta.shape, *item.meta.stride))


def make_problem(tensor: Any, meta: TensorMeta, device_index: int | None) -> str | None:
    """Return how a tensor differs from what was traced ("has dtype float16 and ..."), sizes and strides apart, or None.

    Args:
        tensor: Anything.
        meta: What was traced.
        device_index: What a device without an index means; None: any.
    """
    if type(tensor) is not torch.Tensor and type(tensor) is not nn.Parameter:
        return f"is of type {type(tensor).__qualname__} and was traced as a plain tensor"
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout} and was traced as a strided tensor"
    if tensor.dtype is not dtype_of(meta.dtype):
        return f"has dtype {dtype_text(tensor.dtype)} and was traced with {meta.dtype}"
    wanted = device_of(meta.device, device_index)
    if tensor.device.type != wanted.type or (wanted.index is not None and tensor.device != wanted):
        return f"is on {tensor.device} and must be on {wanted}"
    if tensor.is_neg() or tensor.is_conj():
        return "is a lazily conjugated or negated view, which must be resolved first"
    if tensor.dim() != len(meta.shape):
        return f"has {tensor.dim()} dimensions and was traced with {len(meta.shape)}"
    return None


def _shape_problem(tensor: torch.Tensor, meta: TensorMeta) -> str | None:
    if tuple(tensor.shape) != meta.shape:
        return f"has the shape {tuple(tensor.shape)} and was traced with {meta.shape}"
    if tensor.numel() and any(
        size > 1 and have != want for size, have, want in zip(tensor.shape, tensor.stride(), meta.stride, strict=True)
    ):
        return f"has the strides {tensor.stride()} and was traced with {meta.stride}"
    return None
