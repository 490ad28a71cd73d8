from __future__ import annotations

import tempfile
import threading
from types import SimpleNamespace

import hostile_adaptors as hostile
import pytest

from cgtool.compiler.pool import WorkerPool
from cgtool.compiler.schedule import compile_work
from cgtool.errors import WorkerError

pytestmark = pytest.mark.torch


class Crashing:
    """A manager whose workers all crash."""

    def uses_workers(self, _adaptor):
        return True

    def key(self, _work):
        return ""

    def ensure(self, *_args, **_kwargs):
        raise WorkerError("its worker crashed")


def test_a_progress_that_cannot_be_told_ends_the_run_and_does_not_hang_it():
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


def test_a_pool_without_room_for_temporary_files_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(WorkerError, match="TMPDIR"):
        WorkerPool(jobs=1)
