"""Compile or load: each unique piece once, whoever asks, and nothing half after an interruption."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
import torch
from msgspec.structs import replace
from piece_cases import CASES

from cgtool.compiler.adaptors import get_adaptor
from cgtool.compiler.adaptors.eager import EagerAdaptor
from cgtool.compiler.manager import CompilerManager
from cgtool.config import CompilationConfig
from cgtool.errors import CompileError
from cgtool.graph.specialise import specialise
from cgtool.store.artifacts import Origin
from cgtool.store.entry import ObjectStore
from cgtool.store.layout import CacheLayout
from cgtool.store.units import UnitStore

pytestmark = pytest.mark.torch

PIECE = CASES["two inputs"].piece
OTHER = CASES["one output twice"].piece


class Counting(EagerAdaptor):
    """An adaptor that counts its compiles, and may be slow or fail."""

    def __init__(self, log=None, *, secs=0.0, error=None):
        self.count = 0
        self.log = log
        self.secs = secs
        self.error = error

    def compile(self, graph, *, options, max_autotune=False):
        self.count += 1
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{graph.identity()}\n")
        time.sleep(self.secs)
        if self.error is not None:
            raise self.error
        return super().compile(graph, options=options, max_autotune=max_autotune)


def manager_of(root, adaptor, **config):
    layout = CacheLayout(root=root)
    return CompilerManager(UnitStore(layout), adaptor, CompilationConfig(**config)), ObjectStore(root / "entry")


def origin_of(graph):
    return Origin(piece=graph.identity(), shape={})


def files_of(root):
    """Return the files of a cache, without locks."""
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() and p.name != "lock")


def test_a_piece_is_compiled_once_and_found_again(cache_root):
    adaptor = Counting()
    manager, objects = manager_of(cache_root, adaptor)
    first = manager.ensure(PIECE, origin_of(PIECE), objects=objects)
    again = manager.ensure(PIECE, origin_of(PIECE), objects=objects)
    other, elsewhere = manager_of(cache_root, adaptor)
    third = other.ensure(PIECE, origin_of(PIECE), objects=elsewhere)
    assert (first.reused, again.reused, third.reused) == (False, True, True)
    assert first.artifact.digest == again.artifact.digest == third.artifact.digest
    assert adaptor.count == 1
    run = manager.load(first.artifact, PIECE, objects=objects)
    assert run([torch.ones(2, 8), torch.ones(8, 8)])[0].shape == (2, 8)


def test_another_piece_size_option_or_adaptor_is_another_unit(cache_root):
    manager, _ = manager_of(cache_root, get_adaptor("inductor_standalone"))
    optioned, _ = manager_of(
        cache_root, get_adaptor("inductor_standalone"), inductor_compile_config={"epilogue_fusion": False}
    )
    eager, _ = manager_of(cache_root, get_adaptor("eager"))
    keys = [
        manager.key(PIECE, origin_of(PIECE)),
        manager.key(OTHER, origin_of(OTHER)),
        manager.key(specialise(PIECE, {"s0": 8}), replace(origin_of(PIECE), shape={"n": (8, 8)})),
        manager.key(PIECE, origin_of(PIECE), max_autotune=True),
        optioned.key(PIECE, origin_of(PIECE)),
        eager.key(PIECE, origin_of(PIECE)),
    ]
    assert len(set(keys)) == len(keys)
    assert manager.key(PIECE, origin_of(PIECE)) == keys[0]


def test_a_damaged_unit_is_compiled_again(cache_root):
    adaptor = Counting()
    manager, objects = manager_of(cache_root, adaptor)
    unit = manager.ensure(PIECE, origin_of(PIECE), objects=objects)
    for path in cache_root.rglob(f"{unit.artifact.digest}.{unit.artifact.kind}"):
        path.chmod(0o644)
        path.write_bytes(b"other bytes")
    fresh, objects = manager_of(cache_root, adaptor)
    assert not fresh.ensure(PIECE, origin_of(PIECE), objects=objects).reused
    assert adaptor.count == 2
    assert fresh.load(unit.artifact, PIECE, objects=objects)


@pytest.mark.parametrize("error", [CompileError("no"), KeyboardInterrupt(), SystemExit(143)])
def test_a_compile_that_ends_early_leaves_nothing(cache_root, error):
    manager, objects = manager_of(cache_root, Counting(error=error))
    with pytest.raises(type(error)):
        manager.ensure(PIECE, origin_of(PIECE), objects=objects)
    assert files_of(cache_root) == []
    after, objects = manager_of(cache_root, Counting())
    assert not after.ensure(PIECE, origin_of(PIECE), objects=objects).reused


def _compile_both(root, log, barrier):
    manager, objects = manager_of(root, Counting(log, secs=0.2))
    barrier.wait()
    for piece in (PIECE, OTHER):
        manager.ensure(piece, origin_of(piece), objects=objects)


def test_four_processes_compile_each_piece_once_between_them(cache_root, tmp_path):
    context = multiprocessing.get_context("spawn")
    log, barrier = tmp_path / "log", context.Barrier(4)
    workers = [context.Process(target=_compile_both, args=(cache_root, log, barrier)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert sorted(log.read_text().split()) == sorted([PIECE.identity(), OTHER.identity()])


def _compile_slowly(root, log):
    manager, objects = manager_of(root, Counting(log, secs=60))
    manager.ensure(PIECE, origin_of(PIECE), objects=objects)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_compile_leaves_nothing_and_blocks_nobody(cache_root, tmp_path, number):
    context = multiprocessing.get_context("spawn")
    log = tmp_path / "log"
    worker = context.Process(target=_compile_slowly, args=(cache_root, log))
    worker.start()
    deadline = time.monotonic() + 180
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(worker.pid, number)
    worker.join(60)
    assert files_of(cache_root) == []
    manager, objects = manager_of(cache_root, Counting())
    assert not manager.ensure(PIECE, origin_of(PIECE), objects=objects).reused


def test_a_wait_for_another_process_is_said(cache_root):
    events = []
    layout = CacheLayout(root=cache_root)
    units = UnitStore(layout)
    manager = CompilerManager(units, Counting(), CompilationConfig(), on_event=events.append)
    held = units.lock(manager.key(PIECE, origin_of(PIECE)))
    held.__enter__()

    def release(event):
        events.append(event)
        held.__exit__(None, None, None)

    manager = CompilerManager(units, Counting(), CompilationConfig(), on_event=release)
    manager.ensure(PIECE, origin_of(PIECE), objects=ObjectStore(cache_root / "entry"))
    assert [event.phase for event in events] == ["compile"]
    assert "another process" in events[0].message
