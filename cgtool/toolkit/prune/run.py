"""`prune`: what would go from a cache and why, and what earlier prunes removed. Prints nothing; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cgtool.errors import CacheError
from cgtool.events import Event, OnEvent, ignore
from cgtool.plan.grammar import Record
from cgtool.store.files import os_errors_as_cache_errors
from cgtool.store.layout import CacheLayout, resolve_root
from cgtool.store.pruned import Pruned, all_pruned
from cgtool.toolkit.foreign.detect import check_own
from cgtool.toolkit.prune.plan import SCHEMA, Plan, Rules
from cgtool.toolkit.prune.planner import make_plan


@os_errors_as_cache_errors()
def plan_prune(
    rules: Rules, *, cache_dir: Path | None = None, pythonpath: Sequence[str] = (), on_event: OnEvent = ignore
) -> Plan:
    """Return what a prune would do; changes nothing.

    Args:
        rules: Which entries and leftovers go.
        cache_dir: The cache's root; None means the configured or the user's own.
        pythonpath: Folders in which traced modules are looked for first, to tell what is stale.
        on_event: Told that the cache is being read.

    Raises:
        CacheError: There is no such folder, it cannot be listed, or another system wrote it.
        UsageError: A hash that was asked for is no entry's, or more than one entry's.
    """
    root = _root(cache_dir)
    on_event(Event(phase="prune", message="reading the cache"))
    layout = CacheLayout(root=root)
    if not layout.tag.exists() and not layout.hashes():
        check_own(root)
    return make_plan(layout, rules, pythonpath=pythonpath)


class PruneStats(Record, frozen=True, kw_only=True, omit_defaults=False):
    """What earlier prunes removed and how often that was missed, as `prune --stats --json` prints it."""

    schema: int = SCHEMA
    root: str
    #: How many lookups missed what a prune had removed.
    misses: int
    #: One record for each set of cheap facts, the most missed first.
    pruned: tuple[Pruned, ...]


@os_errors_as_cache_errors()
def prune_stats(cache_dir: Path | None) -> PruneStats:
    """Return what earlier prunes removed and how often that was missed.

    Args:
        cache_dir: The cache's root; None means the configured or the user's own.

    Raises:
        CacheError: There is no such folder.
    """
    root = _root(cache_dir)
    pruned = all_pruned(CacheLayout(root=root))
    return PruneStats(root=str(root), misses=sum(record.misses for record in pruned), pruned=pruned)


def _root(cache_dir: Path | None) -> Path:
    """The cache's root: one that was named must be there, and the default one may wait for its first warm."""
    root = resolve_root(cache_dir)
    if not root.is_dir() and (cache_dir is not None or root.exists()):
        what = "is a file and not a cache folder" if root.exists() else "does not exist"
        raise CacheError(f"{root} {what}. Name the folder of a cache.", path=root)
    return root
