"""`prune`: what would go from a cache and why, and its removal. Prints nothing; importable without torch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgtool.errors import CacheError
from cgtool.events import Event, OnEvent, ignore
from cgtool.store.files import os_errors_as_cache_errors
from cgtool.store.layout import CacheLayout, resolve_root
from cgtool.store.pruned import Pruned, all_pruned
from cgtool.toolkit.prune.execute import carry_out
from cgtool.toolkit.prune.foreign import carry_out_foreign, is_foreign, make_foreign_plan
from cgtool.toolkit.prune.plan import make_plan
from cgtool.toolkit.prune.records import Outcome, Plan, Rules

SCHEMA = 1
OWN = "cgtool"


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """What the user asked of `prune`.

    Args:
        rules: Which entries and leftovers go.
        cache_dir: The cache's root; None means the configured or the user's own.
        pythonpath: Folders in which traced modules are looked for first, to tell what is stale.
    """

    rules: Rules
    cache_dir: Path | None = None
    pythonpath: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PruneReport:
    """A plan, and what came of it.

    Args:
        plan: What goes.
        outcome: What came of it; None where nothing was done.
        now: Seconds since the epoch.
    """

    plan: Plan
    outcome: Outcome | None
    now: float

    def to_json(self) -> dict[str, Any]:
        """Return the document that `prune --json` prints: the plan, and its outcome or null."""
        outcome = None if self.outcome is None else self.outcome.to_json()
        return {**self.plan.to_json(), "outcome": outcome}


@dataclass(frozen=True, kw_only=True)
class StatsReport:
    """What earlier prunes removed and how often that was missed.

    Args:
        root: The cache's root.
        pruned: One record for each set of cheap facts, the most missed first.
        now: Seconds since the epoch.
    """

    root: Path
    pruned: tuple[Pruned, ...]
    now: float

    @property
    def misses(self) -> int:
        """How many lookups missed what a prune had removed."""
        return sum(record.misses for record in self.pruned)

    def to_json(self) -> dict[str, Any]:
        """Return the document that `prune --stats --json` prints."""
        return {
            "schema": SCHEMA,
            "root": str(self.root),
            "misses": self.misses,
            "pruned": [record.to_json() for record in self.pruned],
        }


@os_errors_as_cache_errors()
def plan_prune(options: PruneOptions, on_event: OnEvent = ignore) -> PruneReport:
    """Return what a prune would do; changes nothing.

    Args:
        options: What the user asked for.
        on_event: Told that the cache is being read.

    Raises:
        CacheError: There is no such folder, or it cannot be listed.
        UsageError: A hash that was asked for is no entry's, or more than one entry's.
    """
    root = _root(options.cache_dir)
    on_event(Event(phase="prune", message="reading the cache"))
    if is_foreign(root):
        plan = make_foreign_plan(root, options.rules)
    else:
        plan = make_plan(CacheLayout(root=root), options.rules, pythonpath=options.pythonpath)
    return PruneReport(plan=plan, outcome=None, now=time.time())


def prune(planned: PruneReport, on_event: OnEvent = ignore) -> PruneReport:
    """Do what a plan says, as far as that is still so.

    Args:
        planned: What `plan_prune` returned.
        on_event: Told of each folder as it goes.

    Returns:
        The plan and what came of it; what could not be removed is told there.
    """
    plan = planned.plan
    outcome = carry_out(plan, on_event) if plan.system == OWN else carry_out_foreign(plan)
    return PruneReport(plan=plan, outcome=outcome, now=time.time())


@os_errors_as_cache_errors()
def prune_stats(cache_dir: Path | None) -> StatsReport:
    """Return what earlier prunes removed and how often that was missed.

    Args:
        cache_dir: The cache's root; None means the configured or the user's own.

    Raises:
        CacheError: There is no such folder.
    """
    root = _root(cache_dir)
    return StatsReport(root=root, pruned=all_pruned(CacheLayout(root=root)), now=time.time())


def _root(cache_dir: Path | None) -> Path:
    """The cache's root: one that was named must be there, and the default one may wait for its first warm."""
    root = resolve_root(cache_dir)
    if not root.is_dir() and (cache_dir is not None or root.exists()):
        what = "is a file and not a cache folder" if root.exists() else "does not exist"
        raise CacheError(f"{root} {what}. Name the folder of a cache.", path=root)
    return root
