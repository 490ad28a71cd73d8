"""Which entries go by which rule, and which of them stay all the same. Must not import torch.

By age, staleness and name every entry is judged by itself; `keep_last` looks at all entries of one model. What makes
the cache small enough is for `cgtool.toolkit.prune.own` to say, which knows what comes free.

An entry is stale where a load would miss whatever it is given: cgtool's own code, torch, triton, Python or the target
differ from the entry's factors, a traced source file has other bytes, or an older version of cgtool wrote it. That is
found without running any code of a model. A module that cannot be found from here may be found by the program that
loads, so nothing is concluded from it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from cgtool.errors import CacheError, CacheSchemaError, UsageError
from cgtool.guards.files import find_spec
from cgtool.plan.grammar import sha256_hex
from cgtool.plan.pieces import Json
from cgtool.store.key import Key, difference_between, read_key, sentences
from cgtool.store.layout import CacheLayout, short
from cgtool.store.leases import LeaseTable
from cgtool.store.lookup import StateStore
from cgtool.store.machine import Machine, this_machine
from cgtool.store.walk import EntryView
from cgtool.toolkit.prune.leftovers import DAY_SECS, HOUR_SECS
from cgtool.toolkit.prune.plan import Kept, Reason, Rules

#: The factors that a machine and what is installed on it decide.
_FACTORS = ("cgtool", "torch", "triton", "python", "target")
#: Those of which everything is known here, so that None is a value like any other.
_KNOWN = ("cgtool", "triton")
#: Modules that cannot be found are named up to so many.
_MOST_NAMED = 3


class Chooser:
    """Judges the entries of a cache.

    Args:
        layout: Where the cache lies.
        entries: What it holds, by hash.
        rules: What was asked for.
        leases: Who uses it.
        stale: Compares entries with this machine.
        now: Seconds since the epoch.

    Raises:
        UsageError: A hash that was asked for is no entry's, or more than one entry's.
    """

    def __init__(
        self,
        layout: CacheLayout,
        entries: dict[str, EntryView],
        rules: Rules,
        leases: LeaseTable,
        stale: StaleFinder,
        *,
        now: float,
    ) -> None:
        self._entries = entries
        self._rules = rules
        self._leases = leases
        self._stale = stale
        self._now = now
        self.stamps = StateStore(layout).stamps()
        self._named = {self._entry_named(text) for text in rules.entries}
        self._last = self._last_of_models()
        self.kept: list[Kept] = []

    def chosen(self) -> dict[str, tuple[Reason, ...]]:
        """Return the entries that rules choose, and why; what stays all the same is added to `kept`."""
        found = {hash_: tuple(self._reasons(entry)) for hash_, entry in self._entries.items()}
        return {
            hash_: reasons for hash_, reasons in found.items() if reasons and self.may_go(self._entries[hash_], reasons)
        }

    def by_last_use(self) -> list[EntryView]:
        """Return the entries that may go for room, the one whose last use is longest ago first."""
        entries = [entry for entry in self._entries.values() if entry.is_finished]
        return sorted(entries, key=lambda entry: (self.last_seen(entry), entry.hash))

    def may_go(self, entry: EntryView, reasons: Sequence[Reason]) -> bool:
        """Return whether nothing keeps a chosen entry; what does is added to `kept`."""
        named = any(reason.rule == "entry" for reason in reasons)
        if self._leases.is_used(entry.hash):
            self._keep(entry, "in_use", "a live process uses it")
        elif entry.is_newer and not named:
            self._keep(entry, "newer_schema", "a newer version of cgtool wrote it")
        elif entry.hash in self._last and not named:
            count = self._rules.keep_last
            self._keep(entry, "keep_last", f"it is among the last {count} of {entry.model or 'its model'}")
        else:
            return True
        return False

    def last_used(self, entry: EntryView) -> float | None:
        """Return when an entry was loaded last, seconds since the epoch; None for never."""
        stamps = [self.stamps.get(rank.name.flat) for rank in entry.ranks]
        return max((stamp[0] / 1e9 for stamp in stamps if stamp is not None), default=None)

    def last_seen(self, entry: EntryView) -> float:
        """Return when an entry was loaded last, or made where it never was; now where that is not known, or to come."""
        used = self.last_used(entry)
        known = used if used is not None else entry.created
        return self._now if known is None else min(known, self._now)

    def _reasons(self, entry: EntryView) -> Iterator[Reason]:
        rules = self._rules
        if entry.hash in self._named:
            yield Reason(rule="entry", sentence="it was named")
        if not entry.is_finished:
            return
        age = self._now - self.last_seen(entry)
        if rules.older_than_secs is not None and age > rules.older_than_secs:
            yield age_reason(age, used=self.last_used(entry) is not None)
        if rules.stale:
            yield from self._stale_reasons(entry)
        alone = rules.older_than_secs is None and rules.max_bytes is None and not rules.stale and not rules.entries
        if rules.keep_last is not None and alone and entry.hash not in self._last:
            yield Reason(rule="keep_last", sentence=f"it is not among the last {rules.keep_last} of its model")

    def _stale_reasons(self, entry: EntryView) -> Iterator[Reason]:
        reasons, unknown = self._stale.of(entry.hash)
        for sentence in reasons:
            yield Reason(rule="stale", sentence=sentence)
        if unknown and not reasons:
            more = len(unknown) - _MOST_NAMED
            words = "; ".join(unknown[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
            self._keep(entry, "cannot_tell", f"whether it is stale cannot be told: {words}")

    def _last_of_models(self) -> frozenset[str]:
        """The entries that `keep_last` protects."""
        if self._rules.keep_last is None:
            return frozenset()
        models: dict[tuple[str, ...], list[EntryView]] = {}
        for entry in self._entries.values():
            if entry.is_finished:
                models.setdefault(_model_of(entry), []).append(entry)
        kept: set[str] = set()
        for entries in models.values():
            entries.sort(key=self.last_seen, reverse=True)
            kept.update(entry.hash for entry in entries[: self._rules.keep_last])
        return frozenset(kept)

    def _entry_named(self, text: str) -> str:
        found = [hash_ for hash_ in self._entries if hash_.startswith(text)]
        if len(found) == 1:
            return found[0]
        message = f"No entry's hash begins with {text!r}. `cgtool inspect cache` lists them."
        if found:
            listed = ", ".join(short(hash_) for hash_ in found[:_MOST_NAMED])
            message = f"{len(found)} entries' hashes begin with {text!r} ({listed}, …). Give more digits."
        raise UsageError(message, path="--entry", actual=text)

    def _keep(
        self, entry: EntryView, why: Literal["in_use", "keep_last", "cannot_tell", "newer_schema"], sentence: str
    ) -> None:
        self.kept.append(Kept(hash=entry.hash, model=entry.model, why=why, sentence=sentence))


def _model_of(entry: EntryView) -> tuple[str, ...]:
    """What the entries of one model share: two models may be called the same, and then none may push the other out."""
    digests = next((one.lookup for one in entry.manifests if one.lookup), ())  # of the factors "model" and "state"
    return tuple(sorted(digests)) or (entry.hash,)


def age_reason(age: float, *, used: bool) -> Reason:
    """Return the reason of an entry that was not used for `age` seconds, or never."""
    return Reason(rule="older_than", sentence=f"it was {'used last' if used else 'made and never used'} {_ago(age)}")


def _ago(secs: float) -> str:
    if secs >= DAY_SECS:
        count, unit = int(secs // DAY_SECS), "day"
    elif secs >= HOUR_SECS:
        count, unit = int(secs // HOUR_SECS), "hour"
    else:
        count, unit = int(secs // 60), "minute"
    return f"{count} {unit}{'' if count == 1 else 's'} ago"


class StaleFinder:
    """Compares entries with this machine.

    Args:
        layout: Where the cache lies.
        pythonpath: Folders in which modules are looked for first.
        machine: This machine; None asks it.
    """

    def __init__(self, layout: CacheLayout, *, pythonpath: Sequence[str] = (), machine: Machine | None = None) -> None:
        self._layout = layout
        self._path = [*pythonpath, *_importable()]
        self._machine = machine
        self._digests: dict[str, str | None] = {}

    @functools.cached_property
    def _factors(self) -> dict[str, Json]:
        return (self._machine or this_machine()).factors  # which starts a compiler, and only `stale` asks

    def of(self, hash_: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return why an entry is stale, and what could not be told; never raises on account of what is in it."""
        try:
            key = read_key(self._layout, hash_)
        except CacheSchemaError as error:
            return (str(error),), ()
        except CacheError as error:
            return (), (str(error),)
        if key is None:
            return (), ("it has no key.json",)
        changed, unknown = self._sources(key)
        return tuple(dict.fromkeys((*changed, *self._machine_reasons(key)))), unknown

    def _machine_reasons(self, key: Key) -> tuple[str, ...]:
        if self._factors["torch"] is None:
            return ()  # a machine without torch runs none of it, and was not meant to
        reasons: list[str] = []
        for name, value in key.factors.items():
            if name in _FACTORS:
                now = self._factors[name]
                known = now if name in _KNOWN else _as_far_as_known(value, now)
                reasons += sentences(difference_between(name, value, known))
        return tuple(reasons)

    def _sources(self, key: Key) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What changed, and the modules that cannot be found."""
        stored = key.value("sources")
        if not isinstance(stored, dict):
            return (), ()
        now = {name: self._digest(name) for name in stored}
        missing = tuple(f"the module {name} cannot be found from here" for name in stored if now[name] is None)
        found = {name: digest for name, digest in now.items() if digest is not None}
        return sentences(difference_between("sources", {name: stored[name] for name in found}, found)), missing

    def _digest(self, module: str) -> str | None:
        if module not in self._digests:
            spec = find_spec(module, self._path)
            file = spec.origin if spec is not None and spec.has_location else None
            try:
                self._digests[module] = None if file is None else sha256_hex(Path(file).read_bytes())
            except OSError:
                self._digests[module] = None
        return self._digests[module]


def _importable() -> list[str]:
    """`sys.path` without the current folder: what lies in it by chance is not what a model was traced from."""
    # `python -m` puts it first by its name; a second time it is there because somebody asked for it.
    first = 0
    with contextlib.suppress(OSError):  # the current folder may be gone
        first = int("-m" in sys.orig_argv and sys.path[:1] == [os.getcwd()])  # noqa: PTH109 - a str
    return [folder for folder in sys.path[first:] if folder]


def _as_far_as_known(stored: Json, now: Json) -> Json:
    """The facts of this machine, with the stored ones in the places of those that only torch could tell."""
    if now is None:
        return stored
    if isinstance(stored, dict) and isinstance(now, dict):
        return {name: _as_far_as_known(value, now.get(name)) for name, value in stored.items()}
    return now
