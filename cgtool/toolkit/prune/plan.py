"""From rules to a plan: what goes, why, what comes free, and what will miss afterwards. Must not import torch.

A plan changes nothing and takes no lock for longer than it takes to see that nobody holds it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from cgtool.host import gc_paused
from cgtool.records import replace
from cgtool.store.layout import CacheLayout, short
from cgtool.store.leases import LeaseTable
from cgtool.store.walk import EntryView
from cgtool.toolkit.prune.choose import Chooser
from cgtool.toolkit.prune.collect import CacheFacts, collect
from cgtool.toolkit.prune.ledger import Ledger, disk_usage
from cgtool.toolkit.prune.leftovers import Leftover, LeftoverFinder
from cgtool.toolkit.prune.records import Plan, PlannedEntry, PlannedFile, Reason, Rules, unique
from cgtool.toolkit.prune.stale import StaleFinder

if TYPE_CHECKING:
    from cgtool.store.machine import Machine

#: Entries that may serve instead of one that goes are named up to so many.
_MOST_NAMED = 3


def make_plan(
    layout: CacheLayout,
    rules: Rules,
    *,
    pythonpath: Sequence[str] = (),
    machine: Machine | None = None,
    now: float | None = None,
) -> Plan:
    """Return what a prune by these rules would do.

    Args:
        layout: Where the cache lies.
        rules: What was asked for.
        pythonpath: Folders in which traced modules are looked for first, for `rules.stale`.
        machine: What entries are compared with; None asks this machine.
        now: Seconds since the epoch; None for now.

    Raises:
        CacheError: The cache folder cannot be listed.
        UsageError: A hash in the rules is no entry's, or more than one entry's.
    """
    made = time.time() if now is None else now
    with gc_paused():  # hundreds of thousands of names, none of which is garbage
        facts = collect(layout, whole_units=rules.units or rules.for_entries)
        leases = LeaseTable(layout)
        stale = StaleFinder(layout, pythonpath=pythonpath, machine=machine)
        chooser = Chooser(facts, rules, leases, stale, now=made)
        return _Planner(facts, rules, chooser, LeftoverFinder(facts, leases, now=made), made).plan()


class _Planner:
    """One making of a plan; holds what its steps share."""

    def __init__(
        self, facts: CacheFacts, rules: Rules, chooser: Chooser, leftovers: LeftoverFinder, made: float
    ) -> None:
        self._facts = facts
        self._rules = rules
        self._chooser = chooser
        self._leftovers = leftovers
        self._made = made
        self._base = f"{facts.layout.base}/"
        self._ledger = Ledger()
        self._entries: list[PlannedEntry] = []
        self._files: list[PlannedFile] = []
        self._notes: list[str] = []
        self._planned_units: set[str] = set()
        self._readable = facts.readable
        self._shares = Counter[str]()
        self._units_of: dict[str, list[str]] = {}
        if rules.for_entries:
            for entry in facts.entries.values():
                self._shares.update(entry.artifacts.keys())
        if rules.for_entries and not rules.keep_units:
            self._index_units()

    def plan(self) -> Plan:
        rules = self._rules
        if rules.for_leftovers:
            self._add_files(self._leftovers.find())
        chosen = self._chooser.chosen()
        for hash_ in sorted(chosen, key=lambda hash_: (self._chooser.last_seen(self._facts.entries[hash_]), hash_)):
            self._add_entry(self._facts.entries[hash_], chosen[hash_])
        self._add_unshared_units()
        size = None if rules.max_bytes is None else disk_usage(str(self._facts.layout.base))
        if rules.max_bytes is not None and size is not None:
            self._make_room(size, rules.max_bytes)
            self._add_unshared_units()
        if not self._readable and (rules.units or (rules.for_entries and not rules.keep_units)):
            self._notes.append("Parts of the cache cannot be read, so units that may be shared with them stay.")
        self._note_unseen()
        return Plan(
            root=self._facts.layout.root,
            rules=rules,
            entries=tuple(self._with_substitutes()),
            files=tuple(self._files),
            kept=tuple(self._chooser.kept),
            size_bytes=size,
            notes=tuple(self._notes),
            made=self._made,
        )

    def _note_unseen(self) -> None:
        """Name what no rule could look at: an entry whose folder cannot be listed would stay, and nobody would know."""
        entries = self._facts.entries.values()
        unseen = sorted(
            entry.hash for entry in entries if not (entry.is_readable or entry.is_link or entry.is_finished)
        )
        if self._rules.for_entries and unseen:
            more = f" and {len(unseen) - 1} more" if len(unseen) > 1 else ""
            self._notes.append(
                f"Left alone, as it cannot be looked into: entry {short(unseen[0])}{more}. Check permissions and links."
            )

    def _add_files(self, found: Iterable[Leftover]) -> None:
        for path, kind in found:
            _, frees = self._ledger.take(self._base + path)
            self._files.append(PlannedFile(path=path, kind=kind, frees_bytes=frees))

    def _add_unshared_units(self) -> None:
        """Add the units that no entry shares which stays, where that was asked for: ahead of entries that make room."""
        if self._rules.units:
            gone = frozenset(entry.hash for entry in self._entries)
            whole = [item for item in self._leftovers.unshared_units(gone) if item[0][-64:] not in self._planned_units]
            self._planned_units.update(path[-64:] for path, _ in whole)
            self._add_files(whole)

    def _units_with(self, entry: EntryView) -> tuple[str, ...]:
        """The keys of the units that go with an entry, for no other shares them that stays."""
        last = [name for name in entry.artifacts if self._shares[name] == 1] if self._readable else []
        found = unique(key for name in last for key in self._units_of.get(name, ()))
        return tuple(key for key in found if key not in self._planned_units)

    def _add_entry(self, entry: EntryView, reasons: tuple[Reason, ...]) -> None:
        size, frees = self._ledger.take(self._base + entry.hash)
        units = self._units_with(entry)
        for name in entry.artifacts:
            self._shares[name] -= 1
        for key in units:
            files = [name for name in self._facts.units[key] if name != "lock"]  # which is empty
            frees += self._ledger.take_files(f"{self._base}units/{key[:2]}/{key}", files)
        self._planned_units.update(units)
        self._entries.append(
            PlannedEntry(
                hash=entry.hash,
                names=tuple(rank.name for rank in entry.ranks),
                model=entry.model,
                created=entry.created,
                last_used=self._chooser.last_used(entry),
                size_bytes=size,
                frees_bytes=frees,
                units=units,
                reasons=reasons,
                lookup=entry.lookup,
                manifests={rank.name.flat: rank.manifest_status for rank in entry.ranks},
                stamps={rank.name.flat: self._chooser.stamps.get(rank.name.flat) for rank in entry.ranks},
            )
        )

    def _make_room(self, size: int, most: int) -> None:
        """Add the entries used longest ago until what stays is no more than `most`."""
        reason = (Reason(rule="max_size", sentence="the cache is too large, and it was used longest ago"),)
        planned = {entry.hash for entry in self._entries}
        stays = {kept.hash for kept in self._chooser.kept if kept.why != "cannot_tell"}
        for entry in self._chooser.by_last_use():
            if size - self._ledger.freed_bytes <= most:
                return
            if entry.hash in planned or entry.hash in stays or not self._frees(entry):
                continue
            if self._chooser.may_go(entry, reason):
                self._add_entry(entry, reason)
        left = size - self._ledger.freed_bytes
        if left > most:
            self._notes.append(
                f"The cache will still take {left} bytes, more than the {most} asked for: the rest is in use, is kept "
                "by a rule, or has other names on this disk."
            )

    def _frees(self, entry: EntryView) -> bool:
        """Whether any byte comes free with an entry: all its files may have other names on this disk."""
        units = (f"{self._base}units/{key[:2]}/{key}" for key in self._units_with(entry))
        return self._ledger.would_free([self._base + entry.hash, *units])

    def _index_units(self) -> None:
        for key, files in self._facts.units.items():
            for name in files:
                if name in self._shares:
                    self._units_of.setdefault(name, []).append(key)

    def _with_substitutes(self) -> list[PlannedEntry]:
        """The planned entries, each with the entries that stay and that the same cheap facts lead to."""
        gone = {entry.hash for entry in self._entries}
        staying: dict[str, list[str]] = {}
        for hash_, entry in self._facts.entries.items():
            if hash_ not in gone:
                for digest in entry.lookup:
                    staying.setdefault(digest, []).append(hash_)
        return [
            replace(entry, instead=unique(h for digest in entry.lookup for h in staying.get(digest, ()))[:_MOST_NAMED])
            for entry in self._entries
        ]
