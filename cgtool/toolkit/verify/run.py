"""`verify`: whether everything in a cache is what it was, whole, and fit for this machine; mending and proving it.

Prints nothing. Importable without torch: only the child of `--load`, and what `--repair` compiles, need it. The fields
of `VerifyReport` and of the records below it are what `verify --json` prints.

The check says no where anything is damaged, missing or refused. A verdict alone makes it say no where an entry was
named (or a bundle, which `import` takes whole or not at all), where no entry is supported here, and under `--strict`: a
cache that many machines fill holds entries of others, and that is no failure of it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from msgspec import structs

from cgtool.errors import CacheError, RefusedError, UsageError
from cgtool.events import Event, OnEvent, ignore
from cgtool.host import gc_paused
from cgtool.plan.grammar import Record
from cgtool.remote.stores import is_remote
from cgtool.store.files import os_errors_as_cache_errors
from cgtool.store.layout import ARTIFACTS, KEY_FILE, CacheLayout, RankName, short
from cgtool.store.machine import this_machine
from cgtool.store.records import Manifest
from cgtool.store.trust import TrustPolicy
from cgtool.toolkit.coverage import Hole, entry_coverage
from cgtool.toolkit.foreign.detect import check_known, check_own
from cgtool.toolkit.model_choice import ModelChoice
from cgtool.toolkit.places import Place, is_beginning, opened_place, path_of
from cgtool.toolkit.selection import hash_named
from cgtool.toolkit.verify.checks import EntryCheck, Finding, Findings, check_entries, check_entry, check_units
from cgtool.toolkit.verify.hashing import Hasher
from cgtool.toolkit.verify.load import LoadProof, prove_load
from cgtool.toolkit.verify.repair import Repair, compile_again, repair_entry, repair_units
from cgtool.toolkit.verify.verdict import Level, Verdict, glibc_of_entry, verdict

SCHEMA = 2
#: What is set right shows what else is wrong: a spelling, then an artifact, then an orphan that its successor leaves.
_ROUNDS = 5


class EntryReport(Record, frozen=True, kw_only=True, omit_defaults=False):
    """What is to be said of one entry."""

    hash: str
    models: tuple[str, ...]
    verdict: Verdict
    #: What is wrong with its files; nothing of an entry that was set aside.
    problems: tuple[Finding, ...]
    #: What is in nobody's way.
    notes: tuple[Finding, ...]
    holes: tuple[Hole, ...] = ()
    #: (prefix, rank) of each rank that should be there.
    missing_ranks: tuple[tuple[str, int], ...] = ()
    #: How many compiled pieces are missing that cannot be named.
    unknown_pieces: int = 0
    #: What was done about it before this was found.
    repairs: tuple[Repair, ...] = ()
    #: Whether load would not believe it: for who may write to it, or for want of a signature.
    refused: bool = False
    #: How many of its files were read.
    files: int
    size_bytes: int

    @property
    def is_unfinished(self) -> bool:
        """Whether nothing of it is published: a warm has begun it, or it was set aside."""
        return not self.problems and not self.models

    def is_ok(self, levels: Collection[Level]) -> bool:
        """Return whether the check says yes, where these verdicts will do."""
        wrong = self.problems or self.holes or self.missing_ranks or self.unknown_pieces or self.refused
        return not wrong and (self.verdict.level in levels or self.is_unfinished)


class UnitsReport(Record, frozen=True, kw_only=True):
    """What was found among the units, and what was done about them before that."""

    problems: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    repairs: tuple[Repair, ...]
    files: int


class VerifyReport(Record, frozen=True, kw_only=True, omit_defaults=False):
    """What was found in a cache."""

    schema: int = SCHEMA
    #: The cache's root, or the bundle.
    root: str
    entries: tuple[EntryReport, ...]
    #: What was found among the units; None where only entries were asked for.
    units: UnitsReport | None
    #: What a process that can compile nothing could open; None where that was not asked for.
    load: LoadProof | None
    files: int
    #: How many bytes they hold; what an entry shares with a unit counts for both.
    size_bytes: int
    secs: float
    #: On account of how many entries the check says no.
    failed: int
    ok: bool


@os_errors_as_cache_errors()
def verify(
    targets: Sequence[str] = (),
    *,
    cache_dir: Path | None = None,
    names_cache: bool = False,
    strict: bool = False,
    world_size: int | None = None,
    jobs: int | None = None,
    load: bool = False,
    repair: bool = False,
    model: ModelChoice | None = None,
    rank: int | None = None,
    on_event: OnEvent = ignore,
) -> VerifyReport:
    """Read and match every file of a cache, and judge whether this machine loads its entries.

    Args:
        targets: Beginnings of hashes, or one place as `cgtool.toolkit.places` has them. Empty: the whole cache.
        cache_dir: The cache's root; None means the user's own.
        names_cache: Whether the user named that root with an option.
        strict: Whether an entry that loads and is not optimal fails the check.
        world_size: How many ranks each entry must have; None: as many as its greatest.
        jobs: How many files are read at a time; None: as many as there are cores.
        load: Whether to open every artifact in a process that can compile nothing.
        repair: Whether to mend what is found wrong.
        model: A model to load and call once in that process; None: artifacts alone are opened.
        rank: The rank to load it as; None takes the environment's word.
        on_event: Told of each entry as it goes.

    Raises:
        UsageError: A target fits no entry or several; or a bundle is to be loaded or mended.
        RefusedError: A bundle is not whole, or not what its index says.
        CacheError: There is no such cache, it is none, or it cannot be listed; with `repair`, or be written.
    """
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        place, hashes = _chosen(stack, targets, cache_dir, names_cache=names_cache)
        layout, is_bundle = place.layout, place.is_copy and not is_remote(targets[0])
        if place.is_copy and (load or repair):
            how = "Import it first (`cgtool import`)" if is_bundle else "Pull it first (`cgtool pull`)"
            raise UsageError(f"{place.text} is only looked at. {how}, then load or mend it.", path=place.text)
        found = _Verification(
            layout,
            jobs=jobs,
            world_size=world_size,
            with_units=not is_bundle,
            # Load asks nothing of what must be imported or pulled first.
            policy=None if place.is_copy else TrustPolicy.of(),
            on_event=on_event,
        )
        found.check(hashes)
        if repair:
            found.repair()
        proof = None
        if load or model is not None:
            # Of a model alone, the entry that serves it is opened.
            names = found.loadable() if targets or model is None else []
            on_event(Event(phase="start", message="opening artifacts in a process that can compile nothing"))
            proof = prove_load(layout.root, names, model=model, rank=rank)
    entries, units = tuple(found.entries), found.units
    failed = _failed(entries, strict=strict, is_cache=units is not None)
    return VerifyReport(
        root=place.text if place.is_copy else str(layout.root),
        entries=entries,
        units=units,
        load=proof,
        files=sum(one.files for one in entries) + (units.files if units else 0),
        size_bytes=sum(one.size_bytes for one in entries) + found.unit_bytes,
        secs=round(time.perf_counter() - began, 3),
        failed=failed,
        ok=not failed and not (units and units.problems) and (proof is None or proof.ok),
    )


def _failed(entries: Sequence[EntryReport], *, strict: bool, is_cache: bool) -> int:
    """Count the entries on account of which the check says no; those of other machines are no failure of a cache."""
    levels: tuple[Level, ...] = ("optimal",) if strict else ("optimal", "loads")
    if not strict and is_cache and any(entry.verdict.level in levels for entry in entries):
        levels = (*levels, "unsupported")
    return sum(not entry.is_ok(levels) for entry in entries)


class _Verification:
    """One look at a cache: what it found in each entry (`checks`, `entries`) and among the units."""

    def __init__(
        self,
        layout: CacheLayout,
        *,
        jobs: int | None,
        world_size: int | None,
        with_units: bool,
        policy: TrustPolicy | None,
        on_event: OnEvent,
    ) -> None:
        self.layout = layout
        self.checks: list[EntryCheck] = []
        self.entries: list[EntryReport] = []
        self.units: UnitsReport | None = None
        self.unit_bytes = 0
        self._jobs = jobs
        self._world_size = world_size
        self._with_units = with_units
        self._on_event = on_event
        self._machine = this_machine()
        self._policy = policy

    def check(self, hashes: Sequence[str] | None) -> None:
        """Look at some entries; with None at all of them, and at the units."""
        wanted = self.layout.hashes() if hashes is None else hashes
        if not wanted:
            check_known(self.layout.root)
            check_own(self.layout.root)
        with gc_paused(), Hasher(self._jobs) as hasher:
            for found in check_entries(self.layout, wanted, hasher):
                self.checks.append(found)
                self.entries.append(self._judged(found))
                done = len(self.entries)
                self._on_event(Event(phase="verify", message=short(found.name), done=done, total=len(wanted)))
            if hashes is None and self._with_units:
                self._on_event(Event(phase="verify", message="units"))
                self._take_units(check_units(self.layout, hasher))

    def repair(self) -> None:
        """Mend what was found, and look again."""
        mended = [self._repaired(*pair) for pair in zip(self.checks, self.entries, strict=True)]
        self.checks = [check for check, _ in mended]
        self.entries = [one for _, one in mended if one.repairs or self.layout.entry_dir(one.hash).exists()]
        if self.units is not None and self.units.problems:
            with Hasher(self._jobs) as hasher:  # mending the entries may have mended units, too
                repairs = tuple(repair_units(self.layout, check_units(self.layout, hasher)))
            with Hasher(self._jobs) as hasher:
                self._take_units(check_units(self.layout, hasher), repairs)

    def loadable(self) -> list[RankName]:
        """Return the ranks of the entries that this machine supports, and in which nothing is wrong."""
        fit = {one.hash for one in self.entries if one.verdict.level != "unsupported" and not one.problems}
        return [manifest.name for found in self.checks if found.name in fit for manifest in found.manifests]

    def _take_units(self, found: Findings, repairs: tuple[Repair, ...] = ()) -> None:
        problems, notes = tuple(found.problems), tuple(found.notes)
        self.units = UnitsReport(problems=problems, notes=notes, repairs=repairs, files=found.files)
        self.unit_bytes = found.size_bytes

    def _judged(self, found: EntryCheck) -> EntryReport:
        """Return what is to be said of an entry whose files were read."""
        manifests = found.manifests
        against: tuple[str, ...] = ()
        if found.key is None:
            damaged = any(problem.path.endswith(f"/{KEY_FILE}") for problem in found.problems)
            why = f"its {KEY_FILE} is damaged or missing" if damaged else "it was never finished"
            said = Verdict(level="unsupported", reasons=(f"Its factors are not known: {why}. Warm the model again",))
        else:
            ranks = {manifest.rank for manifest in manifests}
            files = {row.artifact.file for manifest in manifests for row in manifest.rows}
            needed = glibc_of_entry(f"{found.folder}/{ARTIFACTS}/{file}" for file in files)
            said = verdict(found.key, self._machine, world_size=self._world_size, ranks=ranks, glibc_needed=needed)
            against = tuple(dict.fromkeys(self._refusals(manifests)))
            if against:
                said = Verdict(level="unsupported", reasons=(*against, *said.reasons))
        coverage = entry_coverage(manifests, plans=found.plans)
        there = {(manifest.prefix, manifest.rank) for manifest in manifests}
        greatest = max((rank for _, rank in there), default=-1)
        expected = range(greatest + 1 if self._world_size is None else self._world_size)
        missing = [(prefix, rank) for prefix in sorted({prefix for prefix, _ in there}) for rank in expected]
        return EntryReport(
            hash=found.name,
            models=tuple(dict.fromkeys(manifest.model for manifest in manifests)),
            verdict=said,
            problems=tuple(found.problems),
            notes=tuple(found.notes),
            holes=coverage.holes,
            missing_ranks=tuple(place for place in missing if place not in there),
            unknown_pieces=sum(unknown.count for unknown in coverage.unknown),
            refused=bool(against),
            files=found.files,
            size_bytes=found.size_bytes,
        )

    def _refusals(self, manifests: Iterable[Manifest]) -> Iterator[str]:
        """Yield why load would not believe what was found."""
        if self._policy is None:
            return
        resolved = CacheLayout(root=Path(os.path.realpath(self.layout.root)))
        for manifest in manifests:
            try:
                self._policy.read(resolved, manifest.name)
            except RefusedError as error:
                yield f"Load refuses it ({error.reason}): {str(error).rstrip('.')}"
            except CacheError:  # it is among the problems
                continue

    def _repaired(self, found: EntryCheck, entry: EntryReport) -> tuple[EntryCheck, EntryReport]:
        """Mend an entry in rounds, since what one round mends shows what is left, and return how it is then."""
        layout, done = self.layout, list[Repair]()
        for _ in range(_ROUNDS):
            if not (found.problems or entry.holes):
                break
            repairs = list(repair_entry(layout, found))
            if not any(repair.is_done for repair in repairs):
                repairs += compile_again(layout, found, entry.holes, entry.verdict, self._on_event)
            done += [repair for repair in repairs if repair not in done]
            found = check_entry(layout, found.name)
            is_gone = not layout.entry_dir(found.name).exists()
            if is_gone:
                found.problems.clear()  # there is nothing left to be wrong
            entry = self._judged(found)
            if is_gone:
                said = Verdict(level="unsupported", reasons=("Its factors are not known: it was set aside",))
                entry = structs.replace(entry, verdict=said)
            if is_gone or not any(repair.is_done for repair in repairs):
                break
        return found, structs.replace(entry, repairs=tuple(done))


def _chosen(
    stack: contextlib.ExitStack, targets: Sequence[str], cache_dir: Path | None, *, names_cache: bool
) -> tuple[Place, list[str] | None]:
    """Return the cache, and which of its entries were asked for; None for all, and the units."""
    places = [target for target in targets if not is_beginning(target)]
    if places and (len(targets) > 1 or names_cache):
        msg = "Give beginnings of hashes, or one cache, entry, bundle or store and no --cache-dir."
        raise UsageError(msg, actual=list(targets))
    if places:
        if ":" not in places[0] and path_of(places[0]) is None:
            raise _missing(places[0])
        place = stack.enter_context(opened_place(places[0], artifacts=True))
        return place, None if place.hash is None else [place.hash]
    layout = CacheLayout.at(cache_dir)
    if not layout.root.is_dir() and (cache_dir is not None or layout.root.exists()):
        raise _missing(layout.root)
    hashes = layout.hashes()
    chosen = [hash_named(layout.root, target, hashes) for target in dict.fromkeys(targets)]
    return Place(str(layout.root), layout), chosen or None


def _missing(path: Path | str) -> CacheError:
    return CacheError(f"{path} does not exist. Name the folder of a cache or of one entry, or a bundle.", path=path)
