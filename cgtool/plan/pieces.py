"""The records of a piece: its graph as canonical data. Must not import torch.

The split produces a `PieceGraph` for each piece. Its digest is the piece's identity, adaptors compile it, artifacts of
the `eager` adaptor contain it, and the plan contains those of splitting pieces. It has no names of nodes, layers or
weights and no symbols of the trace: values are numbered, and symbols are s0, s1, ... in order of appearance in the
inputs.

In JSON, tensors, symbols and nodes are arrays of the fields of their classes::

    expr     = a Python expression over symbols and numbers, see `cgtool.graph.expressions`
    ref      = "%<n>"                                         inputs are %0..%k-1, node j is %k+j
    value    = ref | int | bool | null | [value...] | {"tag": ...} with one tag of:
               f float as repr text ("1e-06", "inf"), s string, t tuple, d [[value, value]...] dict, slice [a, b, c],
               dtype, device, layout, format (memory format), ellipsis 0, c complex [re, im] as text,
               const {"dtype", "shape", "data": base64},
               graph [number of inputs, [node...], value]    the body of an operation such as torch.cond, see `Body`

A device is a type ("cuda") without the index that it has in one process.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from cgtool.errors import ArtifactError
from cgtool.plan.grammar import Count, Digest, Record, sha256_hex

Json = Any

#: The adaptor whose artifacts are piece graphs, which torch alone runs.
EAGER = "eager"
#: The adaptor whose artifacts are packages of native code, which torch alone loads.
AOT_INDUCTOR = "aot_inductor"
#: The kinds of artifacts of cgtool's own adaptors; a third-party adaptor's kind is its name.
KINDS: Mapping[str, str] = {AOT_INDUCTOR: "pt2", "inductor_standalone": "aot", "inductor": "mega", EAGER: "json"}

#: A size, a stride, or a bound of one, in elements.
Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]
#: `cgtool.graph.expressions` checks the grammar before any code is generated.
Expression = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_. +*/%()<>=!,&|^~-]{1,4000}\Z")]
Dim = Size | Expression
SymbolName = Annotated[str, Meta(pattern=r"\As[0-9]{1,6}\Z")]
DtypeName = Annotated[str, Meta(pattern=r"\A[a-z][a-z0-9_]{0,31}\Z")]
DeviceName = Annotated[str, Meta(pattern=r"\A[a-z]{1,16}\Z")]
Reference = Annotated[str, Meta(pattern=r"\A%(0|[1-9][0-9]{0,8})\Z")]
#: `ns::op.overload`
OpName = Annotated[str, Meta(pattern=r"\A[A-Za-z_][A-Za-z0-9_]*::[A-Za-z_][A-Za-z0-9_.]*\Z", max_length=200)]
NodeKind = Literal["function", "method", "size"]
#: The function that a node calls; `cgtool.graph.targets` lists the allowed ones.
Target = Annotated[str, Meta(pattern=r"\A[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*){0,7}\Z", max_length=200)]
#: The name of an argument.
Keyword = Annotated[str, Meta(pattern=r"\A[A-Za-z_][A-Za-z0-9_]{0,63}\Z")]
#: Tags whose bodies contain other values.
_HOLD_VALUES = frozenset({"t", "d", "slice"})


def kind_of(adaptor: str) -> str:
    """Return the kind of an adaptor's artifacts."""
    return KINDS.get(adaptor, adaptor)


class Row(Record, array_like=True):
    """A record that is an array in JSON, because a file has many of it."""


class TensorMeta(Row):
    """The dtype, shape, strides and device of a tensor.

    Args:
        dtype: The name without "torch.", such as "float32".
        shape: The sizes; each is an int or an expression over the graph's symbols.
        stride: The strides in elements, as for `shape`.
        device: The type: "cpu", "cuda".
    """

    dtype: DtypeName
    shape: tuple[Dim, ...]
    stride: tuple[Dim, ...]
    device: DeviceName

    @property
    def dims(self) -> tuple[Dim, ...]:
        """The sizes and the strides."""
        return (*self.shape, *self.stride)

    def __post_init__(self) -> None:
        """Check that there are as many strides as sizes."""
        if len(self.shape) != len(self.stride):
            msg = "a tensor has different numbers of strides and sizes"
            raise ValueError(msg)


