"""Reading every unit and matching it to its record. Must not import torch; writes nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

from cgtool.cache.files import corrupt, read_sealed
from cgtool.cache.layout import UNIT_FILE, CacheLayout, is_hash
from cgtool.cache.units import SCHEMA, UnitRecord
from cgtool.cache.verify.digests import matched
from cgtool.cache.verify.findings import Note, Problem, UnitFindings
from cgtool.cache.verify.hashing import Hashed, Hasher
from cgtool.cache.verify.sealed import read_record
from cgtool.cache.verify.strays import orphan, stray, unfinished
from cgtool.errors import CacheError

_ARTIFACT = re.compile(r"[0-9a-f]{64}\.[a-z][a-z0-9_.]*")
_LOCK = "lock"
_AHEAD = 256


def verify_units(layout: CacheLayout, hasher: Hasher) -> UnitFindings:
    """Read and match every unit of a cache.

    Args:
        layout: Where the cache lies.
        hasher: What reads the artifacts; those that an entry shares, and that it has read, are not read again.
    """
    problems: list[Problem] = []
    notes: list[Note] = []
    num_files = size_bytes = 0
    begun: list[UnitCheck] = []

    def end(check: UnitCheck) -> None:
        nonlocal num_files, size_bytes
        wrong = check.finish()
        if wrong and check.folder.exists():  # a writer or a pruner may be at work
            wrong = UnitCheck(check.folder, check.key, hasher, fresh=True).finish()
        problems.extend(wrong if check.folder.exists() else ())
        notes.extend(check.notes)
        num_files += check.num_files
        size_bytes += check.size_bytes

    for folder in _folders(layout, notes):
        begun.append(UnitCheck(folder, folder.name, hasher))
        if len(begun) > _AHEAD:
            end(begun.pop(0))
    for check in begun:
        end(check)
    return UnitFindings(problems=tuple(problems), notes=tuple(notes), num_files=num_files, size_bytes=size_bytes)


class UnitCheck:
    """One look at one unit: making it begins to read, `finish` waits for what was read.

    Args:
        folder: The unit's folder.
        key: The unit's key.
        hasher: What reads its artifact.
        fresh: Read also what `hasher` has read before.
    """

    def __init__(self, folder: Path, key: str, hasher: Hasher, *, fresh: bool = False) -> None:
        self.folder = folder
        self.key = key
        self.notes: list[Note] = []
        path = folder / UNIT_FILE
        self._record, problem, self.size_bytes = read_record(path, lambda: _read(path, key))
        self._problems = [] if problem is None else [problem]
        self.num_files = int(self._record is not None or problem is not None)
        self._artifact: tuple[Path, Future[Hashed]] | None = None
        if self._record is not None:
            at = folder / f"{self._record.digest}.{self._record.kind}"
            self._artifact = at, hasher.submit(at, limit=self._record.size_bytes, fresh=fresh)
        self._strays()

    def _strays(self) -> None:
        named = {UNIT_FILE, _LOCK} | ({self._artifact[0].name} if self._artifact is not None else set())
        others = sorted(set(_listed(self.folder)) - named)
        if self._record is None and not self._problems and any(_ARTIFACT.fullmatch(name) for name in others):
            self.notes.append(unfinished(self.folder))
            return
        for name in others:
            path = self.folder / name
            note = orphan(path) if _ARTIFACT.fullmatch(name) else stray(path)
            self.notes += [] if note is None else [note]

    def finish(self) -> list[Problem]:
        """Wait for what was begun, and return what is wrong."""
        if self._record is None or self._artifact is None:
            return self._problems
        path, future = self._artifact
        hashed = future.result()
        self.num_files += 1
        self.size_bytes += hashed.size_bytes
        wanted, size = self._record.digest, self._record.size_bytes
        return self._problems + matched(path, hashed, digest=wanted, size=size, who=f"the {UNIT_FILE} beside it")


def _read(path: Path, key: str) -> UnitRecord | None:
    data = read_sealed(path, schema=SCHEMA)
    if data is None:
        return None
    if data.get("key") != key:
        raise corrupt(path, "it belongs to another unit", expected=key, actual=data.get("key"))
    try:
        return UnitRecord.from_json(data)
    except (CacheError, KeyError) as error:
        raise corrupt(path, f"a field is wrong: {error}") from error


def _folders(layout: CacheLayout, notes: list[Note]) -> Iterator[Path]:
    for above in sorted(_listed(layout.units_dir)):
        for name in sorted(_listed(layout.units_dir / above)):
            path = layout.units_dir / above / name
            if is_hash(name) and name.startswith(above):
                yield path
            elif (note := stray(path)) is not None:
                notes.append(note)


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names are all that is wanted
    except OSError:
        return []
