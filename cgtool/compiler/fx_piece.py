"""Rebuilds a piece's graph as an FX module with fake inputs, for a compiler.

Everything is rebuilt from the `PieceGraph` alone, under a fresh fake mode and ShapeEnv. Names, example sizes and the
order of facts follow from the data, so two processes pass the same module to the compiler.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from cgtool.compiler import _torch
from cgtool.compiler.sizes import choose_hints
from cgtool.errors import CompileError, SplitError
from cgtool.graph._torch import share_storage
from cgtool.graph.expressions import FUNCTIONS, check_expression, evaluate, holds, symbols_of
from cgtool.graph.sympy_text import expression_text
from cgtool.graph.targets import ATTRIBUTES, check_method, resolve_target
from cgtool.graph.values import constants_of, decode_value, device_of, dtype_of
from cgtool.plan.pieces import Body, Dim, Node, PieceGraph, TensorMeta

#: A symbol whose range starts below `_FIRST_USUAL` comes from data. To check a guard on such symbols, the first
#: `_MAX_TRIED` of them take all sizes below `_SMALL`.
_FIRST_USUAL, _SMALL, _MAX_TRIED = 2, 5, 4
_CATS = (torch.cat, torch.concat, torch.concatenate, torch.ops.aten.cat.default)
_METHOD_PREFIXES = ("torch.Tensor.", "torch._C.TensorBase.")


@dataclass(frozen=True, kw_only=True)
class RebuiltSymbols:
    """A ShapeEnv with a graph's symbols, ranges and facts, and nothing else."""

    mode: _torch.FakeTensorMode
    #: The graph's name of each symbol → the symbol, or a plain integer if its range has one size.
    sizes: dict[str, Any]
    #: torch's name of each symbol → the graph's name.
    names: dict[str, str]
    #: How many guards the graph's own facts added to the ShapeEnv.
    num_facts: int


@dataclass(frozen=True, kw_only=True)
class RebuiltPiece(RebuiltSymbols):
    """A piece in the form that compilers accept."""

    #: The placeholders are the piece's inputs followed by its constants; the output is a tuple.
    module: fx.GraphModule
    #: Fake tensors, one for each placeholder.
    inputs: list[Any]
    #: The ops that its calls decompose into.
    called: _torch.CalledOps
    #: The positions of the inputs that it writes to.
    written: frozenset[int]

    def new_guards(self, graph: PieceGraph) -> tuple[str, ...]:
        """Return the guards that rebuilding and compiling added beyond `graph`'s ranges and facts.

        Raises:
            CompileError: The compiler fixed a size, or relies on a guard that a plan cannot express.
        """
        self._refuse_fixed_sizes(graph)
        known = rebuild_symbols(graph)
        found: dict[str, None] = {}
        for expr in _torch.guard_exprs(self.mode)[self.num_facts :]:
            # symbol names follow from the graph's, so both ShapeEnvs use the same ones
            if _torch.is_known(known.mode, expr):
                continue
            try:
                text = expression_text(expr, self.names)
            except SplitError as error:
                msg = f"the compiler relies on {expr}, which a plan cannot express ({error}); the piece can run eagerly"
                raise CompileError(msg, actual=str(expr)) from error
            if text not in graph.facts:
                _check_sizes_from_data(text, graph)
                found[text] = None
        return tuple(found)

    def _refuse_fixed_sizes(self, graph: PieceGraph) -> None:
        fixed = _torch.fixed_sizes(self.mode)
        for symbol in graph.symbols:
            name = next((theirs for theirs, ours in self.names.items() if ours == symbol.name), None)
            if name in fixed and symbol.min != symbol.max:
                raise CompileError(
                    f"the compiler fixed the size {symbol.name} to {fixed[name]}, so the artifact would serve only "
                    f"that size; the piece can run eagerly, or make that dimension static",
                    expected=f"{symbol.name} from {symbol.min} to {symbol.max or 'any'}",
                    actual=fixed[name],
                )


