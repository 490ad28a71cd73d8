"""Compilers that crash, hang, are killed or run out of space fail only their own unit; the others are stored."""

from __future__ import annotations

import ast
import tempfile
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import hostile_adaptors as hostile
import torch
from worker_harness import compile_all, is_alive, stored_units

from cgtool.compiler.pool import WorkerPool
from cgtool.compiler.schedule import compile_work
from cgtool.errors import UnitsFailedError, WorkerError
from cgtool.store.artifacts import split_origin

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("forked_children")]

#: Deed → substrings of its error.
WORDS = {
    hostile.segfault: ["crashed with SIGSEGV", "Segmentation fault", "hostile_adaptors.py"],
    hostile.be_killed: ["was killed (SIGKILL)", "memory", "--jobs"],
    hostile.eat_memory: ["memory ran out", "--jobs"],
    hostile.leave: ["ended with exit code 3", "the compiler says goodbye"],
    hostile.break_compiler: ["memory ran out", "Killed signal terminated program cc1plus"],
    hostile.hang: ["took longer than 4 s", "--compile-timeout", "compiling number"],
}


def test_units_that_kill_their_worker_fail_alone(cache_root):
    numbers = [hostile.number_of(deed) for deed in WORDS]
    good = [0, 50]
    with pytest.raises(UnitsFailedError) as caught:
        compile_all(hostile.work_of(*numbers, *good), cache_root, timeout_secs=4)
    reasons = dict(zip(WORDS, sorted(caught.value.reasons), strict=True))
    for deed, words in WORDS.items():
        assert all(word in reasons[deed] for word in words), reasons[deed]
    assert "6 of the artifacts could not be compiled" in str(caught.value)
    assert "piece 0 (general); piece 1 (general)" in str(caught.value)
    assert stored_units(cache_root) == len(good)
    child = int(reasons[hostile.hang].partition("child ")[2].split()[0])
    assert not is_alive(child)


def test_after_one_failure_the_next_run_reuses_the_rest(cache_root):
    with pytest.raises(UnitsFailedError, match=r"(?s)piece 1 \(general\): .*crashed with SIGSEGV.*ends with") as caught:
        compile_all(hostile.work_of(0, hostile.number_of(hostile.segfault)), cache_root)
    assert isinstance(caught.value.__cause__, WorkerError)
    assert (caught.value.exit_code, stored_units(cache_root)) == (1, 1)
    again = compile_all(hostile.work_of(0, 50), cache_root)
    assert (again.compiled, len(again.rows)) == (1, 2)


def test_a_worker_that_ignores_signals_is_ended(cache_root):
    started = time.monotonic()
    with pytest.raises(UnitsFailedError, match="took longer than 1 s"):
        compile_all(hostile.work_of(hostile.number_of(hostile.hang_deaf)), cache_root, timeout_secs=1)
    assert time.monotonic() - started < 60


def test_a_rejected_piece_runs_eagerly(cache_root):
    number = hostile.number_of(hostile.refuse)
    done = compile_all(hostile.work_of(0, number), cache_root)
    assert [(row.piece_index, row.adaptor) for row in done.rows] == [(0, "hostile"), (1, "eager")]
    (fallback,) = done.fallbacks
    assert (fallback.piece_index, fallback.adaptor, fallback.shape) == (1, "eager", {})
    assert fallback.reason == "hostile: The compiler does not take the piece"


@pytest.fixture
def temporary_files(small_disk, monkeypatch):
    """A small disk for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(small_disk))
    return small_disk


def test_a_full_disk_fails_the_unit_that_fills_it(fresh_children, temporary_files, cache_root):
    with pytest.raises(UnitsFailedError, match=r"piece 1 \(general\): the disk is full\. Free space"):
        compile_all(hostile.work_of(0, hostile.FILL, 50), cache_root, own=1)
    assert stored_units(cache_root) == 2
    assert list(temporary_files.iterdir()) == []


def test_workers_apply_the_settings_of_this_process(cache_root):
    import torch._inductor.config as inductor_config

    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        torch.set_default_dtype(torch.float64)
        with inductor_config.patch(epilogue_fusion=not inductor_config.epilogue_fusion):
            wanted = ["high", inductor_config.epilogue_fusion, "torch.float64"]
            (row,) = compile_all(hostile.work_of(hostile.TELL), cache_root, own=1).rows
    finally:
        torch.set_float32_matmul_precision(before)
        torch.set_default_dtype(torch.float32)
    (path,) = (cache_root / "entry").rglob(f"{row.artifact.digest}.*")
    _, code = split_origin(path.read_bytes(), row.artifact.kind)
    assert ast.literal_eval(code.decode()) == wanted


class Crashing:
    """A manager all of whose workers crash."""

    def uses_workers(self, _adaptor):
        return True

    def key(self, _work):
        return ""

    def ensure(self, *_args, **_kwargs):
        raise WorkerError("its worker crashed")


def test_an_error_in_on_event_ends_the_run():
    work = hostile.work_of(0, adaptor="aot_inductor")
    pool = SimpleNamespace(jobs=1, start=lambda _count: None)
    raised: list[BaseException] = []

    def tell(event):
        if "failed" in event.message:
            raise BrokenPipeError

    def run():
        try:
            compile_work(work, objects=None, manager=Crashing(), pool=pool, on_event=tell)
        except BrokenPipeError as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert len(raised) == 1


def test_a_pool_without_a_temporary_folder_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(WorkerError, match="TMPDIR"):
        WorkerPool(jobs=1)
