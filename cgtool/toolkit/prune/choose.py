"""Which entries go by which rule, and which of them stay all the same. Must not import torch.

By age, staleness and name every entry is judged by itself; `keep_last` looks at all entries of one model. What makes
the cache small enough is for `cgtool.toolkit.prune.plan` to say, which knows what comes free.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from cgtool.errors import UsageError
from cgtool.store.layout import short
from cgtool.store.leases import LeaseTable
from cgtool.store.walk import EntryView
from cgtool.toolkit.prune.collect import CacheFacts, stamps_in
from cgtool.toolkit.prune.leftovers import DAY_SECS, HOUR_SECS
from cgtool.toolkit.prune.records import Kept, Reason, Rules
from cgtool.toolkit.prune.stale import StaleFinder

#: Modules that cannot be found are named up to so many.
_MOST_NAMED = 3


class Chooser:
    """Judges the entries of a cache.

    Args:
        facts: What the cache holds.
        rules: What was asked for.
        leases: Who uses it.
        stale: Compares entries with this machine.
        now: Seconds since the epoch; None for now.

    Raises:
        UsageError: A hash that was asked for is no entry's, or more than one entry's.
    """

    def __init__(
        self, facts: CacheFacts, rules: Rules, leases: LeaseTable, stale: StaleFinder, *, now: float | None = None
    ) -> None:
        self._facts = facts
        self._rules = rules
        self._leases = leases
        self._stale = stale
        self._now = time.time() if now is None else now
        self.stamps = stamps_in(facts.layout)
        self._named = {self._entry_named(text) for text in rules.entries}
        self._last = self._last_of_models()
        self.kept: list[Kept] = []

    def chosen(self) -> dict[str, tuple[Reason, ...]]:
        """Return the entries that rules choose, and why; what stays all the same is added to `kept`."""
        found = {hash_: tuple(self._reasons(entry)) for hash_, entry in self._facts.entries.items()}
        return {
            hash_: reasons
            for hash_, reasons in found.items()
            if reasons and self.may_go(self._facts.entries[hash_], reasons)
        }

    def by_last_use(self) -> list[EntryView]:
        """Return the entries that may go for room, the one whose last use is longest ago first."""
        entries = [entry for entry in self._facts.entries.values() if entry.is_finished]
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
        found = self._stale.of(entry)
        for sentence in found.reasons:
            yield Reason(rule="stale", sentence=sentence)
        if found.unknown and not found.reasons:
            more = len(found.unknown) - _MOST_NAMED
            words = "; ".join(found.unknown[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
            self._keep(entry, "cannot_tell", f"whether it is stale cannot be told: {words}")

    def _last_of_models(self) -> frozenset[str]:
        """The entries that `keep_last` protects."""
        if self._rules.keep_last is None:
            return frozenset()
        models: dict[tuple[str, ...], list[EntryView]] = {}
        for entry in self._facts.entries.values():
            if entry.is_finished:
                models.setdefault(_model_of(entry), []).append(entry)
        kept: set[str] = set()
        for entries in models.values():
            entries.sort(key=self.last_seen, reverse=True)
            kept.update(entry.hash for entry in entries[: self._rules.keep_last])
        return frozenset(kept)

    def _entry_named(self, text: str) -> str:
        found = [hash_ for hash_ in self._facts.entries if hash_.startswith(text)]
        if len(found) == 1:
            return found[0]
        if not found:
            raise UsageError(
                f"No entry's hash begins with {text!r}. `cgtool inspect cache` lists them.", path="--entry", actual=text
            )
        listed = ", ".join(short(hash_) for hash_ in found[:_MOST_NAMED])
        raise UsageError(
            f"{len(found)} entries' hashes begin with {text!r} ({listed}, …). Give more digits.",
            path="--entry",
            actual=text,
        )

    def _keep(self, entry: EntryView, why: str, sentence: str) -> None:
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
