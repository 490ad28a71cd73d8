"""`verify`: whether everything in a cache is what it was, whole, and fit for this machine; mending and proving it.

Owns what the user asked (`VerifyOptions`); the report is `cgtool.toolkit.verify.report`'s. Prints nothing. Importable
without torch: only the child that `--load` starts, and what `--repair` compiles, need it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from cgtool.errors import CacheError, UsageError
from cgtool.events import Event, OnEvent, ignore
from cgtool.host import gc_paused
from cgtool.store.files import os_errors_as_cache_errors
from cgtool.store.layout import CACHE_FOLDER, CacheLayout, is_hash, resolve_root, short
from cgtool.store.machine import this_machine
from cgtool.store.trust import TrustPolicy
from cgtool.toolkit.bundle.unpack import unpacked
from cgtool.toolkit.verify.digests import verify_entries, verify_entry
from cgtool.toolkit.verify.findings import EntryFindings, UnitFindings
from cgtool.toolkit.verify.hashing import hashing
from cgtool.toolkit.verify.load import LoadProof, ModelChoice, prove_load
from cgtool.toolkit.verify.mend import compile_again, rewrite_texts
from cgtool.toolkit.verify.repair import Repair, repair_entry, repair_units
from cgtool.toolkit.verify.report import EntryReport, VerifyReport, gone, judged
from cgtool.toolkit.verify.units import verify_units

#: What is set right shows what else is wrong: a spelling, then an artifact, then an orphan that its successor leaves.
_ROUNDS = 5

_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """What the user asked of `verify`.

    Args:
        targets: Beginnings of hashes, or one path: of a cache, an entry or a bundle. Empty: the whole cache.
        cache_dir: The cache's root; None means the user's own.
        names_cache: Whether the user named that root with an option.
        strict: Whether an entry that loads and is not optimal fails the check.
        world_size: How many ranks each entry must have; None: as many as its greatest.
        jobs: How many files are read at a time; None: as many as there are cores.
        load: Whether to open every artifact in a process that can compile nothing.
        repair: Whether to mend what is found wrong.
        model: A model to load and call once in that process; None: artifacts alone are opened.
        rank: The rank to load it as; None takes the environment's word.
    """

    targets: tuple[str, ...] = ()
    cache_dir: Path | None = None
    names_cache: bool = False
    strict: bool = False
    world_size: int | None = None
    jobs: int | None = None
    load: bool = False
    repair: bool = False
    model: ModelChoice | None = None
    rank: int | None = None


@os_errors_as_cache_errors()
def verify(options: VerifyOptions, on_event: OnEvent = ignore) -> VerifyReport:
    """Read and match every file of a cache, and judge whether this machine loads its entries.

    Args:
        options: What the user asked.
        on_event: Told of each entry as it goes.

    Raises:
        UsageError: A target fits no entry or several; or a bundle is to be loaded or mended.
        RefusedError: A bundle is not whole, or not what its index says.
        CacheError: There is no such cache, it is none, or it cannot be listed; with `options.repair`, or be written.
    """
    bundle = _bundle(options)
    if bundle is not None:
        with unpacked(bundle) as root:
            inner = replace(options, targets=(), cache_dir=root, names_cache=True)
            return replace(_verified(inner, on_event, policy=None), root=bundle, units=None)
    return _verified(options, on_event, policy=TrustPolicy.of())


def _verified(options: VerifyOptions, on_event: OnEvent, *, policy: TrustPolicy | None) -> VerifyReport:
    """Verify what is no bundle, or was one: load asks nothing of that, for it must be imported first."""
    began = time.perf_counter()
    layout, hashes = _chosen(options)
    judge = partial(judged, layout, machine=this_machine(), world_size=options.world_size, policy=policy)
    entries: list[EntryReport] = []
    wanted = layout.hashes() if hashes is None else hashes
    if not wanted:
        _check_own(layout.root)
    with contextlib.ExitStack() as stack:
        stack.enter_context(gc_paused())
        hasher = stack.enter_context(hashing(options.jobs))
        for findings in verify_entries(layout, wanted, hasher):
            entries.append(judge(findings))
            on_event(Event(phase="verify", message=short(findings.hash), done=len(entries), total=len(wanted)))
        units = None
        if hashes is None:
            on_event(Event(phase="verify", message="units"))
            units = verify_units(layout, hasher)
    unit_repairs: tuple[Repair, ...] = ()
    if options.repair:
        entries = [_repaired(layout, entry, judge, options, on_event) for entry in entries]
        entries = [entry for entry in entries if entry.repairs or layout.entry_dir(entry.findings.hash).exists()]
        if units is not None and units.problems:
            units, unit_repairs = _repaired_units(layout, options)
    return VerifyReport(
        root=layout.root,
        entries=tuple(entries),
        units=units,
        unit_repairs=unit_repairs,
        load=_loaded(layout, entries, options, on_event),
        strict=options.strict,
        secs=time.perf_counter() - began,
    )


def _check_own(root: Path) -> None:
    """Check that a cache without entries is cgtool's, which may be empty, and nothing else."""
    from cgtool.toolkit.foreign.detect import check_known, detect  # the readers of all systems, for what holds no entry

    check_known(root)
    system = detect(root)
    if system not in (None, "cgtool"):
        message = f"{root} holds a cache of another system ({system}). Look into it with: cgtool inspect cache {root}"
        raise CacheError(message, path=root, actual=system)


