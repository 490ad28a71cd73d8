"""`verify --load`: the proof that entries open where nothing can be compiled, in a child with poisoned surroundings.

Importable without torch, which the child alone imports (`main`). The child has a PATH with nothing on it but tools that
fail and leave their names, no compiler in CXX, and empty folders for the caches of torch and triton. It opens nothing
that load would not believe, and what was matched to its digest is what it opens. It says what it opens before it opens
it: where it dies, that is what it died of, and another child goes on with the rest.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cgtool.child import Channel
from cgtool.errors import CgtoolError
from cgtool.host import child_variables, environment
from cgtool.plan.grammar import Count, Record
from cgtool.plan.pieces import AOT_INDUCTOR, EAGER
from cgtool.plan.records import parse_plan
from cgtool.processes import ChildEndedError, Children
from cgtool.store.artifacts import code_of
from cgtool.store.entry import Entry
from cgtool.store.layout import PLAN_FILE, CacheLayout, RankName, short
from cgtool.store.trust import TrustPolicy
from cgtool.toolkit.model_choice import ModelChoice

if TYPE_CHECKING:
    from cgtool.model import ModelSpec
    from cgtool.plan.pieces import PieceGraph
    from cgtool.runtime.aoti_package import Packages

#: What compiles, or is asked by what compiles.
_TOOLS = (
    *("g++", "gcc", "c++", "cc", "cpp", "clang", "clang++", "icx", "icpx", "ld", "as", "ptxas", "nvcc", "hipcc"),
    *("cuobjdump", "nvdisasm", "make", "ninja", "cmake"),
)
_NO_COMPILER = "/nonexistent/c++"

_Say = Callable[["Opening"], None]


class LoadSetup(Record, frozen=True, kw_only=True):
    """What every request is about: the cache, the model, if one is to be called, and as which rank."""

    root: str
    model: ModelChoice | None
    rank: int | None


class LoadRequest(Record, frozen=True, kw_only=True):
    """A rank and prefix to open; without one, the model is to be loaded and called, which `among` should serve."""

    name: RankName | None = None
    among: tuple[RankName, ...] = ()


class Opening(Record, frozen=True, kw_only=True):
    """The child is about to open an artifact."""

    file: str


class LoadProblem(Record, frozen=True, kw_only=True, omit_defaults=False):
    """Why an artifact, or with the path "" a whole rank, could not be opened."""

    path: str
    kind: Literal["load"] = "load"
    sentence: str


class Opened(Record, frozen=True, kw_only=True):
    """What came of opening one rank and prefix: how many artifacts could be opened, and which could not."""

    hash: str
    rank: int
    prefix: str
    opened: Count
    problems: tuple[LoadProblem, ...]


class Called(Record, frozen=True, kw_only=True):
    """What came of loading the model and calling it once."""

    #: The entry that served it; None where none did.
    hash: str | None
    #: Whether it gave an output.
    called: bool
    #: Why not; "" where it did.
    sentence: str


class LoadAnswer(Record, frozen=True, kw_only=True):
    """What came of a request; of a model that no entry was named for, what came of opening the one that serves it."""

    opened: Opened | None = None
    called: Called | None = None


class LoadProof(Record, frozen=True, kw_only=True, omit_defaults=False):
    """What the child could open where nothing can be compiled."""

    entries: tuple[Opened, ...]
    #: What came of the model; None where none was named.
    model: Called | None
    #: Commands of compilers that were tried.
    compiled: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether everything opened, the model ran, and nothing tried to compile."""
        failed = self.compiled or any(opened.problems for opened in self.entries)
        return not failed and (self.model is None or self.model.called)


