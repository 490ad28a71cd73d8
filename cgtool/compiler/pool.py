"""The pool of compile workers: a piece in, its artifact out; and how many workers this machine bears.

Any thread may ask; `jobs` pieces are compiled at a time. Leaving the pool's `with` block ends all workers and their
compilers, whatever the reason; whoever waits for one gets a WorkerError.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from cgtool.compiler.request import CompileReport, CompileRequest, StaysHereError, WorkerSetup
from cgtool.errors import CompileError, WorkerError
from cgtool.processes import ChildEndedError, Children, Ending, log_words
from cgtool.store.records import Artifact

#: With less, nothing can be compiled.
_LEAST_FREE_BYTES = 65_536
#: What a worker takes at its peak: torch and Inductor (about 0.5 GiB) and a C++ compile of generated code.
WORKER_BYTES = 2 * 1024**3

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")


class WorkerPool(Children):
    """Compile workers of this process, `jobs` of them, each in a process of its own.

    `native` workers will write C++ code for the CPU.

    Raises:
        WorkerError: There is no folder for temporary files.
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
        """Start workers now, up to `count` and `jobs` in all, so that they are ready when there is work.

        Raises:
            WorkerError: One could not be started.
        """
        with _os_errors_as_worker_errors():
            super().start(count)

    def compile(self, request: CompileRequest) -> tuple[bytes, Artifact, Mapping[str, str]]:
        """Have a piece compiled by a worker, and wait for it.

        Returns:
            The artifact's bytes, its record, and what the compiler wrote for people, by name.

        Raises:
            StaysHereError: It is not for a worker; it may be compiled in this process.
            CompileError: The compiler does not take the piece.
            WorkerError: The worker crashed, hung, was killed, or ran out of memory or disk.
        """
        try:
            with _os_errors_as_worker_errors():
                answer = self.ask(request, answer=CompileReport, timeout_secs=self._timeout_secs)
        except ChildEndedError as error:
            raise WorkerError(_sentence(error.ending, self._folder), actual=error.ending.code) from error
        report: CompileReport = answer.record
        if report.status == "refused":
            raise StaysHereError(report.reason)
        if report.status == "rejected":
            raise CompileError(report.reason, path=report.op)
        if report.artifact is None:
            raise WorkerError(f"{report.reason}.{log_words(answer.log)}")
        return answer.data, report.artifact, report.generated

    def close(self) -> None:
        """End all workers and their compilers."""
        super().close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _sentence(ending: Ending, folder: Path) -> str:
    """Return how a worker came to its end, and what can be done."""
    if ending.code is None:
        advice = "Give it more time (--compile-timeout), or look where it hung."
    elif ending.code == -signal.SIGKILL:
        advice = "Use fewer workers (--jobs), or a machine with more memory."
    elif _is_full(folder):
        advice = "The disk is full: free some space in the folder for temporary files (TMPDIR) and warm again."
    else:
        advice = "--jobs 0 compiles in this process."
    return f"its worker {ending.how}. {advice}{log_words(ending.log)}"


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
            f"compile workers cannot be started: {error}. Free some space in the folder for temporary files (TMPDIR), "
            "or compile in this process (--jobs 0).",
            path=error.filename,
            actual=str(error),
        ) from error


def num_cores() -> int:
    """Return how many cores this process may use: its affinity mask, bounded by the CPU quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroups():
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.strip().isdigit():
            cores = min(cores, max(1, round(int(quota) / int(period))))
    return max(1, cores)


def free_bytes() -> int | None:
    """Return how much memory is left to this process: the machine's, bounded by its control group's; None: unknown."""
    found = [int(line.split()[1]) * 1024 for line in _text(_MEMINFO).splitlines() if line.startswith("MemAvailable:")]
    for folder in _cgroups():
        limit, used = _text(folder / "memory.max").strip(), _text(folder / "memory.current").strip()
        if limit.isdigit() and used.isdigit():
            # the page cache counts as used and is given back when it is wanted
            cached = [
                line.split()[1] for line in _text(folder / "memory.stat").splitlines() if line[:14] == "inactive_file "
            ]
            found.append(max(0, int(limit) - int(used) + sum(map(int, cached))))
    return min(found, default=None)


def default_jobs() -> int:
    """Return how many workers to start where nobody says: one for each core, as the memory allows, at least 1."""
    free = free_bytes()
    room = num_cores() if free is None else free // WORKER_BYTES
    return max(1, min(num_cores(), room))


def early_jobs(jobs: int) -> int:
    """Return how many of `jobs` workers to start before it is known what there is to compile.

    A core is left to the process that traces meanwhile; a decoder has three different pieces in each of its variants,
    of which dynamic batches and lengths make four.
    """
    return max(1, min(jobs, num_cores() - 1, 12))


def _cgroups() -> Iterator[Path]:
    """Yield the folders of this process's control group (version 2) and of those above it."""
    own = next((line[3:] for line in _text(_OWN_CGROUP).splitlines() if line.startswith("0::")), "/")
    folder = _CGROUP / own.strip().lstrip("/")
    for found in (folder, *folder.parents):
        if found == _CGROUP or _CGROUP in found.parents:
            yield found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
