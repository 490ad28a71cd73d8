"""Pruning the caches of other systems: what `cgtool.toolkit.foreign` says may be removed, by age, size and name.

No other system keeps leases, stamps of use or records of models, so that `stale`, `orphans`, `units` and `keep_last`
have no meaning there. An entry that was written within the last hour may be half written and stays unless it is named;
one that shares files with others stays always, and says why. An entry is renamed first, then deleted::

    .<name>.<pid>.<token>.cgtool-pruned       beside where it lay; the next prune of the same cache removes leftovers

Must not import torch.
"""

from __future__ import annotations

import os
import secrets
import time
from datetime import datetime
from pathlib import Path

from msgspec import structs

from cgtool.errors import UsageError
from cgtool.events import OnEvent
from cgtool.store.files import cache_error, sync_folder
from cgtool.toolkit.foreign.detect import read_cache
from cgtool.toolkit.foreign.records import ForeignCache
from cgtool.toolkit.prune.plan import HOUR_SECS, Keeper, Kept, Outcome, Plan, PlannedEntry, PlannedFile, Planner, Rules
from cgtool.toolkit.prune.removal import Removal

_SUFFIX = ".cgtool-pruned"
#: So deep below a cache's root entries lie, and so leftovers of pruning them.
_DEPTHS = ("", "*/", "*/*/")


def make_foreign_plan(root: Path, rules: Rules, *, now: float | None = None) -> Plan:
    """Return what a prune of another system's cache would do."""
    cache = read_cache(root)
    asked = {"stale": rules.stale, "orphans": rules.orphans, "units": rules.units, "keep-last": rules.keep_last}
    wrong = [f"--{word}" for word, value in asked.items() if value not in (False, None)]
    if wrong:
        raise UsageError(
            f"{', '.join(wrong)} cannot be told of a cache of {cache.system}. Use --older-than, --max-size or --entry.",
            path=root,
        )
    for text in rules.entries:
        if not any(entry.name.startswith(text) for entry in cache.entries):
            raise UsageError(f"No entry's name begins with {text!r}. `cgtool inspect cache` lists them.", actual=text)
    return _ForeignPlanner(cache, rules, time.time() if now is None else now).plan()


class _ForeignPlanner(Planner):
    """One making of a plan; holds what its steps share."""

    def __init__(self, cache: ForeignCache, rules: Rules, now: float) -> None:
        super().__init__(rules, now)
        self._cache = cache
        #: Of two that have one name, the next prune finds the other.
        self._entries = {entry.name: entry for entry in cache.entries}

    def plan(self) -> Plan:
        rules, cache = self.rules, self._cache
        found = {path.relative_to(cache.root) for depth in _DEPTHS for path in cache.root.glob(f"{depth}.*{_SUFFIX}")}
        files = [
            PlannedFile(path=str(path), kind="trash", frees_bytes=self.ledger.take(str(cache.root / path))[1])
            for path in sorted(found)
        ]
        entries = [
            PlannedEntry(
                hash=entry.name,
                model=", ".join(entry.prefixes) or entry.kind,
                created=_epoch(entry.created),
                last_used=_epoch(entry.last_used),
            )
            for entry in self._entries.values()
        ]
        self.notes += cache.warnings
        self.choose(entries)
        if rules.max_bytes is not None:
            self.make_room(entries, cache.size_bytes, rules.max_bytes)
        if rules.older_than_secs is not None and not any(entry.last_used for entry in entries):
            self.notes.append("This disk notes no reads, so ages count from when entries were written.")
        if not rules.for_entries:
            self.notes.append(f"No rule was given, so that nothing is chosen. {cache.deletion}")
        return Plan(
            root=cache.root,
            rules=rules,
            entries=tuple(self.chosen.values()),
            files=tuple(files),
            kept=tuple(self.kept),
            size_bytes=cache.size_bytes,
            notes=tuple(self.notes),
            system=cache.system,
            carry_out=self.carry_out,
        )

    def is_named(self, entry: PlannedEntry) -> bool:
        return entry.hash.startswith(self.rules.entries)

    def last_seen(self, entry: PlannedEntry) -> float:
        # A disk notes a read late or never, so that what it says of one may be older than the writing.
        return max((at for at in (entry.last_used, entry.created) if at is not None), default=self.now)

    def keeper(self, entry: PlannedEntry, *, named: bool) -> Keeper | None:
        found, root = self._entries[entry.hash], self._cache.root
        if not found.deletable:
            return "shared", found.why_not
        if found.path == root or not found.path.is_relative_to(root) or found.path.is_symlink():
            return "shared", "it is no folder below the cache's own: name the cache that it lies in"
        if not named and self.now - _newest(found.path) < HOUR_SECS:
            return "in_use", "it was written within the last hour, and may not be finished"
        return None

    def take(self, entry: PlannedEntry) -> PlannedEntry:
        size, frees = self.ledger.take(str(self._entries[entry.hash].path))
        return structs.replace(entry, size_bytes=size, frees_bytes=frees)

    def carry_out(self, plan: Plan, _: OnEvent) -> Outcome:
        """Remove what a plan names, as far as that is still so; it is done in a blink, so nobody is told."""
        removal = Removal()
        removed: list[str] = []
        kept: list[Kept] = []
        num_files = sum(removal.delete(str(plan.root / file.path)) for file in plan.files)
        for entry in plan.entries:
            path = self._entries[entry.hash].path
            if _newest(path) > self.now:
                sentence = "it was written after the plan was made"
                kept.append(Kept(hash=entry.hash, model=entry.model, why="used_meanwhile", sentence=sentence))
                continue
            aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(6)}{_SUFFIX}")
            try:
                path.rename(aside)
            except FileNotFoundError:
                continue
            except OSError as error:
                removal.fail(str(path), cache_error(error, path, doing="removed"))
                continue
            sync_folder(path.parent)
            removed.append(entry.hash)
            removal.delete(str(aside))
        return Outcome(
            removed=tuple(removed),
            removed_files=num_files,
            freed_bytes=removal.freed_bytes,
            kept=tuple(kept),
            failed=tuple(removal.failed),
        )


def _newest(path: Path) -> float:
    """When anything under a path was written last, seconds since the epoch; 0 where nothing is there."""
    times = [_mtime(str(path))]
    for above, folders, files in os.walk(path):
        times += [_mtime(f"{above}/{name}") for name in (*folders, *files)]
    return max(times)


def _mtime(path: str) -> float:
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return 0.0


def _epoch(text: str | None) -> float | None:
    try:
        return None if text is None else datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
