"""The artifacts of one entry: write-once files named by the digest of their bytes. Must not import torch.

`artifacts/<sha256>.<kind>` holds exactly the bytes that the name says, or it is corrupt. Equal artifacts of different
pieces, sizes and ranks are one file, and where the file system allows it one file with the unit that it came from.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from cgtool.digests import sha256_hex
from cgtool.store.files import ARTIFACT_MODE, corrupt, ensure_folder, read_bytes, sync_folder, telling, write_atomic
from cgtool.store.layout import ARTIFACTS, check_hash, check_kind

_log = logging.getLogger(__name__)


class ObjectStore:
    """The `artifacts` folder of one entry.

    Args:
        entry_dir: The entry's folder, as `CacheLayout.entry_dir` gives it.
    """

    def __init__(self, entry_dir: Path) -> None:
        self.folder = entry_dir / ARTIFACTS

    def path(self, digest: str, kind: str) -> Path:
        """Return where an artifact lies, whether it is there or not."""
        return self.folder / f"{check_hash(digest)}.{check_kind(kind)}"

    def size(self, digest: str, kind: str) -> int | None:
        """Return an artifact's size in bytes without reading it, or None when it is absent.

        Raises:
            CacheError: It cannot be looked at. To call it absent would have a writer drop the rows that name it.
        """
        path = self.path(digest, kind)
        with telling(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return path.stat().st_size
        return None

    def put(self, data: bytes, kind: str) -> str:
        """Store an artifact and return its digest; an intact one that is there already is kept.

        Raises:
            CacheError: It cannot be written.
        """
        digest = sha256_hex(data)
        path = self.path(digest, kind)
        if not _holds(path, digest):
            write_atomic(path, data, mode=ARTIFACT_MODE)
        return digest

    def get(self, digest: str, kind: str) -> bytes:
        """Return an artifact's bytes, which match their digest.

        Open what is returned and never the path again: the file may change between the two.

        Raises:
            CacheCorruptError: It is missing, or its bytes differ from its digest.
            CacheError: It cannot be read.
        """
        path = self.path(digest, kind)
        data = read_bytes(path)
        if data is None:
            raise corrupt(path, "the manifest names it and it is missing", expected=digest)
        actual = sha256_hex(data)
        if actual != digest:
            raise corrupt(path, "its bytes differ from its digest", expected=digest, actual=actual)
        return data

    def link_from(self, source: Path, digest: str, kind: str) -> None:
        """Take over an artifact from another place of the same cache: a hard link where possible, else a copy.

        Args:
            source: The file that holds the bytes.
            digest: What its bytes must be.
            kind: The artifact's kind.

        Raises:
            CacheCorruptError: `source` is missing or holds other bytes.
            CacheError: It cannot be written.
        """
        path = self.path(digest, kind)
        if _holds(path, digest):
            return
        data = read_bytes(source)
        actual = None if data is None else sha256_hex(data)
        if data is None or actual != digest:
            why = "it is missing" if data is None else "its bytes differ from its digest"
            raise corrupt(source, why, expected=digest, actual=actual)
        ensure_folder(self.folder)
        try:
            os.link(source, path)
        except FileExistsError:  # another process was faster, or a corrupt file is in the way
            if not _holds(path, digest):
                write_atomic(path, data, mode=ARTIFACT_MODE)
        except OSError as error:  # another file system, no links there, or too many of them
            _log.debug("copying %s: %s", source.name, error)
            write_atomic(path, data, mode=ARTIFACT_MODE)
        else:
            sync_folder(self.folder)


def _holds(path: Path, digest: str) -> bool:
    """Whether a file is there and intact; a corrupt one is to be replaced."""
    data = read_bytes(path)
    if data is None:
        return False
    if sha256_hex(data) == digest:
        return True
    _log.warning("%s is corrupt and will be replaced", path)
    return False
