"""A variant's stitched program, and the pieces that run op by op, as straight-line Python functions.

A program takes the tensors of a call, the values of the symbols, the objects that the output passes through, the
model's tensors and a function for each compiled piece. It runs the steps in order, forgets a value after its last use
and puts the output together. It keeps nothing between calls. Splitting pieces, and every piece of the `eager` adaptor,
run op by op with torch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from cgtool.errors import ArtifactError
from cgtool.graph.expressions import rename, symbols_of
from cgtool.graph.targets import ATTRIBUTES, check_method, resolve_target
from cgtool.graph.values import decode_value, device_of, dtype_of, refs_of
from cgtool.plan.pieces import Dim, Graphs, Json, Node, PieceGraph, TensorMeta
from cgtool.plan.records import Step, Variant
from cgtool.runtime.dispatch import Boxed
from cgtool.runtime.generate import (
    Code,
    check_identifier,
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


def compiled_steps(variant: Variant) -> list[Step]:
    """Return the steps that need a compiled piece, in order."""
    return [step for step in variant.steps if not step.splitting and step.piece >= 0]


def check_steps(variant: Variant, graphs: Graphs, symbols: tuple[str, ...]) -> None:
    """Check that each step fits its graph, takes tensors of its make, and speaks of the variant's symbols only.

    Native code looks at no tensor that it is given: one of another make would be read past its end.

    Raises:
        ArtifactError: A step does not.
    """
    metas = {value: item.meta for value, item in enumerate(variant.inputs)}
    for step in variant.steps:
        if step.graph not in graphs:
            raise malformed("graph of the plan", step.graph)
        graph = graphs.parts_of(step.graph)[1]
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


class ProgramWriter:
    """Writes the function that runs a variant.

    Args:
        variant: The variant.
        graphs: The plan's graphs by identity.
        symbols: The variant's symbols, checked.
        eager: The functions of the splitting pieces, by the identity of their graph.
    """

    def __init__(self, variant: Variant, graphs: Graphs, symbols: tuple[str, ...], eager: Mapping[str, Boxed]) -> None:
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
        #: By the ids of a graph and of symbols, which the plan keeps alive: how dtype, shape and stride of each
        #: output are written, and what repairs it.
        self.makes: dict[tuple[int, int], list[tuple[str, str, str, str]]] = {}

    def function(self, call_inputs: Sequence[int], weights: Sequence[int], passed: Sequence[str]) -> Program:
        """Return the function.

        Args:
            call_inputs: Positions of the inputs that come with a call, in the order in which they are handed over.
            weights: Positions of the inputs that come from the model.
            passed: Sources of objects that are handed over for the output.

        Raises:
            ArtifactError: The variant holds something outside its grammar.
        """
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
        graph = self.graphs.parts_of(step.graph)[1]
        code.add(f"args = [{', '.join(self._local(value) for value in step.inputs)}]")
        # The list is then the only one that holds them, and the piece empties it: memory is free as soon as it can be.
        self._forget(value for value in dict.fromkeys(step.inputs) if value in dying)
        callee = self._callee(step)
        outputs = [self._new(value) for value in step.outputs]
        self.unpacked[code.next_line] = step, len(outputs)
        code.add(f"{tuple_source(outputs)} = {callee}(args)")
        if step.splitting:
            # Compare each with what its fake implementation promised the pieces that come after it.
            for name, make in zip(outputs, self._makes(step, graph), strict=True):
                code.add(check_line(name, *make))
        self._forget(value for value in step.outputs if value in dying)

    def _callee(self, step: Step) -> str:
        if step.splitting or step.piece < 0:
            return self.code.constant(self.eager[step.graph])
        self.num_compiled += 1
        return f"t{self.num_compiled - 1}"

    def _makes(self, step: Step, graph: PieceGraph) -> list[tuple[str, str, str, str]]:
        """Return what is written of the makes of a step's outputs; steps of equal layers share it."""
        key = id(graph), id(step.symbols)
        if key not in self.makes:
            constant, repair = self.code.constant, self.code.constant(repairer(graph))
            self.makes[key] = [
                (
                    constant(dtype_of(meta.dtype)),
                    tuple_source(self._size(size, step) for size in meta.shape),
                    tuple_source(self._size(size, step) for size in meta.stride),
                    repair,
                )
                for meta in graph.results
            ]
        return self.makes[key]

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


_ENTER = "torch.amp.autocast_mode._enter_autocast"
#: Of a value's number.
_MOST_DIGITS = 9
_EXIT = "torch.amp.autocast_mode._exit_autocast"


