"""Reading every unit and matching it to its record. Must not import torch; writes nothing.

A unit's artifact is read with those of the entries, as most are files of theirs.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

from cgtool.records import dataclass
from cgtool.store.files import may_exist
from cgtool.store.layout import UNIT_FILE, CacheLayout, is_hash
from cgtool.store.units import parse_unit
from cgtool.toolkit.verify.digests import matched
from cgtool.toolkit.verify.findings import Note, Problem, UnitFindings, read_record
from cgtool.toolkit.verify.hashing import Done, Hashed, Hasher
from cgtool.toolkit.verify.strays import orphan, stray, unfinished

_ARTIFACT = re.compile(r"[0-9a-f]{64}\.[a-z][a-z0-9_.]*")
_LOCK = "lock"
_AHEAD = 256


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What looking into a unit's folder gave, before its artifact is read.

    Args:
        name: The artifact's file name, which begins with its digest; "" where no intact record names one.
        size_bytes: How many bytes it must have.
        record_bytes: How many bytes were read of the record.
        num_records: How many records were read: one or none.
        problems: What is wrong with the record.
        notes: What is in nobody's way.
    """

    name: str = ""
    size_bytes: int = 0
    record_bytes: int = 0
    num_records: int = 0
    problems: tuple[Problem, ...] = ()
    notes: tuple[Note, ...] = ()


def look(folder: str, key: str) -> Seen:
    """Read a unit's record, and list what lies beside it.

    Args:
        folder: The unit's folder.
        key: The unit's key.
    """
    path = f"{folder}/{UNIT_FILE}"
    record, problem, num_bytes = read_record(path, lambda data: parse_unit(data, path=path, key=key))
    name = "" if record is None else record.file
    others = sorted(other for other in _listed(folder) if other not in (UNIT_FILE, _LOCK, name))
    return Seen(
        name=name,
        size_bytes=0 if record is None else record.size_bytes,
        record_bytes=num_bytes,
        num_records=int(record is not None or problem is not None),
        problems=() if problem is None else (problem,),
        notes=tuple(_strays(folder, others, begun=record is None and problem is None)) if others else (),
    )


def _strays(folder: str, others: list[str], *, begun: bool) -> Iterator[Note]:
    if begun and any(_ARTIFACT.fullmatch(name) for name in others):
        yield unfinished(Path(folder))
        return
    for name in others:
        path = Path(folder, name)
        note = orphan(path) if _ARTIFACT.fullmatch(name) else stray(path)
        if note is not None:
            yield note


class UnitCheck:
    """One look at one unit: making it begins to read, `finish` waits for what was read.

    Args:
        folder: The unit's folder.
        key: The unit's key.
        hasher: What reads its artifact.
        fresh: Read also what `hasher` has read before.
    """

    def __init__(self, folder: str, key: str, hasher: Hasher, *, fresh: bool = False) -> None:
        self.folder = folder
        self.key = key
        self.seen = look(folder, key)
        self.artifact_bytes = 0
        self._read: Future[Hashed] | Done | None = None
        if self.seen.name:
            path = f"{folder}/{self.seen.name}"
            self._read = hasher.submit(path, limit=self.seen.size_bytes, fresh=fresh)

    def finish(self) -> tuple[Problem, ...]:
        """Wait for what was begun, and return what is wrong."""
        if self._read is None:
            return self.seen.problems
        hashed = self._read.result()
        self.artifact_bytes = hashed.size_bytes
        digest, size = self.seen.name[:64], self.seen.size_bytes
        if hashed.digest == digest and hashed.size_bytes == size:
            return self.seen.problems
        wrong = matched(
            Path(self.folder, self.seen.name), hashed, digest=digest, size=size, who=f"the {UNIT_FILE} beside it"
        )
        return (*self.seen.problems, *wrong)


def verify_units(layout: CacheLayout, hasher: Hasher) -> UnitFindings:
    """Read and match every unit of a cache.

    Args:
        layout: Where the cache lies.
        hasher: What reads the artifacts; those that an entry shares, and that it has read, are not read again.
    """
    return _UnitsCheck(layout, hasher).run()


class _UnitsCheck:
    """Reads all units of a cache and adds up what is found."""

    def __init__(self, layout: CacheLayout, hasher: Hasher) -> None:
        self._base = str(layout.units_dir)
        self._hasher = hasher
        self._begun: deque[UnitCheck] = deque()
        self._problems: list[Problem] = []
        self._notes: list[Note] = []
        self._num_files = 0
        self._size_bytes = 0

    def run(self) -> UnitFindings:
        for above in sorted(_listed(self._base)):
            for name in sorted(_listed(f"{self._base}/{above}")):
                folder = f"{self._base}/{above}/{name}"
                if is_hash(name) and name.startswith(above):
                    self._begin(UnitCheck(folder, name, self._hasher))
                elif (note := stray(Path(folder))) is not None:
                    self._notes.append(note)
        while self._begun:
            self._end(self._begun.popleft())
        return UnitFindings(
            problems=tuple(self._problems),
            notes=tuple(self._notes),
            num_files=self._num_files,
            size_bytes=self._size_bytes,
        )

    def _begin(self, check: UnitCheck) -> None:
        self._begun.append(check)
        if len(self._begun) > _AHEAD:
            self._end(self._begun.popleft())

    def _end(self, check: UnitCheck) -> None:
        wrong = check.finish()
        if wrong and may_exist(check.folder):  # a writer or a pruner may be at work
            wrong = UnitCheck(check.folder, check.key, self._hasher, fresh=True).finish()
        if wrong and may_exist(check.folder):
            self._problems += wrong
        self._notes += check.seen.notes
        self._num_files += check.seen.num_records + bool(check.seen.name)
        self._size_bytes += check.seen.record_bytes + check.artifact_bytes


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names are all that is wanted
    except OSError:
        return []
