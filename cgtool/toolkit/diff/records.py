"""What a comparison finds: one record for each thing that differs, those that are alike told once. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

from cgtool.plan.pieces import Json
from cgtool.records import dataclass, replace

What = Literal["factor", "source", "guard", "piece", "artifact", "coverage", "fallback", "entry"]

#: Begins a line of `detail` that names where else the same was found.
ALSO = "also: "

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing in which two sides differ.

    Args:
        what: Its kind.
        path: Where it is: "config.level", "self.layers.0.eps", "default/piece 2".
        old: What the first side has; None where it has nothing.
        new: What the second side has; None where it has nothing.
        sentence: It as people read it; holds words of models and caches as they stand, so it is quoted where shown.
        detail: More lines: a diff of a graph or of a file's lines, the paths of what changed alike.
    """

    what: What
    path: str
    old: Json
    new: Json
    sentence: str
    detail: tuple[str, ...] = ()

    def to_json(self) -> Json:
        """Return the difference as `diff --json` prints it."""
        return {
            "what": self.what,
            "path": self.path,
            "old": self.old,
            "new": self.new,
            "sentence": self.sentence,
            "detail": list(self.detail),
        }


def together(found: Iterable[Difference]) -> list[Difference]:
    """Return differences with those told once that say the same of several layers: equal but for numbers in the path.

    Args:
        found: In order, which is kept.
    """
    groups: dict[tuple[str, str, str, str], list[Difference]] = {}
    for difference in found:
        key = difference.what, _NUMBER.sub("#", difference.path), repr(difference.old), repr(difference.new)
        groups.setdefault(key, []).append(difference)
    return [_told_once(group) for group in groups.values()]


def _told_once(group: Sequence[Difference]) -> Difference:
    first, *others = group
    if not others:
        return first
    named = f"{others[0].path}" if len(others) == 1 else f"{len(others)} more, to {others[-1].path}"
    return replace(
        first,
        sentence=f"{first.sentence} (and so {named})",
        detail=(*first.detail, *(f"{ALSO}{other.path}" for other in others)),
    )


def located(found: Iterable[Difference], where: str) -> list[Difference]:
    """Return differences that say in which rank and prefix they were found.

    Args:
        found: The differences.
        where: "rank 1 backbone", or "" where an entry has but one.
    """
    if not where:
        return list(found)
    return [
        replace(difference, path=f"{where}: {difference.path}", sentence=f"{where}: {difference.sentence}")
        for difference in found
    ]
