from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import signal
import threading
import time

import pytest
from cache_samples import hold_lock, no_flock

from cgtool.errors import CacheError
from cgtool.store import lock as lock_module
from cgtool.store.lock import FileLock

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(autouse=True)
def _forget_the_warning():
    lock_module._warn_once.cache_clear()
    yield
    lock_module._warn_once.cache_clear()


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock."""
    held = tmp_path / "held"
    process = SPAWN.Process(target=hold_lock, args=(tmp_path / "lock", held))
    process.start()
    while not held.exists():
        time.sleep(0.005)
    yield process
    process.kill()
    process.join()


def test_two_holders_within_one_process_exclude_each_other(tmp_path):
    order = []
    first = FileLock(tmp_path / "lock")
    first.acquire()

    def second():
        with FileLock(tmp_path / "lock", on_wait=lambda: order.append("waits")):
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    while not order:
        time.sleep(0.001)
    order.append("first lets go")
    first.release()
    thread.join()
    assert order == ["waits", "first lets go", "second"]


def test_nobody_is_told_to_wait_for_a_free_lock(tmp_path):
    told = []
    with FileLock(tmp_path / "lock", on_wait=lambda: told.append(1)) as lock:
        assert lock.is_held
    assert not lock.is_held
    assert told == []


def test_a_killed_holder_lets_go(tmp_path, holder):
    def kill():
        os.kill(holder.pid, signal.SIGKILL)

    with FileLock(tmp_path / "lock", on_wait=kill) as lock:
        assert lock.is_held


def test_a_fork_of_the_holder_does_not_keep_the_lock(tmp_path):
    lock = FileLock(tmp_path / "lock")
    lock.acquire()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"running")
        time.sleep(30)
        os._exit(0)
    os.read(reading, 7)
    os.close(reading)
    os.close(writing)
    try:
        # What the kernel does when a process dies: its descriptors close, and nothing is unlocked on purpose.
        lock.drop()
        waited = []
        with FileLock(tmp_path / "lock", on_wait=lambda: waited.append(1)):
            assert waited == []
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_fork_leaves_the_lock_with_its_parent(tmp_path):
    with FileLock(tmp_path / "lock"):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        taken = threading.Event()
        thread = threading.Thread(target=lambda: _take(tmp_path / "lock", taken))
        thread.start()
        assert not taken.wait(0.1)
    thread.join()
    assert taken.is_set()


def _take(path, taken):
    with FileLock(path):
        taken.set()


def test_a_lock_file_that_was_replaced_while_waiting_is_opened_anew(tmp_path):
    path = tmp_path / "lock"
    first = FileLock(path)
    first.acquire()

    def replace():
        path.unlink()
        first.release()

    with FileLock(path, on_wait=replace) as second:
        assert second.is_held
        assert path.exists(), "a lock on a file that has no name excludes nobody"
        waited = threading.Event()
        third = threading.Thread(target=lambda: FileLock(path, on_wait=waited.set).__enter__().release())
        third.start()
        assert waited.wait(5)
    third.join()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_flock_is_one_warning_and_no_error(tmp_path, caplog, number):
    with no_flock(number), caplog.at_level(logging.WARNING):
        for name in ("a", "b", "c"):
            with FileLock(tmp_path / name / "lock") as lock:
                assert not lock.is_held
    assert len(caplog.records) == 1
    assert "locks do not work" in caplog.text


def test_another_error_of_flock_is_raised(tmp_path):
    with no_flock(errno.EIO), pytest.raises(CacheError, match="could not be written"):
        FileLock(tmp_path / "lock").acquire()


def test_a_holder_that_fails_lets_go(tmp_path):
    with pytest.raises(KeyError), FileLock(tmp_path / "lock"):
        raise KeyError
    with FileLock(tmp_path / "lock", on_wait=lambda: pytest.fail("still held")):
        pass


def test_a_read_only_folder_is_a_sentence(tmp_path, read_only):
    folder = tmp_path / "cache"
    folder.mkdir()
    read_only(folder)
    with pytest.raises(CacheError, match="read-only file system"):
        FileLock(folder / "locks" / "lock").acquire()
