"""The records of a piece: a canonical graph as data. Must not import torch.

A `PieceGraph` is what the split writes, what identity is the digest of, what an adaptor compiles, what the `eager`
adaptor's artifact holds, and what the plan carries of each splitting piece. It has no names of nodes, layers, weights
or symbols of the trace: values are numbered, symbols are s0, s1, ... in the order in which the inputs show them.

JSON grammar of a piece graph::

    graph    = {"schema": 1, "symbols": [symbol...], "facts": [expr...], "inputs": [tensor...],
                "aliases": [[int...]...], "nodes": [node...], "outputs": [ref...], "results": [tensor...],
                "ops": {op: digest}}
    symbol   = [name, min, max|null]                          "s0", 2, null
    expr     = a Python expression over symbols and integers with + - * // % ** Max() Min() and comparisons
    dim      = int | expr
    tensor   = [dtype, [dim...], [stride dim...], device]     "float32", ["s0", 64], [64, 1], "cpu"
    node     = [kind, target, [value...], {name: value}]      kind: "function" | "method" | "size"
    ref      = "%<n>"                                         inputs are %0..%k-1, node j is %k+j
    value    = ref | int | bool | null | [value...] | {"tag": ...} with one tag of:
               f float as repr text ("1e-06", "inf"), s string, t tuple, d [[value, value]...] dict, slice [a, b, c],
               dtype, device, layout, format (memory format), ellipsis 0, c complex [re, im] as text,
               const {"dtype", "shape", "data": base64}
    A "size" node is [ "size", null, [ref, dim index], {} ]: an integer read from a tensor's shape.

Devices are a type, or a type and a relative order ("cuda", "cuda:+1"): the device index of this process must not enter.
"""

from __future__ import annotations

from typing import Any

from cgtool.digests import digest_of
from cgtool.records import dataclass

SCHEMA = 1

Dim = int | str
Json = Any

#: The adaptor whose artifacts are piece graphs, which torch alone runs.
EAGER = "eager"
#: The adaptor whose artifacts are packages of native code, which torch alone opens.
AOT_INDUCTOR = "aot_inductor"


@dataclass(frozen=True, kw_only=True)
class TensorMeta:
    """What is known of a tensor before it exists.

    Args:
        dtype: As torch spells it without its package: "float32".
        shape: One dim each: an int, or an expression over the graph's symbols.
        stride: As `shape`, in elements.
        device: "cpu", "cuda", "cuda:+1".
    """

    dtype: str
    shape: tuple[Dim, ...]
    stride: tuple[Dim, ...]
    device: str

    def to_json(self) -> Json:
        """Return the record as JSON; the grammar stands at the head of this module."""
        return [self.dtype, list(self.shape), list(self.stride), self.device]

    @classmethod
    def from_json(cls, data: Json) -> TensorMeta:
        """Return the TensorMeta of `data`, as `to_json` wrote it."""
        dtype, shape, stride, device = data
        return cls(dtype=dtype, shape=tuple(shape), stride=tuple(stride), device=device)


@dataclass(frozen=True, kw_only=True)
class SymbolRange:
    """A symbol and the sizes it may take, inclusive; `max` None is no limit."""

    name: str
    min: int
    max: int | None

    def to_json(self) -> Json:
        """Return the record as JSON; the grammar stands at the head of this module."""
        return [self.name, self.min, self.max]

    @classmethod
    def from_json(cls, data: Json) -> SymbolRange:
        """Return the SymbolRange of `data`, as `to_json` wrote it."""
        name, low, high = data
        return cls(name=name, min=low, max=high)


@dataclass(frozen=True, kw_only=True)
class Node:
    """One operation of a piece. `kind` is "function", "method" or "size"; `args` and `kwargs` hold encoded values."""

    kind: str
    target: str | None
    args: tuple[Json, ...]
    kwargs: dict[str, Json]

    def to_json(self) -> Json:
        """Return the record as JSON; the grammar stands at the head of this module."""
        return [self.kind, self.target, list(self.args), self.kwargs]

    @classmethod
    def from_json(cls, data: Json) -> Node:
        """Return the Node of `data`, as `to_json` wrote it."""
        kind, target, args, kwargs = data
        return cls(kind=kind, target=target, args=tuple(args), kwargs=kwargs)


@dataclass(frozen=True, kw_only=True)
class PieceGraph:
    """A piece as data; see the module's grammar.

    Args:
        symbols: The symbols in order of first appearance in `inputs`.
        facts: Relations between symbols that hold whenever the piece runs ("Eq(s0 % 8, 0)" as "s0 % 8 == 0").
        inputs: Tensors only: sizes are read from them by "size" nodes.
        aliases: Groups of input positions that share one storage.
        nodes: In order of execution.
        outputs: References, tensors only for a compiled piece.
        results: What is known of `outputs`, one each.
        ops: Custom ops in the piece (`ns::op.overload`) and the digest of what the compiler believes of them
            (schema and fake implementation).
    """

    symbols: tuple[SymbolRange, ...]
    facts: tuple[str, ...]
    inputs: tuple[TensorMeta, ...]
    aliases: tuple[tuple[int, ...], ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    results: tuple[TensorMeta, ...]
    ops: dict[str, str]

    def to_json(self) -> Json:
        """Return the record as JSON; the grammar stands at the head of this module."""
        return {
            "schema": SCHEMA,
            "symbols": [s.to_json() for s in self.symbols],
            "facts": list(self.facts),
            "inputs": [t.to_json() for t in self.inputs],
            "aliases": [list(group) for group in self.aliases],
            "nodes": [n.to_json() for n in self.nodes],
            "outputs": list(self.outputs),
            "results": [t.to_json() for t in self.results],
            "ops": dict(self.ops),
        }

    @classmethod
    def from_json(cls, data: Json) -> PieceGraph:
        """Return the PieceGraph of `data`, as `to_json` wrote it."""
        return cls(
            symbols=tuple(SymbolRange.from_json(s) for s in data["symbols"]),
            facts=tuple(data["facts"]),
            inputs=tuple(TensorMeta.from_json(t) for t in data["inputs"]),
            aliases=tuple(tuple(group) for group in data["aliases"]),
            nodes=tuple(Node.from_json(n) for n in data["nodes"]),
            outputs=tuple(data["outputs"]),
            results=tuple(TensorMeta.from_json(t) for t in data["results"]),
            ops=dict(data["ops"]),
        )

    def identity(self) -> str:
        """Return the SHA-256 of the canonical JSON: equal for two pieces that compile to the same code."""
        return digest_of(self.to_json())
