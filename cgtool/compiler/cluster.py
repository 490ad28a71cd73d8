"""A cluster to compile on: units go to the workers of an executor, and come back proved, or with the reason.

What is sent is a `CompileRequest` with this process's factors; what comes back is an artifact and what its proof found.
A worker whose cgtool, torch, compiler or target differs refuses the unit, which goes to another one; so does a unit
whose worker died. A unit that two workers died of fails, and so does one that no worker fits. Where the executor itself
is gone, all of it ends.
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

#: How often a unit is submitted to an executor that cannot be told whom to avoid, until it is given up.
_MOST_BLIND_TRIES = 4
#: How often who waits for a unit looks whether there are workers, and how long there may be none, in seconds.
_LOOK_SECS = 5.0
_PATIENCE_SECS = 300.0
#: How much is shown of what an engine says of a worker's death.
_REASON_CHARS = 200


class Cluster:
    """The workers of an executor, as `WorkerPool` is those of this machine; any thread may ask.

    A unit's time counts once a worker has it.

    Attributes:
        jobs: How many units the executor is given at a time; it knows how many of them it can run.
        made_by: Artifact digest → the worker that made it.

    Raises:
        ConfigError: There is no such executor, or its library is not installed.
        ExecutorError: It does not answer.
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
        # a proof has a time of its own
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
        """Cancel what is queued, and let go of the executor."""
        self._engine.close()
        end_children()  # of an executor whose workers are threads of this process

    def start(self, count: int = 1) -> None:  # noqa: ARG002  as many as the executor has
        """Have the workers import what compiles now, so that they are ready when there is work."""
        if not self._has_started:
            self._has_started = True
            with contextlib.suppress(*self._engine.lost):  # which the first unit tells
                self._engine.call_everywhere(prepare, self._handed.inductor)

    @property
    def progress(self) -> str:
        """Say how many artifacts each worker has made: "; tcp://10.0.0.2:40001 made 3"."""
        made = Counter(list(self.made_by.values()))
        return "".join(f"; {worker} made {count}" for worker, count in sorted(made.items()))

    def compile(self, request: CompileRequest) -> tuple[bytes, Artifact, Mapping[str, str]]:
        """Have a piece compiled and proved by a worker, and wait for it.

        Returns:
            The artifact's bytes, its record with what a proof found, and what the compiler wrote for people, by name.

        Raises:
            CompileError: The compiler does not take the piece.
            ProofMismatchError: What it made is not what the piece gives.
            WorkerError: No worker fits, or two died of it.
            ExecutorError: There is no executor any more, or it has had no workers for a while.
        """
        given = replace(request, factors=self._own_factors(), prove=self._prove)
        handed = message(self._handed, encode(given))
        refused: list[tuple[str, str]] = []
        died: list[tuple[str, str]] = []
        blind = 0
        while len(died) < MOST_DEATHS and blind < _MOST_BLIND_TRIES:
            try:
                returned, data = self._returned(handed, refused, died)
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
            raise WorkerError(f"workers failed with it twice, so no other is asked.{_listed(died)}")
        given_up = f" It was given to who was free {blind} times: this executor cannot be told whom to avoid."
        raise WorkerError(
            f"no worker of {self._url} takes it. A worker needs the cgtool, torch, compiler, instruction set and GPU "
            f"of this machine.{given_up if blind else ''}{_listed([*refused, *died])}"
        )

    def _returned(
        self, handed: bytes, refused: Iterable[tuple[str, str]], died: Iterable[tuple[str, str]]
    ) -> tuple[Returned, bytes]:
        """Return what a worker returned for a unit that others refused, or died of; an error where all did."""
        unfit = frozenset(worker for worker, _ in refused)
        dead = frozenset(worker for worker, _ in died)

        def submit() -> Future[bytes]:
            with contextlib.suppress(NoWorkerError):
                return self._engine.submit(unfit | dead, compile_unit, handed)
            return self._engine.submit(unfit, compile_unit, handed)  # rather once more where one died than nowhere

        try:
            return read_message(self._waited(submit), Returned)
        except (NoWorkerError, WorkersDiedError, ExecutorError):
            raise
        except self._engine.died as error:
            raise WorkersDiedError(("a worker",), " ".join(str(error).split())[:_REASON_CHARS]) from error
        except self._engine.lost as error:
            raise ExecutorError(
                f"The executor {self._url} is gone ({str(error) or type(error).__name__}). What was finished is "
                "stored, and the same command goes on from there.",
                path="executor",
                actual=str(error),
            ) from error
        except Exception as error:  # noqa: BLE001  whatever it was, it happened over there
            return Returned(worker="", status="refused", reason=f"{type(error).__name__}: {error}"), b""

    def _waited(self, submit: Callable[[], Future[bytes]]) -> bytes:
        """Return a future's result, unless there are no workers for too long."""
        future = submit()
        alone_since = None
        while True:
            try:
                return future.result(min(_LOOK_SECS, self._patience_secs))
            except TimeoutError:
                if future.done():  # it is the call's own
                    raise
            if self._engine.has_workers(future):
                alone_since, self._is_waiting = None, False
            elif self._engine.has_workers():  # those that it may go to are gone, and others came
                self._engine.cancel(future)
                future = submit()
            else:
                alone_since = alone_since or time.monotonic()
                self._tell_waiting()
                if time.monotonic() - alone_since > self._patience_secs:
                    raise ExecutorError(
                        f"The executor {self._url} has had no workers for {self._patience_secs:g} s. Start some, and "
                        "give the command again: what was finished is stored.",
                        path="executor",
                    )

    def _tell_waiting(self) -> None:
        """Say once for all units that wait that there are no workers."""
        with self._lock:
            if not self._is_waiting:
                self._is_waiting = True
                words = f"waiting for workers: {self._url} has none (for {self._patience_secs:g} s at most)"
                self._on_event(Event(phase="compile", message=words))

    def _own_factors(self) -> dict[str, Json]:
        with self._lock:
            if self._factors is None:
                self._factors = factors_here()
            return self._factors


def _checked(request: CompileRequest, returned: Returned, data: bytes) -> CompileReport:
    """Return what a worker reports; it has an artifact where that is done, and is what the worker says it is."""
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
            return CompileReport(status="refused", reason="it sent back another artifact than it proved")
        origin, _ = split_origin(data, artifact.kind)
    except (ValueError, ArtifactError) as error:
        return CompileReport(status="refused", reason=f"what it sent back cannot be read ({error})")
    if artifact.kind != kind_of(request.adaptor) or (origin.piece, origin.shape) != place:
        return CompileReport(status="refused", reason="it sent back the artifact of another piece, shape or compiler")
    return report


def _listed(reasons: Iterable[tuple[str, str]]) -> str:
    return "".join(
        f"\n    {worker}{f' ({count} times)' if count > 1 else ''}: {reason}"
        for (worker, reason), count in Counter(reasons).items()
    )
