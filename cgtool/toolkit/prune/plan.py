"""What a prune is asked for, what it plans and what comes of it. Must not import torch.

A deletion is a plan, which changes nothing and says what comes free, and then its `execute`. As JSON, a plan is::

    {"schema": 1, "system": str, "root": str, "rules": rules, "entries": [entry...], "files": [file...],
     "kept": [kept...], "misses": [{"model", "hash"}...], "size_bytes": int | null, "frees_bytes": int,
     "notes": [str...], "outcome": outcome | null}

and the other records are their fields.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import structs

from cgtool.events import OnEvent, ignore
from cgtool.plan.grammar import Record
from cgtool.toolkit.prune.removal import Failed, Ledger

SCHEMA = 1

HOUR_SECS, DAY_SECS = 3600.0, 86400.0

_Why = Literal["in_use", "keep_last", "cannot_tell", "newer_schema", "used_meanwhile", "shared"]
#: What keeps an entry: a stable word for programs, and a sentence for people.
Keeper = tuple[_Why, str]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Which entries and leftovers go. Rules add up; `keep_last` protects from all but `entries`.

    Args:
        older_than_secs: Entries not used for longer, in seconds; an unused entry's age counts from its creation.
        max_bytes: Entries used longest ago, until the cache takes no more than this on the disk.
        stale: Entries that cannot serve on this machine any more.
        orphans: What nothing names any more, and what dead processes left.
        units: With orphans: compiled units that no entry shares, too.
        keep_last: How many entries of each model stay, those used last; alone, it has the others go. One model is what
            the same cheap facts lead to, whatever it is called.
        entries: Hashes of entries.
        keep_units: Leave the units of removed entries, from which a later warm links what it needs.
    """

    older_than_secs: float | None = None
    max_bytes: int | None = None
    stale: bool = False
    orphans: bool = False
    units: bool = False
    keep_last: int | None = None
    entries: tuple[str, ...] = ()
    keep_units: bool = False

    @property
    def for_entries(self) -> bool:
        """Whether any rule may choose an entry."""
        wanted = self.older_than_secs is not None or self.max_bytes is not None or self.keep_last is not None
        return wanted or self.stale or bool(self.entries)

    @property
    def for_leftovers(self) -> bool:
        """Whether leftovers go: asked for, or nothing else is."""
        return self.orphans or self.units or not self.for_entries


class Reason(Record, frozen=True, kw_only=True):
    """The rule that chooses an entry, and a sentence for people."""

    rule: Literal["older_than", "max_size", "stale", "keep_last", "entry"]
    sentence: str


_TOO_LARGE = Reason(rule="max_size", sentence="the cache is too large, and it was used longest ago")


class PlannedEntry(Record, frozen=True, kw_only=True, omit_defaults=False):
    """An entry that goes.

    Args:
        hash: Its hash; what another system calls it.
        model: What people call the model; "" where no manifest can be read.
        ranks: Its ranks and prefixes.
        created: When it was made, seconds since the epoch; None where that is not known.
        last_used: When it was loaded last, seconds since the epoch; None for never.
        size_bytes: What its files take.
        frees_bytes: What comes free on the disk, after those that go before it.
        units: The keys of the units that go with it: no other entry shares them.
        reasons: Why it goes.
        instead: Other entries that the same cheap facts lead to: they may serve instead.
    """

    hash: str
    model: str
    ranks: tuple[dict[str, int | str], ...] = ()
    created: float | None
    last_used: float | None
    size_bytes: int = 0
    frees_bytes: int = 0
    units: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = ()
    instead: tuple[str, ...] = ()


class PlannedFile(Record, frozen=True, kw_only=True):
    """A leftover that goes: a file, or a folder with all that is in it.

    Args:
        path: Below the cache folder `torch_compile_cache`, with "/" between names.
        kind: Which, as the table of `cgtool.toolkit.prune.leftovers` has them.
        frees_bytes: What comes free on the disk.
    """

    path: str
    kind: str
    frees_bytes: int


class Kept(Record, frozen=True, kw_only=True):
    """An entry that a rule chooses and that stays: a stable word for programs, and a sentence for people."""

    hash: str
    model: str
    why: _Why
    sentence: str


