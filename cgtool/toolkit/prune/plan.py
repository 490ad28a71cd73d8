"""What a prune is asked for, what it plans and what comes of it. Must not import torch.

A deletion is a plan, which changes nothing and says what comes free, and then its `execute`. As JSON, a plan is::

    {"schema": 2, "root": str, "rules": rules, "entries": [entry...], "files": [file...],
     "kept": [kept...], "misses": [{"model", "hash"}...], "size_bytes": int | null, "frees_bytes": int,
     "notes": [str...], "outcome": outcome | null}

and the other records are their fields.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from cgtool.events import OnEvent, ignore
from cgtool.plan.grammar import Record
from cgtool.toolkit.prune.removal import Failed

SCHEMA = 2

HOUR_SECS, DAY_SECS = 3600.0, 86400.0

Why = Literal["in_use", "keep_last", "cannot_tell", "newer_schema", "used_meanwhile"]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Which entries and leftovers go. Rules add up; `keep_last` protects from all but `entries`."""

    #: Entries not used for longer, in seconds; an unused entry's age counts from its creation.
    older_than_secs: float | None = None
    #: Entries used longest ago, until the cache takes no more than this on the disk.
    max_bytes: int | None = None
    #: Entries that cannot serve on this machine any more.
    stale: bool = False
    #: What nothing names any more, and what dead processes left.
    orphans: bool = False
    #: With orphans: compiled units that no entry shares, too.
    units: bool = False
    #: How many entries of each model stay, those used last; alone, it has the others go. One model is what the same
    #: cheap facts lead to, whatever it is called.
    keep_last: int | None = None
    entries: tuple[str, ...] = ()
    #: Leave the units of removed entries, from which a later warm links what it needs.
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


class PlannedEntry(Record, frozen=True, kw_only=True, omit_defaults=False):
    """An entry that goes."""

    hash: str
    #: What people call the model; "" where no manifest can be read.
    model: str
    ranks: tuple[dict[str, int | str], ...] = ()
    #: When it was made, seconds since the epoch; None where that is not known.
    created: float | None
    #: When it was loaded last, seconds since the epoch; None for never.
    last_used: float | None
    size_bytes: int = 0
    #: What comes free on the disk, after those that go before it.
    frees_bytes: int = 0
    #: The keys of the units that go with it: no other entry shares them.
    units: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = ()
    #: Other entries that the same cheap facts lead to: they may serve instead.
    instead: tuple[str, ...] = ()


class PlannedFile(Record, frozen=True, kw_only=True):
    """A leftover that goes: a file, or a folder with all that is in it."""

    #: Below the cache folder `torch_compile_cache`, with "/" between names.
    path: str
    #: Which, as the table of `cgtool.toolkit.prune.leftovers` has them.
    kind: str
    frees_bytes: int


class Kept(Record, frozen=True, kw_only=True):
    """An entry that a rule chooses and that stays: a stable word for programs, and a sentence for people."""

    hash: str
    model: str
    why: Why
    sentence: str


class Outcome(Record, frozen=True, kw_only=True):
    """What came of a plan."""

    #: The entries that are gone, by hash.
    removed: tuple[str, ...]
    removed_files: int
    freed_bytes: int
    #: Entries of the plan that stay: they came into use meanwhile.
    kept: tuple[Kept, ...]
    failed: tuple[Failed, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a prune would do."""

    root: Path
    rules: Rules
    #: The entries that go, in the order in which they go.
    entries: tuple[PlannedEntry, ...]
    files: tuple[PlannedFile, ...]
    #: Entries that a rule chose and that stay.
    kept: tuple[Kept, ...]
    #: What the cache takes on the disk before; None where no rule asked for it.
    size_bytes: int | None
    notes: tuple[str, ...]
    #: Does it, for `execute`.
    carry_out: Callable[[Plan, OnEvent], Outcome]
    #: What people are told of its place, where that is a store.
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
