"""Leases, which keep prune away from entries in use, and work locks."""

from __future__ import annotations

import contextlib
import errno
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from cache_samples import hold_lock, no_descriptors, no_flock, publish

from cgtool.errors import CacheError
from cgtool.store import leases
from cgtool.store import lock as lock_module
from cgtool.store.layout import CacheLayout, RankName
from cgtool.store.leases import (
    LeaseTable,
    claimed,
    hold,
    hold_writing,
    keep,
    remove_idle,
    remove_if_idle,
    require_locks,
)
from cgtool.store.lock import file_lock

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(autouse=True)
def let_go():
    """Release the leases that `hold` keeps until the process ends."""
    yield
    for lease in leases._held.values():
        lease.release()
    leases._held.clear()


def in_use(layout, name):
    return LeaseTable(layout).is_used(name.hash)


def hold_until_killed(root: Path, name: RankName, held: Path) -> None:
    hold(CacheLayout(root=root), name)
    held.touch()
    time.sleep(60)


def start_holder(hold_it, *what, held):
    """Start a process that holds a lock, and return it once it does."""
    process = SPAWN.Process(target=hold_it, args=(*what, held))
    process.start()
    deadline = time.time() + 30
    while not held.exists():
        assert time.time() < deadline
        time.sleep(0.01)
    return process


def kill(process):
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def test_entry_is_in_use_until_the_loading_process_dies(cache_root, layout, tmp_path):
    name = publish(cache_root)
    other = publish(cache_root, level=2)
    process = start_holder(hold_until_killed, cache_root, name, held=tmp_path / "held")
    assert in_use(layout, name)
    assert not in_use(layout, other)
    kill(process)
    assert not in_use(layout, name)


def test_entry_in_use_cannot_be_claimed(cache_root, layout):
    name = publish(cache_root)
    lease = hold(layout, name)
    with claimed(layout, name.hash) as mine:
        assert not mine
    lease.release()
    with claimed(layout, name.hash) as mine:
        assert mine


def test_entry_cannot_be_claimed_while_a_new_rank_is_written(cache_root, layout):
    name = publish(cache_root)
    lease = hold_writing(layout, name.hash)
    with claimed(layout, name.hash) as mine:
        assert not mine
    assert in_use(layout, name)
    del lease
    with claimed(layout, name.hash) as mine:
        assert mine


def test_claim_for_leftovers_ignores_loaders(cache_root, layout):
    name = publish(cache_root)
    lease = hold(layout, name)
    with claimed(layout, name.hash, loaders=False) as mine:
        assert mine
    assert lease.is_current
    writing = hold_writing(layout, name.hash)
    with claimed(layout, name.hash, loaders=False) as mine:
        assert not mine
    writing.release()


def test_keep_fails_if_prune_holds_its_claim(cache_root, layout):
    name = publish(cache_root)
    with claimed(layout, name.hash):
        start = time.perf_counter()
        assert not keep(layout, name)
        assert time.perf_counter() - start > 0.9
    assert keep(layout, name)


def test_keep_does_not_hold_a_removed_entry(cache_root, layout):
    name = publish(cache_root)
    layout.manifest_file(name).unlink()
    assert not keep(layout, name)
    publish(cache_root)  # another process's, say
    assert not in_use(layout, name)
    assert keep(layout, name)
    assert in_use(layout, name)


def test_keep_waits_for_the_end_of_a_claim(cache_root, layout):
    name = publish(cache_root)
    stack = contextlib.ExitStack()
    assert stack.enter_context(claimed(layout, name.hash))
    timer = threading.Timer(0.2, stack.close)
    timer.start()
    assert keep(layout, name)
    timer.join()
    assert in_use(layout, name)


def test_keep_fails_if_prune_holds_its_claim_on_a_read_only_cache(cache_root, layout, tmp_path, read_only, monkeypatch):
    monkeypatch.setattr(leases, "_PAUSE_SECS", 0)
    name = publish(cache_root)
    readers = tmp_path / "readers"
    readers.symlink_to(cache_root)
    read_only(cache_root)
    with claimed(layout, name.hash) as mine:
        assert mine
        assert not keep(CacheLayout(root=readers), name)


