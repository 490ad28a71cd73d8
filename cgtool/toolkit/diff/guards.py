"""Guards of two plans, compared as (source, kind, what is expected). No torch here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from cgtool.plan.grammar import canonical_json
from cgtool.plan.pieces import Json
from cgtool.plan.records import Guard, GuardTable, Plan, Variant
from cgtool.plan.rendering import changed_words, expected_words, source_words
from cgtool.records import replace
from cgtool.toolkit.diff.records import Difference, together
from cgtool.toolkit.diff.words import tensor_words

#: What tells most first. A value or a class that changed is what somebody changed; code that changed is next, because
#: functions that were traced before are not looked at any more where another took their place.
_KINDS = (
    "value",
    "type",
    "named",
    "named_keys",
    "class",
    "length",
    "keys",
    "hooks",
    "tensor",
    "absent",
    "hasattr",
    "contains",
    "empty",
    "same",
    "apart",
)
#: How many guards of one side alone are named.
_MOST_NAMED = 40

#: (source, kind) → every guard of it, by what it expects.
_Guards = Mapping[tuple[str, str], Mapping[bytes, Guard]]


def guard_differences(old: Plan, new: Plan) -> list[Difference]:
    """Return which guards differ, the most telling first.

    A guard whose expectation changed tells more than one that only one side has: those are what tracing another
    program left behind, and are told in at most two differences.
    """
    before, after = _guards_of(old), _guards_of(new)
    changed = [
        _changed(before[place], after[place])
        for place in before
        if place in after and before[place].keys() != after[place].keys()
    ]
    changed += [_set_on_object(guard, after) for guard in _now_set(before, after)]
    changed += [_no_more_set(guard, before) for guard in _now_set(after, before)]
    found = together(sorted(changed, key=_telling))
    told = {difference.path for difference in found}
    return [*found, *_alone(before, after, told, gone=True), *_alone(after, before, told, gone=False)]


def _guards_of(plan: Plan) -> dict[tuple[str, str], dict[bytes, Guard]]:
    found: dict[tuple[str, str], dict[bytes, Guard]] = {}
    seen: set[int] = set()
    for variant in plan.variants:
        for guard, spelled in _each(variant, seen):
            found.setdefault((guard.source, guard.kind), {})[spelled] = guard
    return found


def _each(variant: Variant, seen: set[int]) -> Iterator[tuple[Guard, bytes]]:
    """Yield the guards of a variant with their expectations as text; groups that variants share are read once."""
    table = variant.model_guards
    if isinstance(table, GuardTable):
        for group in table.groups:
            if id(group) not in seen:
                seen.add(id(group))
                spelled = canonical_json(group.expected)
                for source in group.sources:
                    whole = table.texts.whole[source]
                    yield Guard(source=whole, kind=group.kind, expected=group.expected), spelled
    else:
        yield from ((guard, canonical_json(guard.expected)) for guard in table)
    yield from ((guard, canonical_json(guard.expected)) for guard in variant.call_guards)


def _changed(before: Mapping[bytes, Guard], after: Mapping[bytes, Guard]) -> Difference:
    olds, news = _only(before, after), _only(after, before)
    # Where variants expect different things, one side may have all that the other has, and more.
    old, new = (olds or list(before.values()))[0], (news or list(after.values()))[0]
    return Difference(
        what="guard",
        path=f"{old.source} {old.kind}",
        old=old.expected,
        new=new.expected,
        sentence=changed_words(old.source, old.kind, old.expected, new.expected),
    )


def _only(one: Mapping[bytes, Guard], other: Mapping[bytes, Guard]) -> list[Guard]:
    return [guard for spelled, guard in one.items() if spelled not in other]


def _telling(difference: Difference) -> tuple[int, int, int, int]:
    source, _, kind = difference.path.rpartition(" ")
    word = kind.partition(":")[0]
    rank = _KINDS.index(word) if word in _KINDS else len(_KINDS)
    # What is of the model itself tells more than what the model reaches in a module of torch, and a plain value more
    # than the function that closes over it.
    of_torch = source.startswith(("global:torch", "module:torch", "global:builtins"))
    is_function = isinstance(difference.old, list) and difference.old[:1] == ["function"]
    return int(of_torch), rank, int(is_function), source.count(".") + source.count("[") + source.count("|")


def _now_set(here: _Guards, there: _Guards) -> list[Guard]:
    """Return guards that something is not set on an object itself, of which the other side looks at what is set."""
    found = []
    for (source, kind), spelled in here.items():
        word, _, name = kind.partition(":")
        if word == "absent" and (source, kind) not in there and (f"{source}.{name}", "value") in there:
            found += [guard for guard in spelled.values() if guard.expected is True]
    return found


def _set_on_object(guard: Guard, after: _Guards) -> Difference:
    source = f"{guard.source}.{guard.kind.partition(':')[2]}"
    now = next(iter(after[source, "value"].values())).expected
    said = (
        f"{source_words(source)} is set on the object itself now, to {expected_words('value', now)}, and was not before"
    )
    return Difference(what="guard", path=f"{source} value", old=None, new=now, sentence=said)


def _no_more_set(guard: Guard, before: _Guards) -> Difference:
    source = f"{guard.source}.{guard.kind.partition(':')[2]}"
    was = next(iter(before[source, "value"].values())).expected
    said = f"{source_words(source)} was set on the object itself, to {expected_words('value', was)}, and is not now"
    return Difference(what="guard", path=f"{source} value", old=was, new=None, sentence=said)


def _alone(here: _Guards, there: _Guards, told: Collection[str], *, gone: bool) -> list[Difference]:
    """Return one difference for all that only one side looks at."""
    guards = [
        guard
        for (source, kind), spelled in here.items()
        if (source, kind) not in there and f"{source} {kind}" not in told
        for guard in spelled.values()
    ]
    if not guards:
        return []
    guards.sort(key=_own_first)
    first = guards[0]
    count = f" (and {len(guards) - 1} more guards)" if len(guards) > 1 else ""
    when = "was looked at before and is not now" if gone else "is looked at now and was not before"
    return [
        Difference(
            what="guard",
            path=f"{first.source} {first.kind}",
            old=first.expected if gone else None,
            new=None if gone else first.expected,
            sentence=f"{_said(first)} {when}{count}",
            detail=tuple(map(_said, guards[:_MOST_NAMED])),
        )
    ]


def _own_first(guard: Guard) -> tuple[bool, bool, int]:
    return not guard.source.startswith("self"), guard.kind == "code", guard.source.count(".")


def _said(guard: Guard) -> str:
    word, _, argument = guard.kind.partition(":")
    name = source_words(guard.source)
    if word == "code":
        return f"the code of {name}"
    if word == "absent":
        return f"whether {name}.{argument} is set on the object itself"
    return f"{name}{f' ({word} {argument})' if argument else ''}: {expected_words(word, guard.expected)}"


def call_differences(pairs: Sequence[tuple[str, Variant, Variant]]) -> list[Difference]:
    """Return how variants differ in what a call must bring: sizes, their relations, tensors, the output's form.

    Args:
        pairs: Each variant that both sides have: what it is called, the first side's, the second's.
    """
    groups: dict[tuple[str, str], tuple[Difference, list[str]]] = {}
    for name, old, new in pairs:
        for difference in _of_call(old, new):
            key = difference.path, difference.sentence
            groups.setdefault(key, (difference, []))[1].append(name)
    return together(
        difference
        if len(names) == len(pairs)
        else replace(difference, sentence=f"{difference.sentence} (in {', '.join(names)})")
        for difference, names in groups.values()
    )


def _of_call(old: Variant, new: Variant) -> Iterator[Difference]:
    yield from _members("size", _spans(old), _spans(new))
    yield from _members("tensor", _tensors(old), _tensors(new))
    for relation in sorted(set(old.relations) ^ set(new.relations)):
        has, had = relation in new.relations, relation in old.relations
        verb = "is asked of the sizes now" if has else "was asked of the sizes and is not now"
        yield _difference("relations", relation if had else None, relation if has else None, f"{relation} {verb}")
    if canonical_json(old.output) != canonical_json(new.output):
        yield _difference("output", old.output, new.output, "what the model returns is put together in another way")


def _members(what: str, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Difference]:
    for member in [*old, *(member for member in new if member not in old)]:
        before, after = old.get(member), new.get(member)
        if before == after:
            continue
        said = f"the {what} {source_words(member)}"
        if before is None:
            sentence = f"{said} is {after} now and was not there before"
        elif after is None:
            sentence = f"{said} was {before} and is gone now"
        else:
            sentence = f"{said} was {before} and is {after} now"
        yield _difference(member, before, after, sentence)


def _difference(path: str, old: Json, new: Json, sentence: str) -> Difference:
    return Difference(what="guard", path=path, old=old, new=new, sentence=sentence)


def _spans(variant: Variant) -> dict[str, str]:
    named = {symbol: dim for dim, symbols in variant.dims.items() for symbol in symbols}
    return {
        named.get(symbol.name, symbol.name): f"{symbol.min} or more"
        if symbol.max is None
        else f"from {symbol.min} to {symbol.max}"
        for symbol in variant.symbols
    }


def _tensors(variant: Variant) -> dict[str, str]:
    return {item.source: tensor_words(item.meta) for item in variant.inputs}


def changed_functions(differences: Iterable[Difference], module: str) -> tuple[str, ...]:
    """Return the functions of a module whose code differs, by their names in the module.

    Args:
        differences: Those of guards.
        module: Its name.
    """
    start = f"global:{module}:"
    named = [
        difference.path.removeprefix(start).rpartition(" ")[0]
        for difference in differences
        if difference.path.startswith(start) and difference.path.endswith(" code")
    ]
    return tuple(dict.fromkeys(named))
