"""The model's output as a template that a loaded model fills in (the grammar is in `cgtool.plan.records`).

Dynamo rebuilds the output with bytecode that is not shipped, so the template is derived from one call: each leaf is
matched by identity with an output of the graph, an argument, or a tensor of the model. Sizes are replaced by marker
values and matched by these, both those that the graph computes and those that the bytecode reads from arguments.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cgtool.errors import TraceError
from cgtool.guards.code import instance_dict
from cgtool.guards.kinds import NoRuleError, encode_literal
from cgtool.guards.sources import find_qualified, qualified_name
from cgtool.plan.pieces import Json, TensorMeta
from cgtool.trace._torch import NumpyArray, unset_fake_temporarily

#: The first markers for sizes: far larger than any size that a model could compute.
_MARK = 0x6367_746F_6F6C_0000
_SIZE_MARK = _MARK + (1 << 32)
#: The first size given to a tensor as a marker for its whole shape.
_ODD_SIZE = 1_000_000_007
#: The first marker for numbers that Dynamo reads from a zero-dimensional tensor; exact as float64.
_NUMBER_MARK = 0x0F_6367_746F_0000
#: Tags of literals that can be compared, but not rebuilt.
_COMPARED = ("array", "function", "group", "mesh", "module", "op", "plain", "typing", "union")


def mark_outputs(outputs: Sequence[Any]) -> list[Any]:
    """Return the graph's outputs with every integer replaced by a marker for its position.

    A zero-dimensional 64-bit tensor contains a marker too, because Dynamo may read a number from it.
    """
    return [_marked(index, value) for index, value in enumerate(outputs)]


def _marked(index: int, value: Any) -> Any:
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return _MARK + index
    if isinstance(value, torch.Tensor) and value.dim() == 0 and value.dtype in {torch.float64, torch.int64}:
        with unset_fake_temporarily():
            return torch.tensor(_NUMBER_MARK + index, dtype=value.dtype, device="cpu")
    return value


def _answer(marks: Sequence[int], dim: int | None = None) -> Any:
    return torch.Size(marks) if dim is None else marks[dim]


class MarkedSizes:
    """Makes tensors report markers as their sizes and strides while Dynamo's bytecode builds the output.

    An output such as `x.shape[0]` is not an output of the graph: the bytecode reads it from the argument.

    Args:
        tensors: The arguments with dynamic dimensions.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list({id(tensor): tensor for tensor in tensors}.values())
        self._held = [tensor.data for tensor in self._tensors]
        self._next = _SIZE_MARK
        #: mark → (tensor, "size" or "stride", dimension)
        self.marks: dict[int, tuple[torch.Tensor, str, int]] = {}
        #: odd shape → the tensor that has it
        self.shapes: dict[torch.Size, torch.Tensor] = {}

    def __enter__(self) -> None:
        """Leave the tensors unchanged until `begin`."""

    def __exit__(self, *_: object) -> None:
        """Restore the tensors."""
        for tensor, held in zip(self._tensors, self._held, strict=True):
            for word in ("size", "stride"):
                vars(tensor).pop(word, None)
            tensor.data = held

    def begin(self) -> None:
        """Make the tensors report markers, and give them shapes that no other tensor has."""
        for index, tensor in enumerate(self._tensors):
            # The elements share one memory location, so the huge shape takes no memory.
            shape = [_ODD_SIZE + index, *tensor.shape[1:]]
            tensor.data = torch.empty(1, dtype=tensor.dtype, device=tensor.device).expand(shape)
            self.shapes[torch.Size(shape)] = tensor
            for word in ("size", "stride"):
                marks = [self._mark(tensor, word, dim) for dim in range(tensor.dim())]
                setattr(tensor, word, functools.partial(_answer, marks))

    def _mark(self, tensor: torch.Tensor, word: str, dim: int) -> int:
        self._next += 1
        self.marks[self._next] = (tensor, word, dim)
        return self._next


