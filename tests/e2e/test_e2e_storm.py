"""Warms, loads, prunes, checks, exports and imports on one cache at once: no entry in use is removed."""

from __future__ import annotations

import errno
import fcntl
import functools
import multiprocessing
import os
import random
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
from cache_maker import lay_entry
from prune_samples import facts_of, is_whole, lay

from cgtool.errors import CacheCorruptError, CacheError, CacheMissError
from cgtool.store import leases
from cgtool.store.layout import CacheLayout, RankName
from cgtool.store.lookup import LookupStore, StateStore
from cgtool.toolkit.bundle.choose import Choice
from cgtool.toolkit.bundle.export import export
from cgtool.toolkit.bundle.import_ import import_bundle
from cgtool.toolkit.prune.plan import Rules
from cgtool.toolkit.prune.run import plan_prune
from cgtool.toolkit.verify.run import verify

pytestmark = pytest.mark.torch

#: Forks each process from one without threads that has imported the slow modules.
FRESH = multiprocessing.get_context("forkserver")
FRESH.set_forkserver_preload(["torch", "torch._dynamo", "cgtool.compiler.pipeline", "cgtool.toolkit.warm"])
MODEL = Path(__file__).with_name("e2e_models.py")
#: Factories there.
MODELS = ("attention", "nested", "asking")


@dataclass(frozen=True, kw_only=True)
class Storm:
    """The parameters that all processes share.

    Args:
        root: The root of the cache.
        bundle: The bundle to import.
        folder: Each process writes its errors to a file in it.
        entries: The number of generated entries: few enough for contention, and too many to be all in use all the time.
        locks: Whether flock works; otherwise it fails with ENOLCK.
        secs: The duration.
        seed: The seed of all random choices.
    """

    root: Path
    bundle: Path
    folder: Path
    entries: int
    locks: bool
    secs: float
    seed: int

    @functools.cached_property
    def layout(self) -> CacheLayout:
        return CacheLayout(root=self.root)


def write(storm: Storm, chance: random.Random) -> str:
    """Publish entries as a warm does, with shared units and with artifacts of their own."""
    number, rank = chance.randrange(storm.entries), chance.randrange(2)
    if chance.random() < 0.3:
        lay_entry(storm.root, seed=number, rank=rank, shapes=chance.choice([("general",), ("general", "n=8")]))
        return "published"
    while True:
        try:
            lay(storm.root, number, model=f"M{number}", pieces=("own", "both"), rank=rank)
        except CacheCorruptError as error:  # the unit was removed before it was linked: compile it again
            if "units" not in str(error.path):
                raise
        else:
            return "published"


def read(storm: Storm, chance: random.Random) -> str:
    """Look up an entry, hold it as a load does, and use it for a while."""
    for hash_ in LookupStore(storm.layout).candidates(facts_of(f"M{chance.randrange(storm.entries)}")):
        name = RankName(hash=hash_, rank=chance.randrange(2), prefix="backbone")
        if leases.keep(storm.layout, name):
            StateStore(storm.layout).record_hit(name)
            return use(storm, name, chance)
    return "missed"


def use(storm: Storm, name: RankName, chance: random.Random) -> str:
    """Check that an entry stays complete while this process holds it, then release it."""
    for _ in range(chance.randrange(1, 5)):
        if not is_whole(storm.root, name):
            raise AssertionError(f"{name.flat} was removed while in use")
        time.sleep(chance.random() / 20)
    release_all()
    return "used"


def release_all() -> None:
    """Release all leases, as the end of this process would."""
    for lease in leases._held.values():
        lease.release()
    leases._held.clear()


def prune(storm: Storm, chance: random.Random) -> str:
    rules = chance.choice([Rules(keep_last=0, orphans=True), Rules(units=True), Rules(max_bytes=30_000), Rules()])
    try:
        outcome = plan_prune(rules, cache_dir=storm.root).execute()
    except CacheError as error:
        if storm.locks or "locks" not in str(error):
            raise
        return "removed"  # refused: without locks, prune cannot tell what is in use
    time.sleep(chance.random() / 4)  # otherwise no entry would live long enough to be used
    if outcome.failed:
        raise AssertionError(outcome.failed)
    return "removed" if outcome.removed else "found nothing"


def check(storm: Storm, chance: random.Random) -> str:
    report = verify(cache_dir=storm.root, jobs=1)
    problems = [problem for entry in report.entries for problem in entry.problems]
    if problems or report.units.problems:
        raise AssertionError((problems, report.units.problems))
    return "looked"


def ship(storm: Storm, chance: random.Random) -> str:
    dest = storm.folder / f"{chance.random()}.tar.zst"
    choice = Choice(everything=True, filters=("model~Toy",))  # the others have no packages
    try:
        export(dest=dest, cache_dir=storm.root, choice=choice)
    except CacheError as error:
        if "holds no entry" not in str(error):
            raise
        return "found nothing"
    finally:
        release_all()
    dest.unlink()
    return "exported"


def take_in(storm: Storm, chance: random.Random) -> str:
    report = import_bundle(storm.bundle, cache_dir=storm.root, trust=True, any_machine=True)
    return "new" if any(entry.outcome == "new" for entry in report.entries) else "there already"


