"""The environment of this process: variables, machine, Python, C++ compiler, counters. Must not import torch.

The only reader of `os.environ`. A start from the cache imports this module and not `cgtool.config`.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from cgtool import __version__
from cgtool.errors import ConfigError
from cgtool.threads import ForkedLock

if TYPE_CHECKING:
    import subprocess


class Environment(NamedTuple):
    """The environment variables that cgtool reads."""

    cache_dir: str | None
    disable_cache: bool
    #: Every CGTOOL_ variable by its full name, unparsed.
    variables: Mapping[str, str]
    #: The C++ compiler for Inductor.
    cxx: str | None
    #: RANK, else LOCAL_RANK, else 0: the rank in the model-parallel group.
    rank: int
    #: The user's login shell.
    shell: str | None
    trusted_keys: tuple[str, ...]
    allow_shared_cache: bool


#: A variable with one of these prefixes is assumed to change code, unless it is known to be harmless.
_CODE_PREFIXES = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_", "TRITON_", "AOT_INDUCTOR_", "ATEN_", "CUTLASS_")

#: Variables that do not change code: paths, logs, caches, jobs, timeouts, communication. Taken from torch 2.11 to 2.13.
#: Names and prefixes instead of one pattern, whose compilation would take too long for the import.
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
    """Read the environment as it is now.

    Raises:
        ConfigError: A variable for a rank, a bool or paths of keys has an invalid value.
    """
    values = os.environ if source is None else source
    return Environment(
        cache_dir=values.get("CGTOOL_CACHE_DIR") or None,
        disable_cache=bool(_field(values, "disable_cache", otherwise=False)),
        variables={name: values[name] for name in sorted(values) if name.startswith("CGTOOL_")},
        cxx=values.get("CXX"),
        rank=_rank(values, "RANK", _rank(values, "LOCAL_RANK", 0)),
        shell=values.get("SHELL") or None,
        trusted_keys=_field(values, "trusted_keys", otherwise=()),
        allow_shared_cache=bool(_field(values, "allow_shared_cache", otherwise=False)),
    )


def launched() -> bool:
    """Return whether a launcher such as torchrun started this process as one of several ranks."""
    size = os.environ.get("WORLD_SIZE", "")
    return size.isdigit() and int(size) > 1 and {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def code_variables(source: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of torch, Inductor, Dynamo and Triton that may change code, by name."""
    values = os.environ if source is None else source
    return {
        name: values[name]
        for name in sorted(values)
        if name.startswith(_CODE_PREFIXES) and name not in _HARMLESS and not name.startswith(_HARMLESS_PREFIXES)
        if name != "TRITON_PTXAS_PATH" or not _comes_with_torch(values[name])
    }


def _comes_with_torch(file: str) -> bool:
    """Return whether torch contains a file: Inductor sets TRITON_PTXAS_PATH to torch's ptxas when it first compiles."""
    torch = importlib.util.find_spec("torch")
    return torch is not None and torch.origin is not None and Path(torch.origin).parent in Path(file).parents


def variables_now(names: Iterable[str]) -> dict[str, str | None]:
    """Return the values of variables in this process; None if unset."""
    values = {name: os.environ.get(name) for name in names}
    # bytes that are not UTF-8 are surrogates here, which cannot be encoded as UTF-8
    return {
        name: None if value is None else value.encode("utf-8", "xmlcharrefreplace").decode("utf-8")
        for name, value in values.items()
    }


def child_variables(changes: Mapping[str, str], *, without: str = "") -> dict[str, str]:
    """Return this environment with `changes`, without the names that begin with `without`, for a child process."""
    kept = {name: value for name, value in os.environ.items() if not (without and name.startswith(without))}
    return {**kept, **changes}


def _field(values: Mapping[str, str], field: str, *, otherwise: Any) -> Any:
    """Return a configuration field that its variable sets for the whole process, with or without a configuration."""
    variable = f"CGTOOL_{field.upper()}"
    text = values.get(variable)
    if text is not None and field == "trusted_keys" and not text.strip(" \t,"):
        message = f"The variable {variable} is set but empty. Set it to files or folders of keys, or unset it."
        raise ConfigError(message, path=variable, expected="paths of public keys", actual=text)
    if not text:
        return otherwise
    from cgtool.config import parse_field  # imported lazily: the variables are rarely set

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
        message = f"The variable {name} is {text!r}: it must be a rank, 0 or more. Correct it or unset it."
        raise ConfigError(message, path=name, expected="a whole number, 0 or more", actual=text)
    return int(text)


