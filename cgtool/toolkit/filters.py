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
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

from cgtool.errors import UsageError

_EXPRESSION = re.compile(r"\s*([A-Za-z_]+)\s*(!=|>=|<=|=|>|<|~)\s*(.*?)\s*\Z", re.DOTALL)
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\Z")
#: The units of sizes, as text in small letters, and those of durations.
BYTES: dict[str, float] = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}{end}": 1024**power for power, letter in enumerate("kmgt", 1) for end in ("", "ib")},
}
SECS: dict[str, float] = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
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
_SHOWN_CHARACTERS = 60

Predicate = Callable[[Any], bool]


class Field(NamedTuple):
    """A field of an entry: what kind of value it holds, and how it is read."""

    kind: Literal["hash", "text", "number", "bytes", "seconds", "time"]
    get: Callable[[Any], Any]


#: The fields of an `EntryListing`, in the order in which people are told them.
FIELDS: Mapping[str, Field] = {
    "hash": Field("hash", lambda entry: entry.manifest.hash),
    "model": Field("text", lambda entry: entry.manifest.model),
    "rank": Field("number", lambda entry: entry.manifest.rank),
    "prefix": Field("text", lambda entry: entry.manifest.prefix),
    "adaptor": Field("text", lambda entry: entry.manifest.adaptor),
    "pieces": Field("number", lambda entry: entry.manifest.variants[0].pieces),
    "unique": Field("number", lambda entry: entry.manifest.variants[0].unique_pieces),
    "artifacts": Field("number", lambda entry: len(entry.artifact_files)),
    "size": Field("bytes", lambda entry: entry.size_bytes),
    "unshared": Field("bytes", lambda entry: entry.unshared_bytes),
    "artifact_secs": Field("seconds", lambda entry: entry.artifact_secs),
    "saved_secs": Field("seconds", lambda entry: entry.saved_secs),
    "hits": Field("number", lambda entry: entry.usage.hits),
    "created": Field("time", lambda entry: entry.manifest.created),
    "last_used": Field("time", lambda entry: entry.usage.last_used),
}
#: Those of a `ForeignEntry`, whose hash is its name.
FOREIGN_FIELDS: Mapping[str, Field] = {
    "hash": Field("hash", lambda entry: entry.name),
    "prefix": Field("text", lambda entry: " ".join(entry.prefixes)),
    "artifacts": Field("number", lambda entry: len(entry.artifacts)),
    "size": Field("bytes", lambda entry: entry.size_bytes),
    "created": Field("time", lambda entry: entry.created),
    "last_used": Field("time", lambda entry: entry.last_used),
}


def _value(fields: Mapping[str, Field], name: str) -> Callable[[Any], Any]:
    """What reads a field as it is compared: a time in seconds, that of the last use being the creation's for never."""
    field = fields[name]
    if field.kind != "time":
        return field.get
    return lambda entry: _moment(field.get(entry) or fields["created"].get(entry) or "")


def amount(text: str, units: Mapping[str, float]) -> float | None:
    """Return a number with a unit, counted in the smallest of `units`; None where the text is none."""
    match = _QUANTITY.match(text.strip())
    return None if match is None or match[2].lower() not in units else float(match[1]) * units[match[2].lower()]


def parse_filter(expression: str, *, now: float, fields: Mapping[str, Field] = FIELDS) -> Predicate:
    """Return what a filter asks of an entry; ages count from `now`, in seconds since the epoch."""
    match = _EXPRESSION.match(expression)
    if match is None:
        example = "model~llama, size>1GB or last_used>30d"
        raise _wrong(expression, f"is no filter. Write FIELD OPERATOR VALUE, such as {example}", tuple(fields))
    named, sign, value = match.groups()
    name = _known(expression, named, fields)
    kind, get = fields[name].kind, _value(fields, name)
    allowed = ("=", "!=", "~") if kind in ("hash", "text") else tuple(_COMPARE)
    if sign not in allowed:
        raise _wrong(expression, f"compares {named} in a way it has not. Use one of: {'  '.join(allowed)}", allowed)
    equals = sign == "="
    if kind in ("hash", "text"):
        wanted = value.casefold()
        if sign == "~":
            return lambda entry: wanted in str(get(entry)).casefold()
        if kind == "hash":  # any beginning of one names it
            return lambda entry: str(get(entry)).casefold().startswith(wanted) == equals
        return lambda entry: (str(get(entry)) == value) == equals
    if kind == "time":
        if value.lower() == "never" and name == "last_used" and sign in ("=", "!="):
            return lambda entry: (fields[name].get(entry) is None) == equals
        return _time_predicate(get, expression, sign, value, now)
    number, compare = _number(expression, kind, value), _COMPARE[sign]
    return lambda entry: compare(get(entry), number)


def parse_order(order: str, *, fields: Mapping[str, Field] = FIELDS) -> Callable[[Iterable[Any]], list[Any]]:
    """Return what sorts entries as asked: text from a to z, and what is counted from the most and the latest on."""
    named, _, direction = order.strip().partition(":")
    name = _known(order, named, fields, " to sort by")
    if direction not in ("", "asc", "desc") or order.strip().endswith(":"):
        raise _wrong(order, f"has no direction. Write {named}, {named}:asc or {named}:desc", ("asc", "desc"))
    down = direction == "desc" if direction else fields[name].kind not in ("hash", "text")
    return lambda entries: sorted(entries, key=_value(fields, name), reverse=down)


def _known(expression: str, named: str, fields: Mapping[str, Field], to: str = "") -> str:
    """The name of a field, as the table spells it."""
    if named.lower() in fields:
        return named.lower()
    of = to if fields is FIELDS else " that entries of other systems have"
    raise _wrong(expression, f"names no field{of}. Use one of: {', '.join(fields)}", tuple(fields))


def _time_predicate(get: Callable[[Any], float], expression: str, sign: str, value: str, now: float) -> Predicate:
    age = amount(value, SECS)
    if age is not None:
        bound = now - age
        compare = _COMPARE[_AGES.get(sign, sign)]
        return lambda entry: compare(get(entry), bound)
    start, end = _span(expression, value)
    if sign in ("=", "!="):
        return lambda entry: (start <= get(entry) < end) == (sign == "=")
    # A day as a whole: later than it is after its end, and up to it is before its end.
    edge = end if sign in (">", "<=") else start
    compare = _COMPARE[{">": ">=", "<=": "<"}.get(sign, sign)]
    return lambda entry: compare(get(entry), edge)


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
    return secs, secs + (SECS["d"] if is_day else 1.0)


def _number(expression: str, kind: str, value: str) -> float:
    found = amount(value, {"bytes": BYTES, "seconds": {"": 1.0, **SECS}, "number": {"": 1.0}}[kind])
    if found is None:
        how = {
            "bytes": "a size such as 512MiB, 1GB or 4096",
            "seconds": "seconds such as 30, 2min or 1h",
            "number": "a number such as 3",
        }[kind]
        raise _wrong(expression, f"needs {how}", how)
    return found


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
