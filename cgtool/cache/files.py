"""How bytes reach the disk and come back: whole files or none, sealed JSON, errors as sentences. Must not import torch.

Every file of the cache is written once under a temporary name in its own folder, flushed to the disk, and renamed. A
temporary name is `.<name>.<pid>.<token>.tmp`; no reader opens such a name, so what a killed process leaves is ignored,
and `sweep` removes it once it is old. Nothing is ever changed in place.

A sealed JSON file is an object that ends with its own digest::

    {"schema": <int>, "cgtool": "<version that wrote it>", ..., "digest": "<sha256 of the rest's canonical JSON>"}

so that a torn file and a flipped bit are both noticed, and a newer schema says who wrote it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cgtool import __version__
from cgtool.cache.descriptors import made
from cgtool.cache.layout import CACHE_FOLDER
from cgtool.digests import canonical_json, digest_of
from cgtool.errors import CacheCorruptError, CacheError, CacheSchemaError
from cgtool.pieces import Json

_log = logging.getLogger(__name__)

#: An artifact is written once and only ever removed; a record may be replaced by a rename. The umask applies to both.
ARTIFACT_MODE = 0o444
RECORD_MODE = 0o644

_TEMPORARY_SUFFIX = ".tmp"
#: A temporary file that has not grown for so long belongs to a process that is gone.
_ABANDONED_SECS = 3600.0
#: Without waiting for a writer of what is a pipe.
_READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
#: Someone may remove the folder between making it and writing into it; more than a few times is no accident.
_ATTEMPTS = 5
#: More than a file system keeps beside the names of files, so that a full disk shows.
_PROBE_BYTES = 16384
_SIGNATURE = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# This file marks a cache of cgtool: its contents can be made again, so backups may skip it.\n"
    "# See https://bford.info/cachedir/\n"
)


def cache_error(
    error: OSError, path: Path | str, *, needed_bytes: int | None = None, doing: str = "written"
) -> CacheError:
    """Return the sentence for an error of the operating system.

    Args:
        error: What the system said.
        path: The file or folder that it was about.
        needed_bytes: How many bytes were to be written.
        doing: "written", "read" or "removed".
    """
    elsewhere = "choose another folder with --cache-dir or CGTOOL_CACHE_DIR"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _full_disk(error, Path(path), needed_bytes, elsewhere)
    if error.errno == errno.EROFS:
        text = f"{path} could not be {doing}: it is on a read-only file system. Make it writable or {elsewhere}."
    elif error.errno in (errno.EACCES, errno.EPERM):
        text = f"{path} could not be {doing}: permission denied. Change its permissions or {elsewhere}."
    elif error.errno == errno.ENOTDIR:
        text = f"{path} could not be {doing}: a part of this path is a file and not a folder. Remove it or {elsewhere}."
    elif error.errno == errno.ENOENT:
        text = f"{path} could not be {doing}: there is no such file or folder. Check the path or {elsewhere}."
    else:
        text = f"{path} could not be {doing}: {error.strerror or error}. Check the disk or {elsewhere}."
    return CacheError(text, path=path)


@contextlib.contextmanager
def telling(path: Path | None = None, *, doing: str = "read") -> Iterator[None]:
    """Say of each error of the operating system in the block what `cache_error` says of it.

    Args:
        path: The file or folder that the block is about; None: that which the error names, if it names one.
        doing: "written", "read" or "removed".

    Raises:
        CacheError: In place of an `OSError`.
    """
    try:
        yield
    except OSError as error:
        named = error.filename if path is None else path
        if not isinstance(named, (str, bytes, os.PathLike)):
            raise
        raise cache_error(error, Path(os.fsdecode(named)), doing=doing) from error


def _full_disk(error: OSError, path: Path, needed_bytes: int | None, elsewhere: str) -> CacheError:
    what = "quota is used up" if error.errno == errno.EDQUOT else "disk is full"
    needed = "" if needed_bytes is None else f", {needed_bytes} bytes were needed"
    free = ""
    with contextlib.suppress(OSError):
        free = f" and {shutil.disk_usage(_existing(path)).free} bytes are free"
    text = f"{path} could not be written: the {what}{needed}{free}. Make room or {elsewhere}."
    return CacheError(text, path=path, expected=needed_bytes)


def _existing(path: Path) -> Path:
    """The nearest folder above `path` that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def ensure_folder(folder: Path) -> None:
    """Make a folder and those above it, durably.

    Raises:
        CacheError: It cannot be made.
    """
    missing = []
    try:
        for above in (folder, *folder.parents):
            if above.is_dir():
                break
            missing.append(above)
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise CacheError(f"{folder} is a file, and a folder is needed there. Remove it.", path=folder) from error
    except OSError as error:
        raise cache_error(error, folder, needed_bytes=None) from error
    for new in reversed(missing):
        sync_folder(new.parent)


