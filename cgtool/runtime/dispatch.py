"""Choose the compiled function of each piece by the sizes of a call, and map shapes to a variant's symbols.

A concrete size wins over a range, and a range over the general shape (`cgtool.plan.shapes` defines the order). The
choice is made once per call for the whole variant: `ShapeTable` maps the values of its symbols to a tuple with a
function for every piece. Must not import torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from cgtool.errors import ArtifactError
from cgtool.graph.expressions import evaluate, holds, symbols_of
from cgtool.host import count
from cgtool.plan.pieces import PieceGraph
from cgtool.plan.records import Step, Variant
from cgtool.plan.shapes import Shape, shape_order, shape_text
from cgtool.threads import ForkedLock

Boxed = Callable[[list[Any]], Sequence[Any]]
#: The alignment, in bytes, that code for accelerators assumes of its inputs.
ALIGNMENT = 16
#: Devices whose code accepts unaligned inputs: Inductor's C++ uses unaligned vector loads.
UNALIGNED_DEVICES = frozenset({"cpu", "meta"})

#: The most choices that are cached; beyond that, new sizes are resolved at every call.
_MAX_CACHED = 65536


class Unopened:
    """A function that is opened when it is first needed; concurrent callers get the same function.

    Args:
        open_now: Opens the function. Its errors are raised to every caller.
    """

    def __init__(self, open_now: Callable[[], Boxed]) -> None:
        self._open_now = open_now
        self._lock = ForkedLock()
        self._function: Boxed | None = None

    def open(self) -> Boxed:
        """Return the function, opening it if necessary."""
        with self._lock:
            if self._function is None:
                self._function = self._open_now()
                count("opens")
                del self._open_now  # also frees the bytes of the artifact
            return self._function


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A compiled function of a piece and the sizes that it covers.

    Args:
        shape: The sizes by dimension name, for error messages.
        bounds: The same sizes by the variant's symbols, inclusive.
        guards: Conditions that the compiler relied on, over the variant's symbols.
        function: The function.
    """

    shape: Shape
    bounds: Bounds
    guards: Sequence[str] = ()
    function: Boxed | Unopened

    def fits(self, values: Mapping[str, int]) -> bool:
        """Return whether the function covers these values of the variant's symbols."""
        within = all(symbol in values and low <= values[symbol] <= high for symbol, (low, high) in self.bounds.items())
        # The program checks guards over sizes from data, once it knows them.
        return within and all(holds(text, values) for text in self.guards if values.keys() >= set(symbols_of(text)))


class PiecewiseBackend(msgspec.Struct, frozen=True, kw_only=True):
    """The functions of one piece of one variant.

    Args:
        general: The function for every size that the variant's symbols allow; None if only sizes or ranges were
            compiled. Its compiler guards are among the variant's relations.
        choices: The functions for sizes and ranges, in order of preference.

    Each function is boxed: it takes a list of tensors, which it may empty, and returns a list or tuple. A function that
    is not open yet is opened when it is first chosen.
    """

    general: Boxed | Unopened | None
    choices: Sequence[Choice] = ()

    def choose(self, values: Mapping[str, int]) -> Boxed | Unopened | None:
        """Return the function for these values of the variant's symbols, or None if none was compiled for them."""
        return next((choice.function for choice in self.choices if choice.fits(values)), self.general)

    def open_all(self) -> None:
        """Open every function that is not open yet."""
        for function in (self.general, *(choice.function for choice in self.choices)):
            if isinstance(function, Unopened):
                function.open()

    def symbols(self) -> set[str]:
        """Return the symbols that the choice depends on."""
        bounded = {symbol for choice in self.choices for symbol in choice.bounds}
        return bounded.union(*(symbols_of(text) for choice in self.choices for text in choice.guards))


class ShapeTable:
    """The functions of all pieces of one variant, by the values of its symbols.

    Args:
        symbols: The variant's symbols, in the order of the values passed to `choose`.
        pieces: The backends in the order of the steps.
        wrap: Takes the position of a piece and a function chosen for it, and returns the function to call instead.
    """

    def __init__(
        self,
        symbols: Sequence[str],
        pieces: Iterable[PiecewiseBackend],
        wrap: Callable[[int, Boxed], Boxed] = lambda _, function: function,
    ) -> None:
        self._symbols = tuple(symbols)
        self._pieces = tuple(pieces)
        self._wrap = functools.cache(wrap)
        deciding = set[str]().union(*(piece.symbols() for piece in self._pieces))
        self._deciding = tuple(i for i, symbol in enumerate(self._symbols) if symbol in deciding)
        self._general = None if deciding else self._decide(())
        # Needs no lock: threads that resolve the same key get equal tables.
        self._cache: dict[tuple[int, ...], tuple[Boxed, ...] | None] = {}

    def choose(self, values: tuple[int, ...]) -> tuple[Boxed, ...] | None:
        """Return a function for each piece, or None if any piece has none for these sizes."""
        if self._general is not None:
            return self._general
        deciding = tuple([values[i] for i in self._deciding])
        try:
            return self._cache[deciding]
        except KeyError:
            pass
        table = self._decide(values)
        if len(self._cache) < _MAX_CACHED:
            self._cache[deciding] = table
        return table

    def _decide(self, values: tuple[int, ...]) -> tuple[Boxed, ...] | None:
        named = dict(zip(self._symbols, values, strict=False))
        chosen = [piece.choose(named) for piece in self._pieces]
        functions = [function for function in chosen if function is not None]
        if len(functions) < len(chosen):
            return None
        opened = [function.open() if isinstance(function, Unopened) else function for function in functions]
        return tuple([self._wrap(position, function) for position, function in enumerate(opened)])

    @property
    def covers_all(self) -> bool:
        """Whether every piece has a function for every size."""
        return all(piece.general is not None for piece in self._pieces)

    def covered(self) -> str:
        """Return the compiled sizes as text, for error messages."""
        shapes = [choice.shape for piece in self._pieces for choice in piece.choices]
        return ", ".join(dict.fromkeys(map(shape_text, sorted(shapes, key=shape_order)))) or "none"


#: Symbol of a variant → its smallest and largest size, inclusive.
Bounds = Mapping[str, tuple[int, int]]


def symbol_bounds(variant: Variant, shape: Shape) -> Bounds:
    """Return the bounds of a shape on the symbols of its variant; empty if it covers all of the variant.

    Raises:
        ArtifactError: The shape has a dimension that the variant does not have.
    """
    bounds: dict[str, tuple[int, int]] = {}
    for name, limits in shape.items():
        if name in variant.fixed:
            continue
        if name not in variant.dims:
            msg = f"The manifest lists the shape {shape_text(shape)}, but its plan has no dimension {name}."
            raise ArtifactError(f"{msg} Warm the model again.", expected=sorted(variant.dims), actual=name)
        bounds.update(dict.fromkeys(variant.dims[name], limits))
    return bounds


def graph_at(graph: PieceGraph, step: Step, bounds: Bounds) -> PieceGraph:
    """Return a piece's graph with its symbols restricted to the variant's sizes or ranges."""
    if not bounds:
        return graph
    from cgtool.graph.specialise import restrict  # imported lazily: the general shape does not need it

    fixed = {symbol: low for symbol, (low, high) in bounds.items() if low == high}
    graph_bounds: dict[str, tuple[int, int | None]] = {}
    for symbol, text in step.symbols.items():
        if text in bounds:
            graph_bounds[symbol] = bounds[text]
        elif set(symbols_of(text)) <= fixed.keys():
            size = int(evaluate(text, fixed))
            graph_bounds[symbol] = size, size
    return restrict(graph, graph_bounds)
