"""Traces and splits one variant, into a record for the plan.

The record can be sent between processes: `cgtool.compiler.tracers` traces variants in children.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from cgtool.compiler import _torch
from cgtool.compiler.fitness import Fitness, fitness_of
from cgtool.compiler.narrowed import Served, narrowing_relations, served_by
from cgtool.dims import FIRST_DYNAMIC, Dims
from cgtool.errors import CgtoolError, SplitError, TraceError, first_line
from cgtool.graph._torch import share_storage
from cgtool.graph.sympy_text import expression_text
from cgtool.graph.values import tensor_meta
from cgtool.guards.signature import CallSignature
from cgtool.guards.state import current, names_for_pieces
from cgtool.host import silenced
from cgtool.model import ExampleCall, ModelSpec
from cgtool.plan.grammar import Record
from cgtool.plan.pieces import AOT_INDUCTOR, PieceGraph, SymbolRange
from cgtool.plan.records import Guard, Input, Kept, Variant
from cgtool.split.bodies import with_bodies
from cgtool.split.splitter import Call, SplitResult, split_graph
from cgtool.split.text import graph_text
from cgtool.trace.capture import Trace
from cgtool.trace.examples import arguments_for, sizes_of, variants_of
from cgtool.trace.files import UserCode, user_code
from cgtool.trace.kept import State
from cgtool.trace.outputs import place_outputs
from cgtool.trace.states import capture


class Traced(Record, frozen=True, kw_only=True):
    """One traced variant, for the plan and the report."""

    variant: Variant
    #: Identity → piece, for all pieces.
    graphs: dict[str, PieceGraph]
    #: The whole graph as text.
    computation_graph: str
    #: The sources of the model that Dynamo read.
    looked_at: tuple[str, ...]
    #: The source of each input that is written to → the sources of the inputs that share its memory.
    written: dict[str, tuple[str, ...]]
    #: The user's code that the trace depends on.
    code: UserCode
    splitting_ops: tuple[str, ...]
    #: Piece index → why the piece must run eagerly.
    eager_pieces: dict[int, str]
    #: Why ops that are not splitting ops run between pieces → these ops, with their lines.
    split_out: dict[str, tuple[str, ...]]
    #: The ranges of each dimension that the variant serves.
    served: tuple[Served, ...]
    #: Notes on sizes that the variant refuses within its ranges.
    relations: tuple[str, ...]


class Pieces:
    """Splits traces, and remembers what is known of their pieces.

    Args:
        splitting_ops: The ops to split at; None takes the default.
        splits_out: Whether to split out ops that AOTInductor's code cannot call.
    """

    def __init__(self, splitting_ops: Sequence[str] | None, *, splits_out: bool) -> None:
        self._splitting_ops = splitting_ops
        self._splits_out = splits_out
        self._known: dict[str, Fitness] = {}
        #: Identity of a piece → the calls at which its compile failed.
        self._failed: dict[str, set[Call]] = {}

    def split(self, trace: Trace) -> SplitResult:
        """Split a trace at the splitting ops, and at all ops that must be split out as far as is known."""
        return split_graph(trace.graph_module, splitting_ops=self._splitting_ops, refused=self._refused)

    def fitness(self, graph: PieceGraph) -> Fitness:
        """Return what is known of a piece, cached by its identity."""
        identity = graph.identity()
        if identity not in self._known:
            self._known[identity] = fitness_of(graph)
        return self._known[identity]

    def split_out(self, graph: PieceGraph, op: str) -> bool:
        """Record that a piece failed to compile at an op; return whether the op can run between pieces instead."""
        calls = self.fitness(graph).calls_to(op) if self._splits_out else set()
        self._failed.setdefault(graph.identity(), set()).update(calls)
        return bool(calls)

    def _refused(self, graph: PieceGraph) -> dict[Call, str]:
        known = self.fitness(graph)
        if known.eager_reason is not None:
            return {}
        refused = dict(known.split_out)
        if self._splits_out:
            uncallable = known.uncallable() | self._failed.get(graph.identity(), set())
            refused |= dict.fromkeys(uncallable, "Code of aot_inductor cannot call these ops")
        return refused


@dataclass(frozen=True, kw_only=True)
class Live:
    """A variant, with its trace if it was traced in this process."""

    record: Traced
    trace: Trace | None = None


class VariantTracer:
    """Traces the variants of one model, in one process."""

    def __init__(self, spec: ModelSpec, splitting_ops: Sequence[str] | None, adaptor: str) -> None:
        self.method = getattr(spec.module, spec.method)
        self.signature = CallSignature.of(self.method)
        self.dims = Dims.of(spec.dynamic)
        self.pieces = Pieces(splitting_ops, splits_out=adaptor == AOT_INDUCTOR)
        self.splitting_ops = splitting_ops
        self.adaptor = adaptor
        self._module = spec.module
        self._states: dict[str, tuple[State, ...]] = {}

    def trace(
        self, call: ExampleCall, fixed: Mapping[str, int], sizes: Mapping[str, int] | None = None
    ) -> tuple[Live, ...]:
        """Trace and split a variant that fixes some dimensions.

        Args:
            call: The example call.
            fixed: The dimensions to fix, with their sizes.
            sizes: The example sizes of the other dimensions; None takes the example call's.

        Returns:
            One variant for each state that calls leave the model in, the current state first.
        """
        arguments, marked = arguments_for(call, self.signature, self.dims, fixed, sizes)
        others = functools.partial(self._left_by_others, call)
        traces = capture(self._module, self.method, self.signature, arguments, marked, left_by_others=others)
        return tuple(self.split(call.name, fixed, trace) for trace in traces)

    def _left_by_others(self, call: ExampleCall) -> tuple[State, ...]:
        """Return the states that calls of this and of other sizes leave the model in, if their sizes are dynamic."""
        if call.name in self._states:
            return self._states[call.name]
        example = sizes_of(call, self.signature, self.dims)
        larger, smaller = (
            {
                name: size + step if self.dims.by_name[name].allows(size + step) else size
                for name, size in example.items()
            }
            for step in (1, -1)
        )
        with_fixed = ({**example, **fixed} for fixed in variants_of(self.dims, example) if fixed)
        found: list[State] = []
        for sizes in (example, larger, smaller, *with_fixed):
            fixed = {name: size for name, size in sizes.items() if size < FIRST_DYNAMIC}
            with contextlib.suppress(CgtoolError):
                arguments, marked = arguments_for(call, self.signature, self.dims, fixed, sizes)
                traces = capture(self._module, self.method, self.signature, arguments, marked)
                found += [replace(trace.left, sizes=sizes) for trace in traces if trace.left is not None]
            if not any(state.dynamic for state in found):
                break
        self._states[call.name] = tuple(found) if any(state.dynamic for state in found) else ()
        return self._states[call.name]

    def split(self, name: str, fixed: Mapping[str, int], trace: Trace) -> Live:
        """Split a trace into a variant."""
        split = self.pieces.split(trace)
        relations = _relations_of(trace.shape_env, split.symbol_names)
        variant = _variant(name, fixed, self.dims, trace, split, relations=relations)
        record = Traced(
            variant=variant,
            graphs={step.graph: split.graphs[step.graph] for step in split.steps},
            computation_graph=graph_text(with_bodies(trace.graph_module), split.assignment),
            looked_at=trace.looked_at,
            written=_written(trace, split),
            code=user_code(
                trace.codes,
                trace.classes,
                variables=trace.variables,
                modules=trace.asked.modules,
                distributions=trace.asked.distributions,
            ),
            splitting_ops=split.splitting_ops,
            eager_pieces=dict(self._eager_pieces(split)),
            split_out=split.apart,
            served=tuple(served_by(variant, trace.shape_env, split.symbol_names, self.dims.by_name)),
            relations=tuple(narrowing_relations(variant, relations)),
        )
        return Live(record=record, trace=trace)

    def why_not_runnable(self, call: ExampleCall, sizes: Mapping[str, int]) -> str | None:
        """Return why the model itself does not run at these sizes, tried with fake tensors; None if it does."""
        arguments, _ = arguments_for(call, self.signature, self.dims, sizes)
        try:
            with torch.no_grad(), silenced("torch._subclasses.fake_tensor"), _torch.fake_mode_of(arguments):
                self.signature.call(self.method, arguments)
        except Exception as error:  # noqa: BLE001  the model's code may raise anything
            return first_line(error) or type(error).__name__
        return None

    def _eager_pieces(self, split: SplitResult) -> Iterator[tuple[int, str]]:
        """Yield the pieces that must run eagerly, with the reason."""
        yield from split.eager_pieces.items()
        for step in split.steps:
            if not step.splitting and step.piece not in split.eager_pieces:
                reason = self.pieces.fitness(split.graphs[step.graph]).eager_reason
                if reason is not None:
                    yield step.piece, reason


def _relations_of(shape_env: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the trace's guards on sizes that ranges do not imply: text → torch's SLoc of where it was added.

    Dynamo's guard filter has no value for SHAPE_ENV, so the guards come from the ShapeEnv itself.

    Raises:
        TraceError: A plan cannot express a relation, or it depends on a number that no input carries.
    """
    found: dict[str, Any] = {}
    for guard in shape_env.guards:
        expr = shape_env.simplify(shape_env.replace(guard.expr))
        if expr == sympy.true or _is_bound(expr):
            continue
        unknown = sorted(s.name for s in expr.free_symbols if s.name not in names)
        if unknown:
            msg = (
                f"This model depends on {guard.expr}, in which {', '.join(unknown)} is not a size of any input of the "
                f"graph ({guard.sloc}). Pass it in as a size, or make it constant."
            )
            raise TraceError(msg, actual=str(guard.expr))
        try:
            found.setdefault(expression_text(expr, names), guard.sloc)
        except SplitError as error:
            msg = (
                f"This model depends on {guard.expr}, which a plan cannot express ({error}). Simplify it at "
                f"{guard.sloc}."
            )
            raise TraceError(msg, actual=str(guard.expr)) from error
    return found


