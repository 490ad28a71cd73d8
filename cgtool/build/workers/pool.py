"""The pool of compile workers: a unit in, what became of it out. Any thread may ask; `jobs` units run at a time.

A worker is started when it is needed, or before (`start`), serves until the pool is closed, and is replaced when it
died. Leaving the pool's `with` block ends all workers and their compilers, whatever the reason. Must not import torch:
it is imported by the workers, while this process does something else.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from cgtool.build.workers.endings import DISK_IS_FULL, log_tail
from cgtool.build.workers.handle import WorkerProcess
from cgtool.build.workers.limits import num_cores
from cgtool.build.workers.unit import ARTIFACT_FILE, LOG_FILE, StaysHereError, Unit, UnitReport, read_report
from cgtool.errors import CompileError, WorkerError

#: With less, not even a log is written.
_LEAST_FREE_BYTES = 65_536


class WorkerPool:
    """Compile workers of this process.

    Args:
        jobs: How many units are compiled at a time, each in a process of its own.
        timeout_secs: How long one unit may take; None is for ever.
        inductor: Whether workers import Inductor before their first unit.
        native: Whether workers will write C++ code for the CPU.
    """

    def __init__(
        self, *, jobs: int, timeout_secs: float | None = None, inductor: bool = True, native: bool = True
    ) -> None:
        self.jobs = jobs
        self._timeout_secs = timeout_secs
        self._threads = max(1, num_cores() // max(1, jobs))
        self._inductor = inductor
        self._native = native
        self._slots = threading.BoundedSemaphore(max(1, jobs))
        self._lock = threading.Lock()
        self._idle: list[WorkerProcess] = []
        self._all: set[WorkerProcess] = set()
        self._numbers = itertools.count()
        self._folder: Path | None = None
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, count: int) -> None:
        """Start workers now, up to `count` and `jobs` in all, so that they are ready when there is work.

        Raises:
            WorkerError: One could not be started.
        """
        with self._lock:
            while len(self._all) < min(count, self.jobs) and not self._is_closed:
                self._idle.append(self._new())

    def compile(self, unit: Unit, *, on_start: Callable[[], None] = lambda: None) -> tuple[UnitReport, bytes]:
        """Have a unit compiled by a worker, and wait for it.

        Args:
            unit: The unit.
            on_start: Called when a worker takes it.

        Returns:
            The worker's report, of status "done", and the artifact.

        Raises:
            StaysHereError: It is not for a worker; it may be compiled in this process.
            CompileError: The compiler does not take the piece.
            WorkerError: The worker crashed, hung, was killed, or ran out of memory or disk.
        """
        with self._slots:
            folder = self._unit_folder()
            worker = self._take()
            try:
                unit.write(folder)
                on_start()
                worker.do(folder, timeout_secs=self._timeout_secs)
                report = _checked(read_report(folder), unit, folder)
                artifact = (folder / ARTIFACT_FILE).read_bytes()
            except (WorkerError, OSError) as error:
                self._drop(worker)
                if _is_full(folder):
                    raise WorkerError(f"{DISK_IS_FULL}. {error}", path=folder) from error
                if isinstance(error, OSError):
                    raise _disk_error(error) from error
                raise
            except (CompileError, StaysHereError):  # an answer like another
                self._give_back(worker)
                raise
            except BaseException:  # an interrupt, say: the worker may still owe an answer, which the next would get
                self._drop(worker)
                raise
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            self._give_back(worker)
            return report, artifact

    def close(self) -> None:
        """End all workers and their compilers; whoever waits for one gets a WorkerError."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            running = list(self._all)
        for worker in running:
            worker.stop()
        for worker in running:
            worker.end()
        for worker in idle:
            worker.close()
        with self._lock:
            folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _take(self) -> WorkerProcess:
        with self._lock:
            self._refuse_if_closed()
            return self._idle.pop() if self._idle else self._new()

    def _give_back(self, worker: WorkerProcess) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(worker)
                return
        self._drop(worker)

    def _drop(self, worker: WorkerProcess) -> None:
        with self._lock:
            self._all.discard(worker)
        worker.close()

    def _new(self) -> WorkerProcess:
        """Start a worker; the lock is held."""
        log = self._base() / f"worker-{next(self._numbers)}.txt"
        worker = WorkerProcess(log, threads=self._threads, inductor=self._inductor, native=self._native)
        self._all.add(worker)
        return worker

    def _unit_folder(self) -> Path:
        with self._lock:
            self._refuse_if_closed()
            folder = self._base() / f"unit-{next(self._numbers)}"
            try:
                folder.mkdir()
            except OSError as error:
                raise _disk_error(error) from error
            return folder

    def _base(self) -> Path:
        if self._folder is None:
            try:
                self._folder = Path(tempfile.mkdtemp(prefix="cgtool-work-"))
            except OSError as error:
                raise _disk_error(error) from error
        return self._folder

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise WorkerError("the warm was ended before this piece was compiled. Warm again to go on.")


def _checked(report: UnitReport, unit: Unit, folder: Path) -> UnitReport:
    if report.status == "done" and report.key == unit.key:
        return report
    if report.status == "refused":
        raise StaysHereError(report.reason)
    if report.status == "rejected":
        raise CompileError(report.reason)
    tail = log_tail(folder / LOG_FILE)
    raise WorkerError(f"{report.reason}{'. Its log ends with:' + tail if tail else ''}")


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < _LEAST_FREE_BYTES
    except OSError:
        return False


def _disk_error(error: OSError) -> WorkerError:
    return WorkerError(
        f"its files could not be read or written: {error}. Free some space in the folder for temporary files (TMPDIR) "
        "and warm again",
        path=error.filename,
        actual=str(error),
    )
