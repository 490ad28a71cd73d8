"""`cgtool.host`: the version of the compiler, CPU flags, garbage collection."""

from __future__ import annotations

import gc
import inspect
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cgtool import host
from cgtool.host import gc_paused


def compiler_at(folder, line, name="g++"):
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f'#!/bin/sh\necho run >> "{folder}/runs"\necho "{line}"\necho more\n')
    path.chmod(0o755)
    return path


def test_a_compiler_is_identified_by_version_and_not_by_path(tmp_path, monkeypatch):
    here = compiler_at(tmp_path / "a", "g++ (Debian 12.2.0) 12.2.0")
    there = compiler_at(tmp_path / "b", "c++ (Debian 12.2.0) 12.2.0", name="c++")
    newer = compiler_at(tmp_path / "c", "x86_64-linux-gnu-g++ (Debian 13.1.0) 13.1.0")
    found = []
    for path in (here, there, newer, tmp_path / "nowhere"):
        monkeypatch.setenv("CXX", str(path))
        found.append(host.compiler_version())
    assert found == ["(Debian 12.2.0) 12.2.0", "(Debian 12.2.0) 12.2.0", "(Debian 13.1.0) 13.1.0", None]


def test_a_compiler_runs_once_until_it_changes(tmp_path, monkeypatch):
    path = compiler_at(tmp_path / "a", "clang version 14.0.6")
    monkeypatch.setenv("CXX", str(path))
    for _ in range(3):
        assert host.compiler_version() == "clang version 14.0.6"
    assert (path.parent / "runs").read_text().count("run") == 1
    compiler_at(tmp_path / "a", "clang version 15.0.0.1")
    assert host.compiler_version() == "clang version 15.0.0.1"


def test_concurrent_threads_share_one_compiler_run(tmp_path, monkeypatch):
    path = compiler_at(tmp_path / "a", "clang version 14.0.6")
    path.write_text(path.read_text().replace("echo more", "sleep 0.2"))
    monkeypatch.setenv("CXX", str(path))

    def ask(_):
        host.prefetch_compiler_version()
        return host.compiler_version()

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(8))) == ["clang version 14.0.6"] * 8
    assert (path.parent / "runs").read_text().count("run") == 1


def test_only_cpu_flags_of_instruction_sets_count(tmp_path, monkeypatch):
    flags = ("ibpb", "avx512f", "hypervisor", "constant_tsc", "amx_tile", "md_clear", "vmx")
    assert [flag for flag in flags if flag.startswith(host._INSTRUCTIONS)] == ["avx512f", "amx_tile"]


def answers_in_a_fork(expected):
    """Return whether a forked child gets the compiler's version; a hanging child is ended."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(7 if host.compiler_version() == expected else 1)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 7


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_runs_the_compiler_again_while_the_parent_waits(tmp_path, monkeypatch):
    path = compiler_at(tmp_path / "a", "clang version 14.0.6")
    path.write_text(path.read_text().replace("echo run", "sleep 0.5; echo run"))
    monkeypatch.setenv("CXX", str(path))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(host.compiler_version)
        time.sleep(0.2)
        assert answers_in_a_fork("clang version 14.0.6")
        assert waiting.result() == "clang version 14.0.6"
    (path.parent / "runs").unlink()
    assert answers_in_a_fork("clang version 14.0.6")  # a known version is not queried again
    assert not (path.parent / "runs").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_does_not_read_its_parents_compiler_output(tmp_path, monkeypatch):
    path = compiler_at(tmp_path / "a", "clang version 14.0.6")
    monkeypatch.setenv("CXX", str(path))
    host.prefetch_compiler_version()
    assert answers_in_a_fork("clang version 14.0.6")
    assert host.compiler_version() == "clang version 14.0.6"


def test_a_failing_compiler_has_no_version(tmp_path, monkeypatch):
    for index, text in enumerate(("echo 'g++ (Debian 12.2.0) 12.2.0'; exit 1", "exit 0", "kill -9 $$")):
        path = tmp_path / f"g++{index}"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        assert host.compiler_version() is None
    path.write_text("#!/bin/sh\nprintf 'g++ (\\377) 1'\n")
    assert host.compiler_version() == "(\N{REPLACEMENT CHARACTER}) 1"


def test_a_blank_cxx_means_the_default_compiler(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    expected = host.compiler_version()
    monkeypatch.setenv("CXX", " ")
    assert host.compiler_version() == expected


@pytest.fixture
def no_frozen(monkeypatch):
    monkeypatch.setattr(gc, "get_freeze_count", inspect.unwrap(gc.get_freeze_count))  # conftest.py replaces it
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()  # restore the state of the session


class Made:
    """An object that garbage collection visits."""


@pytest.mark.usefixtures("no_frozen")
def test_objects_made_while_gc_is_paused_move_to_the_oldest_generation():
    with gc_paused():
        assert not gc.isenabled()
        made = [Made() for _ in range(10)]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    old = {id(item) for item in gc.get_objects(generation=2)}
    assert old.issuperset(map(id, made))


@pytest.mark.usefixtures("no_frozen")
def test_frozen_objects_stay_frozen():
    made = [Made() for _ in range(10)]
    gc.freeze()
    with gc_paused():
        pass
    looked_at = {id(item) for item in gc.get_objects()}  # frozen objects are not among them
    assert looked_at.isdisjoint(map(id, made))


def test_a_disabled_gc_stays_disabled():
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("count", [0, 1, 2, 5])
@pytest.mark.parametrize("threads", [True, False])
def test_on_two_threads_handles_each_item_once_even_without_a_second_thread(count, threads, monkeypatch):
    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    if not threads:
        monkeypatch.setattr(host.threading.Thread, "start", refuse)
    done = []
    host.on_two_threads(done.extend, range(count))
    assert sorted(done) == list(range(count))
