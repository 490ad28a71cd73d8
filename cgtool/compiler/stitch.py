"""From traces to a plan: each trace is split, and its pieces, sources and guards become one variant."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from cgtool.compiler import _torch
from cgtool.compiler.fitness import Fitness, fitness_of
from cgtool.compiler.narrowed import narrowed_ranges, narrowing_relations, served_by
from cgtool.compiler.required import check_required, required_sizes, serves
from cgtool.config import AOT_INDUCTOR, EAGER
from cgtool.errors import CgtoolError, TraceError
from cgtool.events import Event, OnEvent
from cgtool.graph._torch import share_storage
from cgtool.graph.values import tensor_meta
from cgtool.guards.signature import CallSignature
from cgtool.guards.sources import qualified_name
from cgtool.guards.state import current, names_for_pieces
from cgtool.model import ExampleCall, ModelSpec
from cgtool.plan.pieces import PieceGraph, SymbolRange
from cgtool.plan.records import Guard, Input, Plan, Variant
from cgtool.plan.shapes import of_sizes
from cgtool.split.bodies import with_bodies
from cgtool.split.nodes import lines_by_op
from cgtool.split.splitter import Call, SplitResult, split_graph
from cgtool.split.text import graph_text
from cgtool.store.records import Fallback
from cgtool.trace.breaks import FixedDimensionError
from cgtool.trace.capture import Trace, capture, slow_ops
from cgtool.trace.examples import (
    FIRST_DYNAMIC,
    Dims,
    arguments_for,
    outer_arguments,
    sizes_of,
    unique_names,
    variants_of,
)
from cgtool.trace.files import UserCode, user_code
from cgtool.trace.outputs import place_outputs
from cgtool.trace.refusals import refuse_side_effects
from cgtool.trace.relations import relations_of_trace, symbols_of_trace

_log = logging.getLogger(__name__)

#: How many further variants a call gets for what is required of it, and how many sizes are found not to run.
_MOST_FURTHER, _MOST_LEFT_OUT = 16, 64
_MOST_OPS_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class Stitched:
    """A plan, and what else its traces gave.

    Args:
        plan: The stitched programs.
        code: The user's code that the traces rest on.
        ops: What the compiler believes of the custom ops in all pieces.
        splitting_ops: The ops that were split at, by their canonical names.
        fallbacks: The pieces that no compiler may be given, and why.
        slow_ops: Custom ops that import Dynamo when they are first called.
        notes: What is served less of than was asked for, and why.
        computation_graph: `computation_graph.py`, for people.
        trace_secs: Seconds that tracing and splitting took.
        split_out: Told of a piece, by its identity, and an op at which its compile failed: whether the op can run
            between pieces instead.
        split_again: Splits the same traces anew, with all that was to be split out.
    """

    plan: Plan
    code: UserCode
    ops: Mapping[str, str]
    splitting_ops: tuple[str, ...]
    fallbacks: tuple[Fallback, ...]
    slow_ops: tuple[str, ...]
    notes: tuple[str, ...]
    computation_graph: str
    trace_secs: float
    split_out: Callable[[str, str], bool]
    split_again: Callable[[], Stitched]


def stitch(
    spec: ModelSpec, splitting_ops: Sequence[str] | None, on_event: OnEvent, *, adaptor: str = AOT_INDUCTOR
) -> Stitched:
    """Trace every variant of every example call of a model and split it.

    Args:
        spec: The model.
        splitting_ops: Ops to split at; None takes the known ones, () splits nowhere.
        on_event: Told of each trace.
        adaptor: What is to compile the pieces; ops that its code cannot call are split out.

    Raises:
        GraphBreakError: The model cannot be traced into one graph.
        TraceError: What the graph rests on cannot be kept as data.
        SplitError: A piece cannot be written down, or a splitting op is not in the graph.
    """
    started = time.perf_counter()
    unique_names(spec.calls)
    method = getattr(spec.module, spec.method)
    if spec.module.training:
        msg = "The model is in training mode, and an entry is for inference. Call model.eval() first."
        raise TraceError(msg)
    signature = CallSignature.of(method)
    pieces = _Pieces(splitting_ops, splits_out=adaptor == AOT_INDUCTOR)
    tracing = _Tracing(spec, method, signature, pieces, on_event)
    check_required(spec.require, _bounds(tracing.dims))
    tracing.run()
    return tracing.stitched(time.perf_counter() - started)


def sizes_of_calls(spec: ModelSpec) -> dict[str, dict[str, int]]:
    """Return for each example call, by name, a size of each dynamic dimension that it passes."""
    signature, dims = CallSignature.of(getattr(spec.module, spec.method)), Dims.of(spec.dynamic)
    check_required(spec.require, _bounds(dims))
    return {call.name: sizes_of(call, signature, _present(dims, call, signature)) for call in spec.calls}


def _bounds(dims: Dims) -> dict[str, tuple[int, int | None]]:
    return {name: (dim.min, dim.max) for name, dim in dims.by_name.items()}


class _Pieces:
    """How traces are split, and what is known of the pieces.

    Args:
        splitting_ops: Ops to split at.
        splits_out: Whether what compiled code cannot call runs between pieces.
    """

    def __init__(self, splitting_ops: Sequence[str] | None, *, splits_out: bool) -> None:
        self._splitting_ops = splitting_ops
        self._splits_out = splits_out
        self._known: dict[str, Fitness] = {}
        #: Identity of a piece → the calls at which its compile failed.
        self._failed: dict[str, set[Call]] = {}

    def split(self, trace: Trace) -> SplitResult:
        return split_graph(trace.graph_module, splitting_ops=self._splitting_ops, refused=self._refused)

    def fitness(self, graph: PieceGraph) -> Fitness:
        identity = graph.identity()
        if identity not in self._known:
            self._known[identity] = fitness_of(graph)
        return self._known[identity]

    def split_out(self, piece: str, op: str) -> bool:
        calls = self._known[piece].calling(op) if piece in self._known and self._splits_out else set()
        self._failed.setdefault(piece, set()).update(calls)
        return bool(calls)

    def _refused(self, graph: PieceGraph) -> set[Call]:
        if not self._splits_out or self.fitness(graph).as_it_stands is not None:
            return set()
        return self.fitness(graph).without_code() | self._failed.get(graph.identity(), set())


class _Tracing:
    """The variants of a model as they are traced.

    Args:
        spec: The model.
        method: Its method.
        signature: The method's.
        pieces: How traces are split.
        on_event: Told of each trace.
    """

    def __init__(
        self,
        spec: ModelSpec,
        method: Callable[..., Any],
        signature: CallSignature,
        pieces: _Pieces,
        on_event: OnEvent,
    ) -> None:
        self.dims = Dims.of(spec.dynamic)
        self.traced: list[_Traced] = []
        self.notes: list[str] = []
        self._spec = spec
        self._method = method
        self._signature = signature
        self._pieces = pieces
        self._on_event = on_event

    def run(self) -> None:
        """Trace what every example call needs, then what is required beyond that."""
        while True:
            try:
                return self._run()
            except FixedDimensionError as error:
                if not self._spec.static_where_fixed or not self._make_static(error):
                    raise
                self.traced.clear()

    def stitched(self, secs: float) -> Stitched:
        """Join what was traced into one plan.

        Raises:
            TraceError: One variant would leave the model in another state than the others know.
        """
        if len({one.trace.settled for one in self.traced}) > 1:
            refuse_side_effects([f"{s.source}.{s.name}" for one in self.traced for s in one.trace.settled])
        traced, dims, spec = self.traced, self.dims, self._spec
        used = {step.graph for one in traced for step in one.variant.steps}
        graphs = {identity: graph for one in traced for identity, graph in one.split.graphs.items() if identity in used}
        plan = Plan(
            method=spec.method,
            qualname=qualified_name(type(spec.module)),
            variants=tuple(one.variant for one in traced),
            graphs=graphs,
        )
        served = [
            served
            for one in traced
            for served in served_by(
                one.variant,
                one.trace.shape_env,
                one.split.symbol_names,
                dims.by_name,
                lines_by_op(one.trace.graph_module.graph),
            )
        ]
        targets = {str(node.target) for graph in graphs.values() for node in graph.every_node()}
        names = sorted(target.removeprefix("torch.ops.") for target in targets if target.startswith("torch.ops."))
        traces = [one.trace for one in traced]
        return Stitched(
            plan=plan,
            code=user_code(
                dict.fromkeys(code for trace in traces for code in trace.codes),
                dict.fromkeys(kind for trace in traces for kind in trace.classes),
                variables={name for trace in traces for name in trace.variables},
                modules={name for trace in traces for name in trace.asked.modules},
                distributions={name for trace in traces for name in trace.asked.distributions},
            ),
            ops=dict(sorted(item for graph in graphs.values() for item in graph.ops.items())),
            splitting_ops=tuple(dict.fromkeys(name for one in traced for name in one.split.splitting_ops)),
            fallbacks=tuple(_fallbacks(traced, self._pieces.fitness)),
            slow_ops=slow_ops(tuple(names)),
            notes=tuple(dict.fromkeys((*narrowed_ranges(served, dims.by_name), *self.notes, *_between_pieces(traced)))),
            computation_graph=graph_text(with_bodies(traces[0].graph_module), traced[0].split.assignment),
            trace_secs=secs,
            split_out=self._pieces.split_out,
            split_again=lambda: self._split_again(secs),
        )

    def _split_again(self, secs: float) -> Stitched:
        begun = time.perf_counter()
        for number, one in enumerate(self.traced):
            split = self._pieces.split(one.trace)
            variant = _variant(one.variant.name, one.variant.fixed, self.dims, one.trace, split)
            self.traced[number] = _Traced(variant=variant, trace=one.trace, split=split)
        return self.stitched(secs + time.perf_counter() - begun)

    def _make_static(self, error: FixedDimensionError) -> bool:
        """Take what the model's code fixes out of the dynamic dimensions; return whether there was anything to take."""
        fixed = {
            p.name: error.fixed[p.parameter, p.dim] for p in self.dims.places if (p.parameter, p.dim) in error.fixed
        }
        for name, size in fixed.items():
            self.notes.append(f"{name} serves {size} only, the example's size, because of {error.because}.")
        self.dims = Dims(
            by_name={name: dim for name, dim in self.dims.by_name.items() if name not in fixed},
            places=tuple(place for place in self.dims.places if place.name not in fixed),
        )
        return bool(fixed) and not fixed.keys() & self._spec.require.keys()

    def _run(self) -> None:
        calls = {call.name: (call, _present(self.dims, call, self._signature)) for call in self._spec.calls}
        todo = [(call, fixed) for call, dims in calls.values() for fixed in variants_of(dims)]
        for index, (call, fixed) in enumerate(todo):
            try:
                self._keep(self._trace(call, fixed, progress=(index, len(todo))))
            except CgtoolError as error:
                arguments, _ = arguments_for(call, self._signature, self.dims, fixed)
                reason = self._why_not_runnable(arguments) if fixed and self.traced else None
                if reason is None:
                    raise
                _log.info("There is no variant for %s: %s", _spelled(fixed), error)
                self._leave_out([_spelled(fixed)], reason)
        for call, dims in calls.values():
            self._widen(call, sizes_of(call, self._signature, dims))

    def _widen(self, call: ExampleCall, sizes: Mapping[str, int]) -> None:
        """Trace further variants of a call until all sizes that are required of it are served."""
        require = {name: bounds for name, bounds in self._spec.require.items() if name in sizes}
        own = [one.variant for one in self.traced if one.variant.name == call.name]
        left_out: dict[str, list[str]] = {}
        more = 0
        for point in required_sizes(require, sizes, tuple(own)) if require else ():
            if any(serves(variant, point) for variant in own):
                continue
            asked = {name: point[name] for name in require}
            if more == _MOST_FURTHER or sum(map(len, left_out.values())) == _MOST_LEFT_OUT:
                self.notes.append(f"Nothing further was traced from {_spelled(asked)} on: too many sizes differ.")
                break
            arguments, _ = arguments_for(call, self._signature, self.dims, asked)
            reason = self._why_not_runnable(arguments)
            if reason is not None:
                left_out.setdefault(reason, []).append(_spelled(asked))
                continue
            more += 1
            own.append(self._serving(call, point, asked))
        for reason, points in left_out.items():
            self._leave_out(points, reason)

    def _serving(self, call: ExampleCall, point: Mapping[str, int], asked: Mapping[str, int]) -> Variant:
        """Trace a variant that serves these sizes: of as many others as the model's code allows, or of these alone."""
        small = {name: size for name, size in asked.items() if size < FIRST_DYNAMIC}
        with contextlib.suppress(CgtoolError):  # Dynamo fixes a size that the code asks for
            wide = self._trace(call, small, point)
            if serves(wide.variant, point):
                return self._keep(wide)
        return self._keep(self._trace(call, asked, point))

    def _keep(self, one: _Traced) -> Variant:
        self.traced.append(one)
        dynamic = one.variant.dims.keys() - one.variant.fixed.keys()
        if not dynamic <= self._spec.require.keys():  # else further variants serve what this one does not
            by_op = lines_by_op(one.trace.graph_module.graph)
            self.notes += narrowing_relations(one.variant, one.trace.shape_env, one.split.symbol_names, by_op)
        return one.variant

    def _leave_out(self, points: Sequence[str], reason: str) -> None:
        self.notes.append(f"No variant serves {', '.join(points)}, at which the model itself does not run: {reason}")

    def _trace(
        self,
        call: ExampleCall,
        fixed: Mapping[str, int],
        sizes: Mapping[str, int] | None = None,
        progress: tuple[int, int] | None = None,
    ) -> _Traced:
        shown = fixed if sizes is None else {name: sizes[name] for name in self._spec.require if name in sizes}
        label = call.name + "".join(f", {name}={size}" for name, size in shown.items())
        begun = time.perf_counter()
        done, total = progress or (None, None)
        self._on_event(Event(phase="trace", message=label, done=done, total=total))
        arguments, marked = arguments_for(call, self._signature, self.dims, fixed, sizes)
        trace = capture(self._spec.module, self._method, self._signature, arguments, marked)
        split = self._pieces.split(trace)
        variant = _variant(call.name, fixed, self.dims, trace, split)
        secs = time.perf_counter() - begun
        done = None if done is None else done + 1
        self._on_event(Event(phase="trace", message=label, done=done, total=total, secs=secs))
        return _Traced(variant=variant, trace=trace, split=split)

    def _why_not_runnable(self, arguments: Mapping[str, Any]) -> str | None:
        """Return why the model itself does not run on these arguments, or None where it does; nothing is computed."""
        try:
            with torch.no_grad(), _torch.fake_mode_of(arguments):
                self._signature.call(self._method, arguments)
        except Exception as error:  # noqa: BLE001  the model's own code raises what it likes
            return (str(error).strip().splitlines() or [type(error).__name__])[0]
        return None


