"""From traces to a plan: each trace is split, and its pieces, sources and guards become one variant."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from cgtool.compiler.narrowed import narrowed_ranges
from cgtool.compiler.required import check_required, required_sizes, serves
from cgtool.compiler.traced import Live, Traced, VariantTracer
from cgtool.compiler.tracers import Tracers
from cgtool.config import CompileSize
from cgtool.dims import FIRST_DYNAMIC, Dims
from cgtool.errors import CgtoolError, GraphBreakError, TraceError
from cgtool.events import Event, OnEvent
from cgtool.guards.signature import CallSignature
from cgtool.guards.sources import leads_to, qualified_name
from cgtool.guards.transformers import INSTALLS, install_hooks
from cgtool.model import ExampleCall, ModelSpec
from cgtool.plan.pieces import AOT_INDUCTOR, EAGER
from cgtool.plan.records import Guard, Plan, Variant
from cgtool.plan.shapes import of_sizes
from cgtool.store.records import Fallback
from cgtool.trace.breaks import FixedDimensionError, local_of
from cgtool.trace.capture import slow_ops
from cgtool.trace.examples import sizes_of, unique_names, variants_of
from cgtool.trace.files import UserCode, joined
from cgtool.trace.kept import guards_of_states, read_in_dict
from cgtool.trace.refusals import refuse_side_effects

_log = logging.getLogger(__name__)

#: How many further variants a call gets for what is required of it, and how many sizes are found not to run.
_MOST_FURTHER, _MOST_LEFT_OUT = 16, 64
_MOST_OPS_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class Stitched:
    """A plan, and what else its traces gave."""

    plan: Plan
    code: UserCode
    #: What the compiler believes of the custom ops in all pieces.
    ops: Mapping[str, str]
    splitting_ops: tuple[str, ...]
    #: The pieces that no compiler may be given, and why.
    fallbacks: tuple[Fallback, ...]
    #: Custom ops that import Dynamo when they are first called.
    slow_ops: tuple[str, ...]
    #: What is served less of than was asked for, and why.
    notes: tuple[str, ...]
    computation_graph: str
    trace_secs: float
    #: Told of a piece, by its identity, and an op at which its compile failed: whether the op can run between pieces
    #: instead.
    split_out: Callable[[str, str], bool]
    #: Splits the same traces anew, with all that was to be split out.
    split_again: Callable[[], Stitched]


def stitch(
    spec: ModelSpec,
    splitting_ops: Sequence[str] | None,
    on_event: OnEvent,
    *,
    adaptor: str = AOT_INDUCTOR,
    tracers: Tracers | None = None,
    compile_sizes: Sequence[CompileSize] = (),
    on_variant: Callable[[Plan, Sequence[Fallback]], None] = lambda *_: None,
) -> Stitched:
    """Trace every variant of every example call of a model and split it; `on_variant` gets each as a plan of its own.

    Where children trace, too, this process starts with a variant that `compile_sizes` has autotuned: its compile takes
    longest, and this process built the model first.

    Raises:
        GraphBreakError: The model cannot be traced into one graph.
        TraceError: What the graph rests on cannot be kept as data.
        SplitError: A piece cannot be written down, or a splitting op is not in the graph.
    """
    started = time.perf_counter()
    unique_names(spec.calls)
    if spec.module.training:
        msg = "The model is in training mode, and an entry is for inference. Call model.eval() first."
        raise TraceError(msg)
    tracer = VariantTracer(spec, splitting_ops, adaptor)
    tracing = _Tracing(spec, tracer, tracers, compile_sizes=compile_sizes, on_variant=on_variant, on_event=on_event)
    check_required(spec.require, _bounds(tracing.tracer.dims))
    tracing.run()
    return tracing.stitched(time.perf_counter() - started)


def sizes_of_calls(spec: ModelSpec) -> dict[str, dict[str, int]]:
    """Return for each example call, by name, a size of each dynamic dimension that it passes."""
    signature, dims = CallSignature.of(getattr(spec.module, spec.method)), Dims.of(spec.dynamic)
    check_required(spec.require, _bounds(dims))
    return {call.name: sizes_of(call, signature, dims) for call in spec.calls}


def _bounds(dims: Dims) -> dict[str, tuple[int, int | None]]:
    return {name: (dim.min, dim.max) for name, dim in dims.by_name.items()}


class _Tracing:
    """The variants of a model as they are traced, here or by children."""

    def __init__(
        self,
        spec: ModelSpec,
        tracer: VariantTracer,
        tracers: Tracers | None,
        *,
        compile_sizes: Sequence[CompileSize],
        on_variant: Callable[[Plan, Sequence[Fallback]], None],
        on_event: OnEvent,
    ) -> None:
        self.tracer = tracer
        #: For each trace its variants: one for each state that calls leave the model in.
        self._kept: list[list[Live]] = []
        self.notes: list[str] = []
        self._not_runnable: list[Mapping[str, int]] = []
        self._spec = spec
        self._tracers = tracers
        self._compile_sizes = compile_sizes
        self._on_variant = on_variant
        self._on_event = on_event

    def run(self) -> None:
        """Trace what every example call needs, then what is required beyond that."""
        while True:
            try:
                return self._run()
            except FixedDimensionError as error:
                if not self._spec.static_where_fixed or not self._make_static(error):
                    raise
            except GraphBreakError as error:
                if not install_hooks(local_of(error, INSTALLS, "model")):
                    raise
            self._kept.clear()
            self._tracers = None  # they know of no dimension that is static by now, and of no hooks

    def stitched(self, secs: float) -> Stitched:
        """Join what was traced into one plan; each variant must leave the model in a state that the others know."""
        spec = self._spec
        traced = _of_states([one.record for states in self._kept for one in states])
        variants = [one.variant for one in traced]
        if len({variant.settled for variant in variants}) > 1:
            refuse_side_effects([one.place for variant in variants for one in variant.settled])
        plan = _plan(spec, traced)
        graphs = plan.graphs
        served = (served for one in traced for served in one.served)
        narrowed = narrowed_ranges(served, self.tracer.dims.by_name, self._not_runnable)
        targets = {str(node.target) for graph in graphs.values() for node in graph.every_node()}
        names = sorted(target.removeprefix("torch.ops.") for target in targets if target.startswith("torch.ops."))
        return Stitched(
            plan=plan,
            code=joined(one.code for one in traced),
            ops=dict(sorted(item for graph in graphs.values() for item in graph.ops.items())),
            splitting_ops=tuple(dict.fromkeys(name for one in traced for name in one.splitting_ops)),
            fallbacks=tuple(_fallbacks(traced)),
            slow_ops=slow_ops(tuple(names)),
            notes=tuple(dict.fromkeys((*narrowed, *self.notes, *_between_pieces(traced)))),
            computation_graph=traced[0].computation_graph,
            trace_secs=secs,
            split_out=lambda piece, op: self.tracer.pieces.split_out(graphs[piece], op),
            split_again=lambda: self._split_again(secs),
        )

    def _split_again(self, secs: float) -> Stitched:
        begun = time.perf_counter()
        calls = {call.name: call for call in self._spec.calls}
        for states in self._kept:
            name, fixed = states[0].record.variant.name, states[0].record.variant.fixed
            traces = [one.trace for one in states if one.trace is not None]
            again = [self.tracer.split(name, fixed, trace) for trace in traces]
            states[:] = again or self.tracer.trace(calls[name], fixed)
        return self.stitched(secs + time.perf_counter() - begun)

    def _make_static(self, error: FixedDimensionError) -> bool:
        """Take what the model's code fixes out of the dynamic dimensions; return whether there was anything to take."""
        dims = self.tracer.dims
        fixed = {p.name: error.fixed[p.parameter, p.dim] for p in dims.places if (p.parameter, p.dim) in error.fixed}
        for name, size in fixed.items():
            self.notes.append(f"{name} serves {size} only, the example's size, because of {error.because}.")
        self.tracer.dims = Dims(
            by_name={name: dim for name, dim in dims.by_name.items() if name not in fixed},
            places=tuple(place for place in dims.places if place.name not in fixed),
        )
        return bool(fixed) and not fixed.keys() & self._spec.require.keys()

    def _run(self) -> None:
        signature, dims = self.tracer.signature, self.tracer.dims
        calls = [(call, sizes_of(call, signature, dims)) for call in self._spec.calls]
        todo = [(call, fixed) for call, passed in calls for fixed in variants_of(dims, passed)]
        traced: dict[int, Sequence[Live]] = {}
        if self._tracers is not None:
            first = next((index for index, (_, fixed) in enumerate(todo) if self._is_tuned(fixed)), 0)
            self._tracers.begin(
                [*todo[:first], *todo[first + 1 :]],
                splitting_ops=self.tracer.splitting_ops,
                adaptor=self.tracer.adaptor,
                on_traced=self._tell,
            )
            with contextlib.suppress(CgtoolError):  # raised again when its turn comes
                traced[first] = self._trace(*todo[first], progress=(0, len(todo)))
                self._tell(one.record for one in traced[first])
        num_traced = len(traced)
        for index, (call, fixed) in enumerate(todo):
            try:
                if index not in traced:
                    traced[index] = self._trace(call, fixed, progress=(num_traced, len(todo)))
                    num_traced += 1
                self._keep(traced[index])
            except CgtoolError as error:
                reason = self.tracer.why_not_runnable(call, fixed) if fixed and self._kept else None
                if reason is None:
                    raise
                _log.info("There is no variant for %s: %s", _spelled(fixed), error)
                self._not_runnable.append(fixed)
                self._leave_out([_spelled(fixed)], reason)
        for call, passed in calls:
            self._widen(call, passed)

    def _is_tuned(self, fixed: Mapping[str, int]) -> bool:
        """Return whether a compile size asks for just the sizes that a variant fixes."""
        sizes = [dict(fixed), *(fixed.values() if len(fixed) == 1 else ())]
        return any(size in self._compile_sizes for size in sizes)

    def _widen(self, call: ExampleCall, sizes: Mapping[str, int]) -> None:
        """Trace further variants of a call until all sizes that are required of it are served."""
        require = {name: bounds for name, bounds in self._spec.require.items() if name in sizes}
        kept = (one.record.variant for states in self._kept for one in states)
        own = [variant for variant in kept if variant.name == call.name]
        left_out: dict[str, list[str]] = {}
        more = 0
        for point in required_sizes(require, sizes, tuple(own)) if require else ():
            if any(serves(variant, point) for variant in own):
                continue
            asked = {name: point[name] for name in require}
            if more == _MOST_FURTHER or sum(map(len, left_out.values())) == _MOST_LEFT_OUT:
                self.notes.append(f"Nothing further was traced from {_spelled(asked)} on: too many sizes differ.")
                break
            reason = self.tracer.why_not_runnable(call, asked)
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
            if serves(wide[0].record.variant, point):
                return self._keep(wide)
        return self._keep(self._trace(call, asked, point))

    def _keep(self, states: Sequence[Live]) -> Variant:
        """Keep the variants of all states of the model; return that of its first."""
        self._kept.append([*states])
        self._tell(one.record for one in states)
        first = states[0].record
        if not first.variant.dims.keys() - first.variant.fixed.keys() <= self._spec.require.keys():
            self.notes += first.relations  # else further variants serve what this one does not
        return first.variant

    def _tell(self, states: Iterable[Traced]) -> None:
        for one in states:
            self._on_variant(_plan(self._spec, [one]), tuple(_fallbacks([one])))

    def _leave_out(self, points: Sequence[str], reason: str) -> None:
        self.notes.append(f"No variant serves {', '.join(points)}, at which the model itself does not run: {reason}")

    def _trace(
        self,
        call: ExampleCall,
        fixed: Mapping[str, int],
        sizes: Mapping[str, int] | None = None,
        progress: tuple[int, int] | None = None,
    ) -> Sequence[Live]:
        shown = fixed if sizes is None else {name: sizes[name] for name in self._spec.require if name in sizes}
        label = call.name + "".join(f", {name}={size}" for name, size in shown.items())
        begun = time.perf_counter()
        done, total = progress or (None, None)
        self._on_event(Event(phase="trace", message=label, done=done, total=total))
        found = None if sizes is not None or self._tracers is None else self._tracers.take(call, fixed)
        if found is None:
            states: Sequence[Live] = self.tracer.trace(call, fixed, sizes)
            secs = time.perf_counter() - begun
        else:
            states, secs = [Live(record=record) for record in found[0]], found[1]
        done = None if done is None else done + 1
        self._on_event(Event(phase="trace", message=label, done=done, total=total, secs=secs))
        return states


