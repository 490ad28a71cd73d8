"""The units that a worker compiles, refuses and rejects, and those that stay in this process."""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

import hostile_adaptors as hostile
import torch
from worker_harness import compile_all, shared_pool, stored_units

from cgtool import machine as limits
from cgtool.compiler.adaptors.interface import get_adaptor
from cgtool.compiler.pool import WorkerPool
from cgtool.compiler.request import (
    CompileRequest,
    Provider,
    Settings,
    StaysHereError,
    apply_settings,
    changed_settings,
    imports_for,
    torch_settings,
)
from cgtool.compiler.worker import machine_fault
from cgtool.errors import CacheError, CompileError, WorkerError
from cgtool.store.artifacts import Origin, split_origin
from cgtool.store.records import Artifact
from cgtool.store.units import UnitStore

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("forked_children")]

IMPORT = Provider(module="hostile_adaptors", file=str(Path(hostile.__file__).resolve()))


def request_of(number, **changes):
    fields = {
        "graph": hostile.piece_of(number),
        "origin": Origin(piece=hostile.piece_of(number).identity(), shape={}),
        "adaptor": hostile.NAME,
        "options": {},
        "max_autotune": False,
        "compiler": get_adaptor(hostile.NAME).compute_hash({}),
        "imports": (IMPORT,),
        "settings": changed_settings(),
    }
    return CompileRequest(**{**fields, **changes})


def test_a_worker_compiles_refuses_and_rejects():
    pool = shared_pool()
    data, artifact, _ = pool.compile(request_of(0))
    with pytest.raises(StaysHereError, match="the compiler, its settings or the target differ"):
        pool.compile(request_of(0, compiler="0" * 64))
    with pytest.raises(StaysHereError, match="no_such_module"):
        pool.compile(request_of(0, imports=(Provider(module="no_such_module"),)))
    with pytest.raises(CompileError, match="does not take the piece"):
        pool.compile(request_of(hostile.number_of(hostile.refuse)))
    _, code = split_origin(data, artifact.kind)
    assert code == get_adaptor(hostile.NAME).compile(hostile.piece_of(0), options={}).artifact
    assert artifact == Artifact.of(data, kind=artifact.kind, compile_secs=artifact.compile_secs)


def test_a_file_size_limit_is_not_a_rejection_of_the_piece(fresh_children):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with WorkerPool(jobs=1, inductor=False) as pool, pytest.raises(WorkerError, match="ulimit -f"):
            pool.compile(request_of(hostile.FILL))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for words in ("OSError: [Errno 27] File too large", "ld terminated with signal 25 [File size limit exceeded]"):
        assert "ulimit -f" in machine_fault(CompileError(f"Inductor could not compile the piece: {words}"))


def another_hash(self, options, *, max_autotune=False):
    return "0" * 64


def test_a_refused_piece_is_compiled_in_this_process(cache_root, tmp_path, monkeypatch):
    monkeypatch.setattr(hostile.Hostile, "compute_hash", another_hash)
    log = tmp_path / "log"
    done = compile_all(hostile.work_of(0, 50), cache_root, options={"log": str(log)})
    assert (len(done.rows), done.compiled, done.fallbacks) == (2, 2, ())
    assert {line.split()[0] for line in log.read_text().splitlines()} == {str(os.getpid())}
    assert stored_units(cache_root) == 2


class Opening(list):
    """A list of events that opens the gate once an event lists two running units."""

    def __init__(self, gate):
        super().__init__()
        self.gate = gate

    def append(self, event):
        super().append(event)
        if event.secs is None and "; " in event.message:
            self.gate.touch()


