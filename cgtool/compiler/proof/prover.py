"""The prover: proves artifacts in a child process, and turns its answers and crashes into records and errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from cgtool.compiler.request import Provider, Settings, torch_settings
from cgtool.errors import ProofCrashError, ProofMismatchError
from cgtool.plan.grammar import Record, Seconds
from cgtool.plan.pieces import PieceGraph
from cgtool.processes import ChildEndedError, Children, Ending, format_log

StageName = Literal["open", "eager", "run"]

_WHERE = {
    "start": "at start",
    "open": "while it opened the artifact",
    "run": "while it ran the artifact",
    "eager": "while it ran the piece op by op, which does not involve the artifact",
}
_STATIC = (
    "The likely cause is a host compiler that links libstdc++ statically: try CXX=/usr/bin/g++, and warm again with an "
    "empty TORCHINDUCTOR_CACHE_DIR."
)
_OUTSIDE = (
    "The code reads or writes outside its tensors: a kernel was miscompiled, or the fake implementation of a custom op "
    "returns other shapes or strides than its kernel. Compile without the op, or with adaptor 'eager'."
)
_ILLEGAL = (
    "The artifact has instructions that this processor does not support: it, or a kernel in torch's caches, was built "
    "on or for another CPU. Warm again with an empty TORCHINDUCTOR_CACHE_DIR, on the kind of machine that serves."
)
_FULL = "The likely cause is that the artifact's disk or memory file system is full: free space."
_DEFAULT = "See the log below; --no-proof stores artifacts without running them."
#: (signal, stage) → the likely cause; the stage "" matches any other.
_CAUSES = {
    ("SIGSEGV", "open"): _STATIC,
    ("SIGABRT", "open"): _STATIC,
    ("SIGSEGV", "run"): _OUTSIDE,
    ("SIGBUS", "open"): _FULL,
    ("SIGILL", ""): _ILLEGAL,
    ("SIGKILL", ""): "Free memory, or warm with fewer jobs (--jobs).",
}


class ProofRequest(Record, frozen=True, kw_only=True):
    """An artifact to prove; its bytes are sent beside it."""

    adaptor: str
    graph: PieceGraph
    #: The facts that the compiler relies on beyond the graph's facts.
    guards: tuple[str, ...]
    imports: tuple[Provider, ...]
    #: The index of devices that have none in the graph; None is the current device.
    device_index: int | None
    #: The settings of torch in this process.
    settings: Settings


class Stage(Record, frozen=True, kw_only=True):
    """The stage that the child begins."""

    name: StageName


class ProofRecord(Record, frozen=True, kw_only=True):
    """The result of a proof.

    Args:
        shapes: The sizes of the graph's symbols in each run.
        worst_error: The largest relative error (root mean square) of any tensor against the same piece in float64; 0
            if nothing is a float.
        secs: How long the proof took, in seconds.
        verdict: "right": the artifact computes what the piece computes; "wrong": it does not; "unknown": the piece
            itself cannot be run; "later": it could not be run this time, for lack of memory or of a module, say; "no
            room": no artifact can be opened on this machine.
        reason: Why the verdict is not "right", as a sentence.
    """

    shapes: tuple[dict[str, int], ...] = ()
    worst_error: float = 0.0
    secs: Seconds = 0.0
    verdict: Literal["right", "wrong", "unknown", "later", "no room"] = "right"
    reason: str = ""

    @property
    def proved(self) -> bool:
        """Whether the artifact ran and computed the right result."""
        return self.verdict == "right"


class Prover(Children):
    """Proves artifacts in one child process, which imports torch and cgtool's runtime.

    Any thread may call it; the child serves one request at a time.

    Args:
        timeout_secs: The time limit of one proof; None is no limit.
        device_index: The index of devices that have none in a graph; None is the current device.
    """

    def __init__(self, *, timeout_secs: float | None, device_index: int | None = None) -> None:
        super().__init__("cgtool.compiler.proof.prove:main", limit=1)
        self._timeout_secs = timeout_secs
        self._device_index = device_index

    def prove(
        self,
        data: bytes,
        *,
        adaptor: str,
        graph: PieceGraph,
        guards: tuple[str, ...] = (),
        imports: Iterable[Provider] = (),
    ) -> ProofRecord:
        """Run an artifact on seeded inputs and compare it with the piece, at the smallest and the largest sizes.

        Returns:
            The result; it has a reason if the piece itself could not be run.

        Raises:
            ProofMismatchError: The artifact does not compute what the piece computes.
            ProofCrashError: The child died, timed out, or can open no artifact on this machine.
            ClosedError: The prover was closed.
        """
        request = ProofRequest(
            adaptor=adaptor,
            graph=graph,
            guards=guards,
            imports=tuple(imports),
            device_index=self._device_index,
            settings=Settings(torch=torch_settings()),
        )
        stages: list[Stage] = []
        try:
            answer = self.ask(
                request, data, answer=ProofRecord, note=Stage, on_note=stages.append, timeout_secs=self._timeout_secs
            )
        except ChildEndedError as error:
            raise _crash(error.ending, stages[-1].name if stages else "start", adaptor) from None
        found: ProofRecord = answer.record
        if found.verdict == "wrong":
            raise ProofMismatchError(found.reason, expected=graph.identity(), actual=adaptor)
        if found.verdict == "no room":
            raise ProofCrashError(f"An artifact could not be proved. {found.reason}")
        return found


def _crash(ending: Ending, stage: str, adaptor: str) -> ProofCrashError:
    name = ending.signal_name or ""
    advice = _CAUSES.get((name, stage)) or _CAUSES.get((name, "")) or _DEFAULT
    if ending.code is None:
        advice = f"Raise --compile-timeout if the machine is slow. {_DEFAULT}"
    return ProofCrashError(
        f"The process that proves an artifact of adaptor '{adaptor}' {ending.how} {_WHERE[stage]}. "
        f"{advice}{format_log(ending.log)}",
        signal_name=ending.signal_name,
        actual=ending.code,
    )
