"""The proof that entries open where nothing can be compiled: a child process and its poisoned surroundings.

Importable without torch; the child's program (`cgtool.toolkit.verify.child`) imports it. The child has a PATH with
nothing on it but tools that fail and leave their names, no compiler in CXX, and empty folders for the caches of torch
and triton. It says what it opens before it opens it: where it dies, that is what it died of, and another child goes on
with the rest.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import field

from cgtool.host import child_variables
from cgtool.plan.grammar import Count, Record
from cgtool.processes import Child, ChildEndedError, Ending
from cgtool.store.layout import RankName

#: What compiles, or is asked by what compiles.
_TOOLS = (
    *("g++", "gcc", "c++", "cc", "cpp", "clang", "clang++", "icx", "icpx", "ld", "as", "ptxas", "nvcc", "hipcc"),
    *("cuobjdump", "nvdisasm", "make", "ninja", "cmake"),
)
_NO_COMPILER = "/nonexistent/c++"


class ModelChoice(Record, frozen=True, kw_only=True):
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
    factory_args: dict[str, Any] = field(default_factory=dict)
    device: str | None = None
    dtype: str | None = None
    pythonpath: tuple[str, ...] = ()
    prefix: str | None = None


class LoadRequest(Record, frozen=True, kw_only=True):
    """What a child is to open and to call.

    Args:
        root: The cache's root.
        names: What to open; with a model and none, the entry that serves it.
        model: The model to load and call.
        rank: The rank to load the model as; None takes the environment's word.
    """

    root: str
    names: tuple[RankName, ...]
    model: ModelChoice | None
    rank: int | None


class Opening(Record, frozen=True, kw_only=True, tag="opening"):
    """The child is about to open an artifact."""

    name: RankName
    file: str


class Problem(Record, frozen=True, kw_only=True):
    """A file that could not be opened, or "" for the whole entry, and why."""

    file: str
    sentence: str


class Opened(Record, frozen=True, kw_only=True, tag="opened"):
    """What came of opening one rank and prefix.

    Args:
        name: The entry's hash, rank and prefix.
        opened: How many artifacts could be opened.
        problems: Those that could not be.
    """

    name: RankName
    opened: Count
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether all of them could be."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Return the answer as `verify --json` prints it."""
        return {
            "hash": self.name.hash,
            "rank": self.name.rank,
            "prefix": self.name.prefix,
            "opened": self.opened,
            "problems": [{"path": one.file, "kind": "load", "sentence": one.sentence} for one in self.problems],
        }


class Called(Record, frozen=True, kw_only=True, tag="called"):
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
        """Return the answer as `verify --json` prints it."""
        return {
            "hash": None if self.name is None else self.name.hash,
            "called": self.called,
            "sentence": self.sentence,
        }


class Done(Record, frozen=True, kw_only=True):
    """The child has said all."""


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
    with _nothing_that_compiles() as (variables, tried):
        found = _Progress(names=list(names), model=model)
        while found.is_left:
            before = len(found.names), found.called
            _run_child(
                found, LoadRequest(root=str(root), names=tuple(found.names), model=found.model, rank=rank), variables
            )
            if (len(found.names), found.called) == before:  # a child that says nothing would be started for ever
                break
        return LoadProof(opened=tuple(found.opened), model=found.called, compiled=_lines(tried))


@dataclass(kw_only=True)
class _Progress:
    """What is left to open and to call, and what came of the rest."""

    names: list[RankName]
    model: ModelChoice | None
    opened: list[Opened] = dataclasses.field(default_factory=list)
    called: Called | None = None
    opening: Opening | None = None

    @property
    def is_left(self) -> bool:
        return bool(self.names) or (self.model is not None and self.called is None)

    def take(self, note: Opening | Opened | Called) -> None:
        if isinstance(note, Opening):
            self.opening = note
        elif isinstance(note, Opened):
            self.opened.append(note)
            self.names = [name for name in self.names if name != note.name]
            self.opening = None
        else:
            self.called = note

    def take_ending(self, ending: Ending) -> None:
        """Note what a child died at: that is done."""
        words = f" It said: {ending.last_words}" if ending.last_words else ""
        if self.opening is not None and self.opening.name in self.names:
            sentence = f"The process that opened {self.opening.file} {ending.how}. Warm the model again here.{words}"
            problem = Problem(file=self.opening.file, sentence=sentence)
            self.take(Opened(name=self.opening.name, opened=0, problems=(problem,)))
        elif self.model is not None and self.called is None:
            sentence = f"The process that loaded and called {self.model.model} {ending.how}.{words}"
            self.called = Called(name=None, called=False, sentence=sentence)
        elif self.names:
            problem = Problem(file="", sentence=f"The process that was to open it {ending.how} as it started.{words}")
            self.take(Opened(name=self.names[0], opened=0, problems=(problem,)))


def _run_child(found: _Progress, request: LoadRequest, variables: dict[str, str]) -> None:
    found.opening = None
    child = Child("cgtool.toolkit.verify.child:main", variables=variables)
    try:
        child.ask(request, answer=Done, note=Opening | Opened | Called, on_note=found.take, timeout_secs=None)
    except ChildEndedError as error:
        found.take_ending(error.ending)
    finally:
        child.close()


@contextmanager
def _nothing_that_compiles() -> Iterator[tuple[dict[str, str], Path]]:
    """Yield the environment of a process that finds nothing that compiles, and the file of what it tried."""
    folder = Path(tempfile.mkdtemp(prefix="cgtool-verify-"))
    try:
        tools, tried = folder / "tools", folder / "tried"
        tools.mkdir()
        for tool in _TOOLS:
            path = tools / tool
            path.write_text(f'#!/bin/sh\necho "{tool} $*" >> "{tried}"\nexit 1\n', encoding="utf-8")
            path.chmod(0o755)
        for name in ("inductor", "triton", "tmp"):
            (folder / name).mkdir()
        changes = {
            "PATH": str(tools),
            "CXX": _NO_COMPILER,
            "CC": _NO_COMPILER,
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "TMPDIR": str(folder / "tmp"),
            "CGTOOL_DISABLE_CACHE": "",
        }
        yield child_variables(changes), tried
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _lines(file: Path) -> tuple[str, ...]:
    """Return the lines of a file, each once; none where there is no file."""
    if not file.exists():
        return ()
    return tuple(sorted(set(file.read_text(encoding="utf-8", errors="replace").splitlines())))