#: The folders of cgtool whose code determines a model's graph, guards and plan, and the meaning of a plan.
_DECIDING = ("graph", "guards", "plan", "runtime", "split", "trace")
#: Folders of installed packages, whose files the version identifies.
_INSTALLED = frozenset({"site-packages", "dist-packages"})

#: Inductor's default compiler on Linux.
_COMPILER = "g++"
_COMPILER_SECS = 20.0
#: Prefixes of the flags in /proc/cpuinfo that are instruction sets; others are about power, mitigations and VMs.
_INSTRUCTIONS = (
    *("sse", "ssse", "avx", "amx", "fma", "bmi", "f16c", "popcnt", "abm", "lzcnt", "aes", "vaes", "sha", "gfni"),
    *("pclmulqdq", "vpclmulqdq", "movbe", "adx", "rdrnd", "rdseed", "cx16", "xsave", "movdiri", "movdir64b", "clwb"),
    *("clflushopt", "serialize", "asimd", "sve", "sme", "neon", "fp16", "fphp", "bf16", "i8mm", "atomics", "dotprod"),
    *("crc32", "fcma", "jscvt", "lrcpc", "vsx", "altivec"),
)


def python_name() -> str:
    """Return implementation and version of this Python, without the patch level: "cpython 3.12"."""
    return f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}"


@lru_cache(maxsize=1)
def triton_version() -> str | None:
    """Return the version of Triton, under any of its distribution names; None if it is not installed."""
    if importlib.util.find_spec("triton") is None:  # the module of every distribution, and quicker to find
        return None
    from importlib import metadata  # takes 10 ms, and is rarely needed

    for name in ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm", "pytorch-triton-xpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def cgtool_build() -> dict[str, str | None]:
    """Return cgtool's version and, in a checkout, the digest of the code that determines what is compiled."""
    return {"version": __version__, "source": _source_digest()}


@lru_cache(maxsize=1)
def _source_digest() -> str | None:
    package = Path(__file__).parent
    if package.parent.name in _INSTALLED:
        return None
    digest = hashlib.sha256()
    for folder in _DECIDING:
        with os.scandir(package / folder) as entries:
            paths = sorted(entry.path for entry in entries if entry.name.endswith(".py"))
        for path in paths:
            with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - five times as fast as Path
                data = file.readall()
            digest.update(f"{folder}/{os.path.basename(path)} {len(data)}\n".encode())  # noqa: PTH119 - a str
            digest.update(data)
    return digest.hexdigest()


def cpu_flags() -> list[str]:
    """Return the instruction sets of the first CPU, sorted; [] if the system does not report them."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
            fields = (line.partition(":") for line in lines)
            flags = next((flags for name, _, flags in fields if name.strip() in ("flags", "Features")), "")
    except OSError:
        return []
    return sorted(flag for flag in flags.split() if flag.startswith(_INSTRUCTIONS))


#: Path, modification time and size of a compiler.
_Compiler = tuple[str, int, int]


def prefetch_compiler_version() -> None:
    """Start the C++ compiler to query its version, without waiting for `compiler_version`."""
    compiler = _compiler()
    if compiler is not None:
        _query(compiler)


def compiler_version() -> str | None:
    """Return the version of torch's C++ compiler; None if there is no working one.

    The compiler runs once per process, and again if its file changes.
    """
    compiler = _compiler()
    return None if compiler is None else _query(compiler).result()


class _VersionQuery:
    """A run of a compiler that reports its version; several threads may wait for the result."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._lock = ForkedLock()
        self._process = _start(program)
        self._started_by = os.getpid()
        self._is_done = False
        self._version: str | None = None

    def result(self) -> str | None:
        """Wait for the version."""
        with self._lock:
            if not self._is_done:
                process, self._process = self._process, None
                # Run it again if a wait was interrupted, or in a fork, where the output is the parent's to read.
                if process is None or self._started_by != os.getpid():
                    process = _start(self._program)
                self._version = None if process is None else _read_version(process)
                self._is_done = True
            return self._version


