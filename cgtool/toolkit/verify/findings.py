"""What a check of a cache found, as records and in words. Must not import torch.

A problem keeps something from being loaded, or would; a note is harmless: what nothing names, or a warm left behind.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from cgtool.errors import CacheCorruptError, CacheError, CacheSchemaError
from cgtool.plan.pieces import Json
from cgtool.records import dataclass
from cgtool.store.files import read_bytes
from cgtool.store.key import Key
from cgtool.store.records import Manifest

_Record = TypeVar("_Record")

ProblemKind = Literal[
    "missing", "size", "digest", "corrupt", "schema", "unreadable", "not_a_file", "lookup", "misplaced"
]
NoteKind = Literal["orphan", "temporary", "foreign", "unfinished"]

_REMEDY = "Mend it with `cgtool verify --repair`, or warm the model again."


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One file that is not what it must be.

    Args:
        path: The file.
        kind: A stable word for programs.
        sentence: What is wrong, with the file's name, and what to do.
    """

    path: Path
    kind: ProblemKind
    sentence: str

    def to_json(self, root: Path) -> Json:
        """Return the problem as JSON; its path is spelled below the cache's root."""
        return {"path": below(self.path, root), "kind": self.kind, "sentence": self.sentence}


@dataclass(frozen=True, kw_only=True)
class Note:
    """One file or folder that is in nobody's way.

    Args:
        path: The file or folder.
        kind: A stable word for programs.
        sentence: What it is.
    """

    path: Path
    kind: NoteKind
    sentence: str

    def to_json(self, root: Path) -> Json:
        """Return the note as JSON; its path is spelled below the cache's root."""
        return {"path": below(self.path, root), "kind": self.kind, "sentence": self.sentence}


@dataclass(frozen=True, kw_only=True)
class EntryFindings:
    """What was found in one entry.

    Args:
        hash: The entry's hash.
        key: Its factors, where key.json is intact.
        manifests: Those of its manifests that are intact, in order of rank and prefix.
        problems: What is wrong, in order of the files.
        notes: What is harmless.
        num_files: How many files were read.
        size_bytes: How many bytes they hold.
    """

    hash: str
    key: Key | None
    manifests: tuple[Manifest, ...]
    problems: tuple[Problem, ...]
    notes: tuple[Note, ...]
    num_files: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class UnitFindings:
    """What was found among the units; the fields mean what those of `EntryFindings` mean."""

    problems: tuple[Problem, ...]
    notes: tuple[Note, ...]
    num_files: int
    size_bytes: int


def below(path: Path, root: Path) -> str:
    """Return a path as it reads below a folder, or whole where it lies elsewhere."""
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def of_error(path: Path, error: CacheError) -> Problem:
    """Return the problem of a record that could not be read."""
    if isinstance(error, CacheCorruptError):
        return Problem(path=path, kind="corrupt", sentence=str(error))
    kind: ProblemKind = "schema" if isinstance(error, CacheSchemaError) else "unreadable"
    return Problem(path=path, kind=kind, sentence=str(error))


def missing(path: Path, who: str) -> Problem:
    """Return the problem of a file that `who` names and that is not there."""
    return Problem(path=path, kind="missing", sentence=f"{path} is missing: {who} names it. {_REMEDY}")


def lost_mark(path: Path) -> Problem:
    """Return the problem of a mark of the lookup that is gone, without which no load finds its entry."""
    sentence = f"{path} is missing: without it load passes the entry over. {_REMEDY}"
    return Problem(path=path, kind="lookup", sentence=sentence)


def misplaced(path: Path, why: str) -> Problem:
    """Return the problem of an artifact that a manifest names for another piece or shape than it was compiled for."""
    return Problem(path=path, kind="misplaced", sentence=why)


def wrong_size(path: Path, *, expected: int, actual: int) -> Problem:
    """Return the problem of a file of another size than its record says."""
    sentence = f"{path} has {actual} bytes and must have {expected}. {_REMEDY}"
    return Problem(path=path, kind="size", sentence=sentence)


def wrong_digest(path: Path, *, expected: str, actual: str) -> Problem:
    """Return the problem of a file whose bytes differ from their digest."""
    sentence = f"{path} is corrupt: its digest is {actual} and must be {expected}. {_REMEDY}"
    return Problem(path=path, kind="digest", sentence=sentence)


def no_file(path: Path) -> Problem:
    """Return the problem of what is in the place of a file and is none."""
    sentence = f"{path} is no ordinary file. Remove it, then mend the entry with `cgtool verify --repair`."
    return Problem(path=path, kind="not_a_file", sentence=sentence)


def read_record(path: Path | str, parse: Callable[[bytes], _Record]) -> tuple[_Record | None, Problem | None, int]:
    """Read a sealed record.

    Args:
        path: Its file.
        parse: Returns what its bytes say, or raises `CacheError`.

    Returns:
        The record, or None; what is wrong, or None; how many bytes it has.
    """
    try:
        data = read_bytes(path)
        return (None, None, 0) if data is None else (parse(data), None, len(data))
    except CacheError as error:
        strange = os.path.exists(path) and not os.path.isfile(path)  # noqa: PTH110, PTH113 - Path's raise
        return None, no_file(Path(path)) if strange else of_error(Path(path), error), 0
