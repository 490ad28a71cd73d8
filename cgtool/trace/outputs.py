"""What the model returned, as a template that is filled again at load (the grammar stands in `cgtool.plan`).

Dynamo rebuilds the output with bytecode that is not shipped, so the template is read off one call: each leaf is matched by
identity with an output of the graph, an argument, or a tensor of the model. Sizes are matched by marks that the graph's
runner returns in their place.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cgtool.errors import TraceError
from cgtool.guards.literals import NoRuleError, encode_literal
from cgtool.guards.names import find_qualified, qualified_name
from cgtool.pieces import Json

#: Where marks for sizes begin: far from any size that a model could compute.
_MARK = 0x6367_746F_6F6C_0000


def mark_sizes(outputs: Sequence[Any]) -> list[Any]:
    """Return the graph's outputs with every integer replaced by a mark that tells its position."""
    return [_MARK + index if type(value) is int else value for index, value in enumerate(outputs)]


class TemplateReader:
    """Reads templates off values.

    Args:
        graph_outputs: What the graph's runner returned, sizes marked.
        known: Tensors that exist outside the graph, by id: their sources.
    """

    def __init__(self, graph_outputs: Sequence[Any], known: Mapping[int, str]) -> None:
        self._positions = {id(v): i for i, v in enumerate(graph_outputs) if isinstance(v, torch.Tensor)}
        self._marks = {v: i for i, v in enumerate(graph_outputs) if type(v) is int and v >= _MARK}
        self._known = known

    def read(self, value: Any, path: str = "output") -> Json:
        """Return the template of `value`; a graph output is `["out", position]` until the split names it.

        Raises:
            TraceError: A part of `value` cannot be built again from data; the message names it.
        """
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if type(value) is int and value in self._marks:
            return ["out", self._marks[value]]
        if type(value) in {list, tuple}:
            return [type(value).__name__, [self.read(item, f"{path}[{i}]") for i, item in enumerate(value)]]
        if type(value) is dict:
            return ["dict", [[encode_literal(k), self.read(v, f"{path}[{k!r}]")] for k, v in value.items()]]
        built = self._built(value, path)
        if built is not None:
            return built
        try:
            return ["const", encode_literal(value)]
        except NoRuleError as error:
            raise _cannot_rebuild(value, path) from error

    def _tensor(self, value: torch.Tensor, path: str) -> Json:
        if id(value) in self._positions:
            return ["out", self._positions[id(value)]]
        if id(value) in self._known:
            return ["source", self._known[id(value)]]
        msg = (
            f"{path} is a tensor that is neither computed by the graph nor passed in, so it cannot be found again at load. "
            "Return a tensor that forward computes."
        )
        raise TraceError(msg, path=path)

    def _built(self, value: Any, path: str) -> Json | None:
        """Read a value that its class builds: a structseq, a named tuple, a dataclass."""
        kind = type(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return ["call", _importable(value, path), [self.read(v, f"{path}[{i}]") for i, v in enumerate(value)], []]
        if isinstance(value, tuple) and kind.__module__ == "torch.return_types":
            items = [self.read(v, f"{path}[{i}]") for i, v in enumerate(value)]
            return ["call", _importable(value, path), [["tuple", items]], []]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = dataclasses.fields(value)
            if any(not f.init for f in fields):
                raise _cannot_rebuild(value, path)
            named = [[f.name, self.read(getattr(value, f.name), f"{path}.{f.name}")] for f in fields]
            return ["call", _importable(value, path), [], named]
        return None


def _importable(value: Any, path: str) -> str:
    name = qualified_name(type(value))
    try:
        found = find_qualified(name)
    except Exception as error:
        raise _cannot_rebuild(value, path) from error
    if found is not type(value):
        raise _cannot_rebuild(value, path)
    importlib.import_module(name.partition(":")[0])
    return name


def _cannot_rebuild(value: Any, path: str) -> TraceError:
    msg = (
        f"{path} is of type {qualified_name(type(value))}, which cannot be built again at load. Return tensors, numbers, "
        "lists, tuples, dicts, named tuples or dataclasses of a module that can be imported."
    )
    return TraceError(msg, path=path, actual=qualified_name(type(value)))


def place_outputs(template: Json, outputs: Sequence[Json]) -> Json:
    """Return `template` with each `["out", i]` replaced by what the split says of the graph's i-th output."""
    if not isinstance(template, list):
        return template
    if len(template) == 2 and template[0] == "out":  # noqa: PLR2004 - a pair
        return outputs[template[1]]
    word = template[0] if template else None
    if word in {"const", "source", "v", "expr"}:
        return template
    if word in {"list", "tuple"}:
        return [word, [place_outputs(item, outputs) for item in template[1]]]
    if word == "dict":
        return [word, [[key, place_outputs(item, outputs)] for key, item in template[1]]]
    _, name, args, kwargs = template
    return [
        "call",
        name,
        [place_outputs(item, outputs) for item in args],
        [[key, place_outputs(item, outputs)] for key, item in kwargs],
    ]
