"""Data-dependent sizes and numbers, which an op computes from the values of a tensor and not from its shape.

Such an op (`nonzero`, `x[mask]`, `item`, `unique`) runs eagerly between compiled pieces, as do torch's assertions about
its result and the first op that creates a tensor of that size. Later pieces read the size from that tensor's shape. A
number that is in no shape is read from its tensor again by each piece that needs it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from cgtool.split import _torch as private
from cgtool.split.nodes import (
    RUNS,
    Kind,
    cannot_split,
    example,
    is_getitem_of_bundle,
    leaves_of,
    numbers_in,
    short_name,
    tensors_in,
)
from cgtool.split.program import Program
from cgtool.split.sizes import plain_dims

_TAKE_MASKS = frozenset({"getitem", "index", "masked_select", "setitem", "index_put", "index_put_"})
_MASKS = (torch.bool, torch.uint8)
_NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def is_read(node: fx.Node, kinds: dict[fx.Node, Kind]) -> bool:
    """Return whether `node` reads a number from a tensor: `x.sum().item()`."""
    return kinds[node] is Kind.EFFECT and isinstance(example(node), _NUMBERS)


def data_dependent_nodes(kinds: dict[fx.Node, Kind]) -> set[fx.Node]:
    """Return the nodes that run eagerly because they compute or need data-dependent sizes or numbers."""
    found: set[fx.Node] = set()
    shown: set[str] = set()
    derived: set[fx.Node] = set()
    for node, kind in kinds.items():
        of_data = derived.intersection(leaves_of(node))
        if is_read(node, kinds) or (kind is Kind.SIZE and of_data):
            derived.add(node)
        if kind not in RUNS:
            continue
        values = [*tensors_in(example(node)), *(example(leaf) for leaf in leaves_of(node) if _is_number(leaf, kinds))]
        symbols = {name for value in values for name in symbols_from_data(value)}
        if (
            node.meta.get("unbacked_bindings")
            or is_read(node, kinds)
            or (kind is Kind.EFFECT and (of_data or _takes_data_dependent_number(node)))
            or any(not isinstance(example(leaf), torch.SymInt) for leaf in of_data)
            or _counts_mask(node)
            or not symbols <= shown
        ):
            found.add(node)
        if kind is Kind.TENSOR:
            shown.update(symbol for _, symbol in plain_dims(example(node)))
    return found


def is_source(node: fx.Node) -> bool:
    """Return whether `node` computes a data-dependent size or number."""
    return bool(node.meta.get("unbacked_bindings"))


def _counts_mask(node: fx.Node) -> bool:
    """Return whether `node` counts the true elements of a mask, as `x[mask]` and `y[mask] = z` do.

    If several nodes do so for one mask, torch binds the number at the first only.
    """
    if short_name(node) not in _TAKE_MASKS:
        return False
    target, *taken = (example(leaf) for leaf in leaves_of(node))
    masks = [value for value in taken if isinstance(value, torch.Tensor) and value.dtype in _MASKS]
    known = {name for value in (target, *masks) for name in symbols_from_data(value)}
    counted = {name for value in (*taken, example(node)) for name in symbols_from_data(value)}
    return bool(masks) and not counted <= known


def _is_number(leaf: fx.Node, kinds: dict[fx.Node, Kind]) -> bool:
    return kinds[leaf] is Kind.SIZE or is_read(leaf, kinds)


def _takes_data_dependent_number(node: fx.Node) -> bool:
    """Return whether a node takes a number computed from data-dependent sizes, as torch's own assertions do."""
    values = map(example, leaves_of(node))
    numbers = [value for value in values if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)]
    return any(private.comes_from_data(symbol) for value in numbers for symbol in private.expr_of(value).free_symbols)


def symbols_from_data(value: Any) -> Iterator[str]:
    """Yield the data-dependent symbols of an integer or of a tensor's sizes."""
    for part in numbers_in(value):
        if isinstance(part, torch.SymInt):
            yield from (s.name for s in private.expr_of(part).free_symbols if private.comes_from_data(s))


def is_readable(value: Any, inside: Collection[fx.Node], program: Program) -> bool:
    """Return whether a piece can compute a number from the shapes of earlier tensors."""
    if isinstance(value, torch.SymFloat | torch.SymBool):
        return False
    return all(is_shown(symbol, inside, program) for symbol in symbols_from_data(value))


def is_shown(symbol: str, inside: Collection[fx.Node], program: Program) -> bool:
    """Return whether a tensor of an earlier piece than that of these nodes has a data-dependent size as a dimension."""
    sizes = program.sizes
    donor = sizes.donors.get(symbol)
    if donor is None or donor in inside:
        return False
    # a getitem belongs to the piece of its bundle, however late it comes
    last = max(sizes.order[node] for node in inside if not is_getitem_of_bundle(node, program.kinds))
    return sizes.order[donor] < last


def with_numbers(members: Sequence[fx.Node], program: Program) -> list[fx.Node]:
    """Return the nodes of a piece, with nodes that read the numbers it needs from their tensors again.

    Raises:
        SplitError: Such a tensor is written to, so that the number may have changed.
    """
    inside = set(members)
    added: set[fx.Node] = set()
    pending = [leaf for node in members for leaf in leaves_of(node)]
    while pending:
        leaf = pending.pop()
        if leaf in inside or leaf in added or not _is_number(leaf, program.kinds):
            continue
        if is_readable(example(leaf), inside, program):
            continue
        if program.kinds[leaf] is Kind.SIZE:
            pending += leaves_of(leaf)
            continue
        memory = program.memory
        if any(memory.writers.get(key) for tensor in leaf.all_input_nodes for key in memory.of(tensor)):
            raise cannot_split(leaf, "its number is used in another piece, and its tensor may have changed by then")
        added.add(leaf)
    return sorted((*members, *added), key=program.sizes.order.__getitem__) if added else list(members)