def piece_function(graph: PieceGraph, *, device_index: int | None = None) -> Boxed:
    """Return a function that runs `graph` with torch alone.

    Args:
        graph: Any piece, compiled or splitting.
        device_index: What a device without an index means ("cuda" → "cuda:1"); None: the current device.

    Returns:
        A boxed function: takes a list of tensors, which it empties, and returns a list of the graph's outputs. Several
        threads may call it at once.

    Raises:
        ArtifactError: The graph holds something outside its grammar, or an op that this process does not have.
    """
    return piece_maker(graph, device_index=device_index)()


def promised_function(graph: PieceGraph, *, device_index: int | None = None) -> Boxed:
    """Return `piece_function(graph)`, whose outputs are of the make that the trace promised whatever its ops give.

    The pieces that come after it were compiled for that, and do not look.

    Args:
        graph: A piece that runs as it stands in a compiled one's place.
        device_index: As for `piece_function`.

    Raises:
        ArtifactError: As `piece_function`; the function itself, where an op gives another shape or dtype than promised.
    """
    return _PieceWriter(graph, device_index, 0, keeps_promise=True).maker()()


def piece_maker(graph: PieceGraph, *, num_holes: int = 0, device_index: int | None = None) -> Callable[..., Boxed]:
    """Return a function that makes the function of a piece, as `piece_function` does, from the values of its holes.

    Args:
        graph: Any piece; `{"hole": n}` may stand in its arguments, see `cgtool.plan.pieces`.
        num_holes: How many holes it has.
        device_index: As for `piece_function`.

    Raises:
        ArtifactError: As `piece_function`.
    """
    return _PieceWriter(graph, device_index, num_holes).maker()