def warm(storm: Storm, chance: random.Random) -> str:
    from cgtool.config import CompilationConfig
    from cgtool.toolkit.model_choice import ModelChoice
    from cgtool.toolkit.warm import warm as warm_model

    config, name = CompilationConfig(adaptor="eager", jobs=0), chance.choice(MODELS)
    report = warm_model(ModelChoice(model=f"{MODEL}:{name}"), config=config, cache_dir=storm.root, rank=0)
    release_all()
    return "hit" if report.hit else "compiled"


def load(storm: Storm, chance: random.Random) -> str:
    import e2e_models
    import torch
    from e2e_compare import difference

    import cgtool

    spec = getattr(e2e_models, chance.choice(MODELS))()
    try:
        model = cgtool.load(spec.module, cache_dir=storm.root)
    except CacheMissError:
        return "missed"
    (call, *_) = spec.calls
    with torch.no_grad():
        difference(model(*call.args, **call.kwargs), spec.module(*call.args, **call.kwargs))
    if not storm.locks:  # there are no leases, and prune removes nothing
        return "used"
    (held,) = (path for path, lease in leases._held.items() if lease.is_current)
    return use(storm, RankName(hash=Path(held).name[:64], rank=0, prefix=spec.prefix), chance)


#: The work of the processes → the result that each kind must have at least once.
KINDS: dict[Callable[[Storm, random.Random], str], str] = {
    write: "published",
    read: "used",
    prune: "removed",
    check: "looked",
    ship: "exported",
    take_in: "new",
    warm: "compiled",
    load: "used",
}


#: How long a storm may exceed its duration until each kind of work has succeeded.
MOST_SECS = 240.0


def no_flock(*_: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def check_in_time(until: float, well: Any) -> None:
    """End a storm that takes too long, naming the work that never succeeded."""
    if time.monotonic() > until + MOST_SECS:
        missing = [
            f"{do.__name__}: {wanted}" for done, (do, wanted) in zip(well, KINDS.items(), strict=True) if not done
        ]
        raise TimeoutError(f"never succeeded: {missing}")


def go_on(kind: int, number: int, storm: Storm, ready: Barrier, well: Any) -> None:
    """Repeat the work of one process until the time is up and each kind has succeeded."""
    report, (do, wanted) = "", list(KINDS.items())[kind]
    if not storm.locks:
        fcntl.flock = no_flock
    try:
        chance = random.Random(f"{storm.seed} {number}")
        if do in (warm, load) and do(storm, chance) == wanted:  # their imports take seconds
            well[kind] = True
        ready.wait()
        until = time.monotonic() + storm.secs
        while multiprocessing.parent_process().is_alive() and (time.monotonic() < until or not all(well)):
            check_in_time(until, well)
            if do(storm, chance) == wanted:
                well[kind] = True
    except BaseException:  # noqa: BLE001 - reported by the parent
        report = f"{do.__name__}: {traceback.format_exc()}"
        well[:] = [True] * len(well)  # all processes may end
        ready.abort()
    (storm.folder / str(number)).write_text(report)


@pytest.mark.parametrize(
    ("processes", "secs", "locks"),
    [
        pytest.param((1, 1, 1, 1, 1, 1, 1, 1), 1.0, True, id="8 processes"),
        pytest.param((1, 1, 1, 1, 1, 1, 0, 0), 0.5, False, id="6 processes without locks"),
        pytest.param((1, 1, 1, 1, 1, 1, 1, 1), 6.0, False, marks=pytest.mark.slow, id="8 processes without locks"),
        pytest.param((6, 6, 4, 3, 3, 4, 3, 3), 60.0, True, marks=pytest.mark.slow, id="32 processes for a minute"),
    ],
)
def test_processes_with_all_kinds_of_work_share_a_cache(tmp_path, processes, secs, locks):
    storm = Storm(
        root=tmp_path / "cache",
        bundle=tmp_path / "bundle.tar.zst",
        folder=tmp_path / "reports",
        entries=sum(processes) // 2,
        locks=locks,
        secs=secs,
        seed=time.time_ns(),
    )
    storm.folder.mkdir()
    for seed in range(storm.entries + 1):  # only an import adds the last entry, so that it is new at least once
        lay_entry(tmp_path / "source", seed=seed, shapes=("general", f"n={8 + seed}"))
    export(dest=storm.bundle, cache_dir=tmp_path / "source", choice=Choice(everything=True))
    release_all()
    lay_entry(storm.root)
    kinds = [kind for kind, count in enumerate(processes) for _ in range(count)]
    ready, well = FRESH.Barrier(len(kinds)), FRESH.Array("b", [not count for count in processes])
    children = [FRESH.Process(target=go_on, args=(kind, n, storm, ready, well)) for n, kind in enumerate(kinds)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * len(kinds)
    reports = [(storm.folder / str(number)).read_text() for number in range(len(kinds))]
    if any(reports):
        pytest.fail("\n".join([f"seed {storm.seed}", *filter(None, reports)]))
    check_calm(storm)


def check_calm(storm: Storm) -> None:
    """Check that the cache is consistent, and that all that is left of the storm can be pruned."""
    check(storm, random.Random())
    layout = storm.layout
    left = ".*" if storm.locks else ".*.tmp"  # without locks, a `.next` file stays until it is old
    assert [path for path in storm.root.rglob(left) if not path.is_dir()] == []
    assert list(layout.base.glob(".import.*")) == []
    rules = Rules(keep_last=0, units=True)
    outcome = plan_prune(rules, cache_dir=storm.root).execute()
    assert (outcome.kept, outcome.failed, layout.hashes()) == ((), (), [])
    assert list((layout.state_dir / "trash").iterdir()) == []
