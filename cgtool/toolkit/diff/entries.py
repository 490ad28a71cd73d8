"""Two entries, down to the guilty factor: their keys, then each rank and prefix that both have. No torch here."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cached_property

from msgspec.structs import asdict, replace

from cgtool.errors import CacheCorruptError, CacheError
from cgtool.plan.grammar import canonical_json, sha256_hex
from cgtool.plan.pieces import Json
from cgtool.plan.records import Plan
from cgtool.plan.shapes import shape_text
from cgtool.store.entry import entry_with_plan
from cgtool.store.files import read_bytes
from cgtool.store.key import FactorDifference, differences, read_key
from cgtool.store.layout import GRAPH_FILE, PLAN_FILE, CacheLayout, short
from cgtool.store.records import Key, Manifest, Row
from cgtool.store.walk import RankView, view_entry
from cgtool.toolkit.diff.plans import changed_functions, compare_plans, pieces_text, variant_name
from cgtool.toolkit.diff.records import (
    Difference,
    LineChanges,
    TracedLine,
    between_graphs,
    changes,
    located,
    only_in,
    together,
    traced_lines,
    was_and_is,
    with_lines,
)

#: Where one of these factors differs, guards differ because of it.
_GUARDS_FOLLOW = frozenset({"sources", "variables", "ops", "model", "state", "calls", "torch", "python"})
#: What a trace came through.
_TRACED = frozenset({"sources", "ops"})

#: A rank and a prefix.
_Part = tuple[int, str]
_ARTIFACT_FACTS = ("digest", "kind", "size_bytes", "proved")
#: What there is one row of, by the variant's name (its number may differ from side to side); the piece comes last.
_Place = tuple[str, str, str, bool, int]


class EntrySide:
    """One entry of a cache, read as far as it is asked for."""

    def __init__(self, layout: CacheLayout, hash_: str) -> None:
        self.layout = layout
        self.hash = hash_
        self._plans: dict[_Part, Plan] = {}

    @cached_property
    def key(self) -> Key:
        """Its factors; where it has none, or they cannot be read or trusted, a CacheError is raised."""
        key = read_key(self.layout, self.hash)
        if key is None:
            path = self.layout.key_file(self.hash)
            raise CacheCorruptError(f"{path} is missing: warm the model again, or look with: cgtool verify", path=path)
        return key

    @cached_property
    def parts(self) -> dict[_Part, RankView]:
        """The ranks and prefixes that were published."""
        ranks = view_entry(self.layout, self.hash).ranks
        return {(rank.name.rank, rank.name.prefix): rank for rank in ranks if rank.has_manifest}

    def manifest(self, part: _Part) -> Manifest:
        """Return the manifest of a rank and prefix."""
        rank = self.parts[part]
        if rank.manifest is None:
            raise rank.problem or CacheError(f"{rank.folder} was removed meanwhile. Look again.", path=rank.folder)
        return rank.manifest

    def plan(self, part: _Part) -> Plan:
        """Return the plan of a rank and prefix."""
        if part not in self._plans:
            _, self._plans[part] = entry_with_plan(self.layout, self.parts[part].name)
        return self._plans[part]

    @cached_property
    def lines(self) -> tuple[TracedLine, ...]:
        """The lines of the model's own files that its first rank's trace went through; () where they cannot be read."""
        for part, rank in self.parts.items():
            with contextlib.suppress(CacheError):  # for people only: what is damaged is for `verify` to say
                record = self.manifest(part).files.get(GRAPH_FILE)
                data = read_bytes(f"{rank.folder}/{GRAPH_FILE}")
                if data is not None and record is not None and sha256_hex(data) == record.sha256:
                    return traced_lines(data.decode(errors="replace"))
            break
        return ()

    @property
    def label(self) -> str:
        """What people are told of it."""
        return short(self.hash)

    @cached_property
    def model(self) -> str:
        """What its model is called; "a model" where its manifest cannot be read."""
        try:
            return next((self.manifest(part).model for part in self.parts), "a model")
        except CacheError:
            return "a model"

    @cached_property
    def likeness(self) -> Hashable:
        """What entries of one model have in common: its class, its name, its prefixes; None where that is unknown."""
        try:
            prefixes = sorted({prefix for _, prefix in self.parts})
            return canonical_json([self.key.value("model"), self.model, prefixes]) if prefixes else None
        except CacheError:
            return None


def compare_entries(old: EntrySide, new: EntrySide) -> list[Difference]:
    """Return what differs between two entries, the most telling first; their age and use are no difference."""
    factors = (
        [] if old.hash == new.hash else factor_differences(differences(old.key, new.key), lambda m: _lines(m, old, new))
    )
    guards: list[Difference] = []
    rest: list[Difference] = []
    for (rank, prefix), was, _ in changes(dict.fromkeys(old.parts, True), dict.fromkeys(new.parts, True)):
        name, gone = f"rank_{rank}/{prefix}", was is not None
        said = f"rank {rank}, prefix {prefix}, {only_in(gone=gone)}"
        rest.append(Difference.of_one_side("coverage", name, name, said, gone=gone))
    several = len(old.parts.keys() | new.parts.keys()) > 1
    for part in old.parts:
        if part in new.parts:
            where = f"rank {part[0]} {part[1]}" if several else ""
            of_guards, of_rank = _compare_part(old, new, part)
            guards += located(of_guards, where)
            rest += located(of_rank, where)
    # Guards lead where no factor differs that they would follow from.
    found = [*factors, *guards] if any(map(_leads, factors)) else [*guards, *factors]
    found += rest
    if old.hash != new.hash and all(difference.what == "entry" for difference in found):
        order = [_factor(one, f"{one.sentence}, in nothing but their order") for one in differences(old.key, new.key)]
        return [*order, *found]
    return found


def factor_differences(
    keys: Iterable[FactorDifference], lines: Callable[[str], LineChanges] = lambda _: LineChanges(known=False)
) -> list[Difference]:
    """Return how two keys differ, but for "guards", which is a digest of many.

    `lines` says what became of the traced lines of a module whose file differs.
    """
    found = []
    for one in keys:
        difference = _factor(one, one.sentence)
        if one.factor == "sources":
            difference = replace(difference, what="source")
            if isinstance(one.old, str) and isinstance(one.new, str):
                difference = with_lines(difference, lines(one.path.removeprefix("sources.")))
        if one.factor != "guards":
            found.append(difference)
    return together(found)


def _factor(found: FactorDifference, sentence: str) -> Difference:
    return Difference(what="factor", path=found.path, old=found.old, new=found.new, sentence=sentence)


def _leads(difference: Difference) -> bool:
    """Whether guards that differ do so because of a factor's difference.

    A file or an op that only one side's trace came through does not lead: it follows itself from what the guards tell.
    """
    factor = re.split(r"[.\[]", difference.path, maxsplit=1)[0]
    return factor in _GUARDS_FOLLOW and not (factor in _TRACED and None in (difference.old, difference.new))


def _lines(module: str, old: EntrySide, new: EntrySide) -> LineChanges:
    found = between_graphs(module, old.lines, new.lines)
    shared = next((part for part in old.parts if part in new.parts), None)
    if found.sentence or shared is None:
        return found
    return found._replace(sentence=changed_functions(old.plan(shared), new.plan(shared), module))


def _compare_part(old: EntrySide, new: EntrySide, part: _Part) -> tuple[list[Difference], list[Difference]]:
    """The guards that differ, and the rest of what differs in one rank and prefix."""
    before, after = old.manifest(part), new.manifest(part)
    guards: list[Difference] = []
    pieces: list[Difference] = []
    if before == after:  # it holds the digests of all else
        return guards, pieces
    plans = old.plan(part), new.plan(part)
    if before.files.get(PLAN_FILE) != after.files.get(PLAN_FILE):
        guards, pieces = compare_plans(*plans)
    rest = [*pieces, *_compare_manifests(before, after)]
    if not guards and not rest:
        for name, was, now in sorted(changes(before.files, after.files)):
            said = "differs, in nothing that another line would name"
            if was is None or now is None:
                said = only_in(gone=now is None)
            digests = [None if one is None else one.sha256 for one in (was, now)]
            rest.append(Difference(what="entry", path=name, old=digests[0], new=digests[1], sentence=f"{name} {said}"))
    return guards, rest


def _compare_manifests(old: Manifest, new: Manifest) -> list[Difference]:
    """Variants, sizes that were compiled, fallbacks and artifacts that differ."""
    found: list[Difference] = []
    if old.model != new.model:
        said = was_and_is("model", old.model, new.model)
        found.append(Difference(what="entry", path="model", old=old.model, new=new.model, sentence=said))
    if old.splitting_ops != new.splitting_ops:
        ops = list(old.splitting_ops), list(new.splitting_ops)
        said = was_and_is("splitting_ops", *(", ".join(side) or "empty" for side in ops))
        found.append(Difference(what="factor", path="splitting_ops", old=ops[0], new=ops[1], sentence=said))
    names = [_variant_names(side) for side in (old, new)]
    variants = [dict(zip(names[at], side.variants, strict=True)) for at, side in enumerate((old, new))]
    for name, before, after in changes(*variants):
        counts = before if after is None else after if before is None else None
        if counts is not None:
            found.append(_one_sided(name, asdict(counts), f"variant {name}", gone=after is None))
    groups: dict[tuple[str, ...], list[tuple[Row | None, Row | None]]] = {}
    for place, was, now in changes(_rows(old, names[0]), _rows(new, names[1])):
        # What of an artifact can differ where it is the same piece, shape and adaptor.
        facts = [None if row is None else replace(row.artifact, compile_secs=0.0, kernels=0) for row in (was, now)]
        if place[0] in variants[0] and place[0] in variants[1] and facts[0] != facts[1]:
            change = (str(now is None),) if None in facts else tuple(map(repr, facts))
            groups.setdefault((*map(str, place[:4]), *change), []).append((was, now))
    coverage, artifacts = [], []
    for (variant, *_), rows in groups.items():
        alone = [row for pair in rows if None in pair for row in pair if row is not None]
        if alone:
            coverage.append(_uncovered(variant, alone, gone=rows[0][1] is None))
        else:
            artifacts.append(_artifact(variant, [(was, now) for was, now in rows if was and now]))
    coverage.sort(key=lambda difference: difference.old is None)
    return [*found, *coverage, *_fallbacks(old, new, names), *artifacts]


def _variant_names(manifest: Manifest) -> list[str]:
    names = [variant_name(counts.name, counts.fixed) for counts in manifest.variants]
    return names if len(set(names)) == len(names) else [f"variant {number}" for number in range(len(names))]


def _one_sided(path: str, value: Json, said: str, *, gone: bool) -> Difference:
    verb = "was there before and is not now" if gone else "is there now and was not before"
    return Difference.of_one_side("coverage", path, value, f"{said}: {verb}", gone=gone)


def _rows(manifest: Manifest, names: Sequence[str]) -> dict[_Place, Row]:
    return {
        (names[row.variant], shape_text(row.shape), row.adaptor, row.tuned, row.piece_index): row
        for row in manifest.rows
    }


def _uncovered(variant: str, alone: Sequence[Row], *, gone: bool) -> Difference:
    """The difference of rows for one shape that one side alone has."""
    numbers = sorted(row.piece_index for row in alone)
    row, pieces, shape = alone[0], pieces_text(numbers), shape_text(alone[0].shape)
    value = {"shape": row.shape, "adaptor": row.adaptor, "tuned": row.tuned, "pieces": numbers}
    said = f"{pieces} of {variant} for {shape} by {row.adaptor}{', autotuned' if row.tuned else ''}"
    return _one_sided(f"{variant}/{shape}/{pieces}", value, said, gone=gone)


def _artifact(variant: str, rows: Sequence[tuple[Row, Row]]) -> Difference:
    row, (old, new) = rows[0][0], (side.artifact for side in rows[0])
    pieces, shape = pieces_text(sorted(was.piece_index for was, _ in rows)), shape_text(row.shape)
    if (old.digest, old.size_bytes) != (new.digest, new.size_bytes):
        was, now = (f"{short(side.digest)} ({side.size_bytes} bytes)" for side in (old, new))
        said = f"was {was} and is {now} now"
    elif old.proved != new.proved:
        said = "was proved and is not now" if old.proved else "was not proved and is now"
    else:
        said = "serves under other conditions now" if old.guards != new.guards else "has another proof now"
    facts = [{name: getattr(side, name) for name in _ARTIFACT_FACTS} for side in (old, new)]
    return Difference(
        what="artifact",
        path=f"{variant}/{shape}/{pieces}",
        old=facts[0],
        new=facts[1],
        sentence=f"the artifact of {pieces} of {variant} for {shape} by {row.adaptor} {said}",
        detail=(
            *(f"- {guard}" for guard in old.guards if guard not in new.guards),
            *(f"+ {guard}" for guard in new.guards if guard not in old.guards),
        ),
    )


def _fallbacks(old: Manifest, new: Manifest, names: Sequence[Sequence[str]]) -> Iterator[Difference]:
    """Yield which pieces fall back to another adaptor on one side alone, or for another reason."""
    sides = [
        {
            (names[at][item.variant], shape_text(item.shape), item.piece_index): (item.adaptor, item.reason)
            for item in side.fallbacks
        }
        for at, side in enumerate((old, new))
    ]
    for (variant, shape, piece), was, now in changes(*sides):
        if was is None and now is not None:
            said = f"falls back to {now[0]} now and did not before: {now[1]}"
        elif was is not None and now is None:
            said = f"fell back to {was[0]} ({was[1]}) and does not now"
        elif was is not None and now is not None and was[0] != now[0]:
            said = f"fell back to {was[0]} and does to {now[0]} now: {now[1]}"
        else:
            said = f"falls back for another reason now: {now and now[1]}"
        facts = [one and {"adaptor": one[0], "reason": one[1]} for one in (was, now)]
        sentence = f"piece {piece} of {variant} ({shape}) {said}"
        path = f"{variant}/{shape}/piece {piece}"
        yield Difference(what="fallback", path=path, old=facts[0], new=facts[1], sentence=sentence)
