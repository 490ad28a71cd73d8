"""`verify`: whether everything in a cache is what it was, whole, and fit for this machine.

Owns what the user asked (`VerifyOptions`) and what was found (`VerifyReport`). Prints nothing. Importable without
torch: only the child that `--load` starts, and what `--repair` compiles, need it. The report as JSON::

    {"schema": 1, "root": str, "entries": [entry...], "units": {"problems": [...], "notes": [...], "files": int} | null,
     "files": int, "size_bytes": int, "secs": float, "ok": bool}
    entry   = {"hash": str, "models": [str...], "verdict": {"level": word, "reasons": [str...]},
               "problems": [problem...], "notes": [note...], "holes": [hole...], "missing_ranks": [[prefix, int]...],
               "unknown_pieces": int, "loaded": null | {...}, "repairs": [repair...]}
    problem = {"path": str below the root, "kind": word, "sentence": str}
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cgtool.cache.coverage import Hole, PlannedVariant, entry_coverage, planned
from cgtool.cache.layout import CACHE_FOLDER, KEY_FILE, PLAN_FILE, CacheLayout, RankName, is_hash, resolve_root, short
from cgtool.cache.machine import Machine, this_machine
from cgtool.cache.manifest import Manifest
from cgtool.cache.verify.digests import verify_entries
from cgtool.cache.verify.findings import EntryFindings, UnitFindings
from cgtool.cache.verify.hashing import hashing
from cgtool.cache.verify.units import verify_units
from cgtool.cache.verify.verdict import Verdict, verdict, without_key
from cgtool.errors import CacheError, CgtoolError, UsageError
from cgtool.events import Event, OnEvent, ignore
from cgtool.plan import parse_plan

SCHEMA = 1

_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """What the user asked of `verify`.

    Args:
        targets: Beginnings of hashes, or one path: of a cache, or of an entry. Empty: the whole cache.
        cache_dir: The cache's root; None means the user's own.
        names_cache: Whether the user named that root with an option.
        strict: Whether an entry that loads and is not optimal fails the check.
        world_size: How many ranks each entry must have; None: as many as its greatest.
        jobs: How many files are read at a time; None: as many as there are cores.
    """

    targets: tuple[str, ...] = ()
    cache_dir: Path | None = None
    names_cache: bool = False
    strict: bool = False
    world_size: int | None = None
    jobs: int | None = None


@dataclass(frozen=True, kw_only=True)
class EntryReport:
    """What was found in one entry.

    Args:
        findings: What reading its files gave.
        verdict: Whether this machine loads it.
        holes: Shapes that a piece lacks.
        missing_ranks: (prefix, rank) of each rank that should be there.
        unknown_pieces: How many compiled pieces are missing that cannot be named.
    """

    findings: EntryFindings
    verdict: Verdict
    holes: tuple[Hole, ...] = ()
    missing_ranks: tuple[tuple[str, int], ...] = ()
    unknown_pieces: int = 0

    @property
    def models(self) -> tuple[str, ...]:
        """What its models are called, each once."""
        return tuple(dict.fromkeys(manifest.model for manifest in self.findings.manifests))

    @property
    def is_whole(self) -> bool:
        """Whether every file is what it was and nothing is missing."""
        return not (self.findings.problems or self.holes or self.missing_ranks or self.unknown_pieces)

    def is_ok(self, *, strict: bool) -> bool:
        """Return whether the check says yes.

        Args:
            strict: Whether only "optimal" will do.
        """
        fits = self.verdict.level == "optimal" or (self.verdict.level == "loads" and not strict)
        return self.is_whole and (fits or self.is_unfinished)

    @property
    def is_unfinished(self) -> bool:
        """Whether a warm has begun it and not published anything yet."""
        return self.findings.key is None and not self.findings.manifests and not self.findings.problems

    def to_json(self, root: Path) -> dict[str, Any]:
        """Return the entry as `verify --json` prints it."""
        return {
            "hash": self.findings.hash,
            "models": list(self.models),
            "verdict": self.verdict.to_json(),
            "problems": [problem.to_json(root) for problem in self.findings.problems],
            "notes": [note.to_json(root) for note in self.findings.notes],
            "holes": [hole.to_json() for hole in self.holes],
            "missing_ranks": [list(place) for place in self.missing_ranks],
            "unknown_pieces": self.unknown_pieces,
        }


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What was found in a cache.

    Args:
        root: The cache's root.
        entries: What was found in each entry.
        units: What was found among the units; None where only entries were asked for.
        strict: Whether only "optimal" will do.
        secs: How long it took.
    """

    root: Path
    entries: tuple[EntryReport, ...]
    units: UnitFindings | None
    strict: bool
    secs: float = field(compare=False)

    @property
    def ok(self) -> bool:
        """Whether the check says yes."""
        entries = all(entry.is_ok(strict=self.strict) for entry in self.entries)
        return entries and (self.units is None or not self.units.problems)

    @property
    def num_files(self) -> int:
        """How many files were read."""
        return sum(entry.findings.num_files for entry in self.entries) + (self.units.num_files if self.units else 0)

    @property
    def size_bytes(self) -> int:
        """How many bytes they hold; what an entry shares with a unit counts for both."""
        return sum(entry.findings.size_bytes for entry in self.entries) + (self.units.size_bytes if self.units else 0)

    def to_json(self) -> dict[str, Any]:
        """Return the document that `verify --json` prints."""
        units = self.units
        return {
            "schema": SCHEMA,
            "root": str(self.root),
            "entries": [entry.to_json(self.root) for entry in self.entries],
            "units": None
            if units is None
            else {
                "problems": [problem.to_json(self.root) for problem in units.problems],
                "notes": [note.to_json(self.root) for note in units.notes],
                "files": units.num_files,
            },
            "files": self.num_files,
            "size_bytes": self.size_bytes,
            "secs": round(self.secs, 3),
            "ok": self.ok,
        }


