"""Atomic writes, error messages, and file descriptors under interrupts."""

from __future__ import annotations

import dis
import errno
import itertools
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cgtool import host
from cgtool.errors import CacheCorruptError, CacheError
from cgtool.guards import files as guards_files
from cgtool.store import files, leases
from cgtool.store.files import (
    cache_error,
    check_writable,
    ensure_folder,
    ensure_root,
    write_atomic,
)
from cgtool.store.layout import CacheLayout


def test_a_failed_write_leaves_the_old_bytes_and_no_temporary_file(tmp_path, monkeypatch):
    path = tmp_path / "record"
    write_atomic(path, b"old")

    def fail(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(CacheError, match="Input/output error"):
        write_atomic(path, b"new")
    assert [(child.name, child.read_bytes()) for child in tmp_path.iterdir()] == [("record", b"old")]


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_files_are_never_more_open_than_the_umask_and_never_written_by_others(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_atomic(tmp_path / "folder" / "record", b"")
        write_atomic(tmp_path / "folder" / "artifact", b"", mode=files.ARTIFACT_MODE)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "folder").iterdir()}
    assert modes == {"record": 0o644 & ~umask, "artifact": 0o444 & ~umask}


def test_probe_detects_a_full_disk(small_disk):
    ensure_root(small_disk)
    with pytest.raises(OSError, match="No space"):
        (small_disk / "ballast").write_bytes(bytes(1_000_000))
    with pytest.raises(CacheError, match=r"disk is full.*Free some space"):
        check_writable(small_disk)


@pytest.fixture
def forbidden():
    """A folder that this process may enter and not write to; root becomes somebody else for as long."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        yield Path(folder)
        if root:
            os.seteuid(0)
        Path(folder).chmod(0o755)


def test_missing_permission_is_reported(forbidden):
    with pytest.raises(CacheError, match="permission denied"):
        check_writable(forbidden / "root")


def test_file_in_place_of_a_folder_is_reported(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CacheError, match="is a file"):
            ensure_folder(path)


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, "the disk is full, 5 bytes were needed"),
        (errno.EDQUOT, "the quota is exceeded, 5 bytes were needed"),
        (errno.EFBIG, "exceeds the file size limit. Raise the limit (`ulimit -f`)"),
        (errno.EROFS, "read-only file system"),
        (errno.EACCES, "permission denied"),
        (errno.EIO, "could not be written: Input/output error"),
        (errno.ENOENT, "no such file or folder"),
    ],
)
def test_os_error_is_reported_with_a_remedy(tmp_path, number, says):
    error = cache_error(OSError(number, os.strerror(number)), tmp_path / "file", needed_bytes=5)
    assert says in str(error)
    assert str(tmp_path / "file") in str(error)
    assert error.path == tmp_path / "file"
    assert str(error).endswith(".")


def test_the_cache_imports_no_torch():
    code = (
        "import sys, pkgutil, importlib, cgtool.store as c\n"
        "names = [m.name for m in pkgutil.walk_packages(c.__path__, 'cgtool.store.')]\n"
        "[importlib.import_module(n) for n in names]\n"
        "print(*sorted(names))\n"
        "print(sorted({'torch', 'sympy', 'triton', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    names, heavy = done.stdout.splitlines()
    assert {"cgtool.store.entry", "cgtool.store.units", "cgtool.store.trust"} <= set(names.split())
    assert heavy == "[]"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_fifo_in_place_of_a_file_is_corrupt_and_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "plan.json")
    with pytest.raises(CacheCorruptError, match="it is not a regular file"):
        files.read_bytes(tmp_path / "plan.json")


def test_folder_in_place_of_a_file_is_a_cache_error(tmp_path):
    with pytest.raises(CacheError, match="could not be read"):
        files.read_bytes(tmp_path)


WATCHED = {module.__file__ for module in (files, leases, host, guards_files, sys.modules[__name__])}
#: After these Python looks for signals.
LOOKS = {"RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD"}


def held():
    """The numbers of the open files, less that of the list of them."""
    return {path.name for path in list(Path("/proc/self/fd").iterdir()) if path.exists()}


def interrupted_at(step, action):
    """Run an action with a KeyboardInterrupt where Python looks for signals the step-th time; return whether it was."""
    left = step
    last = {}

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename not in WATCHED or frame.f_code in (trace.__code__, interrupted_at.__code__):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            looked = last.get(frame) in LOOKS
            last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            left -= looked
            if looked and left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        last.clear()
    return False


def lost(action):
    """Interrupt an action wherever Python would; return how often that was, and what it left open."""
    before, open_still = held(), set()
    for step in itertools.count(1):
        interrupted = interrupted_at(step, action)
        open_still |= held() - before
        if not interrupted:
            return step - 1, open_still
    raise AssertionError


@pytest.fixture
def path(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    return tmp_path / "file"


def test_interrupted_read_leaks_no_descriptor(path):
    times, open_still = lost(lambda: files.read_bytes(path))
    assert times > 8
    assert open_still == set()


def test_interrupted_source_digest_leaks_no_descriptor(path):
    times, open_still = lost(lambda: guards_files._digest(str(path)))
    assert times > 3
    assert open_still == set()


def test_interrupted_folder_lock_leaks_no_descriptor(tmp_path):
    kept = []

    def hold():
        kept.append([])
        leases.hold_folder(tmp_path, kept[-1])
        leases.is_abandoned(tmp_path)
        host.closing(kept[-1])

    times, open_still = lost(hold)
    assert times > 8
    listed = [str(descriptor) for descriptors in kept for descriptor in descriptors]
    assert open_still - set(listed) == set()
    for descriptors in kept:
        host.closing(descriptors)
    assert kept == [[] for _ in kept]
    assert held() & set(listed) == set()


def test_interrupted_lease_leaks_no_descriptor(tmp_path):
    taken = []
    times, open_still = lost(lambda: taken.append(leases.hold_writing(CacheLayout(root=tmp_path), "ab" * 32)))
    assert times > 8
    for lease in taken:
        open_still.remove(str(lease._files[0]))
        lease.release()
    assert open_still == set()
