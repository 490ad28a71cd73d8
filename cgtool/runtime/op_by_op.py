"""Run a piece op by op with torch alone: splitting pieces, and every piece of the `eager` adaptor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from cgtool.graph.expressions import rename, symbols_of
from cgtool.graph.targets import ATTRIBUTES, check_method, resolve_target
from cgtool.graph.values import decode_value, dtype_of, placed, refs_of
from cgtool.plan.pieces import Body, Json, Node, PieceGraph
from cgtool.runtime.dispatch import Boxed
from cgtool.runtime.generate import (
    Code,
    check_identifier,
    check_line,
    expression,
    malformed,
    repairer,
    tuple_source,
)

_ENTER = "torch.amp.autocast_mode._enter_autocast"
_EXIT = "torch.amp.autocast_mode._exit_autocast"
#: The most digits in a reference to a value.
_MAX_DIGITS = 9


def piece_function(graph: PieceGraph, *, device_index: int | None = None) -> Boxed:
    """Return a function that runs `graph` with torch alone.

    Args:
        graph: Any piece, compiled or splitting.
        device_index: The device that a device without an index refers to ("cuda" → "cuda:1"); None means the current
            device.

    Returns:
        A boxed function: it takes a list of tensors, which it empties, and returns a list of the graph's outputs.
        Several threads may call it at once.

    Raises:
        ArtifactError: The graph violates its grammar, or has an op that is not registered in this process.
    """
    return piece_maker(graph, device_index=device_index)()


def checked_function(graph: PieceGraph, *, device_index: int | None = None) -> Boxed:
    """Return `piece_function(graph)` with outputs checked against the trace, and repaired if only strides differ.

    The pieces that follow were compiled for the traced outputs and do not check them.

    Args:
        graph: A piece that runs op by op instead of compiled.
        device_index: As for `piece_function`.

    Raises:
        ArtifactError: As `piece_function`. The returned function raises it if an op returns a different shape or dtype.
    """
    return _PieceWriter(graph, device_index, 0, promised=graph).maker()()


def piece_maker(graph: PieceGraph, *, num_holes: int = 0, device_index: int | None = None) -> Callable[..., Boxed]:
    """Return a function that takes the values of a piece's holes and returns the function of the piece.

    Args:
        graph: Any piece; its arguments may contain `{"hole": n}`, see `cgtool.plan.pieces`.
        num_holes: The number of holes.
        device_index: As for `piece_function`.

    Raises:
        ArtifactError: As `piece_function`.
    """
    return _PieceWriter(graph, device_index, num_holes).maker()


class _PieceWriter:
    def __init__(
        self,
        graph: PieceGraph | Body,
        device_index: int | None,
        num_holes: int,
        *,
        promised: PieceGraph | None = None,
    ) -> None:
        self.nodes = graph.nodes
        self.returned: Json = graph.output if isinstance(graph, Body) else list(graph.outputs)
        self.promised = promised
        self.num_holes = num_holes
        self.device_index = device_index
        self.code = Code("piece")
        self.num_inputs = graph.num_inputs if isinstance(graph, Body) else len(graph.inputs)
        self.defined = self.num_inputs
        self.enters = any(node.target == _ENTER for node in graph.nodes)

    def maker(self) -> Callable[..., Boxed]:
        code = self.code
        code.add("def piece(args):")
        code.depth += 1
        dying = self._last_uses()
        names = [f"v{i}" for i in range(self.num_inputs)]
        code.add(f"{tuple_source(names)} = args" if names else "pass")
        code.add(f"{code.constant(list.clear)}(args)")
        sizes = self._read_sizes(self.promised) if self.promised is not None else {}
        if self.enters:
            code.add("entered = []")
            code.add("try:")
            code.depth += 1
        self._forget(dying.get(-1, ()))
        for index, node in enumerate(self.nodes):
            self._node(node, used=index not in dying.get(index, ()))
            self.defined += 1
            self._forget(dying.get(index, ()), but=index)
        if self.promised is not None:
            self._keep_promise(self.promised, sizes)
        code.add(f"return {self._value(self.returned)}")
        if self.enters:
            code.depth -= 1
            code.add(f"finally: {code.constant(_leave)}(entered)")
        code.depth -= 1
        code.add("return piece")
        return code.define("make", [f"h{n}" for n in range(self.num_holes)])

    def _keep_promise(self, graph: PieceGraph, sizes: dict[str, str]) -> None:
        repair, known = self.code.constant(repairer(graph)), tuple(sizes.values())
        for ref, meta in dict(zip(graph.outputs, graph.results, strict=True)).items():
            if any(name not in sizes for dim in meta.dims for name in symbols_of(dim)):
                continue  # a size that cannot be read from any input
            shape, stride = (
                tuple_source(expression(rename(dim, sizes), known) for dim in part)
                for part in (meta.shape, meta.stride)
            )
            dtype = self.code.constant(dtype_of(meta.dtype))
            self.code.add(check_line(self._local(ref), dtype, shape, stride, repair))

    def _read_sizes(self, graph: PieceGraph) -> dict[str, str]:
        """Read the symbols from the inputs' dimensions; return symbol → its name in the function."""
        names: dict[str, str] = {}
        symbols = {symbol.name for symbol in graph.symbols}
        for position, meta in enumerate(graph.inputs):
            for dim, size in enumerate(meta.shape):
                if size in symbols and size not in names:
                    names[str(size)] = f"n{len(names)}"
                    self.code.add(f"{names[str(size)]} = v{position}.size({dim})")
        return names

    def _last_uses(self) -> dict[int, list[int]]:
        """Return node index → values that are not needed after it (as node indices; inputs are negative)."""
        last = dict.fromkeys(range(self.num_inputs), -1)
        for index, node in enumerate(self.nodes):
            last[self.num_inputs + index] = index
            for data in (*node.args, *node.kwargs.values()):
                last.update((_ref_number(ref), index) for ref in refs_of(_without_holes(data)))
        for ref in refs_of(self.returned):
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
            raise malformed("node kind", node.kind)
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
                raise malformed("tensor attribute", node)
        return f"{self.code.constant(resolve_target(name))}({self._arguments(node.args, node.kwargs)})"

    def _size(self, node: Node) -> str:
        if len(node.args) != 2 or type(node.args[0]) is not str or type(node.args[1]) is not int or node.kwargs:  # noqa: PLR2004 - a tensor and a dimension
            raise malformed("size", node)
        return f"{self._local(node.args[0])}.size({node.args[1]})"

    def _method(self, node: Node) -> str:
        name = check_method(_target(node))
        if not node.args or type(node.args[0]) is not str:
            raise malformed("method call", node)
        return f"{self._local(node.args[0])}.{name}({self._arguments(node.args[1:], node.kwargs)})"

    def _arguments(self, args: Iterable[Json], kwargs: dict[str, Json]) -> str:
        parts = [self._value(data) for data in args]
        parts += [f"{check_identifier(name)}={self._value(data)}" for name, data in kwargs.items()]
        return ", ".join(parts)

    def _value(self, data: Json) -> str:
        """Return the source of an encoded value; a value without references becomes a constant."""
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
        value = decode_value(data, self._local)
        return self.code.constant(self._body(value) if tag == "graph" else placed(value, self.device_index))

    def _body(self, body: Body) -> Callable[..., Any]:
        run = _PieceWriter(body, self.device_index, 0).maker()()
        return lambda *args: run(list(args))

    def _local(self, ref: Any) -> str:
        number = _ref_number(ref)
        if number >= self.defined:
            raise malformed("reference", ref)
        return f"v{number}"


def _leave(entered: list[Any]) -> None:
    """Close the autocast regions that an error left open."""
    while entered:
        resolve_target(_EXIT)(entered.pop())


def _without_holes(data: Json) -> Json:
    """Return `data` with its holes replaced, for functions that only look for references."""
    if type(data) is list:
        return [_without_holes(item) for item in data]
    if type(data) is dict:
        return 0 if list(data) == ["hole"] else {tag: _without_holes(body) for tag, body in data.items()}
    return data


def _ref_number(ref: Any) -> int:
    digits = ref[1:] if isinstance(ref, str) and ref[:1] == "%" else ""
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= _MAX_DIGITS):
        raise malformed("reference", ref)
    return int(digits)


def _target(node: Node) -> str:
    if type(node.target) is not str:
        raise malformed("op name", node.target)
    return node.target