def _check_sizes_from_data(guard: str, graph: PieceGraph) -> None:
    """Refuse a guard on sizes that come from data, unless all small sizes satisfy it, as they do an upper limit.

    Only sizes from data may be 0 or 1 in a graph, and the user cannot choose them.
    """
    from_data = [symbol for symbol in graph.symbols if symbol.min < _FIRST_USUAL and symbol.name in symbols_of(guard)]
    if not from_data:
        return
    hints = choose_hints(graph)
    for small in itertools.product(range(_SMALL), repeat=min(len(from_data), _MAX_TRIED)):
        sizes = {**hints, **dict(zip((symbol.name for symbol in from_data), small, strict=False))}
        if not holds(guard, sizes):
            raise CompileError(
                f"the compiler relies on '{guard}', which sizes that come from data may violate; the piece can run "
                f"eagerly",
                actual=guard,
            )


def rebuild_symbols(graph: PieceGraph) -> RebuiltSymbols:
    """Return a fresh fake mode with `graph`'s symbols, ranges and facts.

    Raises:
        CompileError: No example sizes satisfy the facts.
        ArtifactError: A fact is outside the grammar of expressions.
    """
    hints = choose_hints(graph)
    mode = _torch.new_fake_mode(from_two=all(symbol.min > 1 for symbol in graph.symbols))
    sizes: dict[str, Any] = {}
    names = {}
    for symbol in graph.symbols:
        size = _torch.new_symbol(mode, symbol.name, hint=hints[symbol.name], low=symbol.min, high=symbol.max)
        sizes[symbol.name] = size
        if isinstance(size, torch.SymInt):
            names[str(_torch.symbol_of(size))] = symbol.name
    for fact in graph.facts:
        if not bool(symbolic_value(fact, sizes)):
            raise CompileError(f"'{fact}' is false for sizes {hints}. This is a bug in cgtool: report it", actual=hints)
    return RebuiltSymbols(mode=mode, sizes=sizes, names=names, num_facts=len(_torch.guard_exprs(mode)))


def symbolic_value(text: Dim, sizes: dict[str, Any]) -> Any:
    """Return the value of an expression with symbols replaced by `sizes`: plain or symbolic integers.

    Raises:
        ArtifactError: `text` is outside the grammar of expressions.
    """
    if isinstance(text, int):
        return text
    check_expression(text, sizes)
    code = compile(_Connectives().visit(ast.parse(text, mode="eval")), "<expression>", "eval")
    return eval(code, {"__builtins__": {}, **_SYMBOLIC, **sizes})  # noqa: S307 - matched to the grammar above