class Outcome(Record, frozen=True, kw_only=True):
    """What came of a plan.

    Args:
        removed: The entries that are gone, by hash.
        removed_files: How many leftovers are gone.
        freed_bytes: What came free on the disk.
        kept: Entries of the plan that stay: they came into use meanwhile.
        failed: What could not be removed.
    """

    removed: tuple[str, ...]
    removed_files: int
    freed_bytes: int
    kept: tuple[Kept, ...]
    failed: tuple[Failed, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a prune would do.

    Args:
        root: The cache root.
        rules: What was asked for.
        entries: The entries that go, in the order in which they go.
        files: The leftovers that go.
        kept: Entries that a rule chose and that stay.
        size_bytes: What the cache takes on the disk before; None where no rule asked for it.
        notes: What else the user should know.
        system: Which system wrote the cache.
        carry_out: Does it, for `execute`.
        where: What people are told of its place, where that is a store.
    """

    root: Path
    rules: Rules
    entries: tuple[PlannedEntry, ...]
    files: tuple[PlannedFile, ...]
    kept: tuple[Kept, ...]
    size_bytes: int | None
    notes: tuple[str, ...]
    system: str = "cgtool"
    carry_out: Callable[[Plan, OnEvent], Outcome]
    where: str | None = None

    @property
    def frees_bytes(self) -> int:
        """What comes free on the disk in all."""
        return sum(entry.frees_bytes for entry in self.entries) + sum(file.frees_bytes for file in self.files)

    @property
    def is_empty(self) -> bool:
        """Whether nothing goes."""
        return not self.entries and not self.files

    def execute(self, on_event: OnEvent = ignore) -> Outcome:
        """Remove what the plan names, as far as that is still so; what cannot be removed is told in the outcome."""
        return self.carry_out(self, on_event)

    def to_json(self, outcome: Outcome | None = None) -> dict[str, Any]:
        """Return the document that `prune --json` prints."""
        document = {
            "schema": SCHEMA,
            "system": self.system,
            "root": self.where or str(self.root),
            "rules": {**msgspec.to_builtins(self.rules), "orphans": self.rules.for_leftovers},
            "entries": self.entries,
            "files": self.files,
            "kept": self.kept,
            "misses": [{"model": entry.model, "hash": entry.hash} for entry in self.entries if not entry.instead],
            "size_bytes": self.size_bytes,
            "frees_bytes": self.frees_bytes,
            "notes": self.notes,
            "outcome": outcome,
        }
        return dict(msgspec.to_builtins(document))


class Planner(ABC):
    """Chooses entries by the rules that every cache knows, and carries the plan out."""

    def __init__(self, rules: Rules, now: float) -> None:
        self.rules = rules
        self.now = now
        self.ledger = Ledger()
        self.chosen: dict[str, PlannedEntry] = {}
        self.kept: list[Kept] = []
        self.notes: list[str] = []

    @abstractmethod
    def is_named(self, entry: PlannedEntry) -> bool:
        """Return whether the user named an entry."""

    @abstractmethod
    def keeper(self, entry: PlannedEntry, *, named: bool) -> Keeper | None:
        """Return what keeps an entry though a rule chooses it, and why in a sentence; None where nothing does."""

    @abstractmethod
    def take(self, entry: PlannedEntry) -> PlannedEntry:
        """Count an entry's files as gone, and return it with what it takes and frees."""

    @abstractmethod
    def carry_out(self, plan: Plan, on_event: OnEvent) -> Outcome:
        """Remove what a plan names, as far as that is still so."""

    def frees(self, entry: PlannedEntry) -> bool:  # noqa: ARG002 - for those who can tell
        """Return whether any byte comes free with an entry."""
        return True

    def last_seen(self, entry: PlannedEntry) -> float:
        """Return when an entry was used last, or made where it never was; now where that is not known, or to come."""
        known = entry.created if entry.last_used is None else entry.last_used
        return self.now if known is None else min(known, self.now)

    def reasons(self, entry: PlannedEntry) -> Iterator[Reason]:
        """Yield why an entry goes, whatever the others do."""
        if self.is_named(entry):
            yield Reason(rule="entry", sentence="it was named")
        age = self.now - self.last_seen(entry)
        if self.rules.older_than_secs is not None and age > self.rules.older_than_secs:
            how = "made and never used" if entry.last_used is None else "used last"
            yield Reason(rule="older_than", sentence=f"it was {how} {_ago(age)}")

    def choose(self, entries: Iterable[PlannedEntry]) -> None:
        """Plan each entry that a rule chooses and nothing keeps, the one used longest ago first."""
        for entry in self._by_use(entries):
            reasons = tuple(self.reasons(entry))
            if reasons:
                self._plan(entry, reasons)

    def make_room(self, entries: Iterable[PlannedEntry], size: int, most: int) -> None:
        """Plan the entries used longest ago until what stays of `size` bytes is no more than `most`."""
        stay = {kept.hash for kept in self.kept if kept.why != "cannot_tell"} | self.chosen.keys()
        for entry in self._by_use(entries):
            if size - self.ledger.freed_bytes <= most:
                return
            if entry.hash not in stay and self.frees(entry):
                self._plan(entry, (_TOO_LARGE,))
        left = size - self.ledger.freed_bytes
        if left > most:
            self.notes.append(
                f"The cache will still take {left} bytes, more than the {most} asked for: the rest is in use, is kept "
                "by a rule, or has other names on this disk."
            )

    def keep(self, entry: PlannedEntry, why: _Why, sentence: str) -> None:
        """List an entry that stays."""
        self.kept.append(Kept(hash=entry.hash, model=entry.model, why=why, sentence=sentence))

    def _by_use(self, entries: Iterable[PlannedEntry]) -> list[PlannedEntry]:
        return sorted(entries, key=lambda entry: (self.last_seen(entry), entry.hash))

    def _plan(self, entry: PlannedEntry, reasons: tuple[Reason, ...]) -> None:
        kept = self.keeper(entry, named=any(reason.rule == "entry" for reason in reasons))
        if kept is not None:
            self.keep(entry, *kept)
        else:
            self.chosen[entry.hash] = structs.replace(self.take(entry), reasons=reasons)


def _ago(secs: float) -> str:
    units = ((DAY_SECS, "day"), (HOUR_SECS, "hour"), (60.0, "minute"))
    length, unit = next((found for found in units if secs >= found[0]), units[-1])
    count = int(secs // length)
    return f"{count} {unit}{'' if count == 1 else 's'} ago"
