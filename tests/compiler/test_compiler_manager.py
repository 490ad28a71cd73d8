"""The manager compiles each unique piece once, stores nothing incomplete, and records proofs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import hostile_adaptors as hostile
import pytest
import torch
from msgspec.structs import replace
from piece_cases import CASES, tensor

from cgtool.compiler import manager as manager_module
from cgtool.compiler.adaptors.eager import EagerAdaptor
from cgtool.compiler.adaptors.interface import get_adaptor
from cgtool.compiler.manager import CompilerManager
from cgtool.compiler.proof import prove
from cgtool.compiler.proof.prover import ProofRecord
from cgtool.compiler.wanted import Work
from cgtool.config import CompilationConfig
from cgtool.errors import CompileError, NoRoomError
from cgtool.graph.specialise import restrict
from cgtool.runtime import aoti_package
from cgtool.store.artifacts import split_origin
from cgtool.store.entry import ObjectStore
from cgtool.store.layout import CacheLayout
from cgtool.store.records import Artifact
from cgtool.store.units import UnitStore

pytestmark = pytest.mark.torch

PIECE = replace(CASES["two inputs"].piece, results=(tensor("s0", 8),))
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


@pytest.fixture(autouse=True)
def adaptors(monkeypatch):
    monkeypatch.setattr(manager_module, "get_adaptor", get_adaptor)


def manager_of(root, adaptor=None, *, on_event=lambda _: None, **config):
    """Return a manager whose adaptor is `adaptor`, if given, and an entry's store of artifacts."""
    if adaptor is not None:
        manager_module.get_adaptor = lambda _name: adaptor
    manager = CompilerManager(CacheLayout(root=root), CompilationConfig(**config), on_event=on_event)
    return manager, ObjectStore(root / "entry")


def work_of(graph, adaptor="eager", *, shape=None, tuned=False):
    return Work(
        variant=0,
        piece_index=0,
        shape=shape or {},
        piece=graph.identity(),
        graph=graph,
        adaptor=adaptor,
        tuned=tuned,
        is_base=True,
    )


def files_of(root):
    """Return the files of a cache, without locks."""
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() and p.name != "lock")


def test_a_piece_is_compiled_once_and_reused(cache_root):
    adaptor = Counting()
    manager, objects = manager_of(cache_root, adaptor)
    first = manager.ensure(work_of(PIECE), objects=objects)
    again = manager.ensure(work_of(PIECE), objects=objects)
    other, elsewhere = manager_of(cache_root, adaptor)
    third = other.ensure(work_of(PIECE), objects=elsewhere)
    assert (first.reused, again.reused, third.reused) == (False, True, True)
    assert first.artifact.digest == again.artifact.digest == third.artifact.digest
    assert adaptor.count == 1
    _, code = split_origin(objects.get(first.artifact.digest, first.artifact.kind), first.artifact.kind)
    assert adaptor.load(code, PIECE)([torch.ones(2, 8), torch.ones(8, 8)])[0].shape == (2, 8)


def test_the_key_depends_on_piece_size_options_and_adaptor(cache_root):
    manager, _ = manager_of(cache_root)
    optioned, _ = manager_of(cache_root, inductor_compile_config={"epilogue_fusion": False})
    name = "inductor_standalone"
    keys = [
        manager.key(work_of(PIECE, name)),
        manager.key(work_of(OTHER, name)),
        manager.key(work_of(restrict(PIECE, {"s0": (8, 8)}), name)),
        manager.key(work_of(PIECE, name, shape={"n": (8, 8)})),
        manager.key(work_of(PIECE, name, tuned=True)),
        optioned.key(work_of(PIECE, name)),
        manager.key(work_of(PIECE, "eager")),
    ]
    assert len(set(keys)) == len(keys)
    assert manager_of(cache_root)[0].key(work_of(PIECE, name)) == keys[0]


def test_a_damaged_unit_is_compiled_again(cache_root):
    adaptor = Counting()
    manager, objects = manager_of(cache_root, adaptor)
    unit = manager.ensure(work_of(PIECE), objects=objects)
    for path in cache_root.rglob(f"{unit.artifact.digest}.{unit.artifact.kind}"):
        path.chmod(0o644)
        path.write_bytes(b"other bytes")
    fresh, objects = manager_of(cache_root, adaptor)
    assert not fresh.ensure(work_of(PIECE), objects=objects).reused
    assert adaptor.count == 2
    assert split_origin(objects.get(unit.artifact.digest, unit.artifact.kind), unit.artifact.kind)