class SymbolRange(Row):
    """A symbol and its inclusive range; `max` None means no limit."""

    name: SymbolName
    min: Size
    max: Size | None

    def within(self, low: int, high: int | None) -> Self:
        """Return the symbol with its range limited to the given bounds."""
        highs = [bound for bound in (self.max, high) if bound is not None]
        return replace(self, min=max(self.min, low), max=min(highs, default=None))


class Node(Row):
    """An operation of a piece; `args` and `kwargs` are encoded values.

    A "size" node reads an integer from a tensor's shape. It has no target, and its arguments are a reference and the
    index of the dimension.
    """

    kind: NodeKind
    target: Target | None
    args: tuple[Json, ...]
    kwargs: dict[Keyword, Json]

    def atoms(self) -> Iterator[tuple[str, Json]]:
        """Yield the atoms of its arguments, see `atoms_of`."""
        return atoms_of([*self.args, *self.kwargs.values()])

    def bodies(self) -> Iterator["Body"]:
        """Yield the bodies among its arguments.

        Raises:
            msgspec.ValidationError: A body does not match the grammar.
        """
        return (msgspec.convert(body, Body) for tag, body in self.atoms() if tag == "graph")

    def mapped(self, change: Callable[[Json], Json]) -> Self:
        """Return the node with `change` applied to each of its arguments."""
        kwargs = {name: change(self.kwargs[name]) for name in sorted(self.kwargs)}
        return replace(self, args=tuple(map(change, self.args)), kwargs=kwargs)


class Body(Row):
    """A graph that an operation of a piece runs: a branch of `torch.cond`, the body of a loop.

    Args:
        num_inputs: The number of inputs %0..%k-1, tensors or integers. The body refers to no other values of the piece.
        nodes: The nodes in order of execution, without "size" nodes.
        output: The result, as an encoded value.
    """

    num_inputs: Count
    nodes: tuple[Node, ...]
    output: Json


class PieceGraph(Record):
    """The graph of a piece; see the module's grammar.

    Args:
        symbols: The symbols in order of first appearance in `inputs`.
        facts: Relations between symbols that hold whenever the piece runs ("Eq(s0 % 8, 0)" as "s0 % 8 == 0").
        inputs: The inputs, which are tensors; "size" nodes read sizes from them.
        aliases: Groups of positions of inputs that share storage.
        nodes: The nodes in order of execution.
        outputs: References; those of a compiled piece are tensors.
        results: The metadata of each output.
        ops: The custom ops in the piece, each with a digest of its schema and fake implementation, on which the
            compiler relies.
    """

    symbols: tuple[SymbolRange, ...]
    facts: tuple[Expression, ...]
    inputs: tuple[TensorMeta, ...]
    aliases: tuple[tuple[Size, ...], ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Reference, ...]
    results: tuple[TensorMeta, ...]
    ops: dict[OpName, Digest]

    def canonical(self) -> bytes:
        """Return the graph as JSON, equal for equal graphs."""
        return msgspec.json.encode(self, order="sorted")

    def identity(self) -> str:
        """Return the digest, as 64 hexadecimal digits; pieces with equal identities compile to the same code."""
        frame, constants = split_constants(self)
        return identity_of(frame.canonical(), constants)

    def every_node(self) -> Iterator[Node]:
        """Yield all nodes, including those of bodies."""
        return _every_node(self.nodes)


