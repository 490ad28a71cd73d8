"""The records of a piece: a canonical graph as data. Must not import torch.

A `PieceGraph` is what the split writes, what identity is the digest of, what an adaptor compiles, what the `eager`
adaptor's artifact holds, and what the plan carries of each splitting piece. It has no names of nodes, layers, weights
or symbols of the trace: values are numbered, symbols are s0, s1, ... in the order in which the inputs show them.

In JSON a tensor, a symbol and a node are arrays, whose members are the fields of their classes in order::

    expr     = a Python expression over symbols and numbers, see `cgtool.graph.expressions`
    ref      = "%<n>"                                         inputs are %0..%k-1, node j is %k+j
    value    = ref | int | bool | null | [value...] | {"tag": ...} with one tag of:
               f float as repr text ("1e-06", "inf"), s string, t tuple, d [[value, value]...] dict, slice [a, b, c],
               dtype, device, layout, format (memory format), ellipsis 0, c complex [re, im] as text,
               const {"dtype", "shape", "data": base64},
               graph [number of inputs, [node...], value]         what an operation such as torch.cond runs, see `Body`

A device is a type ("cuda"): the index that it has in this process must not enter.
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
#: The adaptor whose artifacts are packages of native code, which torch alone opens.
AOT_INDUCTOR = "aot_inductor"
#: The kinds of artifacts that cgtool's own adaptors make; the kind of another's is the adaptor's name.
KINDS: Mapping[str, str] = {AOT_INDUCTOR: "pt2", "inductor_standalone": "aot", "inductor": "mega", EAGER: "json"}

#: A size, a stride or a bound of one, in elements.
Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]
#: Its form is checked by `cgtool.graph.expressions`, before anything is made of it.
Expression = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_. +*/%()<>=!,&|^~-]{1,4000}\Z")]
Dim = Size | Expression
SymbolName = Annotated[str, Meta(pattern=r"\As[0-9]{1,6}\Z")]
DtypeName = Annotated[str, Meta(pattern=r"\A[a-z][a-z0-9_]{0,31}\Z")]
DeviceName = Annotated[str, Meta(pattern=r"\A[a-z]{1,16}\Z")]
Reference = Annotated[str, Meta(pattern=r"\A%(0|[1-9][0-9]{0,8})\Z")]
#: `ns::op.overload`
OpName = Annotated[str, Meta(pattern=r"\A[A-Za-z_][A-Za-z0-9_]*::[A-Za-z_][A-Za-z0-9_.]*\Z", max_length=200)]
NodeKind = Literal["function", "method", "size"]
#: What a node calls; `cgtool.graph.targets` has the list of what it may call.
Target = Annotated[str, Meta(pattern=r"\A[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*){0,7}\Z", max_length=200)]
#: The name of an argument.
Keyword = Annotated[str, Meta(pattern=r"\A[A-Za-z_][A-Za-z0-9_]{0,63}\Z")]
#: Tags whose bodies hold other values.
_HOLD_VALUES = frozenset({"t", "d", "slice"})


def kind_of(adaptor: str) -> str:
    """Return the kind of an adaptor's artifacts."""
    return KINDS.get(adaptor, adaptor)


class Row(Record, array_like=True):
    """A record that is an array in JSON: there are many of it."""


class TensorMeta(Row):
    """What is known of a tensor before it exists.

    Args:
        dtype: As torch spells it without its package: "float32".
        shape: One dim each: an int, or an expression over the graph's symbols.
        stride: As `shape`, in elements.
        device: "cpu", "cuda".
    """

    dtype: DtypeName
    shape: tuple[Dim, ...]
    stride: tuple[Dim, ...]
    device: DeviceName

    @property
    def dims(self) -> tuple[Dim, ...]:
        """All of its sizes and strides."""
        return (*self.shape, *self.stride)

    def __post_init__(self) -> None:
        """Check what the types do not say."""
        if len(self.shape) != len(self.stride):
            msg = "a tensor has another number of strides than of sizes"
            raise ValueError(msg)


class SymbolRange(Row):
    """A symbol and the sizes it may take, inclusive; `max` None is no limit."""

    name: SymbolName
    min: Size
    max: Size | None

    def within(self, low: int, high: int | None) -> Self:
        """Return the symbol with those of its sizes that lie within bounds."""
        highs = [bound for bound in (self.max, high) if bound is not None]
        return replace(self, min=max(self.min, low), max=min(highs, default=None))


class Node(Row):
    """One operation of a piece; `args` and `kwargs` hold encoded values.

    A "size" node is an integer read from a tensor's shape: its arguments are a reference and the dimension's index, and
    it has no target.
    """

    kind: NodeKind
    target: Target | None
    args: tuple[Json, ...]
    kwargs: dict[Keyword, Json]

    def atoms(self) -> Iterator[tuple[str, Json]]:
        """Yield what its arguments are made of, as `atoms_of` does."""
        return atoms_of([*self.args, *self.kwargs.values()])

    def bodies(self) -> Iterator["Body"]:
        """Yield the bodies among its arguments.

        Raises:
            msgspec.ValidationError: A body is outside the grammar.
        """
        return (msgspec.convert(body, Body) for tag, body in self.atoms() if tag == "graph")

    def mapped(self, change: Callable[[Json], Json]) -> Self:
        """Return a node with what `change` makes of each of its arguments."""
        kwargs = {name: change(self.kwargs[name]) for name in sorted(self.kwargs)}
        return replace(self, args=tuple(map(change, self.args)), kwargs=kwargs)


