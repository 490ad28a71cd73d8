"""A variant's stitched program as one straight-line Python function.

The function takes the tensors of a call, the values of the symbols, the objects that the output passes through, the
model's tensors and a function for each compiled piece. It runs the steps in order, forgets each value after its last
use and puts the output together. It keeps nothing between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from cgtool.errors import ArtifactError
from cgtool.graph.expressions import rename
from cgtool.graph.metas import dtype_of
from cgtool.plan.pieces import Dim, PieceGraph, TensorMeta
from cgtool.plan.records import Step, Variant
from cgtool.plan.tables import Graphs
from cgtool.runtime.call_guards import strides_matter
from cgtool.runtime.dispatch import Boxed
from cgtool.runtime.generate import Code, expression, malformed, template_needs, template_source, tuple_source
from cgtool.runtime.pieces import op_names

#: (call tensors, symbol values, passed objects, model tensors, piece functions) → the model's output
Program = Callable[[Any, Any, Any, Any, Any], Any]


def build_program(
    variant: Variant,
    graphs: Mapping[str, PieceGraph],
    *,
    symbols: tuple[str, ...],
    call_inputs: Sequence[int],
    weights: Sequence[int],
    passed: Sequence[str],
    eager: Mapping[str, Boxed],
) -> Program:
    """Return the function that runs `variant`.

    Args:
        variant: The variant.
        graphs: The plan's graphs by identity.
        symbols: The variant's symbols, checked.
        call_inputs: Positions of the inputs that come with a call, in the order in which they are handed over.
        weights: Positions of the inputs that come from the model.
        passed: Sources of objects that are handed over for the output.
        eager: The functions of the splitting pieces, by the identity of their graph.

    Raises:
        ArtifactError: The variant holds something outside its grammar.
    """
    return _Writer(variant, graphs, symbols, eager).function(call_inputs, weights, passed)


def compiled_steps(variant: Variant) -> list[Step]:
    """Return the steps that need a compiled piece, in order."""
    return [step for step in variant.steps if not step.splitting and step.piece >= 0]


def check_steps(variant: Variant, graphs: Mapping[str, PieceGraph], symbols: tuple[str, ...]) -> None:
    """Check that each step fits its graph, takes tensors of its make, and speaks of the variant's symbols only.

    Native code looks at no tensor that it is given: one of another make would be read past its end.

    Raises:
        ArtifactError: A step does not.
    """
    metas = {value: item.meta for value, item in enumerate(variant.inputs)}
    for step in variant.steps:
        if step.graph not in graphs:
            raise malformed("graph of the plan", step.graph)
        graph = _face(graphs, step.graph)
        if len(graph.inputs) != len(step.inputs) or not len(graph.outputs) == len(graph.results) == len(step.outputs):
            raise malformed("step", repr(step))
        if {symbol.name for symbol in graph.symbols} - set(step.symbols):
            raise malformed("step", repr(step))
        for value, meta in zip(step.inputs, graph.inputs, strict=True):
            if value not in metas or not _may_be(metas[value], meta):
                raise malformed("input of a step", repr(step))
        metas.update(zip(step.outputs, graph.results, strict=True))
        for text in step.symbols.values():
            expression(text, symbols)


def _may_be(one: TensorMeta, other: TensorMeta) -> bool:
    """Return whether two records may be of one tensor, each over symbols of its own; strides are not looked at."""
    if one is other:
        return True
    if (one.dtype, one.device, len(one.shape)) != (other.dtype, other.device, len(other.shape)):
        return False
    sizes = zip(one.shape, other.shape, strict=True)
    return all(left == right or type(left) is type(right) is str for left, right in sizes)


def _face(graphs: Mapping[str, PieceGraph], identity: str) -> PieceGraph:
    """Return a graph with the inputs, outputs, symbols and ops of the one of that identity; it may lack constants."""
    return graphs.parts_of(identity)[1] if isinstance(graphs, Graphs) else graphs[identity]


class _Writer:
    def __init__(
        self, variant: Variant, graphs: Mapping[str, PieceGraph], symbols: tuple[str, ...], eager: Mapping[str, Boxed]
    ) -> None:
        self.variant = variant
        self.graphs = graphs
        self.symbols = symbols
        self.eager = eager
        self.code = Code(f"program of {len(variant.steps)} steps")
        self.defined = set(range(len(variant.inputs)))
        self.of_model: frozenset[int] = frozenset()
        #: line → (step, how many outputs it has): where a piece that returns another number of tensors is noticed
        self.unpacked: dict[int, tuple[Step, int]] = {}
        self.num_compiled = 0
        #: By the id of a graph, which the plan keeps alive.
        self.repairers: dict[int, Callable[..., torch.Tensor]] = {}

    def function(self, call_inputs: Sequence[int], weights: Sequence[int], passed: Sequence[str]) -> Program:
        code = self.code
        needed, _ = template_needs(self.variant.output, self.symbols)
        dying = self._last_uses(needed)
        self.of_model = frozenset(weights)
        code.add("try:")
        code.depth += 1
        self._unpack([f"v{i}" for i in call_inputs], "tensors")
        self._unpack(list(self.symbols), "sizes")
        self._unpack([f"o{i}" for i in range(len(passed))], "passed")
        self._unpack([f"v{i}" for i in weights], "weights")
        self._unpack([f"t{i}" for i in range(len(compiled_steps(self.variant)))], "table")
        code.add("del tensors, weights")
        self._forget(dying.get(-1, ()))
        for index, step in enumerate(self.variant.steps):
            self._step(step, dying.get(index, []))
        objects = {source: f"o{i}" for i, source in enumerate(passed)}
        # An input that the output passes through is the very object that was passed in.
        objects.update((item.source, f"v{i}") for i, item in enumerate(self.variant.inputs))
        output = template_source(
            self.variant.output,
            code,
            symbols=self.symbols,
            value=self._local,
            source=lambda text: _look_up(objects, text),
        )
        code.add(f"return {output}")
        code.depth -= 1
        code.add(f"except {code.constant(ValueError)} as error:")
        code.depth += 1
        code.add(f"{code.constant(_refuse_count(self.unpacked, self.graphs))}(error)")
        code.add("raise")
        return code.define_later("program", ["tensors", "sizes", "passed", "weights", "table"])

    def _unpack(self, names: list[str], whole: str) -> None:
        if names:
            self.code.add(f"{tuple_source(names)} = {whole}")

    def _last_uses(self, needed: Iterable[Any]) -> dict[int, list[int]]:
        """Return step index → values that nothing needs after that step (-1: that no step needs)."""
        last = dict.fromkeys(range(len(self.variant.inputs)), -1)
        for index, step in enumerate(self.variant.steps):
            last.update(dict.fromkeys((*step.inputs, *step.outputs), index))
        passed = {item.source: i for i, item in enumerate(self.variant.inputs)}
        _, sources = template_needs(self.variant.output, self.symbols)
        for value in (*needed, *(passed[source] for source in sources if source in passed)):
            last.pop(value, None)
        dying: dict[int, list[int]] = {}
        for value, index in last.items():
            dying.setdefault(index, []).append(value)
        return dying

    def _step(self, step: Step, dying: Sequence[int]) -> None:
        code = self.code
        graph = _face(self.graphs, step.graph)
        code.add(f"args = [{', '.join(self._local(value) for value in step.inputs)}]")
        # The list is then the only one that holds them, and the piece empties it: memory is free as soon as it can be.
        self._forget(value for value in dict.fromkeys(step.inputs) if value in dying)
        callee = self._callee(step)
        outputs = [self._new(value) for value in step.outputs]
        self.unpacked[code.next_line] = step, len(outputs)
        code.add(f"{tuple_source(outputs)} = {callee}(args)")
        if step.splitting:
            for name, meta in zip(outputs, graph.results, strict=True):
                self._check(name, meta, step, graph)
        self._forget(value for value in step.outputs if value in dying)

    def _callee(self, step: Step) -> str:
        if step.splitting or step.piece < 0:
            return self.code.constant(self.eager[step.graph])
        self.num_compiled += 1
        return f"t{self.num_compiled - 1}"

    def _check(self, name: str, meta: TensorMeta, step: Step, graph: PieceGraph) -> None:
        """Compare an op's output with what its fake implementation promised the pieces that come after it."""
        code = self.code
        shape = tuple_source(self._size(size, step) for size in meta.shape)
        stride = tuple_source(self._size(size, step) for size in meta.stride)
        dtype = code.constant(dtype_of(meta.dtype))
        if id(graph) not in self.repairers:
            self.repairers[id(graph)] = _repairer(graph)
        repair = code.constant(self.repairers[id(graph)])
        test = f"{name}.stride() != {stride} or {name}.shape != {shape} or {name}.dtype is not {dtype}"
        code.add(f"if {test}: {name} = {repair}({name}, {dtype}, {shape}, {stride})")

    def _size(self, size: Dim, step: Step) -> str:
        if type(size) is not str:
            return expression(size, ())
        return expression(rename(size, step.symbols), self.symbols)

    def _local(self, value: Any) -> str:
        if type(value) is not int or value not in self.defined:
            raise malformed("value", value)
        return f"v{value}"

    def _new(self, value: Any) -> str:
        if type(value) is not int or value < 0 or value in self.defined:
            raise malformed("value", value)
        self.defined.add(value)
        return f"v{value}"

    def _forget(self, values: Iterable[int]) -> None:
        # Those of the model live on in it whatever is forgotten here.
        names = [f"v{value}" for value in values if value not in self.of_model]
        if names:
            self.code.add("del " + ", ".join(names))


