"""Pruning cgtool's own cache: from rules to a plan, and its execution. Must not import torch.

A plan changes nothing and takes no lock for longer than it takes to see that nobody holds it. As it is executed, an
entry goes in this order, so that whenever this process dies the cache is as before or as after::

    1. state/pruned says so: a record of an entry that is there says nothing
    2. under the entry's claim (`cgtool.store.leases`), and if nobody used or changed it since the plan was made:
       rename it into the trash. From here on it is gone, whole, for everyone who has not opened its files
    3. flush the rename to the disk
    4. under the claim again, and unless the entry is back by now (warmed again, say): remove the marks of the lookup,
       then stamps and locks
    5. delete what lies in the trash

Killed before 2 it is as before; killed after 2 as after, and the next prune or warm deletes the rest. Marks that are
left over lead to an entry without `key.json`, which a lookup passes by. Units go the same way, under their own locks.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cgtool.errors import CacheError
from cgtool.events import Event, OnEvent, ignore
from cgtool.host import gc_paused
from cgtool.store.files import may_exist
from cgtool.store.layout import CacheLayout, short
from cgtool.store.leases import LeaseTable, claimed, remove_idle, require_locks
from cgtool.store.machine import Machine
from cgtool.store.pruned import PrunedEntry, flush, note_pruned
from cgtool.store.records import timestamp
from cgtool.store.walk import EntryView, status_of
from cgtool.toolkit.prune.choose import Chooser, StaleFinder
from cgtool.toolkit.prune.leftovers import CacheFacts, Leftover, LeftoverFinder, Remover
from cgtool.toolkit.prune.plan import TOO_LARGE, Kept, Outcome, Plan, PlannedEntry, PlannedFile, Reason, Rules
from cgtool.toolkit.prune.removal import Ledger, disk_usage

_log = logging.getLogger(__name__)

#: Entries that may serve instead of one that goes are named up to so many.
_MOST_NAMED = 3
#: What no file that was planned is.
_NEW = (-1, -1)
#: Rules that speak of when an entry was used: one that is used between plan and deed stays.
_BY_USE = frozenset({"older_than", "max_size", "keep_last"})


def make_plan(
    layout: CacheLayout,
    rules: Rules,
    *,
    pythonpath: Sequence[str] = (),
    machine: Machine | None = None,
    now: float | None = None,
) -> OwnPlan:
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
        leases = LeaseTable(layout)
        finder = LeftoverFinder(layout, leases, now=made)
        facts = CacheFacts.of(layout, finder, artifacts=rules.units or rules.for_entries)
        stale = StaleFinder(layout, pythonpath=pythonpath, machine=machine)
        chooser = Chooser(layout, facts.entries, rules, leases, stale, now=made)
        return _Planner(facts, rules, chooser, finder, made).plan()


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
        self._shares = Counter[str]()
        self._units_of: dict[str, list[str]] = {}
        if rules.for_entries:
            for entry in facts.entries.values():
                self._shares.update(entry.artifacts.keys())
        if rules.for_entries and not rules.keep_units:
            for key, files in facts.units.items():
                for name in files:
                    if name in self._shares:
                        self._units_of.setdefault(name, []).append(key)

    def plan(self) -> OwnPlan:
        rules = self._rules
        if rules.for_leftovers:
            self._add_files(self._leftovers.find(self._facts))
        chosen = self._chooser.chosen()
        for hash_ in sorted(chosen, key=lambda hash_: (self._chooser.last_seen(self._facts.entries[hash_]), hash_)):
            self._add_entry(self._facts.entries[hash_], chosen[hash_])
        self._add_unshared_units()
        size = None if rules.max_bytes is None else disk_usage(str(self._facts.layout.base))
        if rules.max_bytes is not None and size is not None:
            self._make_room(size, rules.max_bytes)
            self._add_unshared_units()
        if not self._facts.is_readable and (rules.units or (rules.for_entries and not rules.keep_units)):
            self._notes.append("Parts of the cache cannot be read, so units that may be shared with them stay.")
        self._note_unseen()
        return OwnPlan(
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
            whole = [
                item
                for item in self._leftovers.unshared_units(self._facts, gone)
                if item[0][-64:] not in self._planned_units
            ]
            self._planned_units.update(path[-64:] for path, _ in whole)
            self._add_files(whole)

    def _units_with(self, entry: EntryView) -> tuple[str, ...]:
        """The keys of the units that go with an entry, for no other shares them that stays."""
        last = [name for name in entry.artifacts if self._shares[name] == 1] if self._facts.is_readable else []
        found = dict.fromkeys(key for name in last for key in self._units_of.get(name, ()))
        return tuple(key for key in found if key not in self._planned_units)

    def _add_entry(self, entry: EntryView, reasons: tuple[Reason, ...]) -> None:
        size, frees = self._ledger.take(self._base + entry.hash)
        units = self._units_with(entry)
        for name in entry.artifacts:
            self._shares[name] -= 1
        for key in units:
            frees += self._ledger.take_files(f"{self._base}units/{key[:2]}/{key}", self._facts.units[key])
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
        planned = {entry.hash for entry in self._entries}
        stays = {kept.hash for kept in self._chooser.kept if kept.why != "cannot_tell"}
        for entry in self._chooser.by_last_use():
            if size - self._ledger.freed_bytes <= most:
                return
            if entry.hash in planned or entry.hash in stays or not self._frees(entry):
                continue
            if self._chooser.may_go(entry, (TOO_LARGE,)):
                self._add_entry(entry, (TOO_LARGE,))
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

    def _with_substitutes(self) -> list[PlannedEntry]:
        """The planned entries, each with the entries that stay and that the same cheap facts lead to."""
        gone = {entry.hash for entry in self._entries}
        staying: dict[str, list[str]] = {}
        for hash_, entry in self._facts.entries.items():
            if hash_ not in gone:
                for digest in entry.lookup:
                    staying.setdefault(digest, []).append(hash_)
        instead = [[hash_ for digest in entry.lookup for hash_ in staying.get(digest, ())] for entry in self._entries]
        return [
            replace(entry, instead=tuple(dict.fromkeys(hashes))[:_MOST_NAMED])
            for entry, hashes in zip(self._entries, instead, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class OwnPlan(Plan):
    """What a prune of cgtool's own cache would do."""

    def execute(self, on_event: OnEvent = ignore) -> Outcome:
        """Remove what the plan names, as far as that is still so; what cannot be removed is told in the outcome.

        Args:
            on_event: Told of each folder as it goes.

        Raises:
            CacheError: File locks do not work there, so that nobody can tell what is used.
        """
        require_locks(CacheLayout(root=self.root))
        return _Execution(self, on_event).run()