def _of_states(traced: Sequence[Traced]) -> list[Traced]:
    """Return variants with guards that are asked of each call where they speak of what calls of any leave behind."""
    places = tuple(dict.fromkeys(one.place for each in traced for one in each.variant.kept))
    refuse_side_effects(read_in_dict(places, [source for each in traced for source in each.looked_at]))
    found = []
    for each in traced:
        of_model, of_call = guards_of_states(each.variant.model_guards, each.looked_at, places)
        call_guards = guards_of_states(each.variant.call_guards, each.looked_at, places)
        asked = (*call_guards[0], *call_guards[1], *of_call, *_apart(each, places))
        guards = {(guard.source, guard.kind): guard for guard in asked}
        variant = replace(each.variant, model_guards=of_model, call_guards=tuple(guards.values()))
        found.append(replace(each, variant=variant))
    return found


def _apart(each: Traced, places: Sequence[str]) -> Iterator[Guard]:
    """Yield guards that an input which is written to shares memory with an argument just where it did in the trace.

    Dynamo has such guards too, and does not show them to its filter. Tensors of the model among themselves are left
    out: what of theirs is one tensor is a fact of the key. What calls of any variant leave in the model is as an
    argument.
    """
    told: set[frozenset[str]] = set()
    for written, shared in each.written.items():
        for other in (given.source for given in each.variant.inputs):
            pair = frozenset((written, other))
            may_change = any(source.startswith("arg:") or leads_to(source, places) for source in pair)
            if other != written and may_change and pair not in told:
                told.add(pair)
                yield Guard(source=written, kind=f"apart:{other}", expected=other not in shared)


