"""Compiling on a cluster: units are sent to the workers of an executor, which return proved artifacts.

The request is a `CompileRequest` with this process's factors; the answer is an artifact with the result of its proof. A
worker whose cgtool, torch, compiler or target differs refuses the unit, which then goes to another worker; so does a
unit whose worker died. A unit fails if two workers died of it, or if no worker accepts it. If the executor itself is
gone, the whole run ends.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Self

from msgspec.structs import replace

from cgtool.compiler.request import CompileReport, CompileRequest, factors_here
from cgtool.errors import ArtifactError, CompileError, ExecutorError, ProofMismatchError, WorkerError
from cgtool.events import Event, OnEvent, ignore
from cgtool.executors.engines import MOST_DEATHS, NoWorkerError, WorkersDiedError, open_engine
from cgtool.executors.worker import (
    Handed,
    Returned,
    cgtool_code,
    compile_unit,
    end_children,
    message,
    prepare,
    read_message,
)
from cgtool.plan.grammar import decode, encode, sha256_hex
from cgtool.plan.pieces import Json, kind_of
from cgtool.store.artifacts import split_origin
from cgtool.store.records import Artifact

_log = logging.getLogger(__name__)

#: How often a unit is submitted to an executor that cannot exclude workers.
_MAX_BLIND_TRIES = 4
#: How often a waiting thread checks for workers, and how long there may be none, in seconds.
_POLL_SECS = 5.0
_PATIENCE_SECS = 300.0
#: The length at which an engine's message about a dead worker is cut.
_REASON_CHARS = 200


class Cluster:
    """The workers of an executor, with the interface of `WorkerPool`; any thread may submit.

    A unit's time limit starts when a worker receives it.

    Attributes:
        jobs: How many units are submitted to the executor at a time; the executor decides how many run.
        made_by: Artifact digest → the worker that compiled it.

    Raises:
        ConfigError: There is no such executor, or its library is not installed.
        ExecutorError: The executor does not answer.
    """

    jobs = 128

    def __init__(
        self,
        url: str,
        *,
        timeout_secs: float | None,
        prove: bool,
        inductor: bool = True,
        patience_secs: float = _PATIENCE_SECS,
        on_event: OnEvent = ignore,
    ) -> None:
        self.made_by: dict[str, str] = {}
        self._url = url
        self._prove = prove
        self._patience_secs = patience_secs
        # the proof has the same limit again
        limit = timeout_secs if timeout_secs is None or not prove else 2 * timeout_secs
        self._handed = Handed(cgtool=dict(cgtool_code()), timeout_secs=limit, inductor=inductor)
        self._has_started = False
        self._lock = threading.Lock()
        self._factors: dict[str, Json] | None = None
        self._on_event = on_event
        self._is_waiting = False
        self._engine = open_engine(url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel queued units and disconnect from the executor."""
        self._engine.close()
        end_children()  # for executors whose workers are threads of this process

    def start(self, count: int = 1) -> None:  # noqa: ARG002  as many as the executor has
        """Have the workers import the compiler now, so that they are ready when there is work."""
        if not self._has_started:
            self._has_started = True
            with contextlib.suppress(*self._engine.lost):  # the first unit reports it
                self._engine.call_everywhere(prepare, self._handed.inductor)

    @property
    def progress(self) -> str:
        """How many artifacts each worker has compiled, as text: "; tcp://10.0.0.2:40001 made 3"."""
        made = Counter(list(self.made_by.values()))
        return "".join(f"; {worker} made {count}" for worker, count in sorted(made.items()))

    def compile(self, request: CompileRequest) -> tuple[bytes, Artifact, Mapping[str, str]]:
        """Compile and prove a piece on a worker, and wait for the result.

        Returns:
            The artifact's bytes, its record with the result of the proof, and the generated code, by file name.

        Raises:
            CompileError: The compiler rejects the piece.
            ProofMismatchError: The artifact does not compute what the piece computes.
            WorkerError: No worker accepts the piece, or two died of it.
            ExecutorError: The executor is gone, or has had no workers for too long.
        """
        request = replace(request, factors=self._local_factors(), prove=self._prove)
        handed = message(self._handed, encode(request))
        refused: list[tuple[str, str]] = []
        died: list[tuple[str, str]] = []
        blind = 0
        while len(died) < MOST_DEATHS and blind < _MAX_BLIND_TRIES:
            try:
                returned, data = self._submit(handed, refused, died)
            except NoWorkerError:
                break
            except WorkersDiedError as error:
                died += [(worker, error.reason) for worker in error.workers]
                continue
            report = _checked(request, returned, data)
            if report.status == "rejected":
                raise CompileError(report.reason, path=report.op)
            if report.status == "wrong":
                raise ProofMismatchError(report.reason)
            if report.artifact is not None:
                self.made_by[report.artifact.digest] = returned.worker
                return data, report.artifact, report.generated
            blind += not (self._engine.can_avoid and returned.worker)
            _log.info("%s did not compile a unit: %s", returned.worker or "A worker", report.reason)
            failed = died if report.status == "failed" else refused
            failed.append((returned.worker or "a worker", report.reason))
        if len(died) >= MOST_DEATHS:
            raise WorkerError(f"two attempts on workers failed, so it is not tried again.{_list_reasons(died)}")
        tries = f" It was submitted {blind} times: this executor cannot exclude workers." if blind else ""
        raise WorkerError(
            f"no worker of {self._url} accepts it. A worker needs the cgtool, torch, compiler, instruction set and GPU "
            f"of this machine.{tries}{_list_reasons([*refused, *died])}"
        )

    def _submit(
        self, handed: bytes, refused: Iterable[tuple[str, str]], died: Iterable[tuple[str, str]]
    ) -> tuple[Returned, bytes]:
        """Run a unit on a worker that has not refused it, preferably on none that is listed in `died`.

        Raises:
            NoWorkerError: Every worker refused the unit.
            WorkersDiedError: The worker died.
            ExecutorError: The executor is gone, or has had no workers for too long.
        """
        unfit = frozenset(worker for worker, _ in refused)
        dead = frozenset(worker for worker, _ in died)

        def submit() -> Future[bytes]:
            with contextlib.suppress(NoWorkerError):
                return self._engine.submit(unfit | dead, compile_unit, handed)
            return self._engine.submit(unfit, compile_unit, handed)  # a worker that died of it is better than none

        try:
            return read_message(self._wait(submit), Returned)
        except (NoWorkerError, WorkersDiedError, ExecutorError):
            raise
        except self._engine.died as error:
            raise WorkersDiedError(("a worker",), " ".join(str(error).split())[:_REASON_CHARS]) from error
        except self._engine.lost as error:
            raise ExecutorError(
                f"The executor {self._url} is gone ({str(error) or type(error).__name__}). Finished artifacts are "
                "stored; run the same command again to continue.",
                path="executor",
                actual=str(error),
            ) from error
        except Exception as error:  # noqa: BLE001  it was raised on the worker
            return Returned(worker="", status="refused", reason=f"{type(error).__name__}: {error}"), b""

    def _wait(self, submit: Callable[[], Future[bytes]]) -> bytes:
        """Return a future's result; raise an ExecutorError if there are no workers for too long."""
        future = submit()
        alone_since = None
        while True:
            try:
                return future.result(min(_POLL_SECS, self._patience_secs))
            except TimeoutError:
                if future.done():  # raised by the call itself
                    raise
            if self._engine.has_workers(future):
                alone_since, self._is_waiting = None, False
            elif self._engine.has_workers():  # the eligible workers left, and others joined
                self._engine.cancel(future)
                future = submit()
            else:
                alone_since = alone_since or time.monotonic()
                self._report_waiting()
                if time.monotonic() - alone_since > self._patience_secs:
                    raise ExecutorError(
                        f"The executor {self._url} has had no workers for {self._patience_secs:g} s. Start some and "
                        "run the same command again; finished artifacts are stored.",
                        path="executor",
                    )

    def _report_waiting(self) -> None:
        """Report once, for all waiting units, that there are no workers."""
        with self._lock:
            if not self._is_waiting:
                self._is_waiting = True
                text = f"waiting for workers: {self._url} has none (for at most {self._patience_secs:g} s)"
                self._on_event(Event(phase="compile", message=text))

    def _local_factors(self) -> dict[str, Json]:
        with self._lock:
            if self._factors is None:
                self._factors = factors_here()
            return self._factors


