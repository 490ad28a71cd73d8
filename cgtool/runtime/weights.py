"""The tensors that belong to the model rather than to a call. They are read at every call, so they are never stale.

Changes after load, and their effects:

- A parameter or buffer is assigned, or its values are loaded: the next call reads the new tensor.
- Its dtype, shape, strides, device or class changes, including in place (`module.half()`): the next call raises.
- A submodule is replaced, removed or added, a list or dict of parameters grows, or tied weights are untied: the next
  call checks every guard on the model again, as `recheck()` does, and raises if one fails.
- A plain attribute (`layer.eps`), a hook, or the class or `training` flag of a submodule changes, two weights are tied,
  the children of a container are reordered, or a module's dict is replaced (`layer._buffers = {...}`,
  `layer.__dict__`): `recheck()` detects it, a call does not.
- Another thread changes weights during a call: the call reads each tensor once, at its start, so assignments
  (including `load_state_dict(assign=True)`) take effect for later calls. If several tensors are assigned while a call
  starts, it may read some of the old and some of the new. In-place writes (`load_state_dict`, `copy_`) may be seen
  partially.

A single call into C compares all tensors with those of the last full check, at about 0.1 µs per tensor.
"""

from __future__ import annotations

import itertools
import operator
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

from cgtool.errors import ArtifactError, GuardError
from cgtool.graph.values import device_of, dtype_of, dtype_text
from cgtool.guards.sources import OF_CALL, Place, Roots, SourceError
from cgtool.plan.pieces import TensorMeta
from cgtool.plan.records import Guard, Input, Plan, source_words
from cgtool.runtime import _torch as private
from cgtool.runtime.call_guards import Places, Reader
from cgtool.runtime.dispatch import ALIGNMENT, UNALIGNED_DEVICES
from cgtool.runtime.generate import Code, strides_matter

_ADVICE = "Undo the change, or warm the model again."

_INT = frozenset({int})
_PARAMETER_CONTAINERS = frozenset({nn.ParameterList, nn.ParameterDict})


class StructureChangedError(Exception):
    """The module tree differs from the one that was bound. Raised and caught within the runtime."""


