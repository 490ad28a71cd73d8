"""Filters and sort orders of a listing: `last_used>30d`, `size>1GB`, `model~llama`, `hits:desc`. Must not import torch.

Grammar::

    filter   = field op value          op: = != > >= < <= ~        spaces around the operator are optional
    order    = field [":" ("asc" | "desc")]

Values by type of field:

- text (`hash`, `model`, `prefix`, `adaptor`): any text; `~` means 'contains', ignoring case; `hash=3f9a` means 'starts
  with';
- number (`rank`, `pieces`, `unique`, `artifacts`, `hits`);
- bytes (`size`, `unshared`): a number with B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB, K, M, G, T (powers
  of 1024), or without a unit;
- seconds (`artifact_secs`, `saved_secs`): a number, optionally with a unit: s, min, h, d, w;
- time (`created`, `last_used`): an age (`last_used>30d` means 'more than 30 days ago'), an ISO 8601 date or time
  (`created>=2026-01-31` means 'on that day or later'), or `never` (`last_used` only, with = and !=).

An entry that was never used counts as last used when it was created, so that an age never selects a new entry.
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
#: Units of sizes, in lower case, in bytes.
BYTES: dict[str, float] = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}{end}": 1024**power for power, letter in enumerate("kmgt", 1) for end in ("", "ib")},
}
#: Units of durations, in seconds.
SECS: dict[str, float] = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
#: A greater age is an earlier time.
_AGE_OPERATORS = {">": "<", ">=": "<=", "<": ">", "<=": ">="}
_MAX_SHOWN_CHARS = 60

Predicate = Callable[[Any], bool]


class Field(NamedTuple):
    """A field of an entry: the type of its value, and its getter."""

    kind: Literal["hash", "text", "number", "bytes", "seconds", "time"]
    get: Callable[[Any], Any]


#: The fields of an `EntryListing`, in the order in which messages list them.
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
#: The fields of a `ForeignEntry`; its hash is its name.
FOREIGN_FIELDS: Mapping[str, Field] = {
    "hash": Field("hash", lambda entry: entry.name),
    "prefix": Field("text", lambda entry: " ".join(entry.prefixes)),
    "artifacts": Field("number", lambda entry: len(entry.artifacts)),
    "size": Field("bytes", lambda entry: entry.size_bytes),
    "created": Field("time", lambda entry: entry.created),
    "last_used": Field("time", lambda entry: entry.last_used),
}


def _comparable(fields: Mapping[str, Field], name: str) -> Callable[[Any], Any]:
    """Return a getter of the field's value as it is compared: times in seconds, with creation for "never used"."""
    field = fields[name]
    if field.kind != "time":
        return field.get
    return lambda entry: _timestamp(field.get(entry) or fields["created"].get(entry) or "")


def amount(text: str, units: Mapping[str, float]) -> float | None:
    """Parse a number with one of `units`, scaled by the unit's factor; None if the text is malformed."""
    match = _QUANTITY.match(text.strip())
    return None if match is None or match[2].lower() not in units else float(match[1]) * units[match[2].lower()]


def parse_filter(expression: str, *, now: float, fields: Mapping[str, Field] = FIELDS) -> Predicate:
    """Parse a filter into a predicate of entries.

    Args:
        expression: The filter; see the module's grammar.
        now: The time from which ages count, in seconds since the epoch.
        fields: The fields of the entries.

    Raises:
        UsageError: The expression does not match the grammar, or names an unknown field.
    """
    match = _EXPRESSION.match(expression)
    if match is None:
        example = "model~llama, size>1GB or last_used>30d"
        raise _error(expression, f"is not a filter. Write FIELD OPERATOR VALUE, such as {example}", tuple(fields))
    field, op, value = match.groups()
    name = _field_name(expression, field, fields)
    kind, get = fields[name].kind, _comparable(fields, name)
    allowed = ("=", "!=", "~") if kind in ("hash", "text") else tuple(_COMPARE)
    if op not in allowed:
        problem = f"uses an operator that {field} does not support. Use one of: {'  '.join(allowed)}"
        raise _error(expression, problem, allowed)
    equals = op == "="
    if kind in ("hash", "text"):
        folded = value.casefold()
        if op == "~":
            return lambda entry: folded in str(get(entry)).casefold()
        if kind == "hash":  # a hash may be abbreviated
            return lambda entry: str(get(entry)).casefold().startswith(folded) == equals
        return lambda entry: (str(get(entry)) == value) == equals
    if kind == "time":
        if value.lower() == "never" and name == "last_used" and op in ("=", "!="):
            return lambda entry: (fields[name].get(entry) is None) == equals
        return _time_predicate(get, expression, op, value, now)
    number, compare = _number(expression, kind, value), _COMPARE[op]
    return lambda entry: compare(get(entry), number)


