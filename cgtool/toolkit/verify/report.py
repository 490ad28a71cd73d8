"""The report of `verify`: what was found in each entry, what is to be said of it, and the check's yes or no.

Prints nothing. Importable without torch. As JSON::

    {"schema": 1, "root": str, "entries": [entry...], "units": units | null, "load": load | null, "files": int,
     "size_bytes": int, "secs": float, "ok": bool}
    entry   = {"hash": str, "models": [str...], "verdict": {"level": word, "reasons": [str...]},
               "problems": [problem...], "notes": [note...], "holes": [hole...], "missing_ranks": [[prefix, int]...],
               "unknown_pieces": int, "repairs": [repair...], "refused": bool}
    units   = {"problems": [problem...], "notes": [note...], "repairs": [repair...], "files": int}
    load    = {"entries": [{"hash", "rank", "prefix", "opened": int, "problems": [problem...]}...],
               "model": {"hash": str | null, "called": bool, "sentence": str} | null, "compiled": [command...]}
    problem, note = {"path": str below the root, "kind": word, "sentence": str}
    repair  = {"path": str below the root, "action": word, "sentence": str}

The check says no where anything is damaged, missing or refused. A verdict alone makes it say no where an entry was
named (or a bundle, which `import` takes whole or not at all), where no entry is supported here, and under `--strict`: a
cache that many machines fill holds entries of others, and that is no failure of it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cgtool.errors import CacheError, CgtoolError, RefusedError
from cgtool.plan.records import parse_plan
from cgtool.store.layout import ARTIFACTS, KEY_FILE, PLAN_FILE, CacheLayout, RankName
from cgtool.store.machine import Machine
from cgtool.store.records import Manifest
from cgtool.store.trust import TrustPolicy
from cgtool.toolkit.coverage import Hole, Planned, entry_coverage, planned
from cgtool.toolkit.verify.findings import EntryFindings, UnitFindings
from cgtool.toolkit.verify.load import LoadProof
from cgtool.toolkit.verify.native import glibc_of_entry
from cgtool.toolkit.verify.repair import Repair
from cgtool.toolkit.verify.verdict import Level, Verdict, verdict, without_key

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class EntryReport:
    """What was found in one entry.

    Args:
        findings: What reading its files gave.
        verdict: Whether this machine loads it.
        holes: Shapes that a piece lacks.
        missing_ranks: (prefix, rank) of each rank that should be there.
        unknown_pieces: How many compiled pieces are missing that cannot be named.
        repairs: What was done about it before this was found.
        refused: Whether load would not believe it: for who may write to it, or for want of a signature.
    """

    findings: EntryFindings
    verdict: Verdict
    holes: tuple[Hole, ...] = ()
    missing_ranks: tuple[tuple[str, int], ...] = ()
    unknown_pieces: int = 0
    repairs: tuple[Repair, ...] = ()
    refused: bool = False

    @property
    def models(self) -> tuple[str, ...]:
        """What its models are called, each once."""
        return tuple(dict.fromkeys(manifest.model for manifest in self.findings.manifests))

    @property
    def is_whole(self) -> bool:
        """Whether every file is what it was and nothing is missing."""
        return not (self.findings.problems or self.holes or self.missing_ranks or self.unknown_pieces)

    def is_ok(self, levels: Collection[Level]) -> bool:
        """Return whether the check says yes.

        Args:
            levels: The verdicts that will do.
        """
        return self.is_whole and not self.refused and (self.verdict.level in levels or self.is_unfinished)

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
            "repairs": [repair.to_json(root) for repair in self.repairs],
            "refused": self.refused,
        }


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What was found in a cache.

    Args:
        root: The cache's root.
        entries: What was found in each entry.
        units: What was found among the units; None where only entries were asked for.
        unit_repairs: What was done about units before that.
        load: What a process that can compile nothing could open; None where that was not asked for.
        strict: Whether only "optimal" will do.
        secs: How long it took.
    """

    root: Path
    entries: tuple[EntryReport, ...]
    units: UnitFindings | None
    unit_repairs: tuple[Repair, ...] = ()
    load: LoadProof | None = None
    strict: bool = False
    secs: float = field(compare=False)

    @property
    def ok(self) -> bool:
        """Whether the check says yes."""
        units = self.units is None or not self.units.problems
        return not self.failed and units and (self.load is None or self.load.ok)

    @property
    def failed(self) -> tuple[EntryReport, ...]:
        """The entries on account of which the check says no."""
        levels: tuple[Level, ...] = ("optimal",) if self.strict else ("optimal", "loads")
        if not self.strict and self.units is not None and any(entry.verdict.level in levels for entry in self.entries):
            levels = (*levels, "unsupported")
        return tuple(entry for entry in self.entries if not entry.is_ok(levels))

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
                "repairs": [repair.to_json(self.root) for repair in self.unit_repairs],
                "files": units.num_files,
            },
            "load": None if self.load is None else self.load.to_json(),
            "files": self.num_files,
            "size_bytes": self.size_bytes,
            "secs": round(self.secs, 3),
            "ok": self.ok,
        }