def _look_up(objects: Mapping[str, str], text: str) -> str:
    if text not in objects:
        raise malformed("source", text)
    return objects[text]


def _refuse_count(
    unpacked: Mapping[int, tuple[Step, int]], graphs: Mapping[str, PieceGraph]
) -> Callable[[ValueError], None]:
    def refuse(error: ValueError) -> None:
        """Raise where the program itself could not unpack what a piece returned; an op's own error goes on."""
        trace = error.__traceback__
        if trace is None or trace.tb_next is not None or "values to unpack" not in str(error):
            return
        if trace.tb_lineno not in unpacked:
            return
        step, expected = unpacked[trace.tb_lineno]
        calls = ", ".join(op_names(graphs[step.graph])[:4])
        msg = (
            f"Piece {step.piece} ({calls}) did not return the {expected} tensors of its graph ({error}): "
            "the artifact is not this piece's. Warm again."
        )
        raise ArtifactError(msg, path=step.piece, expected=expected) from None

    return refuse


def _repairer(graph: PieceGraph) -> Callable[..., torch.Tensor]:
    def repair(value: Any, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        """Return `value` with the promised strides, which compiled pieces rely on without looking."""
        if value.dtype is not dtype or tuple(value.shape) != shape:
            have = f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
            want = f"{str(dtype).removeprefix('torch.')} of shape {shape}"
            ops = ", ".join(op_names(graph))
            msg = f"{ops} returned a tensor of {have}, and its fake implementation promised {want}: make the two agree."
            raise ArtifactError(msg, path=ops, expected=want, actual=have)
        if not strides_matter(value, stride):
            return value  # type: ignore[no-any-return]  # what has a dtype is a tensor
        placed = torch.empty_strided(shape, stride, dtype=dtype, device=value.device)
        return placed.copy_(value)

    return repair
