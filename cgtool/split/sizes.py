"""Sizes: the symbols of a graph, what is known of them, and where a piece reads them.

A size that comes from data (the length of `x[mask]`, of a split by `tolist()`) is a symbol like others from the step on
that runs its op: whoever needs it later reads it off a tensor that has it as a dimension.

Symbols are renamed twice: for the whole graph to s0, s1, ... in the order in which its tensor inputs show them, and for
each piece in the order in which the piece's inputs do. Names of the trace (`s77`) come from names of arguments, and
enter nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cgtool.errors import SplitError
from cgtool.graph.sympy_text import expression_text
from cgtool.plan.pieces import SymbolRange
from cgtool.split import _torch as private
from cgtool.split.nodes import example, numbers_in, tensors_in


@dataclass(frozen=True, kw_only=True)
class GraphSizes:
    """The symbols of the whole graph."""

    shape_env: Any
    #: Symbol of the trace → s0, s1, ...
    names: Mapping[str, str]
    #: By their name in the trace.
    symbols: Mapping[str, Any]
    #: Symbol of the trace → the first input of the graph that has it as a dimension; of one from data, the first
    #: tensor.
    donors: Mapping[str, fx.Node]
    #: The symbols of sizes that come from data, among `names`.
    from_data: frozenset[str]
    #: Node → its place in the graph.
    order: Mapping[fx.Node, int]
    #: What the trace found true of sizes, with the symbols in each.
    relations: list[tuple[Any, frozenset[str]]]

    @classmethod
    def of(cls, inputs: Sequence[fx.Node], nodes: Iterable[fx.Node] = ()) -> GraphSizes:
        """Read the symbols off the tensor inputs of a graph, in order, then those from data off what its nodes give."""
        nodes = list(nodes)
        shape_env = next(
            (env for env in (private.shape_env_of(example(n)) for n in (*inputs, *nodes)) if env is not None), None
        )
        symbols: dict[str, Any] = {}
        donors: dict[str, fx.Node] = {}
        for node in inputs:
            for size in numbers_in(example(node)):
                symbols.update({s.name: s for s in _symbols_of(size) if s.name not in symbols})
            for _, symbol in plain_dims(example(node)):
                donors.setdefault(symbol, node)
        from_data = {
            symbol.name: symbol
            for node in nodes
            for tensor in tensors_in(example(node))
            for size in tensor.shape
            for symbol in _symbols_of(size)
            if private.comes_from_data(symbol)
        }
        symbols.update(from_data)
        for node in nodes:
            for _, symbol in plain_dims(example(node)) if isinstance(example(node), torch.Tensor) else ():
                if symbol in from_data:
                    donors.setdefault(symbol, node)
        return cls(
            shape_env=shape_env,
            names={name: f"s{index}" for index, name in enumerate(symbols)},
            symbols=symbols,
            donors=donors,
            from_data=frozenset(from_data),
            order={node: index for index, node in enumerate(nodes)},
            relations=[] if shape_env is None else _useful_relations(shape_env, set(symbols)),
        )

    def ordered(self, symbols: Iterable[str]) -> list[str]:
        """Return the symbols in the order of the whole graph, each once; unknown ones last, by name."""
        order = {name: index for index, name in enumerate(self.names)}
        return sorted(set(symbols), key=lambda name: (order.get(name, len(order)), name))

    def symbols_in(self, value: Any) -> list[str]:
        """Return the symbols of a symbolic number or of a tensor's sizes, in the order in which they appear."""
        found: dict[str, None] = {}
        for part in numbers_in(value):
            found.update(dict.fromkeys(self.ordered(s.name for s in _symbols_of(part))))
        return list(found)

    def ranges(self, names: Mapping[str, str]) -> tuple[SymbolRange, ...]:
        """Return the range of each symbol in `names`, under its new name."""
        found = []
        for symbol, name in names.items():
            low, high = private.symbol_range(self.shape_env, self.symbols[symbol])
            found.append(SymbolRange(name=name, min=low, max=high))
        return tuple(found)

    def relations_from_data(self) -> tuple[str, ...]:
        """Return the relations that hold of sizes which come from data, under the names of the graph."""
        texts = {expression_text(expr, self.names) for expr, free in self.relations if free & self.from_data}
        return tuple(sorted(texts))

    def facts(self, names: Mapping[str, str]) -> tuple[str, ...]:
        """Return the relations over these symbols, under their new names, that ranges do not imply."""
        texts = {expression_text(expr, names) for expr, free in self.relations if free <= set(names)}
        return tuple(sorted(texts))


