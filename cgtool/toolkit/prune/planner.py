"""Plan a prune from its rules, and carry the plan out. Must not import torch.

Planning changes nothing, and holds each lock only while testing whether it is free. Execution removes an entry in this
order, so that a kill at any instant leaves the cache as before or as after::

    1. record the removal in state/pruned; the record has no effect while the entry exists
    2. under the entry's claim (`cgtool.store.leases`), unless it was used or changed since the plan was made: rename
       it into the trash. From then on it is gone as a whole, except for processes that have its files open
    3. flush the rename to disk
    4. under the claim again, unless the entry exists again (for example, was warmed): remove the lookup markers, then
       stamps and locks
    5. delete the trash

A kill before step 2 leaves the cache as before. A kill after it leaves the cache as after, and the next prune or warm
deletes the rest; lookups ignore a remaining marker, because its entry has no `key.json`. Units are removed in the same
way, under their own locks.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from msgspec import structs

from cgtool.errors import CacheError
from cgtool.events import Event, OnEvent
from cgtool.host import gc_paused
from cgtool.store.files import may_exist
from cgtool.store.layout import CacheLayout, short
from cgtool.store.leases import LeaseTable, claimed, locked, remove_idle, require_locks
from cgtool.store.lookup import StateStore
from cgtool.store.machine import Machine
from cgtool.store.pruned import PrunedEntry, flush, note_pruned
from cgtool.store.records import timestamp
from cgtool.store.walk import EntryView, status_of
from cgtool.toolkit.prune.leftovers import Leftover, Leftovers, remove_leftovers, unit_path
from cgtool.toolkit.prune.plan import (
    DAY_SECS,
    HOUR_SECS,
    Kept,
    Outcome,
    Plan,
    PlannedEntry,
    PlannedFile,
    Reason,
    Rules,
    Why,
)
from cgtool.toolkit.prune.removal import Ledger, Removal, disk_usage
from cgtool.toolkit.prune.stale import StaleFinder
from cgtool.toolkit.selection import resolve_hash

_log = logging.getLogger(__name__)

#: How many missing modules, and how many substitutes of an entry, are named.
_MAX_NAMED = 3
_TOO_LARGE = Reason(rule="max_size", sentence="the cache is too large, and it is the least recently used")
#: The status of a manifest that did not exist when the plan was made.
_NEW = (-1, -1)
#: Rules about when an entry was used: an entry used between plan and execution is kept.
_BY_USE = frozenset({"older_than", "max_size", "keep_last"})


def make_plan(
    layout: CacheLayout,
    rules: Rules,
    *,
    pythonpath: Sequence[str] = (),
    machine: Machine | None = None,
    now: float | None = None,
) -> Plan:
    """Plan a prune by these rules."""
    made = time.time() if now is None else now
    with gc_paused():  # hundreds of thousands of live strings
        stale = StaleFinder(layout, pythonpath=pythonpath, machine=machine)
        return _Planner(layout, rules, stale, made).plan()


class _Planner:
    """The state that the steps of planning and execution share."""

    def __init__(self, layout: CacheLayout, rules: Rules, stale: StaleFinder, now: float) -> None:
        self.rules = rules
        self.now = now
        self.ledger = Ledger()
        self.chosen: dict[str, PlannedEntry] = {}
        self.kept: list[Kept] = []
        self.notes: list[str] = []
        self._layout = layout
        self._base = f"{layout.base}/"
        self._stale = stale
        self._leases = LeaseTable(layout)
        self._leftovers = Leftovers(layout, self._leases, now=now)
        self._survey = self._leftovers.survey(artifacts=rules.units or rules.for_entries)
        self._stamps = StateStore(layout).stamps()
        self._files: list[PlannedFile] = []
        self._units: set[str] = set()
        views = self._survey.entries
        self._entries = {hash_: self._entry(view) for hash_, view in views.items()}
        self._named = {resolve_hash(layout.root, text, list(views)) for text in rules.entries}
        self._last = self._last_of_models()
        #: How many entries have an artifact, and which units hold it.
        self._shares = Counter[str]()
        self._units_of: dict[str, list[str]] = {}
        if rules.for_entries:
            for view in views.values():
                self._shares.update(view.artifacts.keys())
        if rules.for_entries and not rules.keep_units:
            for key, files in self._survey.units.items():
                for name in files:
                    if name in self._shares:
                        self._units_of.setdefault(name, []).append(key)

    def plan(self) -> Plan:
        rules, survey = self.rules, self._survey
        if rules.for_leftovers:
            self._add_files(self._leftovers.find(survey))
        for entry in self._by_use(self._entries.values()):
            if reasons := tuple(self._reasons(entry)):
                self._choose(entry, reasons)
        self._add_unshared_units()
        size = None if rules.max_bytes is None else disk_usage(str(self._layout.base))
        if rules.max_bytes is not None and size is not None:
            finished = (entry for entry in self._entries.values() if survey.entries[entry.hash].is_finished)
            self._make_room(finished, size, rules.max_bytes)
            self._add_unshared_units()
        if not survey.is_readable and (rules.units or (rules.for_entries and not rules.keep_units)):
            self.notes.append("Parts of the cache cannot be read. Units that they may share are kept.")
        self._note_unseen()
        return Plan(
            root=self._layout.root,
            rules=rules,
            entries=tuple(self._with_substitutes()),
            files=tuple(self._files),
            kept=tuple(self.kept),
            size_bytes=size,
            notes=tuple(self.notes),
            carry_out=self._carry_out,
        )

    def _make_room(self, entries: Iterable[PlannedEntry], size: int, most: int) -> None:
        """Plan the least recently used entries until no more than `most` of the cache's `size` bytes remain."""
        settled = {kept.hash for kept in self.kept if kept.why != "cannot_tell"} | self.chosen.keys()
        for entry in self._by_use(entries):
            if size - self.ledger.freed_bytes <= most:
                return
            if entry.hash not in settled and self._frees(entry):
                self._choose(entry, (_TOO_LARGE,))
        left = size - self.ledger.freed_bytes
        if left > most:
            self.notes.append(
                f"The cache will still take {left} bytes, more than the requested {most}: the rest is in use, is kept "
                "by a rule, or is hard-linked from elsewhere."
            )

    def _by_use(self, entries: Iterable[PlannedEntry]) -> list[PlannedEntry]:
        return sorted(entries, key=lambda entry: (self._last_seen(entry), entry.hash))

    def _last_seen(self, entry: PlannedEntry) -> float:
        """Return when an entry was last used, else created; now if that is unknown or in the future."""
        known = entry.created if entry.last_used is None else entry.last_used
        return self.now if known is None else min(known, self.now)

    def _choose(self, entry: PlannedEntry, reasons: tuple[Reason, ...]) -> None:
        """Plan the removal of an entry that a rule selects, unless something protects it."""
        protection = self._protection(entry, named=any(reason.rule == "entry" for reason in reasons))
        if protection is not None:
            self.kept.append(_kept(entry, *protection))
        else:
            self.chosen[entry.hash] = structs.replace(self._take(entry), reasons=reasons)

    def _protection(self, entry: PlannedEntry, *, named: bool) -> tuple[Why, str] | None:
        if self._leases.is_used(entry.hash):
            return "in_use", "a live process uses it"
        if self._survey.entries[entry.hash].is_newer and not named:
            return "newer_schema", "a newer version of cgtool wrote it"
        if entry.hash in self._last and not named:
            return "keep_last", f"it is among the last {self.rules.keep_last} of {entry.model or 'its model'}"
        return None

    def _reasons(self, entry: PlannedEntry) -> Iterator[Reason]:
        rules = self.rules
        if entry.hash in self._named:
            yield Reason(rule="entry", sentence="it was named")
        if not self._survey.entries[entry.hash].is_finished:
            return
        age = self.now - self._last_seen(entry)
        if rules.older_than_secs is not None and age > rules.older_than_secs:
            how = "created and never used" if entry.last_used is None else "last used"
            yield Reason(rule="older_than", sentence=f"it was {how} {_ago(age)}")
        if rules.stale:
            changed, unknown = self._stale.reasons(entry.hash)
            yield from (Reason(rule="stale", sentence=sentence) for sentence in changed)
            if unknown and not changed:
                more = len(unknown) - _MAX_NAMED
                listed = "; ".join(unknown[:_MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")
                self.kept.append(_kept(entry, "cannot_tell", f"it may be stale: {listed}"))
        alone = rules.older_than_secs is None and rules.max_bytes is None and not rules.stale and not rules.entries
        if rules.keep_last is not None and alone and entry.hash not in self._last:
            yield Reason(rule="keep_last", sentence=f"it is not among the last {rules.keep_last} of its model")

    def _take(self, entry: PlannedEntry) -> PlannedEntry:
        """Count an entry's files as removed, and return the entry with its size and the bytes freed."""
        artifacts, units = self._survey.entries[entry.hash].artifacts, self._units_with(entry)
        size, frees = self.ledger.take(self._base + entry.hash)
        for name in artifacts:
            self._shares[name] -= 1
        for key in units:
            frees += self.ledger.take_files(self._base + unit_path(key), self._survey.units[key])
        self._units.update(units)
        return structs.replace(entry, size_bytes=size, frees_bytes=frees, units=units)

    def _frees(self, entry: PlannedEntry) -> bool:
        """Return whether removing an entry frees any byte: all its files may be hard-linked elsewhere."""
        paths = (entry.hash, *map(unit_path, self._units_with(entry)))
        return self.ledger.would_free(self._base + path for path in paths)

    def _entry(self, view: EntryView) -> PlannedEntry:
        stamps = [self._stamps[rank.name.flat] for rank in view.ranks if rank.name.flat in self._stamps]
        return PlannedEntry(
            hash=view.hash,
            model=view.model,
            ranks=tuple({"rank": rank.name.rank, "prefix": rank.name.prefix} for rank in view.ranks),
            created=view.created,
            last_used=max((used / 1e9 for used, _ in stamps), default=None),
        )

    def _last_of_models(self) -> frozenset[str]:
        """Return the hashes that `keep_last` protects."""
        if self.rules.keep_last is None:
            return frozenset()
        models: dict[tuple[str, ...], list[PlannedEntry]] = {}
        for hash_, view in self._survey.entries.items():
            if view.is_finished:
                # Group by lookup digest, not by name: two models of the same name must not displace each other.
                digests = next((manifest.lookup for manifest in view.manifests if manifest.lookup), (hash_,))
                models.setdefault(tuple(sorted(digests)), []).append(self._entries[hash_])
        kept: set[str] = set()
        for entries in models.values():
            entries.sort(key=self._last_seen, reverse=True)
            kept.update(entry.hash for entry in entries[: self.rules.keep_last])
        return frozenset(kept)

    def _note_unseen(self) -> None:
        """Note the entries that no rule could examine because their folders cannot be listed."""
        views = self._survey.entries.values()
        unseen = sorted(view.hash for view in views if not (view.is_readable or view.is_link or view.is_finished))
        if self.rules.for_entries and unseen:
            more = f" and {len(unseen) - 1} more" if len(unseen) > 1 else ""
            self.notes.append(
                f"Kept because it cannot be read: entry {short(unseen[0])}{more}. Check permissions and links."
            )

    def _add_files(self, found: Iterable[Leftover]) -> None:
        for path, kind in found:
            _, frees = self.ledger.take(self._base + path)
            self._files.append(PlannedFile(path=path, kind=kind, frees_bytes=frees))

    def _add_unshared_units(self) -> None:
        """If requested, plan the units that no remaining entry shares, before further entries that make room."""
        if self.rules.units:
            unshared = self._leftovers.unshared_units(self._survey, self.chosen)
            new = [item for item in unshared if item[0][-64:] not in self._units]
            self._units.update(path[-64:] for path, _ in new)
            self._add_files(new)

    def _units_with(self, entry: PlannedEntry) -> tuple[str, ...]:
        """Return the keys of the units to remove with an entry, because no remaining entry shares them."""
        artifacts = self._survey.entries[entry.hash].artifacts if self._survey.is_readable else {}
        last = (name for name in artifacts if self._shares[name] == 1)
        found = dict.fromkeys(key for name in last for key in self._units_of.get(name, ()))
        return tuple(key for key in found if key not in self._units)

    def _with_substitutes(self) -> Iterator[PlannedEntry]:
        """Yield the planned entries, each with the remaining entries of the same lookup digest."""
        views = self._survey.entries
        remaining: dict[str, list[str]] = {}
        for hash_, view in views.items():
            if hash_ not in self.chosen:
                for digest in view.lookup:
                    remaining.setdefault(digest, []).append(hash_)
        for hash_, entry in self.chosen.items():
            instead = dict.fromkeys(other for digest in views[hash_].lookup for other in remaining.get(digest, ()))
            yield structs.replace(entry, instead=tuple(instead)[:_MAX_NAMED])

    def _carry_out(self, plan: Plan, on_event: OnEvent) -> Outcome:
        """Remove what a plan names, if it still qualifies."""
        layout = self._layout
        require_locks(layout)
        removal = Removal(layout)
        kept, removed = list[Kept](), list[PlannedEntry]()
        # Leftovers first: on a full disk, removing them makes room for the records.
        num_files = remove_leftovers(layout, plan.files, removal)
        self._record(plan.entries)
        for entry in plan.entries:
            with claimed(layout, entry.hash) as mine:
                if not mine:
                    kept.append(_kept(entry, "in_use", "a live process uses it"))
                elif self._changed(entry):
                    kept.append(_kept(entry, "used_meanwhile", "it was used or changed after the plan was made"))
                elif removal.put_aside(f"{layout.base}/{entry.hash}"):
                    removed.append(entry)
        for path in (f"{layout.base}/{unit_path(key)}" for entry in removed for key in entry.units):
            with locked(f"{path}/lock") as mine:  # otherwise it is being compiled
                if mine:
                    removal.put_aside(path)
        if removal.aside:
            flush(layout, layout.base)
        for entry in removed:
            with claimed(layout, entry.hash) as mine:
                if not mine or may_exist(layout.entry_dir(entry.hash)):
                    continue  # its markers are in use again; if not, the next prune removes them
                _forget(f"{layout.base}/", self._survey.entries[entry.hash], removal)
            remove_idle(layout, entry.hash)
        for done, path in enumerate(removal.aside):
            on_event(Event(phase="prune", message="removing", done=done, total=len(removal.aside)))
            removal.delete(path)
        return Outcome(
            removed=tuple(entry.hash for entry in removed),
            removed_files=num_files,
            freed_bytes=removal.freed_bytes,
            kept=tuple(kept),
            failed=tuple(removal.failed),
        )

    def _record(self, entries: Iterable[PlannedEntry]) -> None:
        removed: dict[str, list[PrunedEntry]] = {}
        now = timestamp()
        for entry in entries:
            why = "; ".join(reason.sentence for reason in entry.reasons)
            record = PrunedEntry(hash=entry.hash, model=entry.model, when=now, why=why)
            for digest in self._survey.entries[entry.hash].lookup:
                removed.setdefault(digest, []).append(record)
        try:
            note_pruned(self._layout, removed)
        except CacheError as error:  # pruning matters more, for example on a full disk
            _log.warning("Cannot record what is pruned, so later misses of it will not be explained: %s", error)

    def _changed(self, entry: PlannedEntry) -> bool:
        """Return whether an entry was loaded or written since the plan was made, whatever the clocks say."""
        layout = self._layout
        by_use = all(reason.rule in _BY_USE for reason in entry.reasons)
        manifests = {rank.name: rank.manifest_status for rank in self._survey.entries[entry.hash].ranks}
        try:
            names = list(layout.rank_names(entry.hash))
        except CacheError:
            return True
        return any(
            manifests.get(name, _NEW) != status_of(layout.manifest_file(name))
            or (by_use and self._stamps.get(name.flat) != status_of(layout.used_file(name)))
            for name in names
        )


def _kept(entry: PlannedEntry, why: Why, sentence: str) -> Kept:
    return Kept(hash=entry.hash, model=entry.model, why=why, sentence=sentence)


def _ago(secs: float) -> str:
    units = ((DAY_SECS, "day"), (HOUR_SECS, "hour"), (60.0, "minute"))
    length, unit = next((pair for pair in units if secs >= pair[0]), units[-1])
    count = int(secs // length)
    return f"{count} {unit}{'' if count == 1 else 's'} ago"


def _forget(base: str, view: EntryView, removal: Removal) -> None:
    """Remove the markers, stamps and locks of a removed entry; the caller holds its claim.

    The `indexed` markers are removed first and again last: while one exists, an entry that is put back by hand is not
    indexed again, and no lookup would find it.
    """
    names = [rank.name.flat for rank in view.ranks]
    indexed = [f"{base}lookup/indexed/{name}" for name in names]
    for path in (*indexed, *(f"{base}lookup/{digest}/{view.hash}" for digest in view.lookup), *indexed):
        removal.unlink(path)
    for name in names:
        removal.unlink(f"{base}state/used/{name}")
        removal.unlink_idle(f"{base}state/locks/{name}")
