"""The child of `verify --load`: opens artifacts with torch alone, loads a model and calls it once.

It is started with nothing that compiles within reach (`cgtool.commands.verify_load` says how, and what is said between
the two). Nothing is opened that load would not believe. An artifact's bytes are matched to their digest first, and what
was matched is what is opened.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgtool.cache.entry import Entry, read_entry
from cgtool.cache.key import read_key
from cgtool.cache.layout import PLAN_FILE, CacheLayout, RankName, short
from cgtool.cache.trust import TrustPolicy
from cgtool.config import AOT_INDUCTOR, EAGER
from cgtool.errors import CgtoolError
from cgtool.plan import parse_plan
from cgtool.variables import environment

if TYPE_CHECKING:
    from cgtool.pieces import PieceGraph
    from cgtool.runtime.packages import Packages


def main(answers: int) -> None:
    """Do what standard input asks, and answer on a descriptor.

    Args:
        answers: The descriptor.
    """
    request = json.load(sys.stdin)
    layout = CacheLayout(root=Path(os.path.realpath(request["root"])))
    names = [RankName(hash=name[0], rank=name[1], prefix=name[2]) for name in request["names"]]

    def say(line: dict[str, Any]) -> None:
        os.write(answers, (json.dumps(line) + "\n").encode())

    try:
        spec = None if request["model"] is None else _built(request["model"])
    except CgtoolError as error:
        say({"model": None, "called": False, "sentence": str(error)})
        spec = None
    for name in names:
        _open_all(layout, name, say)
    if spec is not None:
        _call(layout, spec, request, names, say)


def _built(asked: dict[str, Any]) -> Any:
    from cgtool.models import resolve_model  # imports torch, which the process that waits does without

    return resolve_model(
        asked["model"],
        factory_args=asked["factory_args"],
        weights="real",
        device=asked["device"],
        dtype=asked["dtype"],
        pythonpath=asked["pythonpath"],
    )


def _open_all(layout: CacheLayout, name: RankName, say: Any) -> None:
    """Open every artifact of a rank and prefix, each for every graph that it serves."""
    opened, problems = 0, []
    try:
        key = read_key(layout, name.hash)
        entry = None if key is None else _policy().check(layout, name, key) or read_entry(layout, name)
        if entry is None:
            problems.append(["", f"There is no entry {name.flat} any more."])
        else:
            opened, problems = _open_entry(layout, name, entry, say)
    except CgtoolError as error:
        problems.append(["", str(error)])
    say({"done": [name.hash, name.rank, name.prefix], "opened": opened, "problems": problems})


def _policy() -> TrustPolicy:
    env = environment()
    return TrustPolicy(trusted_keys=env.trusted_keys, allow_shared=env.allow_shared_cache)


def _open_entry(layout: CacheLayout, name: RankName, entry: Entry, say: Any) -> tuple[int, list[list[str]]]:
    # torch comes with these, and in this process alone
    from cgtool.runtime.packages import Packages
    from cgtool.runtime.shapes import graph_at, spec_of

    plan = parse_plan(entry.files[PLAN_FILE], path=layout.rank_dir(name) / PLAN_FILE)
    steps = [{step.piece: step for step in variant.steps} for variant in plan.variants]
    seen: set[tuple[str, str, str, str]] = set()
    problems: list[list[str]] = []
    with Packages(device_index=None) as packages:
        for row in entry.manifest.rows:
            step = steps[row.variant].get(row.piece_index)
            file = f"{row.digest}.{row.kind}"
            if step is None:
                problems.append([file, f"The manifest names piece {row.piece_index}, which its plan has not."])
                continue
            key = row.digest, step.graph, repr(row.shape), repr(step.symbols)
            if key in seen:
                continue
            seen.add(key)
            say({"at": [name.hash, name.rank, name.prefix], "file": file})
            spec = spec_of(plan.variants[row.variant], row.shape, entry.manifest.size_dim)
            try:
                _open(row.adaptor, entry.artifact(row), graph_at(plan.graphs[step.graph], step, spec), packages)
            except CgtoolError as error:
                problems.append([file, str(error)])
            except Exception as error:  # noqa: BLE001 - Inductor's own artifacts fail with whatever they like
                said = (str(error).strip().splitlines() or [""])[0]
                problems.append([file, f"It cannot be opened where nothing compiles: {type(error).__name__}: {said}"])
    return len({key[0] for key in seen} - {file[:64] for file, _ in problems}), problems


def _open(adaptor: str, data: bytes, graph: PieceGraph, packages: Packages) -> None:
    if adaptor == AOT_INDUCTOR:
        packages.open(data, graph)
    elif adaptor == EAGER:
        from cgtool.runtime.pieces import piece_function

        piece_function(graph, device_index=None)
    else:
        from cgtool.build.adaptors import get_adaptor

        get_adaptor(adaptor).load(data, graph)


def _call(layout: CacheLayout, spec: Any, request: dict[str, Any], names: list[RankName], say: Any) -> None:
    """Load the model and call it once; where no entry was named, the one that serves it is opened too."""
    import torch

    from cgtool.api import load
    from cgtool.runtime.facts import facts_of
    from cgtool.runtime.find import Finder

    prefix = request["model"]["prefix"] or spec.prefix
    as_rank = environment().rank if request["rank"] is None else request["rank"]
    found: RankName | None = None
    try:
        facts = facts_of(spec.module)
        finder = Finder(layout, spec.module, facts, config=None, rank=as_rank, prefix=prefix, trust=_policy())
        found = finder.find().entry.name
        if not names:
            _open_all(layout, found, say)
        elif found not in names:
            known = ", ".join(dict.fromkeys(short(name.hash) for name in names))
            sentence = f"The model is served by entry {short(found.hash)}, and {known} was to be proved."
            say({"model": _parts(found), "called": False, "sentence": sentence})
            return
        loaded = load(spec.module, cache_dir=layout.root, prefix=prefix, rank=as_rank)
        (call, *_) = spec.calls
        with torch.no_grad():
            loaded(*call.args, **call.kwargs)
    except CgtoolError as error:
        reasons = "; ".join(getattr(error, "reasons", ()))
        sentence = f"{error}" if not reasons or reasons in str(error) else f"{error} ({reasons})"
        say({"model": None if found is None else _parts(found), "called": False, "sentence": sentence})
        return
    say({"model": _parts(found), "called": True, "sentence": ""})


def _parts(name: RankName) -> list[Any]:
    return [name.hash, name.rank, name.prefix]
