"""The records of a prune: its rules, its plan and its outcome. Must not import torch.

A plan changes nothing and states how many bytes it frees; `execute` carries it out. As JSON, a plan is::

    {"schema": 2, "root": str, "rules": rules, "entries": [entry...], "files": [file...],
     "kept": [kept...], "misses": [{"model", "hash"}...], "size_bytes": int | null, "frees_bytes": int,
     "notes": [str...], "outcome": outcome | null}

and the other records are encoded field by field.
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
    """Which entries and leftovers to remove. Rules add up; `keep_last` overrides all of them but `entries`."""

    #: Entries not used for longer than this, in seconds; an unused entry's age counts from its creation.
    older_than_secs: float | None = None
    #: The least recently used entries, until the cache takes no more than this on disk.
    max_bytes: int | None = None
    #: Entries that no longer load on this machine.
    stale: bool = False
    #: Unreferenced files, and files that ended processes left behind.
    orphans: bool = False
    #: Orphans, and compiled units that no entry shares.
    units: bool = False
    #: Keep this many entries of each model, the most recently used; without another rule, the others are removed.
    #: Entries belong to one model if they share a lookup digest, whatever the model's name.
    keep_last: int | None = None
    entries: tuple[str, ...] = ()
    #: Keep the units of removed entries, which a later warm can link.
    keep_units: bool = False

    @property
    def for_entries(self) -> bool:
        """Whether any rule can select an entry."""
        by_use = self.older_than_secs is not None or self.max_bytes is not None or self.keep_last is not None
        return by_use or self.stale or bool(self.entries)

    @property
    def for_leftovers(self) -> bool:
        """Whether leftovers are removed: on request, or by default without another rule."""
        return self.orphans or self.units or not self.for_entries


class Reason(Record, frozen=True, kw_only=True):
    """The rule that selects an entry, and a sentence for people."""

    rule: Literal["older_than", "max_size", "stale", "keep_last", "entry"]
    sentence: str


class PlannedEntry(Record, frozen=True, kw_only=True, omit_defaults=False):
    """An entry to remove."""

    hash: str
    #: The model's name; "" if no manifest can be read.
    model: str
    ranks: tuple[dict[str, int | str], ...] = ()
    #: When it was created, in seconds since the epoch; None if unknown.
    created: float | None
    #: When it was last loaded, in seconds since the epoch; None for never.
    last_used: float | None
    size_bytes: int = 0
    #: The bytes freed, given that the entries before it are removed first.
    frees_bytes: int = 0
    #: The keys of the units removed with it: no other entry shares them.
    units: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = ()
    #: Other entries with the same lookup digest, which may serve instead.
    instead: tuple[str, ...] = ()


class PlannedFile(Record, frozen=True, kw_only=True):
    """A leftover to remove: a file or a whole folder."""

    #: Relative to the folder `torch_compile_cache`, with "/" between names.
    path: str
    #: A kind in the table of `cgtool.toolkit.prune.leftovers`.
    kind: str
    frees_bytes: int


class Kept(Record, frozen=True, kw_only=True):
    """An entry that a rule selects but that is kept: why, for programs and as a sentence."""

    hash: str
    model: str
    why: Why
    sentence: str


class Outcome(Record, frozen=True, kw_only=True):
    """The result of executing a plan."""

    #: The hashes of the removed entries.
    removed: tuple[str, ...]
    removed_files: int
    freed_bytes: int
    #: Planned entries that were kept, because they came into use meanwhile.
    kept: tuple[Kept, ...]
    failed: tuple[Failed, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a prune would remove."""

    root: Path
    rules: Rules
    #: The entries to remove, in order.
    entries: tuple[PlannedEntry, ...]
    files: tuple[PlannedFile, ...]
    #: Entries that a rule selected but that are kept.
    kept: tuple[Kept, ...]
    #: The size of the cache on disk before the prune; None unless a rule needs it.
    size_bytes: int | None
    notes: tuple[str, ...]
    #: Implements `execute`.
    carry_out: Callable[[Plan, OnEvent], Outcome]
    #: The URL to show instead of `root`, if the cache mirrors a store.
    where: str | None = None

    @property
    def frees_bytes(self) -> int:
        """The total bytes freed."""
        return sum(entry.frees_bytes for entry in self.entries) + sum(file.frees_bytes for file in self.files)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is removed."""
        return not self.entries and not self.files

    def execute(self, on_event: OnEvent = ignore) -> Outcome:
        """Remove what the plan names if it still qualifies; the outcome lists what was kept or could not be removed."""
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
