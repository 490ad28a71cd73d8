"""`verify --load`: prove that entries open in a child process that cannot compile.

Importable without torch; only the child (`main`) imports it. The child's PATH holds only fake tools that fail and log
their names, CXX names no compiler, and the cache folders of torch and triton are empty. It opens only what load would
trust, and the verified bytes are the ones that are opened. It reports each artifact before opening it, so that the
parent knows which artifact crashed it; another child continues with the rest.
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

#: Compilers, and tools that compilers call.
_TOOLS = (
    *("g++", "gcc", "c++", "cc", "cpp", "clang", "clang++", "icx", "icpx", "ld", "as", "ptxas", "nvcc", "hipcc"),
    *("cuobjdump", "nvdisasm", "make", "ninja", "cmake"),
)
_NO_COMPILER = "/nonexistent/c++"

_OnOpening = Callable[["Opening"], None]


class LoadSetup(Record, frozen=True, kw_only=True):
    """The cache, the model to call (None: artifacts only), and the rank to load it as."""

    root: str
    model: ModelChoice | None
    rank: int | None


class LoadRequest(Record, frozen=True, kw_only=True):
    """A rank and prefix to open; without `name`, load and call the model, which an entry of `among` must serve."""

    name: RankName | None = None
    among: tuple[RankName, ...] = ()


class Opening(Record, frozen=True, kw_only=True):
    """The child is about to open an artifact."""

    file: str


class LoadProblem(Record, frozen=True, kw_only=True, omit_defaults=False):
    """Why an artifact could not be opened, or with the path "", a whole rank."""

    path: str
    kind: Literal["load"] = "load"
    sentence: str


class Opened(Record, frozen=True, kw_only=True):
    """The result of opening one rank and prefix: how many artifacts opened, and which did not."""

    hash: str
    rank: int
    prefix: str
    opened: Count
    problems: tuple[LoadProblem, ...]


class Called(Record, frozen=True, kw_only=True):
    """The result of loading the model and calling it once."""

    #: The entry that served it; None if none did.
    hash: str | None
    #: Whether the call returned.
    called: bool
    #: Why the call failed; "" if it returned.
    sentence: str


class LoadAnswer(Record, frozen=True, kw_only=True):
    """The result of a request; for a model without named entries, also that of opening the entry that serves it."""

    opened: Opened | None = None
    called: Called | None = None


class LoadProof(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The result of opening artifacts in a process that cannot compile."""

    entries: tuple[Opened, ...]
    #: The result for the model; None if none was named.
    model: Called | None
    #: The compiler commands that were attempted.
    compiled: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether everything opened, the model ran, and nothing tried to compile."""
        failed = self.compiled or any(opened.problems for opened in self.entries)
        return not failed and (self.model is None or self.model.called)


def prove_load(
    root: Path, names: Sequence[RankName], *, model: ModelChoice | None = None, rank: int | None = None
) -> LoadProof:
    """Open every artifact of the named entries, and call a model once, in a process that cannot compile.

    With a model and no names, only the entry that serves the model is opened.
    """
    setup = LoadSetup(root=str(root), model=model, rank=rank)
    with _no_compiler_environment() as (variables, tried):
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
    """Send a request to a child; if the child dies, report the artifact it was opening."""
    opening: list[Opening] = []
    try:
        asked = children.ask(request, answer=LoadAnswer, note=Opening, on_note=opening.append, timeout_secs=None)
        answer: LoadAnswer = asked.record
    except ChildEndedError as error:
        how = error.ending.how
        log = f" Its last output: {error.ending.key_line}" if error.ending.key_line else ""
        if request.name is None:
            model = "" if setup.model is None else setup.model.model
            sentence = f"The process that loaded and called {model} {how}.{log}"
            return LoadAnswer(called=Called(hash=None, called=False, sentence=sentence))
        file, sentence = "", f"The process that was to open it {how} during start-up.{log}"
        if opening:
            file = opening[-1].file
            sentence = f"The process that opened {file} {how}. Warm the model again on this machine.{log}"
        return LoadAnswer(opened=_opened(request.name, 0, [LoadProblem(path=file, sentence=sentence)]))
    return answer


@contextmanager
def _no_compiler_environment() -> Iterator[tuple[dict[str, str], Path]]:
    """Yield an environment without compilers, and the file that logs the attempts to run one."""
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


def main(channel: Channel) -> None:
    """Build the model, and answer each request; the program of the child."""
    setup = channel.setup(LoadSetup)
    layout = CacheLayout(root=Path(os.path.realpath(setup.root)))
    spec: ModelSpec | None = None
    failure = ""
    for number, (request, _) in enumerate(channel.requests(LoadRequest)):
        if setup.model is not None and number == 0:  # registers the custom ops that artifacts call
            try:
                spec = setup.model.build(weights="real")
            except CgtoolError as error:
                failure = str(error)
        if request.name is not None:
            channel.answer(LoadAnswer(opened=_open_all(layout, request.name, channel.note)))
        elif spec is None:
            channel.answer(LoadAnswer(called=Called(hash=None, called=False, sentence=failure)))
        else:
            channel.answer(_call_model(layout, spec, setup, request, channel.note))


def _open_all(layout: CacheLayout, name: RankName, on_opening: _OnOpening) -> Opened:
    """Open every artifact of a rank and prefix, each for every graph that it serves."""
    opened = 0
    problems: list[LoadProblem] = []
    try:
        policy = TrustPolicy.of()
        records = policy.read(layout, name)
        entry = None if records is None else policy.entry(layout, name, records)
        if entry is None:
            problems.append(LoadProblem(path="", sentence=f"The entry {name.flat} no longer exists."))
        else:
            opened, problems = _open_entry(layout, name, entry, on_opening)
    except CgtoolError as error:
        problems.append(LoadProblem(path="", sentence=str(error)))
    return _opened(name, opened, problems)


def _open_entry(
    layout: CacheLayout, name: RankName, entry: Entry, on_opening: _OnOpening
) -> tuple[int, list[LoadProblem]]:
    # Imported lazily: these import torch, which only the child needs.
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
                sentence = f"The manifest names piece {row.piece_index}, which is not in its plan."
                problems.append(LoadProblem(path=file, sentence=sentence))
                continue
            key = row.artifact.digest, step.graph, repr(row.shape), repr(step.symbols)
            if key in seen:
                continue
            seen.add(key)
            on_opening(Opening(file=file))
            try:
                bounds = symbol_bounds(plan.variants[row.variant], row.shape)
                graph = graph_at(plan.graphs[step.graph], step, bounds)
                _open(row.adaptor, code_of(entry.artifact(row.artifact), row, step.graph), graph, packages)
            except CgtoolError as error:
                problems.append(LoadProblem(path=file, sentence=str(error)))
            except Exception as error:  # noqa: BLE001 - Inductor's artifacts can raise anything
                message = (str(error).strip().splitlines() or [""])[0]
                sentence = f"It cannot be opened without a compiler: {type(error).__name__}: {message}"
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


def _call_model(
    layout: CacheLayout, spec: ModelSpec, setup: LoadSetup, request: LoadRequest, on_opening: _OnOpening
) -> LoadAnswer:
    """Load the model and call it once; if no entry was named, also open the one that serves it."""
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
            opened = _open_all(layout, found, on_opening)
        elif found not in request.among:
            expected = ", ".join(dict.fromkeys(short(name.hash) for name in request.among))
            sentence = f"Entry {short(found.hash)} serves the model, not {expected}."
            return LoadAnswer(called=Called(hash=hash_, called=False, sentence=sentence))
        loaded = load(spec.module, cache_dir=layout.root, prefix=spec.prefix, rank=as_rank)
        (call, *_) = spec.calls
        with torch.no_grad():
            loaded(*call.args, **call.kwargs)
    except CgtoolError as error:
        reasons = "; ".join(getattr(error, "reasons", ()))
        sentence = f"{error}" if not reasons or reasons in str(error) else f"{error} ({reasons})"
    return LoadAnswer(opened=opened, called=Called(hash=hash_, called=not sentence, sentence=sentence))
