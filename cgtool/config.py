"""The configuration: its record, the table of its fields, and the text form of their values.

`CompilationConfig` is the configuration of the library and of the command line. `FIELDS` holds the kind of each field,
its check (`cgtool.config_values`) and its parser. Must not import torch, and does not read the environment. Values in a
variable or an option are written as::

    sizes   = size ("," size)*            | JSON list
    size    = integer | "cudagraph_capture_sizes" | name "=" integer (":" name "=" integer)*
    ranges  = start "-" end ("," start "-" end)*  | JSON list of [start, end]
    ops     = name ("," name)*            | JSON list; an empty text is the empty list
    bool    = "1" | "0" | "true" | "false" | "yes" | "no" | "on" | "off"
    mapping = JSON object
    "none" is None if the field can be None; a path and the name of a dimension or of an adaptor are taken literally.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from cgtool import config_values as checks
from cgtool.adaptor_registry import ADAPTORS
from cgtool.config_values import CAPTURE_SIZES, CompilationLevel, CUDAGraphMode, WrongValueError, default_capture_sizes
from cgtool.errors import ConfigError
from cgtool.plan.pieces import EAGER, Json

_BOOLS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def parse_bool(text: str) -> bool:
    """Parse a bool."""
    if text.strip().lower() not in _BOOLS:
        message = f"it must be one of {', '.join(_BOOLS)}"
        raise WrongValueError(message)
    return _BOOLS[text.strip().lower()]


def parse_optional_bool(text: str) -> bool | None:
    """Parse a bool; the empty text and `none` are None."""
    return None if text.strip().lower() in {"", "none"} else parse_bool(text)


def parse_json(text: str) -> Any:
    """Parse a JSON value.

    Raises:
        WrongValueError: The text is not JSON, or an object has a duplicate key.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except WrongValueError:
        raise
    except (ValueError, RecursionError) as error:
        message = f"it is not valid JSON ({error})"
        raise WrongValueError(message) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            message = f"{key!r} occurs twice"
            raise WrongValueError(message)
        result[key] = value
    return result