def _checked(request: CompileRequest, returned: Returned, data: bytes) -> CompileReport:
    """Return a worker's report after checking its artifact's digest, piece, shape and kind."""
    if returned.status == "died":
        return CompileReport(status="failed", reason=returned.reason)
    if returned.status == "refused":
        return CompileReport(status="refused", reason=returned.reason)
    place = request.origin.piece, request.origin.shape
    try:
        report = decode(bytes(returned.report), CompileReport)
        artifact = report.artifact
        if report.status != "done" or artifact is None:
            return replace(report, artifact=None)
        if (artifact.digest, artifact.size_bytes) != (sha256_hex(data), len(data)):
            return CompileReport(status="refused", reason="it returned a different artifact from the one it proved")
        origin, _ = split_origin(data, artifact.kind)
    except (ValueError, ArtifactError) as error:
        return CompileReport(status="refused", reason=f"its answer cannot be read ({error})")
    if artifact.kind != kind_of(request.adaptor) or (origin.piece, origin.shape) != place:
        return CompileReport(status="refused", reason="it returned the artifact of another piece, shape or compiler")
    return report


def _list_reasons(reasons: Iterable[tuple[str, str]]) -> str:
    return "".join(
        f"\n    {worker}{f' ({count} times)' if count > 1 else ''}: {reason}"
        for (worker, reason), count in Counter(reasons).items()
    )
