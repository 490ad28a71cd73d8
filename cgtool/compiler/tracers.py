"""Tracing variants beside each other: in children that build the model for themselves, and send back records.

What a child cannot trace, and what none has begun with when its turn comes, is traced by the process that asked: an
error is raised there, with all that belongs to it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from cgtool.child import Channel
from cgtool.compiler.pool import default_jobs
from cgtool.compiler.request import Settings, StaysHereError, apply_settings, changed_settings
from cgtool.compiler.traced import Traced, VariantTracer
from cgtool.errors import CgtoolError
from cgtool.model import ExampleCall, ModelSpec
from cgtool.plan.grammar import Count, DimName, Record, Seconds
from cgtool.processes import ChildEndedError, Children, ClosedError

_log = logging.getLogger(__name__)


class TraceRequest(Record, frozen=True, kw_only=True):
    """A variant to trace, and how; without the name of its example call, the answer says that the model is built."""

    call: str | None = None
    fixed: dict[DimName, Count] = msgspec.field(default_factory=dict)
    splitting_ops: tuple[str, ...] | None = None
    adaptor: str = ""
    settings: Settings = Settings(torch={})


class TraceReport(Record, frozen=True, kw_only=True):
    """What came of it: the variants, one for each state of the model, and the seconds that it took, or why not."""

    traced: tuple[Traced, ...] = ()
    secs: Seconds = 0.0
    failure: str = ""


class Tracers(Children):
    """Children that trace variants of one model, beside this process.

    Their program builds the model from the setup, and gives it to `serve_traces`. A core is left to this process, and
    one to the workers that get ready meanwhile: of two cores, children would take as much as they give.
    """

    def __init__(self, program: str, *, setup: Record, jobs: int | None) -> None:
        self._count = (default_jobs() if jobs is None else jobs) - 2
        super().__init__(program, limit=max(1, self._count), setup=setup)
        self._executor = ThreadPoolExecutor(max(1, self._count), "cgtool-trace", initializer=self._wait_until_built)
        self._begun: dict[tuple[object, ...], Future[TraceReport]] = {}

    def begin(
        self,
        variants: Iterable[tuple[ExampleCall, Mapping[str, int]]],
        *,
        splitting_ops: Sequence[str] | None,
        adaptor: str,
    ) -> None:
        """Have variants traced in the order in which they will be asked for; return at once."""
        if self._count < 1:
            return
        try:
            settings = changed_settings()
        except StaysHereError as reason:
            _log.info("All variants are traced in this process: %s.", reason)
            return
        for call, fixed in variants:
            request = TraceRequest(
                call=call.name,
                fixed=dict(fixed),
                splitting_ops=None if splitting_ops is None else tuple(splitting_ops),
                adaptor=adaptor,
                settings=settings,
            )
            self._begun[call.name, *fixed.items()] = self._executor.submit(self._traced, request)

    def take(self, call: ExampleCall, fixed: Mapping[str, int]) -> tuple[tuple[Traced, ...], float] | None:
        """Wait for what a child has begun with; return its variants and the seconds that they took.

        None means that this process is to trace it.
        """
        future = self._begun.pop((call.name, *fixed.items()), None)
        if future is None or future.cancel():
            return None
        report = future.result()
        if not report.traced:
            _log.info("A variant is traced in this process, because a child did not: %s", report.failure)
            return None
        return report.traced, report.secs

    def close(self) -> None:
        """End all children; nothing more is traced."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        super().close()

    def _wait_until_built(self) -> None:
        """Let a child build the model: a variant is begun with once it can be, and is this process's until then."""
        with contextlib.suppress(ChildEndedError, ClosedError, OSError):  # the next request says it again
            self.ask(TraceRequest(), answer=TraceReport, timeout_secs=None)

    def _traced(self, request: TraceRequest) -> TraceReport:
        try:
            report: TraceReport = self.ask(request, answer=TraceReport, timeout_secs=None).record
        except (ChildEndedError, ClosedError, OSError, ValueError) as error:
            return TraceReport(failure=str(error))
        return report


def serve_traces(channel: Channel, spec: ModelSpec) -> None:
    """Trace variants of a model until the parent lets go; whatever goes wrong is in the answer."""
    tracer: VariantTracer | None = None
    calls = {call.name: call for call in spec.calls}
    for request, _ in channel.requests(TraceRequest):
        if request.call is None:
            channel.answer(TraceReport())
            continue
        apply_settings(request.settings)
        tracer = tracer or VariantTracer(spec, request.splitting_ops, request.adaptor)
        begun = time.perf_counter()
        try:
            lives = tracer.trace(calls[request.call], request.fixed)
        except CgtoolError as error:
            channel.answer(TraceReport(failure=str(error)))
        else:
            channel.answer(TraceReport(traced=tuple(live.record for live in lives), secs=time.perf_counter() - begun))
