"""Compares two plans: their guards, the requirements on calls, and their pieces. Must not import torch."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence

from msgspec.structs import replace

from cgtool.plan.grammar import canonical_json
from cgtool.plan.pieces import Json, PieceGraph
from cgtool.plan.records import GuardTable, Plan, Step, Variant, source_words
from cgtool.plan.rendering import changed_words, expected_words, node_text, tensor_text, value_text
from cgtool.store.layout import short
from cgtool.toolkit.diff.records import Difference, changes, line_diff, match_lines, merge_alike, was_and_is

#: Kinds of guards, likely root causes first: somebody changed a value or a class. Guards on code come last, because
#: they also differ if another function is traced instead.
_KINDS = (
    *("value", "type", "named", "named_keys", "class", "length", "keys", "hooks", "tensor", "absent", "hasattr"),
    *("computed", "contains", "empty", "same", "apart"),
)
#: Maximum number of one-sided guards and of pieces that are listed.
_MAX_GUARDS, _MAX_PIECES = 40, 8

_Place = tuple[str, str]
#: (source, kind) → the expected values of all variants, by their JSON.
_Guards = Mapping[_Place, Mapping[bytes, Json]]
#: A piece of the first side and its counterpart; None if a side has none.
_Pair = tuple[Step | None, Step | None]


def compare_plans(old: Plan, new: Plan) -> tuple[list[Difference], list[Difference]]:
    """Return the differences in guards, root causes first, and those in calls and pieces."""
    guards = guard_differences(old, new)
    for path, was, now in (("plan.method", old.method, new.method), ("plan.qualname", old.qualname, new.qualname)):
        if was != now:
            guards.append(_guard(path, was, now, was_and_is(path, was, now)))
    olds, news = (
        {variant_name(variant.name, variant.fixed): variant for variant in side.variants} for side in (old, new)
    )
    pairs = [(name, variant, news[name]) for name, variant in olds.items() if name in news]
    rest = _call_differences(pairs)
    for name, before, after in pairs:
        rest += _piece_differences(old, new, (before, after), name)
    return guards, rest


def variant_name(name: str, fixed: Mapping[str, int]) -> str:
    """Return the name of a variant in messages: "default", "default num_tokens=1"."""
    return " ".join([name, *(f"{dim}={size}" for dim, size in fixed.items())])


def _guard(path: str, old: Json, new: Json, sentence: str) -> Difference:
    return Difference(what="guard", path=path, old=old, new=new, sentence=sentence)


def guard_differences(old: Plan, new: Plan) -> list[Difference]:
    """Return the differences in guards, root causes first.

    Guards whose expected values differ come first. Guards that only one side has come from tracing another program;
    they are summarized in at most two differences.
    """
    before, after = _guards_of(old), _guards_of(new)
    found = []
    for (source, kind), was in before.items():
        now = after.get((source, kind), was)
        if was.keys() != now.keys():
            # Show values that only one side expects; if variants expect several, one side may have all of the other's.
            first = next((value for text, value in was.items() if text not in now), next(iter(was.values())))
            second = next((value for text, value in now.items() if text not in was), next(iter(now.values())))
            found.append(_guard(f"{source} {kind}", first, second, changed_words(source, kind, first, second)))
    found += [*_attributes_set(before, after, gone=False), *_attributes_set(after, before, gone=True)]
    found = merge_alike(sorted(found, key=_causal_order))
    reported = {difference.path for difference in found}
    return [
        *found,
        *_one_sided_guards(before, after, reported, gone=True),
        *_one_sided_guards(after, before, reported, gone=False),
    ]


def _guards_of(plan: Plan) -> dict[_Place, dict[bytes, Json]]:
    guards: dict[_Place, dict[bytes, Json]] = {}
    seen: set[int] = set()
    for variant in plan.variants:
        table = variant.model_guards
        if isinstance(table, GuardTable):  # read groups that variants share once
            for group in table.groups:
                if id(group) not in seen:
                    seen.add(id(group))
                    text = canonical_json(group.expected)
                    for source in group.sources:
                        guards.setdefault((table.texts.whole[source], group.kind), {})[text] = group.expected
        for guard in (*(() if isinstance(table, GuardTable) else table), *variant.call_guards):
            guards.setdefault((guard.source, guard.kind), {})[canonical_json(guard.expected)] = guard.expected
    return guards


def _attributes_set(here: _Guards, there: _Guards, *, gone: bool) -> Iterator[Difference]:
    """Yield the attributes that `here` requires to be absent from an object and whose value `there` guards."""
    for (source, kind), values in here.items():
        base, _, name = kind.partition(":")
        place = f"{source}.{name}", "value"
        if base != "absent" or (source, kind) in there or place not in there:
            continue
        if any(expected is True for expected in values.values()):
            value = next(iter(there[place].values()))
            attribute, text = source_words(place[0]), expected_words("value", value)
            sentence = f"{attribute} is set on the object itself now, to {text}, and was not before"
            if gone:
                sentence = f"{attribute} was set on the object itself, to {text}, and is not now"
            yield Difference.of_one_side("guard", f"{place[0]} value", value, sentence, gone=gone)


def _causal_order(difference: Difference) -> tuple[bool, int, bool, int]:
    """Sort key: the model before modules of torch, plain values before functions that close over them."""
    source, _, kind = difference.path.rpartition(" ")
    base = kind.partition(":")[0]
    of_torch = source.startswith(("global:torch", "module:torch", "global:builtins"))
    is_function = isinstance(difference.old, list) and difference.old[:1] == ["function"]
    rank = _KINDS.index(base) if base in _KINDS else len(_KINDS)
    return of_torch, rank, is_function, sum(map(source.count, ".[|"))


def _one_sided_guards(here: _Guards, there: _Guards, reported: Collection[str], *, gone: bool) -> Iterator[Difference]:
    """Yield one difference that summarizes the guards of `here` alone, the model's own first."""
    guards = [
        (source, kind, value)
        for (source, kind), values in here.items()
        if (source, kind) not in there and f"{source} {kind}" not in reported
        for value in values.values()
    ]
    if not guards:
        return
    guards.sort(key=lambda guard: (not guard[0].startswith("self"), guard[1] == "code", guard[0].count(".")))
    lines = [_guard_text(*guard) for guard in guards[:_MAX_GUARDS]]
    count = f" (and {len(guards) - 1} more guards)" if len(guards) > 1 else ""
    change = "was guarded before and is not now" if gone else "is guarded now and was not before"
    source, kind, value = guards[0]
    sentence = f"{lines[0]} {change}{count}"
    yield Difference.of_one_side("guard", f"{source} {kind}", value, sentence, gone=gone, detail=lines)


