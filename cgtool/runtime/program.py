"""Generate a variant's stitched program as a straight-line Python function.

A program takes the tensors of a call, the values of the symbols, the objects that the output passes through, the
model's tensors and a function for each compiled piece. It runs the steps in order, releases each value after its last
use and builds the output. It keeps no state between calls. Pieces that are never compiled run op by op
(`cgtool.runtime.op_by_op`). A size that a splitting piece finds in data is a symbol for the steps that follow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from cgtool.errors import ArtifactError, GuardError
from cgtool.graph.expressions import rename, symbols_of
from cgtool.graph.values import dtype_of
from cgtool.plan.pieces import Dim, Graphs, PieceGraph, TensorMeta
from cgtool.plan.records import Step, Variant
from cgtool.runtime.call_guards import SYMBOL, with_sizes_from_data
from cgtool.runtime.dispatch import Boxed
from cgtool.runtime.generate import (
    Code,
    check_line,
    expression,
    malformed,
    op_names,
    repairer,
    template_needs,
    template_source,
    tuple_source,
)

#: (call tensors, symbol values, passed objects, model tensors, piece functions) → the model's output
Program = Callable[[Any, Any, Any, Any, Any], Any]


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A compiled piece of a variant.

    Args:
        name: The piece's name in error messages.
        dynamic_dims: Names of the dimensions of its inputs that change from call to call.
        is_static: Whether the variant covers a single size, so that no piece has a dynamic dimension.
        returned_by_ops: Position → op, for the inputs that splitting ops return. Their addresses change from call to
            call, unlike those of tensors that a piece allocated and an op wrote into.
    """

    name: str
    dynamic_dims: tuple[str, ...]
    is_static: bool = False
    returned_by_ops: Mapping[int, str]


#: Takes a piece and its function, and returns the function to call instead.
WrapPiece = Callable[[Piece, Boxed], Boxed]


def pieces_of(variant: Variant, graphs: Mapping[str, PieceGraph]) -> list[Piece]:
    """Return the compiled pieces of a variant in the order of its steps."""
    names = variant.dim_of
    returned: dict[int, str] = {}
    pieces = []
    for step in variant.steps:
        graph = graphs[step.graph]
        if step.splitting:
            returned |= dict.fromkeys(step.outputs, ", ".join(op_names(graph)[:2]))
            continue
        symbols = (symbol for text in step.symbols.values() for symbol in symbols_of(text))
        pieces.append(
            Piece(
                name=f"piece {step.piece}",
                dynamic_dims=tuple(dict.fromkeys(names.get(symbol, symbol) for symbol in symbols)),
                is_static=not variant.symbols and not step.symbols,
                returned_by_ops={i: returned[value] for i, value in enumerate(step.inputs) if value in returned},
            )
        )
    return pieces


def check_steps(variant: Variant, graphs: Graphs, symbols: tuple[str, ...]) -> None:
    """Check that each step matches its graph, takes tensors of the right kind, and uses only the variant's symbols.

    Native code does not check its inputs: it would read a tensor of a different dtype or shape past its end.

    Raises:
        ArtifactError: A step is inconsistent.
    """
    metas = {value: item.meta for value, item in enumerate(variant.inputs)}
    known = symbols
    for step in variant.steps:
        if step.graph not in graphs:
            raise malformed("graph", step.graph)
        graph = graphs.parts_of(step.graph)[1]
        if len(graph.inputs) != len(step.inputs) or not len(graph.outputs) == len(graph.results) == len(step.outputs):
            raise malformed("step", repr(step))
        if {symbol.name for symbol in graph.symbols} - set(step.symbols):
            raise malformed("step", repr(step))
        for value, meta in zip(step.inputs, graph.inputs, strict=True):
            if value not in metas or not _are_compatible(metas[value], meta):
                raise malformed("input of a step", repr(step))
        metas.update(zip(step.outputs, graph.results, strict=True))
        for text in step.symbols.values():
            if step.splitting and text not in known and re.fullmatch(SYMBOL, text):
                known = (*known, text)  # a size from data is a symbol for the steps that follow
            expression(text, known)
    for text in variant.relations:
        expression(text, known)


def _are_compatible(left: TensorMeta, right: TensorMeta) -> bool:
    """Return whether two records can describe the same tensor over different symbols. Strides are not compared."""
    if left is right:
        return True
    if (left.dtype, left.device, len(left.shape)) != (right.dtype, right.device, len(right.shape)):
        return False
    return all(a == b or type(a) is type(b) is str for a, b in zip(left.shape, right.shape, strict=True))


