"""The environment of this process: the only reader of `os.environ`. Must not import torch.

A start from the cache imports this and not `cgtool.config`, which knows what the fields of a configuration may hold.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from cgtool.errors import ConfigError
from cgtool.records import dataclass


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What cgtool reads from the environment of this process.

    Args:
        cache_dir: CGTOOL_CACHE_DIR; None where it is unset or empty.
        disable_cache: CGTOOL_DISABLE_CACHE; False where it is unset or empty.
        variables: Every CGTOOL_ variable by its full name, unread and unchecked.
        cxx: CXX, the C++ compiler that Inductor is told to use; None where it is unset.
        code_variables: The variables of torch, Inductor, Dynamo and triton that may change code, by name.
        rank: RANK, else LOCAL_RANK, else 0: this process's place in its model-parallel group.
        shell: SHELL, the user's own shell; None where it is unset or empty.
        trusted_keys: CGTOOL_TRUSTED_KEYS, paths with commas between; none where it is unset.
        allow_shared_cache: CGTOOL_ALLOW_SHARED_CACHE; False where it is unset or empty.
    """

    cache_dir: str | None
    disable_cache: bool
    variables: Mapping[str, str]
    cxx: str | None
    code_variables: Mapping[str, str]
    rank: int
    shell: str | None
    trusted_keys: tuple[str, ...]
    allow_shared_cache: bool


#: A variable with one of these prefixes is taken to change code, unless it is known not to.
_CODE_PREFIXES = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_", "TRITON_", "AOT_INDUCTOR_", "ATEN_", "CUTLASS_")

