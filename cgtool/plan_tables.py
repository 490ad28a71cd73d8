"""How a plan is written without saying anything twice: tables, runs of numbers, and families of graphs.

A model of many layers repeats itself, so a plan names each source, tensor and graph once and speaks of it by number.
Must not import torch. Grammar::

    texts    = {"parents": [parent...], "ends": [text...]}
               text n is that of its parent, an earlier one (-1: none), and an end: 0 and ".eps"
    runs     = [n | [first, step, count]...]       17, 26, 35, ... as [17, 9, 80]
    guards   = [[kind, expected, runs]...]         the same fact about each of these texts, which are sources
    graphs   = {"shapes": [graph with holes...], "members": [[identity, shape, [value...]]...]}
    hole     = {"hole": n}             stands in a node's arguments for the n-th value of a member
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from cgtool.digests import canonical_json
from cgtool.pieces import Json, PieceGraph

#: A run is written as such where it is shorter than its members.
_MIN_RUN = 4


_WITH_INDEX = ("|keys", "|values", "|list")


class TextTable:
    """Texts by number while a plan is written; a text shares its beginning with an earlier one."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self.parents: list[int] = []
        self.ends: list[str] = []

    def to_json(self) -> Json:
        """Return the table as JSON; flat, because a list for each text would cost its reader more than the text."""
        return {"parents": self.parents, "ends": self.ends}

    def number(self, text: str) -> int:
        """Return the number of `text`, which is added where it is new."""
        if text not in self._numbers:
            cut = max(text.rfind("."), text.rfind("["), text.rfind("|"))
            if text[:cut].endswith(_WITH_INDEX):  # `|keys[0]` is one step
                cut = text.rfind("|")
            parent = self.number(text[:cut]) if cut > 0 else -1
            self.parents.append(parent)
            self.ends.append(text[max(cut, 0) :])
            self._numbers[text] = len(self.ends) - 1
        return self._numbers[text]


class Texts:
    """Texts by number, as they were read.

    Args:
        data: As `TextTable.to_json` returned it.

    Raises:
        ValueError: A text speaks of a later one, or is none.
    """

    def __init__(self, data: Json) -> None:
        self.parents: list[int] = data["parents"]
        self.ends: list[str] = data["ends"]
        self.whole: list[str] = []
        for number, (parent, end) in enumerate(zip(self.parents, self.ends, strict=True)):
            if type(parent) is not int or not -1 <= parent < number or type(end) is not str:
                msg = f"text {number} of the plan is no text"
                raise ValueError(msg)
            self.whole.append(self.whole[parent] + end if parent >= 0 else end)


def to_runs(numbers: Iterable[int]) -> Json:
    """Return numbers with runs of equal steps written short."""
    given = list(numbers)
    runs: list[Json] = []
    start = 0
    while start < len(given):
        end = start + 1
        step = given[end] - given[start] if end < len(given) else 0
        while end < len(given) and given[end] - given[end - 1] == step:
            end += 1
        if end - start >= _MIN_RUN:
            runs.append([given[start], step, end - start])
            start = end
        else:
            runs.append(given[start])
            start += 1
    return runs


def from_runs(runs: Json, limit: int) -> list[int]:
    """Return the numbers that `to_runs` wrote.

    Raises:
        ValueError: A number is no integer, or not from 0 to `limit` - 1.
    """
    numbers: list[int] = []
    for run in runs:
        if type(run) is int:
            numbers.append(run)
            continue
        first, step, count = run
        if not type(first) is type(step) is type(count) is int or count > limit:
            raise _no_number(run)
        numbers.extend([first + step * i for i in range(count)])
    if numbers and not (min(numbers) >= 0 and max(numbers) < limit):
        raise _no_number(runs)
    return numbers


def _no_number(data: Json) -> ValueError:
    return ValueError(f"{str(data)[:80]} counts past what the plan holds")


