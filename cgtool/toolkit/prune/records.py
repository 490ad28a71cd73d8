"""What a prune is asked for, what it plans and what came of it: records and their JSON. Must not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from pathlib import Path

from cgtool.plan.pieces import Json
from cgtool.records import dataclass
from cgtool.store.layout import RankName

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Which entries and leftovers go. Rules add up; `keep_last` protects from all but `entries`.

    Args:
        older_than_secs: Entries not used for longer, in seconds; one that was never used counts from its making.
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

    def to_json(self) -> Json:
        """Return the rules as JSON."""
        return {
            "older_than_secs": self.older_than_secs,
            "max_bytes": self.max_bytes,
            "stale": self.stale,
            "orphans": self.for_leftovers,
            "units": self.units,
            "keep_last": self.keep_last,
            "entries": list(self.entries),
            "keep_units": self.keep_units,
        }


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why an entry goes.

    Args:
        rule: "older_than", "max_size", "stale", "keep_last" or "entry".
        sentence: For people.
    """

    rule: str
    sentence: str


@dataclass(frozen=True, kw_only=True)
class PlannedEntry:
    """An entry that goes.

    Args:
        hash: Its hash.
        names: Its ranks and prefixes.
        model: What people call the model; "" where no manifest can be read.
        created: When it was made, seconds since the epoch; None where that is not known.
        last_used: When it was loaded last, seconds since the epoch; None for never.
        size_bytes: What its files take.
        frees_bytes: What comes free on the disk, after those that go before it.
        units: The keys of the units that go with it: no other entry shares them.
        reasons: Why.
        lookup: The digests of cheap facts that lead to it.
        instead: Other entries that the same cheap facts lead to: they may serve instead.
        path: Where it lies, for an entry of another system; "" for cgtool's own.
        manifests: What tells whether manifests were written since, by `RankName.flat`: their time in ns, and size.
        stamps: The same of the stamps of loads.
    """

    hash: str
    names: tuple[RankName, ...]
    model: str
    created: float | None
    last_used: float | None
    size_bytes: int
    frees_bytes: int
    units: tuple[str, ...]
    reasons: tuple[Reason, ...]
    lookup: tuple[str, ...]
    instead: tuple[str, ...] = ()
    path: str = ""
    manifests: Mapping[str, tuple[int, int] | None] = field(default_factory=dict, hash=False)
    stamps: Mapping[str, tuple[int, int] | None] = field(default_factory=dict, hash=False)

    def to_json(self) -> Json:
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
            "reasons": [{"rule": reason.rule, "sentence": reason.sentence} for reason in self.reasons],
            "instead": list(self.instead),
        }


@dataclass(frozen=True, kw_only=True)
class PlannedFile:
    """A leftover that goes: a file, or a folder with all that is in it.

    Args:
        path: Below the cache folder `torch_compile_cache`, with "/" between names.
        kind: "temporary", "artifact", "rank", "unfinished", "unit", "lookup", "state" or "trash".
        frees_bytes: What comes free on the disk.
    """

    path: str
    kind: str
    frees_bytes: int

    def to_json(self) -> Json:
        """Return the leftover as JSON."""
        return {"path": self.path, "kind": self.kind, "frees_bytes": self.frees_bytes}


@dataclass(frozen=True, kw_only=True)
class Kept:
    """An entry that a rule chose and that stays.

    Args:
        hash: Its hash.
        model: What people call the model.
        why: "in_use", "keep_last", "cannot_tell", "newer_schema", "used_meanwhile" or "shared".
        sentence: For people.
    """

    hash: str
    model: str
    why: str
    sentence: str

    def to_json(self) -> Json:
        """Return it as JSON."""
        return {"hash": self.hash, "model": self.model, "why": self.why, "sentence": self.sentence}


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

    def to_json(self) -> dict[str, Json]:
        """Return the plan as JSON."""
        return {
            "schema": SCHEMA,
            "system": self.system,
            "root": str(self.root),
            "rules": self.rules.to_json(),
            "entries": [entry.to_json() for entry in self.entries],
            "files": [file.to_json() for file in self.files],
            "kept": [kept.to_json() for kept in self.kept],
            "misses": [_miss(entry) for entry in self.entries if not entry.instead],
            "size_bytes": self.size_bytes,
            "frees_bytes": self.frees_bytes,
            "notes": list(self.notes),
        }


def _miss(entry: PlannedEntry) -> Json:
    return {"model": entry.model, "hash": entry.hash}


@dataclass(frozen=True, kw_only=True)
class Failed:
    """Something that could not be removed, and stays whole or is swept later."""

    path: str
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
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

    def to_json(self) -> Json:
        """Return the outcome as JSON."""
        return {
            "removed": list(self.removed),
            "removed_files": self.removed_files,
            "freed_bytes": self.freed_bytes,
            "kept": [kept.to_json() for kept in self.kept],
            "failed": [{"path": item.path, "sentence": item.sentence} for item in self.failed],
        }


def unique(texts: Iterable[str]) -> tuple[str, ...]:
    """Return texts in order, each once."""
    return tuple(dict.fromkeys(texts))
