"""Two plans: their guards, what their calls must bring, and their pieces. No torch here."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence

from msgspec.structs import replace

from cgtool.plan.grammar import canonical_json
from cgtool.plan.pieces import Json, Node, PieceGraph
from cgtool.plan.records import GuardTable, Plan, Step, Variant, source_words
from cgtool.plan.rendering import changed_words, expected_words, node_text, tensor_text, value_text
from cgtool.store.layout import short
from cgtool.toolkit.diff.records import Difference, changes, line_diff, matched, together, was_and_is

#: What tells most first. A value or a class that changed is what somebody changed; code that changed is next, because
#: functions that were traced before are not looked at any more where another took their place.
_KINDS = (
    *("value", "type", "named", "named_keys", "class", "length", "keys", "hooks", "tensor", "absent", "hasattr"),
    *("computed", "contains", "empty", "same", "apart"),
)
#: How many guards of one side alone are named, and how many pieces.
_MOST_GUARDS, _MOST_PIECES = 40, 8

_Place = tuple[str, str]
#: (source, kind) → what variants expect there, by its text.
_Guards = Mapping[_Place, Mapping[bytes, Json]]
#: A piece of the first side and the one in its place; None where a side has none.
_Pair = tuple[Step | None, Step | None]


def compare_plans(old: Plan, new: Plan) -> tuple[list[Difference], list[Difference]]:
    """Return which guards differ, the most telling first, and what differs in calls and pieces."""
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
    """Return what a variant is called: "default", "default num_tokens=1"."""
    return " ".join([name, *(f"{dim}={size}" for dim, size in fixed.items())])


def _guard(path: str, old: Json, new: Json, sentence: str) -> Difference:
    return Difference(what="guard", path=path, old=old, new=new, sentence=sentence)


def guard_differences(old: Plan, new: Plan) -> list[Difference]:
    """Return which guards differ, the most telling first.

    A guard whose expectation changed tells more than one that only one side has: those are what tracing another
    program left behind, and are told in at most two differences.
    """
    before, after = _guards_of(old), _guards_of(new)
    found = []
    for (source, kind), seen in before.items():
        now = after.get((source, kind), seen)
        if seen.keys() != now.keys():
            # Where variants expect different things, one side may have all that the other has, and more.
            first = next((value for text, value in seen.items() if text not in now), next(iter(seen.values())))
            second = next((value for text, value in now.items() if text not in seen), next(iter(now.values())))
            found.append(_guard(f"{source} {kind}", first, second, changed_words(source, kind, first, second)))
    found += [*_set_on_objects(before, after, gone=False), *_set_on_objects(after, before, gone=True)]
    found = together(sorted(found, key=_telling))
    told = {difference.path for difference in found}
    return [*found, *_alone(before, after, told, gone=True), *_alone(after, before, told, gone=False)]


def _guards_of(plan: Plan) -> dict[_Place, dict[bytes, Json]]:
    found: dict[_Place, dict[bytes, Json]] = {}
    seen: set[int] = set()
    for variant in plan.variants:
        table = variant.model_guards
        if isinstance(table, GuardTable):  # groups that variants share are read once
            for group in table.groups:
                if id(group) not in seen:
                    seen.add(id(group))
                    text = canonical_json(group.expected)
                    for source in group.sources:
                        found.setdefault((table.texts.whole[source], group.kind), {})[text] = group.expected
        for guard in (*(() if isinstance(table, GuardTable) else table), *variant.call_guards):
            found.setdefault((guard.source, guard.kind), {})[canonical_json(guard.expected)] = guard.expected
    return found


def _set_on_objects(here: _Guards, there: _Guards, *, gone: bool) -> Iterator[Difference]:
    """Yield what is not set on an object itself `here`, and is looked at there as a value."""
    for (source, kind), seen in here.items():
        word, _, name = kind.partition(":")
        place = f"{source}.{name}", "value"
        if word != "absent" or (source, kind) in there or place not in there:
            continue
        if any(expected is True for expected in seen.values()):
            value = next(iter(there[place].values()))
            said, text = source_words(place[0]), expected_words("value", value)
            sentence = f"{said} is set on the object itself now, to {text}, and was not before"
            if gone:
                sentence = f"{said} was set on the object itself, to {text}, and is not now"
            yield Difference.of_one_side("guard", f"{place[0]} value", value, sentence, gone=gone)


def _telling(difference: Difference) -> tuple[bool, int, bool, int]:
    source, _, kind = difference.path.rpartition(" ")
    word = kind.partition(":")[0]
    # What is of the model itself tells more than what the model reaches in a module of torch, and a plain value more
    # than the function that closes over it.
    of_torch = source.startswith(("global:torch", "module:torch", "global:builtins"))
    is_function = isinstance(difference.old, list) and difference.old[:1] == ["function"]
    rank = _KINDS.index(word) if word in _KINDS else len(_KINDS)
    return of_torch, rank, is_function, sum(map(source.count, ".[|"))


def _alone(here: _Guards, there: _Guards, told: Collection[str], *, gone: bool) -> Iterator[Difference]:
    """Yield one difference for all that only one side looks at, the model's own guards first."""
    guards = [
        (source, kind, value)
        for (source, kind), seen in here.items()
        if (source, kind) not in there and f"{source} {kind}" not in told
        for value in seen.values()
    ]
    if not guards:
        return
    guards.sort(key=lambda guard: (not guard[0].startswith("self"), guard[1] == "code", guard[0].count(".")))
    lines = [_guard_words(*guard) for guard in guards[:_MOST_GUARDS]]
    count = f" (and {len(guards) - 1} more guards)" if len(guards) > 1 else ""
    when = "was looked at before and is not now" if gone else "is looked at now and was not before"
    source, kind, value = guards[0]
    sentence = f"{lines[0]} {when}{count}"
    yield Difference.of_one_side("guard", f"{source} {kind}", value, sentence, gone=gone, detail=lines)