def judged(
    layout: CacheLayout,
    findings: EntryFindings,
    machine: Machine,
    *,
    world_size: int | None = None,
    policy: TrustPolicy | None = None,
) -> EntryReport:
    """Return what is to be said of an entry whose files were read.

    Args:
        layout: Where the cache lies.
        findings: What reading them gave.
        machine: Where it is to be loaded.
        world_size: How many ranks it must have; None: as many as its greatest.
        policy: What load asks of it; None asks nothing, for what must be imported first.
    """
    manifests = findings.manifests
    ranks = {manifest.rank for manifest in manifests}
    against: tuple[str, ...] = ()
    if findings.key is None:
        damaged = any(problem.path.name == KEY_FILE for problem in findings.problems)
        why = f"its {KEY_FILE} is damaged or missing" if damaged else "it was never finished"
        said = without_key(why=f"{why}. Warm the model again")
    else:
        needed = glibc_of_entry(_artifacts(layout, manifests))
        said = verdict(findings.key, machine, world_size=world_size, ranks=ranks, glibc_needed=needed)
        against = () if policy is None else tuple(_refusals(layout, manifests, policy))
        if against:
            said = Verdict(level="unsupported", reasons=(*against, *said.reasons))
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
        refused=bool(against),
    )


def _refusals(layout: CacheLayout, manifests: Iterable[Manifest], policy: TrustPolicy) -> Iterator[str]:
    """Yield, each once, why load would not believe what was found."""
    resolved = CacheLayout(root=Path(os.path.realpath(layout.root)))
    told = set()
    for manifest in manifests:
        try:
            policy.read(resolved, manifest.name)
        except RefusedError as error:
            why = f"Load refuses it ({error.reason}): {str(error).rstrip('.')}"
            if why not in told:
                told.add(why)
                yield why
        except CacheError:  # it is among the problems
            continue


def gone(entry: EntryReport, *, repairs: Iterable[Repair]) -> EntryReport:
    """Return the report of an entry that was set aside: there is nothing left to be wrong.

    Args:
        entry: What was found before.
        repairs: What was done.
    """
    findings = EntryFindings(
        hash=entry.findings.hash, key=None, manifests=(), problems=(), notes=(), num_files=0, size_bytes=0
    )
    return EntryReport(findings=findings, verdict=without_key(why="it was set aside"), repairs=tuple(repairs))


def _artifacts(layout: CacheLayout, manifests: Iterable[Manifest]) -> set[str]:
    return {
        f"{folder}/{row.artifact.file}"
        for manifest in manifests
        for folder in [layout.entry_dir(manifest.hash) / ARTIFACTS]
        for row in manifest.rows
    }


def _planned(layout: CacheLayout, name: RankName) -> Planned | None:
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