class TemplateReader:
    """Derives templates from values.

    Args:
        graph_outputs: The graph's outputs, with markers.
        own: {id: attribute names} of these tensors before the bytecode ran.
        known: {id: source} of tensors and other objects that exist outside the graph.
        sizes: The markers of the arguments' sizes.
    """

    def __init__(
        self, graph_outputs: Sequence[Any], own: Mapping[int, set[str]], known: Mapping[int, str], sizes: MarkedSizes
    ) -> None:
        self._own = own
        self._positions = {id(v): i for i, v in enumerate(graph_outputs) if isinstance(v, torch.Tensor)}
        self._marks = {v: i for i, v in enumerate(graph_outputs) if type(v) is int and v >= _MARK}
        self._known = known
        self._sizes = sizes.marks
        self._shapes = sizes.shapes

    def read(self, value: Any, path: str = "output") -> Json:
        """Return the template of `value`; a graph output is `["out", position]` until the split names it.

        Raises:
            TraceError: A part of `value` cannot be rebuilt from data; the message names it.
        """
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if id(value) in self._known:
            return ["source", self._known[id(value)]]
        if type(value) in {int, float}:
            return self._number(value, path)
        if type(value) is torch.Size:
            return ["call", "torch:Size", [["list", self._shape(value, path)]], []]
        if type(value) in {list, tuple}:
            return [type(value).__name__, [self.read(item, f"{path}[{i}]") for i, item in enumerate(value)]]
        if type(value) is dict:
            return ["dict", [[encode_literal(k), self.read(v, f"{path}[{k!r}]")] for k, v in value.items()]]
        built = self._built(value, path)
        if built is not None:
            return built
        try:
            literal = encode_literal(value)
        except NoRuleError as error:
            raise _cannot_rebuild(value, path) from error
        # The literal of a dict subclass does not name the class, so a plain dict would be rebuilt.
        if _holds_mark(literal) or _names_code(literal) or isinstance(value, dict):
            raise _cannot_rebuild(value, path)
        return ["const", literal]

    def _shape(self, value: torch.Size, path: str) -> list[Json]:
        tensor = self._shapes.get(value)
        if tensor is not None and id(tensor) in self._known:
            return [["size", self._known[id(tensor)], dim] for dim in range(len(value))]
        return [self.read(item, f"{path}[{dim}]") for dim, item in enumerate(value)]

    def _number(self, value: float, path: str) -> Json:
        if value in self._marks:
            return ["out", self._marks[int(value)]]
        if value in self._sizes:
            tensor, word, dim = self._sizes[int(value)]
            if id(tensor) in self._known:
                return [word, self._known[id(tensor)], dim]
        if _NUMBER_MARK <= abs(value) < math.inf:  # a result of arithmetic on a marker
            msg = f"{path} is a number that depends on sizes or on data. Return a tensor, or compute it outside."
            raise TraceError(msg, path=path)
        return ["const", encode_literal(value)]

    def _tensor(self, value: torch.Tensor, path: str) -> Json:
        if id(value) in self._positions:
            set_here = vars(value).keys() - self._own[id(value)]
            if set_here:
                msg = f"{path} has the attribute {min(set_here)}, which forward sets; return it separately."
                raise TraceError(msg, path=path)
            return ["out", self._positions[id(value)]]
        if id(value) in self._known:
            return ["source", self._known[id(value)]]
        msg = (
            f"{path} is a tensor that is neither computed by the graph nor passed in, so a loaded model cannot find it."
            " Return a tensor that forward computes."
        )
        raise TraceError(msg, path=path)

    def _built(self, value: Any, path: str) -> Json | None:
        """Return the template of a structseq, a named tuple, an ordered dict or a dataclass; None for other values."""
        kind = type(value)
        _refuse_extra_attributes(value, path)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return ["call", _importable(value, path), [self.read(v, f"{path}[{i}]") for i, v in enumerate(value)], []]
        if isinstance(value, tuple) and kind.__module__ == "torch.return_types":
            items = [self.read(v, f"{path}[{i}]") for i, v in enumerate(value)]
            return ["call", _importable(value, path), [["tuple", items]], []]
        if kind is OrderedDict:
            pairs = [[["const", encode_literal(k)], self.read(v, f"{path}[{k!r}]")] for k, v in value.items()]
            return ["call", qualified_name(kind), [["list", [["tuple", pair] for pair in pairs]]], []]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = dataclasses.fields(value)
            if any(not f.init for f in fields):
                raise _cannot_rebuild(value, path)
            named = [[f.name, self.read(getattr(value, f.name), f"{path}.{f.name}")] for f in fields]
            return ["call", _importable(value, path), [], named]
        return None


