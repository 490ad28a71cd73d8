"""Compares two entries: their keys, then each rank and prefix that both have. Must not import torch."""

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
    merge_alike,
    only_in,
    traced_lines,
    was_and_is,
    with_lines,
)

#: Factors whose differences cause guards to differ.
_CAUSES_OF_GUARDS = frozenset({"sources", "variables", "ops", "model", "state", "calls", "torch", "python"})
#: Factors that list what the trace went through.
_TRACED = frozenset({"sources", "ops"})

#: A rank and a prefix.
_Part = tuple[int, str]
_ARTIFACT_FIELDS = ("digest", "kind", "size_bytes", "proved")
#: The identity of a row: variant name (numbers may differ between the sides), shape, adaptor, tuned, piece.
_RowKey = tuple[str, str, str, bool, int]


class EntrySide:
    """One entry of a cache, read lazily."""

    def __init__(self, layout: CacheLayout, hash_: str) -> None:
        self.layout = layout
        self.hash = hash_
        self._plans: dict[_Part, Plan] = {}

    @cached_property
    def key(self) -> Key:
        """Its factors; raises CacheError if they are missing, or cannot be read or trusted."""
        key = read_key(self.layout, self.hash)
        if key is None:
            path = self.layout.key_file(self.hash)
            raise CacheCorruptError(f"{path} is missing. Warm the model again, or run: cgtool verify", path=path)
        return key

    @cached_property
    def parts(self) -> dict[_Part, RankView]:
        """The published ranks and prefixes."""
        ranks = view_entry(self.layout, self.hash).ranks
        return {(rank.name.rank, rank.name.prefix): rank for rank in ranks if rank.has_manifest}

    def manifest(self, part: _Part) -> Manifest:
        """Return the manifest of a rank and prefix."""
        rank = self.parts[part]
        if rank.manifest is None:
            raise rank.problem or CacheError(f"{rank.folder} was just removed. Try again.", path=rank.folder)
        return rank.manifest

    def plan(self, part: _Part) -> Plan:
        """Return the plan of a rank and prefix."""
        if part not in self._plans:
            _, self._plans[part] = entry_with_plan(self.layout, self.parts[part].name)
        return self._plans[part]

    @cached_property
    def lines(self) -> tuple[TracedLine, ...]:
        """The source lines that the first rank's trace went through; () if they cannot be read."""
        for part, rank in self.parts.items():
            with contextlib.suppress(CacheError):  # only informational; `verify` reports damage
                record = self.manifest(part).files.get(GRAPH_FILE)
                data = read_bytes(f"{rank.folder}/{GRAPH_FILE}")
                if data is not None and record is not None and sha256_hex(data) == record.sha256:
                    return traced_lines(data.decode(errors="replace"))
            break
        return ()

    @property
    def label(self) -> str:
        """Its name in messages."""
        return short(self.hash)

    @cached_property
    def model(self) -> str:
        """The name of its model; "a model" if its manifest cannot be read."""
        try:
            return next((self.manifest(part).model for part in self.parts), "a model")
        except CacheError:
            return "a model"

    @cached_property
    def model_identity(self) -> Hashable:
        """The class, name and prefixes of its model, for pairing entries; None if unknown."""
        try:
            prefixes = sorted({prefix for _, prefix in self.parts})
            return canonical_json([self.key.value("model"), self.model, prefixes]) if prefixes else None
        except CacheError:
            return None


def compare_entries(old: EntrySide, new: EntrySide) -> list[Difference]:
    """Return the differences between two entries, root causes first; age and use are not compared."""
    factors: list[Difference] = []
    if old.hash != new.hash:
        factors = factor_differences(differences(old.key, new.key), lambda module: _changed_lines(module, old, new))
    guards: list[Difference] = []
    rest: list[Difference] = []
    for (rank, prefix), was, _ in changes(dict.fromkeys(old.parts, True), dict.fromkeys(new.parts, True)):
        name, gone = f"rank_{rank}/{prefix}", was is not None
        sentence = f"rank {rank}, prefix {prefix}, {only_in(gone=gone)}"
        rest.append(Difference.of_one_side("coverage", name, name, sentence, gone=gone))
    several = len(old.parts.keys() | new.parts.keys()) > 1
    for part in old.parts:
        if part in new.parts:
            where = f"rank {part[0]} {part[1]}" if several else ""
            part_guards, part_rest = _compare_part(old, new, part)
            guards += located(part_guards, where)
            rest += located(part_rest, where)
    # Guards come first unless a factor explains them.
    found = [*factors, *guards] if any(map(_explains_guards, factors)) else [*guards, *factors]
    found += rest
    if old.hash != new.hash and all(difference.what == "entry" for difference in found):
        changed = differences(old.key, new.key)
        return [*(_factor(factor, f"{factor.sentence}, only in their order") for factor in changed), *found]
    return found