class Weights:
    """The inputs of a variant that come from the model, in order.

    Args:
        module: The live model.
        method: The bound method that was traced.
        inputs: Inputs whose sources are not arguments and whose shapes have no symbols.
        same: Guards of the kind "same:..." on the model.
        device_index: The device that a device without an index refers to; None accepts any.

    Raises:
        GuardError: A tensor is gone or has a different dtype, shape or layout than when the model was compiled.
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
        self._kinds = [(item.meta.dtype, item.meta.device) for item in self._inputs]
        self._children = _child_dicts(module)
        self._children_then = [dict(children) for children in self._children]
        parts = itertools.chain.from_iterable(map(dict.values, self._children))
        self._lists = [part for part in parts if type(part) in _PARAMETER_CONTAINERS]
        self._lengths = list(map(len, self._lists))
        known = Places(module)
        self._same = _same_check(module, method, same, known, self._inputs)
        places = [known.place(item.source) or (_Live(module, method, item.source), "") for item in self._inputs]
        self._holders: list[Any] = [holder for holder, _ in places]
        self._keys = [key for _, key in places]
        #: By inference mode: the check in C, and whether any of the tensors requires grad.
        self._checks: dict[bool, tuple[Callable[..., bool], bool]] = {}
        try:
            self.read()
        except StructureChangedError as error:
            raise GuardError(f"Weights that were tied when the model was compiled no longer are. {_ADVICE}") from error

    def read(self) -> tuple[list[torch.Tensor], bool]:
        """Return the current tensors, and whether any of them requires grad.

        Raises:
            StructureChangedError: The module tree changed, or tied weights were untied.
            GuardError: A tensor is gone or has a different dtype, shape or layout than when the model was compiled.
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

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the source and the current tensor of each input. Raises as `read` does."""
        return zip([item.source for item in self._inputs], self.read()[0], strict=True)

    def _check(self, tensors: list[torch.Tensor]) -> bool:
        expected = {kind: (dtype_of(kind[0]), device_of(kind[1], self._device_index)) for kind in set(self._kinds)}
        for item, kind, tensor in zip(self._inputs, self._kinds, tensors, strict=True):
            if _matches(tensor, item.meta, *expected[kind]):
                continue
            problem = tensor_problem(tensor, item.meta, self._device_index) or _shape_problem(tensor, item.meta)
            if problem is not None:
                raise GuardError(
                    f"{source_words(item.source)} {problem}. {_ADVICE}",
                    path=source_words(item.source),
                    expected=repr(item.meta),
                    actual=repr(type(tensor)),
                )
        self._warn_if_misaligned(tensors)
        needs_grad = any(tensor.requires_grad for tensor in tensors)
        check = private.tensors_unchanged(tensors) if tensors else lambda: True
        self._checks[torch.is_inference_mode_enabled()] = (check, needs_grad)
        return needs_grad

    def _warn_if_misaligned(self, tensors: Sequence[torch.Tensor]) -> None:
        misaligned = [
            source_words(item.source)
            for item, tensor in zip(self._inputs, tensors, strict=True)
            if tensor.device.type not in UNALIGNED_DEVICES and tensor.data_ptr() % ALIGNMENT
        ]
        if misaligned:
            more = f" (and {len(misaligned) - 1} more)" if len(misaligned) > 1 else ""
            warnings.warn(
                f"The memory of {misaligned[0]}{more} is not aligned to {ALIGNMENT} bytes, so compiled code copies it "
                "at each call. Assign a clone of the tensor to avoid the copies.",
                stacklevel=2,
            )

    def _read(self) -> list[torch.Tensor] | None:
        # Lists and dicts compare their items by identity first, and modules compare by identity only.
        if self._children != self._children_then or list(map(len, self._lists)) != self._lengths or not self._same():
            return None
        return list(map(operator.getitem, self._holders, self._keys))

    def _gone(self, error: Exception) -> GuardError:
        name = error.args[0] if error.args else "a tensor"
        return GuardError(
            f"A tensor of the compiled model no longer exists ({type(error).__name__}: {name}). {_ADVICE}", path=name
        )


def _child_dicts(module: nn.Module) -> list[dict[str, Any]]:
    """Return the dict of children of every module that has children, each once."""
    found: dict[int, dict[str, Any]] = {}
    pending = [module]
    while pending:
        children = pending.pop()._modules  # noqa: SLF001 - `modules()` nests a generator per level, which costs ms
        if children and id(children) not in found:
            found[id(children)] = children
            pending += [child for child in children.values() if child is not None]
    return list(found.values())


class _Live:
    """Stands in for a dict if a tensor is not a parameter, buffer or attribute of a module: reads it by its source."""

    def __init__(self, module: nn.Module, method: Any, source: str) -> None:
        code = Code("tensor")
        code.add(f"return {Reader(code, module, method).read(source)}")
        self._function = code.define("read")

    def __getitem__(self, _key: str) -> Any:
        return self._function()


def _same_check(
    module: nn.Module, method: Any, same: Iterable[Guard], known: Places, inputs: Iterable[Input]
) -> Callable[[], bool]:
    """Return a function that checks the guards of the kind "same:..." on weights and on the objects that hold them.

    Guards on submodules are checked once, here, because `Weights` detects changes to the module tree. Other objects are
    checked by loads and `recheck()`.
    """
    code = Code("same")
    reader = Reader(code, module, method)
    weights = sorted(item.source for item in inputs)
    for guard in same:
        other = guard.kind.removeprefix("same:")
        if guard.source.startswith(OF_CALL) or other.startswith(OF_CALL):
            continue
        modules = known.module(guard.source), known.module(other)
        if None not in modules:
            if (modules[0] is modules[1]) is not guard.expected:
                return lambda: False
        elif any(_leads_to_one(name, weights) for name in (guard.source, other)):
            word = "is not" if guard.expected else "is"
            code.add(f"if {reader.read(guard.source)} {word} {reader.read(other)}: return False")
    code.add("return True")
    return code.define("same")


def _leads_to_one(source: str, ordered: Sequence[str]) -> bool:
    """Return whether a source is a prefix of any of the sorted sources."""
    place = bisect_left(ordered, source)
    return place < len(ordered) and ordered[place].startswith(source)


def is_weight(item: Input) -> bool:
    """Return whether an input belongs to the model and has the same shape in all calls."""
    return not item.source.startswith(OF_CALL) and _INT.issuperset(map(type, item.meta.dims))


def place_of(roots: Roots, text: str) -> Place:
    """Return the place in the model that a call assigns to: an attribute of an object, or an item of a dict.

    Raises:
        SourceError: The source is malformed, or the owner of the attribute is gone.
        ArtifactError: The place is not in the model.
    """
    place = Place(roots, text)
    is_code = isinstance(owner := place.owner(), ModuleType) or (callable(owner) and not isinstance(owner, nn.Module))
    if not text.startswith("self") or is_code:
        msg = f"The plan sets {source_words(text)}, which is not an attribute of the model. Warm the model again."
        raise ArtifactError(msg, path=text)
    return place


def tensor_problem(tensor: Any, meta: TensorMeta, device_index: int | None) -> str | None:
    """Return how a value differs from the traced tensor ("has dtype float16 and ..."), or None.

    Sizes and strides are not compared.

    Args:
        tensor: Any value.
        meta: The traced tensor.
        device_index: The device that a device without an index refers to; None accepts any.
    """
    if type(tensor) is not torch.Tensor and type(tensor) is not nn.Parameter:
        return f"is of type {type(tensor).__qualname__} and was traced as a plain tensor"
    if tensor.is_nested:
        return "is a nested tensor and was traced as a plain tensor"
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout} and was traced as a strided tensor"
    if tensor.dtype is not dtype_of(meta.dtype):
        return f"has dtype {dtype_text(tensor.dtype)} and was traced with {meta.dtype}"
    wanted = device_of(meta.device, device_index)
    if tensor.device.type != wanted.type or (wanted.index is not None and tensor.device != wanted):
        return f"is on {tensor.device} and must be on {wanted}"
    if tensor.is_neg() or tensor.is_conj():
        return "is a lazily conjugated or negated view; resolve it first (resolve_conj, resolve_neg)"
    if tensor.dim() != len(meta.shape):
        return f"has {tensor.dim()} dimensions and was traced with {len(meta.shape)}"
    return None


def _matches(tensor: Any, meta: TensorMeta, dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if a tensor is exactly as traced; False means that a closer look is needed."""
    return (
        (type(tensor) is nn.Parameter or type(tensor) is torch.Tensor)
        and tensor.layout is torch.strided
        and not tensor.is_nested  # a nested tensor has no shape
        and tensor.dtype is dtype
        and tensor.device == device
        and tensor.shape == meta.shape
        and tensor.stride() == meta.stride
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


def tensor_differences(roots: Roots, inputs: Iterable[Input]) -> Iterator[str]:
    """Yield how the model's tensors, which may be fake, differ from these traced inputs."""
    for item in {item.source: item for item in inputs}.values():
        name = source_words(item.source)
        try:
            tensor = roots.resolve(item.source)
        except SourceError as error:
            yield str(error)
            continue
        if not isinstance(tensor, torch.Tensor):
            yield f"{name} was a tensor when this was compiled and is a {type(tensor).__qualname__} now"
        elif dtype_text(tensor.dtype) != item.meta.dtype:
            yield f"{name} was {item.meta.dtype} when this was compiled and is {dtype_text(tensor.dtype)} now"
        elif tensor.device.type != device_of(item.meta.device, None).type:
            yield f"{name} was on {item.meta.device} when this was compiled and is on {tensor.device} now"
        elif (problem := _shape_problem(tensor, item.meta)) is not None:
            yield f"{name} {problem}"


def _shape_problem(tensor: torch.Tensor, meta: TensorMeta) -> str | None:
    if tuple(tensor.shape) != meta.shape:
        return f"has the shape {tuple(tensor.shape)} and was traced with {meta.shape}"
    if strides_matter(tensor, meta.stride):
        return f"has the strides {tensor.stride()} and was traced with {meta.stride}"
    return None


def first_index(module: nn.Module, plan: Plan) -> int | None:
    """Return the device index of the model's first tensor off the CPU; None if the plan uses only the CPU."""
    if all(item.meta.device == "cpu" for variant in plan.variants for item in variant.inputs):
        return None
    for tensors in (module.parameters(), module.buffers()):
        for tensor in tensors:
            if tensor.device.index is not None and tensor.device.type != "cpu":
                return tensor.device.index
    return None