def ensure_root(root: Path) -> None:
    """Make a cache root with its CACHEDIR.TAG.

    Raises:
        CacheError: It cannot be made.
    """
    tag = root / "CACHEDIR.TAG"
    with telling(tag):
        is_there = tag.exists()
    if not is_there:
        ensure_folder(root)
        write_atomic(tag, _SIGNATURE.encode("ascii"))


def check_writable(root: Path) -> None:
    """Make a cache root and try to write into it, so that a warm fails before it does minutes of work.

    Raises:
        CacheError: It cannot be made or written to, or its disk is full.
    """
    ensure_root(root)
    base = root / CACHE_FOLDER
    ensure_folder(base)
    with written(base / "probe", bytes(_PROBE_BYTES)):
        pass


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, where the file system knows how to."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def written(path: Path, data: bytes, *, mode: int = RECORD_MODE) -> Iterator[Path]:
    """Write `data` to a temporary file beside `path` and yield it; it is gone afterwards unless it was renamed.

    Raises:
        CacheError: The disk is full, the folder is read-only, ...
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(6).hex()}{_TEMPORARY_SUFFIX}")
    try:
        _write(temporary, data, mode)
        yield temporary
    except OSError as error:
        raise cache_error(error, path, needed_bytes=len(data)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_atomic(path: Path, data: bytes, *, mode: int = RECORD_MODE) -> None:
    """Put a file in place whole: a reader finds the old bytes or the new ones, whenever this process dies.

    Args:
        path: Where; its folder is made when it is missing.
        data: What.
        mode: Permissions, less the umask.

    Raises:
        CacheError: The disk is full, the folder is read-only, ...
    """
    for attempt in range(_ATTEMPTS):
        try:
            ensure_folder(path.parent)
            with written(path, data, mode=mode) as temporary:
                temporary.replace(path)
            break
        except CacheError as error:
            removed = isinstance(error.__cause__, FileNotFoundError)
            if not removed or attempt == _ATTEMPTS - 1:
                raise
    sync_folder(path.parent)


def _write(temporary: Path, data: bytes, mode: int) -> None:
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), mode)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def touch(path: Path) -> None:
    """Make an empty file, durably enough: one that is lost is made again.

    Raises:
        CacheError: It cannot be made.
    """
    ensure_folder(path.parent)
    try:
        path.touch(mode=RECORD_MODE)
    except OSError as error:
        raise cache_error(error, path, needed_bytes=0) from error


def remove(path: Path) -> None:
    """Remove a file; one that is gone already is fine.

    Raises:
        CacheError: It cannot be removed.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise cache_error(error, path, doing="removed") from error


def discard(folder: Path) -> None:
    """Remove a folder with all that is in it, as far as that can be done; never raises on account of the disk."""
    with contextlib.suppress(OSError):  # rmtree ignores not all errors
        shutil.rmtree(folder, ignore_errors=True)


def sweep(folder: Path, *, older_than_secs: float = _ABANDONED_SECS) -> int:
    """Remove temporary files that killed processes left in a folder; never raises.

    Returns:
        How many were removed.
    """
    count = 0
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if not is_temporary(path.name):
                continue
            with contextlib.suppress(OSError):
                if time.time() - path.lstat().st_mtime > older_than_secs:
                    path.unlink()
                    count += 1
    return count


def is_temporary(name: str) -> bool:
    """Return whether a file name is that of a file not yet published."""
    return name.startswith(".") and name.endswith(_TEMPORARY_SUFFIX)


