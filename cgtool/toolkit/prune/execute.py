"""Carrying out a plan, so that whenever this process dies the cache is as before or as after. Must not import torch.

An entry goes in this order::

    1. state/pruned says so: a record of an entry that is there says nothing
    2. under the entry's claim (`cgtool.store.leases`), and if nobody used or changed it since the plan was made:
       rename it into the trash. From here on it is gone, whole, for everyone who has not opened its files
    3. flush the rename to the disk
    4. under the claim again, and unless the entry is back by now (warmed again, say): remove the marks of the lookup,
       the one that says "taken in" first and last: while it is there, an entry that somebody puts back is not taken in
       again, and would be found by nobody; then stamps and locks
    5. delete what lies in the trash

Killed before 2 it is as before; killed after 2 as after, and the next prune or warm deletes the rest. Marks that are
left over lead to an entry without `key.json`, which a lookup passes by. Units go the same way, under their own locks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from cgtool.errors import CacheError
from cgtool.events import Event, OnEvent, ignore
from cgtool.store.files import may_exist, remove
from cgtool.store.layout import ARTIFACTS, CacheLayout, RankName, parse_rank_folder
from cgtool.store.leases import claimed, locked, remove_idle, remove_if_idle, require_locks
from cgtool.store.pruned import PrunedEntry, check_inside, flush, is_inside, note_pruned, put_aside, remove_tree
from cgtool.store.records import timestamp
from cgtool.store.walk import status_of
from cgtool.toolkit.prune.ledger import Ledger
from cgtool.toolkit.prune.leftovers import (
    DAY_SECS,
    is_dead,
    is_unnamed_next,
    named_artifacts,
    rests,
    trusted_manifest,
    unit_artifact,
)
from cgtool.toolkit.prune.records import Failed, Kept, Outcome, Plan, PlannedEntry

_log = logging.getLogger(__name__)

#: What no file that was planned is.
_NEW = (-1, -1)
#: Rules that speak of when an entry was used: one that is used between plan and deed stays.
_BY_USE = frozenset({"older_than", "max_size", "keep_last"})


def carry_out(plan: Plan, on_event: OnEvent = ignore) -> Outcome:
    """Remove what a plan names, as far as that is still so.

    Args:
        plan: What goes.
        on_event: Told of each folder as it goes.

    Returns:
        What is gone, and what is not and why. What cannot be removed is an item of it and no exception.

    Raises:
        CacheError: File locks do not work there, so that nobody can tell what is used.
    """
    require_locks(CacheLayout(root=plan.root))
    return _Execution(plan, on_event).run()


class _Execution:
    """One carrying out of a plan; holds what its steps share."""

    def __init__(self, plan: Plan, on_event: OnEvent) -> None:
        self._plan = plan
        self._on_event = on_event
        self._layout = CacheLayout(root=plan.root)
        self._base = f"{self._layout.base}/"
        self._ledger = Ledger()
        self._aside: list[str] = []
        self._removed: list[PlannedEntry] = []
        self._unfinished_gone: list[str] = []
        self._removed_files = 0
        self._kept: list[Kept] = []
        self._failed: list[Failed] = []
        self._lost_bytes = 0

    def run(self) -> Outcome:
        # Leftovers first: on a full disk they make room for what follows.
        self._leftovers()
        self._remember()
        for entry in self._plan.entries:
            self._entry(entry)
        for entry in self._removed:
            for key in entry.units:
                self._unit(f"units/{key[:2]}/{key}")
        if self._aside:
            flush(self._layout, self._layout.base)
        for entry in self._removed:
            self._forget(entry)
        for hash_ in self._unfinished_gone:
            remove_idle(self._layout, hash_)
        for done, path in enumerate(self._aside):
            self._on_event(Event(phase="prune", message="removing", done=done, total=len(self._aside)))
            self._delete(path)
        return Outcome(
            removed=tuple(entry.hash for entry in self._removed),
            removed_files=self._removed_files,
            freed_bytes=self._ledger.freed_bytes - self._lost_bytes,
            kept=tuple(self._kept),
            failed=tuple(self._failed),
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
            elif self._put_aside(self._base + entry.hash):
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
            self._forget_claimed(entry)
        remove_idle(self._layout, entry.hash)

    def _forget_claimed(self, entry: PlannedEntry) -> None:
        lookup, state = self._base + "lookup", self._base + "state"
        taken_in = [f"{lookup}/indexed/{name.flat}" for name in entry.names]
        for path in (*taken_in, *(f"{lookup}/{digest}/{entry.hash}" for digest in entry.lookup), *taken_in):
            self._try(path, _unlink)
        for name in entry.names:
            self._try(f"{state}/used/{name.flat}", _unlink)
            self._try(f"{state}/locks/{name.flat}", _remove_idle)

    def _leftovers(self) -> None:
        for file in self._plan.files:
            path = self._base + file.path
            remover = self._removers().get(file.kind)
            try:
                self._removed_files += remover is not None and remover(file.path, path)
            except CacheError as error:
                self._fail(path, error)

    def _removers(self) -> dict[str, Callable[[str, str], bool]]:
        return {
            "trash": lambda _, path: self._delete(path),
            "temporary": self._temporary,
            "artifact": self._artifact,
            "rank": self._unfinished,
            "unfinished": self._unfinished,
            "unit": lambda below, _: self._unit(below),
            "lookup": self._lookup,
            "state": self._state,
        }

    def _temporary(self, below: str, path: str) -> bool:
        if path.endswith(".tmp"):
            return is_dead(path, time.time()) and self._delete(path)
        hash_, rank, prefix, file = below.split("/")
        name = RankName(hash=hash_, rank=parse_rank_folder(rank) or 0, prefix=prefix)
        with claimed(self._layout, hash_, loaders=False) as mine:
            unnamed = mine and is_unnamed_next(file, trusted_manifest(self._layout, name))
            return unnamed and self._try(path, _unlink)

    def _artifact(self, below: str, path: str) -> bool:
        above, name = below.rsplit("/", 1)
        if above.startswith("units/"):
            with locked(f"{self._base}{above}/lock") as mine:
                current = unit_artifact(self._layout, above[-64:])
                return mine and current is not None and name != current and self._try(path, _unlink)
        hash_ = above.removesuffix(f"/{ARTIFACTS}")
        with claimed(self._layout, hash_, loaders=False) as mine:
            named = named_artifacts(self._layout, hash_) if mine else None
            return named is not None and name not in named and self._try(path, _unlink)

    def _unfinished(self, below: str, path: str) -> bool:
        """Remove a rank or an entry that no warm came to the end of."""
        hash_ = below.split("/", maxsplit=1)[0]
        with claimed(self._layout, hash_) as mine:
            names = [
                name for name in self._layout.rank_names(hash_) if str(self._layout.rank_dir(name)).startswith(path)
            ]
            finished = any(may_exist(self._layout.manifest_file(name)) for name in names)
            if not mine or finished or not rests(path, DAY_SECS, time.time()):
                return False
            if not self._put_aside(path):
                return False
            if below == hash_:
                self._unfinished_gone.append(hash_)
            return True

    def _unit(self, below: str) -> bool:
        path = self._base + below
        with locked(f"{path}/lock") as mine:
            return mine and self._put_aside(path)

    def _lookup(self, below: str, path: str) -> bool:
        if below.count("/") == 1:
            with contextlib.suppress(OSError):
                if is_inside(self._layout, path):
                    os.rmdir(path)  # noqa: PTH106 - paths are str all over prune
            return not may_exist(path)
        entry = self._layout.entry_dir(below.rsplit("/", 1)[1][:64])
        return not may_exist(entry) and self._try(path, _unlink)

    def _state(self, below: str, path: str) -> bool:
        _, folder, name = below.split("/")
        if folder == "pruned":
            return self._try(path, _unlink)
        flat = name.partition("~")[0]
        hash_, _, rest = flat.partition("-")
        rank = rest.removeprefix("rank_").replace("-", "/", 1)
        if may_exist(f"{self._base}{hash_}/{f'rank_{rank}' if rest else ''}"):
            return False
        return self._try(path, _unlink if folder == "used" else _remove_idle)

    def _put_aside(self, path: str) -> bool:
        try:
            aside = put_aside(self._layout, path)
        except CacheError as error:
            self._fail(path, error)
            return False
        if aside is not None:
            self._aside.append(aside)
        return aside is not None

    def _delete(self, path: str) -> bool:
        try:
            check_inside(self._layout, path)
        except CacheError as error:
            self._fail(path, error)
            return False
        _, frees = self._ledger.take(path)
        errors = list(remove_tree(path))
        for failed in errors:
            self._fail(str(failed.path), failed)
        self._lost_bytes += frees if errors else 0
        return not errors

    def _try(self, path: str, function: Callable[[str], None]) -> bool:
        frees = 0
        try:
            check_inside(self._layout, path)
            _, frees = self._ledger.take(path)
            function(path)
        except CacheError as error:
            self._fail(path, error)
        except BlockingIOError:  # it is held by now, so that it is no leftover
            pass
        else:
            return True
        self._lost_bytes += frees
        return False

    def _keep(self, entry: PlannedEntry, why: str, sentence: str) -> None:
        self._kept.append(Kept(hash=entry.hash, model=entry.model, why=why, sentence=sentence))

    def _fail(self, path: str, error: CacheError) -> None:
        self._failed.append(Failed(path=path, sentence=str(error)))


def _unlink(path: str) -> None:
    remove(Path(path))


def _remove_idle(path: str) -> None:
    if not remove_if_idle(path):
        raise BlockingIOError
