"""`prune`: plan what to remove from a cache, and report earlier prunes. Prints nothing; must not import torch."""

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
    """Plan a prune; change nothing.

    Args:
        rules: Which entries and leftovers to remove.
        cache_dir: The cache's root; None means the configured root or the user's default.
        pythonpath: Folders searched first for traced modules, to tell which entries are stale.
        on_event: Called when the cache is about to be read.

    Raises:
        CacheError: The folder does not exist, cannot be listed, or was written by another system.
        UsageError: A requested hash matches no entry, or several.
    """
    root = _root(cache_dir)
    on_event(Event(phase="prune", message="reading the cache"))
    layout = CacheLayout(root=root)
    if not layout.tag.exists() and not layout.hashes():
        check_own(root)
    return make_plan(layout, rules, pythonpath=pythonpath)


class PruneStats(Record, frozen=True, kw_only=True, omit_defaults=False):
    """What earlier prunes removed and how often lookups missed it, as `prune --stats --json` prints it."""

    schema: int = SCHEMA
    root: str
    #: How many lookups missed something that a prune had removed.
    misses: int
    #: One record for each lookup digest, most missed first.
    pruned: tuple[Pruned, ...]


@os_errors_as_cache_errors()
def prune_stats(cache_dir: Path | None) -> PruneStats:
    """Return what earlier prunes removed, and how often lookups missed it.

    Args:
        cache_dir: The cache's root; None means the configured root or the user's default.

    Raises:
        CacheError: The folder does not exist.
    """
    root = _root(cache_dir)
    pruned = all_pruned(CacheLayout(root=root))
    return PruneStats(root=str(root), misses=sum(record.misses for record in pruned), pruned=pruned)


def _root(cache_dir: Path | None) -> Path:
    """Resolve the cache's root, which must exist if it was named; the default appears with the first warm."""
    root = resolve_root(cache_dir)
    if not root.is_dir() and (cache_dir is not None or root.exists()):
        what = "is a file and not a cache folder" if root.exists() else "does not exist"
        raise CacheError(f"{root} {what}. Name the folder of a cache.", path=root)
    return root
