"""Pieces of two variants, by identity, and the graphs of those that differ as a diff that people can read. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence

from cgtool.plan.grammar import canonical_json, digest_of
from cgtool.plan.pieces import Json, Node, PieceGraph
from cgtool.plan.records import Plan, Step, Variant
from cgtool.records import dataclass
from cgtool.store.layout import short
from cgtool.toolkit.diff.lines import line_diff, matched
from cgtool.toolkit.diff.records import Difference
from cgtool.toolkit.diff.words import tensor_words


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """A piece of the first side and the one in its place; None where a side has none."""

    old: Step | None
    new: Step | None


def piece_differences(old: Plan, new: Plan, variants: tuple[Variant, Variant], name: str) -> list[Difference]:
    """Return which pieces of a variant differ, those of one change together.

    Args:
        old: The first side's plan.
        new: The second side's.
        variants: The variant on both sides.
        name: What it is called.
    """
    groups: dict[tuple[str | None, str | None], list[_Pair]] = {}
    for pair in _pairs(*variants):
        identities = pair.old.graph if pair.old else None, pair.new.graph if pair.new else None
        if identities[0] != identities[1]:
            groups.setdefault(identities, []).append(pair)
    return [_difference(name, old, new, pairs) for pairs in groups.values()]


def pieces_text(indices: Sequence[int]) -> str:
    """Return "piece 2" or "pieces 2, 4, 6"; of more than eight the first and the last."""
    named = [str(index) for index in indices]
    if len(named) > 8:  # noqa: PLR2004 - what one line holds
        named = [*named[:3], f"… {named[-1]} ({len(named)} in all)"]
    return f"piece{'s' if len(indices) > 1 else ''} {', '.join(named)}"


def graph_diff(old: PieceGraph, new: PieceGraph) -> tuple[str, ...]:
    """Return how two graphs differ, a line for each operation; values keep the first side's numbers where they can."""
    names = _names(old, new)
    return line_diff(_lines(old, {}), _lines(new, names))


def _pairs(old: Variant, new: Variant) -> Iterator[_Pair]:
    """Yield pieces that stand in one place; where the numbers of pieces differ, equal ones are aligned first."""
    left, right = old.steps, new.steps
    if len(left) == len(right):
        yield from (_Pair(old=one, new=other) for one, other in zip(left, right, strict=True))
        return
    matcher = difflib.SequenceMatcher(None, [s.graph for s in left], [s.graph for s in right], autojunk=False)
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag == "equal":
            continue
        for offset in range(max(i_end - i, j_end - j)):
            yield _Pair(
                old=left[i + offset] if i + offset < i_end else None,
                new=right[j + offset] if j + offset < j_end else None,
            )


def _difference(name: str, old: Plan, new: Plan, pairs: Sequence[_Pair]) -> Difference:
    before, after = pairs[0].old, pairs[0].new
    indices = [step.piece for pair in pairs if (step := pair.old or pair.new) is not None]
    called = pieces_text(indices)
    detail: tuple[str, ...] = ()
    if before is not None and after is not None:
        detail = graph_diff(old.graphs[before.graph], new.graphs[after.graph])
        lines = sum(line.startswith(("-", "+")) for line in detail)
        verb = "does" if len(pairs) == 1 else "do"
        cut = "the model is cut elsewhere: " if before.splitting != after.splitting else ""
        what = f"{verb} something else: {cut}{lines} {'line' if lines == 1 else 'lines'} of the graph differ"
    elif before is not None:
        what = "is gone now" if len(pairs) == 1 else "are gone now"
        detail = tuple(_lines(old.graphs[before.graph], {}))
    else:
        what = "is new" if len(pairs) == 1 else "are new"
        detail = tuple(_lines(new.graphs[after.graph], {})) if after is not None else ()
    return Difference(
        what="piece",
        path=f"{name}/{called}",
        old=None if before is None else before.graph,
        new=None if after is None else after.graph,
        sentence=f"{called} of {name} {what} ({_identities(before, after)})",
        detail=detail,
    )


def _identities(before: Step | None, after: Step | None) -> str:
    return " → ".join(short(step.graph) for step in (before, after) if step is not None)