def _every_node(nodes: Sequence[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        for body in node.bodies():
            yield from _every_node(body.nodes)


def atoms_of(value: Json) -> Iterator[tuple[str, Json]]:
    """Yield the atoms of a value in order: (tag, body), and ("ref", "%3") for a reference. Numbers are left out."""
    if isinstance(value, str):
        yield "ref", value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from atoms_of(item)
    elif isinstance(value, dict):
        for tag, body in value.items():
            if tag in _HOLD_VALUES:
                yield from atoms_of(body)
            else:
                yield tag, body


def with_atoms(value: Json, change: Callable[[str, Json], Json]) -> Json:
    """Return a value with `change` applied to the tag and body of each atom, see `atoms_of`."""
    if isinstance(value, str):
        return change("ref", value)
    if isinstance(value, list):
        return [with_atoms(item, change) for item in value]
    if isinstance(value, dict):
        [(tag, body)] = value.items()
        return {tag: with_atoms(body, change)} if tag in _HOLD_VALUES else change(tag, body)
    return value


def identity_of(frame: bytes, constants: Sequence[Json]) -> str:
    """Return the identity of the graph with this frame, as canonical JSON, and these constants."""
    return sha256_hex(frame + msgspec.json.encode(constants))


def split_constants(graph: PieceGraph) -> tuple[PieceGraph, tuple[Json, ...]]:
    """Return a graph's frame and constants; {"hole": n} in the frame stands for the n-th number or string.

    Pieces of different layers often differ only in constants: a layer's name, a scale.
    """
    constants: list[Json] = []

    def extract(value: Json) -> Json:
        if type(value) is int or (type(value) is dict and list(value) in (["s"], ["f"])):
            constants.append(value)
            return {"hole": len(constants) - 1}
        if type(value) is list:
            return [extract(item) for item in value]
        if type(value) is dict and list(value) in (["t"], ["d"]):
            return {tag: extract(body) for tag, body in value.items()}
        return value

    nodes = tuple(node.mapped(extract) if _may_have_holes(node) else node for node in graph.nodes)
    return replace(graph, nodes=nodes), tuple(constants)


def join_constants(frame: PieceGraph, constants: Sequence[Json]) -> PieceGraph:
    """Return the graph with this frame and these constants, see `split_constants`.

    Raises:
        ArtifactError: The frame has a hole without a constant.
    """

    def fill(value: Json) -> Json:
        if type(value) is list:
            return [fill(item) for item in value]
        if type(value) is not dict:
            return value
        if list(value) != ["hole"]:
            return {tag: fill(body) for tag, body in value.items()}
        number = value["hole"]
        if type(number) is not int or not 0 <= number < len(constants):
            msg = f"Constant {str(number)[:20]} of a graph in the plan is missing. Warm the model again."
            raise ArtifactError(msg, actual=number)
        return constants[number]

    return replace(frame, nodes=tuple(node.mapped(fill) for node in frame.nodes))


def _may_have_holes(node: Node) -> bool:
    return node.kind == "function" and node.target != "builtins.getattr"  # its constant selects what is read


class Member(Row):
    """A graph: the number of its frame, and its constants."""

    identity: Digest
    frame: Count
    constants: tuple[Json, ...]


class GraphRows(Record):
    """Graphs in JSON. Graphs that differ only in constants share a frame, see `split_constants`."""

    frames: tuple[PieceGraph, ...]
    members: tuple[Member, ...]


class Graphs(Mapping[str, PieceGraph]):
    """The graphs of a plan by identity.

    Args:
        rows: The result of `cgtool.plan.writing.graph_rows`.

    Raises:
        ValueError: A member's frame is missing, a graph does not match its identity, or occurs twice.
    """

    def __init__(self, rows: GraphRows) -> None:
        self._frames = rows.frames
        self._members = {member.identity: member for member in rows.members}
        self._whole: dict[str, PieceGraph] = {}
        canonical = [frame.canonical() for frame in rows.frames]
        num_constants: dict[int, int] = {}
        for member in rows.members:
            if member.frame >= len(canonical):
                msg = f"the graph {member.identity[:16]} has no frame"
                raise ValueError(msg)
            count = num_constants.setdefault(member.frame, len(member.constants))
            if count != len(member.constants) or (
                identity_of(canonical[member.frame], member.constants) != member.identity
            ):
                msg = f"the graph {member.identity[:16]} was changed"
                raise ValueError(msg)
        if len(self._members) < len(rows.members):
            msg = "a graph occurs twice"
            raise ValueError(msg)

    def parts_of(self, identity: str) -> tuple[int, PieceGraph, tuple[Json, ...]]:
        """Return the number of a graph's frame, the frame, and the constants."""
        member = self._members[identity]
        return member.frame, self._frames[member.frame], member.constants

    def __getitem__(self, identity: str) -> PieceGraph:
        """Return the graph with that identity.

        Raises:
            ArtifactError: A constant of its frame is missing.
        """
        if identity not in self._whole:
            _, frame, constants = self.parts_of(identity)
            self._whole[identity] = join_constants(frame, constants)
        return self._whole[identity]

    def __contains__(self, identity: object) -> bool:
        """Return whether there is a graph with that identity."""
        return identity in self._members

    def __iter__(self) -> Iterator[str]:
        """Iterate over the identities."""
        return iter(self._members)

    def __len__(self) -> int:
        """Return the number of graphs."""
        return len(self._members)
