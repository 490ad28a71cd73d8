"""`verify`: check that a cache is intact, complete and loadable here; repair it, and test-load it.

Prints nothing. Importable without torch: only the child of `--load` and a `--repair` that compiles need it. The fields
of `VerifyReport` and of the records in it are what `verify --json` prints.

Verification fails if anything is damaged, missing or refused. An unsupported entry fails it only if the entry was named
(or is in a bundle, which `import` takes whole or not at all), if no entry is supported here, or under `--strict`: a
cache that many machines fill holds entries for other machines, which is not a failure.
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
from cgtool.toolkit.places import Place, existing_path, is_abbreviated_hash, open_place
from cgtool.toolkit.selection import resolve_hash
from cgtool.toolkit.verify.checks import EntryCheck, Finding, Findings, check_entries, check_entry, check_units
from cgtool.toolkit.verify.hashing import Hasher
from cgtool.toolkit.verify.load import LoadProof, prove_load
from cgtool.toolkit.verify.repair import Repair, compile_again, repair_entry, repair_units
from cgtool.toolkit.verify.verdict import Level, Verdict, glibc_of_entry, verdict

SCHEMA = 2
#: Each repair can reveal further damage: a record, then an artifact, then an orphan that its replacement leaves.
_ROUNDS = 5


class EntryReport(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The result for one entry."""

    hash: str
    models: tuple[str, ...]
    verdict: Verdict
    #: What is wrong with its files; empty for an entry that was set aside.
    problems: tuple[Finding, ...]
    #: Harmless findings.
    notes: tuple[Finding, ...]
    holes: tuple[Hole, ...] = ()
    #: (prefix, rank) of each missing rank.
    missing_ranks: tuple[tuple[str, int], ...] = ()
    #: How many compiled pieces are missing but cannot be named.
    unknown_pieces: int = 0
    #: The repairs made before this result was found.
    repairs: tuple[Repair, ...] = ()
    #: Whether load would refuse it, because of who can write to it or because a signature is missing.
    refused: bool = False
    #: How many of its files were read.
    files: int
    size_bytes: int

    @property
    def is_unfinished(self) -> bool:
        """Whether nothing of it is published: a warm has started it, or it was set aside."""
        return not self.problems and not self.models

    def is_ok(self, levels: Collection[Level]) -> bool:
        """Return whether the entry passes, given the acceptable verdicts."""
        wrong = self.problems or self.holes or self.missing_ranks or self.unknown_pieces or self.refused
        return not wrong and (self.verdict.level in levels or self.is_unfinished)


class UnitsReport(Record, frozen=True, kw_only=True):
    """The result for the units, and the repairs made before it was found."""

    problems: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    repairs: tuple[Repair, ...]
    files: int


