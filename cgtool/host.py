"""What this process runs in and does: its environment, the machine, this Python, counters. No torch.

The only reader of `os.environ`. A start from the cache imports this and not `cgtool.config`, which knows what the
fields of a configuration may hold. The C++ compiler is asked for its version once per process, and again only when its
file changed.
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
    """What cgtool reads from the environment of this process."""

    cache_dir: str | None
    disable_cache: bool
    #: Every CGTOOL_ variable by its full name, unread and unchecked.
    variables: Mapping[str, str]
    #: The C++ compiler that Inductor is told to use.
    cxx: str | None
    #: RANK, else LOCAL_RANK, else 0: this process's place in its model-parallel group.
    rank: int
    #: The user's own.
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

    Raises:
        ConfigError: A variable that holds a rank, a bool or paths of keys holds something else.
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
    """Return whether a file is one of torch's: Inductor names torch's ptxas to Triton where it first compiles."""
    torch = importlib.util.find_spec("torch")
    return torch is not None and torch.origin is not None and Path(torch.origin).parent in Path(file).parents


def variables_now(names: Iterable[str]) -> dict[str, str | None]:
    """Return {variable: its value in this process}, None where it is unset."""
    values = {name: os.environ.get(name) for name in names}
    # Bytes that are no UTF-8 come as halves of characters, for which a file of UTF-8 has no place.
    return {
        name: None if value is None else value.encode("utf-8", "xmlcharrefreplace").decode("utf-8")
        for name, value in values.items()
    }


def child_variables(changes: Mapping[str, str], *, without: str = "") -> dict[str, str]:
    """Return the environment for a child process: ours with changes, less the names that begin with `without`."""
    kept = {name: value for name, value in os.environ.items() if not (without and name.startswith(without))}
    return {**kept, **changes}


def _field(values: Mapping[str, str], field: str, *, otherwise: Any) -> Any:
    """Return a configuration field from its variable, which holds for a process with or without a configuration."""
    variable = f"CGTOOL_{field.upper()}"
    text = values.get(variable)
    if text is not None and field == "trusted_keys" and not text.strip(" \t,"):
        message = f"The variable {variable} is set and names no key. Name files or folders of keys, or unset it."
        raise ConfigError(message, path=variable, expected="paths of public keys", actual=text)
    if not text:
        return otherwise
    from cgtool.config import parse_field  # only for who sets the variable

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


#: What of cgtool decides which graph, guards and plan a model gives, and what a plan means as it is loaded.
_DECIDING = ("graph", "guards", "plan", "runtime", "split", "trace")
#: Where installers put packages, whose files then stay as their version has them.
_INSTALLED = frozenset({"site-packages", "dist-packages"})

#: What Inductor takes on Linux where CXX says nothing.
_COMPILER = "g++"
_COMPILER_SECS = 20.0
#: How flags of /proc/cpuinfo that name instructions begin; the others speak of power, mitigations and virtual machines.
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
    """Return the version of Triton, by whichever name it was installed, or None where it is not."""
    if importlib.util.find_spec("triton") is None:  # the module of all its packages, quicker to look for than they are
        return None
    from importlib import metadata  # a hundredth of a second, and seldom wanted

    for name in ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm", "pytorch-triton-xpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def cgtool_build() -> dict[str, str | None]:
    """Return cgtool's version and, where it runs from a checkout, the digest of the code that decides what is built."""
    return {"version": __version__, "source": _own_source()}


@lru_cache(maxsize=1)
def _own_source() -> str | None:
    package = Path(__file__).parent
    if package.parent.name in _INSTALLED:
        return None
    digest = hashlib.sha256()
    for folder in _DECIDING:
        with os.scandir(package / folder) as found:
            paths = sorted(entry.path for entry in found if entry.name.endswith(".py"))
        for path in paths:
            with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - a fifth of the time of Path's
                data = file.readall()
            digest.update(f"{folder}/{os.path.basename(path)} {len(data)}\n".encode())  # noqa: PTH119 - a str
            digest.update(data)
    return digest.hexdigest()


def cpu_flags() -> list[str]:
    """Return the instruction sets of the first CPU, sorted; [] where the system does not say."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
            named = (line.partition(":") for line in lines)
            flags = next((flags for name, _, flags in named if name.strip() in ("flags", "Features")), "")
    except OSError:
        return []
    return sorted(flag for flag in flags.split() if flag.startswith(_INSTRUCTIONS))


#: Path, modification time and size of a compiler.
_Compiler = tuple[str, int, int]


def ask_compiler() -> None:
    """Ask the C++ compiler for its version without waiting for the answer, which `compiler_version` returns."""
    compiler = _compiler()
    if compiler is not None:
        _question(compiler)


def compiler_version() -> str | None:
    """Return the version that torch's C++ compiler reports of itself; None where there is no working one."""
    compiler = _compiler()
    return None if compiler is None else _question(compiler).answer()