def factor_differences(
    factors: Iterable[FactorDifference], lines: Callable[[str], LineChanges] = lambda _: LineChanges(known=False)
) -> list[Difference]:
    """Return the differences between two keys, without "guards", which is only a digest.

    `lines` returns the changes to the traced lines of a module whose file differs.
    """
    found = []
    for factor in factors:
        difference = _factor(factor, factor.sentence)
        if factor.factor == "sources":
            difference = replace(difference, what="source")
            if isinstance(factor.old, str) and isinstance(factor.new, str):
                difference = with_lines(difference, lines(factor.path.removeprefix("sources.")))
        if factor.factor != "guards":
            found.append(difference)
    return merge_alike(found)


def _factor(factor: FactorDifference, sentence: str) -> Difference:
    return Difference(what="factor", path=factor.path, old=factor.old, new=factor.new, sentence=sentence)


def _explains_guards(difference: Difference) -> bool:
    """Return whether a factor's difference causes guards to differ.

    A file or an op that only one trace went through does not: it is itself a consequence of a guard.
    """
    factor = re.split(r"[.\[]", difference.path, maxsplit=1)[0]
    return factor in _CAUSES_OF_GUARDS and not (factor in _TRACED and None in (difference.old, difference.new))


def _changed_lines(module: str, old: EntrySide, new: EntrySide) -> LineChanges:
    found = between_graphs(module, old.lines, new.lines)
    shared = next((part for part in old.parts if part in new.parts), None)
    if found.sentence or shared is None:
        return found
    return found._replace(sentence=changed_functions(old.plan(shared), new.plan(shared), module))


def _compare_part(old: EntrySide, new: EntrySide, part: _Part) -> tuple[list[Difference], list[Difference]]:
    """Return the guards that differ in one rank and prefix, and the other differences."""
    before, after = old.manifest(part), new.manifest(part)
    guards: list[Difference] = []
    pieces: list[Difference] = []
    if before == after:  # the manifest holds the digests of everything else
        return guards, pieces
    plans = old.plan(part), new.plan(part)
    if before.files.get(PLAN_FILE) != after.files.get(PLAN_FILE):
        guards, pieces = compare_plans(*plans)
    rest = [*pieces, *_compare_manifests(before, after)]
    if not guards and not rest:
        for name, was, now in sorted(changes(before.files, after.files)):
            difference = "differs in ways that are not shown"
            if was is None or now is None:
                difference = only_in(gone=now is None)
            digests = [None if file is None else file.sha256 for file in (was, now)]
            sentence = f"{name} {difference}"
            rest.append(Difference(what="entry", path=name, old=digests[0], new=digests[1], sentence=sentence))
    return guards, rest


def _compare_manifests(old: Manifest, new: Manifest) -> list[Difference]:
    """Return the variants, compiled sizes, fallbacks and artifacts that differ."""
    found: list[Difference] = []
    if old.model != new.model:
        sentence = was_and_is("model", old.model, new.model)
        found.append(Difference(what="entry", path="model", old=old.model, new=new.model, sentence=sentence))
    if old.splitting_ops != new.splitting_ops:
        ops = list(old.splitting_ops), list(new.splitting_ops)
        sentence = was_and_is("splitting_ops", *(", ".join(side) or "empty" for side in ops))
        found.append(Difference(what="factor", path="splitting_ops", old=ops[0], new=ops[1], sentence=sentence))
    names = [_variant_names(side) for side in (old, new)]
    variants = [dict(zip(names[at], side.variants, strict=True)) for at, side in enumerate((old, new))]
    for name, before, after in changes(*variants):
        counts = before if after is None else after if before is None else None
        if counts is not None:
            found.append(_coverage(name, asdict(counts), f"variant {name}", gone=after is None))
    # Pieces whose rows differ in the same way are one difference.
    groups: dict[tuple[str, ...], list[tuple[Row | None, Row | None]]] = {}
    for key, was, now in changes(_rows(old, names[0]), _rows(new, names[1])):
        # Compile times vary from run to run, and the digest covers the kernels.
        artifacts = [None if row is None else replace(row.artifact, compile_secs=0.0, kernels=0) for row in (was, now)]
        if key[0] in variants[0] and key[0] in variants[1] and artifacts[0] != artifacts[1]:
            change = (str(now is None),) if None in artifacts else tuple(map(repr, artifacts))
            groups.setdefault((*map(str, key[:4]), *change), []).append((was, now))
    coverage, changed = [], []
    for (variant, *_), rows in groups.items():
        one_sided = [row for pair in rows if None in pair for row in pair if row is not None]
        if one_sided:
            coverage.append(_uncovered(variant, one_sided, gone=rows[0][1] is None))
        else:
            changed.append(_artifact(variant, [(was, now) for was, now in rows if was and now]))
    coverage.sort(key=lambda difference: difference.old is None)
    return [*found, *coverage, *_fallbacks(old, new, names), *changed]


