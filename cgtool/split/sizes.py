"""The symbols of a graph, their ranges and relations, and where a piece reads their values.

A data-dependent size (the length of `x[mask]` or of a split by `tolist()`) is an ordinary symbol once its op has run:
later pieces read it from a tensor that has it as a dimension.

Symbols are renamed twice to s0, s1, ...: for the whole graph in order of appearance in its tensor inputs, and for each
piece in order of appearance in the piece's inputs. Names of the trace (`s77`) are not kept.
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
    #: Symbol of the trace → its sympy symbol.
    symbols: Mapping[str, Any]
    #: Symbol of the trace → the first input of the graph, or for a data-dependent symbol the first tensor, that has it
    #: as a dimension.
    donors: Mapping[str, fx.Node]
    #: The data-dependent symbols among `names`.
    from_data: frozenset[str]
    #: Node → its index in the graph.
    order: Mapping[fx.Node, int]
    #: Relations between sizes that the trace relies on, with the symbols of each.
    relations: list[tuple[Any, frozenset[str]]]

    @classmethod
    def of(cls, inputs: Sequence[fx.Node], nodes: Iterable[fx.Node] = ()) -> GraphSizes:
        """Collect the symbols of a graph's tensor inputs, in order, then the data-dependent ones of its nodes."""
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
        """Return the symbols in the order of the graph, without duplicates; unknown ones last, by name."""
        order = {name: index for index, name in enumerate(self.names)}
        return sorted(set(symbols), key=lambda name: (order.get(name, len(order)), name))

    def symbols_in(self, value: Any) -> list[str]:
        """Return the symbols of a symbolic number or of a tensor's sizes and strides, in order of appearance."""
        found: dict[str, None] = {}
        for part in numbers_in(value):
            found.update(dict.fromkeys(self.ordered(s.name for s in _symbols_of(part))))
        return list(found)

    def ranges(self, names: Mapping[str, str]) -> tuple[SymbolRange, ...]:
        """Return the range of each symbol in `names`, under its new name."""
        ranges = []
        for symbol, name in names.items():
            low, high = private.symbol_range(self.shape_env, self.symbols[symbol])
            ranges.append(SymbolRange(name=name, min=low, max=high))
        return tuple(ranges)

    def relations_from_data(self) -> tuple[str, ...]:
        """Return the relations that contain data-dependent sizes, with the names of the graph."""
        texts = {expression_text(expr, self.names) for expr, free in self.relations if free & self.from_data}
        return tuple(sorted(texts))

    def facts(self, names: Mapping[str, str]) -> tuple[str, ...]:
        """Return the relations over these symbols that their ranges do not imply, with the new names."""
        texts = {expression_text(expr, names) for expr, free in self.relations if free <= set(names)}
        return tuple(sorted(texts))


def plain_dims(tensor: torch.Tensor) -> Iterator[tuple[int, str]]:
    """Yield each dimension whose size is a single symbol, with the symbol's name in the trace."""
    size: Any
    for dim, size in enumerate(tensor.shape):
        if isinstance(size, torch.SymInt) and private.expr_of(size).is_Symbol:
            yield dim, private.expr_of(size).name


def _symbols_of(size: Any) -> list[Any]:
    """Return the free symbols of a size, sorted by name."""
    if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
        return []
    return sorted(private.expr_of(size).free_symbols, key=lambda symbol: str(symbol.name))


def _useful_relations(shape_env: Any, known: set[str]) -> list[tuple[Any, frozenset[str]]]:
    """Return the relations between known symbols that their ranges do not imply and that a plan can express."""
    found: dict[Any, frozenset[str]] = {}
    for expr in private.relations_of(shape_env):
        free = frozenset(symbol.name for symbol in getattr(expr, "free_symbols", ()))
        if not free or not free <= known or expr in found or private.implied_by_ranges(shape_env, expr):
            continue
        try:
            expression_text(expr, {name: name for name in free})
        except SplitError:
            continue  # a relation of floats; the piece is compiled without it, and its compilation adds guards
        found[expr] = free
    return list(found.items())


@dataclass(frozen=True, kw_only=True)
class PieceSizes:
    """The symbols of one piece."""

    #: Symbol of the trace → s0, s1, ... of the piece, in order.
    names: Mapping[str, str]
    #: Symbol of the piece → (input position, dimension) to read it from.
    places: Mapping[str, tuple[int, int]]


def piece_sizes(
    takes: list[fx.Node], needed: Iterable[str], sizes: GraphSizes, made: Iterable[str]
) -> tuple[list[fx.Node], PieceSizes]:
    """Return the piece's symbols, and its inputs with donors of missing sizes appended.

    Compiled code reads symbols from plain dimensions only, so a symbol that occurs only in expressions needs a donor.

    Args:
        takes: The tensors that the piece takes.
        needed: The symbols that its nodes compute with.
        sizes: The symbols of the graph.
        made: The data-dependent symbols that its own ops define.

    Raises:
        SplitError: A symbol is not a dimension of any tensor that the piece could take.
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
                f"the size {missing[0]} is not a dimension of any tensor that the model takes (it comes from a number, "
                f"or from data), so no piece can read it; make it static, or derive it from a tensor's shape",
                actual=missing[0],
            )
        inputs.append(donor)
