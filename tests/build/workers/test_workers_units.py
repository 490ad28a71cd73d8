"""Units as files: what a worker makes of them, what it refuses, and what never leaves this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import hostile_adaptors as hostile  # noqa: E402
from worker_harness import compile_all, stored_units  # noqa: E402

from cgtool.build.adaptors import get_adaptor  # noqa: E402
from cgtool.build.workers import limits  # noqa: E402
from cgtool.build.workers.modules import imports_for  # noqa: E402
from cgtool.build.workers.settings import changed_settings  # noqa: E402
from cgtool.build.workers.unit import StaysHereError, Unit, UnitReport, read_report, read_unit  # noqa: E402
from cgtool.cache.units import UnitStore  # noqa: E402
from cgtool.errors import CacheError, CgtoolError  # noqa: E402

pytestmark = pytest.mark.torch

IMPORT = {"module": "hostile_adaptors", "file": str(Path(hostile.__file__).resolve())}


def unit_of(number, **changes):
    fields = {
        "key": "ab" * 32,
        "graph": hostile.piece_of(number),
        "adaptor": hostile.NAME,
        "options": {},
        "max_autotune": False,
        "compiler": get_adaptor(hostile.NAME).compute_hash({}),
        "imports": (IMPORT,),
        "settings": changed_settings(),
    }
    return Unit(**{**fields, **changes})


def run_worker(*folders):
    command = [sys.executable, "-m", "cgtool.build.workers.worker", *map(str, folders)]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=folders[0].parent)


def test_a_unit_and_its_result_survive_their_files(tmp_path):
    unit = unit_of(7)
    unit.write(tmp_path)
    assert read_unit(tmp_path) == unit
    report = UnitReport(key=unit.key, status="done", kernels=2, compile_secs=1.5, guards=("s0 <= 9",))
    report.write(tmp_path)
    assert read_report(tmp_path) == report
    (tmp_path / "unit.json").write_text((tmp_path / "unit.json").read_text().replace('"schema":1', '"schema":9'))
    with pytest.raises(CgtoolError, match="schema 9 and this cgtool reads 1"):
        read_unit(tmp_path)


def test_folders_of_units_are_done_anywhere_and_those_of_another_compiler_are_refused(tmp_path):
    units = {
        "fine": unit_of(0),
        "refused": unit_of(0, compiler="0" * 64),
        "rejected": unit_of(hostile.number_of(hostile.refuse)),
        "unknown": unit_of(0, imports=({"module": "no_such_module", "file": None},)),
    }
    for name, unit in units.items():
        (tmp_path / name).mkdir()
        unit.write(tmp_path / name)
    done = run_worker(*(tmp_path / name for name in units))
    assert (done.returncode, done.stdout) == (1, "")
    reports = {name: read_report(tmp_path / name) for name in units}
    assert {name: report.status for name, report in reports.items()} == {
        "fine": "done",
        "refused": "refused",
        "rejected": "rejected",
        "unknown": "refused",
    }
    assert "the compiler, its settings or the target here are not those" in reports["refused"].reason
    assert "no_such_module" in reports["unknown"].reason
    here = get_adaptor(hostile.NAME).compile(units["fine"].graph, options={})
    assert (tmp_path / "fine" / "artifact").read_bytes() == here.artifact
    assert sorted(path.name for path in (tmp_path / "refused").iterdir()) == ["log.txt", "result.json", "unit.json"]
    assert "compiling number" in (tmp_path / "rejected" / "log.txt").read_text()


def another_hash(self, options, *, max_autotune=False):
    return "0" * 64


def test_what_workers_refuse_is_compiled_in_this_process(cache_root, tmp_path, monkeypatch):
    monkeypatch.setattr(hostile.Hostile, "compute_hash", another_hash)
    log = tmp_path / "log"
    done = compile_all(hostile.work_of(0, 50), cache_root, options={"log": str(log)})
    assert (len(done.rows), done.compiled, done.fallbacks) == (2, 2, ())
    assert {line.split()[0] for line in log.read_text().splitlines()} == {str(os.getpid())}
    assert stored_units(cache_root) == 2


def test_workers_compile_and_this_process_does_not(cache_root, tmp_path):
    log = tmp_path / "log"
    events = []
    compile_all(hostile.work_of(0, 50, 150), cache_root, options={"log": str(log)}, events=events)
    pids = [line.split()[0] for line in log.read_text().splitlines()]
    assert len(pids) == 3
    assert str(os.getpid()) not in pids
    over = [event for event in events if event.secs is not None]
    assert [(event.done, event.total) for event in over] == [(1, 3), (2, 3), (3, 3)]
    assert any("; " in event.message for event in events if event.secs is None), "two run at a time"


_LIBRARY = torch.library.Library("cgtool_workers", "FRAGMENT")
_LIBRARY.define("known(Tensor x) -> Tensor")
torch.library.register_fake("cgtool_workers::known", torch.empty_like, lib=_LIBRARY)


def test_the_module_that_registers_an_op_is_found_and_one_of_this_process_alone_stays_here(monkeypatch):
    eager = get_adaptor("eager")  # cgtool's own, which needs no import
    (found,) = imports_for(["cgtool_workers::known.default"], eager)
    assert found["module"] == __name__
    assert imports_for(["cgtool_workers::known"], get_adaptor(hostile.NAME))[-1]["module"] == "hostile_adaptors"
    with pytest.raises(StaysHereError, match="no module is known to register the op aten::no_such"):
        imports_for(["aten::no_such"], eager)
    monkeypatch.setattr(hostile.Hostile, "__module__", "__main__")
    with pytest.raises(StaysHereError, match="the module __main__ exists in this process only"):
        imports_for([], get_adaptor(hostile.NAME))


def test_a_setting_that_no_file_can_hold_keeps_units_here():
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
def test_as_many_workers_as_cores_and_memory_bear(tmp_path, monkeypatch, *, cores, free_gib, limit_gib, quota, jobs):
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


def _warm_both(root, log):
    code = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parent)]!r}\n"
        "import hostile_adaptors as hostile, worker_harness, pathlib\n"
        f"done = worker_harness.compile_all(hostile.work_of(0, 50, 150), pathlib.Path({str(root)!r}), "
        f"options={json.dumps({'log': str(log)})})\n"
        "print(done.compiled)\n"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_two_warms_at_once_compile_each_unit_once(cache_root, tmp_path):
    log = tmp_path / "log"
    both = [_warm_both(cache_root, log) for _ in range(2)]
    counts = [int(process.communicate(timeout=300)[0]) for process in both]
    assert sum(counts) == 3
    pieces = [line.split()[1] for line in log.read_text().splitlines()]
    assert len(pieces) == len(set(pieces)) == 3


def test_what_is_no_single_units_fault_ends_the_warm_at_once(cache_root, monkeypatch):
    monkeypatch.setattr(UnitStore, "put", full_disk)
    begun = time.monotonic()
    with pytest.raises(CacheError, match="no room"):
        compile_all(hostile.work_of(hostile.number_of(hostile.hang), 0), cache_root)
    assert time.monotonic() - begun < 60


def full_disk(self, key, data, record):
    raise CacheError("There is no room in the cache. Free some.")