def _variant_names(manifest: Manifest) -> list[str]:
    names = [variant_name(counts.name, counts.fixed) for counts in manifest.variants]
    return names if len(set(names)) == len(names) else [f"variant {number}" for number in range(len(names))]


def _coverage(path: str, value: Json, subject: str, *, gone: bool) -> Difference:
    sentence = f"{subject}: only in the {'first' if gone else 'second'}"
    return Difference.of_one_side("coverage", path, value, sentence, gone=gone)


def _rows(manifest: Manifest, names: Sequence[str]) -> dict[_RowKey, Row]:
    return {
        (names[row.variant], shape_text(row.shape), row.adaptor, row.tuned, row.piece_index): row
        for row in manifest.rows
    }


def _uncovered(variant: str, rows: Sequence[Row], *, gone: bool) -> Difference:
    """Return the difference of rows of one shape that only one side has."""
    numbers = sorted(row.piece_index for row in rows)
    row, pieces, shape = rows[0], pieces_text(numbers), shape_text(rows[0].shape)
    value = {"shape": row.shape, "adaptor": row.adaptor, "tuned": row.tuned, "pieces": numbers}
    subject = f"{pieces} of {variant} for {shape} by {row.adaptor}{', autotuned' if row.tuned else ''}"
    return _coverage(f"{variant}/{shape}/{pieces}", value, subject, gone=gone)


def _artifact(variant: str, rows: Sequence[tuple[Row, Row]]) -> Difference:
    row, (old, new) = rows[0][0], (side.artifact for side in rows[0])
    pieces, shape = pieces_text(sorted(was.piece_index for was, _ in rows)), shape_text(row.shape)
    if (old.digest, old.size_bytes) != (new.digest, new.size_bytes):
        was, now = (f"{short(side.digest)} ({side.size_bytes} bytes)" for side in (old, new))
        change = f"was {was} and is {now} now"
    elif old.proved != new.proved:
        change = "was proved and is not now" if old.proved else "was not proved and is now"
    else:
        change = "has other guards now" if old.guards != new.guards else "has another proof now"
    facts = [{name: getattr(side, name) for name in _ARTIFACT_FIELDS} for side in (old, new)]
    return Difference(
        what="artifact",
        path=f"{variant}/{shape}/{pieces}",
        old=facts[0],
        new=facts[1],
        sentence=f"the artifact of {pieces} of {variant} for {shape} by {row.adaptor} {change}",
        detail=(
            *(f"- {guard}" for guard in old.guards if guard not in new.guards),
            *(f"+ {guard}" for guard in new.guards if guard not in old.guards),
        ),
    )


def _fallbacks(old: Manifest, new: Manifest, names: Sequence[Sequence[str]]) -> Iterator[Difference]:
    """Yield the pieces that fall back on one side only, to another adaptor, or for another reason."""
    sides = [
        {
            (names[at][item.variant], shape_text(item.shape), item.piece_index): (item.adaptor, item.reason)
            for item in side.fallbacks
        }
        for at, side in enumerate((old, new))
    ]
    for (variant, shape, piece), was, now in changes(*sides):
        if was is None and now is not None:
            change = f"falls back to {now[0]} now and did not before: {now[1]}"
        elif was is not None and now is None:
            change = f"fell back to {was[0]} ({was[1]}) and does not now"
        elif was is not None and now is not None and was[0] != now[0]:
            change = f"fell back to {was[0]} and falls back to {now[0]} now: {now[1]}"
        else:
            change = f"falls back for another reason now: {now and now[1]}"
        facts = [side and {"adaptor": side[0], "reason": side[1]} for side in (was, now)]
        sentence = f"piece {piece} of {variant} ({shape}) {change}"
        path = f"{variant}/{shape}/piece {piece}"
        yield Difference(what="fallback", path=path, old=facts[0], new=facts[1], sentence=sentence)