def read_bytes(path: Path | str) -> bytes | None:
    """Return a file's bytes, or None when there is no such file.

    Raises:
        CacheCorruptError: Something else than a file is there: a pipe would hold the reader up for ever.
        CacheError: It is there and cannot be read.
    """
    try:
        [descriptor] = made(os.open, path, _READ)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                os.read(descriptor, 0)  # of a folder, which has words of its own
                raise corrupt(path, "it is no file")
            data = _read_all(descriptor, status.st_size)
        finally:
            os.close(descriptor)  # no call of Python's own ends between the block and this
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise cache_error(error, path, doing="read") from error
    return data


def _read_all(descriptor: int, size: int) -> bytes:
    """Read a file whose size was asked for just now, and which another may lengthen or shorten meanwhile."""
    parts = [os.read(descriptor, size + 1)]
    while len(parts[-1]) > 0 and sum(map(len, parts)) != size:
        parts.append(os.read(descriptor, size + 1))
    return b"".join(parts) if len(parts) > 1 else parts[0]


def sealed_json(record: Mapping[str, Json], *, schema: int) -> bytes:
    """Return a record as the text of a sealed JSON file; see the module's grammar.

    Args:
        record: Its own fields; "schema", "cgtool" and "digest" are added here.
        schema: The version of the record's grammar.
    """
    body: dict[str, Json] = {"schema": schema, "cgtool": __version__, **record}
    body["digest"] = digest_of(body)
    return (json.dumps(body, indent=1, ensure_ascii=True, allow_nan=False) + "\n").encode("ascii")


def read_sealed(path: Path, *, schema: int) -> dict[str, Any] | None:
    """Return the record in a sealed JSON file, or None when there is no such file.

    Raises:
        CacheCorruptError: It is torn, or its bytes differ from its digest.
        CacheSchemaError: Another version of cgtool wrote it, with another schema.
        CacheError: It cannot be read.
    """
    data = read_bytes(path)
    if data is None:
        return None
    return parse_sealed(data, path=path, schema=schema)


def parse_sealed(data: bytes, *, path: Path | str, schema: int) -> dict[str, Any]:
    """Return the record in the text of a sealed JSON file.

    Raises:
        CacheCorruptError: It is torn, or its bytes differ from its digest.
        CacheSchemaError: Another version of cgtool wrote it, with another schema.
    """
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise corrupt(path, "it is not whole JSON", actual=str(error)) from error
    if not isinstance(record, dict) or type(record.get("schema")) is not int:
        raise corrupt(path, "it has no schema version", expected="an object with a schema")
    if record["schema"] != schema:
        raise _other_schema(path, record, schema)
    stored = record.pop("digest", None)
    try:
        actual = digest_of(record)
    except RecursionError as error:
        raise corrupt(path, "it is nested without end") from error
    except ValueError as error:
        raise corrupt(path, "it holds a number that is none", actual=str(error)) from error
    if stored != actual:
        raise corrupt(path, "its bytes differ from its digest", expected=stored, actual=actual)
    return record


def corrupt(path: Path | str, why: str, *, expected: Any = None, actual: Any = None) -> CacheCorruptError:
    """Return the sentence for a file whose content cannot be trusted."""
    text = f"{path} is corrupt: {why}. Warm the model again to replace it, or remove the file."
    return CacheCorruptError(text, path=path, expected=expected, actual=actual)


def _other_schema(path: Path | str, record: Mapping[str, Any], schema: int) -> CacheSchemaError:
    found = record["schema"]
    writer = record.get("cgtool", "unknown")
    if found > schema:
        todo = "Update cgtool, or use another cache folder with --cache-dir or CGTOOL_CACHE_DIR."
    else:
        todo = "Warm the model again with this version, or use the version that wrote it."
    text = f"{path} has schema {found} and was written by cgtool {writer}; this cgtool reads schema {schema}. {todo}"
    return CacheSchemaError(text, path=path, expected=schema, actual=found)


def is_newer(error: CacheSchemaError) -> bool:
    """Return whether a file's schema is newer than ours, so that it must not be replaced."""
    return bool(error.actual > error.expected)


def same_json(left: Json, right: Json) -> bool:
    """Return whether two JSON values are the same, telling 1, 1.0 and true apart as Python's == does not."""
    return canonical_json(left) == canonical_json(right)
