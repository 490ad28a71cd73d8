"""`export`: entries of a cache as one file, or as a folder. Prints nothing; importable without torch.

The report as JSON::

    {"schema": 1, "root": str, "dest": str, "form": "archive"|"folder", "size_bytes": int, "written_bytes": int,
     "members": int, "sha256_of_index": digest, "signed_by": [key id...],
     "entries": [{"hash": hash, "rank": int, "prefix": str, "model": str, "rows": int}...]}
"""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from cgtool.errors import CacheError, UsageError
from cgtool.plan.grammar import sha256_hex
from cgtool.store import signatures
from cgtool.store.files import os_errors_as_cache_errors, sync_folder
from cgtool.store.layout import CacheLayout, RankName, resolve_root
from cgtool.store.leases import keep
from cgtool.toolkit.bundle.choose import Choice, chosen_names
from cgtool.toolkit.bundle.pack import Contents, check_free, destination_error, gather, write_archive, write_folder

SCHEMA = 1
DEFAULT_LEVEL = 3
#: Each lease is an open file.
_MOST_HELD = 256
#: What a prune holds for so many seconds longer and does not remove, it has been stopped with.
_ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What the user asked.

    Args:
        dest: Where to, or an open stream.
        choice: Which entries, ranks and shapes.
        cache_dir: The cache's root; None means the one that `warm` fills.
        folder: Write a folder instead of an archive.
        level: How hard zstd tries, 1 to 19.
        sign: Files of private keys.
    """

    dest: Path | IO[bytes]
    choice: Choice = field(default_factory=Choice)
    cache_dir: Path | None = None
    folder: bool = False
    level: int = DEFAULT_LEVEL
    sign: tuple[Path, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What was exported; the JSON form stands at the head of this module."""

    root: Path
    dest: str
    form: str
    written_bytes: int
    contents: Contents
    signed_by: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        """The size of all members together."""
        return self.contents.index.size_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the document that `export --json` prints."""
        index = self.contents.index
        return {
            "schema": SCHEMA,
            "root": str(self.root),
            "dest": self.dest,
            "form": self.form,
            "size_bytes": index.size_bytes,
            "written_bytes": self.written_bytes,
            "members": len(index.members),
            "sha256_of_index": sha256_hex(self.contents.index_bytes),
            "signed_by": list(self.signed_by),
            "entries": [
                {"hash": m.hash, "rank": m.rank, "prefix": m.prefix, "model": m.model, "rows": len(m.rows)}
                for m in self.contents.manifests
            ],
        }


@os_errors_as_cache_errors()
def export(options: ExportOptions) -> ExportReport:
    """Write chosen entries as a bundle; what is at the destination is replaced whole or not at all.

    Raises:
        UsageError: The choice fits nothing, a key is none, or a folder is in the way.
        CacheCorruptError: Something of an entry is missing or not as its digest says.
        CacheError: The cache cannot be read, or the destination cannot be written.
    """
    keys = [signatures.load_private_key(path) for path in options.sign]
    layout = CacheLayout(root=resolve_root(options.cache_dir))
    if isinstance(options.dest, Path) and options.folder:
        check_free(options.dest)
    contents = gather(layout, _held_names(layout, options.choice), options.choice)
    written = _write(options, contents, keys)
    return ExportReport(
        root=layout.root,
        dest=str(options.dest) if isinstance(options.dest, Path) else "-",
        form="folder" if options.folder else "archive",
        written_bytes=written,
        contents=contents,
        signed_by=tuple(sorted(signatures.key_id(key.public_key()) for key in keys)),
    )


def _held_names(layout: CacheLayout, choice: Choice) -> tuple[RankName, ...]:
    """Choose, and hold what was chosen until this process ends: prune leaves alone what is being read.

    Raises:
        CacheError: Prune goes on removing what is chosen, or has stopped in the midst of it.
    """
    before: tuple[RankName, ...] = ()
    times = 0
    while times < _ATTEMPTS:
        names = chosen_names(layout, choice)
        if all(keep(layout, name) for name in names[:_MOST_HELD]):
            return names
        # A prune was quicker with one of them: chosen by its hash it is missed now, and else it is not meant any more.
        times = times + 1 if names == before else 0
        before = names
    message = f"Another process is removing what was chosen from {layout.root}. Wait for its end, and try again."
    raise CacheError(message, path=layout.root)


def _write(options: ExportOptions, contents: Contents, keys: list[Any]) -> int:
    if not isinstance(options.dest, Path):
        written = write_archive(options.dest, contents, keys=keys, level=options.level)
        options.dest.flush()
        return written
    if options.folder:
        return write_folder(options.dest, contents, keys=keys)
    return _write_file(options.dest, contents, keys=keys, level=options.level)


def _write_file(dest: Path, contents: Contents, *, keys: list[Any], level: int) -> int:
    if dest.is_dir():
        message = f"{dest} is a folder. Name a file such as {dest / 'model.tar.zst'}, or write a folder with --folder."
        raise UsageError(message, path=dest)
    temporary = dest.with_name(f".{dest.name}.{os.getpid()}.{secrets.token_hex(6)}.tmp")
    try:
        with temporary.open("xb") as stream:
            written = write_archive(stream, contents, keys=keys, level=level)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(dest)
    except OSError as error:
        raise destination_error(error, dest) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    sync_folder(dest.parent)
    return written
