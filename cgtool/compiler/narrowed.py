"""Notes on sizes that a plan does not serve, with the line of the model that excludes them.

A trace follows one path through the model's code, and the assumptions on that path narrow the sizes that it serves.
The line that added an assumption comes from torch's ShapeEnv.
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

#: How torch formats the place where it added a guard: "if x.shape[0] > 8:  # path/model.py:31 in forward".
_USER_LINE = re.compile(r"(?P<code>.*?)\s*# (?:.*/)?(?P<file>[^/:]+):(?P<line>[0-9]+) in ")
#: How many sizes are tried to see whether a relation narrows anything: for one dimension, and for each of two.
_TRIED_ALONE, _TRIED_TOGETHER = 600, 40
_EXAMPLES = 3
_ADVICE = (
    "To serve further sizes, require them (--require, ModelSpec.require) or add an example call of such a size "
    "(ModelSpec.calls)."
)


class Served(Record, frozen=True, kw_only=True):
    """The sizes of one dimension that one variant serves."""

    dim: str
    #: The other dimensions that the variant fixes, with their sizes.
    others: tuple[tuple[str, int], ...]
    low: int
    #: None if there is no limit.
    high: int | None
    #: The lines of the model that narrowed the range.
    lines: tuple[str, ...] = ()


def served_by(
    variant: Variant,
    shape_env: Any,
    names: Mapping[str, str],
    asked: Mapping[str, DynamicDim],
) -> Iterator[Served]:
    """Yield the range of each dimension that a variant serves; `names` maps the trace's symbols to the plan's."""
    traced = {names[symbol.name]: symbol for symbol in shape_env.var_to_range if symbol.name in names}
    symbols = {symbol.name: symbol for symbol in variant.symbols}
    for dim in asked:
        others = tuple((name, size) for name, size in variant.fixed.items() if name != dim)
        if dim in variant.fixed:
            yield Served(dim=dim, others=others, low=variant.fixed[dim], high=variant.fixed[dim])
            continue
        low, high, lines = asked[dim].min, asked[dim].max, []
        for name in variant.dims.get(dim, ()):  # each of these symbols is the dimension's size
            symbol, where = symbols[name], shape_env.var_to_range_sloc.get(traced[name])
            if symbol.min > max(asked[dim].min, FIRST_DYNAMIC):
                lines.append(_user_line(getattr(where, "lower", None)))
            if symbol.max != asked[dim].max:
                lines.append(_user_line(getattr(where, "upper", None)))
            low = max(low, symbol.min)
            high = min((bound for bound in (high, symbol.max) if bound is not None), default=None)
        if variant.dims.get(dim) != ():  # empty if the model fixes the dimension
            yield Served(dim=dim, others=others, low=low, high=high, lines=tuple(line for line in lines if line))


def narrowed_ranges(
    served: Iterable[Served], asked: Mapping[str, DynamicDim], left_out: Sequence[Mapping[str, int]]
) -> tuple[str, ...]:
    """Return a note for each dimension that is served only in part.

    Args:
        served: The ranges that all variants serve.
        asked: The dimensions as the user declared them.
        left_out: Sizes at which the model itself does not run; other notes report these.
    """
    groups: dict[tuple[str, tuple[tuple[str, int], ...]], list[Served]] = {}
    for item in served:
        groups.setdefault((item.dim, item.others), []).append(item)
    notes = []
    for (dim, others), group in groups.items():
        ranges = joined_ranges((item.low, item.high) for item in group)
        sizes = [at[dim] for at in left_out if dim in at and dict(others) == {k: at[k] for k in at if k != dim}]
        if joined_ranges([*ranges, *((size, size) for size in sizes)]) == [(asked[dim].min, asked[dim].max)]:
            continue
        texts = [str(low) if low == high else f"{low} to {'any' if high is None else high}" for low, high in ranges]
        note = f"{dim} serves {' and '.join(texts)}"
        lines = dict.fromkeys(line for item in group for line in item.lines)
        notes.append(f"{note} because of {' and '.join(lines)}. {_ADVICE}" if lines else f"{note}.")
    return tuple(dict.fromkeys(notes))


def narrowing_relations(variant: Variant, relations: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note for the sizes inside its ranges that a variant refuses, such as those not divisible by 4.

    `relations` maps the text of each relation to the SLoc where torch assumed it.
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
        served = _examples(itertools.compress(tried, fits)) or "none of the smallest"
        first = fits.index(True) if True in fits else len(fits)
        refused = _examples(at for at, fit in zip(tried[first:], fits[first:], strict=True) if not fit)
        user_lines = dict.fromkeys(line for text in refusing if (line := lines.get(text)))
        why = f" because of {' and '.join(user_lines)}" if user_lines else f": {' and '.join(refusing)}"
        but = f" and not {refused}" if refused else ""
        verb = "serves" if len(dims) == 1 else "serve"
        yield f"{' and '.join(dims)} {verb} only some sizes ({served}, ...){but}{why}."


def _examples(sizes: Iterable[tuple[int, ...]]) -> str:
    return ", ".join(" and ".join(map(str, at)) for at in itertools.islice(sizes, _EXAMPLES))


def _user_line(where: Any) -> str:
    """Return the line of the model in one of torch's SLocs, such as "`if x.shape[0] > 8` (model.py:31)"."""
    match = _USER_LINE.match(str(getattr(where, "maybe_user_loc", None) or ""))
    return "" if match is None else f"`{match['code'].rstrip(':')}` ({match['file']}:{match['line']})"