_queries: dict[_Compiler, _VersionQuery] = {}
_lock = ForkedLock()


def _query(compiler: _Compiler) -> _VersionQuery:
    with _lock:
        if compiler not in _queries:
            _queries[compiler] = _VersionQuery(compiler[0])
        return _queries[compiler]


def _compiler() -> _Compiler | None:
    program, *_ = (environment().cxx or "").split() or [_COMPILER]
    path = shutil.which(program)
    if path is None:
        return None
    try:
        stat = os.stat(path)  # noqa: PTH116 - faster than Path
    except OSError:
        return None
    return path, stat.st_mtime_ns, stat.st_size


def _start(program: str) -> subprocess.Popen[str] | None:
    import subprocess  # imported lazily: slow, and rarely needed by commands

    try:
        return subprocess.Popen(  # noqa: S603 - the compiler that torch itself would run
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
        )
    except OSError:
        return None


def _read_version(process: subprocess.Popen[str]) -> str | None:
    import subprocess

    with process:
        try:
            output, _ = process.communicate(timeout=_COMPILER_SECS)
        except subprocess.TimeoutExpired:
            process.kill()
            return None
    lines = output.strip().splitlines()
    if process.returncode != 0 or not lines:
        return None
    # GCC prints the name it was called by first, but c++, g++ and x86_64-linux-gnu-g++ are one compiler
    name, _, version = lines[0].partition(" ")
    return version if version.startswith("(") and name else lines[0]


def opening(make: Callable[..., int], *arguments: Any) -> Iterable[int]:
    """Return an iterable of one descriptor, which is opened when the iterable is unpacked or extends a list.

    Opening and storing then happen in one bytecode instruction, so that Ctrl-C cannot leak the descriptor. `make` must
    be a C function: `os.open`, `os.memfd_create`.
    """
    return map(make, *[(argument,) for argument in arguments])


def closing(descriptors: list[int]) -> None:
    """Close descriptors and empty the list.

    This happens in one bytecode instruction, so that Ctrl-C neither leaks a descriptor nor leaves a closed one listed.

    Raises:
        OSError: A descriptor could not be closed.
    """
    deque(map(os.close, map(list.pop, [descriptors] * len(descriptors))), maxlen=0)


_Item = TypeVar("_Item")


def on_two_threads(work: Callable[[Sequence[_Item]], None], items: Sequence[_Item]) -> None:
    """Run `work` on the halves of `items` in two threads; it must not raise. Reading and hashing release the GIL."""
    half = len(items) // 2
    other = threading.Thread(target=work, args=(items[:half],))
    try:
        if half:
            other.start()
    except RuntimeError:  # the user's limit of threads is reached
        half = 0
    work(items[half:])
    if half:
        other.join()


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Disable garbage collection while the block runs.

    After `import torch` a full collection visits some 170,000 objects, which takes longer than everything else in a
    start, and the objects made during a start trigger one. Later collections find the garbage. Objects made in the
    block move to the oldest generation, so that only full collections visit them.
    """
    if not gc.isenabled():
        yield
        return
    try:
        gc.disable()
        yield
    finally:
        if not gc.get_freeze_count():  # objects that the program froze must stay frozen
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        gc.enable()


Counter = Literal["traces", "compiles", "opens", "captures", "replays", "eager_calls"]

_counts = {"traces": 0, "compiles": 0, "opens": 0, "captures": 0, "replays": 0, "eager_calls": 0}
_counts_lock = ForkedLock()


def count(counter: Counter) -> None:
    """Increment a counter."""
    with _counts_lock:
        _counts[counter] += 1


def counters() -> dict[str, int]:
    """Return the counters of this process.

    They count traces, compiles, opened artifacts, captures and replays of CUDA graphs, and calls that ran eagerly
    because no compiled variant covered them.
    """
    with _counts_lock:
        return dict(_counts)


@contextlib.contextmanager
def silenced(*names: str) -> Iterator[None]:
    """Disable loggers, which would repeat at length an error that is raised anyway."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
