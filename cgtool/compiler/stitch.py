"""Builds a plan from traces: each trace is split, and its pieces, sources and guards become one variant."""

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

#: Limits on the further variants of a call for required sizes, and on the required sizes that the model cannot run.
_MAX_FURTHER, _MAX_LEFT_OUT = 16, 64
_MAX_OPS_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class Stitched:
    """A plan, with the other results of its traces."""

    plan: Plan
    code: UserCode
    #: The custom ops in all pieces → the digest of schema and fake implementation.
    ops: Mapping[str, str]
    splitting_ops: tuple[str, ...]
    #: The pieces that no compiler may be given, and why.
    fallbacks: tuple[Fallback, ...]
    #: Custom ops that import Dynamo at their first call.
    slow_ops: tuple[str, ...]
    #: The sizes that are not served, and why; and the ops that run between pieces.
    notes: tuple[str, ...]
    computation_graph: str
    trace_secs: float
    #: Called with a piece's identity and the op at which its compile failed; returns whether the op can run between
    #: pieces instead.
    split_out: Callable[[str, str], bool]
    #: Splits the same traces again, at the ops passed to `split_out` too.
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
    """Trace and split every variant of every example call of a model.

    Args:
        spec: The model and its example calls.
        splitting_ops: The ops to split at; None takes the default.
        on_event: Receives progress events.
        adaptor: The adaptor that will compile the pieces; `aot_inductor` splits out ops that it cannot call.
        tracers: Children that trace variants in parallel.
        compile_sizes: The sizes to autotune. If there are tracers, this process traces a variant that is autotuned as a
            whole first: it takes longest to compile, and the children are still building the model.
        on_variant: Called with each variant as a plan with one variant, as soon as it is traced.

    Raises:
        GraphBreakError: The model cannot be traced into one graph.
        TraceError: The graph depends on something that cannot be stored as data.
        SplitError: A piece cannot be serialized, or a splitting op is not in the graph.
    """
    started = time.perf_counter()
    unique_names(spec.calls)
    if spec.module.training:
        msg = "The model is in training mode, but entries are for inference only. Call model.eval() first."
        raise TraceError(msg)
    tracer = VariantTracer(spec, splitting_ops, adaptor)
    tracing = _Tracing(spec, tracer, tracers, compile_sizes=compile_sizes, on_variant=on_variant, on_event=on_event)
    check_required(spec.require, _bounds(tracing.tracer.dims))
    tracing.run()
    return tracing.stitched(time.perf_counter() - started)


def sizes_of_calls(spec: ModelSpec) -> dict[str, dict[str, int]]:
    """Return, by the name of each example call, the sizes of the dynamic dimensions that it passes."""
    signature, dims = CallSignature.of(getattr(spec.module, spec.method)), Dims.of(spec.dynamic)
    check_required(spec.require, _bounds(dims))
    return {call.name: sizes_of(call, signature, dims) for call in spec.calls}


def _bounds(dims: Dims) -> dict[str, tuple[int, int | None]]:
    return {name: (dim.min, dim.max) for name, dim in dims.by_name.items()}