def _guard_words(source: str, kind: str, expected: Json) -> str:
    word, _, argument = kind.partition(":")
    name = source_words(source)
    if word == "code":
        return f"the code of {name}"
    if word == "absent":
        return f"whether {name}.{argument} is set on the object itself"
    return f"{name}{f' ({word} {argument})' if argument else ''}: {expected_words(word, expected)}"


def changed_functions(old: Plan, new: Plan, module: str) -> str:
    """Return which functions of a module have other code, as "the code of A, B"; "" for none."""
    start = f"global:{module}:"
    named = [
        difference.path.removeprefix(start).rpartition(" ")[0]
        for difference in guard_differences(old, new)
        if difference.path.startswith(start) and difference.path.endswith(" code")
    ]
    return f"the code of {', '.join(dict.fromkeys(named))}" if named else ""


def _call_differences(pairs: Sequence[tuple[str, Variant, Variant]]) -> list[Difference]:
    """How variants differ in what a call must bring: sizes, their relations, tensors, the output's form."""
    groups: dict[tuple[str, str], tuple[Difference, list[str]]] = {}
    for name, old, new in pairs:
        for difference in _of_call(old, new):
            groups.setdefault((difference.path, difference.sentence), (difference, []))[1].append(name)
    return together(
        difference
        if len(names) == len(pairs)
        else replace(difference, sentence=f"{difference.sentence} (in {', '.join(names)})")
        for difference, names in groups.values()
    )


def _of_call(old: Variant, new: Variant) -> Iterator[Difference]:
    for name, was, now in changes(_sizes(old), _sizes(new)):
        yield _guard(name, was, now, was_and_is(f"the size {name}", was, now))
    tensors = [{item.source: tensor_text(item.meta) for item in side.inputs} for side in (old, new)]
    for name, was, now in changes(*tensors):
        yield _guard(name, was, now, was_and_is(f"the tensor {source_words(name)}", was, now))
    for relation in sorted(set(old.relations) ^ set(new.relations)):
        gone = relation in old.relations
        verb = "was asked of the sizes and is not now" if gone else "is asked of the sizes now"
        yield Difference.of_one_side("guard", "relations", relation, f"{relation} {verb}", gone=gone)
    if canonical_json(old.output) != canonical_json(new.output):
        yield _guard("output", old.output, new.output, "what the model returns is put together in another way")
    left = [{one.place: canonical_json(one.value).decode() for one in side.kept} for side in (old, new)]
    for place, was, now in changes(*left):
        yield _guard(place, was, now, f"calls leave something else in {source_words(place)} of the model")


def _sizes(variant: Variant) -> dict[str, str]:
    named = variant.dim_of
    return {
        named.get(symbol.name, symbol.name): f"{symbol.min} or more"
        if symbol.max is None
        else f"from {symbol.min} to {symbol.max}"
        for symbol in variant.symbols
    }


