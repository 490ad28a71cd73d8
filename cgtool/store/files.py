"""How bytes reach the disk and come back: whole files, sealed records, errors as sentences. Must not import torch.

Every file of the cache is written once under a temporary name in its own folder, flushed to the disk, and renamed. A
temporary name is `.<name>.<pid>.<token>.tmp`; no reader opens such a name, so what a killed process leaves is ignored,
and `sweep` removes it once it is old. Nothing is ever changed in place.

A sealed record is a JSON object whose last member is the SHA-256 of all bytes before that member's line::

    {
     "record": "manifest-3",                         what it is, and the version of its grammar
     "cgtool": "<version that wrote it>",
     ...
     "sha256": "<64 hexadecimal digits>"
    }

So a torn file and a flipped bit are noticed by one hash, before anything is parsed, and a newer version says so.
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
#: A temporary file that has not grown for so long belongs to a process that is gone.
_ABANDONED_SECS = 3600.0
#: Without waiting for a writer of what is a pipe.
_READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
#: For a file of the cache's own: a link that lies in its place is not followed, and a pipe is not waited for.
OWN = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
#: Someone may remove the folder between making it and writing into it; more than a few times is no accident.
_ATTEMPTS = 5
#: More than a file system keeps beside the names of files, so that a full disk shows.
_PROBE_BYTES = 16384
_SIGNATURE = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# This file marks a cache of cgtool: its contents can be made again, so backups may skip it.\n"
    "# See https://bford.info/cachedir/\n"
)


#: What EFBIG and SIGXFSZ mean, and what to do.
FILE_LIMIT = "it is larger than a file may be here. Raise the limit on the size of files (`ulimit -f`)"
#: What other errors mean, and what to do.
_WHY = {
    errno.EROFS: ("it is on a read-only file system", "Make it writable"),
    errno.EACCES: ("permission denied", "Change its permissions"),
    errno.EPERM: ("permission denied", "Change its permissions"),
    errno.ENOTDIR: ("a part of this path is a file and not a folder", "Remove it"),
    errno.ENOENT: ("there is no such file or folder", "Check the path"),
}


def cache_error(
    error: OSError,
    path: Path | str,
    *,
    needed_bytes: int | None = None,
    doing: str = "written",
    elsewhere: str = "choose another folder with --cache-dir or CGTOOL_CACHE_DIR",
) -> CacheError:
    """Return the sentence for an error of the operating system; `doing` is "written", "read" or "removed"."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _full_disk(error, Path(path), needed_bytes, elsewhere)
    if error.errno == errno.EFBIG:
        return CacheError(f"{path} could not be written: {FILE_LIMIT}.", path=path)
    why, todo = _WHY.get(error.errno or 0, (error.strerror or str(error), "Check the disk"))
    return CacheError(f"{path} could not be {doing}: {why}. {todo} or {elsewhere}.", path=path)


