"""Tracing variants in parallel: in child processes, each of which builds the model itself and returns records.

The parent traces a variant itself if a child fails to, or if no child has started on it by the time it is needed. So
errors are raised in the parent, with their full context.
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
    """A variant to trace. Without the name of an example call, the child answers once it has built the model."""

    call: str | None = None
    fixed: dict[DimName, Count] = msgspec.field(default_factory=dict)
    splitting_ops: tuple[str, ...] | None = None
    adaptor: str = ""
    settings: Settings = Settings(torch={})


class TraceReport(Record, frozen=True, kw_only=True):
    """The result: one variant for each state of the model, with the seconds that the trace took, or why it failed."""

    traced: tuple[Traced, ...] = ()
    secs: Seconds = 0.0
    failure: str = ""


class Tracers:
    """Children that trace variants of one model in parallel with this process.

    The children's program builds the model and passes it to `serve_traces`. Leaving the `with` block ends all children.
    """

    def __init__(self, children: Children) -> None:
        self._children = children
        self._executor = ThreadPoolExecutor(children.limit, "cgtool-trace", initializer=self._wait_until_built)
        self._futures: dict[tuple[object, ...], Future[TraceReport]] = {}

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
        """Start tracing variants, in the order in which they will be taken; return immediately.

        `on_traced` is called with each child's result, from another thread.
        """
        try:
            settings = changed_settings()
        except StaysHereError as reason:
            _log.info("Tracing all variants in this process: %s.", reason)
            return
        for call, fixed in variants:
            request = TraceRequest(
                call=call.name,
                fixed=dict(fixed),
                splitting_ops=None if splitting_ops is None else tuple(splitting_ops),
                adaptor=adaptor,
                settings=settings,
            )
            # torch keeps settings in context variables: run the thread in a copy of this context
            run = contextvars.copy_context().run
            self._futures[call.name, *fixed.items()] = self._executor.submit(run, self._trace, request, on_traced)

    def take(self, call: ExampleCall, fixed: Mapping[str, int]) -> tuple[tuple[Traced, ...], float] | None:
        """Wait for a child's result; return its variants and the seconds that the trace took.

        Returns None if no child has started on it or the child failed; then this process must trace the variant.
        """
        future = self._futures.pop((call.name, *fixed.items()), None)
        if future is None or future.cancel():
            return None
        report = future.result()
        if not report.traced:
            _log.info("Tracing a variant in this process because a child failed to: %s", report.failure)
            return None
        return report.traced, report.secs

    def _wait_until_built(self) -> None:
        """Wait until a child has built the model; until then the parent may still take over every variant."""
        with contextlib.suppress(ChildEndedError, ClosedError, OSError):  # the next request reports it
            self._children.ask(TraceRequest(), answer=TraceReport, timeout_secs=None)

    def _trace(self, request: TraceRequest, on_traced: Callable[[tuple[Traced, ...]], None]) -> TraceReport:
        try:
            report: TraceReport = self._children.ask(request, answer=TraceReport, timeout_secs=None).record
        except (ChildEndedError, ClosedError, OSError, ValueError) as error:
            return TraceReport(failure=str(error))
        with contextlib.suppress(CgtoolError):  # raised again when the variant is taken
            on_traced(report.traced)
        return report


def serve_traces(channel: Channel, spec: ModelSpec) -> None:
    """Trace variants of a model until the parent hangs up; failures are reported in the answers."""
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