def prove_load(
    root: Path, names: Sequence[RankName], *, model: ModelChoice | None = None, rank: int | None = None
) -> LoadProof:
    """Open every artifact of some entries, and call a model once, in a process that can compile nothing.

    With a model and no names, the entry that serves the model is opened.
    """
    setup = LoadSetup(root=str(root), model=model, rank=rank)
    with _nothing_that_compiles() as (variables, tried):
        with Children("cgtool.toolkit.verify.load:main", limit=1, setup=setup, variables=variables) as children:
            answers = [_ask(children, LoadRequest(name=name), setup) for name in names]
            if model is not None:
                answers.append(_ask(children, LoadRequest(among=tuple(names)), setup))
        compiled = sorted(set(tried.read_text(encoding="utf-8", errors="replace").splitlines()))
    return LoadProof(
        entries=tuple(answer.opened for answer in answers if answer.opened is not None),
        model=answers[-1].called if answers else None,
        compiled=tuple(compiled),
    )


def _ask(children: Children, request: LoadRequest, setup: LoadSetup) -> LoadAnswer:
    """Put a request to a child, and say what it died of where it does."""
    opening: list[Opening] = []
    try:
        asked = children.ask(request, answer=LoadAnswer, note=Opening, on_note=opening.append, timeout_secs=None)
        answer: LoadAnswer = asked.record
    except ChildEndedError as error:
        how = error.ending.how
        words = f" It said: {error.ending.key_line}" if error.ending.key_line else ""
        if request.name is None:
            model = "" if setup.model is None else setup.model.model
            sentence = f"The process that loaded and called {model} {how}.{words}"
            return LoadAnswer(called=Called(hash=None, called=False, sentence=sentence))
        file, sentence = "", f"The process that was to open it {how} as it started.{words}"
        if opening:
            file = opening[-1].file
            sentence = f"The process that opened {file} {how}. Warm the model again here.{words}"
        return LoadAnswer(opened=_opened(request.name, 0, [LoadProblem(path=file, sentence=sentence)]))
    return answer


@contextmanager
def _nothing_that_compiles() -> Iterator[tuple[dict[str, str], Path]]:
    """Yield the environment of a process that finds nothing that compiles, and the file of what it tried."""
    folder = Path(tempfile.mkdtemp(prefix="cgtool-verify-"))
    try:
        tools, tried = folder / "tools", folder / "tried"
        tools.mkdir()
        tried.touch()
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


def _opened(name: RankName, opened: int, problems: Sequence[LoadProblem]) -> Opened:
    return Opened(hash=name.hash, rank=name.rank, prefix=name.prefix, opened=opened, problems=tuple(problems))


# The program of the child.


def main(channel: Channel) -> None:
    """Build the model, and do what each request asks."""
    setup = channel.setup(LoadSetup)
    layout = CacheLayout(root=Path(os.path.realpath(setup.root)))
    spec: ModelSpec | None = None
    failure = ""
    for number, (request, _) in enumerate(channel.requests(LoadRequest)):
        if setup.model is not None and number == 0:  # what registers its ops comes before what calls them
            try:
                spec = setup.model.build(weights="real")
            except CgtoolError as error:
                failure = str(error)
        if request.name is not None:
            channel.answer(LoadAnswer(opened=_open_all(layout, request.name, channel.note)))
        elif spec is None:
            channel.answer(LoadAnswer(called=Called(hash=None, called=False, sentence=failure)))
        else:
            channel.answer(_called(layout, spec, setup, request, channel.note))


def _open_all(layout: CacheLayout, name: RankName, say: _Say) -> Opened:
    """Open every artifact of a rank and prefix, each for every graph that it serves."""
    opened = 0
    problems: list[LoadProblem] = []
    try:
        policy = TrustPolicy.of()
        records = policy.read(layout, name)
        entry = None if records is None else policy.entry(layout, name, records)
        if entry is None:
            problems.append(LoadProblem(path="", sentence=f"There is no entry {name.flat} any more."))
        else:
            opened, problems = _open_entry(layout, name, entry, say)
    except CgtoolError as error:
        problems.append(LoadProblem(path="", sentence=str(error)))
    return _opened(name, opened, problems)


