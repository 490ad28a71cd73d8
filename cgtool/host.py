"""What this machine and this Python are, as far as both worlds ask: those with torch and those without. No torch.

`cgtool.guards.environment` makes factors of it with torch, and `cgtool.store.machine` without. A compiler is asked for
its version once per process, and again only when its file changed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from cgtool import __version__
from cgtool.variables import environment

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
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return sorted(flag for flag in match.group(1).split() if flag.startswith(_INSTRUCTIONS)) if match else []


#: Path, modification time and size of a compiler.
_Compiler = tuple[str, int, int]


def ask_compiler() -> None:
    """Ask the C++ compiler for its version without waiting for the answer, which `compiler_version` returns."""
    compiler = _compiler()
    if compiler is not None:
        _question(compiler)


def compiler_version() -> str | None:
    """Return what the C++ compiler that torch would call says it is, or None where there is none that works."""
    compiler = _compiler()
    return None if compiler is None else _question(compiler).answer()


class _Question:
    """A compiler that is asked for its version; several threads may wait for the answer.

    Args:
        program: The path of the compiler.
    """

    def __init__(self, program: str) -> None:
        self._program = program
        self._lock = threading.Lock()
        self._process = _start(program)
        self._is_answered = False
        self._answer: str | None = None

    def answer(self) -> str | None:
        """Return what it says; waits until it has."""
        with self._lock:
            if not self._is_answered:
                process, self._process = self._process or _start(self._program), None  # anew where that was broken off
                self._answer = None if process is None else _said_by(process)
                self._is_answered = True
            return self._answer


_questions: dict[_Compiler, _Question] = {}
_lock = threading.Lock()


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
    return re.sub(r"^\S+ (?=\()", "", lines[0])
