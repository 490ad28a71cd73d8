"""Which compiled function of a piece serves a call, by its sizes, and what a shape means for a variant's symbols.

A concrete size wins over a range, a range over the general shape: `cgtool.plan.shapes` has the order. The decision is
made once per call for the whole variant: `ShapeTable` turns the values of its symbols into one tuple with a function
for every piece. Must not import torch.
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
#: What code for accelerators assumes of where its inputs begin, in bytes.
ALIGNMENT = 16
#: Devices whose code reads and writes memory wherever it begins: Inductor's C++ loads vectors unaligned.
ANYWHERE = frozenset({"cpu", "meta"})

#: Decisions that are remembered; more different sizes than this are decided anew each time.
_MAX_REMEMBERED = 65536


class Unopened:
    """A function that is opened when it is first wanted; two threads that want it at once get one function.

    Args:
        open_now: Opens it. What this raises is raised to each who wants the function.
    """

    def __init__(self, open_now: Callable[[], Boxed]) -> None:
        self._open_now = open_now
        self._lock = ForkedLock()
        self._function: Boxed | None = None

    def opened(self) -> Boxed:
        """Return the function."""
        with self._lock:
            if self._function is None:
                self._function = self._open_now()
                count("opens")
                del self._open_now  # and with it the bytes that it was opened from
            return self._function


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A function that serves some sizes of a piece.

    Args:
        shape: Which sizes, in the names of dimensions: for an error's sentence.
        bounds: The same by the variant's symbols, inclusive.
        guards: What the compiler relied on, over the variant's symbols.
        function: Serves them.
    """

    shape: Shape
    bounds: Bounds
    guards: Sequence[str] = ()
    function: Boxed | Unopened

    def fits(self, values: Mapping[str, int]) -> bool:
        """Return whether it serves these values of the variant's symbols."""
        within = all(symbol in values and low <= values[symbol] <= high for symbol, (low, high) in self.bounds.items())
        # those over sizes that come from data are checked where the program finds these
        return within and all(holds(text, values) for text in self.guards if values.keys() >= set(symbols_of(text)))


class PiecewiseBackend(msgspec.Struct, frozen=True, kw_only=True):
    """The functions of one piece of one variant.

    Args:
        general: Serves every size that the variant's symbols allow; None where only sizes or ranges were compiled. What
            its compiler relied on are relations of the variant.
        choices: Those for sizes and ranges, the one to be preferred first.

    Each function is boxed: it takes a list of tensors, which it may empty, and returns a list or tuple. One that is not
    opened yet is opened when it is first chosen.
    """

    general: Boxed | Unopened | None
    choices: Sequence[Choice] = ()

    def choose(self, values: Mapping[str, int]) -> Boxed | Unopened | None:
        """Return the function for these values of the variant's symbols, or None when none was compiled for them."""
        return next((choice.function for choice in self.choices if choice.fits(values)), self.general)

    def open_all(self) -> None:
        """Open every function that is not open yet."""
        for function in (self.general, *(choice.function for choice in self.choices)):
            if isinstance(function, Unopened):
                function.opened()

    def symbols(self) -> set[str]:
        """Return the symbols that the choice depends on."""
        found = {symbol for choice in self.choices for symbol in choice.bounds}
        return found.union(*(symbols_of(text) for choice in self.choices for text in choice.guards))


class ShapeTable:
    """The functions of all pieces of one variant, by the values of its symbols.

    Args:
        symbols: The variant's symbols, in the order in which `choose` gets their values.
        pieces: The backends in the order of the steps.
        wrap: Takes a position among the pieces and a function chosen there, returns what is called in its place.
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
        # Equal keys always get equal tables, so it does not matter which thread writes one first.
        self._remembered: dict[tuple[int, ...], tuple[Boxed, ...] | None] = {}

    def choose(self, values: tuple[int, ...]) -> tuple[Boxed, ...] | None:
        """Return a function for each piece, or None when some piece has none for these sizes."""
        if self._general is not None:
            return self._general
        deciding = tuple([values[i] for i in self._deciding])
        try:
            return self._remembered[deciding]
        except KeyError:
            pass
        table = self._decide(values)
        if len(self._remembered) < _MAX_REMEMBERED:
            self._remembered[deciding] = table
        return table

    def _decide(self, values: tuple[int, ...]) -> tuple[Boxed, ...] | None:
        named = dict(zip(self._symbols, values, strict=False))
        chosen = [piece.choose(named) for piece in self._pieces]
        functions = [function for function in chosen if function is not None]
        if len(functions) < len(chosen):
            return None
        opened = [function.opened() if isinstance(function, Unopened) else function for function in functions]
        return tuple([self._wrap(position, function) for position, function in enumerate(opened)])

    @property
    def covers_all(self) -> bool:
        """Whether every piece has a function for every size."""
        return all(piece.general is not None for piece in self._pieces)

    def covered(self) -> str:
        """Say which sizes were compiled, for an error's sentence."""
        shapes = [choice.shape for piece in self._pieces for choice in piece.choices]
        return ", ".join(dict.fromkeys(map(shape_text, sorted(shapes, key=shape_order)))) or "none"


#: Symbol of a variant → its smallest and its largest size, inclusive.
Bounds = Mapping[str, tuple[int, int]]


def symbol_bounds(variant: Variant, shape: Shape) -> Bounds:
    """Return the bounds that a shape sets to the symbols of its variant; none where it serves all of the variant.

    Raises:
        ArtifactError: The shape names a dimension that the variant does not have.
    """
    bounds: dict[str, tuple[int, int]] = {}
    for name, limits in shape.items():
        if name in variant.fixed:
            continue
        if name not in variant.dims:
            msg = f"The manifest names the shape {shape_text(shape)}, whose dimension {name} its plan does not have."
            raise ArtifactError(f"{msg} Warm the model again.", expected=sorted(variant.dims), actual=name)
        bounds.update(dict.fromkeys(variant.dims[name], limits))
    return bounds


def graph_at(graph: PieceGraph, step: Step, bounds: Bounds) -> PieceGraph:
    """Return a piece's graph with its own symbols at the sizes, or within the ranges, of the variant's."""
    if not bounds:
        return graph
    from cgtool.graph.specialise import restrict  # most starts know one shape, the general one

    fixed = {symbol: low for symbol, (low, high) in bounds.items() if low == high}
    own: dict[str, tuple[int, int | None]] = {}
    for symbol, text in step.symbols.items():
        if text in bounds:
            own[symbol] = bounds[text]
        elif set(symbols_of(text)) <= fixed.keys():
            size = int(evaluate(text, fixed))
            own[symbol] = size, size
    return restrict(graph, own)
