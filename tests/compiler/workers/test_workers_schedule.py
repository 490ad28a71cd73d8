from __future__ import annotations

import tempfile
import threading
from types import SimpleNamespace

import pytest

from cgtool.compiler.schedule import Task, run_tasks
from cgtool.compiler.workers.pool import WorkerPool
from cgtool.errors import WorkerError

pytestmark = pytest.mark.torch


class Crashing:
    """A manager whose workers all crash."""

    has_workers = True

    def key(self, _graph, _origin, *, max_autotune):
        return str(max_autotune)

    def ensure(self, *_args, **_kwargs):
        raise WorkerError("its worker crashed")


def test_a_progress_that_cannot_be_told_ends_the_run_and_does_not_hang_it():
    item = SimpleNamespace(adaptor="aot_inductor", graph=None, origin=None, tuned=False, is_base=True, place=(0, 0))
    pool = SimpleNamespace(jobs=1, start=lambda _count: None)
    managers = SimpleNamespace(get=lambda _adaptor: Crashing())
    raised: list[BaseException] = []

    def tell(event):
        if "failed" in event.message:
            raise BrokenPipeError

    def run():
        try:
            run_tasks([Task(items=[item], label="piece 0")], objects=None, managers=managers, pool=pool, on_event=tell)
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