def _fold(pair: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def folded(first: Any, *others: Any) -> Any:
        for other in others:
            first = pair(first, other)
        return first

    return folded


#: The functions of an expression over symbolic integers; some replace those of `cgtool.graph.expressions.FUNCTIONS`.
_SYMBOLIC = {
    **FUNCTIONS,
    "Max": _fold(torch.sym_max),
    "Min": _fold(torch.sym_min),
    "and_": _fold(operator.and_),
    "or_": _fold(operator.or_),
    "not_": torch.sym_not,
}


class _Connectives(ast.NodeTransformer):
    """Turns `and`, `or` and `not` into calls.

    Python's connectives would evaluate each operand, and the ShapeEnv would add a guard for each: "s0 == 4 or s0 == 8"
    would fix s0.
    """

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        return self._call("and_" if isinstance(node.op, ast.And) else "or_", node, node.values)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        return self._call("not_", node, [node.operand]) if isinstance(node.op, ast.Not) else self.generic_visit(node)

    def _call(self, name: str, node: ast.expr, operands: list[ast.expr]) -> ast.AST:
        args = [self.visit(operand) for operand in operands]
        call = ast.Call(func=ast.Name(id=name, ctx=ast.Load()), args=args, keywords=[])
        return ast.fix_missing_locations(ast.copy_location(call, node))


def rebuild(graph: PieceGraph) -> RebuiltPiece:
    """Return a piece in the form that compilers accept; a graph without symbols is fully static.

    Raises:
        CompileError: The graph cannot be rebuilt: an op rejects its inputs, or writes to an input that shares its
            storage with another.
        ArtifactError: The graph names an op or a value that does not resolve.
    """
    symbols = rebuild_symbols(graph)
    constants = constants_of(graph)
    called = _torch.CalledOps()
    # as Dynamo does: torch 2.11's C++ composite ops do not accept symbolic sizes
    with torch.no_grad(), symbols.mode, _torch.python_dispatcher():
        inputs = _inputs(graph, symbols.sizes)
        fakes = [symbols.mode.from_tensor(constant, static_shapes=True) for constant in constants]
        writer = _Writer([*inputs, *fakes], num_constants=len(fakes))
        with _autocast_restored(), called:
            for called.at, node in enumerate(graph.nodes):
                writer.add(node, called.at)
        writer.finish(graph, {name: _torch.hint_of(size) for name, size in symbols.sizes.items()})
    written = {n for n, fake in enumerate(inputs) if _torch.storage_id(fake) in called.written}
    _refuse_shared_writes(graph, written)
    return RebuiltPiece(
        **vars(symbols),
        module=fx.GraphModule(writer.bodies, writer.graph, class_name="Piece"),
        inputs=writer.inputs,
        called=called,
        written=frozenset(written),
    )


def _inputs(graph: PieceGraph, sizes: dict[str, Any]) -> list[Any]:
    inputs = [_empty(meta, sizes) for meta in graph.inputs]
    for group in graph.aliases:
        first = inputs[group[0]]
        for position in group[1:]:
            other = inputs[position]
            # the compiler sees one storage; a tensor's offset in it is not part of a piece
            other.set_(first.untyped_storage(), 0, other.shape, other.stride())
    return inputs


def _empty(meta: TensorMeta, sizes: dict[str, Any]) -> Any:
    return torch.empty_strided(
        [symbolic_value(dim, sizes) for dim in meta.shape],
        [symbolic_value(step, sizes) for step in meta.stride],
        dtype=dtype_of(meta.dtype),
        device=device_of(meta.device),
    )


class _Writer:
    """Adds a piece's nodes to an FX graph, and runs each on fake values to learn its result."""

    def __init__(self, inputs: list[Any], num_constants: int) -> None:
        self.graph = fx.Graph()
        self.bodies = torch.nn.Module()
        self.inputs = inputs
        placeholders = [self._remember(self.graph.placeholder(f"in_{n}"), fake) for n, fake in enumerate(inputs)]
        first = len(inputs) - num_constants
        #: value number → the FX node, or a plain number for constant arithmetic
        self._values: list[Any] = placeholders[:first]
        self._constants = iter(placeholders[first:])
        #: Values for which the compiler chooses its own strides.
        self._restrided: list[torch.Tensor] = []

    def add(self, node: Node, index: int) -> None:
        args = tuple(self._decode(arg) for arg in node.args)
        kwargs = {name: self._decode(arg) for name, arg in node.kwargs.items()}
        if node.kind == "size":
            self._values.append(self._size(args[0], args[1]))
            return
        op, target, run = _call(node, args)
        if target in (operator.getitem, operator.setitem) and _is_tensor(args[0]):
            args = (args[0], self._closed(args[0], args[1]), *args[2:])
        if not _holds_node((args, kwargs)):
            value = run(*args, **kwargs)
            if isinstance(value, int | float | bool):  # arithmetic on fixed sizes
                self._values.append(value)
                return
        try:
            value = run(*_fakes(args), **_fakes(kwargs))
        except (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError) as error:
            raise CompileError(
                f"op {index} of the piece, {node.target}, could not be traced: {error}; the piece can run eagerly",
                path=index,
                actual=str(error),
            ) from error
        self._values.append(self._remember(self.graph.create_node(op, target, args, kwargs), value))
        if target in _CATS and _is_copy(*args, **kwargs):
            self._restrided.append(value)

    def finish(self, graph: PieceGraph, hints: Mapping[str, int]) -> None:
        """Add the graph's outputs; a piece without outputs returns its first value, since compilers need one."""
        found = [self._lookup(ref) for ref in graph.outputs]
        plain = [ref for ref, node in zip(graph.outputs, found, strict=True) if not _is_tensor(node)]
        if plain:
            raise CompileError(
                f"output {plain[0]} of the piece is not a tensor, and compiled pieces return only tensors; the piece "
                f"can run eagerly",
                actual=plain[0],
            )
        found = [self._as_promised(node, meta, hints) for node, meta in zip(found, graph.results, strict=True)]
        self.graph.output(tuple(found or self._values[:1]))
        self.graph.lint()

    def _as_promised(self, node: fx.Node, meta: TensorMeta, hints: Mapping[str, int]) -> fx.Node:
        """Return a node whose strides are those that the trace promised to the consumers of this output.

        The same ops may return other strides here, since a fake op's strides depend on what is known of its sizes.
        """
        value = node.meta["example_value"]
        if not all(map(_torch.is_backed, value.shape)):
            return node  # compilers reject it with their own errors
        shape = [_torch.hint_of(size) for size in value.shape]
        have = [_torch.hint_of(step) for step in value.stride()]
        want = [evaluate(step, hints) for step in meta.stride]
        if shape != [evaluate(dim, hints) for dim in meta.shape]:
            return node
        if _same_strides(shape, have, want) and not any(share_storage(value, other) for other in self._restrided):
            return node
        # narrow expanded dimensions (stride 0), such as repeated heads of keys, and expand them again afterwards
        repeated = [dim for dim, size in enumerate(value.shape) if type(size) is int and size > 1 and want[dim] == 0]
        sizes = [size if dim in repeated else -1 for dim, size in enumerate(value.shape)]
        outer_first = sorted(range(len(want)), key=lambda dim: (-want[dim], -shape[dim]))
        back = [outer_first.index(dim) for dim in range(len(want))]
        steps: list[tuple[str, Sequence[int]]] = [("narrow", (dim, 0, 1)) for dim in repeated]
        steps += [("permute", outer_first), ("clone", ()), ("permute", back)]
        for name, args in [*steps, *([("expand", sizes)] if repeated else [])]:
            kwargs: dict[str, Any] = {"memory_format": torch.contiguous_format} if name == "clone" else {}
            value = getattr(node.meta["example_value"], name)(*args, **kwargs)
            node = self._remember(self.graph.call_method(name, (node, *args), kwargs), value)
        if not _same_strides(shape, [_torch.hint_of(step) for step in value.stride()], want):
            raise CompileError(
                f"the trace promised an output with strides {meta.stride}, which leave gaps, so a compiler would not "
                f"produce them; the piece can run eagerly",
                expected=list(meta.stride),
            )
        return node

    def _decode(self, data: Any) -> Any:
        return map_aggregate(decode_value(data, self._lookup), self._in_its_place)

    def _in_its_place(self, value: Any) -> Any:
        """Return the node that stands for a constant tensor or a body, and any other value unchanged."""
        if isinstance(value, torch.Tensor):
            return next(self._constants)
        return held_body(value, self.bodies, self.graph) if isinstance(value, Body) else value

    def _lookup(self, ref: str) -> Any:
        number = int(ref.removeprefix("%"))
        if number >= len(self._values):
            raise CompileError(f"the piece uses {ref} before it exists; the plan is damaged: warm again", actual=ref)
        return self._values[number]

    def _size(self, tensor: fx.Node, dim: int) -> Any:
        size = tensor.meta["example_value"].shape[dim]
        if not isinstance(size, torch.SymInt):
            return int(size)
        return self._remember(self.graph.call_function(torch.ops.aten.sym_size.int, (tensor, dim)), size)

    def _closed(self, tensor: fx.Node, index: Any) -> Any:
        """Return an index with the size as the stop of each slice that has only a start.

        torch uses the largest integer for a missing stop, which Inductor cannot compare with the start in a write.
        """
        parts = index if isinstance(index, tuple) else (index,)
        if not all(part is None or part is Ellipsis or type(part) in (int, slice) for part in parts):
            return index
        dim, closed = 0, list(parts)
        num_dims = sum(type(part) in (int, slice) for part in parts)
        for place, part in enumerate(parts):
            if isinstance(part, slice) and part.start is not None and part.stop is None:
                closed[place] = slice(part.start, self._size(tensor, dim), part.step)
            if part is Ellipsis:
                dim += tensor.meta["example_value"].dim() - num_dims
            elif part is not None:
                dim += 1
        return tuple(closed) if isinstance(index, tuple) else closed[0]

    def _remember(self, node: fx.Node, value: Any) -> fx.Node:
        node.meta["example_value"] = value
        node.meta["val"] = value
        return node


def held_body(body: Body, owner: torch.nn.Module, graph: fx.Graph) -> fx.Node:
    """Add a body to a module as a submodule, and return the node that reads it."""
    name = f"body_{len(dict(owner.named_children()))}"
    module = body_module(body)
    owner.add_module(name, module)
    node = graph.get_attr(name)
    node.meta["example_value"] = module
    return node


def body_module(body: Body) -> fx.GraphModule:
    """Return a body as an FX module."""
    graph, held = fx.Graph(), torch.nn.Module()
    values = [graph.placeholder(f"in_{n}") for n in range(body.num_inputs)]

    def decoded(data: Any) -> Any:
        value = decode_value(data, lambda ref: values[int(ref.removeprefix("%"))])
        return map_aggregate(value, lambda leaf: held_body(leaf, held, graph) if isinstance(leaf, Body) else leaf)

    for node in body.nodes:
        args = tuple(decoded(arg) for arg in node.args)
        kwargs = {name: decoded(arg) for name, arg in node.kwargs.items()}
        op, target, _ = _call(node, args)
        values.append(graph.create_node(op, target, args, kwargs))
    graph.output(decoded(body.output))
    return fx.GraphModule(held, graph)


def _call(node: Node, args: tuple[Any, ...]) -> tuple[str, Any, Callable[..., Any]]:
    """Return FX's opcode and target for a node, and the function that runs it."""
    name = node.target or ""
    if node.kind == "method":
        return "call_method", check_method(name), lambda owner, *rest, **more: getattr(owner, name)(*rest, **more)
    target = resolve_target(name)
    if name.startswith(_METHOD_PREFIXES):  # torch's caches accept methods only as call_method
        return "call_method", name.rpartition(".")[2], target
    if target is getattr and args[1:] not in [(name,) for name in ATTRIBUTES]:
        raise CompileError(f"the piece reads {args[1:]} of a tensor; the plan is damaged: warm again", actual=args[1:])
    return "call_function", target, target


def _same_strides(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether strides are equivalent; those of size-1 dimensions and of empty tensors do not matter."""
    return 0 in shape or all(size == 1 or a == b for size, a, b in zip(shape, one, other, strict=True))


def _is_copy(tensors: Sequence[fx.Node], *_args: Any, **_kwargs: Any) -> bool:
    """Return whether all tensors but one are empty: then Inductor copies that one and keeps its strides."""
    shapes = [tensor.meta["example_value"].shape for tensor in tensors]
    empty = [any(isinstance(size, int) and not size for size in shape) for shape in shapes]
    return len(empty) > 1 and empty.count(False) == 1


def _is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta["example_value"], torch.Tensor)


def _holds_node(value: Any) -> bool:
    found: set[fx.Node] = set()

    def note(node: fx.Node) -> fx.Node:
        found.add(node)
        return node

    fx.node.map_arg(value, note)
    return bool(found)


def _fakes(value: Any) -> Any:
    return fx.node.map_arg(value, lambda node: node.meta["example_value"])


@contextlib.contextmanager
def _autocast_restored() -> Iterator[None]:
    """Restore the state of autocast on exit, in case a piece fails inside an autocast region."""
    kinds = ("cpu", "cuda")
    before = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    try:
        yield
    finally:
        for kind, enabled, dtype in before:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)


def _refuse_shared_writes(graph: PieceGraph, written: set[int]) -> None:
    """Refuse a write to an input that shares its storage: a piece does not record which elements are shared."""
    for group in graph.aliases:
        position = next((position for position in group if position in written), None)
        if position is not None:
            raise CompileError(
                f"the piece writes to input {position}, which shares its storage with inputs "
                f"{[other for other in group if other != position]}; the piece can run eagerly",
                path=position,
            )
