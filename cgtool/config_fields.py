"""The one table of configuration fields, and what is asked of it: names, values, contradictions.

Must not import torch, and reads no environment. `cgtool.config` builds its record from this table, the command line its
sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from cgtool import config_checks as checks
from cgtool import config_text as text
from cgtool.cudagraph_mode import CUDAGraphMode
from cgtool.errors import ConfigError
from cgtool.plan.pieces import EAGER
from cgtool.records import dataclass

FieldKind = Literal["key", "coverage", "runtime"]


@dataclass(frozen=True, kw_only=True)
class FieldSpec:
    """What is known of one configuration field.

    Args:
        kind: "key" changes code and is hashed; "coverage" says which shapes are compiled; "runtime" is neither.
        check: Returns the canonical value, or raises `WrongValueError`.
        parse: Turns text into what `check` takes, or raises `WrongValueError`.
    """

    kind: FieldKind
    check: Callable[[Any], Any]
    parse: Callable[[str], Any]


FIELDS: dict[str, FieldSpec] = {
    "level": FieldSpec(kind="key", check=checks.check_level, parse=text.parse_int),
    "splitting_ops": FieldSpec(kind="key", check=checks.check_ops, parse=text.parse_list(str)),
    "use_inductor": FieldSpec(kind="key", check=checks.check_bool, parse=text.parse_bool),
    "adaptor": FieldSpec(kind="key", check=checks.check_adaptor, parse=str.strip),
    "inductor_compile_config": FieldSpec(kind="key", check=checks.check_json_mapping, parse=text.parse_json),
    "compile_sizes": FieldSpec(kind="coverage", check=checks.check_sizes, parse=text.parse_list(text.parse_size)),
    "compile_ranges": FieldSpec(kind="coverage", check=checks.check_ranges, parse=text.parse_list(text.parse_range)),
    "size_dim": FieldSpec(kind="coverage", check=checks.check_dim, parse=text.parse_optional),
    "use_cudagraph": FieldSpec(kind="runtime", check=checks.check_bool, parse=text.parse_bool),
    "full_cuda_graph": FieldSpec(kind="runtime", check=checks.check_optional_bool, parse=text.parse_optional_bool),
    "cudagraph_mode": FieldSpec(kind="runtime", check=checks.check_mode, parse=text.parse_mode),
    "cudagraph_capture_sizes": FieldSpec(
        kind="runtime", check=checks.check_capture_sizes, parse=text.parse_list(text.parse_int)
    ),
    "cuda_graph_sizes": FieldSpec(
        kind="runtime", check=checks.check_graph_sizes, parse=text.parse_list(text.parse_int)
    ),
    "cudagraph_copy_inputs": FieldSpec(kind="runtime", check=checks.check_bool, parse=text.parse_bool),
    "enforce_eager": FieldSpec(kind="runtime", check=checks.check_bool, parse=text.parse_bool),
    "disable_cache": FieldSpec(kind="runtime", check=checks.check_bool, parse=text.parse_bool),
    "jobs": FieldSpec(kind="runtime", check=checks.check_jobs, parse=text.parse_optional),
    "compile_timeout": FieldSpec(kind="runtime", check=checks.check_secs, parse=text.parse_secs),
    "proof": FieldSpec(kind="runtime", check=checks.check_bool, parse=text.parse_bool),
    "recheck": FieldSpec(kind="runtime", check=checks.check_recheck, parse=str.strip),
    "cache_dir": FieldSpec(kind="runtime", check=checks.check_path, parse=str),
    "debug_dump_path": FieldSpec(kind="runtime", check=checks.check_path, parse=str),
    "trusted_keys": FieldSpec(kind="runtime", check=checks.check_paths, parse=text.parse_list(str)),
    "allow_shared_cache": FieldSpec(kind="runtime", check=checks.check_bool, parse=text.parse_bool),
}


def check_name(name: Any) -> str:
    """Return `name` if it is a field.

    Raises:
        ConfigError: It is none; the message names the nearest.
    """
    if name not in FIELDS:
        near = checks.nearest(str(name), FIELDS)
        message = f"There is no configuration field {name!r}; the nearest is {near!r}."
        raise ConfigError(message, path=name, expected=sorted(FIELDS), actual=name)
    return str(name)


def check_field(name: str, value: Any) -> Any:
    """Return the canonical form of a field's value.

    Raises:
        ConfigError: There is no such field, or it cannot hold `value`.
    """
    try:
        return FIELDS[check_name(name)].check(value)
    except checks.WrongValueError as error:
        message = f"{name} is {value!r}: {error}."
        raise ConfigError(message, path=name, expected=str(error), actual=value) from error


def parse_field(name: str, spelled: str) -> Any:
    """Return the canonical form of a field's value that is given as text.

    Raises:
        ConfigError: There is no such field, or the text spells nothing that it can hold.
    """
    try:
        value = FIELDS[check_name(name)].parse(spelled)
    except checks.WrongValueError as error:
        message = f"{name} is {spelled!r}: {error}."
        raise ConfigError(message, path=name, expected=str(error), actual=spelled) from error
    return check_field(name, value)


def conflicts(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what canonical values of all fields say against each other.

    Yields:
        The fields that disagree, and a sentence that says what to do.
    """
    mode = values["cudagraph_mode"]
    if not values["use_inductor"] and values["adaptor"] not in {"", EAGER}:
        yield (
            ("use_inductor", "adaptor"),
            f"use_inductor is off and the adaptor is {values['adaptor']!r}: turn it on, or take the adaptor 'eager'.",
        )
    if values["level"] == checks.CompilationLevel.DYNAMO_ONCE and values["splitting_ops"]:
        yield (
            ("level", "splitting_ops"),
            "level 2 compiles the graph whole and splitting_ops split it: use level 3, or leave splitting_ops out.",
        )
    if not values["use_cudagraph"] and mode not in {None, CUDAGraphMode.NONE}:
        yield (
            ("use_cudagraph", "cudagraph_mode"),
            f"use_cudagraph is off and cudagraph_mode is {mode.name}: turn it on, or leave cudagraph_mode out.",
        )
    if values["full_cuda_graph"] is not None and (mode is not None or not values["use_cudagraph"]):
        yield (
            ("full_cuda_graph", "cudagraph_mode", "use_cudagraph"),
            "leave full_cuda_graph out: it is an older way to say cudagraph_mode, and other fields say something, too.",
        )
    if not values["use_cudagraph"] and checks.CAPTURE_SIZES in (values["compile_sizes"] or ()):
        yield (
            ("use_cudagraph", "compile_sizes"),
            f'compile_sizes names "{checks.CAPTURE_SIZES}" and use_cudagraph is off: name the sizes themselves.',
        )
    without_pieces = mode is not None and not mode.has_piecewise_cudagraphs()
    if values["cudagraph_copy_inputs"] and (without_pieces or not values["use_cudagraph"]):
        yield (
            ("cudagraph_copy_inputs", "cudagraph_mode", "use_cudagraph"),
            "cudagraph_copy_inputs serves piecewise CUDA graphs and there are none: leave it out, or ask for them.",
        )