def _is_bound(expr: Any) -> bool:
    """Return whether `expr` compares one symbol with a number, which the symbol's range includes already."""
    if not isinstance(expr, (sympy.Le, sympy.Lt, sympy.Ge, sympy.Gt)):
        return False
    return any(a.is_Symbol and b.is_Integer for a, b in (expr.args, expr.args[::-1]))


def _variant(
    name: str, fixed: Mapping[str, int], dims: Dims, trace: Trace, split: SplitResult, *, relations: Iterable[str]
) -> Variant:
    metas = [tensor_meta(value, split.symbol_names) for value in _tensors(trace)]
    inputs = tuple(Input(source=s, meta=m) for s, m in zip(trace.input_sources, metas, strict=True))
    by_source = {given.source: given.meta for given in inputs}
    named: dict[str, dict[str, None]] = {}
    for dim_name, source, dim in trace.dims:
        named.setdefault(dim_name, {})[str(by_source[source].shape[dim])] = None
    known = {symbol.name for symbol in split.symbols}
    # guards on settings that decide what is compiled, such as which kernels attention may use
    compiled = dict.fromkeys(step.graph for step in split.steps if not step.splitting)
    settings = names_for_pieces(split.graphs[identity] for identity in compiled)
    states = [Guard(source=f"state:{name}", kind="state", expected=current(name)) for name in settings]
    return Variant(
        name=name,
        fixed=dict(fixed),
        dims={dim: tuple(text for text in texts if text in known) for dim, texts in named.items()},
        symbols=tuple(_bounded(symbol, named, dims) for symbol in split.symbols),
        relations=(*relations, *split.relations_from_data),
        inputs=inputs,
        model_guards=trace.model_guards,
        settled=trace.settled,
        kept=tuple(
            Kept(place=place, value=place_outputs(template, split.outputs, by_source))
            for place, template in trace.kept.items()
        ),
        calls_before=trace.state.calls,
        sizes_before=None if trace.state.sizes is None else dict(trace.state.sizes),
        call_guards=(*trace.call_guards, *states),
        steps=split.steps,
        output=place_outputs(trace.output, split.outputs, by_source),
    )


def _written(trace: Trace, split: SplitResult) -> dict[str, tuple[str, ...]]:
    """Return the sources of the inputs that are written to, each with the sources that share its memory."""
    inputs = list(zip(trace.input_sources, _tensors(trace), strict=True))
    return {
        inputs[place][0]: tuple(
            source
            for other, (source, tensor) in enumerate(inputs)
            if other != place and share_storage(inputs[place][1], tensor)
        )
        for place in split.mutated_inputs
    }


def _tensors(trace: Trace) -> list[Any]:
    """Return the fake tensors that are the graph's inputs."""
    values = (node.meta["example_value"] for node in trace.graph_module.graph.find_nodes(op="placeholder"))
    return [value for value in values if hasattr(value, "stride")]


def _bounded(symbol: SymbolRange, named: Mapping[str, Mapping[str, Any]], dims: Dims) -> SymbolRange:
    """Return a symbol with its range narrowed to the declared ranges of its dimensions."""
    for name, texts in named.items():
        if symbol.name in texts:
            symbol = symbol.within(dims.by_name[name].min, dims.by_name[name].max)
    return symbol
