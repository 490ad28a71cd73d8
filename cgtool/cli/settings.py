"""The settings of the command line, merged from several sources.

Must not import torch. The sources, in increasing order of precedence: defaults; the nearest cgtool.toml, or
pyproject.toml with a [tool.cgtool] table, from the working directory upwards to the root of the repository (a folder
with .git) or the file system; CGTOOL_<FIELD> variables (an empty one counts as unset); `--compilation-config`;
individual flags. A source with higher precedence replaces the whole field. Only the command line reads configuration
files: what a program does with cgtool never depends on its working directory.
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

#: Fields whose flag has another name.
FLAGS = {"disable_cache": "--no-cache", "proof": "--no-proof", "inductor_compile_config": "--inductor-config"}

#: Fields that hold paths. In a configuration file, they are relative to the file's folder.
_PATHS = frozenset({"cache_dir", "debug_dump_path", "trusted_keys"})


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """A field as one source sets it; `key` and `known` are spelled as in that source."""

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
    """Merge all sources into one configuration.

    Args:
        compilation_config: The value of `--compilation-config`, as JSON or parsed.
        flags: The values of flags by field. None means that the flag is absent; text is parsed like a variable.
        start: Where the search for a configuration file starts; the working directory if None.
        env: The environment variables; those of this process if None.

    Raises:
        ConfigError: A source cannot be read, has an unknown key or an invalid value, or contradicts another source. The
            message names the source and, for an unknown key, the nearest known one.
    """
    file = find_file(Path.cwd() if start is None else start)
    settings = [
        *(_from_file(file) if file else ()),
        *_from_variables(environment() if env is None else env),
        *_from_json(compilation_config),
        *_from_flags(flags or {}),
    ]
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for setting in settings:
        values[setting.field] = _value(setting)
        origins[setting.field] = setting.origin
    _check_conflicts(values, origins)
    config = CompilationConfig(**values)
    spelled = config.to_json() if origins else {}
    for field, origin in origins.items():
        _log.debug("%s is %s, set by %s", field, json.dumps(spelled[field]), origin)
    return config


def find_file(start: Path) -> Path | None:
    """Return the nearest configuration file from `start` upwards to the root of the repository or file system."""
    start = start.resolve()
    for folder in (start, *start.parents):
        dedicated, shared = folder / "cgtool.toml", folder / "pyproject.toml"
        files = [path for path in (dedicated, shared) if path.is_file() and _table(path) is not None]
        if len(files) > 1:
            message = f"Both {dedicated} and [tool.cgtool] in {shared} configure cgtool. Keep one of them."
            raise ConfigError(message, path=str(folder))
        if files:
            return files[0]
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
        message = f"In {path}, tool.cgtool is {table!r}, not a table. Write [tool.cgtool] and the fields below it."
        raise ConfigError(message, path=str(path), expected="a table", actual=table)
    return table


def _from_file(path: Path) -> Iterator[_Setting]:
    prefix = "" if path.name == "cgtool.toml" else "tool.cgtool."
    for name, raw in (_table(path) or {}).items():
        value = _relative_to(path.parent, raw) if name in _PATHS else raw
        origin = f"{path}, key {prefix}{name}"
        yield _Setting(field=name, value=value, origin=origin, key=name, known={field: field for field in FIELDS})


def _relative_to(folder: Path, raw: Any) -> Any:
    if isinstance(raw, list):
        return [_relative_to(folder, item) for item in raw]
    return str(folder / Path(raw).expanduser()) if isinstance(raw, str) and raw else raw


def _from_variables(env: Environment) -> Iterator[_Setting]:
    known = {f"CGTOOL_{field.upper()}": field for field in FIELDS}
    for name, text in env.variables.items():
        if text:
            origin = f"the variable {name}"
            yield _Setting(field=known.get(name, name), value=_Text(text), origin=origin, key=name, known=known)


def _from_json(raw: str | Mapping[str, Any] | None) -> Iterator[_Setting]:
    values: Any = raw or {}
    if isinstance(raw, str):
        try:
            values = parse_json(raw)
        except WrongValueError as error:
            message = f'--compilation-config is {raw!r}: {error}. Give an object such as {{"compile_sizes": [1, 8]}}.'
            raise ConfigError(message, path="--compilation-config", actual=raw) from error
    if not isinstance(values, Mapping):
        message = f'--compilation-config is {raw!r}. Give an object such as {{"compile_sizes": [1, 8]}}.'
        raise ConfigError(message, path="--compilation-config", expected="an object", actual=raw)
    for name, value in values.items():
        origin = f"--compilation-config, key {name}"
        yield _Setting(field=name, value=value, origin=origin, key=name, known={field: field for field in FIELDS})


def _from_flags(flags: Mapping[str, Any]) -> Iterator[_Setting]:
    known = {FLAGS.get(field, "--" + field.replace("_", "-")): field for field in FIELDS}
    spelled = {field: flag for flag, field in known.items()}
    for name, value in flags.items():
        if value is not None:
            flag = spelled.get(name, "--" + name.replace("_", "-"))
            parsed = _Text(value) if isinstance(value, str) else value
            yield _Setting(field=name, value=parsed, origin=flag, key=flag, known=known)


class _Text(str):
    """A value as text, which has yet to be parsed; values in a file or JSON are typed already."""

    __slots__ = ()


def _value(setting: _Setting) -> Any:
    if setting.field not in FIELDS:
        near = nearest(setting.key, setting.known)
        message = f"{_capitalized(setting.origin)}: cgtool has no setting {setting.key!r}; the nearest is {near!r}."
        raise ConfigError(message, path=setting.origin, expected=sorted(setting.known), actual=setting.key)
    try:
        if isinstance(setting.value, _Text):
            return parse_field(setting.field, str(setting.value))
        return check_field(setting.field, setting.value)
    except ConfigError as error:
        message = f"{_capitalized(setting.origin)}: {error}"
        raise ConfigError(message, path=setting.origin, expected=error.expected, actual=error.actual) from error


def _check_conflicts(values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    defaults = {name: getattr(CompilationConfig(), name) for name in FIELDS} | {"adaptor": ""}
    for fields, sentence in conflicts(defaults | dict(values)):
        sources = "; ".join(f"{field}: {origins[field]}" for field in fields if field in origins)
        message = f"{_capitalized(sentence)} ({sources})"
        raise ConfigError(message, path=fields[0], actual={field: values.get(field) for field in fields})


def _capitalized(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]