class Body(Row):
    """A graph within a piece that one of its operations runs: a branch of `torch.cond`, the body of a loop.

    Args:
        num_inputs: Its inputs are %0..%k-1, tensors or integers; it sees nothing else of the piece.
        nodes: In order of execution; "size" nodes are none of them.
        output: An encoded value: what it returns.
    """

    num_inputs: Count
    nodes: tuple[Node, ...]
    output: Json


class PieceGraph(Record):
    """A piece as data; see the module's grammar.

    Args:
        symbols: The symbols in order of first appearance in `inputs`.
        facts: Relations between symbols that hold whenever the piece runs ("Eq(s0 % 8, 0)" as "s0 % 8 == 0").
        inputs: Tensors only: sizes are read from them by "size" nodes.
        aliases: Groups of input positions that share one storage.
        nodes: In order of execution.
        outputs: References, tensors only for a compiled piece.
        results: What is known of `outputs`, one each.
        ops: Custom ops in the piece and the digest of what the compiler believes of them (schema and fake
            implementation).
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
        """Return 64 hexadecimal digits: equal for two pieces that compile to the same code."""
        frame, constants = taken_apart(self)
        return identity_of(frame.canonical(), constants)

    def every_node(self) -> Iterator[Node]:
        """Yield all nodes, those of the bodies that they run included."""
        return _with_nodes_of_bodies(self.nodes)


def _with_nodes_of_bodies(nodes: Sequence[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        for body in node.bodies():
            yield from _with_nodes_of_bodies(body.nodes)


def atoms_of(value: Json) -> Iterator[tuple[str, Json]]:
    """Yield what a value is made of as (tag, body), references as ("ref", "%3"), in order; numbers are left out."""
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
    """Return a value in which each of its atoms is what `change` makes of its tag and body, as `atoms_of` has them."""
    if isinstance(value, str):
        return change("ref", value)
    if isinstance(value, list):
        return [with_atoms(item, change) for item in value]
    if isinstance(value, dict):
        [(tag, body)] = value.items()
        return {tag: with_atoms(body, change)} if tag in _HOLD_VALUES else change(tag, body)
    return value


def identity_of(frame: bytes, constants: Sequence[Json]) -> str:
    """Return the identity of the graph that has this frame, in canonical JSON, and these constants."""
    return sha256_hex(frame + msgspec.json.encode(constants))


def taken_apart(graph: PieceGraph) -> tuple[PieceGraph, tuple[Json, ...]]:
    """Return a graph's frame, in which {"hole": n} stands for the n-th number or text that it passes, and these.

    The pieces of many layers differ in such constants alone: a layer's name, a scale.
    """
    constants: list[Json] = []

    def empty(value: Json) -> Json:
        if type(value) is int or (type(value) is dict and list(value) in (["s"], ["f"])):
            constants.append(value)
            return {"hole": len(constants) - 1}
        if type(value) is list:
            return [empty(item) for item in value]
        if type(value) is dict and list(value) in (["t"], ["d"]):
            return {tag: empty(body) for tag, body in value.items()}
        return value

    nodes = tuple(node.mapped(empty) if _may_have_holes(node) else node for node in graph.nodes)
    return replace(graph, nodes=nodes), tuple(constants)


def put_together(frame: PieceGraph, constants: Sequence[Json]) -> PieceGraph:
    """Return the graph that `taken_apart` took apart.

    Raises:
        ArtifactError: The frame has a hole for which there is no constant.
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
            msg = f"The hole {str(number)[:20]} of a graph of the plan has no constant: warm again."
            raise ArtifactError(msg, actual=number)
        return constants[number]

    return replace(frame, nodes=tuple(node.mapped(fill) for node in frame.nodes))


def _may_have_holes(node: Node) -> bool:
    return node.kind == "function" and node.target != "builtins.getattr"  # what that reads depends on its constant


class Member(Row):
    """A graph as its frame, by number, and its constants."""

    identity: Digest
    frame: Count
    constants: tuple[Json, ...]


class GraphRows(Record):
    """Graphs in JSON: those that differ in constants alone share one frame (`cgtool.plan.pieces.taken_apart`)."""

    frames: tuple[PieceGraph, ...]
    members: tuple[Member, ...]


class Graphs(Mapping[str, PieceGraph]):
    """The graphs of a plan by identity, as they were read.

    Args:
        rows: As `graph_rows` returned them.

    Raises:
        ValueError: A member speaks of a frame that is not there, or is another graph than its identity says.
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
            msg = "a graph is there twice"
            raise ValueError(msg)

    def parts_of(self, identity: str) -> tuple[int, PieceGraph, tuple[Json, ...]]:
        """Return the number of a graph's frame, the frame, and the constants that stand in its holes."""
        member = self._members[identity]
        return member.frame, self._frames[member.frame], member.constants

    def __getitem__(self, identity: str) -> PieceGraph:
        """Return the graph of that identity.

        Raises:
            ArtifactError: A hole of its frame has no constant.
        """
        if identity not in self._whole:
            _, frame, constants = self.parts_of(identity)
            self._whole[identity] = put_together(frame, constants)
        return self._whole[identity]

    def __contains__(self, identity: object) -> bool:
        """Return whether there is a graph of that identity."""
        return identity in self._members

    def __iter__(self) -> Iterator[str]:
        """Iterate over the identities."""
        return iter(self._members)

    def __len__(self) -> int:
        """Return how many graphs there are."""
        return len(self._members)
