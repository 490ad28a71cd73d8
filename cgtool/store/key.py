"""Reading and writing `key.json`, and describing the differences between two keys. Must not import torch."""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from cgtool.errors import CacheCorruptError, CacheSchemaError
from cgtool.plan.grammar import canonical_json
from cgtool.plan.pieces import Json
from cgtool.store.files import is_newer, read_bytes, write_atomic
from cgtool.store.layout import CacheLayout, check_hash, is_hash, short
from cgtool.store.records import Factor, Key, parse_key

_log = logging.getLogger(__name__)

#: All factors, ordered by how likely each is to explain a miss: people edit models more often than they change
#: compilers.
FACTOR_ORDER = (
    *("sources", "distributions", "variables", "ops", "guards", "config", "model", "state", "calls"),
    *("torch", "triton", "python", "compiler", "target", "precision", "inductor", "inductor_environment", "cgtool"),
)

#: Factors whose leaves are environment variables.
_VARIABLES = frozenset({"variables", "inductor_environment"})
_PLAIN_NAME = r"[A-Za-z0-9_./:-]+"
_SHOWN_CHARACTERS = 80


#: Marks a value that one side does not have; None would be ambiguous, because it is valid JSON.
_ABSENT: Any = object()


class FactorDifference(msgspec.Struct, frozen=True, kw_only=True):
    """One leaf in which two keys differ, such as "config.level"; an absent value is None.

    The sentence reads "config.level was 3 and is 2 now".
    """

    factor: str
    path: str
    old: Json
    new: Json
    sentence: str


def write_key(layout: CacheLayout, key: Key) -> None:
    """Write an entry's `key.json` unless an intact one exists."""
    hash_ = key.hash
    try:
        if read_key(layout, hash_) is not None:
            return
    except CacheCorruptError as error:
        _log.warning("%s It is replaced.", error)
    except CacheSchemaError as error:
        if is_newer(error):
            raise
    write_atomic(layout.key_file(hash_), key.to_bytes())


def read_key(layout: CacheLayout, hash_: str) -> Key | None:
    """Return an entry's key, or None if it has none."""
    path = layout.key_file(check_hash(hash_))
    data = read_bytes(path)
    return None if data is None else parse_key(data, path=path, hash_=hash_)


def differences(old: Key, new: Key) -> list[FactorDifference]:
    """Return every leaf in which a stored key and the current key differ, most informative first."""
    olds, news = old.factors, new.factors
    found: list[FactorDifference] = []
    for name in sorted(olds.keys() | news.keys(), key=_order):
        describe = _variable_sentence if name in _VARIABLES else _sentence
        for path, before, after in _leaves(name, olds.get(name, _ABSENT), news.get(name, _ABSENT)):
            found.append(
                FactorDifference(
                    factor=name,
                    path=path,
                    old=None if before is _ABSENT else before,
                    new=None if after is _ABSENT else after,
                    sentence=describe(path, before, after),
                )
            )
    return found


def difference_between(name: str, old: Json, new: Json) -> list[FactorDifference]:
    """Return the differences between two values of one factor, for callers that do not have whole keys."""
    return differences(Key.of([Factor(name=name, value=old)]), Key.of([Factor(name=name, value=new)]))


def sentences(found: Sequence[FactorDifference]) -> tuple[str, ...]:
    """Return the sentences of differences."""
    return tuple(difference.sentence for difference in found)


def _order(name: str) -> tuple[int, str]:
    rank = FACTOR_ORDER.index(name) if name in FACTOR_ORDER else len(FACTOR_ORDER)
    return rank, name


def _leaves(path: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the leaves that differ, in order of paths; lists are compared by element only if their lengths match."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _leaves(_dotted(path, key), old.get(key, _ABSENT), new.get(key, _ABSENT))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for position, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from _leaves(f"{path}[{position}]", before, after)
    elif old is _ABSENT or new is _ABSENT or canonical_json(old) != canonical_json(new):
        yield path, old, new


def _dotted(path: str, key: str) -> str:
    return f"{path}.{key}" if re.fullmatch(_PLAIN_NAME, key) else f"{path}[{json.dumps(key)}]"


def _sentence(path: str, old: Any, new: Any) -> str:
    if old is _ABSENT:
        return f"{path} is {_shown(new)} now and was not there before"
    if new is _ABSENT:
        return f"{path} was {_shown(old)} and is gone now"
    if _is_digest(old) and _is_digest(new):
        return f"{path} has changed (its digest was {short(old)} and is {short(new)} now)"
    before, after = _shown(old), _shown(new)
    if before == after:  # equal up to where the values are cut off
        return f"{path} has changed (it begins with {before} in both)"
    return f"{path} was {before} and is {after} now"


def _variable_sentence(path: str, old: Any, new: Any) -> str:
    factor, _, name = path.partition(".")
    before, after = ("unset" if value in (None, _ABSENT) else _shown(value) for value in (old, new))
    return f"the environment variable {name} was {before} and is {after} now" if name else _sentence(factor, old, new)


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and is_hash(value)


def _shown(value: Json) -> str:
    if _is_digest(value):
        return short(value)
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
