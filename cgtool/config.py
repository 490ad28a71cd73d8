"""The configuration: one record, one table of its fields, and how a field's value is spelled as text.

`CompilationConfig` is what the library takes and what the command line makes of its sources; `FIELDS` says of each
field whether it is hashed, how it is checked (`cgtool.config_values`) and how it is parsed. Must not import torch, and
reads no environment. Text, in a variable or an option::

    sizes   = size ("," size)*            | JSON list
    size    = integer | "cudagraph_capture_sizes" | name "=" integer (":" name "=" integer)*
    ranges  = start "-" end ("," start "-" end)*  | JSON list of [start, end]
    ops     = name ("," name)*            | JSON list; an empty text is the empty list
    bool    = "1" | "0" | "true" | "false" | "yes" | "no" | "on" | "off"
    mapping = JSON object
    "none" is None where a field may be None; a path, a name of a dimension or of an adaptor is taken as it stands.
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


FieldKind = Literal["key", "coverage", "runtime"]


class FieldSpec(NamedTuple):
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
        ConfigError: There is no such field; the message names the nearest.
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
    except WrongValueError as error:
        message = f"{name} is {value!r}: {error}."
        raise ConfigError(message, path=name, expected=str(error), actual=value) from error


def parse_field(name: str, spelled: str) -> Any:
    """Return the canonical form of a field's value that is given as text.

    Raises:
        ConfigError: There is no such field, or the text spells nothing that it can hold.
    """
    try:
        value = FIELDS[check_name(name)].parse(spelled)
    except WrongValueError as error:
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
    if values["level"] == CompilationLevel.DYNAMO_ONCE and values["splitting_ops"]:
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
    if not values["use_cudagraph"] and CAPTURE_SIZES in (values["compile_sizes"] or ()):
        yield (
            ("use_cudagraph", "compile_sizes"),
            f'compile_sizes names "{CAPTURE_SIZES}" and use_cudagraph is off: name the sizes themselves.',
        )
    without_pieces = mode is not None and not mode.has_piecewise_cudagraphs()
    if values["cudagraph_copy_inputs"] and (without_pieces or not values["use_cudagraph"]):
        yield (
            ("cudagraph_copy_inputs", "cudagraph_mode", "use_cudagraph"),
            "cudagraph_copy_inputs serves piecewise CUDA graphs and there are none: leave it out, or ask for them.",
        )


#: One concrete size: of the one dynamic dimension (or of `size_dim`), or of several dimensions by name.
CompileSize = int | dict[str, int]


@dataclass(frozen=True, kw_only=True)
class CompilationConfig:
    """How a model is compiled and run. Every field is checked, and held in one canonical form.

    Args:
        level: Compilation level 0 to 3, by number or name; 3 (PIECEWISE) by default. Levels 0 and 1 compile nothing,
            2 compiles the graph whole, 3 splits it at `splitting_ops`. Kind: key.
        splitting_ops: Names of ops to split at: `ns::op`, `ns.op`, with or without overload, or the dotted name of a
            Python function. None (default) means the model's own list, or the attention ops known to cgtool and those
            registered with `splitting=True`; an empty list means one piece. Kind: key.
        use_inductor: Whether Inductor compiles the pieces; True by default. False chooses the adaptor `eager`.
            Kind: key.
        adaptor: What compiles a piece: `aot_inductor` (default; a piece that it does not take goes to
            `inductor_standalone`, and what no compiler takes to `eager`), `inductor_standalone`, `inductor`, `eager`,
            or one that others bring (`register_adaptor`, or an entry point of the group `cgtool.adaptors`). Kind: key.
        inductor_compile_config: Inductor's options by name, as JSON values, over those that cgtool sets; empty by
            default. Kind: key.
        compile_sizes: Sizes that get an artifact of their own, fully static and tuned: positive integers (of
            `size_dim`, in tokens as a rule), the word "cudagraph_capture_sizes", or mappings of dimension to size. None
            (default) is none. A size wins over a range, a range over the general shape. Kind: coverage.
        compile_ranges: Ranges of sizes that get an artifact of their own: inclusive [start, end] in the unit of
            `compile_sizes`, start below end, without overlap; none by default. Kind: coverage.
        size_dim: Which dynamic dimension the integers of `compile_sizes` and `compile_ranges` speak of. None (default)
            is enough where only one is dynamic. Kind: coverage.
        use_cudagraph: Whether CUDA graphs may be captured; True by default. Kind: runtime.
        full_cuda_graph: An older way to say `cudagraph_mode`: true is FULL, false is PIECEWISE. None (default) says
            nothing. Kind: runtime.
        cudagraph_mode: What is captured. None (default) means FULL_AND_PIECEWISE, or what comes nearest to it for the
            model and its attention. Kind: runtime.
        cudagraph_capture_sizes: Sizes to capture, in sequences of a batch. None (default) means those that
            `cuda_graph_sizes` gives. Kind: runtime.
        cuda_graph_sizes: One value N: capture 1, 2, 4, 8 and every multiple of 16 up to N sequences. Several values:
            capture these. [512] by default. Kind: runtime.
        cudagraph_copy_inputs: Copy inputs into buffers of fixed address before a piecewise graph is replayed; False by
            default. Kind: runtime.
        enforce_eager: Run eagerly whatever else is said: no compilation, no CUDA graphs; False by default.
            Kind: runtime.
        disable_cache: Neither read nor write the cache; False by default. The variable CGTOOL_DISABLE_CACHE says the
            same for a whole process. Kind: runtime.
        jobs: How many pieces are compiled at a time, each in a worker process of its own. None (default) means one for
            each core that this process may use, as far as the memory goes; 0 compiles in this process. Kind: runtime.
        executor: Where pieces are compiled in place of this machine: `dask://HOST:PORT`, `ray://HOST:PORT`,
            `slurm:NAME=VALUE,...`, `mpi`, or an entry point of the group `cgtool.executors` and what follows a colon.
            Empty (default) means workers of this machine. Kind: runtime.
        compile_timeout: How long one piece may take to compile in a worker, in seconds; a worker that takes longer is
            ended. None (default) is no limit. Kind: runtime.
        proof: Before the cache names them, run each artifact on random inputs, in a process of its own, and compare it
            with the piece run eagerly, and the whole call with the model's own; True by default. Kind: runtime.
        recheck: When a loaded model looks at its live objects again: "load" (default) as it is loaded and where
            `recheck()` is called, "call" at each call too. Kind: runtime.
        cache_dir: The cache's root folder. Empty (default) means CGTOOL_CACHE_DIR, else the user's cache folder.
            Kind: runtime.
        debug_dump_path: A folder that gets graph, program and generated code of each model that is warmed, for people,
            by entry, rank and prefix; on a hit, too. Empty (default) means none. Kind: runtime.
        trusted_keys: Files and folders of public keys (Ed25519, PEM or OpenSSH): load takes only what one of them
            signed, and that is as it was signed. Empty (default) means CGTOOL_TRUSTED_KEYS, else asks for no signature;
            `compile` then loads nothing that it compiled itself. Kind: runtime.
        allow_shared_cache: Load from a cache that another user owns or others may write to, too; False by default.
            The variable CGTOOL_ALLOW_SHARED_CACHE says the same for a whole process. Kind: runtime.
        remote: URLs of stores, asked in order: `load` pulls from there what the cache lacks, and `warm` asks for what
            it would compile and pushes what it made. Naming one vouches for it, as for a cache. Empty (default) means
            CGTOOL_REMOTE, else none. Kind: runtime.
        remote_readonly: Push nothing to them; False by default. Kind: runtime.
        remote_required: Fail where one of them does; False by default: a warning, and on without it. Kind: runtime.

    Raises:
        ConfigError: A field cannot hold its value, or two fields contradict each other.
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
        """The level that holds once `enforce_eager` has had its say."""
        return CompilationLevel.NO_COMPILATION if self.enforce_eager else CompilationLevel(self.level)

    @property
    def asked_cudagraph_mode(self) -> CUDAGraphMode:
        """What the fields on CUDA graphs ask for together; `cgtool.serving.modes` fits it to a model."""
        if not self.use_cudagraph or self.enforce_eager:
            return CUDAGraphMode.NONE
        if self.full_cuda_graph is not None:
            return CUDAGraphMode.FULL if self.full_cuda_graph else CUDAGraphMode.PIECEWISE
        return self.cudagraph_mode or CUDAGraphMode.FULL_AND_PIECEWISE

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> CompilationConfig:
        """Return the configuration that `values` gives, with defaults for what it leaves out.

        Raises:
            ConfigError: A key is no field (the message names the nearest), or a value is refused.
        """
        return cls(**{check_name(name): value for name, value in values.items()})

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> CompilationConfig:
        """Return the configuration that `CGTOOL_<FIELD>` variables give, as `Environment.variables` holds them.

        An empty variable counts as unset.

        Raises:
            ConfigError: A variable names no field, or spells nothing that the field can hold.
        """
        fields = {name: name.removeprefix("CGTOOL_").lower() for name in variables}
        return cls(**{fields[name]: parse_field(fields[name], text) for name, text in variables.items() if text})

    def to_json(self) -> dict[str, Json]:
        """Return every field as JSON; `from_mapping` takes it back."""
        return {name: _to_json(getattr(self, name)) for name in FIELDS}

    def key_fields(self) -> dict[str, Json]:
        """Return the fields that change code, as JSON in one spelling for everything that means the same."""
        fields = {name: value for name, value in self.to_json().items() if FIELDS[name].kind == "key"}
        fields["use_inductor"] = self.adaptor != EAGER
        if self.splitting_ops is not None:
            fields["splitting_ops"] = sorted(self.splitting_ops)
        return fields

    def leveled(self) -> CompilationConfig:
        """Return the configuration with what its level implies spelled out, as an entry is keyed on it."""
        if self.effective_level == CompilationLevel.DYNAMO_AS_IS:
            return self.replace(splitting_ops=(), adaptor=EAGER)
        if self.effective_level == CompilationLevel.DYNAMO_ONCE:
            return self.replace(splitting_ops=())
        return self

    def replace(self, **changes: Any) -> CompilationConfig:
        """Return a copy with other values in some fields; `use_inductor` alone chooses the adaptor anew.

        Raises:
            ConfigError: As the constructor does, and where a name is no field.
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
    """Return the batch sizes that are captured as CUDA graphs, in rising order; none where `use_cudagraph` is off."""
    if not config.use_cudagraph:
        return ()
    if config.cudagraph_capture_sizes is not None:
        return tuple(config.cudagraph_capture_sizes)
    sizes = tuple(config.cuda_graph_sizes)
    return default_capture_sizes(sizes[0]) if len(sizes) == 1 else sizes


def checked_config(given: object) -> CompilationConfig:
    """Return what a caller gave as a configuration.

    Raises:
        ConfigError: It is something else, such as torch.compile's options.
    """
    if isinstance(given, CompilationConfig):
        return given
    kind = type(given).__qualname__
    advice = " CompilationConfig.from_mapping makes one of it." if isinstance(given, Mapping) else ""
    msg = f"config is of the type {kind}. Give a cgtool.CompilationConfig.{advice}"
    raise ConfigError(msg, path="config", expected="CompilationConfig", actual=kind)


def resolve_compile_sizes(config: CompilationConfig) -> tuple[CompileSize, ...]:
    """Return the concrete sizes to compile: integers in rising order, each once, then mappings.

    The word "cudagraph_capture_sizes" becomes the sizes that are captured.
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