def verify(options: VerifyOptions, on_event: OnEvent = ignore) -> VerifyReport:
    """Read and match every file of a cache, and judge whether this machine loads its entries.

    Args:
        options: What the user asked.
        on_event: Told of each entry as it goes.

    Raises:
        UsageError: A target fits no entry or several.
        CacheError: There is no such cache, or it cannot be listed.
    """
    began = time.perf_counter()
    layout, hashes = _chosen(options)
    machine = this_machine()
    entries = []
    wanted = layout.hashes() if hashes is None else hashes
    with hashing(options.jobs) as hasher:
        for findings in verify_entries(layout, wanted, hasher):
            entries.append(judged(layout, findings, machine, world_size=options.world_size))
            on_event(Event(phase="verify", message=short(findings.hash), done=len(entries), total=len(wanted)))
        units = verify_units(layout, hasher) if hashes is None else None
    return VerifyReport(
        root=layout.root,
        entries=tuple(entries),
        units=units,
        strict=options.strict,
        secs=time.perf_counter() - began,
    )


def judged(
    layout: CacheLayout, findings: EntryFindings, machine: Machine, *, world_size: int | None = None
) -> EntryReport:
    """Return what is to be said of an entry whose files were read.

    Args:
        layout: Where the cache lies.
        findings: What reading them gave.
        machine: Where it is to be loaded.
        world_size: How many ranks it must have; None: as many as its greatest.
    """
    manifests = findings.manifests
    ranks = {manifest.rank for manifest in manifests}
    if findings.key is None:
        damaged = any(problem.path.name == KEY_FILE for problem in findings.problems)
        why = f"its {KEY_FILE} is damaged or missing" if damaged else "it was never finished"
        said = without_key(why=f"{why}. Warm the model again")
    else:
        said = verdict(findings.key, machine, world_size=world_size, ranks=ranks)
    coverage = entry_coverage(manifests)
    if coverage.unknown:
        names = {manifest.name for manifest in manifests}
        coverage = entry_coverage(manifests, plans={name: plan for name in names if (plan := _planned(layout, name))})
    return EntryReport(
        findings=findings,
        verdict=said,
        holes=coverage.holes,
        missing_ranks=_missing_ranks(manifests, world_size),
        unknown_pieces=sum(unknown.count for unknown in coverage.unknown),
    )


def _planned(layout: CacheLayout, name: RankName) -> Sequence[PlannedVariant] | None:
    path = layout.rank_dir(name) / PLAN_FILE
    try:
        return planned(parse_plan(path.read_bytes(), path=path))
    except (OSError, CgtoolError):  # it is among the problems
        return None


def _missing_ranks(manifests: Iterable[Manifest], world_size: int | None) -> tuple[tuple[str, int], ...]:
    there = {(manifest.prefix, manifest.rank) for manifest in manifests}
    expected = max((rank for _, rank in there), default=-1) + 1 if world_size is None else world_size
    prefixes = sorted({prefix for prefix, _ in there})
    return tuple((prefix, rank) for prefix in prefixes for rank in range(expected) if (prefix, rank) not in there)


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


def _existing(layout: CacheLayout, *, named: Path) -> CacheLayout:
    if named.is_dir():
        return layout
    what = "is a file and not a cache folder" if named.exists() else "does not exist"
    raise CacheError(f"{named} {what}. Name the folder of a cache or of one entry.", path=named)


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
