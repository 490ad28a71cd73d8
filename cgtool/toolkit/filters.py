r"""Filters and orders of a listing: `last_used>30d`, `size>1GB`, `model~llama`, `hits:desc`. Must not import torch.

Grammar::

    filter   = field op value          op: = != > >= < <= ~        spaces around the operator are free
    order    = field [":" ("asc" | "desc")]

What a field takes for a value:

- text (`hash`, `model`, `prefix`, `adaptor`): any text; `~` is 'contains', letter case aside; `hash=3f9a` is 'begins
  with';
- a number (`rank`, `pieces`, `unique`, `artifacts`, `hits`);
- bytes (`size`, `unshared`): a number and B, KB, MB, GB, TB (thousands) or KiB, MiB, GiB, TiB (1024; K, M, G, T too);
- seconds (`artifact_secs`, `saved_secs`): a number, or one with a unit: s, min, h, d, w;
- a time (`created`, `last_used`): how long ago, `last_used>30d` being 'more than 30 days ago'; or a date or moment as
  ISO 8601 has it, `created>=2026-01-31` being 'on that day or later'; or `never`, with = and != alone.

An entry that was never used counts as last used when it was created, so that an age never picks what is new.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cgtool.errors import UsageError
from cgtool.toolkit.listing import EntryListing

_EXPRESSION = re.compile(r"\s*([A-Za-z_]+)\s*(!=|>=|<=|=|>|<|~)\s*(.*?)\s*\Z", re.DOTALL)
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\Z")
_BYTES = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}{end}": 1024**power for power, letter in enumerate("kmgt", 1) for end in ("", "ib")},
}
_SECS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
#: A longer ago is an earlier moment.
_AGES = {">": "<", ">=": "<=", "<": ">", "<=": ">="}
_NEVER = "never"
_SHOWN_CHARACTERS = 60

Predicate = Callable[[EntryListing], bool]


@dataclass(frozen=True, kw_only=True)
class _Field:
    """A field of an entry: how it is read, and what it is compared with."""

    get: Callable[[EntryListing], Any]
    kind: str


_FIELDS = {
    "hash": _Field(get=lambda entry: entry.manifest.hash, kind="hash"),
    "model": _Field(get=lambda entry: entry.manifest.model, kind="text"),
    "rank": _Field(get=lambda entry: entry.manifest.rank, kind="number"),
    "prefix": _Field(get=lambda entry: entry.manifest.prefix, kind="text"),
    "adaptor": _Field(get=lambda entry: entry.manifest.adaptor, kind="text"),
    "pieces": _Field(get=lambda entry: entry.manifest.variants[0].pieces, kind="number"),
    "unique": _Field(get=lambda entry: entry.manifest.variants[0].unique_pieces, kind="number"),
    "artifacts": _Field(get=lambda entry: len(entry.artifact_files), kind="number"),
    "size": _Field(get=lambda entry: entry.size_bytes, kind="bytes"),
    "unshared": _Field(get=lambda entry: entry.unshared_bytes, kind="bytes"),
    "artifact_secs": _Field(get=lambda entry: entry.artifact_secs, kind="seconds"),
    "saved_secs": _Field(get=lambda entry: entry.saved_secs, kind="seconds"),
    "hits": _Field(get=lambda entry: entry.usage.hits, kind="number"),
    "created": _Field(get=lambda entry: _moment(entry.manifest.created), kind="time"),
    "last_used": _Field(get=lambda entry: _moment(entry.usage.last_used or entry.manifest.created), kind="time"),
}

#: The names of all fields, in the order in which people are told them.
FIELDS = tuple(_FIELDS)

_OPERATORS = {
    "hash": ("=", "!=", "~"),
    "text": ("=", "!=", "~"),
    "number": tuple(_COMPARE),
    "bytes": tuple(_COMPARE),
    "seconds": tuple(_COMPARE),
    "time": tuple(_COMPARE),
}


def parse_filter(expression: str, *, now: float) -> Predicate:
    """Return what a filter asks of an entry.

    Args:
        expression: As the module's grammar has it.
        now: Seconds since the epoch, from which ages count.

    Raises:
        UsageError: It is outside of the grammar; the message says what would be within.
    """
    match = _EXPRESSION.match(expression)
    if match is None:
        example = "model~llama, size>1GB or last_used>30d"
        raise _wrong(expression, f"is no filter. Write FIELD OPERATOR VALUE, such as {example}", FIELDS)
    name, sign, value = match.groups()
    field = _FIELDS.get(name.lower())
    if field is None:
        raise _wrong(expression, f"names no field. Use one of: {', '.join(FIELDS)}", FIELDS)
    if sign not in _OPERATORS[field.kind]:
        allowed = _OPERATORS[field.kind]
        raise _wrong(expression, f"compares {name} in a way it has not. Use one of: {'  '.join(allowed)}", allowed)
    if field.kind in ("hash", "text"):
        return _text_predicate(field, sign, value)
    if field.kind == "time":
        return _time_predicate(field, expression, sign, value, now)
    wanted = _number(expression, field.kind, value)
    compare = _COMPARE[sign]
    return lambda entry: compare(field.get(entry), wanted)


def parse_order(order: str) -> Callable[[Iterable[EntryListing]], list[EntryListing]]:
    """Return what sorts entries as asked: text from a to z, and what is counted from the most and the latest on.

    Args:
        order: A field, or one with ":asc" or ":desc".

    Raises:
        UsageError: There is no such field or direction.
    """
    name, _, direction = order.strip().partition(":")
    field = _FIELDS.get(name.lower())
    if field is None:
        raise _wrong(order, f"names no field to sort by. Use one of: {', '.join(FIELDS)}", FIELDS)
    if direction not in ("", "asc", "desc") or order.strip().endswith(":"):
        raise _wrong(order, f"has no direction. Write {name}, {name}:asc or {name}:desc", ("asc", "desc"))
    down = direction == "desc" if direction else field.kind not in ("hash", "text")
    return lambda entries: sorted(entries, key=field.get, reverse=down)


def _text_predicate(field: _Field, sign: str, value: str) -> Predicate:
    wanted = value.casefold()
    if sign == "~":
        return lambda entry: wanted in str(field.get(entry)).casefold()
    if field.kind == "hash":  # any beginning of one names it
        return lambda entry: str(field.get(entry)).startswith(wanted) == (sign == "=")
    return lambda entry: (str(field.get(entry)) == value) == (sign == "=")


def _time_predicate(field: _Field, expression: str, sign: str, value: str, now: float) -> Predicate:
    if value.lower() == _NEVER and field is _FIELDS["last_used"] and sign in ("=", "!="):
        return lambda entry: (entry.usage.last_used is None) == (sign == "=")
    age = _QUANTITY.match(value)
    if age is not None and age[2].lower() in _SECS:
        bound = now - float(age[1]) * _SECS[age[2].lower()]
        compare = _COMPARE[_AGES.get(sign, sign)]
        return lambda entry: compare(field.get(entry), bound)
    start, end = _span(expression, value)
    if sign in ("=", "!="):
        return lambda entry: (start <= field.get(entry) < end) == (sign == "=")
    # A day as a whole: later than it is after its end, and up to it is before its end.
    edge = end if sign in (">", "<=") else start
    compare = _COMPARE[{">": ">=", "<=": "<"}.get(sign, sign)]
    return lambda entry: compare(field.get(entry), edge)


def _span(expression: str, value: str) -> tuple[float, float]:
    """Return the first second of a day or moment, and the first after it."""
    try:
        start = datetime.fromisoformat(value)
    except ValueError:
        how = "Write an age such as 30d, 12h or 90min, a date such as 2026-01-31, or never (with = and !=)"
        raise _wrong(expression, f"has no time. {how}", ("30d", "2026-01-31")) from None
    if start.tzinfo is None:
        start = start.replace(tzinfo=UTC)
    secs = start.timestamp()
    is_day = re.fullmatch(r"[0-9-]+", value) is not None
    return secs, secs + (_SECS["d"] if is_day else 1.0)


def _number(expression: str, kind: str, value: str) -> float:
    units: dict[str, Any] = {"bytes": _BYTES, "seconds": {"": 1.0, **_SECS}, "number": {"": 1}}[kind]
    match = _QUANTITY.match(value)
    if match is None or match[2].lower() not in units:
        how = {
            "bytes": "a size such as 512MiB, 1GB or 4096",
            "seconds": "seconds such as 30, 2min or 1h",
            "number": "a number such as 3",
        }[kind]
        raise _wrong(expression, f"needs {how}", how)
    return float(match[1]) * float(units[match[2].lower()])


def _moment(stamp: str) -> float:
    """Return seconds since the epoch; 0 where a manifest's stamp is none."""
    try:
        moment = datetime.fromisoformat(stamp)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def _wrong(expression: str, what: str, expected: Any) -> UsageError:
    shown = expression if len(expression) <= _SHOWN_CHARACTERS else f"{expression[:_SHOWN_CHARACTERS]}…"
    return UsageError(f"{shown!r} {what}.", expected=expected, actual=expression)
