"""The program of the child of `verify --load`: opens artifacts with torch alone, loads a model and calls it once.

It is started with nothing that compiles within reach (`cgtool.toolkit.verify.load` says how). Nothing is opened that
load would not believe. An artifact's bytes are matched to their digest first, and what was matched is what is opened.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cgtool.child import Channel
from cgtool.config import AOT_INDUCTOR, EAGER
from cgtool.errors import CgtoolError
from cgtool.host import environment
from cgtool.plan.records import parse_plan
from cgtool.store.artifacts import code_of
from cgtool.store.entry import Entry
from cgtool.store.layout import PLAN_FILE, CacheLayout, RankName, short
from cgtool.store.trust import TrustPolicy
from cgtool.toolkit.verify.load import Called, Done, LoadRequest, ModelChoice, Opened, Opening, Problem

if TYPE_CHECKING:
    from cgtool.model import ModelSpec
    from cgtool.plan.pieces import PieceGraph
    from cgtool.runtime.aoti_package import Packages

Say = Callable[[Opening | Opened | Called], None]


def main(channel: Channel) -> None:
    """Do what the one request asks, and say what came of each part of it."""
    for request, _ in channel.requests(LoadRequest):
        _answer(request, channel.note)
        channel.answer(Done(), last=True)
        return


def _answer(request: LoadRequest, say: Say) -> None:
    layout = CacheLayout(root=Path(os.path.realpath(request.root)))
    try:
        spec = None if request.model is None else _built(request.model)
    except CgtoolError as error:
        say(Called(name=None, called=False, sentence=str(error)))
        spec = None
    for name in request.names:
        _open_all(layout, name, say)
    if spec is not None and request.model is not None:
        say(_called(layout, spec, request, request.model.prefix or spec.prefix, say))


def _built(asked: ModelChoice) -> ModelSpec:
    from cgtool.models import resolve_model  # imports torch, which the process that waits does without

    return resolve_model(
        asked.model,
        factory_args=asked.factory_args,
        weights="real",
        device=asked.device,
        dtype=asked.dtype,
        pythonpath=asked.pythonpath,
    )


def _open_all(layout: CacheLayout, name: RankName, say: Say) -> None:
    """Open every artifact of a rank and prefix, each for every graph that it serves."""
    opened = 0
    problems: list[Problem] = []
    try:
        policy = TrustPolicy.of()
        records = policy.read(layout, name)
        entry = None if records is None else policy.entry(layout, name, records)
        if entry is None:
            problems.append(Problem(file="", sentence=f"There is no entry {name.flat} any more."))
        else:
            opened, problems = _open_entry(layout, name, entry, say)
    except CgtoolError as error:
        problems.append(Problem(file="", sentence=str(error)))
    say(Opened(name=name, opened=opened, problems=tuple(problems)))


def _open_entry(layout: CacheLayout, name: RankName, entry: Entry, say: Say) -> tuple[int, list[Problem]]:
    # torch comes with these, and in this process alone
    from cgtool.runtime.aoti_package import Packages
    from cgtool.runtime.dispatch import graph_at, symbol_bounds

    plan = parse_plan(entry.files[PLAN_FILE], path=layout.rank_dir(name) / PLAN_FILE)
    steps = [{step.piece: step for step in variant.steps} for variant in plan.variants]
    seen: set[tuple[str, str, str, str]] = set()
    problems: list[Problem] = []
    with Packages(device_index=None) as packages:
        for row in entry.manifest.rows:
            step = steps[row.variant].get(row.piece_index)
            file = row.artifact.file
            if step is None:
                sentence = f"The manifest names piece {row.piece_index}, which its plan has not."
                problems.append(Problem(file=file, sentence=sentence))
                continue
            key = row.artifact.digest, step.graph, repr(row.shape), repr(step.symbols)
            if key in seen:
                continue
            seen.add(key)
            say(Opening(name=name, file=file))
            try:
                bounds = symbol_bounds(plan.variants[row.variant], row.shape)
                graph = graph_at(plan.graphs[step.graph], step, bounds)
                _open(row.adaptor, code_of(entry.artifact(row.artifact), row, step.graph), graph, packages)
            except CgtoolError as error:
                problems.append(Problem(file=file, sentence=str(error)))
            except Exception as error:  # noqa: BLE001 - Inductor's own artifacts fail with whatever they like
                said = (str(error).strip().splitlines() or [""])[0]
                sentence = f"It cannot be opened where nothing compiles: {type(error).__name__}: {said}"
                problems.append(Problem(file=file, sentence=sentence))
    return len({key[0] for key in seen} - {problem.file[:64] for problem in problems}), problems


def _open(adaptor: str, data: bytes, graph: PieceGraph, packages: Packages) -> None:
    if adaptor == AOT_INDUCTOR:
        packages.open(data, graph)
    elif adaptor == EAGER:
        from cgtool.runtime.program import piece_function

        piece_function(graph, device_index=None)
    else:
        from cgtool.compiler.adaptors.interface import get_adaptor

        get_adaptor(adaptor).load(data, graph)


def _called(layout: CacheLayout, spec: ModelSpec, request: LoadRequest, prefix: str, say: Say) -> Called:
    """Load the model and call it once; where no entry was named, the one that serves it is opened too."""
    import torch

    from cgtool.api import load
    from cgtool.runtime.factors import Live
    from cgtool.runtime.find import Finder

    as_rank = environment().rank if request.rank is None else request.rank
    found: RankName | None = None
    try:
        live = Live.of(spec.module)
        finder = Finder(layout, spec.module, live, rank=as_rank, prefix=prefix, trust=TrustPolicy.of())
        found = finder.find().entry.name
        if not request.names:
            _open_all(layout, found, say)
        elif found not in request.names:
            known = ", ".join(dict.fromkeys(short(name.hash) for name in request.names))
            sentence = f"The model is served by entry {short(found.hash)}, and {known} was to be proved."
            return Called(name=found, called=False, sentence=sentence)
        loaded = load(spec.module, cache_dir=layout.root, prefix=prefix, rank=as_rank)
        (call, *_) = spec.calls
        with torch.no_grad():
            loaded(*call.args, **call.kwargs)
    except CgtoolError as error:
        reasons = "; ".join(getattr(error, "reasons", ()))
        sentence = f"{error}" if not reasons or reasons in str(error) else f"{error} ({reasons})"
        return Called(name=found, called=False, sentence=sentence)
    return Called(name=found, called=True, sentence="")
