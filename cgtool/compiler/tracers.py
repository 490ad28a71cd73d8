"""Tracing variants beside each other: in children that build the model for themselves, and send back records.

What a child cannot trace, and what none has begun with when its turn comes, is traced by the process that asked: an
error is raised there, with all that belongs to it.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import msgspec

from cgtool.child import Channel
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


class Tracers:
    """The variants of one model that children trace, beside this process.

    Their program builds the model, and gives it to `serve_traces`. Leaving the `with` block ends them all.
    """

    def __init__(self, children: Children) -> None:
        self._children = children
        self._executor = ThreadPoolExecutor(children.limit, "cgtool-trace", initializer=self._wait_until_built)
        self._begun: dict[tuple[object, ...], Future[TraceReport]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._children.close()

    def begin(
        self,
        variants: Iterable[tuple[ExampleCall, Mapping[str, int]]],
        *,
        splitting_ops: Sequence[str] | None,
        adaptor: str,
        on_traced: Callable[[tuple[Traced, ...]], None] = lambda _: None,
    ) -> None:
        """Have variants traced in the order in which they will be asked for; return at once.

        A thread of its own calls `on_traced` with what a child has traced, as soon as it has.
        """
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
            # settings of torch belong to a thread's context: the thread sees those of this one
            run = contextvars.copy_context().run
            self._begun[call.name, *fixed.items()] = self._executor.submit(run, self._traced, request, on_traced)

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

    def _wait_until_built(self) -> None:
        """Let a child build the model: a variant is begun with once it can be, and is this process's until then."""
        with contextlib.suppress(ChildEndedError, ClosedError, OSError):  # the next request says it again
            self._children.ask(TraceRequest(), answer=TraceReport, timeout_secs=None)

    def _traced(self, request: TraceRequest, on_traced: Callable[[tuple[Traced, ...]], None]) -> TraceReport:
        try:
            report: TraceReport = self._children.ask(request, answer=TraceReport, timeout_secs=None).record
        except (ChildEndedError, ClosedError, OSError, ValueError) as error:
            return TraceReport(failure=str(error))
        with contextlib.suppress(CgtoolError):  # raised again where the variant is taken
            on_traced(report.traced)
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
