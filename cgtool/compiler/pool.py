"""A pool of local compile workers.

Any thread may submit a piece; up to `jobs` pieces compile at a time. Leaving the pool's `with` block, for whatever
reason, ends all workers and the compilers that they started; threads that wait for a worker get a WorkerError.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from cgtool.compiler.request import CompileReport, CompileRequest, StaysHereError, WorkerSetup
from cgtool.errors import CompileError, WorkerError
from cgtool.machine import num_cores
from cgtool.processes import ChildEndedError, Children, Ending, format_log
from cgtool.store.records import Artifact

#: A disk with less free space than this counts as full.
_LEAST_FREE_BYTES = 65_536


class WorkerPool(Children):
    """Compile workers of this machine, each a separate process.

    Args:
        jobs: The number of workers.
        timeout_secs: The time limit of one piece; None is no limit.
        inductor: Whether workers import Inductor when they start.
        native: Whether workers will compile C++ code for the CPU.

    Raises:
        WorkerError: No temporary folder can be created.
    """

    def __init__(
        self, *, jobs: int, timeout_secs: float | None = None, inductor: bool = True, native: bool = True
    ) -> None:
        self.jobs = jobs
        self._timeout_secs = timeout_secs
        with _os_errors_as_worker_errors():
            self._folder = Path(tempfile.mkdtemp(prefix="cgtool-work-"))
        threads = max(1, num_cores() // max(1, jobs))
        setup = WorkerSetup(threads=threads, inductor=inductor, native=native, shared=str(self._folder))
        super().__init__("cgtool.compiler.worker:main", limit=max(1, jobs), setup=setup)

    def start(self, count: int = 1) -> None:
        """Start workers ahead of the work, up to `count` and at most `jobs` in total.

        Raises:
            WorkerError: A worker cannot be started.
        """
        with _os_errors_as_worker_errors():
            super().start(count)

    def compile(self, request: CompileRequest) -> tuple[bytes, Artifact, Mapping[str, str]]:
        """Compile a piece in a worker, and wait for the result.

        Returns:
            The artifact's bytes, its record, and the generated code, by file name.

        Raises:
            StaysHereError: Workers cannot compile this piece, but this process may.
            CompileError: The compiler rejects the piece.
            WorkerError: The worker crashed, hung, was killed, or ran out of memory or disk space.
        """
        try:
            with _os_errors_as_worker_errors():
                answer = self.ask(request, answer=CompileReport, timeout_secs=self._timeout_secs)
        except ChildEndedError as error:
            raise WorkerError(_describe(error.ending, self._folder), actual=error.ending.code) from error
        report: CompileReport = answer.record
        if report.status == "refused":
            raise StaysHereError(report.reason)
        if report.status == "rejected":
            raise CompileError(report.reason, path=report.op)
        if report.artifact is None:
            raise WorkerError(f"{report.reason}.{format_log(answer.log)}")
        return answer.data, report.artifact, report.generated

    def close(self) -> None:
        """End all workers and their compilers."""
        super().close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _describe(ending: Ending, folder: Path) -> str:
    """Return how a worker ended and what the user can do about it."""
    if ending.code is None:
        advice = "Allow it more time (--compile-timeout), or find out where it hung."
    elif ending.code == -signal.SIGKILL:
        advice = "Use fewer workers (--jobs), or a machine with more memory."
    elif _is_full(folder):
        advice = "The disk is full: free space in the temporary folder (TMPDIR) and warm again."
    else:
        advice = "--jobs 0 compiles in this process."
    return f"its worker {ending.how}. {advice}{format_log(ending.log)}"


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < _LEAST_FREE_BYTES
    except OSError:
        return False


@contextlib.contextmanager
def _os_errors_as_worker_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WorkerError(
            f"compile workers cannot be started: {error}. Free space in the temporary folder (TMPDIR), or compile in "
            "this process (--jobs 0).",
            path=error.filename,
            actual=str(error),
        ) from error
