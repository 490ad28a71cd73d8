"""How a configuration value is spelled as text, in a variable or an option.

Must not import torch. What is parsed here is not yet checked (`cgtool.config_checks`). Grammar::

    sizes   = size ("," size)*            | JSON list
    size    = integer | "cudagraph_capture_sizes" | name "=" integer (":" name "=" integer)*
    ranges  = start "-" end ("," start "-" end)*  | JSON list of [start, end]
    ops     = name ("," name)*            | JSON list; an empty text is the empty list
    bool    = "1" | "0" | "true" | "false" | "yes" | "no" | "on" | "off"
    mapping = JSON object
    "none" is None where a field may be None; a path, a name of a dimension or of an adaptor is taken as it stands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from cgtool.config_checks import WrongValueError

_BOOLS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def parse_bool(text: str) -> bool:
    """Return the bool that a word spells."""
    if text.strip().lower() not in _BOOLS:
        message = f"it is one of {', '.join(_BOOLS)}"
        raise WrongValueError(message)
    return _BOOLS[text.strip().lower()]


def parse_optional_bool(text: str) -> bool | None:
    """Return the bool that a word spells; no word, or `none`, is None."""
    return None if text.strip().lower() in {"", "none"} else parse_bool(text)


def parse_json(text: str) -> Any:
    """Return the JSON value in `text`.

    Raises:
        WrongValueError: It is no JSON, or names a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except WrongValueError:
        raise
    except (ValueError, RecursionError) as error:
        message = f"it is no JSON ({error})"
        raise WrongValueError(message) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            message = f"it names {key!r} twice"
            raise WrongValueError(message)
        result[key] = value
    return result


def parse_list(item_of: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser of a list: `item_of` reads what stands between two commas; JSON is taken as it is."""

    def parse(text: str) -> Any:
        if text.strip().lower() in {"none", "null"}:
            return None
        if text.strip()[:1] in {"[", "{"}:
            return parse_json(text)
        return [item_of(part.strip()) for part in text.split(",") if part.strip()]

    return parse


def parse_int(text: str) -> int | str:
    """Return an integer, or the text itself for the check to refuse by name."""
    text = text.strip()
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else text


def parse_size(text: str) -> Any:
    """Return one compile size."""
    if "=" not in text:
        return parse_int(text)
    pairs = [part.partition("=") for part in text.split(":")]
    return _unique([(name.strip(), parse_int(size.strip())) for name, _, size in pairs])


def parse_range(text: str) -> list[int | str]:
    """Return the bounds of one range."""
    return [parse_int(bound.strip()) for bound in text.split("-")]


def parse_optional(text: str) -> str | int | None:
    """Return a word, or None for an empty one."""
    return None if text.strip().lower() in {"", "none", "null"} else parse_int(text.strip())


def parse_secs(text: str) -> float | str | None:
    """Return a number of seconds, None for none, or the text itself for the check to refuse."""
    text = text.strip()
    if text.lower() in {"", "none", "null"}:
        return None
    return float(text) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", text) else text


def parse_mode(text: str) -> Any:
    """Return a mode's name or value; NONE is a mode, so that only the empty text and null mean: not set."""
    if text.strip()[:1] == "[":
        return parse_json(text)
    return None if text.strip().lower() in {"", "null"} else parse_int(text.strip())