def parse_order(order: str, *, fields: Mapping[str, Field] = FIELDS) -> Callable[[Iterable[Any]], list[Any]]:
    """Parse a sort order into a function that sorts entries.

    Text sorts ascending by default; numbers, sizes and times sort descending.
    """
    field, _, direction = order.strip().partition(":")
    name = _field_name(order, field, fields)
    if direction not in ("", "asc", "desc") or order.strip().endswith(":"):
        raise _error(order, f"has an invalid direction. Write {field}, {field}:asc or {field}:desc", ("asc", "desc"))
    reverse = direction == "desc" if direction else fields[name].kind not in ("hash", "text")
    return lambda entries: sorted(entries, key=_comparable(fields, name), reverse=reverse)


def _field_name(expression: str, field: str, fields: Mapping[str, Field]) -> str:
    if field.lower() in fields:
        return field.lower()
    where = "" if fields is FIELDS else " of another system's entries"
    raise _error(expression, f"does not name a field{where}. Use one of: {', '.join(fields)}", tuple(fields))


def _time_predicate(get: Callable[[Any], float], expression: str, op: str, value: str, now: float) -> Predicate:
    age = amount(value, SECS)
    if age is not None:
        bound = now - age
        compare = _COMPARE[_AGE_OPERATORS.get(op, op)]
        return lambda entry: compare(get(entry), bound)
    start, end = _time_span(expression, value)
    if op in ("=", "!="):
        return lambda entry: (start <= get(entry) < end) == (op == "=")
    # A day is compared as a whole: `>` means after its end, `<=` before its end.
    edge = end if op in (">", "<=") else start
    compare = _COMPARE[{">": ">=", "<=": "<"}.get(op, op)]
    return lambda entry: compare(get(entry), edge)


def _time_span(expression: str, value: str) -> tuple[float, float]:
    """Return the half-open interval of a day, or of the second at a point in time."""
    try:
        start = datetime.fromisoformat(value)
    except ValueError:
        advice = "Write an age such as 30d, 12h or 90min, a date such as 2026-01-31, or never (with = and !=)"
        raise _error(expression, f"does not hold a time. {advice}", ("30d", "2026-01-31")) from None
    if start.tzinfo is None:
        start = start.replace(tzinfo=UTC)
    secs = start.timestamp()
    is_day = re.fullmatch(r"[0-9-]+", value) is not None
    return secs, secs + (SECS["d"] if is_day else 1.0)


def _number(expression: str, kind: str, value: str) -> float:
    number = amount(value, {"bytes": BYTES, "seconds": {"": 1.0, **SECS}, "number": {"": 1.0}}[kind])
    if number is None:
        expected = {
            "bytes": "a size such as 512MiB, 1GB or 4096",
            "seconds": "a duration such as 30, 2min or 1h",
            "number": "a number such as 3",
        }[kind]
        raise _error(expression, f"needs {expected}", expected)
    return number


def _timestamp(text: str) -> float:
    """Return seconds since the epoch; 0 if the text is not a time."""
    try:
        time = datetime.fromisoformat(text)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def _error(expression: str, problem: str, expected: Any) -> UsageError:
    shown = expression if len(expression) <= _MAX_SHOWN_CHARS else f"{expression[:_MAX_SHOWN_CHARS]}…"
    return UsageError(f"{shown!r} {problem}.", expected=expected, actual=expression)