def _guard_text(source: str, kind: str, expected: Json) -> str:
    base, _, argument = kind.partition(":")
    name = source_words(source)
    if base == "code":
        return f"the code of {name}"
    if base == "absent":
        return f"whether {name}.{argument} is set on the object itself"
    return f"{name}{f' ({base} {argument})' if argument else ''}: {expected_words(base, expected)}"


def changed_functions(old: Plan, new: Plan, module: str) -> str:
    """Return the functions of a module whose code differs, as "the code of A, B"; "" if there are none."""
    prefix = f"global:{module}:"
    names = [
        difference.path.removeprefix(prefix).rpartition(" ")[0]
        for difference in guard_differences(old, new)
        if difference.path.startswith(prefix) and difference.path.endswith(" code")
    ]
    return f"the code of {', '.join(dict.fromkeys(names))}" if names else ""


def _call_differences(pairs: Sequence[tuple[str, Variant, Variant]]) -> list[Difference]:
    """Return how variants differ in their calls: sizes, relations between sizes, tensors, structure of the output."""
    groups: dict[tuple[str, str], tuple[Difference, list[str]]] = {}
    for name, old, new in pairs:
        for difference in _variant_call_differences(old, new):
            groups.setdefault((difference.path, difference.sentence), (difference, []))[1].append(name)
    return merge_alike(
        difference
        if len(names) == len(pairs)
        else replace(difference, sentence=f"{difference.sentence} (in {', '.join(names)})")
        for difference, names in groups.values()
    )


def _variant_call_differences(old: Variant, new: Variant) -> Iterator[Difference]:
    for name, was, now in changes(_sizes(old), _sizes(new)):
        yield _guard(name, was, now, was_and_is(f"the size {name}", was, now))
    tensors = [{item.source: tensor_text(item.meta) for item in side.inputs} for side in (old, new)]
    for name, was, now in changes(*tensors):
        yield _guard(name, was, now, was_and_is(f"the tensor {source_words(name)}", was, now))
    for relation in sorted(set(old.relations) ^ set(new.relations)):
        gone = relation in old.relations
        change = "was required of the sizes and is not now" if gone else "is required of the sizes now"
        yield Difference.of_one_side("guard", "relations", relation, f"{relation} {change}", gone=gone)
    if canonical_json(old.output) != canonical_json(new.output):
        yield _guard("output", old.output, new.output, "the structure of the model's output has changed")
    kept = [{write.place: canonical_json(write.value).decode() for write in side.kept} for side in (old, new)]
    for place, was, now in changes(*kept):
        yield _guard(place, was, now, f"calls leave a different value in {source_words(place)} of the model")


def _sizes(variant: Variant) -> dict[str, str]:
    names = variant.dim_of
    return {
        names.get(symbol.name, symbol.name): f"{symbol.min} or more"
        if symbol.max is None
        else f"from {symbol.min} to {symbol.max}"
        for symbol in variant.symbols
    }


def _piece_differences(old: Plan, new: Plan, variants: tuple[Variant, Variant], name: str) -> Iterator[Difference]:
    """Yield the pieces of a variant that differ; pieces with the same change are one difference."""
    groups: dict[tuple[str | None, str | None], list[_Pair]] = {}
    for was, now in _pairs(variants[0].steps, variants[1].steps):
        identities = was.graph if was else None, now.graph if now else None
        if identities[0] != identities[1]:
            groups.setdefault(identities, []).append((was, now))
    for identities, pairs in groups.items():
        pieces = pieces_text([step.piece for was, now in pairs if (step := was or now) is not None])
        graphs = [
            plan.graphs[identity] if identity else None for plan, identity in zip((old, new), identities, strict=True)
        ]
        change, detail = _piece_change(pairs, *graphs)
        both = " → ".join(short(identity) for identity in identities if identity)
        yield Difference(
            what="piece",
            path=f"{name}/{pieces}",
            old=identities[0],
            new=identities[1],
            sentence=f"{pieces} of {name} {change} ({both})",
            detail=detail,
        )


