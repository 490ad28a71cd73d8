"""Atomic file writes, verified reads, sealed records, and I/O errors as `CacheError`. Must not import torch.

Every file in the cache is written once, under a temporary name in its destination folder, flushed to disk, and renamed.
A temporary name is `.<name>.<pid>.<token>.tmp`. Readers never open such a name, so files left by a killed process are
ignored, and `sweep` removes them once they are old. Files are never modified in place.

A sealed record is a JSON object whose last member is the SHA-256 of all bytes before that member's line::

    {
     "record": "manifest-3",                         record type and version of its grammar
     "cgtool": "<version that wrote it>",
     ...
     "sha256": "<64 hexadecimal digits>"
    }

One hash thus detects truncation and bit flips before anything is parsed, and the version identifies newer records.
"""

import contextlib
import errno
import hashlib
import io
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cgtool import __version__
from cgtool.errors import CacheCorruptError, CacheError, CacheSchemaError
from cgtool.host import opening
from cgtool.plan.grammar import Record, decode, encode, sha256_hex
from cgtool.store.layout import CACHE_FOLDER

#: An artifact is written once and only ever removed; a record may be replaced by a rename. The umask applies to both.
ARTIFACT_MODE = 0o444
RECORD_MODE = 0o644

_TEMPORARY_SUFFIX = ".tmp"
_TEMPORARY = r"\..*\.([0-9]{1,10})\.[0-9a-f]+\.tmp"
#: A temporary file unmodified for this long belongs to a process that is gone.
_ABANDONED_SECS = 3600.0
#: O_NONBLOCK: opening a FIFO must not wait for a writer.
_READ_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
#: Flags for a file that only cgtool creates: do not follow a symlink in its place or block on a FIFO.
SAFE_OPEN_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
#: Another process may remove the folder between its creation and the write, but not many times in a row by accident.
_ATTEMPTS = 5
#: Too large for a file system to store inline in the inode, so that a full disk is detected.
_PROBE_BYTES = 16384
_SIGNATURE = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# This file marks a cache of cgtool: its contents can be made again, so backups may skip it.\n"
    "# See https://bford.info/cachedir/\n"
)

#: Explanation and remedy for EFBIG and SIGXFSZ.
FILE_LIMIT = "it exceeds the file size limit. Raise the limit (`ulimit -f`)"
#: Explanations and remedies for other errors.
_EXPLANATIONS = {
    errno.EROFS: ("it is on a read-only file system", "Make it writable"),
    errno.EACCES: ("permission denied", "Change its permissions"),
    errno.EPERM: ("permission denied", "Change its permissions"),
    errno.ENOTDIR: ("a component of this path is a file, not a folder", "Remove it"),
    errno.ENOENT: ("no such file or folder", "Check the path"),
}