class _Execution:
    """One carrying out of a plan; holds what its steps share."""

    def __init__(self, plan: OwnPlan, on_event: OnEvent) -> None:
        self._plan = plan
        self._on_event = on_event
        self._layout = CacheLayout(root=plan.root)
        self._remover = Remover(self._layout)
        self._removed: list[PlannedEntry] = []
        self._kept: list[Kept] = []

    def run(self) -> Outcome:
        remover, aside = self._remover, self._remover.aside
        # Leftovers first: on a full disk they make room for what follows.
        num_files = sum(map(remover.leftover, self._plan.files))
        self._remember()
        for entry in self._plan.entries:
            self._entry(entry)
        for entry in self._removed:
            for key in entry.units:
                remover.unit(f"units/{key[:2]}/{key}")
        if aside:
            flush(self._layout, self._layout.base)
        for entry in self._removed:
            self._forget(entry)
        for hash_ in remover.unfinished:
            remove_idle(self._layout, hash_)
        for done, path in enumerate(aside):
            self._on_event(Event(phase="prune", message="removing", done=done, total=len(aside)))
            remover.removal.delete(path)
        return Outcome(
            removed=tuple(entry.hash for entry in self._removed),
            removed_files=num_files,
            freed_bytes=remover.removal.freed_bytes,
            kept=tuple(self._kept),
            failed=tuple(remover.removal.failed),
        )

    def _remember(self) -> None:
        removed: dict[str, list[PrunedEntry]] = {}
        now = timestamp()
        for entry in self._plan.entries:
            why = "; ".join(reason.sentence for reason in entry.reasons)
            told = PrunedEntry(hash=entry.hash, model=entry.model, when=now, why=why)
            for digest in entry.lookup:
                removed.setdefault(digest, []).append(told)
        try:
            note_pruned(self._layout, removed)
        except CacheError as error:  # to make room on a full disk matters more
            _log.warning("What is pruned could not be noted, so that misses of it will not be explained: %s", error)

    def _entry(self, entry: PlannedEntry) -> None:
        with claimed(self._layout, entry.hash) as mine:
            if not mine:
                self._keep(entry, "in_use", "a live process uses it")
            elif self._changed(entry):
                self._keep(entry, "used_meanwhile", "it was used or changed after the plan was made")
            elif self._remover.put_aside(f"{self._layout.base}/{entry.hash}"):
                self._removed.append(entry)

    def _changed(self, entry: PlannedEntry) -> bool:
        """Whether an entry was loaded or written since the plan was made, whatever the clocks say."""
        by_use = all(reason.rule in _BY_USE for reason in entry.reasons)
        try:
            names = list(self._layout.rank_names(entry.hash))
        except CacheError:
            return True
        manifests = {name.flat: status_of(self._layout.manifest_file(name)) for name in names}
        stamps = {name.flat: status_of(self._layout.used_file(name)) for name in names} if by_use else {}
        return any(entry.manifests.get(flat, _NEW) != status for flat, status in manifests.items()) or any(
            entry.stamps.get(flat) != status for flat, status in stamps.items()
        )

    def _forget(self, entry: PlannedEntry) -> None:
        with claimed(self._layout, entry.hash) as mine:
            if not mine or may_exist(self._layout.entry_dir(entry.hash)):
                return  # its marks are in use again, or the next prune's to remove
            self._remover.forget(entry.names, entry.lookup, entry.hash)
        remove_idle(self._layout, entry.hash)

    def _keep(self, entry: PlannedEntry, why: Literal["in_use", "used_meanwhile"], sentence: str) -> None:
        self._kept.append(Kept(hash=entry.hash, model=entry.model, why=why, sentence=sentence))