def _names(old: PieceGraph, new: PieceGraph) -> dict[str, str]:
    """Return what the second graph's values are called: as the first's where they correspond."""
    names: dict[str, str] = {}
    counts = len(old.inputs), len(new.inputs)
    tensors = [[tensor_words(meta) for meta in graph.inputs] for graph in (old, new)]
    nodes = [[_shape_of(node) for node in graph.nodes] for graph in (old, new)]
    for left, right in matched(*tensors):
        names[f"%{right}"] = f"%{left}"
    for left, right in matched(*nodes):
        names[f"%{counts[1] + right}"] = f"%{counts[0] + left}"
    # An operation that changed keeps its number where it stands between two that did not.
    free = [f"%{i}" for i in range(counts[0] + len(old.nodes)) if f"%{i}" not in set(names.values())]
    if counts[0] == counts[1] and len(old.nodes) == len(new.nodes):
        names.update({name: name for name in free if name not in names})
    for position in range(counts[1] + len(new.nodes)):
        names.setdefault(f"%{position}", f"%new{position}")
    return names


def _shape_of(node: Node) -> str:
    """Return a node without the values that it is given."""
    return canonical_json([node.kind, node.target, _blank(list(node.args)), _blank(node.kwargs)]).decode()


def _blank(value: Json) -> Json:
    if isinstance(value, list):
        return [_blank(item) for item in value]
    if isinstance(value, dict):
        return {name: _blank(item) for name, item in value.items()}
    return "%" if isinstance(value, str) and value.startswith("%") else value


def _lines(graph: PieceGraph, names: Mapping[str, str]) -> list[str]:
    """Return a graph as lines: symbols, facts, inputs, operations, outputs, custom ops."""
    count = len(graph.inputs)
    lines = [
        f"{symbol.name}: {symbol.min} or more" if symbol.max is None else f"{symbol.name}: {symbol.min} to {symbol.max}"
        for symbol in graph.symbols
    ]
    lines += [f"fact: {fact}" for fact in graph.facts]
    lines += [f"input {_name(f'%{i}', names)}: {tensor_words(meta)}" for i, meta in enumerate(graph.inputs)]
    lines += [f"one memory: {', '.join(_name(f'%{i}', names) for i in group)}" for group in graph.aliases]
    lines += [f"{_name(f'%{count + i}', names)} = {_call(node, names)}" for i, node in enumerate(graph.nodes)]
    lines += [
        f"return {_name(ref, names)}: {tensor_words(meta)}"
        for ref, meta in zip(graph.outputs, graph.results, strict=False)
    ]
    return [*lines, *(f"op {op}: {short(digest)}" for op, digest in sorted(graph.ops.items()))]


def _call(node: Node, names: Mapping[str, str]) -> str:
    given = [_value(arg, names) for arg in node.args]
    given += [f"{name}={_value(value, names)}" for name, value in sorted(node.kwargs.items())]
    if node.kind == "size" and given:
        return f"{given[0]}.size({', '.join(given[1:])})"
    if node.kind == "method":
        return f"{given[0]}.{node.target}({', '.join(given[1:])})" if given else f"{node.target}()"
    return f"{node.target}({', '.join(given)})"


def _value(value: Json, names: Mapping[str, str]) -> str:
    if isinstance(value, str):
        return _name(value, names)
    if isinstance(value, list):
        return f"[{', '.join(_value(item, names) for item in value)}]"
    if isinstance(value, dict) and len(value) == 1:
        return _tagged(*next(iter(value.items())), names)
    return str(value)


def _tagged(tag: str, body: Json, names: Mapping[str, str]) -> str:
    if tag == "t" and isinstance(body, list):
        return f"({', '.join(_value(item, names) for item in body)})"
    if tag == "s":
        return repr(body)
    if tag == "ellipsis":
        return "..."
    if tag == "slice" and isinstance(body, list):
        return ":".join("" if item is None else _value(item, names) for item in body)
    if tag == "const":
        return f"a constant, {short(digest_of(body))}"
    return str(body)


def _name(ref: str, names: Mapping[str, str]) -> str:
    return names.get(ref, ref)