def _spelled(sizes: Mapping[str, int]) -> str:
    return " and ".join(f"{name} = {size}" for name, size in sizes.items())


def _present(dims: Dims, call: ExampleCall, signature: CallSignature) -> Dims:
    """Return the dimensions of the tensors that this example passes."""
    given = outer_arguments(call, signature)
    places = tuple(place for place in dims.places if given.get(place.parameter) is not None)
    names = {place.name for place in places}
    return Dims(by_name={n: d for n, d in dims.by_name.items() if n in names}, places=places)


@dataclass(frozen=True, kw_only=True)
class _Traced:
    variant: Variant
    trace: Trace
    split: SplitResult


def _between_pieces(traced: Sequence[_Traced]) -> Iterator[str]:
    """Yield notes on the ops that run between pieces although nobody asked for it."""
    for why, ops in (
        ("What these ops find in data is known only as they run", [op for one in traced for op in one.split.from_data]),
        ("Code of aot_inductor cannot call these ops", [op for one in traced for op in one.split.apart]),
    ):
        if ops:
            known = list(dict.fromkeys(ops))
            more = f" and {len(known) - _MOST_OPS_NAMED} more" if len(known) > _MOST_OPS_NAMED else ""
            yield f"{why}, so they run between pieces: {'; '.join(known[:_MOST_OPS_NAMED])}{more}."


