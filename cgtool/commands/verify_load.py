"""The proof that entries open where nothing can be compiled: a child process, its poisoned surroundings, its answers.

Importable without torch; the child (`cgtool.commands.verify_child`) imports it. The child has a PATH with nothing on it
but tools that fail and leave their names, no compiler in CXX, and empty folders for the caches of torch and triton. It
is told what to open as one line of JSON on its standard input, and answers on a descriptor of its own, a line each::

    {"at": [hash, rank, prefix], "file": artifact}         it is about to open this
    {"done": [hash, rank, prefix], "opened": int, "problems": [[file, sentence]...]}
    {"model": [hash, rank, prefix] | null, "called": bool, "sentence": str}

Whatever else it writes, a model's own words too, goes into a file, whose last lines tell what it died of.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cgtool.cache.layout import RankName
from cgtool.variables import child_variables

#: What compiles, or is asked by what compiles.
_TOOLS = (
    *("g++", "gcc", "c++", "cc", "cpp", "clang", "clang++", "icx", "icpx", "ld", "as", "ptxas", "nvcc", "hipcc"),
    *("cuobjdump", "nvdisasm", "make", "ninja", "cmake"),
)
_NO_COMPILER = "/nonexistent/c++"
_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from cgtool.commands.verify_child import main; main(int(sys.argv[2]))"
)
_LAST_LINES, _LAST_BYTES = 3, 1 << 14


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """A model to load and call once, as `warm` takes it.

    Args:
        model: MODEL: "path/to/file.py:factory", "package.module:factory", "hf:PATH".
        factory_args: Keyword arguments for the factory.
        device: Where the module is built; None leaves it to the factory.
        dtype: Its default floating dtype; None leaves it to the factory.
        pythonpath: Folders put on `sys.path` first.
        prefix: Which compiled part of the model; None takes the factory's word.
    """

    model: str
    factory_args: Mapping[str, Any] = field(default_factory=dict)
    device: str | None = None
    dtype: str | None = None
    pythonpath: tuple[str, ...] = ()
    prefix: str | None = None


@dataclass(frozen=True, kw_only=True)
class Opened:
    """What came of opening one rank and prefix.

    Args:
        name: The entry's hash, rank and prefix.
        opened: How many artifacts could be opened.
        problems: (file, sentence) of those that could not be.
    """

    name: RankName
    opened: int
    problems: tuple[tuple[str, str], ...]

    @property
    def ok(self) -> bool:
        """Whether all of them could be."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Return the answer as JSON."""
        return {
            "hash": self.name.hash,
            "rank": self.name.rank,
            "prefix": self.name.prefix,
            "opened": self.opened,
            "problems": [{"path": path, "kind": "load", "sentence": sentence} for path, sentence in self.problems],
        }


@dataclass(frozen=True, kw_only=True)
class Called:
    """What came of loading the model and calling it once.

    Args:
        name: The entry that served it; None where none did.
        called: Whether it gave an output.
        sentence: Why not; "" where it did.
    """

    name: RankName | None
    called: bool
    sentence: str

    def to_json(self) -> dict[str, Any]:
        """Return the answer as JSON."""
        return {
            "hash": None if self.name is None else self.name.hash,
            "called": self.called,
            "sentence": self.sentence,
        }