def _refuse_extra_attributes(value: Any, path: str) -> None:
    """Refuse a value with attributes that rebuilding it from its fields would not set."""
    kind = type(value)
    is_rebuilt = dataclasses.is_dataclass(kind) or kind is OrderedDict or hasattr(kind, "_fields")
    attributes = list(instance_dict(value)) if is_rebuilt else []
    expected = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    for owner in kind.__mro__:
        code = getattr(vars(owner).get("__post_init__"), "__code__", None)
        expected.update(code.co_names if code is not None else ())
        expected.update(name for name, member in vars(owner).items() if isinstance(member, functools.cached_property))
    for name in attributes:
        if name not in expected:
            msg = f"{path} has the attribute {name}, which forward sets; make it a field, or return it separately."
            raise TraceError(msg, path=path)


def _holds_mark(literal: Json) -> bool:
    if isinstance(literal, list):
        return any(map(_holds_mark, literal))
    return type(literal) is int and literal >= _NUMBER_MARK


def _names_code(literal: Json) -> bool:
    """Return whether a literal contains an object of this process, such as a function, that cannot be rebuilt."""
    if not isinstance(literal, list):
        return False
    return literal[:1] in ([word] for word in _COMPARED) or any(map(_names_code, literal))


def _importable(value: Any, path: str) -> str:
    name = qualified_name(type(value))
    try:
        found = find_qualified(name)
    except Exception as error:  # a module's `__getattr__` can raise anything
        raise _cannot_rebuild(value, path) from error
    if found is not type(value):
        raise _cannot_rebuild(value, path)
    importlib.import_module(name.partition(":")[0])
    return name


def _cannot_rebuild(value: Any, path: str) -> TraceError:
    kind = "numpy:ndarray" if isinstance(value, NumpyArray) else qualified_name(type(value))
    msg = (
        f"{path} is of type {kind}, which a loaded model cannot rebuild. Return tensors, numbers,"
        " lists, tuples, dicts, named tuples or dataclasses of an importable module."
    )
    return TraceError(msg, path=path, actual=kind)


def place_outputs(template: Json, outputs: Sequence[Json], metas: Mapping[str, TensorMeta]) -> Json:
    """Return `template` in the plan's grammar.

    Args:
        template: As returned by `TemplateReader`: `["out", i]` is the graph's i-th output, `["size", source, dim]` and
            `["stride", source, dim]` are read from an argument.
        outputs: The template of each output of the graph, from the split.
        metas: The graph's inputs by source, in terms of the plan's symbols.
    """
    word = template[0]
    if word == "out":
        return outputs[template[1]]
    if word in {"size", "stride"}:
        meta = metas[template[1]]
        found = (meta.shape if word == "size" else meta.stride)[template[2]]
        return ["const", found] if type(found) is int else ["expr", found]
    if word in {"const", "source"}:
        return template

    def place(part: Json) -> Json:
        return place_outputs(part, outputs, metas)

    if word in {"list", "tuple"}:
        return [word, [place(item) for item in template[1]]]
    if word == "dict":
        return [word, [[key, place(item)] for key, item in template[1]]]
    _, name, args, kwargs = template
    return ["call", name, [place(item) for item in args], [[key, place(item)] for key, item in kwargs]]