class _PieceWriter:
    def __init__(
        self, graph: PieceGraph, device_index: int | None, num_holes: int, *, keeps_promise: bool = False
    ) -> None:
        self.graph = graph
        self.keeps_promise = keeps_promise
        self.num_holes = num_holes
        self.device_index = device_index
        self.code = Code("piece")
        self.num_inputs = len(graph.inputs)
        self.defined = self.num_inputs
        self.enters = any(node.target == _ENTER for node in graph.nodes)

    def maker(self) -> Callable[..., Boxed]:
        graph, code = self.graph, self.code
        code.add("def piece(args):")
        code.depth += 1
        dying = self._last_uses()
        names = [f"v{i}" for i in range(self.num_inputs)]
        code.add(f"{tuple_source(names)} = args" if names else "pass")
        code.add(f"{code.constant(list.clear)}(args)")
        sizes = self._read_sizes() if self.keeps_promise else {}
        if self.enters:
            code.add("entered = []")
            code.add("try:")
            code.depth += 1
        self._forget(dying.get(-1, ()))
        for index, node in enumerate(graph.nodes):
            self._node(node, used=index not in dying.get(index, ()))
            self.defined += 1
            self._forget(dying.get(index, ()), but=index)
        if self.keeps_promise:
            repair, known = code.constant(repairer(graph)), tuple(sizes.values())
            for ref, meta in dict(zip(graph.outputs, graph.results, strict=True)).items():
                dims = [*meta.shape, *meta.stride]
                if any(name not in sizes for dim in dims if isinstance(dim, str) for name in symbols_of(dim)):
                    continue  # a size that no input shows
                shape, stride = (
                    tuple_source(expression(rename(d, sizes) if isinstance(d, str) else d, known) for d in part)
                    for part in (meta.shape, meta.stride)
                )
                code.add(check_line(self._local(ref), code.constant(dtype_of(meta.dtype)), shape, stride, repair))
        code.add(f"return [{', '.join(self._local(ref) for ref in graph.outputs)}]")
        if self.enters:
            code.depth -= 1
            code.add(f"finally: {code.constant(_leave)}(entered)")
        code.depth -= 1
        code.add("return piece")
        return code.define("make", [f"h{n}" for n in range(self.num_holes)])

    def _read_sizes(self) -> dict[str, str]:
        """Read the symbols off the inputs' dimensions; return what each is called in the function."""
        names: dict[str, str] = {}
        symbols = {symbol.name for symbol in self.graph.symbols}
        for position, meta in enumerate(self.graph.inputs):
            for dim, size in enumerate(meta.shape):
                if size in symbols and size not in names:
                    names[str(size)] = f"n{len(names)}"
                    self.code.add(f"{names[str(size)]} = v{position}.size({dim})")
        return names

    def _last_uses(self) -> dict[int, list[int]]:
        """Return node index → values (as node indices, inputs negative past -1) that nothing needs after it."""
        last = dict.fromkeys(range(self.num_inputs), -1)
        for index, node in enumerate(self.graph.nodes):
            last[self.num_inputs + index] = index
            for data in (*node.args, *node.kwargs.values()):
                last.update((_ref_number(ref), index) for ref in refs_of(_plugged(data)))
        for ref in self.graph.outputs:
            last.pop(_ref_number(ref), None)
        dying: dict[int, list[int]] = {}
        for value, index in last.items():
            dying.setdefault(index, []).append(value - self.num_inputs)
        return dying

    def _forget(self, values: Iterable[int], but: int | None = None) -> None:
        names = [f"v{value + self.num_inputs}" for value in values if value != but]
        if names:
            self.code.add("del " + ", ".join(names))

    def _node(self, node: Node, *, used: bool) -> None:
        if node.kind == "size":
            call = self._size(node)
        elif node.kind == "method":
            call = self._method(node)
        elif node.kind == "function":
            call = self._call(node)
        else:
            raise malformed("kind of node", node.kind)
        name = f"v{self.defined}"
        keep = used or node.target == _ENTER
        self.code.add(f"{name} = {call}" if keep else call)
        if node.target == _ENTER:
            self.code.add(f"{self.code.constant(list.append)}(entered, {name})")
        elif node.target == _EXIT:
            self.code.add(f"{self.code.constant(list.pop)}(entered)")
        if keep and not used:
            self.code.add(f"del {name}")

    def _call(self, node: Node) -> str:
        name = _target(node)
        if name == "builtins.getattr":
            known = [type(a) is dict and list(a) == ["s"] and a["s"] in ATTRIBUTES for a in node.args[1:]]
            if node.kwargs or not all(known):
                raise malformed("attribute of a tensor", node)
        return f"{self.code.constant(resolve_target(name))}({self._arguments(node.args, node.kwargs)})"

    def _size(self, node: Node) -> str:
        if len(node.args) != 2 or type(node.args[0]) is not str or type(node.args[1]) is not int or node.kwargs:  # noqa: PLR2004 - a tensor and a dimension
            raise malformed("size", node)
        return f"{self._local(node.args[0])}.size({node.args[1]})"

    def _method(self, node: Node) -> str:
        name = check_method(_target(node))
        if not node.args or type(node.args[0]) is not str:
            raise malformed("call of a method", node)
        return f"{self._local(node.args[0])}.{name}({self._arguments(node.args[1:], node.kwargs)})"

    def _arguments(self, args: Iterable[Json], kwargs: dict[str, Json]) -> str:
        parts = [self._value(data) for data in args]
        parts += [f"{check_identifier(name)}={self._value(data)}" for name, data in kwargs.items()]
        return ", ".join(parts)

    def _value(self, data: Json) -> str:
        """Return the source of an encoded value; what holds no reference becomes a constant."""
        if data is None or type(data) in (bool, int):
            return repr(data)
        if type(data) is str:
            return self._local(data)
        if type(data) is list:
            return f"[{', '.join(map(self._value, data))}]"
        if type(data) is not dict or len(data) != 1:
            raise malformed("value", data)
        [(tag, body)] = data.items()
        if tag == "hole" and type(body) is int and 0 <= body < self.num_holes:
            return f"h{body}"
        if tag == "t" and type(body) is list:
            return tuple_source(map(self._value, body))
        if tag == "d" or (tag == "slice" and refs_of(data)):
            if tag == "d":
                return f"{{{', '.join(f'{self._value(k)}: {self._value(v)}' for k, v in body)}}}"
            return f"{self.code.constant(slice)}({', '.join(map(self._value, body))})"
        return self.code.constant(self._placed(decode_value(data, self._local)))

    def _placed(self, value: Any) -> Any:
        """Give a device without an index, or a constant tensor, its place in this process."""
        index = self.device_index
        if index is None:
            return value
        if isinstance(value, torch.device):
            return device_of(value.type, index) if ":" not in str(value) else value
        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
            return value.to(device_of(value.device.type, index))
        return value

    def _local(self, ref: Any) -> str:
        number = _ref_number(ref)
        if number >= self.defined:
            raise malformed("reference", ref)
        return f"v{number}"


def _leave(entered: list[Any]) -> None:
    """Close the autocast regions that an error left open."""
    while entered:
        resolve_target(_EXIT)(entered.pop())


def _plugged(data: Json) -> Json:
    """Return `data` with its holes closed, for who looks for references only."""
    if type(data) is list:
        return [_plugged(item) for item in data]
    if type(data) is dict:
        return 0 if list(data) == ["hole"] else {tag: _plugged(body) for tag, body in data.items()}
    return data


def _ref_number(ref: Any) -> int:
    digits = ref[1:] if isinstance(ref, str) and ref[:1] == "%" else ""
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= _MOST_DIGITS):
        raise malformed("reference", ref)
    return int(digits)


def _target(node: Node) -> str:
    if type(node.target) is not str:
        raise malformed("name of an op", node.target)
    return node.target
