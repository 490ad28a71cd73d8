"""The prover: owns one child process, and turns its answers and its deaths into records and errors."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from cgtool.build.proof.child import Child, ChildGoneError
from cgtool.build.proof.record import ProofRecord
from cgtool.build.workers.settings import torch_settings
from cgtool.errors import ProofCrashError, ProofMismatchError, WorkerError
from cgtool.pieces import PieceGraph

_WHERE = {
    "start": "as it started",
    "open": "as it opened the artifact",
    "run": "as it ran the artifact",
    "eager": "as it ran the piece's ops one by one, which the artifact has no part in",
}
_STATIC = (
    "The likely cause is a host compiler that links libstdc++ statically: try CXX=/usr/bin/g++, and warm again with an "
    "empty TORCHINDUCTOR_CACHE_DIR."
)
_CAUSES = {
    ("SIGSEGV", "open"): _STATIC,
    ("SIGABRT", "open"): _STATIC,
    ("SIGSEGV", "run"): (
        "The code reads or writes outside of its tensors: a miscompiled kernel, or a custom op whose fake "
        "implementation gives other shapes or strides than its kernel. Compile without the op, or with adaptor 'eager'."
    ),
    ("SIGBUS", "open"): "The likely cause is a full disk or memory file system that the artifact lies on: free space.",
    ("SIGKILL", ""): "The likely cause is too little memory: free some, or warm with fewer jobs.",
}
_ILLEGAL = (
    "The artifact holds instructions that this processor does not have: it, or a kernel in torch's caches, was built "
    "on or for another CPU. Warm again with an empty TORCHINDUCTOR_CACHE_DIR, on the kind of machine that serves."
)
_OTHERWISE = "Read the lines below; --no-proof stores artifacts without running them."


class Prover:
    """Proves artifacts in one child process, which holds torch and cgtool's runtime, and starts it again when it died.

    Several threads may ask; they are served one at a time.

    Args:
        timeout_secs: How long one proof may take; None is no limit.
        device_index: The device that pieces run on, where they run on an accelerator; None is the current one.
    """

    def __init__(self, *, timeout_secs: float | None, device_index: int | None = None) -> None:
        self._timeout_secs = timeout_secs
        self._device_index = device_index
        self._child: Child | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the child without waiting for it, so that it is ready when something is compiled.

        Raises:
            WorkerError: The prover was closed.
        """
        if self._lock.acquire(blocking=False):  # else it is proving: it runs
            try:
                self._running()
            finally:
                self._lock.release()

    def close(self) -> None:
        """End the child for good; whoever waits for its answer is told that it is gone."""
        self._is_closed = True  # first: a thread that comes late must not start another one, which nobody would end
        child = self._child
        if child is not None:
            child.end()
        with self._lock:
            self._drop()

    def prove(
        self,
        data: bytes,
        *,
        adaptor: str,
        graph: PieceGraph,
        guards: tuple[str, ...] = (),
        imports: Iterable[Mapping[str, Any]] = (),
    ) -> ProofRecord:
        """Run an artifact on seeded inputs and compare it with the piece, for the smallest and the largest shape.

        Args:
            data: The artifact's bytes.
            adaptor: What compiled it.
            graph: The piece, at the shape that it was compiled for.
            guards: What the compiler relies on beyond the graph's facts.
            imports: The modules that provide custom ops; see `cgtool.build.imports`.

        Returns:
            What was proved; a record with a reason where the piece itself could not be run.

        Raises:
            ProofMismatchError: The artifact does not give what the piece gives.
            ProofCrashError: The child died, did not end in time, or cannot open anything on this machine.
        """
        request = {
            "adaptor": adaptor,
            "graph": graph.to_json(),
            "guards": list(guards),
            "imports": [dict(item) for item in imports],
            "device_index": self._device_index,
            # what decides what torch's ops give in this process, and so at load
            "settings": torch_settings(),
        }
        with self._lock:
            try:
                reply = self._running().ask(request, data, timeout_secs=self._timeout_secs)
            except ChildGoneError as error:
                self._drop()
                raise self._crash(error, adaptor) from None
            except BaseException:  # interrupted between a request and its answer: the next one must not get it
                self._drop()
                raise
            if reply.get("last"):
                self._drop()
        if "mismatch" in reply:
            raise ProofMismatchError(reply["mismatch"], expected=graph.identity(), actual=adaptor)
        if "no_room" in reply:
            raise ProofCrashError(f"An artifact could not be proved. {reply['no_room']}")
        return ProofRecord.from_json(reply["record"])

    def _running(self) -> Child:
        if self._is_closed:
            raise WorkerError("the warm was ended before this artifact was proved. Warm again to go on.")
        if self._child is not None and not self._child.is_alive:  # between two requests: no artifact's fault
            self._drop()
        if self._child is None:
            self._child = Child()
        return self._child

    def _drop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def _crash(self, error: ChildGoneError, adaptor: str) -> ProofCrashError:
        where = _WHERE.get(error.stage, f"at {error.stage}")
        name = error.signal_name
        if error.code is None:
            what = f"did not end within {self._timeout_secs or 0:g} s {where}, and was ended"
            advice = "Raise --compile-timeout if the machine is slow. " + _OTHERWISE
        else:
            how = name or f"exit code {error.code}"
            what = f"died of {how} {where}"
            cause = _CAUSES.get((name or "", error.stage)) or _CAUSES.get((name or "", ""))
            advice = _ILLEGAL if name == "SIGILL" else cause or _OTHERWISE
        lines = "".join(f"\n  {line}" for line in error.lines)
        return ProofCrashError(
            f"The process that proves an artifact of adaptor '{adaptor}' {what}. {advice}{lines}",
            signal_name=name,
            actual=error.code,
        )