def test_writer_waits_for_the_end_of_a_claim(cache_root, layout):
    name = publish(cache_root)
    program = (
        "import sys; from pathlib import Path; from cgtool.store.layout import CacheLayout\n"
        "from cgtool.store.leases import hold_writing\n"
        "print('waiting', flush=True)\n"
        "print(hold_writing(CacheLayout(root=Path(sys.argv[1])), sys.argv[2]) is not None)"
    )
    with claimed(layout, name.hash):
        child = subprocess.Popen(
            [sys.executable, "-c", program, str(cache_root), name.hash], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout.readline() == "waiting\n"
        time.sleep(0.1)
        assert child.poll() is None
    assert child.communicate()[0] == "True\n"


def test_lease_on_a_removed_file_is_replaced(cache_root, layout):
    name = publish(cache_root)
    hold(layout, name).release()
    path = layout.state_dir / "leases" / name.flat
    assert remove_if_idle(path)
    assert not path.exists()
    lease = hold(layout, name)
    assert path.exists()
    path.unlink()
    assert not lease.is_current
    assert hold(layout, name) is not lease
    assert path.exists()


def test_lease_file_removed_between_open_and_lock_is_created_again(cache_root, layout, monkeypatch):
    name = publish(cache_root)
    path = layout.state_dir / "leases" / name.flat
    open_lease, tries = leases._open_lease, []

    def racing(text):
        lease = open_lease(text)
        tries.append(text)
        if len(tries) == 1:
            path.unlink()
        return lease

    monkeypatch.setattr(leases, "_open_lease", racing)
    assert hold(layout, name).is_current
    assert path.exists()
    assert len(tries) == 2


def test_held_lease_is_not_removed(cache_root, layout):
    name = publish(cache_root)
    lease = hold(layout, name)
    path = layout.state_dir / "leases" / name.flat
    assert not remove_if_idle(path)
    assert path.exists()
    lease.release()
    remove_idle(layout, name.hash)
    assert list((layout.state_dir / "leases").iterdir()) == []


def test_lease_on_a_read_only_cache_locks_the_entrys_folder(cache_root, layout, read_only):
    name = publish(cache_root)
    read_only(cache_root)
    lease = hold(layout, name)
    assert lease is not None
    assert not (layout.state_dir / "leases" / name.flat).exists()
    assert in_use(layout, name)
    with claimed(layout, name.hash) as mine:
        assert not mine
    lease.release()
    assert not in_use(layout, name)


def test_leases_and_claims_work_on_a_full_disk(small_disk):
    layout = CacheLayout(root=small_disk)
    name = publish(small_disk)
    with pytest.raises(OSError, match="No space"):
        (small_disk / "ballast").write_bytes(bytes(1_000_000))
    lease = hold(layout, name)
    assert in_use(layout, name)
    lease.release()
    with claimed(layout, name.hash) as mine:
        assert mine


def test_without_locks_there_are_no_leases_and_no_claims(cache_root, layout):
    name = publish(cache_root)
    with no_flock():
        assert keep(layout, name)
        assert hold(layout, name) is hold_writing(layout, name.hash) is None
        assert in_use(layout, name)
        with claimed(layout, name.hash) as mine:
            assert not mine
        with pytest.raises(CacheError, match="File locks do not work"):
            require_locks(layout)


def test_running_out_of_descriptors_is_not_an_error(cache_root, layout):
    name = publish(cache_root)
    with no_descriptors():
        assert hold(layout, name) is None
        assert hold_writing(layout, name.hash) is None
    assert hold(layout, name) is not None


@pytest.fixture(autouse=True)
def _forget_the_warning():
    lock_module._warn_once.cache_clear()
    yield
    lock_module._warn_once.cache_clear()


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock."""
    process = start_holder(hold_lock, tmp_path / "lock", held=tmp_path / "held")
    yield process
    process.kill()
    process.join()


def test_lock_excludes_threads_of_one_process(tmp_path):
    order = []
    first = contextlib.ExitStack()
    first.enter_context(file_lock(tmp_path / "lock"))

    def second():
        with file_lock(tmp_path / "lock", on_wait=lambda: order.append("waits")):
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    while not order:
        time.sleep(0.001)
    order.append("first lets go")
    first.close()
    thread.join()
    assert order == ["waits", "first lets go", "second"]


def test_lock_of_a_killed_process_is_released(tmp_path, holder):
    def kill():
        os.kill(holder.pid, signal.SIGKILL)

    with file_lock(tmp_path / "lock", on_wait=kill) as is_held:
        assert is_held


def test_forked_child_does_not_keep_the_lock(tmp_path):
    lock = contextlib.ExitStack()
    lock.enter_context(file_lock(tmp_path / "lock"))
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
        # As when a process dies: its descriptors are closed without unlocking.
        os.close(lock_module._held.pop())
        waited = []
        with file_lock(tmp_path / "lock", on_wait=lambda: waited.append(1)):
            assert waited == []
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_lock_file_replaced_while_waiting_is_opened_again(tmp_path):
    path = tmp_path / "lock"
    first = contextlib.ExitStack()
    first.enter_context(file_lock(path))

    def replace():
        path.unlink()
        first.close()

    def third_holder():
        with file_lock(path, on_wait=waited.set):
            pass

    with file_lock(path, on_wait=replace) as is_held:
        assert is_held
        assert path.exists(), "a lock on a removed file excludes nobody"
        waited = threading.Event()
        third = threading.Thread(target=third_holder)
        third.start()
        assert waited.wait(5)
    third.join()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_file_system_without_flock_causes_one_warning(tmp_path, caplog, number):
    with no_flock(number), caplog.at_level(logging.WARNING):
        for name in ("a", "b", "c"):
            with file_lock(tmp_path / name / "lock") as is_held:
                assert not is_held
    assert len(caplog.records) == 1
    assert "locks do not work" in caplog.text


def test_another_error_of_flock_is_raised(tmp_path):
    with no_flock(errno.EIO), pytest.raises(CacheError, match="could not be written"):
        file_lock(tmp_path / "lock").__enter__()
