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
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from cgtool.errors import UsageError
from cgtool.events import OnEvent, ignore
from cgtool.store.files import cache_error, sync_folder
from cgtool.toolkit.foreign.detect import read_cache
from cgtool.toolkit.foreign.records import ForeignCache, ForeignEntry
from cgtool.toolkit.prune.choose import age_reason
from cgtool.toolkit.prune.leftovers import HOUR_SECS
from cgtool.toolkit.prune.plan import TOO_LARGE, Kept, Outcome, Plan, PlannedEntry, PlannedFile, Reason, Rules
from cgtool.toolkit.prune.removal import Ledger, Removal

_SUFFIX = ".cgtool-pruned"
#: So deep below a cache's root entries lie, and so leftovers of pruning them.
_DEPTHS = ("", "*/", "*/*/")


def make_foreign_plan(root: Path, rules: Rules, *, now: float | None = None) -> ForeignPlan:
    """Return what a prune of another system's cache would do.

    Args:
        root: The cache.
        rules: What was asked for; ages, sizes and names have a meaning there.
        now: Seconds since the epoch; None for now.

    Raises:
        CacheError: No known system wrote it.
        UsageError: A rule has no meaning there, or a name is no entry's.
    """
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
    return _Planner(cache, rules, time.time() if now is None else now).plan()


class _Planner:
    """One making of a plan; holds what its steps share."""

    def __init__(self, cache: ForeignCache, rules: Rules, now: float) -> None:
        self._cache = cache
        self._rules = rules
        self._now = now
        self._ledger = Ledger()
        self._kept: list[Kept] = []
        self._entries: list[PlannedEntry] = []

    def plan(self) -> ForeignPlan:
        rules, cache = self._rules, self._cache
        found = {path for depth in _DEPTHS for path in cache.root.glob(f"{depth}.*{_SUFFIX}")}
        files = [
            PlannedFile(path=name, kind="trash", frees_bytes=self._ledger.take(str(cache.root / name))[1])
            for name in sorted(str(path.relative_to(cache.root)) for path in found)
        ]
        waiting: list[ForeignEntry] = []
        for entry in sorted(cache.entries, key=lambda entry: (self._seen(entry), entry.name)):
            reasons = tuple(self._reasons(entry))
            if not reasons:
                waiting.append(entry)
            elif self._may_go(entry, reasons):
                self._add(entry, reasons)
        notes = list(cache.warnings)
        if rules.max_bytes is not None:
            self._make_room(waiting, rules.max_bytes, notes)
        if rules.older_than_secs is not None and not any(entry.last_used for entry in cache.entries):
            notes.append("This disk notes no reads, so ages count from when entries were written.")
        if not rules.for_entries:
            notes.append(f"No rule was given, so that nothing is chosen. {cache.deletion}")
        return ForeignPlan(
            root=cache.root,
            rules=rules,
            entries=tuple(self._entries),
            files=tuple(files),
            kept=tuple(self._kept),
            size_bytes=cache.size_bytes,
            notes=tuple(notes),
            made=self._now,
            system=cache.system,
        )

    def _make_room(self, waiting: list[ForeignEntry], most: int, notes: list[str]) -> None:
        for entry in waiting:
            if self._cache.size_bytes - self._ledger.freed_bytes <= most:
                return
            if self._may_go(entry, (TOO_LARGE,)):
                self._add(entry, (TOO_LARGE,))
        left = self._cache.size_bytes - self._ledger.freed_bytes
        if left > most:
            notes.append(f"The cache will still take {left} bytes, more than the {most} asked for: the rest must stay.")

    def _reasons(self, entry: ForeignEntry) -> Iterator[Reason]:
        if any(entry.name.startswith(text) for text in self._rules.entries):
            yield Reason(rule="entry", sentence="it was named")
        age = self._now - self._seen(entry)
        if self._rules.older_than_secs is not None and age > self._rules.older_than_secs:
            yield age_reason(age, used=entry.last_used is not None)

    def _may_go(self, entry: ForeignEntry, reasons: tuple[Reason, ...]) -> bool:
        named = any(reason.rule == "entry" for reason in reasons)
        path = entry.path
        if not entry.deletable:
            self._keep(entry, "shared", entry.why_not)
        elif path == self._cache.root or not path.is_relative_to(self._cache.root) or path.is_symlink():
            self._keep(entry, "shared", "it is no folder below the cache's own: name the cache that it lies in")
        elif not named and self._now - _newest(path) < HOUR_SECS:
            self._keep(entry, "in_use", "it was written within the last hour, and may not be finished")
        else:
            return True
        return False

    def _add(self, entry: ForeignEntry, reasons: tuple[Reason, ...]) -> None:
        size, frees = self._ledger.take(str(entry.path))
        self._entries.append(
            PlannedEntry(
                hash=entry.name,
                model=", ".join(entry.prefixes) or entry.kind,
                created=_epoch(entry.created),
                last_used=_epoch(entry.last_used),
                size_bytes=size,
                frees_bytes=frees,
                reasons=reasons,
                path=str(entry.path),
            )
        )

    def _seen(self, entry: ForeignEntry) -> float:
        known = [moment for text in (entry.last_used, entry.created) if (moment := _epoch(text)) is not None]
        return max(known, default=self._now)

    def _keep(self, entry: ForeignEntry, why: Literal["shared", "in_use"], sentence: str) -> None:
        self._kept.append(Kept(hash=entry.name, model=entry.kind, why=why, sentence=sentence))


@dataclass(frozen=True, kw_only=True)
class ForeignPlan(Plan):
    """What a prune of another system's cache would do."""

    def execute(self, on_event: OnEvent = ignore) -> Outcome:  # noqa: ARG002 - it is done in a blink
        """Remove what the plan names, as far as that is still so; what cannot be removed is told in the outcome.

        Args:
            on_event: Told of nothing.
        """
        removal = Removal()
        removed: list[str] = []
        kept: list[Kept] = []
        num_files = sum(removal.delete(str(self.root / file.path)) for file in self.files)
        for entry in self.entries:
            path = Path(entry.path)
            if _newest(path) > self.made:
                sentence = "it was written after the plan was made"
                kept.append(Kept(hash=entry.hash, model=entry.model, why="used_meanwhile", sentence=sentence))
                continue
            aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(6)}{_SUFFIX}")
            try:
                path.rename(aside)
            except FileNotFoundError:
                continue
            except OSError as error:
                removal.fail(entry.path, cache_error(error, path, doing="removed"))
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
