"""Traces a model in each state in which calls leave it, until calls lead to no new state.

A call may read values that the previous call left in attributes of the model: whether they exist, and their sizes. So
one trace serves the model as it is, the next one the model after a call, and so on. If the sizes of these values
matter, the states after calls of other sizes are traced too.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from cgtool.errors import CgtoolError
from cgtool.guards.signature import CallSignature
from cgtool.guards.sources import Roots
from cgtool.plan.pieces import Json
from cgtool.trace.capture import Trace, check_at_once, trace_once
from cgtool.trace.kept import State, guards_of_states
from cgtool.trace.refusals import refuse_side_effects
from cgtool.trace.writes import settled_guards

#: The most calls in a row that may lead to new states, and the most states in which one variant is traced.
_MOST_CALLS, _MOST_STATES = 8, 32


def capture(
    module: torch.nn.Module,
    method: Callable[..., Any],
    signature: CallSignature,
    arguments: Mapping[str, Any],
    marked: list[tuple[torch.Tensor, int, str]],
    *,
    left_by_others: Callable[[], Iterable[State]] = tuple,
) -> tuple[Trace, ...]:
    """Trace `method` on these root locals, and again in each state in which calls leave the model.

    The model is unchanged afterwards.

    Args:
        module: The model.
        method: Its method: bound, or a function that was set on the model.
        signature: Its signature.
        arguments: The root locals, as `signature.bind` gives them.
        marked: (tensor, dimension, name) of each dimension that must stay symbolic.
        left_by_others: Returns the states in which calls of other sizes leave the model.

    Returns:
        The traces of the model as it is, and as it is after calls.

    Raises:
        GraphBreakError: The model contains something that Dynamo cannot trace.
        TraceError: A fact that the graph depends on, or its output, cannot be stored as data.
    """
    trace = functools.partial(trace_once, module, method, signature, arguments, marked)
    traces = [trace(state=State())]
    waiting = deque(_next_of(traces[0]))
    others: deque[State] = deque()
    while waiting or others:
        state = (waiting or others).popleft()
        try:
            with state.applied():
                again = trace(state=state)
        except CgtoolError:
            if state.sizes is None:
                raise
            continue  # this call may not run at all with values left by calls of other sizes
        if state.is_looked_at(again.looked_at):
            others += left_by_others()
            left_by_others = tuple
        known = next((n for n, one in enumerate(traces) if _is_as_before(one, again)), None)
        if known is not None:
            traces[known] = _before_and_after(traces[known], again)
            continue
        if state.calls > _MOST_CALLS or len(traces) > _MOST_STATES:
            _refuse(traces[-1], again)
        traces.append(again)
        waiting += _next_of(again)
    if len(traces) == 1:
        [one] = traces
        check_at_once(guards_of_states(one.model_guards, (), tuple(one.kept))[0], Roots(module, method))
        return (one,)
    return tuple(replace(one, settled=(), kept=_lasting(one)) for one in traces)


def _next_of(trace: Trace) -> Iterator[State]:
    if trace.left is not None:
        yield trace.left


def _lasting(trace: Trace) -> dict[str, Json]:
    """Return the template of every value that a call sets, once and for all or for the next call, by source."""
    return {**{one.place: ["const", one.after] for one in trace.settled}, **trace.kept}


def _refuse(before: Trace, again: Trace) -> None:
    was, now = _lasting(before), _lasting(again)
    refuse_side_effects([source for source in now if now[source] != was.get(source)] or now, again.lines)


def _is_as_before(one: Trace, again: Trace) -> bool:
    """Return whether two traces are equivalent: they differ only in parts of the model that neither of them read.

    The attributes that the first sets once and for all may be set already in the second.
    """
    if _fingerprint(one) != _fingerprint(again) or one.kept != again.kept:
        return False
    if again.settled and again.settled != one.settled:
        return False
    places = _lasting(again)
    return _guards_on(one, places) == _guards_on(again, places)


def _guards_on(trace: Trace, places: Iterable[str]) -> set[tuple[str, str, str]]:
    """Return the guards of a trace on these places."""
    _, of_call = guards_of_states(trace.model_guards, trace.looked_at, tuple(places))
    return {(guard.source, guard.kind, repr(guard.expected)) for guard in of_call}


def _fingerprint(trace: Trace) -> tuple[Any, ...]:
    """Return a value that is equal for equal traces; a graph with a constant tensor never equals another."""
    graph_module = trace.graph_module
    placeholders = [node.meta["example_value"] for node in graph_module.graph.find_nodes(op="placeholder")]
    constants = [object() for _ in graph_module.named_buffers()]
    shapes = [(str(tuple(t.shape)), str(t.stride())) for t in placeholders if isinstance(t, torch.Tensor)]
    return graph_module.code, shapes, constants, trace.input_sources, trace.dims, trace.output


def _before_and_after(first: Trace, again: Trace) -> Trace:
    """Merge the traces before and after a model sets attributes once and for all, so that the result serves both."""
    if first.settled == again.settled:
        return first
    guards = {(guard.source, guard.kind): guard for trace in (first, again) for guard in trace.model_guards}
    calls = {(guard.source, guard.kind): guard for trace in (first, again) for guard in trace.call_guards}
    return replace(
        again,
        model_guards=tuple(settled_guards(guards.values(), first.settled)),
        call_guards=tuple(calls.values()),
        codes=tuple(dict.fromkeys((*first.codes, *again.codes))),
        classes=tuple(dict.fromkeys((*first.classes, *again.classes))),
        variables=first.variables | again.variables,
        settled=first.settled,
        state=first.state,
    )