def parse_list(item_of: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser of a list: JSON, or items between commas that `item_of` parses."""

    def parse(text: str) -> Any:
        if text.strip().lower() in {"none", "null"}:
            return None
        if text.strip()[:1] in {"[", "{"}:
            return parse_json(text)
        return [item_of(part.strip()) for part in text.split(",") if part.strip()]

    return parse


def parse_int(text: str) -> int | str:
    """Parse an integer; return other text unchanged, so that the field's check rejects it."""
    text = text.strip()
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else text


def parse_size(text: str) -> Any:
    """Parse one compile size."""
    if "=" not in text:
        return parse_int(text)
    pairs = [part.partition("=") for part in text.split(":")]
    return _unique([(name.strip(), parse_int(size.strip())) for name, _, size in pairs])


def parse_range(text: str) -> list[int | str]:
    """Parse the bounds of a range."""
    return [parse_int(bound.strip()) for bound in text.split("-")]


def parse_optional(text: str) -> str | int | None:
    """Parse a word or an integer; the empty text, `none` and `null` are None."""
    return None if text.strip().lower() in {"", "none", "null"} else parse_int(text.strip())


def parse_secs(text: str) -> float | str | None:
    """Parse a number of seconds; the empty text, `none` and `null` are None, other text is returned unchanged."""
    text = text.strip()
    if text.lower() in {"", "none", "null"}:
        return None
    return float(text) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", text) else text


def parse_mode(text: str) -> Any:
    """Parse the name or value of a mode. NONE is a mode, so only the empty text and `null` mean None."""
    if text.strip()[:1] == "[":
        return parse_json(text)
    return None if text.strip().lower() in {"", "null"} else parse_int(text.strip())


FieldKind = Literal["key", "coverage", "runtime"]


class FieldSpec(NamedTuple):
    """The kind, check and parser of a configuration field.

    Args:
        kind: "key" fields change code and are hashed; "coverage" fields choose the shapes to compile; "runtime" fields
            do neither.
        check: Returns the canonical value, or raises `WrongValueError`.
        parse: Converts text to a value for `check`, or raises `WrongValueError`.
    """

    kind: FieldKind
    check: Callable[[Any], Any]
    parse: Callable[[str], Any]


FIELDS: dict[str, FieldSpec] = {
    "level": FieldSpec("key", checks.check_level, parse_int),
    "splitting_ops": FieldSpec("key", checks.check_ops, parse_list(str)),
    "use_inductor": FieldSpec("key", checks.check_bool, parse_bool),
    "adaptor": FieldSpec("key", checks.check_adaptor, str.strip),
    "inductor_compile_config": FieldSpec("key", checks.check_json_mapping, parse_json),
    "compile_sizes": FieldSpec("coverage", checks.check_sizes, parse_list(parse_size)),
    "compile_ranges": FieldSpec("coverage", checks.check_ranges, parse_list(parse_range)),
    "size_dim": FieldSpec("coverage", checks.check_dim, parse_optional),
    "use_cudagraph": FieldSpec("runtime", checks.check_bool, parse_bool),
    "full_cuda_graph": FieldSpec("runtime", checks.check_optional_bool, parse_optional_bool),
    "cudagraph_mode": FieldSpec("runtime", checks.check_mode, parse_mode),
    "cudagraph_capture_sizes": FieldSpec("runtime", checks.check_capture_sizes, parse_list(parse_int)),
    "cuda_graph_sizes": FieldSpec("runtime", checks.check_graph_sizes, parse_list(parse_int)),
    "cudagraph_copy_inputs": FieldSpec("runtime", checks.check_bool, parse_bool),
    "enforce_eager": FieldSpec("runtime", checks.check_bool, parse_bool),
    "disable_cache": FieldSpec("runtime", checks.check_bool, parse_bool),
    "jobs": FieldSpec("runtime", checks.check_jobs, parse_optional),
    "executor": FieldSpec("runtime", checks.check_executor, str.strip),
    "compile_timeout": FieldSpec("runtime", checks.check_secs, parse_secs),
    "proof": FieldSpec("runtime", checks.check_bool, parse_bool),
    "recheck": FieldSpec("runtime", checks.check_recheck, str.strip),
    "cache_dir": FieldSpec("runtime", checks.check_path, str),
    "debug_dump_path": FieldSpec("runtime", checks.check_path, str),
    "trusted_keys": FieldSpec("runtime", checks.check_paths, parse_list(str)),
    "allow_shared_cache": FieldSpec("runtime", checks.check_bool, parse_bool),
    "remote": FieldSpec("runtime", checks.check_urls, parse_list(str)),
    "remote_readonly": FieldSpec("runtime", checks.check_bool, parse_bool),
    "remote_required": FieldSpec("runtime", checks.check_bool, parse_bool),
}


def check_name(name: Any) -> str:
    """Return `name` if it is a field.

    Raises:
        ConfigError: There is no such field; the message suggests the nearest.
    """
    if name not in FIELDS:
        near = checks.nearest(str(name), FIELDS)
        message = f"There is no configuration field {name!r}; the nearest is {near!r}."
        raise ConfigError(message, path=name, expected=sorted(FIELDS), actual=name)
    return str(name)


def check_field(name: str, value: Any) -> Any:
    """Return the canonical form of a field's value.

    Raises:
        ConfigError: There is no such field, or `value` is invalid.
    """
    try:
        return FIELDS[check_name(name)].check(value)
    except WrongValueError as error:
        message = f"{name} is {value!r}: {error}."
        raise ConfigError(message, path=name, expected=str(error), actual=value) from error


def parse_field(name: str, text: str) -> Any:
    """Parse a field's value and return its canonical form.

    Raises:
        ConfigError: There is no such field, or the text is not a valid value.
    """
    try:
        value = FIELDS[check_name(name)].parse(text)
    except WrongValueError as error:
        message = f"{name} is {text!r}: {error}."
        raise ConfigError(message, path=name, expected=str(error), actual=text) from error
    return check_field(name, value)


def conflicts(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the contradictions between canonical values of all fields.

    Yields:
        The fields that contradict each other, and a sentence with the problem and its remedy.
    """
    mode = values["cudagraph_mode"]
    if not values["use_inductor"] and values["adaptor"] not in {"", EAGER}:
        yield (
            ("use_inductor", "adaptor"),
            f"use_inductor is off and the adaptor is {values['adaptor']!r}: turn it on, or use the adaptor 'eager'.",
        )
    if values["level"] == CompilationLevel.DYNAMO_ONCE and values["splitting_ops"]:
        yield (
            ("level", "splitting_ops"),
            "level 2 does not split the graph, but splitting_ops is set: use level 3, or leave splitting_ops out.",
        )
    if not values["use_cudagraph"] and mode not in {None, CUDAGraphMode.NONE}:
        yield (
            ("use_cudagraph", "cudagraph_mode"),
            f"use_cudagraph is off and cudagraph_mode is {mode.name}: turn it on, or leave cudagraph_mode out.",
        )
    if values["full_cuda_graph"] is not None and (mode is not None or not values["use_cudagraph"]):
        yield (
            ("full_cuda_graph", "cudagraph_mode", "use_cudagraph"),
            "leave full_cuda_graph out: it is the older form of cudagraph_mode and contradicts the other fields.",
        )
    if not values["use_cudagraph"] and CAPTURE_SIZES in (values["compile_sizes"] or ()):
        yield (
            ("use_cudagraph", "compile_sizes"),
            f'compile_sizes contains "{CAPTURE_SIZES}" and use_cudagraph is off: write the sizes themselves.',
        )
    without_pieces = mode is not None and not mode.has_piecewise_cudagraphs()
    if values["cudagraph_copy_inputs"] and (without_pieces or not values["use_cudagraph"]):
        yield (
            ("cudagraph_copy_inputs", "cudagraph_mode", "use_cudagraph"),
            "cudagraph_copy_inputs needs piecewise CUDA graphs, which are off: leave it out, or turn them on.",
        )


#: One concrete size: of the only dynamic dimension (or of `size_dim`), or of several dimensions by name.
CompileSize = int | dict[str, int]


@dataclass(frozen=True, kw_only=True)
class CompilationConfig:
    """How a model is compiled and run. Fields are checked, and stored in canonical form.

    Args:
        level: The compilation level, 0 to 3, by number or name; 3 (PIECEWISE) by default. Levels 0 and 1 compile
            nothing, 2 compiles the graph whole, 3 splits it at `splitting_ops`. Kind: key.
        splitting_ops: Names of ops to split at: `ns::op`, `ns.op`, with or without overload, or the dotted name of a
            Python function. None (default) means the model's own list, or else the attention ops known to cgtool and
            those registered with `splitting=True`. An empty list means one piece. Kind: key.
        use_inductor: Whether Inductor compiles the pieces; True by default. False selects the adaptor `eager`.
            Kind: key.
        adaptor: The compiler of the pieces: `aot_inductor` (default), `inductor_standalone`, `inductor`, `eager`, or a
            third-party one (`register_adaptor`, or an entry point of the group `cgtool.adaptors`). A piece that
            `aot_inductor` cannot compile falls back to `inductor_standalone`, then to `eager`. Kind: key.
        inductor_compile_config: Inductor options by name, as JSON values, which override those that cgtool sets; empty
            by default. Kind: key.
        compile_sizes: Sizes to compile fully static, autotuned artifacts for: positive integers (of `size_dim`,
            usually tokens), the word "cudagraph_capture_sizes", or mappings of dimension to size. None (default) means
            no sizes. A size takes precedence over a range, a range over the general shape. Kind: coverage.
        compile_ranges: Ranges of sizes to compile artifacts for: inclusive [start, end] in the unit of
            `compile_sizes`, start below end, without overlap; none by default. Kind: coverage.
        size_dim: The dynamic dimension that the integers of `compile_sizes` and `compile_ranges` refer to. None
            (default) is enough if only one dimension is dynamic. Kind: coverage.
        use_cudagraph: Whether CUDA graphs may be captured; True by default. Kind: runtime.
        full_cuda_graph: The older form of `cudagraph_mode`: true means FULL, false PIECEWISE. None (default) means
            unset. Kind: runtime.
        cudagraph_mode: What to capture. None (default) means FULL_AND_PIECEWISE, or the nearest mode that the model
            and its attention support. Kind: runtime.
        cudagraph_capture_sizes: Batch sizes to capture, in sequences. None (default) takes those of
            `cuda_graph_sizes`. Kind: runtime.
        cuda_graph_sizes: One value N: capture 1, 2, 4, 8 and every multiple of 16 up to N sequences. Several values:
            capture exactly these. [512] by default. Kind: runtime.
        cudagraph_copy_inputs: Copy inputs to buffers at fixed addresses before replaying a piecewise graph; False by
            default. Kind: runtime.
        enforce_eager: Run eagerly regardless of other fields: no compilation, no CUDA graphs; False by default.
            Kind: runtime.
        disable_cache: Neither read nor write the cache; False by default. The variable CGTOOL_DISABLE_CACHE does the
            same for the whole process. Kind: runtime.
        jobs: The number of pieces to compile at once, each in its own worker process. None (default) means one per
            available core, as far as memory allows; 0 compiles in this process. Kind: runtime.
        executor: Where to compile pieces instead of this machine: `dask://HOST:PORT`, `ray://HOST:PORT`,
            `slurm:NAME=VALUE,...`, `mpi`, or an entry point of the group `cgtool.executors`, with its address after a
            colon. Empty (default) means workers on this machine. Kind: runtime.
        compile_timeout: The time limit for compiling a piece in a worker, in seconds; a worker that exceeds it is
            ended. None (default) means no limit. Kind: runtime.
        proof: Before an artifact enters the cache, run it on random inputs in a separate process and compare it with
            the piece run eagerly, and compare the whole call with the model's own; True by default. Kind: runtime.
        recheck: When a loaded model checks its live objects: "load" (default) when it is loaded and when `recheck()` is
            called, "call" before each call, too. Kind: runtime.
        cache_dir: The root folder of the cache. Empty (default) means CGTOOL_CACHE_DIR, or else the user's cache
            folder. Kind: runtime.
        debug_dump_path: A folder to write the graph, program and generated code of each warmed model to, by entry, rank
            and prefix; on a hit, too. Empty (default) means none. Kind: runtime.
        trusted_keys: Files and folders of public keys (Ed25519, PEM or OpenSSH). Only entries that one of them signed,
            and that are unchanged since, are loaded; `compile` then does not load what it compiled itself. Empty
            (default) means CGTOOL_TRUSTED_KEYS, or else no signature is required. Kind: runtime.
        allow_shared_cache: Also load from a cache that other users own or can write to; False by default. The variable
            CGTOOL_ALLOW_SHARED_CACHE does the same for the whole process. Kind: runtime.
        remote: URLs of remote stores, tried in order. `load` pulls entries that the cache lacks; `warm` pulls what it
            would otherwise compile, and pushes what it compiled. A store that is named here is trusted, as a cache is.
            Empty (default) means CGTOOL_REMOTE, or else none. Kind: runtime.
        remote_readonly: Never push to the remote stores; False by default. Kind: runtime.
        remote_required: Fail if a remote store fails. By default (False) a failure is a warning. Kind: runtime.

    Raises:
        ConfigError: A value is invalid, or fields contradict each other.
    """

    level: int = CompilationLevel.PIECEWISE
    splitting_ops: Sequence[str] | None = None
    use_inductor: bool = True
    adaptor: str = ""
    inductor_compile_config: Mapping[str, Json] = field(default_factory=dict, hash=False)
    compile_sizes: Sequence[int | str | Mapping[str, int]] | None = field(default=None, hash=False)
    compile_ranges: Sequence[Sequence[int]] = ()
    size_dim: str | None = None
    use_cudagraph: bool = True
    full_cuda_graph: bool | None = None
    cudagraph_mode: CUDAGraphMode | None = None
    cudagraph_capture_sizes: Sequence[int] | None = None
    cuda_graph_sizes: Sequence[int] = (512,)
    cudagraph_copy_inputs: bool = False
    enforce_eager: bool = False
    disable_cache: bool = False
    jobs: int | None = None
    executor: str = ""
    compile_timeout: float | None = None
    proof: bool = True
    recheck: str = "load"
    cache_dir: str = ""
    debug_dump_path: str = ""
    trusted_keys: Sequence[str] = ()
    allow_shared_cache: bool = False
    remote: Sequence[str] = ()
    remote_readonly: bool = False
    remote_required: bool = False

    def __post_init__(self) -> None:
        for name in FIELDS:
            object.__setattr__(self, name, check_field(name, getattr(self, name)))
        for names, sentence in conflicts({name: getattr(self, name) for name in FIELDS}):
            message = sentence[0].upper() + sentence[1:]
            raise ConfigError(message, path=names[0], actual={name: getattr(self, name) for name in names})
        if not self.adaptor:
            object.__setattr__(self, "adaptor", ADAPTORS[0] if self.use_inductor else EAGER)

    @property
    def effective_level(self) -> CompilationLevel:
        """The level, or NO_COMPILATION if `enforce_eager` is set."""
        return CompilationLevel.NO_COMPILATION if self.enforce_eager else CompilationLevel(self.level)

    @property
    def asked_cudagraph_mode(self) -> CUDAGraphMode:
        """The mode that the CUDA graph fields request together; `cgtool.serving.modes` adapts it to a model."""
        if not self.use_cudagraph or self.enforce_eager:
            return CUDAGraphMode.NONE
        if self.full_cuda_graph is not None:
            return CUDAGraphMode.FULL if self.full_cuda_graph else CUDAGraphMode.PIECEWISE
        return self.cudagraph_mode or CUDAGraphMode.FULL_AND_PIECEWISE

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> CompilationConfig:
        """Create a configuration from a mapping of fields to values; other fields have their defaults.

        Raises:
            ConfigError: A key is not a field (the message suggests the nearest), or a value is invalid.
        """
        return cls(**{check_name(name): value for name, value in values.items()})

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> CompilationConfig:
        """Create a configuration from `CGTOOL_<FIELD>` variables, such as `Environment.variables`.

        Empty variables count as unset.

        Raises:
            ConfigError: There is no field for a variable, or its value is invalid.
        """
        fields = {name: name.removeprefix("CGTOOL_").lower() for name in variables}
        return cls(**{fields[name]: parse_field(fields[name], text) for name, text in variables.items() if text})

    def to_json(self) -> dict[str, Json]:
        """Return every field as JSON, for `from_mapping`."""
        return {name: _to_json(getattr(self, name)) for name in FIELDS}

    def key_fields(self) -> dict[str, Json]:
        """Return the key fields as JSON, normalized so that equivalent configurations are equal."""
        fields = {name: value for name, value in self.to_json().items() if FIELDS[name].kind == "key"}
        fields["use_inductor"] = self.adaptor != EAGER
        if self.splitting_ops is not None:
            fields["splitting_ops"] = sorted(self.splitting_ops)
        return fields

    def leveled(self) -> CompilationConfig:
        """Return the configuration with the fields that its level implies set, as they enter an entry's key."""
        if self.effective_level == CompilationLevel.DYNAMO_AS_IS:
            return self.replace(splitting_ops=(), adaptor=EAGER)
        if self.effective_level == CompilationLevel.DYNAMO_ONCE:
            return self.replace(splitting_ops=())
        return self

    def replace(self, **changes: Any) -> CompilationConfig:
        """Return a copy with some fields changed. Changing only `use_inductor` selects the adaptor again.

        Raises:
            ConfigError: As for the constructor, or if a name is not a field.
        """
        if "use_inductor" in changes:
            changes.setdefault("adaptor", "")
        return dataclasses.replace(self, **{check_name(name): value for name, value in changes.items()})


def _to_json(value: Any) -> Json:
    if isinstance(value, CUDAGraphMode):
        return value.name
    if isinstance(value, CompilationLevel):
        return int(value)
    if isinstance(value, Mapping):
        return {name: _to_json(item) for name, item in value.items()}
    return [_to_json(item) for item in value] if isinstance(value, (tuple, list)) else value


def resolve_capture_sizes(config: CompilationConfig) -> tuple[int, ...]:
    """Return the batch sizes to capture as CUDA graphs, in ascending order; none if `use_cudagraph` is off."""
    if not config.use_cudagraph:
        return ()
    if config.cudagraph_capture_sizes is not None:
        return tuple(config.cudagraph_capture_sizes)
    sizes = tuple(config.cuda_graph_sizes)
    return default_capture_sizes(sizes[0]) if len(sizes) == 1 else sizes


def checked_config(config: object) -> CompilationConfig:
    """Return `config` if it is a `CompilationConfig`.

    Raises:
        ConfigError: It is something else, such as options of `torch.compile`.
    """
    if isinstance(config, CompilationConfig):
        return config
    kind = type(config).__qualname__
    advice = " CompilationConfig.from_mapping converts it." if isinstance(config, Mapping) else ""
    msg = f"config must be a cgtool.CompilationConfig, not {kind}.{advice}"
    raise ConfigError(msg, path="config", expected="CompilationConfig", actual=kind)


def resolve_compile_sizes(config: CompilationConfig) -> tuple[CompileSize, ...]:
    """Return the concrete sizes to compile: integers in ascending order without duplicates, then mappings.

    The word "cudagraph_capture_sizes" is replaced by the captured sizes.
    """
    numbers: set[int] = set()
    mappings: list[dict[str, int]] = []
    for size in config.compile_sizes or ():
        if isinstance(size, Mapping):
            mappings.append(dict(size))
        elif isinstance(size, int):
            numbers.add(size)
        else:
            numbers.update(resolve_capture_sizes(config))
    return (*sorted(numbers), *mappings)