def plain_dims(tensor: torch.Tensor) -> Iterator[tuple[int, str]]:
    """Yield each dimension whose size is a symbol by itself, with the symbol's name in the trace."""
    size: Any
    for dim, size in enumerate(tensor.shape):
        if isinstance(size, torch.SymInt) and private.expr_of(size).is_Symbol:
            yield dim, private.expr_of(size).name


def _symbols_of(size: Any) -> list[Any]:
    """Return the free symbols of a size, sorted by name (a set has no order of its own)."""
    if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
        return []
    return sorted(private.expr_of(size).free_symbols, key=lambda symbol: str(symbol.name))


def _useful_relations(shape_env: Any, known: set[str]) -> list[tuple[Any, frozenset[str]]]:
    """Return what the trace found true of sizes, without what ranges imply and what has no word in a plan."""
    found: dict[Any, frozenset[str]] = {}
    for expr in private.relations_of(shape_env):
        free = frozenset(symbol.name for symbol in getattr(expr, "free_symbols", ()))
        if not free or not free <= known or expr in found or private.implied_by_ranges(shape_env, expr):
            continue
        try:
            expression_text(expr, {name: name for name in free})
        except SplitError:
            continue  # a fact about floats: the piece is compiled without it, and guards of its own come with it
        found[expr] = free
    return list(found.items())


@dataclass(frozen=True, kw_only=True)
class PieceSizes:
    """The symbols of one piece."""

    #: Symbol of the trace → s0, s1, ... of the piece, in order.
    names: Mapping[str, str]
    #: Name in the piece → (input position, dimension) to read it from.
    places: Mapping[str, tuple[int, int]]


def piece_sizes(
    takes: list[fx.Node], needed: Iterable[str], sizes: GraphSizes, made: Iterable[str]
) -> tuple[list[fx.Node], PieceSizes]:
    """Return the piece's inputs with donors of sizes appended where needed, and its symbols.

    A symbol that some tensor of the piece holds, though none as a plain dimension, needs a donor too: compiled code
    finds a symbol nowhere else. Those that are `needed` are what its nodes compute with; those that are `made` are
    found in data by its own ops.

    Raises:
        SplitError: A symbol is no dimension of any tensor that the piece could take.
    """
    inputs = list(takes)
    while True:
        names: dict[str, str] = {}
        places: dict[str, tuple[int, int]] = {}
        for position, node in enumerate(inputs):
            for symbol in sizes.symbols_in(example(node)):
                names.setdefault(symbol, f"s{len(names)}")
            for dim, symbol in plain_dims(example(node)):
                places.setdefault(names[symbol], (position, dim))
        new = [symbol for symbol in sizes.ordered(made) if symbol not in names]
        missing = [s for s in sizes.ordered((*names, *needed)) if names.get(s) not in places and s not in new]
        if not missing:
            names.update((symbol, f"s{len(names) + index}") for index, symbol in enumerate(new))
            return inputs, PieceSizes(names=names, places=places)
        donor = sizes.donors.get(missing[0])
        if donor is None or donor in inputs:
            raise SplitError(
                f"the size {missing[0]} is no dimension of any tensor that the model takes (it comes from a number, or "
                f"from data), so no piece can read it; make it static, or derive it from a tensor's shape",
                actual=missing[0],
            )
        inputs.append(donor)
