"""Which compiled function of a piece serves a call: by its sizes. Must not import torch.

A concrete size wins over a range, a range over the general shape. The decision is made once per call for the whole
variant: `ShapeTable` turns the values of its symbols into one tuple with a function for every piece.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any

from cgtool.graph.expressions import evaluate, symbols_of
from cgtool.records import dataclass

Boxed = Callable[[list[Any]], Sequence[Any]]

#: ((symbol of the variant, size), ...), sorted
SizeKey = tuple[tuple[str, int], ...]
#: symbol of the variant → (smallest, largest), inclusive; None is no limit
Ranges = Mapping[str, tuple[int, int | None]]

#: Decisions that are remembered; more different sizes than this are decided anew each time.
_MAX_REMEMBERED = 65536


class ForkedLock:
    """A lock that one thread may take again, and that a child of `fork` finds free: who held it is not there."""

    def __init__(self) -> None:
        self.renew()
        _locks.add(self)

    def renew(self) -> None:
        """Forget who holds it."""
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


_locks: weakref.WeakSet[ForkedLock] = weakref.WeakSet()


def _renew_locks() -> None:
    for lock in _locks:
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


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
                del self._open_now  # and with it the bytes that it was opened from
            return self._function


@dataclass(frozen=True, kw_only=True)
class PiecewiseBackend:
    """The opened functions of one piece of one variant.

    Args:
        general: Serves every size that the variant's symbols allow; None where only sizes or ranges were compiled.
        sizes: By concrete sizes of the variant's symbols; a key may leave symbols open.
        ranges: By inclusive ranges, in order of preference.
        guards: What the compiler relied on for a size or a range, over the variant's symbols, by function. Those of the
            general shape are relations of the variant.

    Each function is boxed: it takes a list of tensors, which it may empty, and returns a list or tuple. One that is not
    opened yet is opened when it is first chosen.
    """

    general: Boxed | Unopened | None
    sizes: Mapping[SizeKey, Boxed | Unopened] = field(default_factory=dict)
    ranges: Sequence[tuple[Ranges, Boxed | Unopened]] = ()
    guards: Mapping[Boxed | Unopened, Sequence[str]] = field(default_factory=dict)

    def choose(self, values: Mapping[str, int]) -> Boxed | Unopened | None:
        """Return the function for these values of the variant's symbols, or None when none was compiled for them."""
        fitting = [
            key
            for key, function in self.sizes.items()
            if all(values.get(symbol) == size for symbol, size in key) and self._holds(function, values)
        ]
        if fitting:
            # Of two that fit, the one that fixes more was compiled for exactly this.
            return self.sizes[max(fitting, key=len)]
        for ranges, function in self.ranges:
            within = all(_within(values.get(symbol), bounds) for symbol, bounds in ranges.items())
            if within and self._holds(function, values):
                return function
        return self.general

    def symbols(self) -> set[str]:
        """Return the symbols that the choice depends on."""
        found = {symbol for key in self.sizes for symbol, _ in key}
        found |= {symbol for ranges, _ in self.ranges for symbol in ranges}
        return found.union(*(symbols_of(text) for texts in self.guards.values() for text in texts))

    def _holds(self, function: Boxed | Unopened, values: Mapping[str, int]) -> bool:
        return all(evaluate(text, values) for text in self.guards.get(function, ()))


def _within(value: int | None, bounds: tuple[int, int | None]) -> bool:
    low, high = bounds
    return value is not None and low <= value and (high is None or value <= high)


class ShapeTable:
    """The functions of all pieces of one variant, by the values of its symbols.

    Args:
        symbols: The variant's symbols, in the order in which `choose` gets their values.
        pieces: The backends in the order of the steps.
    """

    def __init__(self, symbols: Sequence[str], pieces: Iterable[PiecewiseBackend]) -> None:
        self._symbols = tuple(symbols)
        self._pieces = tuple(pieces)
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
        return tuple([function.opened() if isinstance(function, Unopened) else function for function in functions])

    def covered(self) -> str:
        """Say which sizes were compiled, for an error's sentence."""
        sizes = {" and ".join(str(size) for _, size in key) for piece in self._pieces for key in piece.sizes}
        spans = {
            " and ".join(f"{low} to {high if high is not None else 'any'}" for low, high in ranges.values())
            for piece in self._pieces
            for ranges, _ in piece.ranges
        }
        return ", ".join(sorted(sizes, key=lambda text: (len(text), text)) + sorted(spans)) or "none"
