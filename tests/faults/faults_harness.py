"""Actions on a cache whose disk fails, the caches that they start with, and checks of the result.

Everything is in one folder: `cache`, a `bundle` to import, and exports; or a `damaged` cache. Imports no torch.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from cache_maker import LOOKUP, lay_entry, tree
from cache_samples import view
from prune_samples import DAY, lay

from cgtool.errors import CacheError, CgtoolError
from cgtool.store.entry import read_entry
from cgtool.store.layout import ARTIFACTS, GRAPH_FILE, PLAN_FILE, UNIT_FILE, CacheLayout
from cgtool.store.leases import hold
from cgtool.store.lookup import LookupStore, StateStore
from cgtool.store.trust import TrustPolicy
from cgtool.toolkit.bundle.choose import Choice
from cgtool.toolkit.bundle.export import export
from cgtool.toolkit.bundle.import_ import import_bundle
from cgtool.toolkit.inspect.cache import inspect_cache
from cgtool.toolkit.inspect.entry import inspect_entry, inspect_key
from cgtool.toolkit.prune.plan import Rules
from cgtool.toolkit.prune.run import plan_prune
from cgtool.toolkit.verify.checks import check_entries, check_units
from cgtool.toolkit.verify.hashing import Hasher
from cgtool.toolkit.verify.run import verify

#: Exit code of a process in which an action raised a documented error.
TOLD = 3
#: The seed of the entry that is looked up.
LOOKED_UP = 7


def lay_start(folder: Path, name: str) -> None:
    """Create the files that an action starts with."""
    folder.mkdir()
    (folder / "out").write_text("old")
    if name == "repair":
        lay_damaged(CacheLayout(root=folder / "damaged"))
        return
    cache = folder / "cache"
    for number in (1, 2):
        lay(cache, number, pieces=("own", "both"), used=1e9)
    lay_entry(cache, seed=LOOKED_UP)
    (name,) = CacheLayout(root=cache).rank_names(next(LookupStore(CacheLayout(root=cache)).candidates(LOOKUP)))
    StateStore(CacheLayout(root=cache)).record_hit(name)
    lay_entry(folder / "other", seed=LOOKED_UP, shapes=("general", "n=16"))
    lay_entry(folder / "other", seed=8)
    export(dest=folder / "bundle", cache_dir=folder / "other", choice=Choice(everything=True))


def lay_damaged(layout: CacheLayout) -> None:
    """Create a cache in which each kind of file is damaged but can be repaired without a compiler."""
    pieces = ("own", "both", "forgotten")
    name, _, headless = (lay(layout.root, 1, rank=rank, pieces=pieces) for rank in range(3))
    keyless = lay(layout.root, 2, pieces=("both",))
    own, both, forgotten = (row.artifact.digest for row in read_entry(layout, name).manifest.rows)
    for path in (
        layout.entry_dir(name.hash) / ARTIFACTS / f"{own}.eager",
        layout.entry_dir(name.hash) / ARTIFACTS / f"{'0' * 64}.eager",
        layout.rank_dir(name) / PLAN_FILE,
        layout.rank_dir(name) / GRAPH_FILE,
        layout.manifest_file(headless),
        layout.key_file(keyless.hash),
        next(layout.units_dir.glob(f"*/*/{both}.eager")),
        next(layout.units_dir.glob(f"*/*/{forgotten}.eager")).with_name(UNIT_FILE),
    ):
        path.unlink(missing_ok=True)  # keeps its hard links intact
        path.write_bytes(b"x")
    next(layout.lookup_dir.glob(f"*/{name.hash}")).unlink()


def publish(folder: Path) -> None:
    """Publish a new entry with one new and one existing unit, and republish another entry."""
    lay(folder / "cache", 3, pieces=("own", "both"))
    lay_entry(folder / "cache", seed=LOOKED_UP, say="2")


def prune_two(folder: Path) -> None:
    rules = Rules(older_than_secs=DAY, orphans=True, units=True)
    outcome = plan_prune(rules, cache_dir=folder / "cache").execute()
    if outcome.failed:
        raise CacheError(" ".join(item.sentence for item in outcome.failed))


def import_all(folder: Path) -> None:
    import_bundle(source=folder / "bundle", cache_dir=folder / "cache", trust=True, any_machine=True)


def export_file(folder: Path) -> None:
    export(dest=folder / "out", cache_dir=folder / "other", choice=Choice(everything=True))


def export_folder(folder: Path) -> None:
    shutil.rmtree(folder / "layer", ignore_errors=True)  # from a previous run
    export(dest=folder / "layer", cache_dir=folder / "other", folder=True, choice=Choice(everything=True))


def verify_all(folder: Path) -> None:
    report = verify(cache_dir=folder / "cache", jobs=1)
    wrong = [problem.sentence for entry in report.entries for problem in entry.problems]
    wrong += [problem.sentence for problem in report.units.problems]
    if wrong:
        raise CacheError(" ".join(wrong))
    if len(report.entries) != 3:
        raise AssertionError(report)


def repair(folder: Path) -> None:
    report = verify(cache_dir=folder / "damaged", jobs=1, repair=True)
    left = [problem.sentence for entry in report.entries for problem in entry.problems]
    left += [problem.sentence for problem in report.units.problems]
    if left:
        raise CacheError(" ".join(left))


def inspect_all(folder: Path) -> None:
    report = inspect_cache(folder / "cache")
    if report.cache.warnings:
        raise CacheError(" ".join(report.cache.warnings))
    if len(report.shown) != 3:
        raise AssertionError(report)
    list(report.entries_json())
    for entry in report.shown:
        inspect_entry(entry.manifest.hash, cache_dir=folder / "cache").to_json()
        inspect_key(entry.manifest.hash, cache_dir=folder / "cache").to_json()


def look_up(folder: Path) -> None:
    """Access a cache like a load."""
    layout = CacheLayout(root=folder / "cache")
    hash_ = next(LookupStore(layout).candidates(LOOKUP))
    (name,) = layout.rank_names(hash_)
    TrustPolicy().read(layout, name)
    entry = read_entry(layout, name)
    hold(layout, name)
    for row in entry.manifest.rows:
        entry.artifact(row.artifact)
    StateStore(layout).record_hit(name)


#: Actions that write come first, so that the sampled test covers all four errors of each kind of call among them.
ACTIONS: dict[str, Callable[[Path], None]] = {
    "publish": publish,
    "prune": prune_two,
    "import": import_all,
    "repair": repair,
    "export-folder": export_folder,
    "export": export_file,
    "verify": verify_all,
    "inspect": inspect_all,
    "look-up": look_up,
}


def state(folder: Path) -> dict[str, object]:
    """Return everything in the folder as readers see it."""
    found = dict(view(folder / "cache"))
    if (folder / "layer").exists():
        found["layer"] = tree(folder / "layer")
    found["out"] = (folder / "out").read_bytes()
    # `view` cannot read a damaged cache. Ignore its state folder and temporary files.
    kept = {name: what for name, what in tree(folder / "damaged").items() if "/state" not in name and "/." not in name}
    return {**found, **kept}


def wrong_in(folder: Path) -> list[str]:
    """Return the problems that `verify` finds."""
    layout = CacheLayout(root=folder / "cache")
    hasher = Hasher()
    found = [p for entry in check_entries(layout, layout.hashes(), hasher) for p in entry.problems]
    return [problem.sentence for problem in (*found, *check_units(layout, hasher).problems)]


def told(action: Callable[[Path], None], folder: Path) -> None:
    """Run an action; exit with TOLD and the message if it raises a documented error."""
    try:
        action(folder)
    except CgtoolError as error:
        sys.stderr.write(str(error))
        raise SystemExit(TOLD) from error
