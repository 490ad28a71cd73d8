"""Two entries, down to the guilty factor: their keys, then each rank and prefix that both have. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from cgtool.errors import CacheCorruptError, CacheError
from cgtool.plan.grammar import sha256_hex
from cgtool.plan.records import Plan, Variant, parse_plan
from cgtool.records import replace
from cgtool.store.entry import Entry, read_entry
from cgtool.store.files import read_bytes
from cgtool.store.key import Key, differences, read_key
from cgtool.store.layout import GRAPH_FILE, PLAN_FILE, CacheLayout, RankName, short
from cgtool.store.records import Manifest
from cgtool.toolkit.diff.graphs import piece_differences
from cgtool.toolkit.diff.guards import call_differences, changed_functions, guard_differences
from cgtool.toolkit.diff.keys import factor_differences, leads
from cgtool.toolkit.diff.records import Difference, located
from cgtool.toolkit.diff.rows import (
    artifact_differences,
    coverage_differences,
    fallback_differences,
    variant_name,
)
from cgtool.toolkit.diff.traced import LineChanges, TracedLine, between_graphs, traced_lines


class EntrySide:
    """One entry of a cache, read as far as it is asked for.

    Args:
        layout: Where the cache lies.
        hash_: The entry's hash.
    """

    def __init__(self, layout: CacheLayout, hash_: str) -> None:
        self.layout = layout
        self.hash = hash_
        self._entries: dict[RankName, Entry] = {}
        self._plans: dict[RankName, Plan] = {}

    @cached_property
    def key(self) -> Key:
        """Its factors.

        Raises:
            CacheError: It has none, or they cannot be read or trusted.
        """
        key = read_key(self.layout, self.hash)
        if key is None:
            path = self.layout.key_file(self.hash)
            raise CacheCorruptError(f"{path} is missing: warm the model again, or look with: cgtool verify", path=path)
        return key

    @cached_property
    def names(self) -> dict[tuple[int, str], RankName]:
        """The ranks and prefixes that were published."""
        found = self.layout.rank_names(self.hash)
        return {(name.rank, name.prefix): name for name in found if self.layout.manifest_file(name).exists()}

    def manifest_bytes(self, place: tuple[int, str]) -> bytes | None:
        """Return the manifest of a rank and prefix as it lies on the disk; None where it is gone.

        Raises:
            CacheError: It cannot be read.
        """
        return read_bytes(self.layout.manifest_file(self.names[place]))

    def manifest(self, place: tuple[int, str]) -> Manifest:
        """Return the manifest of a rank and prefix.

        Raises:
            CacheError: It is gone, or cannot be read or trusted.
        """
        return self._entry(self.names[place]).manifest

    def plan(self, place: tuple[int, str]) -> Plan:
        """Return the plan of a rank and prefix.

        Raises:
            CacheError: It is gone, or cannot be read or trusted.
        """
        name = self.names[place]
        if name not in self._plans:
            path = self.layout.rank_dir(name) / PLAN_FILE
            self._plans[name] = parse_plan(self._entry(name).files[PLAN_FILE], path=path)
        return self._plans[name]

    @cached_property
    def lines(self) -> tuple[TracedLine, ...]:
        """The lines of the model's own files that its first rank's trace went through; () where they cannot be read."""
        name = next(iter(self.names.values()), None)
        if name is None:
            return ()
        try:
            record = self._entry(name).manifest.files.get(GRAPH_FILE)
            data = read_bytes(self.layout.rank_dir(name) / GRAPH_FILE)
        except CacheError:
            return ()  # for people only: what is damaged is for `verify` to say
        if data is None or record is None or sha256_hex(data) != record.sha256:
            return ()
        return traced_lines(data.decode(errors="replace"))

    def _entry(self, name: RankName) -> Entry:
        if name not in self._entries:
            entry = read_entry(self.layout, name)
            if entry is None:
                path = self.layout.rank_dir(name)
                raise CacheError(f"Entry {short(name.hash)} was removed meanwhile. Look again.", path=path)
            self._entries[name] = entry
        return self._entries[name]


def compare_entries(old: EntrySide, new: EntrySide) -> list[Difference]:
    """Return what differs between two entries, the most telling first; their age and use are no difference.

    Raises:
        CacheError: One of them cannot be read or trusted.
    """
    factors = [] if old.hash == new.hash else factor_differences(old.key, new.key, lambda m: _lines(m, old, new))
    guards: list[Difference] = []
    rest: list[Difference] = [*_ranks(old, new)]
    several = len(old.names.keys() | new.names.keys()) > 1
    for place in [place for place in old.names if place in new.names]:
        where = f"rank {place[0]} {place[1]}" if several else ""
        of_guards, of_rank = _compare_rank(old, new, place)
        guards += located(of_guards, where)
        rest += located(of_rank, where)
    found = [*_in_order(factors, guards), *rest]
    if old.hash != new.hash and all(difference.what == "entry" for difference in found):
        return [*_only_in_order(old.key, new.key), *found]
    return found


def _only_in_order(old: Key, new: Key) -> list[Difference]:
    """Return the difference of two keys whose guards are the same and stand in another order."""
    return [
        Difference(
            what="factor",
            path=difference.path,
            old=difference.old,
            new=difference.new,
            sentence=f"{difference.sentence}, in nothing but their order",
        )
        for difference in differences(old, new)
    ]


def _lines(module: str, old: EntrySide, new: EntrySide) -> LineChanges:
    changes = between_graphs(module, old.lines, new.lines)
    if changes.sentence:
        return changes
    shared = next((place for place in old.names if place in new.names), None)
    functions = changed_functions(guard_differences(old.plan(shared), new.plan(shared)), module) if shared else ()
    said = f"the code of {', '.join(functions)}" if functions else ""
    return replace(changes, sentence=said)


def _in_order(factors: Sequence[Difference], guards: Sequence[Difference]) -> list[Difference]:
    """Return factors and guards together: guards lead where no factor differs that they would follow from."""
    if any(leads(factor) for factor in factors):
        return [*factors, *guards]
    return [*guards, *factors]


def _ranks(old: EntrySide, new: EntrySide) -> list[Difference]:
    found = []
    for gone, side, other in ((True, old, new), (False, new, old)):
        for rank, prefix in side.names:
            if (rank, prefix) in other.names:
                continue
            said = f"rank {rank}, prefix {prefix},"
            verb = "is only in the first" if gone else "is only in the second"
            found.append(
                Difference(
                    what="coverage",
                    path=f"rank_{rank}/{prefix}",
                    old=f"rank_{rank}/{prefix}" if gone else None,
                    new=None if gone else f"rank_{rank}/{prefix}",
                    sentence=f"{said} {verb}",
                )
            )
    return found


def _compare_rank(old: EntrySide, new: EntrySide, place: tuple[int, str]) -> tuple[list[Difference], list[Difference]]:
    """Return the guards that differ, and the rest of what differs in one rank and prefix."""
    if old.manifest_bytes(place) == new.manifest_bytes(place):
        return [], []  # it holds the digests of all else
    before, after = old.manifest(place), new.manifest(place)
    files = before.files, after.files
    guards: list[Difference] = []
    pieces: list[Difference] = []
    if files[0].get(PLAN_FILE) != files[1].get(PLAN_FILE):
        guards, pieces = _compare_plans(old.plan(place), new.plan(place))
    rest = [
        *pieces,
        *coverage_differences(before, after),
        *fallback_differences(before, after),
        *artifact_differences(before, after),
    ]
    if not guards and not rest:
        rest = [
            _file(name, files[0].get(name), files[1].get(name))
            for name in sorted(files[0].keys() | files[1].keys())
            if files[0].get(name) != files[1].get(name)
        ]
    return guards, rest


def _compare_plans(old: Plan, new: Plan) -> tuple[list[Difference], list[Difference]]:
    guards = guard_differences(old, new)
    pieces: list[Difference] = []
    for path, was, now in (("plan.method", old.method, new.method), ("plan.qualname", old.qualname, new.qualname)):
        if was != now:
            said = f"{path} was {was} and is {now} now"
            guards.append(Difference(what="guard", path=path, old=was, new=now, sentence=said))
    news = _by_name(new)
    pairs = [(name, variant, news[name]) for name, variant in _by_name(old).items() if name in news]
    pieces += call_differences(pairs)  # after every factor: a model that is cut elsewhere returns other values
    for name, before, after in pairs:
        pieces += piece_differences(old, new, (before, after), name)
    return guards, pieces


def _by_name(plan: Plan) -> dict[str, Variant]:
    return {variant_name(variant.name, variant.fixed): variant for variant in plan.variants}


def _file(name: str, old: object, new: object) -> Difference:
    """Return the difference of a file of a rank folder in which nothing else was found to differ."""
    digests = [getattr(side, "sha256", None) for side in (old, new)]
    if None in digests:
        said = f"{name} is only in the {'first' if digests[1] is None else 'second'}"
    else:
        said = f"{name} differs, in nothing that another line would name"
    return Difference(what="entry", path=name, old=digests[0], new=digests[1], sentence=said)