class _Question:
    """A compiler that is asked for its version; several threads may wait for the answer."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._lock = ForkedLock()
        self._process = _start(program)
        self._asked_by = os.getpid()
        self._is_answered = False
        self._answer: str | None = None

    def answer(self) -> str | None:
        """Wait for the answer and return it."""
        with self._lock:
            if not self._is_answered:
                process, self._process = self._process, None
                # Asked again where a wait was interrupted, and in a fork: that answer is its parent's to read.
                if process is None or self._asked_by != os.getpid():
                    process = _start(self._program)
                self._answer = None if process is None else _said_by(process)
                self._is_answered = True
            return self._answer


_questions: dict[_Compiler, _Question] = {}
_lock = ForkedLock()


def _question(compiler: _Compiler) -> _Question:
    with _lock:
        if compiler not in _questions:
            _questions[compiler] = _Question(compiler[0])
        return _questions[compiler]


def _compiler() -> _Compiler | None:
    program, *_ = (environment().cxx or "").split() or [_COMPILER]
    found = shutil.which(program)
    if found is None:
        return None
    try:
        stat = os.stat(found)  # noqa: PTH116 - a path costs more than the look
    except OSError:
        return None
    return found, stat.st_mtime_ns, stat.st_size


def _start(program: str) -> subprocess.Popen[str] | None:
    import subprocess  # kept out of the command line's start

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


def _said_by(process: subprocess.Popen[str]) -> str | None:
    import subprocess

    with process:
        try:
            answer, _ = process.communicate(timeout=_COMPILER_SECS)
        except subprocess.TimeoutExpired:
            process.kill()
            return None
    lines = answer.strip().splitlines()
    if process.returncode != 0 or not lines:
        return None  # what cannot say its version compiles nothing
    # GCC begins with the name that it was called by: c++, g++ and x86_64-linux-gnu-g++ are one compiler
    name, _, said = lines[0].partition(" ")
    return said if said.startswith("(") and name else lines[0]


def opening(make: Callable[..., int], *arguments: Any) -> Iterable[int]:
    """Return an iterable of one descriptor, which is opened as the iterable is unpacked or extends a list.

    Opening and keeping are then one step of Python, between whose halves no Ctrl-C can lose the descriptor. `make` must
    not be written in Python: `os.open`, `os.memfd_create`.
    """
    return map(make, *[(argument,) for argument in arguments])


def closing(descriptors: list[int]) -> None:
    """Close descriptors and empty the list, within one step of Python: Ctrl-C leaves none open, nor one to close twice.

    Raises:
        OSError: One could not be closed.
    """
    deque(map(os.close, map(list.pop, [descriptors] * len(descriptors))), maxlen=0)


_Item = TypeVar("_Item")


def on_two_threads(work: Callable[[Sequence[_Item]], None], items: Sequence[_Item]) -> None:
    """Do `work`, which must not raise, on both halves of `items` at once: reading and hashing release Python's lock."""
    half = len(items) // 2
    other = threading.Thread(target=work, args=(items[:half],))
    try:
        if half:
            other.start()
    except RuntimeError:  # this user may have no more threads
        half = 0
    work(items[half:])
    if half:
        other.join()


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Put off collections while the block runs.

    After `import torch` a full collection visits some 170,000 objects, which takes longer than everything else in a
    start, and the objects made during a start trigger one. Nothing is lost: the next collection finds what became
    garbage. Objects made meanwhile count as old afterwards, so that only a full collection visits all of them.
    """
    if not gc.isenabled():
        yield
        return
    try:
        gc.disable()
        yield
    finally:
        if not gc.get_freeze_count():  # else somebody froze what must stay so
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        gc.enable()


Happening = Literal["traces", "compiles", "opens", "captures", "replays", "eager_calls"]

_counts = {"traces": 0, "compiles": 0, "opens": 0, "captures": 0, "replays": 0, "eager_calls": 0}
_counting = ForkedLock()


def count(what: Happening) -> None:
    """Note that something happened once."""
    with _counting:
        _counts[what] += 1


def counters() -> dict[str, int]:
    """Return how often each thing happened in this process.

    Traces, compiles, opens of artifacts, captures and replays of CUDA graphs, and calls that no compiled variant served
    and that ran eagerly, as was asked for.
    """
    with _counting:
        return dict(_counts)


@contextlib.contextmanager
def silenced(*names: str) -> Iterator[None]:
    """Keep loggers quiet that repeat, at length, an error that is raised anyway."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