def _fallbacks(traced: Sequence[_Traced], fitness: Callable[[PieceGraph], Fitness]) -> Iterator[Fallback]:
    """Yield the pieces that must run as they stand, and why: the split's, and what no compiler may be given."""
    for index, one in enumerate(traced):
        reasons: dict[int, str | None] = {**one.split.eager_pieces}
        for step in one.split.steps:
            if not step.splitting and step.piece >= 0 and step.piece not in reasons:
                reasons[step.piece] = fitness(one.split.graphs[step.graph]).as_it_stands
        for piece, reason in reasons.items():
            if reason is not None:
                shape = of_sizes(one.variant.fixed)
                yield Fallback(variant=index, piece_index=piece, shape=shape, adaptor=EAGER, reason=reason)


def _variant(name: str, fixed: Mapping[str, int], dims: Dims, trace: Trace, split: SplitResult) -> Variant:
    placeholders = [
        node.meta["example_value"]
        for node in trace.graph_module.graph.find_nodes(op="placeholder")
        if hasattr(node.meta["example_value"], "stride")
    ]
    metas = [tensor_meta(value, split.symbol_names) for value in placeholders]
    inputs = tuple(Input(source=s, meta=m) for s, m in zip(trace.input_sources, metas, strict=True))
    by_source = {given.source: given.meta for given in inputs}
    symbols = symbols_of_trace(trace.shape_env, split.symbol_names)
    relations = relations_of_trace(trace.shape_env, split.symbol_names)
    named: dict[str, dict[str, None]] = {}
    for dim_name, source, dim in trace.dims:
        named.setdefault(dim_name, {})[str(by_source[source].shape[dim])] = None
    equal = [f"{first} == {other}" for first, *others in map(list, named.values()) for other in others]
    known = {symbol.name for symbol in symbols}
    # guards on what the compiled pieces are made by: which kernels attention may use, say
    compiled = dict.fromkeys(step.graph for step in split.steps if not step.splitting and step.piece >= 0)
    settings = names_for_pieces(split.graphs[identity] for identity in compiled)
    states = [Guard(source=f"state:{name}", kind="state", expected=current(name)) for name in settings]
    return Variant(
        name=name,
        fixed=dict(fixed),
        dims={dim: tuple(text for text in texts if text in known) for dim, texts in named.items()},
        symbols=tuple(_bounded(symbol, named, dims) for symbol in symbols),
        relations=(*relations, *equal, *split.relations_from_data),
        inputs=inputs,
        model_guards=trace.model_guards,
        settled=trace.settled,
        call_guards=(*trace.call_guards, *states, *_apart(inputs, placeholders, split)),
        steps=split.steps,
        output=place_outputs(trace.output, split.outputs, by_source),
    )