def _repaired(
    layout: CacheLayout,
    entry: EntryReport,
    judge: Callable[[EntryFindings], EntryReport],
    options: VerifyOptions,
    on_event: OnEvent,
) -> EntryReport:
    """Mend an entry in rounds, since what one round mends shows what is left, and return how it is then."""
    done: list[Repair] = []
    for _ in range(_ROUNDS):
        if not (entry.findings.problems or entry.holes):
            break
        repairs = list(repair_entry(layout, entry.findings))
        if not any(repair.action != "not_repaired" for repair in repairs):
            repairs += rewrite_texts(layout, entry.findings)
        if not any(repair.action != "not_repaired" for repair in repairs):
            repairs += compile_again(layout, entry.findings, entry.holes, entry.verdict, on_event)
        done += [repair for repair in repairs if repair not in done]
        if not layout.entry_dir(entry.findings.hash).exists():
            return gone(entry, repairs=done)
        entry = judge(verify_entry(layout, entry.findings.hash, jobs=options.jobs))
        if not any(repair.action != "not_repaired" for repair in repairs):
            break
    return replace(entry, repairs=tuple(done))


def _repaired_units(layout: CacheLayout, options: VerifyOptions) -> tuple[UnitFindings, tuple[Repair, ...]]:
    """Mend the units that mending the entries left damaged, and return how they are then."""
    with hashing(options.jobs) as hasher:
        units = verify_units(layout, hasher)
    repairs = tuple(repair_units(layout, units))
    with hashing(options.jobs) as hasher:
        return verify_units(layout, hasher), repairs


def _loaded(
    layout: CacheLayout, entries: Sequence[EntryReport], options: VerifyOptions, on_event: OnEvent
) -> LoadProof | None:
    if not options.load and options.model is None:
        return None
    names = [
        manifest.name
        for entry in entries
        if entry.verdict.level != "unsupported" and not entry.findings.problems
        for manifest in entry.findings.manifests
    ]
    if options.model is not None and not options.targets:
        names = []  # the one that serves the model is opened
    on_event(Event(phase="start", message="opening artifacts in a process that can compile nothing"))
    return prove_load(layout.root, names, model=options.model, rank=options.rank)


def _chosen(options: VerifyOptions) -> tuple[CacheLayout, list[str] | None]:
    """Return the cache, and which of its entries were asked for; None for all, and the units."""
    paths = [target for target in options.targets if not _may_be_hash(target)]
    if paths and (len(options.targets) > 1 or options.names_cache):
        msg = "Give beginnings of hashes, or one path of a cache or an entry and no --cache-dir."
        raise UsageError(msg, actual=list(options.targets))
    if paths:
        path = Path(paths[0]).expanduser().absolute()
        if is_hash(path.name) and path.parent.name == CACHE_FOLDER:
            return _existing(CacheLayout(root=path.parent.parent), named=path), [path.name]
        return _existing(CacheLayout(root=resolve_root(path)), named=path), None
    layout = CacheLayout(root=resolve_root(options.cache_dir))
    if options.cache_dir is not None or layout.root.exists():
        _existing(layout, named=layout.root)
    hashes = layout.hashes()
    return layout, [_one(target.lower(), hashes, layout) for target in dict.fromkeys(options.targets)] or None


def _bundle(options: VerifyOptions) -> Path | None:
    """Return the bundle that is to be checked, if it is one: a stranger's, so nothing of it is opened."""
    if len(options.targets) != 1 or not Path(options.targets[0]).expanduser().is_file():
        return None
    path = Path(options.targets[0]).expanduser().absolute()
    if options.load or options.repair or options.names_cache:
        msg = f"{path} is a bundle: it is only looked at. Import it first (`cgtool import`), then load or mend it."
        raise UsageError(msg, path=path)
    return path


def _existing(layout: CacheLayout, *, named: Path) -> CacheLayout:
    if named.is_dir():
        return layout
    msg = f"{named} does not exist. Name the folder of a cache or of one entry, or a bundle."
    raise CacheError(msg, path=named)


def _one(beginning: str, hashes: Sequence[str], layout: CacheLayout) -> str:
    fitting = [hash_ for hash_ in hashes if hash_.startswith(beginning)]
    if len(fitting) == 1:
        return fitting[0]
    listed = ", ".join(map(short, fitting or hashes)) or "none"
    what = f"{len(fitting)} entries begin with {beginning}" if fitting else f"No entry begins with {beginning}"
    msg = f"{what} in {layout.root}. There are: {listed}. Give more digits, or look with: cgtool inspect cache"
    raise UsageError(msg, path=layout.root, actual=beginning)


def _may_be_hash(target: str) -> bool:
    return set(target.lower()) <= _HEX and 0 < len(target) <= 64 and not Path(target).exists()  # noqa: PLR2004 - a hash