@contextlib.contextmanager
def os_errors_as_cache_errors(path: Path | None = None, *, doing: str = "read") -> Iterator[None]:
    """Turn errors of the system in the block into `cache_error`'s; without a path, those that name a file.

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


def ensure_folder(folder: Path) -> list[Path]:
    """Make a folder and those above it, durably; return those that were missing, the innermost first."""
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
        for new in missing:
            with contextlib.suppress(OSError):
                new.rmdir()
        raise cache_error(error, folder) from error
    for new in reversed(missing):
        sync_folder(new.parent)
    return missing


def ensure_root(root: Path) -> None:
    """Make a cache root with its CACHEDIR.TAG."""
    tag = root / "CACHEDIR.TAG"
    with os_errors_as_cache_errors(tag):
        is_there = tag.exists()
    if not is_there:
        ensure_folder(root)
        write_atomic(tag, _SIGNATURE.encode("ascii"))


def check_writable(root: Path) -> None:
    """Make a cache root and try to write into it, so that a warm fails before it does minutes of work."""
    ensure_root(root)
    base = root / CACHE_FOLDER
    ensure_folder(base)
    with written(base / "probe", bytes(_PROBE_BYTES)):
        pass


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, where the file system knows how to."""
    flags = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
    with contextlib.suppress(OSError), opened(os.open, folder, flags) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def written(path: Path, data: bytes, *, mode: int = RECORD_MODE) -> Iterator[Path]:
    """Write `data` to a temporary file beside `path` and yield it; it is gone afterwards unless it was renamed."""
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
    """Put a file in place whole: a reader finds the old bytes or the new ones, whenever this process dies.

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


def write_new(path: Path, chunks: Iterable[bytes], mode: int = RECORD_MODE) -> int:
    """Write a new file, flush it to the disk, and return its size.

    Raises:
        OSError: It is there already, the disk is full, ...
    """
    num_bytes = 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    with opened(os.open, path, flags, mode) as descriptor:
        for chunk in chunks:
            view = memoryview(chunk)
            num_bytes += len(view)
            while view:
                view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    return num_bytes


def touch(path: Path) -> None:
    """Make an empty file, durably enough: one that is lost is made again. Raises CacheError."""
    ensure_folder(path.parent)
    with os_errors_as_cache_errors(path, doing="written"):
        path.touch(mode=RECORD_MODE)


def remove(path: Path) -> None:
    """Remove a file; one that is gone already is fine. Raises CacheError."""
    with os_errors_as_cache_errors(path, doing="removed"):
        path.unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Remove a folder with all that is in it, as far as that can be done; never raises on account of the disk."""
    with contextlib.suppress(OSError):  # rmtree ignores not all errors
        shutil.rmtree(folder, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove temporary files that killed processes left in a folder; never raises."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                if is_temporary(path.name) and time.time() - path.lstat().st_mtime > _ABANDONED_SECS:
                    path.unlink()


def is_temporary(name: str) -> bool:
    """Return whether a file name is that of a file not yet published."""
    return name.startswith(".") and name.endswith(_TEMPORARY_SUFFIX)


def writer_lives(name: str) -> bool | None:
    """Return whether the process runs that a temporary file is named after; None where the name says no process.

    A number of a process says nothing of another machine's or container's.
    """
    match = re.fullmatch(_TEMPORARY, name)
    if match is None:
        return None
    if os.name != "posix":  # elsewhere signal 0 is no question
        return True
    try:
        os.kill(int(match[1]), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it runs, and is another user's
        return True
    return True


def names_in(folder: Path | str, *, follow: bool = True) -> list[str]:
    """Return the names in a folder, sorted; none where it cannot be listed, or is a link that is not to be followed."""
    if not follow and os.path.islink(folder):  # noqa: PTH114 - a str, a hundred thousand times
        return []
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - names alone, of a hundred thousand folders
    except OSError:
        return []


@contextlib.contextmanager
def reading(path: Path | str) -> Iterator[io.FileIO]:
    """Open a file to read it, without a buffer.

    Raises:
        OSError: It is missing or cannot be opened.
        CacheCorruptError: Something else than a file is there: a pipe would hold the reader up for ever.
    """
    with opened(os.open, path, _READ) as descriptor, open(descriptor, "rb", buffering=0, closefd=False) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise corrupt(path, "it is no file")
        yield file


def read_bytes(path: Path | str) -> bytes | None:
    """Return a file's bytes, or None when there is no such file.

    Raises:
        CacheCorruptError: Something else than a file is there.
        CacheError: It is there and cannot be read.
    """
    try:
        with reading(path) as file:
            data = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise cache_error(error, path, doing="read") from error
    return data


def read_matching(path: Path | str, digest: str) -> bytes:
    """Return the bytes of a file that is named by their digest.

    Open what is returned and never the path again: the file may change between the two.

    Raises:
        CacheCorruptError: It is missing, or its bytes differ from its digest.
        CacheError: It cannot be read.
    """
    data = read_bytes(path)
    if data is None:
        raise corrupt(path, "it is missing", expected=digest)
    actual = sha256_hex(data)
    if actual != digest:
        raise corrupt(path, "its bytes differ from its digest", expected=digest, actual=actual)
    return data


def may_exist(path: Path | str) -> bool:
    """Return whether a file or folder is there; what cannot be looked at is taken to be."""
    try:
        os.stat(path)  # noqa: PTH116 - asked on the way of a load, and of thousands
    except OSError as error:
        return not isinstance(error, (FileNotFoundError, NotADirectoryError))
    return True


def corrupt(path: Path | str, why: str, *, expected: Any = None, actual: Any = None) -> CacheCorruptError:
    """Return the sentence for a file whose content cannot be trusted."""
    text = f"{path} is corrupt: {why}. Warm the model again to replace it, or remove the file."
    return CacheCorruptError(text, path=path, expected=expected, actual=actual)


def is_newer(error: CacheSchemaError) -> bool:
    """Return whether a file's schema is newer than ours, so that it must not be replaced."""
    return bool(error.actual > error.expected)


@contextlib.contextmanager
def opened(make: Callable[..., int], *arguments: Any) -> Iterator[int]:
    """Hold a descriptor while the block runs.

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
#: How caches looked before records had tags.
_UNTAGGED = rb'\{\n "schema": ([0-9]{1,9}),\n "cgtool": "([^"]*)"'
_WRITER = rb'\n "cgtool": "([^"]*)"'


class Sealed(Record, frozen=True, kw_only=True, tag_field="record"):
    """A record that is a file of its own. A class below it has a tag: its name, "-" and the version of its grammar."""

    cgtool: str = msgspec.field(default_factory=lambda: __version__)


_SealedRecord = TypeVar("_SealedRecord", bound=Sealed)


def seal(record: Sealed) -> bytes:
    """Return the text of a sealed file."""
    body = msgspec.json.format(encode(record), indent=1).removesuffix(b"\n}")
    return body + _SEAL + hashlib.sha256(body).hexdigest().encode() + _END


def unseal(data: bytes, kind: type[_SealedRecord], *, path: Path | str) -> _SealedRecord:
    """Return the record in the bytes of a sealed file.

    Raises:
        CacheCorruptError: They are torn, differ from their digest, or break the record's grammar.
        CacheSchemaError: Another version of cgtool wrote them.
    """
    body, found, end = data.rpartition(_SEAL)
    actual = hashlib.sha256(body).hexdigest()
    is_intact = bool(found) and end == actual.encode() + _END
    _check_version(data, kind, path, is_intact=is_intact)
    if not found:
        raise corrupt(path, "it is torn: it does not end with its digest")
    if not is_intact:
        stored = end.removesuffix(_END).decode("ascii", "replace")
        raise corrupt(path, "its bytes differ from its digest", expected=stored, actual=actual)
    try:
        return decode(body + b"\n}", kind)
    except ValueError as error:
        raise corrupt(path, f"a field is wrong: {error}") from error


def read_sealed(path: Path, kind: type[_SealedRecord]) -> _SealedRecord | None:
    """Return the record in a sealed file, or None when there is no such file."""
    data = read_bytes(path)
    return None if data is None else unseal(data, kind, path=path)


def _check_version(data: bytes, kind: type[Sealed], path: Path | str, *, is_intact: bool) -> None:
    own = str(kind.__struct_config__.tag)
    if data.startswith(_BEGINNING % own.encode()):
        return
    name, _, number = own.rpartition("-")
    tag, untagged = re.match(_TAG, data), re.match(_UNTAGGED, data)
    if untagged is not None:
        found, writer = int(untagged[1]), untagged[2].decode("utf-8", "replace")
    elif tag is not None and is_intact and tag[1] == name.encode():
        wrote = re.search(_WRITER, data)
        found, writer = int(tag[2]), "unknown" if wrote is None else wrote[1].decode("utf-8", "replace")
    else:
        return
    expected = int(number)
    if found == expected and untagged is None:
        return
    if found > expected:
        todo = "Update cgtool, or use another cache folder with --cache-dir or CGTOOL_CACHE_DIR."
    else:
        todo = "Warm the model again with this version, or use the version that wrote it."
    text = f"{path} has schema {found} and was written by cgtool {writer}; this cgtool reads schema {expected}. {todo}"
    raise CacheSchemaError(text, path=path, expected=expected, actual=found)
