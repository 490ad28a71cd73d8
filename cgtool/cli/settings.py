"""Where the command line's settings come from, in rising order, and which source said what.

Must not import torch. The sources: defaults; the first cgtool.toml, or pyproject.toml with a [tool.cgtool] table, from
the working directory upwards to the repository's root (a folder with .git) or the file system's; CGTOOL_<FIELD>
variables, of which an empty one counts as unset; `--compilation-config`; single flags. A higher source replaces a field
whole. Configuration files serve the command line only: what a program does with cgtool never depends on its folder.
"""

from __future__ import annotations

import json
import logging
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgtool.config import FIELDS, CompilationConfig, check_field, conflicts, parse_field, parse_json
from cgtool.config_values import WrongValueError, nearest
from cgtool.errors import ConfigError
from cgtool.host import Environment, environment

_log = logging.getLogger(__name__)

#: Fields whose flag is not the field's own name.
FLAGS = {"disable_cache": "--no-cache", "proof": "--no-proof", "inductor_compile_config": "--inductor-config"}

#: Fields that hold a path, or several: in a file it is relative to the file's folder.
_PATHS = frozenset({"cache_dir", "debug_dump_path", "trusted_keys"})


@dataclass(frozen=True, kw_only=True)
class _Said:
    """One source's word on one field: `key` and `known` are spelled as the source spells them."""

    field: str
    value: Any
    origin: str
    key: str
    known: Mapping[str, str]


def load_settings(
    *,
    compilation_config: str | Mapping[str, Any] | None = None,
    flags: Mapping[str, Any] | None = None,
    start: Path | None = None,
    env: Environment | None = None,
) -> CompilationConfig:
    """Return what the sources say together.

    Flags are given by field; one that is None was not given, and text is parsed as a variable's is. The search for a
    configuration file begins at `start`, or the working directory.

    Raises:
        ConfigError: A source names no field, gives a value that the field cannot hold, cannot be read, or contradicts
            another. The message names the source, and the nearest known key for an unknown one.
    """
    file = find_file(Path.cwd() if start is None else start)
    said = [
        *(_from_file(file) if file else ()),
        *_from_variables(environment() if env is None else env),
        *_from_json(compilation_config),
        *_from_flags(flags or {}),
    ]
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for word in said:
        values[word.field] = _value(word)
        origins[word.field] = word.origin
    _refuse_conflicts(values, origins)
    config = CompilationConfig(**values)
    spelled = config.to_json() if origins else {}
    for field, origin in origins.items():
        _log.debug("%s is %s, by %s", field, json.dumps(spelled[field]), origin)
    return config


def find_file(start: Path) -> Path | None:
    """Return the nearest configuration file, from `start` upwards to the repository's root or the file system's."""
    start = start.resolve()
    for folder in (start, *start.parents):
        own, shared = folder / "cgtool.toml", folder / "pyproject.toml"
        found = [path for path in (own, shared) if path.is_file() and _table(path) is not None]
        if len(found) > 1:
            message = f"Both {own} and [tool.cgtool] of {shared} configure cgtool. Keep one of them."
            raise ConfigError(message, path=str(folder))
        if found:
            return found[0]
        if (folder / ".git").exists():
            return None
    return None


def _table(path: Path) -> Mapping[str, Any] | None:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"The configuration file {path} cannot be read: {error}. Correct it or move it away."
        raise ConfigError(message, path=str(path)) from error
    if path.name == "cgtool.toml":
        return document
    tool = document.get("tool")
    table = tool.get("cgtool") if isinstance(tool, Mapping) else None
    if table is not None and not isinstance(table, Mapping):
        message = f"In {path}, tool.cgtool is {table!r} and must be a table. Write [tool.cgtool] and fields below it."
        raise ConfigError(message, path=str(path), expected="a table", actual=table)
    return table


def _from_file(path: Path) -> Iterator[_Said]:
    prefix = "" if path.name == "cgtool.toml" else "tool.cgtool."
    for name, raw in (_table(path) or {}).items():
        value = _below(path.parent, raw) if name in _PATHS else raw
        origin = f"{path}, key {prefix}{name}"
        yield _Said(field=name, value=value, origin=origin, key=name, known={field: field for field in FIELDS})


def _below(folder: Path, raw: Any) -> Any:
    if isinstance(raw, list):
        return [_below(folder, item) for item in raw]
    return str(folder / Path(raw).expanduser()) if isinstance(raw, str) and raw else raw


def _from_variables(env: Environment) -> Iterator[_Said]:
    known = {f"CGTOOL_{field.upper()}": field for field in FIELDS}
    for name, text in env.variables.items():
        if text:
            origin = f"the variable {name}"
            yield _Said(field=known.get(name, name), value=_Text(text), origin=origin, key=name, known=known)


def _from_json(given: str | Mapping[str, Any] | None) -> Iterator[_Said]:
    values: Any = given or {}
    if isinstance(given, str):
        try:
            values = parse_json(given)
        except WrongValueError as error:
            message = f'--compilation-config is {given!r}: {error}. Give an object such as {{"compile_sizes": [1, 8]}}.'
            raise ConfigError(message, path="--compilation-config", actual=given) from error
    if not isinstance(values, Mapping):
        message = f'--compilation-config is {given!r}. Give an object such as {{"compile_sizes": [1, 8]}}.'
        raise ConfigError(message, path="--compilation-config", expected="an object", actual=given)
    for name, value in values.items():
        origin = f"--compilation-config, key {name}"
        yield _Said(field=name, value=value, origin=origin, key=name, known={field: field for field in FIELDS})


def _from_flags(flags: Mapping[str, Any]) -> Iterator[_Said]:
    known = {FLAGS.get(field, "--" + field.replace("_", "-")): field for field in FIELDS}
    spelled = {field: flag for flag, field in known.items()}
    for name, value in flags.items():
        if value is not None:
            flag = spelled.get(name, "--" + name.replace("_", "-"))
            given = _Text(value) if isinstance(value, str) else value
            yield _Said(field=name, value=given, origin=flag, key=flag, known=known)


class _Text(str):
    """A value that is spelled as text, where a file or JSON has types of its own."""

    __slots__ = ()


def _value(word: _Said) -> Any:
    if word.field not in FIELDS:
        near = nearest(word.key, word.known)
        message = f"{_start(word.origin)}: cgtool has no setting {word.key!r}; the nearest is {near!r}."
        raise ConfigError(message, path=word.origin, expected=sorted(word.known), actual=word.key)
    try:
        if isinstance(word.value, _Text):
            return parse_field(word.field, str(word.value))
        return check_field(word.field, word.value)
    except ConfigError as error:
        message = f"{_start(word.origin)}: {error}"
        raise ConfigError(message, path=word.origin, expected=error.expected, actual=error.actual) from error


def _refuse_conflicts(values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    defaults = {name: getattr(CompilationConfig(), name) for name in FIELDS} | {"adaptor": ""}
    for fields, sentence in conflicts(defaults | dict(values)):
        sources = "; ".join(f"{field}: {origins[field]}" for field in fields if field in origins)
        message = f"{_start(sentence)} ({sources})"
        raise ConfigError(message, path=fields[0], actual={field: values.get(field) for field in fields})


def _start(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]