def _spelled(sizes: Mapping[str, int]) -> str:
    return " and ".join(f"{name} = {size}" for name, size in sizes.items())


def _plan(spec: ModelSpec, traced: Sequence[Traced]) -> Plan:
    return Plan(
        method=spec.method,
        qualname=qualified_name(type(spec.module)),
        variants=tuple(one.variant for one in traced),
        graphs={identity: graph for one in traced for identity, graph in one.graphs.items()},
    )


def _between_pieces(traced: Sequence[Traced]) -> Iterator[str]:
    """Yield notes on the ops that run between pieces although nobody asked for it."""
    noted: dict[str, dict[str, None]] = {}
    for one in traced:
        for why, ops in one.apart.items():
            noted.setdefault(why, {}).update(dict.fromkeys(ops))
    for why, found in noted.items():
        more = f" and {len(found) - _MOST_OPS_NAMED} more" if len(found) > _MOST_OPS_NAMED else ""
        yield f"{why}, so they run between pieces: {'; '.join([*found][:_MOST_OPS_NAMED])}{more}."


def _fallbacks(traced: Sequence[Traced]) -> Iterator[Fallback]:
    for index, one in enumerate(traced):
        for piece, reason in one.as_it_stands.items():
            shape = of_sizes(one.variant.fixed)
            yield Fallback(variant=index, piece_index=piece, shape=shape, adaptor=EAGER, reason=reason)