def cache_error(
    error: OSError,
    path: Path | str,
    *,
    needed_bytes: int | None = None,
    doing: str = "written",
    elsewhere: str = "choose another folder with --cache-dir or CGTOOL_CACHE_DIR",
) -> CacheError:
    """Return a `CacheError` that explains an `OSError`; `doing` is "written", "read" or "removed"."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _full_disk(error, Path(path), needed_bytes, elsewhere)
    if error.errno == errno.EFBIG:
        return CacheError(f"{path} could not be written: {FILE_LIMIT}.", path=path)
    reason, remedy = _EXPLANATIONS.get(error.errno or 0, (error.strerror or str(error), "Check the disk"))
    return CacheError(f"{path} could not be {doing}: {reason}. {remedy} or {elsewhere}.", path=path)


@contextlib.contextmanager
def os_errors_as_cache_errors(path: Path | None = None, *, doing: str = "read") -> Iterator[None]:
    """Convert an `OSError` in the block to a `CacheError`. Without a path, convert only errors that name a file.

    Raises:
        CacheError: In place of an `OSError`.
    """
    try:
        yield
    except OSError as error:
        failed = error.filename if path is None else path
        if not isinstance(failed, (str, bytes, os.PathLike)):
            raise
        raise cache_error(error, Path(os.fsdecode(failed)), doing=doing) from error


def _full_disk(error: OSError, path: Path, needed_bytes: int | None, elsewhere: str) -> CacheError:
    reason = "quota is exceeded" if error.errno == errno.EDQUOT else "disk is full"
    needed = "" if needed_bytes is None else f", {needed_bytes} bytes were needed"
    free = ""
    with contextlib.suppress(OSError):
        existing = next(above for above in (path, *path.parents) if above.exists())
        free = f" and {shutil.disk_usage(existing).free} bytes are free"
    text = f"{path} could not be written: the {reason}{needed}{free}. Free some space or {elsewhere}."
    return CacheError(text, path=path, expected=needed_bytes)


def ensure_folder(folder: Path) -> list[Path]:
    """Create a folder and its parents durably; return the ones that were missing, innermost first."""
    missing = []
    try:
        for above in (folder, *folder.parents):
            if above.is_dir():
                break
            missing.append(above)
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise CacheError(f"{folder} is a file, but a folder is needed there. Remove it.", path=folder) from error
    except OSError as error:
        for new in missing:
            with contextlib.suppress(OSError):
                new.rmdir()
        raise cache_error(error, folder) from error
    for new in reversed(missing):
        sync_folder(new.parent)
    return missing


def ensure_root(root: Path) -> None:
    """Create a cache root with its CACHEDIR.TAG."""
    tag = root / "CACHEDIR.TAG"
    with os_errors_as_cache_errors(tag):
        is_there = tag.exists()
    if not is_there:
        ensure_folder(root)
        write_atomic(tag, _SIGNATURE.encode("ascii"))


def check_writable(root: Path) -> None:
    """Create a cache root and write a probe file, so that a warm fails before minutes of work rather than after."""
    ensure_root(root)
    base = root / CACHE_FOLDER
    ensure_folder(base)
    with temporary_file(base / "probe", bytes(_PROBE_BYTES)):
        pass


def sync_folder(folder: Path) -> None:
    """Flush a folder's directory entries to disk, if the file system supports it."""
    flags = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
    with contextlib.suppress(OSError), open_descriptor(os.open, folder, flags) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def temporary_file(path: Path, data: bytes, *, mode: int = RECORD_MODE) -> Iterator[Path]:
    """Write `data` to a temporary file beside `path` and yield it; remove it afterwards unless it was renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(6).hex()}{_TEMPORARY_SUFFIX}")
    try:
        write_new(temporary, [data], mode)
        yield temporary
    except OSError as error:
        raise cache_error(error, path, needed_bytes=len(data)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_atomic(path: Path, data: bytes, *, mode: int = RECORD_MODE) -> None:
    """Write a file atomically: readers see the old bytes or the new ones, even if this process is killed.

    Raises:
        CacheError: The disk is full, the folder is read-only, ...
    """
    for attempt in range(_ATTEMPTS):
        try:
            ensure_folder(path.parent)
            with temporary_file(path, data, mode=mode) as temporary:
                temporary.replace(path)
            break
        except CacheError as error:
            folder_was_removed = isinstance(error.__cause__, FileNotFoundError)
            if not folder_was_removed or attempt == _ATTEMPTS - 1:
                raise
    sync_folder(path.parent)


def write_new(path: Path, chunks: Iterable[bytes], mode: int = RECORD_MODE) -> int:
    """Write a new file, flush it to disk, and return its size in bytes.

    Raises:
        OSError: The file exists already, the disk is full, ...
    """
    num_bytes = 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    with open_descriptor(os.open, path, flags, mode) as descriptor:
        for chunk in chunks:
            view = memoryview(chunk)
            num_bytes += len(view)
            while view:
                view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    return num_bytes


def touch(path: Path) -> None:
    """Create an empty file without flushing it: a lost one is created again. Raises CacheError."""
    ensure_folder(path.parent)
    with os_errors_as_cache_errors(path, doing="written"):
        path.touch(mode=RECORD_MODE)


def remove(path: Path) -> None:
    """Remove a file if it exists. Raises CacheError."""
    with os_errors_as_cache_errors(path, doing="removed"):
        path.unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Remove a folder and its contents as far as possible; never raises `OSError`."""
    with contextlib.suppress(OSError):  # rmtree does not ignore every error
        shutil.rmtree(folder, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove temporary files that killed processes left in a folder; never raises."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                if is_temporary(path.name) and time.time() - path.lstat().st_mtime > _ABANDONED_SECS:
                    path.unlink()


def is_temporary(name: str) -> bool:
    """Return whether a file name is temporary, i.e. the file has not been published."""
    return name.startswith(".") and name.endswith(_TEMPORARY_SUFFIX)


def writer_lives(name: str) -> bool | None:
    """Return whether the process that a temporary file is named after is running; None if the name holds no pid.

    The answer is meaningless if the file was written on another machine or in another container.
    """
    match = re.fullmatch(_TEMPORARY, name)
    if match is None:
        return None
    if os.name != "posix":  # elsewhere, os.kill(pid, 0) does not test for existence
        return True
    try:
        os.kill(int(match[1]), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # running as another user
        return True
    return True


def names_in(folder: Path | str, *, follow: bool = True) -> list[str]:
    """Return the names in a folder, sorted; [] if it cannot be listed, or is a symlink and `follow` is false."""
    if not follow and os.path.islink(folder):  # noqa: PTH114 - str paths: called for up to 100,000 folders
        return []
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - as above
    except OSError:
        return []


@contextlib.contextmanager
def open_file(path: Path | str) -> Iterator[io.FileIO]:
    """Open a regular file for unbuffered reading.

    Raises:
        OSError: The file is missing or cannot be opened.
        CacheCorruptError: The path is not a regular file; reading a FIFO could block forever.
    """
    with (
        open_descriptor(os.open, path, _READ_FLAGS) as descriptor,
        open(descriptor, "rb", buffering=0, closefd=False) as file,
    ):
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise corrupt_error(path, "it is not a regular file")
        yield file


def read_bytes(path: Path | str) -> bytes | None:
    """Return a file's bytes, or None if there is no such file.

    Raises:
        CacheCorruptError: The path is not a regular file.
        CacheError: The file cannot be read.
    """
    try:
        with open_file(path) as file:
            data = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise cache_error(error, path, doing="read") from error
    return data


def read_matching(path: Path | str, digest: str) -> bytes:
    """Return a file's bytes after checking them against their digest.

    Use the returned bytes and do not open the path again: the file may have changed since.

    Raises:
        CacheCorruptError: The file is missing, or its bytes do not match the digest.
        CacheError: The file cannot be read.
    """
    data = read_bytes(path)
    if data is None:
        raise corrupt_error(path, "it is missing", expected=digest)
    actual = sha256_hex(data)
    if actual != digest:
        raise corrupt_error(path, "its bytes do not match its digest", expected=digest, actual=actual)
    return data


def may_exist(path: Path | str) -> bool:
    """Return whether a file or folder exists; True if that cannot be determined."""
    try:
        os.stat(path)  # noqa: PTH116 - on the load path, thousands of times
    except OSError as error:
        return not isinstance(error, (FileNotFoundError, NotADirectoryError))
    return True


def corrupt_error(path: Path | str, reason: str, *, expected: Any = None, actual: Any = None) -> CacheCorruptError:
    """Return the error for a file whose content cannot be trusted; `reason` is a clause such as "it is missing"."""
    text = f"{path} is corrupt: {reason}. Warm the model again to replace it, or remove the file."
    return CacheCorruptError(text, path=path, expected=expected, actual=actual)


def is_newer(error: CacheSchemaError) -> bool:
    """Return whether a file's schema is newer than ours, in which case it must not be replaced."""
    return bool(error.actual > error.expected)


@contextlib.contextmanager
def open_descriptor(make: Callable[..., int], *arguments: Any) -> Iterator[int]:
    """Call `make`, yield the file descriptor that it returns, and close it after the block.

    Raises:
        OSError: From `make`.
    """
    [descriptor] = opening(make, *arguments)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


_SEAL = b',\n "sha256": "'
_END = b'"\n}\n'
_BEGINNING = b'{\n "record": "%s",'
_TAG = rb'\{\n "record": "([a-z_]+)-([0-9]{1,9})"'
#: The header of records written before they had tags.
_UNTAGGED = rb'\{\n "schema": ([0-9]{1,9}),\n "cgtool": "([^"]*)"'
_WRITER = rb'\n "cgtool": "([^"]*)"'


class Sealed(Record, frozen=True, kw_only=True, tag_field="record"):
    """A record stored as its own file. The tag of each subclass is its name, "-" and the version of its grammar."""

    cgtool: str = msgspec.field(default_factory=lambda: __version__)


_SealedRecord = TypeVar("_SealedRecord", bound=Sealed)


def seal(record: Sealed) -> bytes:
    """Return a record as the bytes of a sealed file."""
    body = msgspec.json.format(encode(record), indent=1).removesuffix(b"\n}")
    return body + _SEAL + hashlib.sha256(body).hexdigest().encode() + _END


def unseal(data: bytes, kind: type[_SealedRecord], *, path: Path | str) -> _SealedRecord:
    """Return the record in the bytes of a sealed file.

    Raises:
        CacheCorruptError: The bytes are truncated, do not match their digest, or violate the record's grammar.
        CacheSchemaError: Another version of cgtool wrote them.
    """
    body, marker, end = data.rpartition(_SEAL)
    actual = hashlib.sha256(body).hexdigest()
    is_intact = bool(marker) and end == actual.encode() + _END
    _check_version(data, kind, path, is_intact=is_intact)
    if not marker:
        raise corrupt_error(path, "it is truncated: it does not end with its digest")
    if not is_intact:
        stored = end.removesuffix(_END).decode("ascii", "replace")
        raise corrupt_error(path, "its bytes do not match its digest", expected=stored, actual=actual)
    try:
        return decode(body + b"\n}", kind)
    except ValueError as error:
        raise corrupt_error(path, f"a field is invalid: {error}") from error


def read_sealed(path: Path, kind: type[_SealedRecord]) -> _SealedRecord | None:
    """Return the record in a sealed file, or None if there is no such file."""
    data = read_bytes(path)
    return None if data is None else unseal(data, kind, path=path)


def _check_version(data: bytes, kind: type[Sealed], path: Path | str, *, is_intact: bool) -> None:
    expected_tag = str(kind.__struct_config__.tag)
    if data.startswith(_BEGINNING % expected_tag.encode()):
        return
    name, _, number = expected_tag.rpartition("-")
    tag, untagged = re.match(_TAG, data), re.match(_UNTAGGED, data)
    if untagged is not None:
        found, writer = int(untagged[1]), untagged[2].decode("utf-8", "replace")
    elif tag is not None and is_intact and tag[1] == name.encode():
        match = re.search(_WRITER, data)
        found, writer = int(tag[2]), "unknown" if match is None else match[1].decode("utf-8", "replace")
    else:
        return
    expected = int(number)
    if found == expected and untagged is None:
        return
    if found > expected:
        remedy = "Update cgtool, or use another cache folder with --cache-dir or CGTOOL_CACHE_DIR."
    else:
        remedy = "Warm the model again with this version, or use the version that wrote it."
    text = f"{path} has schema {found} and was written by cgtool {writer}; this cgtool reads schema {expected}."
    raise CacheSchemaError(f"{text} {remedy}", path=path, expected=expected, actual=found)