def test_workers_compile_two_units_at_a_time(cache_root, tmp_path):
    log, gate = tmp_path / "log", tmp_path / "gate"
    events = Opening(gate)
    options = {"log": str(log), "gate": str(gate)}
    compile_all(hostile.work_of(hostile.WAIT, 0, 50), cache_root, options=options, events=events, timeout_secs=300)
    pids = [line.split()[0] for line in log.read_text().splitlines()]
    assert len(pids) == 3
    assert str(os.getpid()) not in pids
    over = [event for event in events if event.secs is not None]
    assert [(event.done, event.total) for event in over] == [(1, 3), (2, 3), (3, 3)]


_LIBRARY = torch.library.Library("cgtool_workers", "FRAGMENT")
_LIBRARY.define("known(Tensor x) -> Tensor")
torch.library.register_fake("cgtool_workers::known", torch.empty_like, lib=_LIBRARY)


def test_the_module_that_registers_an_op_is_found(monkeypatch):
    eager = get_adaptor("eager")  # cgtool's own, which needs no import
    (found,) = imports_for(["cgtool_workers::known.default"], eager)
    assert found.module == __name__
    assert imports_for(["cgtool_workers::known"], get_adaptor(hostile.NAME))[-1].module == "hostile_adaptors"
    with pytest.raises(StaysHereError, match="no module is known to register the op aten::no_such"):
        imports_for(["aten::no_such"], eager)
    monkeypatch.setattr(hostile.Hostile, "__module__", "__main__")
    with pytest.raises(StaysHereError, match="the module __main__ exists only in this process"):
        imports_for([], get_adaptor(hostile.NAME))


@pytest.mark.parametrize("backend", [torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul])
def test_the_precision_of_each_backend_can_be_applied(backend):
    before, was = torch_settings(), backend.fp32_precision
    backend.fp32_precision = "tf32"
    try:
        wanted = torch_settings()
        backend.fp32_precision = was
        apply_settings(Settings(torch=json.loads(json.dumps(wanted))))
        assert torch_settings() == wanted != before
    finally:
        backend.fp32_precision = was
        apply_settings(Settings(torch=before))
    assert torch_settings() == before


def test_a_setting_that_is_not_json_keeps_units_in_this_process():
    import torch._inductor.config as inductor_config

    with (
        inductor_config.patch(**{"cpp.simdlen": object()}),
        pytest.raises(StaysHereError, match=r"the setting torch\._inductor\.config\.cpp\.simdlen is"),
    ):
        changed_settings()
    changed_settings()


@pytest.mark.parametrize(
    ("cores", "free_gib", "limit_gib", "quota", "jobs"),
    [
        (16, 64, None, "max 100000", 16),
        (16, 9, None, "max 100000", 4),
        (16, 64, 7, "max 100000", 3),
        (16, 64, None, "350000 100000", 4),
        (16, 1, None, "max 100000", 1),
        (2, 64, None, "50000 100000", 1),
    ],
)
def test_default_jobs_depend_on_cores_and_memory(tmp_path, monkeypatch, *, cores, free_gib, limit_gib, quota, jobs):
    group = tmp_path / "cgroup" / "a" / "b"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text(quota)
    if limit_gib is not None:
        (group.parent / "memory.max").write_text(str((limit_gib + 1) << 30))
        (group.parent / "memory.current").write_text(str(2 << 30))
        (group.parent / "memory.stat").write_text(f"anon 5\ninactive_file {1 << 30}\n")
    (tmp_path / "own").write_text("0::/a/b\n")
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {free_gib << 20} kB\n")
    monkeypatch.setattr(limits, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(limits, "_OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(limits, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert limits.default_jobs() == jobs


def test_an_error_of_the_cache_ends_the_warm_at_once(cache_root, monkeypatch):
    monkeypatch.setattr(UnitStore, "put", full_disk)
    begun = time.monotonic()
    with pytest.raises(CacheError, match="no room"):
        compile_all(hostile.work_of(hostile.number_of(hostile.hang), 0), cache_root, own=2)
    assert time.monotonic() - begun < 60


def full_disk(self, key, data, record):
    raise CacheError("There is no room in the cache. Free some.")
