"""What a prune is asked for, what it plans and what comes of it; the plans' base. Must not import torch.

A deletion is a plan, which changes nothing and says what comes free, and then its `execute`. As JSON, a plan is::

    {"schema": 1, "system": str, "root": str, "rules": rules, "entries": [entry...], "files": [file...],
     "kept": [kept...], "misses": [{"model", "hash"}...], "size_bytes": int | null, "frees_bytes": int,
     "notes": [str...], "outcome": outcome | null}

and the other records are their fields.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from cgtool.events import OnEvent, ignore
from cgtool.plan.grammar import Record
from cgtool.store.layout import RankName
from cgtool.store.walk import Status

SCHEMA = 1


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


#: What `max_bytes` says of an entry.
TOO_LARGE = Reason(rule="max_size", sentence="the cache is too large, and it was used longest ago")


@dataclass(frozen=True, kw_only=True)
class PlannedEntry:
    """An entry that goes.

    Args:
        hash: Its hash; what another system calls it.
        model: What people call the model; "" where no manifest can be read.
        created: When it was made, seconds since the epoch; None where that is not known.
        last_used: When it was loaded last, seconds since the epoch; None for never.
        size_bytes: What its files take.
        frees_bytes: What comes free on the disk, after those that go before it.
        reasons: Why it goes.
        names: Its ranks and prefixes.
        units: The keys of the units that go with it: no other entry shares them.
        lookup: The digests of cheap facts that lead to it.
        instead: Other entries that the same cheap facts lead to: they may serve instead.
        path: Where it lies, for an entry of another system; "" for cgtool's own.
        manifests: What tells whether a manifest was written since, by `RankName.flat`.
        stamps: The same of the stamps of loads.
    """

    hash: str
    model: str
    created: float | None
    last_used: float | None
    size_bytes: int
    frees_bytes: int
    reasons: tuple[Reason, ...]
    names: tuple[RankName, ...] = ()
    units: tuple[str, ...] = ()
    lookup: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()
    path: str = ""
    manifests: Mapping[str, Status | None] = field(default_factory=dict)
    stamps: Mapping[str, Status | None] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON."""
        return {
            "hash": self.hash,
            "model": self.model,
            "ranks": [{"rank": name.rank, "prefix": name.prefix} for name in self.names],
            "created": self.created,
            "last_used": self.last_used,
            "size_bytes": self.size_bytes,
            "frees_bytes": self.frees_bytes,
            "units": list(self.units),
            "reasons": msgspec.to_builtins(self.reasons),
            "instead": list(self.instead),
        }


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
    """An entry that a rule chooses and that stays, and why.

    Args:
        hash: Its hash.
        model: What people call the model.
        why: A stable word for programs.
        sentence: For people.
    """

    hash: str
    model: str
    why: Literal["in_use", "keep_last", "cannot_tell", "newer_schema", "used_meanwhile", "shared"]
    sentence: str


class Failed(Record, frozen=True, kw_only=True):
    """Something that could not be removed, and stays whole or is swept later."""

    path: str
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
class Plan(ABC):
    """What a prune would do.

    Args:
        root: The cache root.
        rules: What was asked for.
        entries: The entries that go, in the order in which they go.
        files: The leftovers that go.
        kept: Entries that a rule chose and that stay.
        size_bytes: What the cache takes on the disk before; None where no rule asked for it.
        notes: What else the user should know.
        made: When the plan was made, seconds since the epoch.
        system: Which system wrote the cache.
    """

    root: Path
    rules: Rules
    entries: tuple[PlannedEntry, ...]
    files: tuple[PlannedFile, ...]
    kept: tuple[Kept, ...]
    size_bytes: int | None
    notes: tuple[str, ...]
    made: float
    system: str = "cgtool"

    @property
    def frees_bytes(self) -> int:
        """What comes free on the disk in all."""
        return sum(entry.frees_bytes for entry in self.entries) + sum(file.frees_bytes for file in self.files)

    @property
    def is_empty(self) -> bool:
        """Whether nothing goes."""
        return not self.entries and not self.files

    @abstractmethod
    def execute(self, on_event: OnEvent = ignore) -> Outcome:
        """Remove what the plan names, as far as that is still so; what cannot be removed is told in the outcome.

        Args:
            on_event: Told of each folder as it goes.

        Raises:
            CacheError: File locks do not work there, so that nobody can tell what is used.
        """

    def to_json(self, outcome: Outcome | None = None) -> dict[str, Any]:
        """Return the document that `prune --json` prints.

        Args:
            outcome: What came of the plan; None where nothing was done.
        """
        return {
            "schema": SCHEMA,
            "system": self.system,
            "root": str(self.root),
            "rules": {**msgspec.to_builtins(self.rules), "orphans": self.rules.for_leftovers},
            "entries": [entry.to_json() for entry in self.entries],
            "files": msgspec.to_builtins(self.files),
            "kept": msgspec.to_builtins(self.kept),
            "misses": [{"model": entry.model, "hash": entry.hash} for entry in self.entries if not entry.instead],
            "size_bytes": self.size_bytes,
            "frees_bytes": self.frees_bytes,
            "notes": list(self.notes),
            "outcome": msgspec.to_builtins(outcome),
        }