def _apart(inputs: Sequence[Input], placeholders: Sequence[Any], split: SplitResult) -> Iterator[Guard]:
    """Yield guards that an input which is written to shares memory with an argument just where it did in the trace.

    Dynamo has such guards too, and does not show them to its filter. Tensors of the model among themselves are left
    out: what of theirs is one tensor is a fact of the key.
    """
    for written in split.mutated_inputs:
        for other, given in enumerate(inputs):
            pair = (inputs[written].source, given.source)
            if other == written or not any(source.startswith("arg:") for source in pair):
                continue
            if other in split.mutated_inputs and other < written:
                continue  # the pair was taken the other way round
            apart = not share_storage(placeholders[written], placeholders[other])
            yield Guard(source=pair[0], kind=f"apart:{pair[1]}", expected=apart)


def _bounded(symbol: SymbolRange, named: Mapping[str, Mapping[str, Any]], dims: Dims) -> SymbolRange:
    """Return the symbol's range within what the user said of the dimensions that it carries."""
    low, high = symbol.min, symbol.max
    for name, texts in named.items():
        if symbol.name in texts:
            said = dims.by_name[name]
            low = max(low, said.min)
            high = said.max if high is None else high if said.max is None else min(high, said.max)
    return msgspec.structs.replace(symbol, min=low, max=high)