def _piece_change(
    pairs: Sequence[_Pair], old: PieceGraph | None, new: PieceGraph | None
) -> tuple[str, tuple[str, ...]]:
    """Describe the change of pieces that changed alike; return the text and lines of detail."""
    (was, now), single = pairs[0], len(pairs) == 1
    if old is not None and new is not None:
        # The new graph's values keep the old graph's numbers where possible.
        lines = line_diff(_graph_lines(old, {}), _graph_lines(new, _value_names(old, new)))
        count = sum(line.startswith(("-", "+")) for line in lines)
        split = "the model is split elsewhere: " if was and now and was.splitting != now.splitting else ""
        change = f"changed: {split}{count} line{'s' * (count != 1)} of the graph differ{'s' * (count == 1)}"
        return f"{'has' if single else 'have'} {change}", lines
    graph = old or new
    lines = () if graph is None else tuple(_graph_lines(graph, {}))
    return f"{'is' if single else 'are'} {'new' if old is None else 'gone now'}", lines


def pieces_text(indices: Sequence[int]) -> str:
    """Return "piece 2" or "pieces 2, 4, 6"; more than eight are abbreviated."""
    names = [str(index) for index in indices]
    if len(names) > _MAX_PIECES:
        names = [*names[:3], f"… {names[-1]} ({len(names)} in all)"]
    return f"piece{'s' if len(indices) > 1 else ''} {', '.join(names)}"


def _pairs(left: Sequence[Step], right: Sequence[Step]) -> Iterator[_Pair]:
    """Pair pieces by position; if the sides have different numbers of pieces, align equal pieces first."""
    if len(left) == len(right):
        yield from zip(left, right, strict=True)
        return
    matcher = difflib.SequenceMatcher(None, [s.graph for s in left], [s.graph for s in right], autojunk=False)
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        for offset in range(max(i_end - i, j_end - j) if tag != "equal" else 0):
            yield (
                left[i + offset] if i + offset < i_end else None,
                right[j + offset] if j + offset < j_end else None,
            )


def _value_names(old: PieceGraph, new: PieceGraph) -> dict[str, str]:
    """Return display names for the new graph's values: those of the old graph's corresponding values."""
    counts = len(old.inputs), len(new.inputs)
    tensors = [[tensor_text(meta) for meta in graph.inputs] for graph in (old, new)]
    nodes = [
        [canonical_json([n.kind, n.target, _blank(list(n.args)), _blank(n.kwargs)]).decode() for n in graph.nodes]
        for graph in (old, new)
    ]
    names = {f"%{right}": f"%{left}" for left, right in match_lines(*tensors)}
    names |= {f"%{counts[1] + right}": f"%{counts[0] + left}" for left, right in match_lines(*nodes)}
    if counts[0] == counts[1] and len(old.nodes) == len(new.nodes):
        # With equal numbers of operations, one that changed in place keeps its number.
        taken = set(names.values())
        free = [f"%{i}" for i in range(counts[0] + len(old.nodes)) if f"%{i}" not in taken]
        names |= {name: name for name in free if name not in names}
    return {f"%{i}": f"%new{i}" for i in range(counts[1] + len(new.nodes))} | names


def _blank(value: Json) -> Json:
    """Replace the names of values, so that operations can be compared without them."""
    if isinstance(value, list):
        return [_blank(item) for item in value]
    if isinstance(value, dict):
        return {name: _blank(item) for name, item in value.items()}
    return "%" if isinstance(value, str) and value.startswith("%") else value


def _graph_lines(graph: PieceGraph, names: Mapping[str, str]) -> list[str]:
    """Render a graph as lines: symbols, facts, inputs, aliases, operations, outputs, custom ops."""
    count = len(graph.inputs)
    lines = [
        f"{symbol.name}: {symbol.min} or more" if symbol.max is None else f"{symbol.name}: {symbol.min} to {symbol.max}"
        for symbol in graph.symbols
    ]
    lines += [f"fact: {fact}" for fact in graph.facts]
    lines += [f"input {value_text(f'%{i}', names)}: {tensor_text(meta)}" for i, meta in enumerate(graph.inputs)]
    lines += [f"shared memory: {', '.join(value_text(f'%{i}', names) for i in group)}" for group in graph.aliases]
    lines += [f"{value_text(f'%{count + i}', names)} = {node_text(node, names)}" for i, node in enumerate(graph.nodes)]
    lines += [
        f"return {value_text(ref, names)}: {tensor_text(meta)}"
        for ref, meta in zip(graph.outputs, graph.results, strict=False)
    ]
    return [*lines, *(f"op {op}: {short(digest)}" for op, digest in sorted(graph.ops.items()))]
