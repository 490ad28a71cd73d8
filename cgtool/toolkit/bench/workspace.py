"""The folder of a bench: what was prepared, what runs now. Removed at the end, or kept and used again.

Must not import torch. On disk::

    bench.json               what it was prepared for
    reference                eager's outputs (`calls.write_outputs`)
    prepared/<source>/       caches of one preparation; whole once prepared.json is there
      prepared.json          the preparation's answer (`Start`)
      inductor/ triton/ tmp/ torch's cache folders and TMPDIR
      cache/                 cgtool's cache
      artifact               the mega-cache, or torch's AOT precompile
    starts/<pid>-<number>/   empty cache folders of the process that runs now
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cgtool.errors import UsageError
from cgtool.host import child_variables
from cgtool.plan.grammar import canonical_json
from cgtool.store.files import write_atomic

#: Raise it when what is prepared changes.
_SCHEMA = 4


class Caches:
    """The cache folders that a process sees: torch's own, Triton's, TMPDIR, and the root of cgtool's.

    Attributes:
        artifact: The file of the mega-cache or of the AOT precompile.
        answer: Of a preparation: what it answered, once it is whole.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.inductor, self.triton, self._tmp = folder / "inductor", folder / "triton", folder / "tmp"
        self.cgtool, self.artifact, self.answer = folder / "cache", folder / "artifact", folder / "prepared.json"

    def make(self) -> Caches:
        """Make empty folders, and return this."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for folder in (self.inductor, self.triton, self._tmp):
            folder.mkdir(parents=True)
        return self

    def variables(self, cgtool: Path) -> dict[str, str]:
        """Return the environment of a process that sees these folders, the cache `cgtool`, and no other.

        Other CGTOOL_* variables are left out: what they say is in the request.
        """
        changes = {
            "TORCHINDUCTOR_CACHE_DIR": str(self.inductor),
            "TRITON_CACHE_DIR": str(self.triton),
            "TMPDIR": str(self._tmp),
            "CGTOOL_CACHE_DIR": str(cgtool),
        }
        return child_variables(changes, without="CGTOOL_")


class Workspace:
    """One bench's folder; make it with `opened`. `reference` is the file with eager's outputs."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._starts = 0
        self.reference = root / "reference"

    def prepared(self, source: str) -> Caches:
        """Return the folders of a preparation, whole or not."""
        return Caches(self._root / "prepared" / source)

    @contextlib.contextmanager
    def start(self) -> Iterator[Caches]:
        """Give a process a folder with empty caches; it is gone afterwards."""
        self._starts += 1
        # Two benches may share a folder that is kept.
        caches = Caches(self._root / "starts" / f"{os.getpid()}-{self._starts}").make()
        try:
            yield caches
        finally:
            shutil.rmtree(caches.folder, ignore_errors=True)


@contextlib.contextmanager
def opened(keep: Path | None, about: Mapping[str, Any]) -> Iterator[Workspace]:
    """Give a bench its folder: a temporary one that is gone afterwards, or `keep`, which stays.

    `about` is what is benched, as JSON: a folder that was prepared for something else is refused (UsageError).
    """
    root = (Path(tempfile.mkdtemp(prefix="cgtool-bench-")) if keep is None else keep).resolve()
    try:
        _claim(root, {"schema": _SCHEMA, **about})
        yield Workspace(root)
    finally:
        # A process that was ended a moment ago may still be writing its last file.
        for _ in range(3 if keep is None and root.exists() else 0):
            shutil.rmtree(root, ignore_errors=True)


def _claim(root: Path, about: Mapping[str, Any]) -> None:
    root.mkdir(parents=True, exist_ok=True)
    path = root / "bench.json"
    if not path.is_file():
        if any(root.iterdir()):
            message = f"{root} holds something that no bench has made. Give --keep an empty or a new folder."
            raise UsageError(message, path=str(root))
        write_atomic(path, canonical_json(about))
    try:
        was = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        message = f"{path} was not written by this cgtool ({error}). Give --keep another folder."
        raise UsageError(message, path=str(root)) from error
    names = sorted({*was, *about})
    differing = [name for name in names if canonical_json(was.get(name)) != canonical_json(about.get(name))]
    if differing:
        message = f"{root} was prepared for another {', '.join(differing)}. Give --keep another folder."
        raise UsageError(message, path=str(root), expected=dict(about), actual=was)


def bytes_of(*paths: Path) -> int:
    """Return the bytes of files and of all files below folders; a file with several names counts once."""
    seen: dict[tuple[int, int], int] = {}
    for path in paths:
        for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file() and not p.is_symlink()]:
            with contextlib.suppress(OSError):
                status = file.stat()
                seen[status.st_dev, status.st_ino] = status.st_size
    return sum(seen.values())
