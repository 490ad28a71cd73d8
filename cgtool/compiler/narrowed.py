"""What a plan serves less of than its user asked for, and because of which line of the model.

A trace takes one way through the model's code, and what that way took for granted of its sizes narrows what it serves.
Sizes that no variant serves are told with the user's line, as torch's ShapeEnv remembers it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from cgtool.dims import FIRST_DYNAMIC, DynamicDim
from cgtool.graph.expressions import holds, symbols_of
from cgtool.plan.grammar import Record
from cgtool.plan.records import Variant
from cgtool.plan.shapes import joined_ranges

#: How torch writes where it added a guard: "if x.shape[0] > 8:  # path/model.py:31 in forward".
_USER_LINE = re.compile(r"(?P<code>.*?)\s*# (?:.*/)?(?P<file>[^/:]+):(?P<line>[0-9]+) in ")
#: How many sizes of one dimension, and of each of two, are tried to see whether a relation narrows anything.
_TRIED_ALONE, _TRIED_TOGETHER = 600, 40
_EXAMPLES = 3
_ADVICE = (
    "Require what must be served besides (--require, ModelSpec.require), or give an example of it (ModelSpec.calls): "
    "further variants serve it then."
)


class Served(Record, frozen=True, kw_only=True):
    """The sizes of one dimension that one variant serves."""

    dim: str
    #: The sizes at which the variant fixes other dimensions.
    others: tuple[tuple[str, int], ...]
    low: int
    #: None is no limit.
    high: int | None
    #: The lines of the model that narrowed them.
    lines: tuple[str, ...] = ()


def served_by(
    variant: Variant,
    shape_env: Any,
    names: Mapping[str, str],
    asked: Mapping[str, DynamicDim],
) -> Iterator[Served]:
    """Yield what a variant serves of each dimension; `names` has what the plan calls the symbols of the trace."""
    traced = {names[symbol.name]: symbol for symbol in shape_env.var_to_range if symbol.name in names}
    symbols = {symbol.name: symbol for symbol in variant.symbols}
    for dim in asked:
        others = tuple((name, size) for name, size in variant.fixed.items() if name != dim)
        if dim in variant.fixed:
            yield Served(dim=dim, others=others, low=variant.fixed[dim], high=variant.fixed[dim])
            continue
        low, high, lines = asked[dim].min, asked[dim].max, []
        for name in variant.dims.get(dim, ()):  # all of them are this dimension's size
            symbol, where = symbols[name], shape_env.var_to_range_sloc.get(traced[name])
            if symbol.min > max(asked[dim].min, FIRST_DYNAMIC):
                lines.append(_user_line(getattr(where, "lower", None)))
            if symbol.max != asked[dim].max:
                lines.append(_user_line(getattr(where, "upper", None)))
            low = max(low, symbol.min)
            high = min((bound for bound in (high, symbol.max) if bound is not None), default=None)
        if variant.dims.get(dim) != ():  # the model fixes it
            yield Served(dim=dim, others=others, low=low, high=high, lines=tuple(line for line in lines if line))


def narrowed_ranges(
    served: Iterable[Served], asked: Mapping[str, DynamicDim], left_out: Sequence[Mapping[str, int]]
) -> tuple[str, ...]:
    """Return a sentence for each dimension of which less is served than was asked for.

    Args:
        served: What all variants serve.
        asked: The dimensions as the user declared them.
        left_out: Sizes at which the model itself does not run, which is said elsewhere.
    """
    groups: dict[tuple[str, tuple[tuple[str, int], ...]], list[Served]] = {}
    for one in served:
        groups.setdefault((one.dim, one.others), []).append(one)
    notes = []
    for (dim, others), found in groups.items():
        ranges = joined_ranges((one.low, one.high) for one in found)
        sizes = [at[dim] for at in left_out if dim in at and dict(others) == {k: at[k] for k in at if k != dim}]
        if joined_ranges([*ranges, *((size, size) for size in sizes)]) == [(asked[dim].min, asked[dim].max)]:
            continue
        texts = [str(low) if low == high else f"{low} to {'any' if high is None else high}" for low, high in ranges]
        said = " and ".join(texts)
        lines = dict.fromkeys(line for one in found for line in one.lines)
        if lines:
            notes.append(f"{dim} serves {said} because of {' and '.join(lines)}. {_ADVICE}")
        else:
            notes.append(f"{dim} serves {said}.")
    return tuple(dict.fromkeys(notes))


def narrowing_relations(variant: Variant, relations: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for the sizes that a variant refuses within its ranges, such as those that 4 does not divide.

    `relations` has where torch took each of the variant's for granted: text → SLoc.
    """
    lines = {text: _user_line(where) for text, where in relations.items()}
    dim_of = variant.dim_of
    ends = {dim_of[s.name]: (s.min, s.max) for s in variant.symbols if s.name in dim_of}
    narrowing: dict[tuple[str, ...], list[str]] = {}
    for text in variant.relations:
        dims = tuple(dict.fromkeys(dim_of.get(symbol, "") for symbol in symbols_of(text)))
        if "" not in dims and len(dims) in (1, 2):
            narrowing.setdefault(dims, []).append(text)
    for dims, texts in narrowing.items():
        span = _TRIED_ALONE if len(dims) == 1 else _TRIED_TOGETHER
        spans = [
            (low, low + span if high is None else min(low + span, high + 1))
            for low, high in (ends[dim] for dim in dims)
        ]
        tried = list(itertools.product(*(range(*span) for span in spans)))
        sizes = [{s: at[dims.index(dim)] for s, dim in dim_of.items() if dim in dims} for at in tried]
        refusing = [text for text in texts if not all(holds(text, values) for values in sizes)]
        if not refusing:
            continue
        fits = [all(holds(text, values) for text in refusing) for values in sizes]
        such = _examples(itertools.compress(tried, fits)) or "none of the smallest ones"
        first = fits.index(True) if True in fits else len(fits)
        others = _examples(at for at, fit in zip(tried[first:], fits[first:], strict=True) if not fit)
        found = dict.fromkeys(line for text in refusing if (line := lines.get(text)))
        why = f" because of {' and '.join(found)}" if found else f": {' and '.join(refusing)}"
        but = f" and not {others}" if others else ""
        yield f"{' and '.join(dims)} {'serves' if len(dims) == 1 else 'serve'} only some sizes ({such}, ...){but}{why}."


def _examples(sizes: Iterable[tuple[int, ...]]) -> str:
    return ", ".join(" and ".join(map(str, at)) for at in itertools.islice(sizes, _EXAMPLES))


def _user_line(where: Any) -> str:
    """Return the line of the model that an SLoc of torch names, such as "`if x.shape[0] > 8` (model.py:31)"."""
    match = _USER_LINE.match(str(getattr(where, "maybe_user_loc", None) or ""))
    return "" if match is None else f"`{match['code'].rstrip(':')}` ({match['file']}:{match['line']})"
