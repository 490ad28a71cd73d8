"""The prover: has one child prove artifacts, and turns its answers and its deaths into records and errors."""

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
    "start": "as it started",
    "open": "as it opened the artifact",
    "run": "as it ran the artifact",
    "eager": "as it ran the piece's ops one by one, which the artifact has no part in",
}
_STATIC = (
    "The likely cause is a host compiler that links libstdc++ statically: try CXX=/usr/bin/g++, and warm again with an "
    "empty TORCHINDUCTOR_CACHE_DIR."
)
_OUTSIDE = (
    "The code reads or writes outside of its tensors: a miscompiled kernel, or a custom op whose fake implementation "
    "gives other shapes or strides than its kernel. Compile without the op, or with adaptor 'eager'."
)
_ILLEGAL = (
    "The artifact holds instructions that this processor does not have: it, or a kernel in torch's caches, was built "
    "on or for another CPU. Warm again with an empty TORCHINDUCTOR_CACHE_DIR, on the kind of machine that serves."
)
_FULL = "The likely cause is a full disk or memory file system that the artifact lies on: free space."
_OTHERWISE = "Read the lines below; --no-proof stores artifacts without running them."
#: What likely ended the child, by the signal and by what it was at; "" is anything else.
_CAUSES = {
    ("SIGSEGV", "open"): _STATIC,
    ("SIGABRT", "open"): _STATIC,
    ("SIGSEGV", "run"): _OUTSIDE,
    ("SIGBUS", "open"): _FULL,
    ("SIGILL", ""): _ILLEGAL,
    ("SIGKILL", ""): "Free some, or warm with fewer jobs (--jobs).",
}


class ProofRequest(Record, frozen=True, kw_only=True):
    """An artifact to prove; its bytes go beside it."""

    adaptor: str
    graph: PieceGraph
    #: What the compiler relies on beyond the graph's facts.
    guards: tuple[str, ...]
    imports: tuple[Provider, ...]
    #: What a device without an index means; None is the current one.
    device_index: int | None
    #: What decides what torch's ops give here, and so at load.
    settings: Settings


class Stage(Record, frozen=True, kw_only=True):
    """What the child begins with now."""

    name: StageName


class ProofRecord(Record, frozen=True, kw_only=True):
    """What was tried, and how near the artifact came.

    Args:
        shapes: The sizes of the graph's symbols, once for each run.
        worst_error: The largest relative error of a tensor against the same piece in float64, as a root of mean
            squares; 0 where nothing is a float.
        secs: How long it took, in seconds.
        verdict: "right": it gave what the piece gives; "wrong": it gave something else; "unknown": the piece cannot be
            run; "later": nor could it here and now, for want of memory or of a module, say; "no room": nothing can be
            opened on this machine.
        reason: Why it is not right, as a sentence.
    """

    shapes: tuple[dict[str, int], ...] = ()
    worst_error: float = 0.0
    secs: Seconds = 0.0
    verdict: Literal["right", "wrong", "unknown", "later", "no room"] = "right"
    reason: str = ""

    @property
    def proved(self) -> bool:
        """Whether the artifact ran and gave what it should."""
        return self.verdict == "right"


class Prover(Children):
    """Proves artifacts in one child, which holds torch and cgtool's runtime.

    Several threads may ask; they are served one at a time.
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
        """Run an artifact on seeded inputs and compare it with the piece, for the smallest and the largest shape.

        Returns:
            What was proved; a record with a reason where the piece itself could not be run.

        Raises:
            ProofMismatchError: The artifact does not give what the piece gives.
            ProofCrashError: The child died, did not end in time, or cannot open anything on this machine.
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
    advice = _CAUSES.get((name, stage)) or _CAUSES.get((name, "")) or _OTHERWISE
    if ending.code is None:
        advice = f"Raise --compile-timeout if the machine is slow. {_OTHERWISE}"
    return ProofCrashError(
        f"The process that proves an artifact of adaptor '{adaptor}' {ending.how} {_WHERE[stage]}. "
        f"{advice}{format_log(ending.log)}",
        signal_name=ending.signal_name,
        actual=ending.code,
    )