class _Tracing:
    """The variants of a model while they are traced, in this process or by children."""

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
        #: The variants of each trace: one for each state that calls leave the model in.
        self._variants: list[list[Live]] = []
        self.notes: list[str] = []
        self._not_runnable: list[Mapping[str, int]] = []
        self._spec = spec
        self._tracers = tracers
        self._compile_sizes = compile_sizes
        self._on_variant = on_variant
        self._on_event = on_event

    def run(self) -> None:
        """Trace the variants of every example call, then further ones for required sizes."""
        while True:
            try:
                return self._run()
            except FixedDimensionError as error:
                if not self._spec.static_where_fixed or not self._make_static(error):
                    raise
            except GraphBreakError as error:
                if not install_hooks(local_of(error, INSTALLS, "model")):
                    raise
            self._variants.clear()
            self._tracers = None  # the children know neither the dimensions made static nor the hooks

    def stitched(self, secs: float) -> Stitched:
        """Join the variants into one plan; each must leave the model in a state that the others know."""
        traced = _with_state_guards([live.record for states in self._variants for live in states])
        variants = [record.variant for record in traced]
        if len({variant.settled for variant in variants}) > 1:
            refuse_side_effects([settled.place for variant in variants for settled in variant.settled])
        plan = _plan(self._spec, traced)
        graphs = plan.graphs
        served = (served for record in traced for served in record.served)
        narrowed = narrowed_ranges(served, self.tracer.dims.by_name, self._not_runnable)
        targets = {str(node.target) for graph in graphs.values() for node in graph.every_node()}
        names = sorted(target.removeprefix("torch.ops.") for target in targets if target.startswith("torch.ops."))
        return Stitched(
            plan=plan,
            code=joined(record.code for record in traced),
            ops=dict(sorted(item for graph in graphs.values() for item in graph.ops.items())),
            splitting_ops=tuple(dict.fromkeys(name for record in traced for name in record.splitting_ops)),
            fallbacks=tuple(_fallbacks(traced)),
            slow_ops=slow_ops(tuple(names)),
            notes=tuple(dict.fromkeys((*narrowed, *self.notes, *_split_out_notes(traced)))),
            computation_graph=traced[0].computation_graph,
            trace_secs=secs,
            split_out=lambda piece, op: self.tracer.pieces.split_out(graphs[piece], op),
            split_again=lambda: self._split_again(secs),
        )

    def _split_again(self, secs: float) -> Stitched:
        begun = time.perf_counter()
        calls = {call.name: call for call in self._spec.calls}
        for states in self._variants:
            name, fixed = states[0].record.variant.name, states[0].record.variant.fixed
            traces = [live.trace for live in states if live.trace is not None]
            again = [self.tracer.split(name, fixed, trace) for trace in traces]
            states[:] = again or self.tracer.trace(calls[name], fixed)
        return self.stitched(secs + time.perf_counter() - begun)

    def _make_static(self, error: FixedDimensionError) -> bool:
        """Make the dimensions static that the model's code fixes; return whether tracing again can succeed."""
        dims = self.tracer.dims
        fixed = {p.name: error.fixed[p.parameter, p.dim] for p in dims.places if (p.parameter, p.dim) in error.fixed}
        for name, size in fixed.items():
            self.notes.append(f"{name} serves only {size}, the example's size, because of {error.because}.")
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
                on_traced=self._report_variants,
            )
            with contextlib.suppress(CgtoolError):  # raised again when its turn comes
                traced[first] = self._trace(*todo[first], progress=(0, len(todo)))
                self._report_variants(one.record for one in traced[first])
        num_traced = len(traced)
        for index, (call, fixed) in enumerate(todo):
            try:
                if index not in traced:
                    traced[index] = self._trace(call, fixed, progress=(num_traced, len(todo)))
                    num_traced += 1
                self._keep(traced[index])
            except CgtoolError as error:
                reason = self.tracer.why_not_runnable(call, fixed) if fixed and self._variants else None
                if reason is None:
                    raise
                _log.info("There is no variant for %s: %s", _sizes_text(fixed), error)
                self._not_runnable.append(fixed)
                self._leave_out([_sizes_text(fixed)], reason)
        for call, passed in calls:
            self._widen(call, passed)

    def _is_tuned(self, fixed: Mapping[str, int]) -> bool:
        """Return whether a compile size asks for just the sizes that a variant fixes."""
        sizes = [dict(fixed), *(fixed.values() if len(fixed) == 1 else ())]
        return any(size in self._compile_sizes for size in sizes)

    def _widen(self, call: ExampleCall, sizes: Mapping[str, int]) -> None:
        """Trace further variants of a call until its required sizes are served."""
        require = {name: bounds for name, bounds in self._spec.require.items() if name in sizes}
        variants = (live.record.variant for states in self._variants for live in states)
        of_call = [variant for variant in variants if variant.name == call.name]
        left_out: dict[str, list[str]] = {}
        num_further = 0
        for point in required_sizes(require, sizes, tuple(of_call)) if require else ():
            if any(serves(variant, point) for variant in of_call):
                continue
            required = {name: point[name] for name in require}
            if num_further == _MAX_FURTHER or sum(map(len, left_out.values())) == _MAX_LEFT_OUT:
                self.notes.append(f"Tracing stopped at {_sizes_text(required)}: too many sizes need their own variant.")
                break
            reason = self.tracer.why_not_runnable(call, required)
            if reason is not None:
                left_out.setdefault(reason, []).append(_sizes_text(required))
                continue
            num_further += 1
            of_call.append(self._trace_further(call, point, required))
        for reason, points in left_out.items():
            self._leave_out(points, reason)

    def _trace_further(self, call: ExampleCall, point: Mapping[str, int], required: Mapping[str, int]) -> Variant:
        """Trace a variant that serves `required` and, if the model's code allows, other sizes too."""
        small = {name: size for name, size in required.items() if size < FIRST_DYNAMIC}
        with contextlib.suppress(CgtoolError):  # fails if the code fixes a size
            wide = self._trace(call, small, point)
            if serves(wide[0].record.variant, point):
                return self._keep(wide)
        return self._keep(self._trace(call, required, point))

    def _keep(self, states: Sequence[Live]) -> Variant:
        """Keep the variants of all states of the model; return the variant of the first state."""
        self._variants.append([*states])
        self._report_variants(live.record for live in states)
        first = states[0].record
        if not first.variant.dims.keys() - first.variant.fixed.keys() <= self._spec.require.keys():
            self.notes += first.relations  # else further variants will serve the sizes that this one refuses
        return first.variant

    def _report_variants(self, states: Iterable[Traced]) -> None:
        for record in states:
            self._on_variant(_plan(self._spec, [record]), tuple(_fallbacks([record])))

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