class VerifyReport(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The result for a cache."""

    schema: int = SCHEMA
    #: The cache's root, or the bundle.
    root: str
    entries: tuple[EntryReport, ...]
    #: None if only entries were checked.
    units: UnitsReport | None
    #: The result of opening artifacts in a process that cannot compile; None unless requested.
    load: LoadProof | None
    files: int
    #: How many bytes were checked; a file that an entry shares with a unit counts for both.
    size_bytes: int
    secs: float
    #: How many entries failed.
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
    """Check every file of a cache against its digest, and judge whether this machine loads the entries.

    Args:
        targets: Abbreviated hashes, or one place in the grammar of `cgtool.toolkit.places`. Empty: the whole cache.
        cache_dir: The cache's root; None means the configured root or the user's default.
        names_cache: Whether the user named that root with an option.
        strict: Whether an entry that loads but is not optimal fails.
        world_size: How many ranks each entry must have; None means all up to its highest rank.
        jobs: How many files are read at a time; None means one for each core.
        load: Whether to open every artifact in a process that cannot compile.
        repair: Whether to repair what is found wrong.
        model: A model to load and call once in that process; None opens artifacts only.
        rank: The rank to load it as; None means the one in the environment.
        on_event: Called after each entry.

    Raises:
        UsageError: A target matches no entry or several, or a bundle is to be loaded or repaired.
        RefusedError: A bundle is incomplete, or does not match its index.
        CacheError: The cache does not exist, is not a cache or cannot be listed; with `repair`, cannot be written.
    """
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        place, hashes = _select(stack, targets, cache_dir, names_cache=names_cache)
        layout, is_bundle = place.layout, place.is_copy and not is_remote(targets[0])
        if place.is_copy and (load or repair):
            how = "Import it first (`cgtool import`)" if is_bundle else "Pull it first (`cgtool pull`)"
            raise UsageError(f"{place.text} cannot be loaded or repaired in place. {how}.", path=place.text)
        verification = _Verification(
            layout,
            jobs=jobs,
            world_size=world_size,
            with_units=not is_bundle,
            # The trust policy applies once the entries are imported or pulled.
            policy=None if place.is_copy else TrustPolicy.of(),
            on_event=on_event,
        )
        verification.check(hashes)
        if repair:
            verification.repair()
        proof = None
        if load or model is not None:
            # With a model and no targets, only the entry that serves the model is opened.
            names = verification.loadable() if targets or model is None else []
            on_event(Event(phase="start", message="opening artifacts in a process that cannot compile"))
            proof = prove_load(layout.root, names, model=model, rank=rank)
    entries, units = tuple(verification.entries), verification.units
    failed = _failed(entries, strict=strict, is_cache=units is not None)
    return VerifyReport(
        root=place.text if place.is_copy else str(layout.root),
        entries=entries,
        units=units,
        load=proof,
        files=sum(entry.files for entry in entries) + (units.files if units else 0),
        size_bytes=sum(entry.size_bytes for entry in entries) + verification.unit_bytes,
        secs=round(time.perf_counter() - began, 3),
        failed=failed,
        ok=not failed and not (units and units.problems) and (proof is None or proof.ok),
    )


def _failed(entries: Sequence[EntryReport], *, strict: bool, is_cache: bool) -> int:
    """Count the entries that fail; in a cache, entries for other machines do not, if any is supported here."""
    levels: tuple[Level, ...] = ("optimal",) if strict else ("optimal", "loads")
    if not strict and is_cache and any(entry.verdict.level in levels for entry in entries):
        levels = (*levels, "unsupported")
    return sum(not entry.is_ok(levels) for entry in entries)


class _Verification:
    """One verification of a cache: the checks and results of its entries, and the result of its units."""

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
        """Check some entries; None means all of them, and the units."""
        wanted = self.layout.hashes() if hashes is None else hashes
        if not wanted:
            check_known(self.layout.root)
            check_own(self.layout.root)
        with gc_paused(), Hasher(self._jobs) as hasher:
            for found in check_entries(self.layout, wanted, hasher):
                self.checks.append(found)
                self.entries.append(self._report(found))
                done = len(self.entries)
                self._on_event(Event(phase="verify", message=short(found.name), done=done, total=len(wanted)))
            if hashes is None and self._with_units:
                self._on_event(Event(phase="verify", message="units"))
                self._set_units(check_units(self.layout, hasher))

    def repair(self) -> None:
        """Repair what was found, and check again."""
        repaired = [self._repair_entry(*pair) for pair in zip(self.checks, self.entries, strict=True)]
        self.checks = [check for check, _ in repaired]
        self.entries = [entry for _, entry in repaired if entry.repairs or self.layout.entry_dir(entry.hash).exists()]
        if self.units is not None and self.units.problems:
            with Hasher(self._jobs) as hasher:  # repairing the entries may have repaired units too
                repairs = tuple(repair_units(self.layout, check_units(self.layout, hasher)))
            with Hasher(self._jobs) as hasher:
                self._set_units(check_units(self.layout, hasher), repairs)

    def loadable(self) -> list[RankName]:
        """Return the ranks of the intact entries that this machine supports."""
        fit = {entry.hash for entry in self.entries if entry.verdict.level != "unsupported" and not entry.problems}
        return [manifest.name for found in self.checks if found.name in fit for manifest in found.manifests]

    def _set_units(self, found: Findings, repairs: tuple[Repair, ...] = ()) -> None:
        problems, notes = tuple(found.problems), tuple(found.notes)
        self.units = UnitsReport(problems=problems, notes=notes, repairs=repairs, files=found.files)
        self.unit_bytes = found.size_bytes

    def _report(self, found: EntryCheck) -> EntryReport:
        """Judge an entry whose files were read."""
        manifests = found.manifests
        refusals: tuple[str, ...] = ()
        if found.key is None:
            damaged = any(problem.path.endswith(f"/{KEY_FILE}") for problem in found.problems)
            why = f"its {KEY_FILE} is damaged or missing" if damaged else "it was never finished"
            judged = Verdict(level="unsupported", reasons=(f"Its factors are unknown: {why}. Warm the model again",))
        else:
            ranks = {manifest.rank for manifest in manifests}
            files = {row.artifact.file for manifest in manifests for row in manifest.rows}
            needed = glibc_of_entry(f"{found.folder}/{ARTIFACTS}/{file}" for file in files)
            judged = verdict(found.key, self._machine, world_size=self._world_size, ranks=ranks, glibc_needed=needed)
            refusals = tuple(dict.fromkeys(self._refusals(manifests)))
            if refusals:
                judged = Verdict(level="unsupported", reasons=(*refusals, *judged.reasons))
        coverage = entry_coverage(manifests, plans=found.plans)
        there = {(manifest.prefix, manifest.rank) for manifest in manifests}
        highest = max((rank for _, rank in there), default=-1)
        expected = range(highest + 1 if self._world_size is None else self._world_size)
        missing = [(prefix, rank) for prefix in sorted({prefix for prefix, _ in there}) for rank in expected]
        return EntryReport(
            hash=found.name,
            models=tuple(dict.fromkeys(manifest.model for manifest in manifests)),
            verdict=judged,
            problems=tuple(found.problems),
            notes=tuple(found.notes),
            holes=coverage.holes,
            missing_ranks=tuple(place for place in missing if place not in there),
            unknown_pieces=sum(unknown.count for unknown in coverage.unknown),
            refused=bool(refusals),
            files=found.files,
            size_bytes=found.size_bytes,
        )

    def _refusals(self, manifests: Iterable[Manifest]) -> Iterator[str]:
        """Yield why load would refuse these manifests."""
        if self._policy is None:
            return
        resolved = CacheLayout(root=Path(os.path.realpath(self.layout.root)))
        for manifest in manifests:
            try:
                self._policy.read(resolved, manifest.name)
            except RefusedError as error:
                yield f"Load refuses it ({error.reason}): {str(error).rstrip('.')}"
            except CacheError:  # reported among the problems
                continue

    def _repair_entry(self, found: EntryCheck, entry: EntryReport) -> tuple[EntryCheck, EntryReport]:
        """Repair an entry in rounds, because a repair can reveal further damage, and return its new state."""
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
                found.problems.clear()  # nothing is left that could be damaged
            entry = self._report(found)
            if is_gone:
                gone = Verdict(level="unsupported", reasons=("Its factors are unknown: it was set aside",))
                entry = structs.replace(entry, verdict=gone)
            if is_gone or not any(repair.is_done for repair in repairs):
                break
        return found, structs.replace(entry, repairs=tuple(done))


def _select(
    stack: contextlib.ExitStack, targets: Sequence[str], cache_dir: Path | None, *, names_cache: bool
) -> tuple[Place, list[str] | None]:
    """Return the cache, and the hashes that the targets name; None means all entries and the units."""
    places = [target for target in targets if not is_abbreviated_hash(target)]
    if places and (len(targets) > 1 or names_cache):
        msg = "Give hashes, or one cache, entry, bundle or store without --cache-dir."
        raise UsageError(msg, actual=list(targets))
    if places:
        if ":" not in places[0] and existing_path(places[0]) is None:
            raise _missing(places[0])
        place = stack.enter_context(open_place(places[0], artifacts=True))
        return place, None if place.hash is None else [place.hash]
    layout = CacheLayout.at(cache_dir)
    if not layout.root.is_dir() and (cache_dir is not None or layout.root.exists()):
        raise _missing(layout.root)
    hashes = layout.hashes()
    chosen = [resolve_hash(layout.root, target, hashes) for target in dict.fromkeys(targets)]
    return Place(str(layout.root), layout), chosen or None


def _missing(path: Path | str) -> CacheError:
    return CacheError(f"{path} does not exist. Name the folder of a cache or of one entry, or a bundle.", path=path)