class Graphs(Mapping[str, PieceGraph]):
    """The graphs of a plan by identity; those that differ in constants alone share one shape, with holes for these.

    Args:
        data: As `write_graphs` returned it.

    Raises:
        ValueError: A member speaks of a shape that is not there.
    """

    def __init__(self, data: Json) -> None:
        self._shapes = [PieceGraph.from_json(graph) for graph in data["shapes"]]
        self._data: list[Json] = data["shapes"]
        self._members: dict[str, tuple[int, tuple[Json, ...]]] = {}
        self._whole: dict[str, PieceGraph] = {}
        for identity, shape, values in data["members"]:
            if type(identity) is not str or type(shape) is not int or not 0 <= shape < len(self._shapes):
                msg = f"the graph {str(identity)[:16]} of the plan has no shape"
                raise ValueError(msg)
            self._members[identity] = shape, tuple(values)

    def shape_of(self, identity: str) -> tuple[int, PieceGraph, tuple[Json, ...]]:
        """Return the number of a graph's shape, the shape, and the values that stand in its holes."""
        shape, values = self._members[identity]
        return shape, self._shapes[shape], values

    def face_of(self, identity: str) -> PieceGraph:
        """Return a graph that differs from the one of that identity in constants alone; quicker to have than that."""
        return self._shapes[self._members[identity][0]]

    def __getitem__(self, identity: str) -> PieceGraph:
        """Return the graph of that identity."""
        shape, values = self._members[identity]
        if not values:
            return self._shapes[shape]
        if identity not in self._whole:
            data = dict(self._data[shape])
            data["nodes"] = [_filled(node, values) for node in data["nodes"]]
            self._whole[identity] = PieceGraph.from_json(data)
        return self._whole[identity]

    def __contains__(self, identity: object) -> bool:
        """Return whether there is a graph of that identity."""
        return identity in self._members

    def __iter__(self) -> Iterator[str]:
        """Iterate over the identities."""
        return iter(self._members)

    def __len__(self) -> int:
        """Return how many graphs there are."""
        return len(self._members)


def write_graphs(graphs: Mapping[str, PieceGraph]) -> Json:
    """Return graphs as JSON, each shape once."""
    families: dict[bytes, list[tuple[str, Json, list[Json]]]] = {}
    for identity, graph in graphs.items():
        data, values = graph.to_json(), list[Json]()
        empty = {**data, "nodes": [_emptied(node, values) for node in data["nodes"]]}
        families.setdefault(canonical_json(empty), []).append((identity, data, values))
    shapes: list[Json] = []
    members: list[Json] = []
    for family in families.values():
        columns = list(zip(*(values for _, _, values in family), strict=True))
        same = [all(value == column[0] for value in column) for column in columns]
        _, first, values = family[0]
        holes = iter(range(len(same)))
        filling: list[Json] = [
            value if kept else {"hole": next(holes)} for value, kept in zip(values, same, strict=True)
        ]
        empty = {**first, "nodes": [_emptied(node, []) for node in first["nodes"]]}
        members += [
            [name, len(shapes), [v for v, kept in zip(own, same, strict=True) if not kept]] for name, _, own in family
        ]
        shapes.append({**empty, "nodes": [_filled(node, filling) for node in _numbered(empty["nodes"])]})
    return {"shapes": shapes, "members": members}


def _may_have_holes(node: Json) -> bool:
    kind, target, *_ = node
    return bool(kind == "function" and target != "builtins.getattr")


def _emptied(node: Json, values: list[Json]) -> Json:
    """Return a node with a hole for each constant, which is added to `values`."""
    if not _may_have_holes(node):
        return node

    def empty(value: Json) -> Json:
        if type(value) is int or (type(value) is dict and list(value) in (["s"], ["f"])):
            values.append(value)
            return {"hole": 0}
        if type(value) is list:
            return [empty(item) for item in value]
        if type(value) is dict and list(value) in (["t"], ["d"]):
            return {tag: empty(body) for tag, body in value.items()}
        return value

    kind, target, args, kwargs = node
    return [kind, target, [empty(value) for value in args], {name: empty(kwargs[name]) for name in sorted(kwargs)}]


def _numbered(nodes: Json) -> Json:
    """Return nodes whose holes are numbered in their order."""
    count = itertools.count()
    return [_mapped(node, lambda _: {"hole": next(count)}) for node in nodes]


def _filled(node: Json, values: Sequence[Json]) -> Json:
    """Return a node whose holes hold their values."""
    return _mapped(node, lambda hole: values[hole["hole"]])


def _mapped(node: Json, change: Callable[[Json], Json]) -> Json:
    """Return a node with what `change` makes of each hole."""

    def mapped(value: Json) -> Json:
        if type(value) is list:
            return [mapped(item) for item in value]
        if type(value) is dict:
            return change(value) if list(value) == ["hole"] else {tag: mapped(body) for tag, body in value.items()}
        return value

    kind, target, args, kwargs = node
    return [kind, target, [mapped(value) for value in args], {name: mapped(value) for name, value in kwargs.items()}]