class ProgramWriter:
    """Generates the function that runs a variant.

    Args:
        variant: The variant.
        graphs: The plan's graphs by identity.
        symbols: The variant's symbols, already checked.
        eager: The functions of the splitting pieces, by the identity of their graph.
    """

    def __init__(self, variant: Variant, graphs: Graphs, symbols: tuple[str, ...], eager: Mapping[str, Boxed]) -> None:
        self.variant = variant
        self.graphs = graphs
        self.symbols = symbols
        self.eager = eager
        known = {item.source: i for i, item in enumerate(variant.inputs)}
        needed, sources = template_needs(variant.given, with_sizes_from_data(variant, symbols))
        #: The values that the output uses.
        self.needed = {*needed, *(known[source] for source in sources if source in known)}
        #: The sources of the objects in the output that are not inputs.
        self.passed = [source for source in sources if source not in known]
        self.relations = [text for text in variant.relations if not set(symbols_of(text)) <= set(symbols)]
        self.code = Code(f"program of {len(variant.steps)} steps")
        self.defined = set(range(len(variant.inputs)))
        self.of_model: frozenset[int] = frozenset()
        #: Line → (step, number of outputs): the lines that fail if a piece returns a different number of tensors.
        self.unpacked: dict[int, tuple[Step, int]] = {}
        self.num_compiled = 0
        #: (id of a graph, id of its symbols) → the sources of the expected dtype, shape, stride and repair function of
        #: each output. The plan keeps the objects alive.
        self.expected_outputs: dict[tuple[int, int], list[tuple[str, str, str, str] | None]] = {}

    def function(self, call_inputs: Sequence[int], weights: Sequence[int]) -> Program:
        """Return the function.

        Args:
            call_inputs: Positions of the inputs that come from the call, in the order in which they are passed.
            weights: Positions of the inputs that come from the model.

        Raises:
            ArtifactError: The variant violates its grammar.
        """
        code = self.code
        dying = self._last_uses()
        self.of_model = frozenset(weights)
        code.add("try:")
        code.depth += 1
        self._unpack([f"v{i}" for i in call_inputs], "tensors")
        self._unpack(list(self.symbols), "sizes")
        self._unpack([f"o{i}" for i in range(len(self.passed))], "passed")
        self._unpack([f"v{i}" for i in weights], "weights")
        self._unpack([f"t{i}" for i in range(sum(not step.splitting for step in self.variant.steps))], "table")
        code.add("del tensors, weights")
        self._forget(dying.get(-1, ()))
        for index, step in enumerate(self.variant.steps):
            self._step(step, dying.get(index, []))
        objects = {source: f"o{i}" for i, source in enumerate(self.passed)}
        # An input that the output passes through must be the same object.
        objects.update((item.source, f"v{i}") for i, item in enumerate(self.variant.inputs))
        output = template_source(
            self.variant.given,
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

    def _last_uses(self) -> dict[int, list[int]]:
        """Return step index → values that are not needed after that step (-1: values that no step needs)."""
        last = dict.fromkeys(range(len(self.variant.inputs)), -1)
        for index, step in enumerate(self.variant.steps):
            last.update(dict.fromkeys((*step.inputs, *step.outputs), index))
        for value in self.needed:
            last.pop(value, None)
        dying: dict[int, list[int]] = {}
        for value, index in last.items():
            dying.setdefault(index, []).append(value)
        return dying

    def _step(self, step: Step, dying: Sequence[int]) -> None:
        code = self.code
        graph = self.graphs.parts_of(step.graph)[1]
        code.add(f"args = [{', '.join(self._local(value) for value in step.inputs)}]")
        # Then only the list holds the inputs, and the piece empties it, so memory is freed as early as possible.
        self._forget(value for value in dict.fromkeys(step.inputs) if value in dying)
        callee = self._callee(step)
        outputs = [self._new(value) for value in step.outputs]
        self.unpacked[code.next_line] = step, len(outputs)
        code.add(f"{tuple_source(outputs)} = {callee}(args)")
        if step.splitting:
            self._read_new_sizes(outputs, step, graph)
            # The pieces that follow rely on the outputs that the fake implementation promised.
            for name, expected in zip(outputs, self._expected_outputs(step, graph), strict=True):
                if expected is not None:
                    code.add(check_line(name, *expected))
        self._forget(value for value in step.outputs if value in dying)

    def _callee(self, step: Step) -> str:
        if step.splitting:
            return self.code.constant(self.eager[step.graph])
        self.num_compiled += 1
        return f"t{self.num_compiled - 1}"

    def _read_new_sizes(self, outputs: Sequence[str], step: Step, graph: PieceGraph) -> None:
        """Read the sizes that the step found in data from its outputs, and check what the trace assumed about them."""
        new: dict[str, str] = {}
        for output, meta in zip(outputs, graph.results, strict=True):
            for dim, size in enumerate(meta.shape):
                symbol = step.symbols.get(size) if type(size) is str else None
                if symbol is not None and symbol not in self.symbols and re.fullmatch(SYMBOL, symbol):
                    self.code.add(f"{symbol} = {output}.size({dim})")
                    self.symbols = (*self.symbols, symbol)
                    new[str(size)] = symbol
        if not new:
            return
        bounds = [(new[symbol.name], symbol) for symbol in graph.symbols if symbol.name in new]
        texts = [f"{name} >= {symbol.min}" for name, symbol in bounds if symbol.min]
        texts += [f"{name} <= {symbol.max}" for name, symbol in bounds if symbol.max is not None]
        texts += [t for t in self.relations if not set(new.values()).isdisjoint(symbols_of(t))]
        ops = ", ".join(op_names(graph)[:4])
        for text in texts:
            if set(symbols_of(text)) <= set(self.symbols):
                sizes = tuple_source(symbols_of(text))
                refuse = self.code.constant(_refuse_sizes(text, symbols_of(text), ops))
                self.code.add(f"if not {expression(text, self.symbols)}: {refuse}({sizes})")

    def _expected_outputs(self, step: Step, graph: PieceGraph) -> list[tuple[str, str, str, str] | None]:
        """Return the arguments of `check_line` for a step's outputs, shared by steps of equal layers.

        An output is None if one of its sizes comes from data and cannot be read from a tensor: no compiled piece relies
        on such a size.
        """
        key = id(graph), id(step.symbols)
        if key not in self.expected_outputs:
            constant, repair = self.code.constant, self.code.constant(repairer(graph))
            self.expected_outputs[key] = [
                (
                    constant(dtype_of(meta.dtype)),
                    tuple_source(self._size(size, step) for size in meta.shape),
                    tuple_source(self._size(size, step) for size in meta.stride),
                    repair,
                )
                if self._is_known(meta, step)
                else None
                for meta in graph.results
            ]
        return self.expected_outputs[key]

    def _is_known(self, meta: TensorMeta, step: Step) -> bool:
        dims = (rename(dim, step.symbols) for dim in meta.dims)
        return all(symbol in self.symbols for dim in dims for symbol in symbols_of(dim))

    def _size(self, size: Dim, step: Step) -> str:
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
        # The model keeps its own tensors alive, so deleting them here would free nothing.
        names = [f"v{value}" for value in values if value not in self.of_model]
        if names:
            self.code.add("del " + ", ".join(names))


def _refuse_sizes(text: str, symbols: Sequence[str], ops: str) -> Callable[[tuple[int, ...]], None]:
    def refuse(sizes: tuple[int, ...]) -> None:
        """Raise because the following pieces were not compiled for the sizes found in data."""
        values = " and ".join(f"{symbol} = {size}" for symbol, size in zip(symbols, sizes, strict=True))
        msg = (
            f"{ops} found sizes in the data of this call ({values}) that the model was not compiled for: it requires "
            f"{text}. Warm the model with an example like this call, or pass otherwise='eager'."
        )
        raise GuardError(msg, path=ops, expected=text, actual=dict(zip(symbols, sizes, strict=True)))

    return refuse


def _look_up(objects: Mapping[str, str], text: str) -> str:
    if text not in objects:
        raise malformed("source", text)
    return objects[text]


def _refuse_count(
    unpacked: Mapping[int, tuple[Step, int]], graphs: Mapping[str, PieceGraph]
) -> Callable[[ValueError], None]:
    def refuse(error: ValueError) -> None:
        """Raise if a piece returned the wrong number of tensors; return for a ValueError from an op."""
        trace = error.__traceback__
        if trace is None or trace.tb_next is not None or "values to unpack" not in str(error):
            return
        if trace.tb_lineno not in unpacked:
            return
        step, expected = unpacked[trace.tb_lineno]
        calls = ", ".join(op_names(graphs[step.graph])[:4])
        msg = (
            f"Piece {step.piece} ({calls}) did not return the {expected} tensors of its graph ({error}). "
            "Its artifact belongs to another piece. Warm the model again."
        )
        raise ArtifactError(msg, path=step.piece, expected=expected) from None

    return refuse