@dataclass(frozen=True, kw_only=True)
class LoadProof:
    """What the child could open where nothing can be compiled.

    Args:
        opened: What came of each rank and prefix.
        model: What came of the model; None where none was named.
        compiled: Commands of compilers that were tried.
    """

    opened: tuple[Opened, ...]
    model: Called | None
    compiled: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether everything opened, the model ran, and nothing tried to compile."""
        model = self.model is None or self.model.called
        return model and not self.compiled and all(opened.ok for opened in self.opened)

    def to_json(self) -> dict[str, Any]:
        """Return the proof as `verify --json` prints it."""
        return {
            "entries": [opened.to_json() for opened in self.opened],
            "model": None if self.model is None else self.model.to_json(),
            "compiled": list(self.compiled),
        }


def prove_load(
    root: Path, names: Sequence[RankName], *, model: ModelChoice | None = None, rank: int | None = None
) -> LoadProof:
    """Open every artifact of some entries, and call a model once, in a process that can compile nothing.

    Args:
        root: The cache's root.
        names: What to open; with a model and none, the entry that serves it.
        model: The model to load and call.
        rank: The rank to load the model as; None takes the environment's word.
    """
    with _bare() as place:
        return _Proof(root, list(names), model, rank, place).run()


class _Proof:
    def __init__(
        self, root: Path, names: list[RankName], model: ModelChoice | None, rank: int | None, place: _Place
    ) -> None:
        self._root = root
        self._left = names
        self._model = model
        self._rank = rank
        self._place = place
        self._opened: list[Opened] = []
        self._called: Called | None = None
        self._at: RankName | None = None
        self._file = ""

    def run(self) -> LoadProof:
        while self._is_left:
            before = len(self._left), self._called
            self._once()
            if (len(self._left), self._called) == before:  # a child that says nothing would be started for ever
                break
        return LoadProof(opened=tuple(self._opened), model=self._called, compiled=self._place.tried())

    @property
    def _is_left(self) -> bool:
        return bool(self._left) or (self._model is not None and self._called is None)

    def _once(self) -> None:
        """Start a child for what is left; where it dies, the one at which it died is done."""
        self._take({"at": None, "file": ""})
        code, last = self._place.start(self._request(), self._take)
        if code == 0:
            return
        how = f"by {_signal_name(-code)}" if code < 0 else f"with exit code {code}"
        words = f" Its last words: {' / '.join(last)}" if last else ""
        if self._at is not None and self._at in self._left:
            sentence = (
                f"The process that opened {self._file or 'it'} was ended {how}. Warm the model again here.{words}"
            )
            self._end(Opened(name=self._at, opened=0, problems=((self._file, sentence),)))
        elif self._model is not None and self._called is None:
            sentence = f"The process that loaded and called {self._model.model} was ended {how}.{words}"
            self._called = Called(name=None, called=False, sentence=sentence)
        elif self._left:
            sentence = f"The process that was to open it was ended {how} as it started.{words}"
            self._end(Opened(name=self._left[0], opened=0, problems=(("", sentence),)))

    def _request(self) -> dict[str, Any]:
        model = self._model if self._called is None else None
        return {
            "root": str(self._root),
            "names": [[name.hash, name.rank, name.prefix] for name in self._left],
            "model": None if model is None else {**vars(model), "pythonpath": list(model.pythonpath)},
            "rank": self._rank,
        }

    def _take(self, line: dict[str, Any]) -> None:
        if "at" in line:
            self._at, self._file = None if line["at"] is None else _name(line["at"]), line["file"]
        elif "done" in line:
            problems = tuple((file, sentence) for file, sentence in line["problems"])
            self._end(Opened(name=_name(line["done"]), opened=line["opened"], problems=problems))
            self._at = None
        else:
            name = None if line["model"] is None else _name(line["model"])
            self._called = Called(name=name, called=line["called"], sentence=line["sentence"])

    def _end(self, opened: Opened) -> None:
        self._opened.append(opened)
        self._left = [name for name in self._left if name != opened.name]


class _Place:
    """A folder in which a child finds nothing that compiles.

    Args:
        folder: It, empty.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "tried"
        tools = folder / "tools"
        tools.mkdir()
        for tool in _TOOLS:
            path = tools / tool
            path.write_text(f'#!/bin/sh\necho "{tool} $*" >> "{self._log}"\nexit 1\n', encoding="utf-8")
            path.chmod(0o755)
        for name in ("inductor", "triton", "tmp"):
            (folder / name).mkdir()
        self._variables = child_variables(
            {
                "PATH": str(tools),
                "CXX": _NO_COMPILER,
                "CC": _NO_COMPILER,
                "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
                "TRITON_CACHE_DIR": str(folder / "triton"),
                "TMPDIR": str(folder / "tmp"),
                "CGTOOL_DISABLE_CACHE": "",
            }
        )

    def tried(self) -> tuple[str, ...]:
        """Return the commands of compilers that children tried, each once."""
        if not self._log.exists():
            return ()
        return tuple(sorted(set(self._log.read_text(encoding="utf-8", errors="replace").splitlines())))

    def start(self, request: dict[str, Any], take: Any) -> tuple[int, tuple[str, ...]]:
        """Run a child to its end.

        Args:
            request: What it is told.
            take: Given each line of its answer.

        Returns:
            Its exit code, negative for a signal, and the last lines that it wrote.
        """
        words = self._folder / "words"
        answers, theirs = os.pipe()
        with words.open("wb") as out, os.fdopen(answers, encoding="utf-8", errors="replace") as lines:
            try:
                process = subprocess.Popen(  # noqa: S603 - this very Python
                    [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path), str(theirs)],
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=out,
                    pass_fds=(theirs,),
                    env=self._variables,
                )
            finally:
                os.close(theirs)
            try:
                self._talk(process, request, lines, take)
            except BaseException:
                process.kill()
                raise
            finally:
                code = process.wait()
        with words.open("rb") as said:
            said.seek(max(0, words.stat().st_size - _LAST_BYTES))
            last = said.read().decode("utf-8", errors="replace").splitlines()
        return code, tuple(line for line in last if line.strip())[-_LAST_LINES:]

    def _talk(self, process: subprocess.Popen[bytes], request: dict[str, Any], lines: Any, take: Any) -> None:
        if process.stdin is not None:
            try:
                with process.stdin:
                    process.stdin.write(json.dumps(request).encode())
            except BrokenPipeError:  # it is gone already: its exit code says so
                return
        for line in lines:
            if line.endswith("\n"):
                take(json.loads(line))


@contextmanager
def _bare() -> Iterator[_Place]:
    folder = Path(tempfile.mkdtemp(prefix="cgtool-verify-"))
    try:
        yield _Place(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _name(parts: Sequence[Any]) -> RankName:
    return RankName(hash=parts[0], rank=parts[1], prefix=parts[2])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