#: Known to change no code: places, logs, caches, jobs, timeouts, communication. Read in torch 2.11 to 2.13. Plain names
#: and beginnings of names: to compile one pattern for them all takes longer than a start has for its whole import.
_HARMLESS = frozenset(
    {
        *("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_WORKER_START"),
        *("TORCHINDUCTOR_WORKER_LOGPATH", "TORCHINDUCTOR_WORKER_SUPPRESS_LOGGING"),
        *("TORCHINDUCTOR_COMPILE_WORKER_WAIT_TIMEOUT", "TORCHINDUCTOR_QUIESCE_ASYNC_COMPILE_POOL"),
        *("TORCHINDUCTOR_FILE_LOCK_TIMEOUT", "TORCHINDUCTOR_AUTOTUNE_POOL_INACTIVITY_TIMEOUT"),
        *("TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_FX_GRAPH_CACHE_DEFAULT"),
        *("TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE", "TORCHINDUCTOR_AUTOGRAD_CACHE"),
        *("TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE", "TORCHINDUCTOR_AUTOTUNE_REMOTE_CACHE"),
        *("TORCHINDUCTOR_BUNDLED_AUTOTUNE_REMOTE_CACHE", "TORCHINDUCTOR_NON_BLOCKING_REMOTE_CACHE_WRITE"),
        *("TORCHINDUCTOR_REDIS_HOST", "TORCHINDUCTOR_REDIS_PORT", "TORCHINDUCTOR_REDIS_URL"),
        *("TORCHINDUCTOR_AUTOTUNE_NUM_CHOICES_DISPLAYED", "TORCHINDUCTOR_MAX_AUTOTUNE_REPORT_CHOICES_STATS"),
        *("TORCHINDUCTOR_CONV_LOGGING_FILE", "TORCHINDUCTOR_MM_LOGGING_FILE", "TORCHINDUCTOR_ENABLED_METRIC_TABLES"),
        *("TORCHINDUCTOR_DEBUG_FUSION", "TORCHINDUCTOR_PATTERN_MATCH_DEBUG", "TORCHINDUCTOR_WARN_MIX_LAYOUT"),
        "TORCHINDUCTOR_WRITE_MISSING_OPS",
        *("TORCHDYNAMO_VERBOSE", "TORCHDYNAMO_PRINT_MISSING", "TORCHDYNAMO_EXTENDED_ADVICE"),
        *("TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES", "TORCH_SHOW_DISPATCH_TRACE", "TORCH_HOME"),
        *("TORCH_EXTENSIONS_DIR", "TORCH_CUDA_ARCH_LIST", "TORCH_COMPILE_CPROFILE", "TORCH_COMPILE_DYNAMO_PROFILER"),
        *("TORCH_COMPILE_JOB_ID", "TORCH_COMPILE_REPLAY_RECORD", "TORCH_COMPILE_GRAPH_FORMAT"),
        *("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "TORCH_WARM_POOL", "TORCH_CUDAGRAPH_GC"),
        *("TRITON_CACHE_DIR", "TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR", "TRITON_HOME", "TRITON_CACHE_MANAGER"),
        *("TRITON_PRINT_AUTOTUNING", "TRITON_KERNEL_DUMP", "TRITON_ALWAYS_COMPILE"),
    }
)
_HARMLESS_PREFIXES = (
    *("TORCHDYNAMO_EXTENDED_DEBUG_", "TORCH_LOGS", "TORCH_TRACE", "TORCH_COMPILE_DEBUG", "TORCH_FAKE_TENSOR_"),
    *("TORCH_NCCL_", "TORCH_DISTRIBUTED_", "TORCH_GLOO_", "TORCH_FR_", "TORCH_UCC_", "TORCH_ELASTIC_"),
    "TRITON_REMOTE_CACHE_",
)


def environment(source: Mapping[str, str] | None = None) -> Environment:
    """Return what the environment says now.

    Args:
        source: Where to read; None means this process's environment.

    Raises:
        ConfigError: A rank is no whole number, a bool is none, or CGTOOL_TRUSTED_KEYS are no paths.
    """
    values = os.environ if source is None else source
    return Environment(
        cache_dir=values.get("CGTOOL_CACHE_DIR") or None,
        disable_cache=bool(_field(values, "disable_cache", otherwise=False)),
        variables={name: values[name] for name in sorted(values) if name.startswith("CGTOOL_")},
        cxx=values.get("CXX"),
        code_variables={
            name: values[name]
            for name in sorted(values)
            if name.startswith(_CODE_PREFIXES) and name not in _HARMLESS and not name.startswith(_HARMLESS_PREFIXES)
        },
        rank=_rank(values, "RANK", _rank(values, "LOCAL_RANK", 0)),
        shell=values.get("SHELL") or None,
        trusted_keys=_field(values, "trusted_keys", otherwise=()),
        allow_shared_cache=bool(_field(values, "allow_shared_cache", otherwise=False)),
    )


def variables_now(names: Iterable[str]) -> dict[str, str | None]:
    """Return {variable: its value in this process}, None where it is unset."""
    values = {name: os.environ.get(name) for name in names}
    # Bytes that are no UTF-8 come as halves of characters, for which a file of UTF-8 has no place.
    return {
        name: None if value is None else value.encode("utf-8", "xmlcharrefreplace").decode("utf-8")
        for name, value in values.items()
    }


def child_variables(changes: Mapping[str, str], *, without: str = "") -> dict[str, str]:
    """Return the environment of a process that is started from this one.

    Args:
        changes: Variables that it has anew or otherwise.
        without: Variables whose names begin so are left out first; empty leaves none out.
    """
    kept = {name: value for name, value in os.environ.items() if not (without and name.startswith(without))}
    return {**kept, **changes}


def _field(values: Mapping[str, str], field: str, *, otherwise: Any) -> Any:
    """Return the field of a configuration that a variable gives, as every process reads it, with or without one."""
    variable = f"CGTOOL_{field.upper()}"
    text = values.get(variable)
    if text is not None and field == "trusted_keys" and not text.strip(" \t,"):
        message = f"The variable {variable} is set and names no key. Name files or folders of keys, or unset it."
        raise ConfigError(message, path=variable, expected="paths of public keys", actual=text)
    if not text:
        return otherwise
    from cgtool.config_fields import parse_field  # only for who sets the variable

    try:
        return parse_field(field, text)
    except ConfigError as error:
        message = f"The variable {variable} is {text!r}: {error.expected}."
        raise ConfigError(message, path=variable, expected=error.expected, actual=text) from error


def _rank(values: Mapping[str, str], name: str, default: int) -> int:
    text = values.get(name, "").strip()
    if not text:
        return default
    if not re.fullmatch(r"[0-9]{1,9}", text):
        message = f"The variable {name} is {text!r}: it is the number of a process, 0 or more. Unset it or correct it."
        raise ConfigError(message, path=name, expected="a whole number, 0 or more", actual=text)
    return int(text)