def _open_entry(layout: CacheLayout, name: RankName, entry: Entry, say: _Say) -> tuple[int, list[LoadProblem]]:
    # torch comes with these, and in this process alone
    from cgtool.runtime.aoti_package import Packages
    from cgtool.runtime.dispatch import graph_at, symbol_bounds

    plan = parse_plan(entry.files[PLAN_FILE], path=layout.rank_dir(name) / PLAN_FILE)
    steps = [{step.piece: step for step in variant.steps} for variant in plan.variants]
    seen: set[tuple[str, str, str, str]] = set()
    problems: list[LoadProblem] = []
    with Packages(device_index=None) as packages:
        for row in entry.manifest.rows:
            step = steps[row.variant].get(row.piece_index) if row.variant < len(steps) else None
            file = row.artifact.file
            if step is None:
                sentence = f"The manifest names piece {row.piece_index}, which its plan lacks."
                problems.append(LoadProblem(path=file, sentence=sentence))
                continue
            key = row.artifact.digest, step.graph, repr(row.shape), repr(step.symbols)
            if key in seen:
                continue
            seen.add(key)
            say(Opening(file=file))
            try:
                bounds = symbol_bounds(plan.variants[row.variant], row.shape)
                graph = graph_at(plan.graphs[step.graph], step, bounds)
                _open(row.adaptor, code_of(entry.artifact(row.artifact), row, step.graph), graph, packages)
            except CgtoolError as error:
                problems.append(LoadProblem(path=file, sentence=str(error)))
            except Exception as error:  # noqa: BLE001 - Inductor's own artifacts fail with whatever they like
                said = (str(error).strip().splitlines() or [""])[0]
                sentence = f"It cannot be opened where nothing compiles: {type(error).__name__}: {said}"
                problems.append(LoadProblem(path=file, sentence=sentence))
    return len({key[0] for key in seen} - {problem.path[:64] for problem in problems}), problems


def _open(adaptor: str, data: bytes, graph: PieceGraph, packages: Packages) -> None:
    if adaptor == AOT_INDUCTOR:
        packages.open(data, graph)
    elif adaptor == EAGER:
        from cgtool.runtime.op_by_op import piece_function

        piece_function(graph, device_index=None)
    else:
        from cgtool.compiler.adaptors.interface import get_adaptor

        get_adaptor(adaptor).load(data, graph)


def _called(layout: CacheLayout, spec: ModelSpec, setup: LoadSetup, request: LoadRequest, say: _Say) -> LoadAnswer:
    """Load the model and call it once; where no entry was named, the one that serves it is opened too."""
    import torch

    from cgtool.api import load
    from cgtool.runtime.factors import Live
    from cgtool.runtime.find import Finder

    as_rank = environment().rank if setup.rank is None else setup.rank
    hash_, opened, sentence = None, None, ""
    try:
        live = Live.of(spec.module)
        finder = Finder(layout, spec.module, live, rank=as_rank, prefix=spec.prefix, trust=TrustPolicy.of())
        found = finder.find().entry.name
        hash_ = found.hash
        if not request.among:
            opened = _open_all(layout, found, say)
        elif found not in request.among:
            known = ", ".join(dict.fromkeys(short(name.hash) for name in request.among))
            sentence = f"The model is served by entry {short(found.hash)}, and {known} was to be proved."
            return LoadAnswer(called=Called(hash=hash_, called=False, sentence=sentence))
        loaded = load(spec.module, cache_dir=layout.root, prefix=spec.prefix, rank=as_rank)
        (call, *_) = spec.calls
        with torch.no_grad():
            loaded(*call.args, **call.kwargs)
    except CgtoolError as error:
        reasons = "; ".join(getattr(error, "reasons", ()))
        sentence = f"{error}" if not reasons or reasons in str(error) else f"{error} ({reasons})"
    return LoadAnswer(opened=opened, called=Called(hash=hash_, called=not sentence, sentence=sentence))