@pytest.mark.parametrize("error", [CompileError("no"), KeyboardInterrupt(), SystemExit(143)])
def test_an_interrupted_compile_stores_nothing(cache_root, error):
    manager, objects = manager_of(cache_root, Counting(error=error))
    with pytest.raises(type(error)):
        manager.ensure(work_of(PIECE), objects=objects)
    assert files_of(cache_root) == []
    after, objects = manager_of(cache_root, Counting())
    assert not after.ensure(work_of(PIECE), objects=objects).reused


@pytest.fixture(scope="module")
def processes():
    """A context whose processes share one import of torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cgtool.compiler.manager"])
    return context


def _compile_both(root, log, barrier):
    manager, objects = manager_of(root, Counting(log, secs=0.2))
    barrier.wait()
    for piece in (PIECE, OTHER):
        manager.ensure(work_of(piece), objects=objects)


def test_four_processes_compile_each_piece_once(cache_root, tmp_path, processes):
    log, barrier = tmp_path / "log", processes.Barrier(4)
    workers = [processes.Process(target=_compile_both, args=(cache_root, log, barrier)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert sorted(log.read_text().split()) == sorted([PIECE.identity(), OTHER.identity()])


def _compile_slowly(root, log):
    manager, objects = manager_of(root, Counting(log, secs=60))
    manager.ensure(work_of(PIECE), objects=objects)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_compile_stores_nothing_and_holds_no_lock(cache_root, tmp_path, processes, number):
    log = tmp_path / "log"
    worker = processes.Process(target=_compile_slowly, args=(cache_root, log))
    worker.start()
    deadline = time.monotonic() + 180
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(worker.pid, number)
    worker.join(60)
    assert files_of(cache_root) == []
    manager, objects = manager_of(cache_root, Counting())
    assert not manager.ensure(work_of(PIECE), objects=objects).reused


def test_waiting_for_another_process_is_reported(cache_root):
    events = []
    units = UnitStore(CacheLayout(root=cache_root))

    def release(event):
        events.append(event)
        held.__exit__(None, None, None)

    manager, objects = manager_of(cache_root, Counting(), on_event=release)
    held = units.lock(manager.key(work_of(PIECE)))
    held.__enter__()
    manager.ensure(work_of(PIECE), objects=objects)
    assert [event.phase for event in events] == ["compile"]
    assert "another process" in events[0].message


def test_a_removed_unit_is_not_found(tmp_path):
    units = UnitStore(CacheLayout(root=tmp_path))
    key = "ab" * 32
    units.put(key, b"code", Artifact.of(b"code", kind="json", compile_secs=0.0, kernels=0))
    assert units.find(key) is not None
    units.remove(key)
    assert units.find(key) is None
    units.remove(key)  # twice is once


def test_no_room_to_open_packages_is_not_a_mismatch(tmp_path, monkeypatch):
    """Else a full disk would make pieces fall back to a slower compiler permanently."""

    def refuse(*_args, **_options):
        raise aoti_package._no_room(OSError(28, "No space left on device"))

    monkeypatch.setattr(prove, "open_package", refuse)
    with pytest.raises(NoRoomError, match="Set TMPDIR"):
        prove.open_artifact(b"", "aot_inductor", None, None)


class _FakeProver:
    """Returns the given records in order."""

    def __init__(self, *records):
        self.records = list(records)

    def start(self):
        pass

    def prove(self, data, **_):
        return self.records.pop(0)


@pytest.mark.parametrize("lasting", [False, True])
def test_only_lasting_proof_gaps_are_stored(tmp_path, lasting):
    reason = "not proved: there was not enough memory"
    prover = _FakeProver(ProofRecord(verdict="unknown" if lasting else "later", reason=reason), ProofRecord())
    manager = CompilerManager(CacheLayout(root=tmp_path), CompilationConfig(), prover=prover)
    first, again = (manager.ensure(*hostile.work_of(0), objects=ObjectStore(tmp_path / "entry")) for _ in range(2))
    assert (first.reused, again.reused) == (False, True)
    assert not first.artifact.proved
    if lasting:
        assert (first.artifact.proof_gap, first.unproved, again.artifact.proof_gap) == (reason, "", reason)
        assert len(prover.records) == 1, "it was tried again in vain"
    else:
        assert (first.artifact.proof_gap, first.unproved) == ("", reason)
        assert (again.artifact.proved, again.artifact.proof_gap, again.unproved) == (True, "", "")