def _piece_differences(old: Plan, new: Plan, variants: tuple[Variant, Variant], name: str) -> Iterator[Difference]:
    """Yield which pieces of a variant differ, those of one change together."""
    groups: dict[tuple[str | None, str | None], list[_Pair]] = {}
    for was, now in _pairs(variants[0].steps, variants[1].steps):
        identities = was.graph if was else None, now.graph if now else None
        if identities[0] != identities[1]:
            groups.setdefault(identities, []).append((was, now))
    for identities, pairs in groups.items():
        called = pieces_text([step.piece for was, now in pairs if (step := was or now) is not None])
        graphs = [
            plan.graphs[identity] if identity else None for plan, identity in zip((old, new), identities, strict=True)
        ]
        what, detail = _changed(pairs, *graphs)
        both = " → ".join(short(identity) for identity in identities if identity)
        yield Difference(
            what="piece",
            path=f"{name}/{called}",
            old=identities[0],
            new=identities[1],
            sentence=f"{called} of {name} {what} ({both})",
            detail=detail,
        )


def _changed(pairs: Sequence[_Pair], old: PieceGraph | None, new: PieceGraph | None) -> tuple[str, tuple[str, ...]]:
    """What became of pieces that changed alike, and its lines."""
    (was, now), one = pairs[0], len(pairs) == 1
    if old is not None and new is not None:
        # Values keep the first side's numbers where they can.
        lines = line_diff(_lines(old, {}), _lines(new, _names(old, new)))
        count = sum(line.startswith(("-", "+")) for line in lines)
        cut = "the model is cut elsewhere: " if was and now and was.splitting != now.splitting else ""
        said = f"something else: {cut}{count} line{'s' * (count != 1)} of the graph differ"
        return f"{'does' if one else 'do'} {said}", lines
    graph = old or new
    lines = () if graph is None else tuple(_lines(graph, {}))
    return f"{'is' if one else 'are'} {'new' if old is None else 'gone now'}", lines


def pieces_text(indices: Sequence[int]) -> str:
    """Return "piece 2" or "pieces 2, 4, 6"; of more than eight the first and the last."""
    named = [str(index) for index in indices]
    if len(named) > _MOST_PIECES:
        named = [*named[:3], f"… {named[-1]} ({len(named)} in all)"]
    return f"piece{'s' if len(indices) > 1 else ''} {', '.join(named)}"


def _pairs(left: Sequence[Step], right: Sequence[Step]) -> Iterator[_Pair]:
    """Yield pieces that stand in one place; where the numbers of pieces differ, equal ones are aligned first."""
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


def _names(old: PieceGraph, new: PieceGraph) -> dict[str, str]:
    """What the second graph's values are called: as the first's where they correspond."""
    counts = len(old.inputs), len(new.inputs)
    tensors = [[tensor_text(meta) for meta in graph.inputs] for graph in (old, new)]
    nodes = [[_without_values(node) for node in graph.nodes] for graph in (old, new)]
    names = {f"%{right}": f"%{left}" for left, right in matched(*tensors)}
    names |= {f"%{counts[1] + right}": f"%{counts[0] + left}" for left, right in matched(*nodes)}
    if counts[0] == counts[1] and len(old.nodes) == len(new.nodes):
        # An operation that changed keeps its number where it stands between two that did not.
        taken = set(names.values())
        free = [f"%{i}" for i in range(counts[0] + len(old.nodes)) if f"%{i}" not in taken]
        names |= {name: name for name in free if name not in names}
    return {f"%{i}": f"%new{i}" for i in range(counts[1] + len(new.nodes))} | names


def _without_values(node: Node) -> str:
    return canonical_json([node.kind, node.target, _blank(list(node.args)), _blank(node.kwargs)]).decode()


def _blank(value: Json) -> Json:
    if isinstance(value, list):
        return [_blank(item) for item in value]
    if isinstance(value, dict):
        return {name: _blank(item) for name, item in value.items()}
    return "%" if isinstance(value, str) and value.startswith("%") else value


def _lines(graph: PieceGraph, names: Mapping[str, str]) -> list[str]:
    """A graph as lines: symbols, facts, inputs, operations, outputs, custom ops."""
    count = len(graph.inputs)
    lines = [
        f"{symbol.name}: {symbol.min} or more" if symbol.max is None else f"{symbol.name}: {symbol.min} to {symbol.max}"
        for symbol in graph.symbols
    ]
    lines += [f"fact: {fact}" for fact in graph.facts]
    lines += [f"input {value_text(f'%{i}', names)}: {tensor_text(meta)}" for i, meta in enumerate(graph.inputs)]
    lines += [f"one memory: {', '.join(value_text(f'%{i}', names) for i in group)}" for group in graph.aliases]
    lines += [f"{value_text(f'%{count + i}', names)} = {node_text(node, names)}" for i, node in enumerate(graph.nodes)]
    lines += [
        f"return {value_text(ref, names)}: {tensor_text(meta)}"
        for ref, meta in zip(graph.outputs, graph.results, strict=False)
    ]
    return [*lines, *(f"op {op}: {short(digest)}" for op, digest in sorted(graph.ops.items()))]