def _with_state_guards(traced: Sequence[Traced]) -> list[Traced]:
    """Return the variants with guards on state that any variant's calls change moved from load to each call."""
    places = tuple(dict.fromkeys(kept.place for record in traced for kept in record.variant.kept))
    refuse_side_effects(read_in_dict(places, [source for record in traced for source in record.looked_at]))
    found = []
    for record in traced:
        variant = record.variant
        of_model, of_call = guards_of_states(variant.model_guards, record.looked_at, places)
        unchanged, of_states = guards_of_states(variant.call_guards, record.looked_at, places)
        call_guards = (*unchanged, *of_states, *of_call, *_aliasing_guards(record, places))
        guards = {(guard.source, guard.kind): guard for guard in call_guards}
        found.append(
            replace(record, variant=replace(variant, model_guards=of_model, call_guards=tuple(guards.values())))
        )
    return found


def _aliasing_guards(record: Traced, places: Sequence[str]) -> Iterator[Guard]:
    """Yield guards that an input that is written to shares memory with the same arguments as in the trace.

    Dynamo has such guards too, but does not pass them to its filter. Pairs of the model's own tensors need none, since
    the key covers which of them are the same tensor. State that calls leave in the model is treated like an argument.
    """
    seen: set[frozenset[str]] = set()
    for written, shared in record.written.items():
        for other in (item.source for item in record.variant.inputs):
            pair = frozenset((written, other))
            may_change = any(source.startswith("arg:") or leads_to(source, places) for source in pair)
            if other != written and may_change and pair not in seen:
                seen.add(pair)
                yield Guard(source=written, kind=f"apart:{other}", expected=other not in shared)


def _sizes_text(sizes: Mapping[str, int]) -> str:
    return " and ".join(f"{name} = {size}" for name, size in sizes.items())


def _plan(spec: ModelSpec, traced: Sequence[Traced]) -> Plan:
    return Plan(
        method=spec.method,
        qualname=qualified_name(type(spec.module)),
        variants=tuple(record.variant for record in traced),
        graphs={identity: graph for record in traced for identity, graph in record.graphs.items()},
    )


def _split_out_notes(traced: Sequence[Traced]) -> Iterator[str]:
    """Yield notes on the ops that run between pieces although they are not splitting ops."""
    noted: dict[str, dict[str, None]] = {}
    for record in traced:
        for why, ops in record.split_out.items():
            noted.setdefault(why, {}).update(dict.fromkeys(ops))
    for why, found in noted.items():
        more = f" and {len(found) - _MAX_OPS_NAMED} more" if len(found) > _MAX_OPS_NAMED else ""
        yield f"{why}, so they run between pieces: {'; '.join([*found][:_MAX_OPS_NAMED])}{more}."


def _fallbacks(traced: Sequence[Traced]) -> Iterator[Fallback]:
    for index, record in enumerate(traced):
        for piece, reason in record.eager_pieces.items():
            shape = of_sizes(record.variant.fixed)
            yield Fallback(variant=index, piece_index=piece, shape=shape, adaptor=EAGER, reason=reason)
