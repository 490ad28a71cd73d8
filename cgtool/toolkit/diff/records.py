"""What a comparison finds, and what finds it: facts of two sides by name, and lines of two texts. No torch here."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeVar

import msgspec
from msgspec.structs import replace

from cgtool.plan.pieces import Json

What = Literal["factor", "source", "guard", "piece", "artifact", "coverage", "fallback", "entry"]

#: Begins a line of `detail` that names where else the same was found.
ALSO = "also: "

_NUMBER = re.compile(r"\d+")
#: Lines around a change that are shown with it.
_CONTEXT = 2
#: A list of changes that is longer serves nobody; what is left out is counted.
_MOST_LINES = 60
#: Lists that differ in more lines than this are not aligned: that takes time in their square.
_MOST_ALIGNED = 1500

_Name = TypeVar("_Name")
_Value = TypeVar("_Value")


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One thing in which two sides differ; its fields are what `diff --json` prints of it.

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

    @classmethod
    def of_one_side(
        cls, what: What, path: str, value: Json, sentence: str, *, gone: bool, detail: Iterable[str] = ()
    ) -> Difference:
        """Return what one side alone has: the first, where it is `gone`."""
        old, new = (value, None) if gone else (None, value)
        return cls(what=what, path=path, old=old, new=new, sentence=sentence, detail=tuple(detail))


def changes(
    old: Mapping[_Name, _Value], new: Mapping[_Name, _Value]
) -> Iterator[tuple[_Name, _Value | None, _Value | None]]:
    """Yield the facts in which two sides differ: name, the first side's value, the second's; None where it has none."""
    for name in [*old, *(name for name in new if name not in old)]:
        if old.get(name) != new.get(name):
            yield name, old.get(name), new.get(name)


def was_and_is(said: str, old: object, new: object) -> str:
    """Return how a fact ("the size rows") was and is, in a sentence; None is nothing."""
    if old is None:
        return f"{said} is {new} now and was not there before"
    return f"{said} was {old} and is gone now" if new is None else f"{said} was {old} and is {new} now"


def only_in(*, gone: bool) -> str:
    """Return which side alone has something."""
    return f"is only in the {'first' if gone else 'second'}"


def together(found: Iterable[Difference]) -> list[Difference]:
    """Return differences in order, those told once that are equal but for numbers in the path: of several layers."""
    groups: dict[tuple[str, str, str, str], list[Difference]] = {}
    for difference in found:
        key = difference.what, _NUMBER.sub("#", difference.path), repr(difference.old), repr(difference.new)
        groups.setdefault(key, []).append(difference)
    told = []
    for first, *others in groups.values():
        if others:
            named = others[0].path if len(others) == 1 else f"{len(others)} more, to {others[-1].path}"
            detail = (*first.detail, *(f"{ALSO}{other.path}" for other in others))
            told.append(replace(first, sentence=f"{first.sentence} (and so {named})", detail=detail))
        else:
            told.append(first)
    return told


def located(found: Iterable[Difference], where: str) -> list[Difference]:
    """Return differences that say where they were found: "rank 1 backbone", or "" where an entry has but one."""
    return [
        replace(difference, path=f"{where}: {difference.path}", sentence=f"{where}: {difference.sentence}")
        if where
        else difference
        for difference in found
    ]


def matched(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int]]:
    """Return positions of lines that correspond, in order; only those of the common ends where too much differs."""
    shorter = min(len(old), len(new))
    start = next((i for i in range(shorter) if old[i] != new[i]), shorter)
    end = next((i for i in range(shorter - start) if old[-1 - i] != new[-1 - i]), shorter - start)
    pairs = [(i, i) for i in range(start)]
    left, right = old[start : len(old) - end], new[start : len(new) - end]
    if len(left) + len(right) <= 2 * _MOST_ALIGNED:
        for block in difflib.SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks():
            pairs += [(start + block.a + i, start + block.b + i) for i in range(block.size)]
    return pairs + [(len(old) - end + i, len(new) - end + i) for i in range(end)]


def line_diff(old: Sequence[str], new: Sequence[str]) -> tuple[str, ...]:
    """Return what differs as lines that begin with "-", "+" or " ", each run of changes with two lines around it."""
    edits = list(difflib.unified_diff(old, new, n=_CONTEXT, lineterm=""))[3:]
    shown = ["..." if line.startswith("@@") else f"{line[0]} {line[1:]}" for line in edits]
    rest = len(shown) - _MOST_LINES
    return tuple([*shown[:_MOST_LINES], f"... {rest} more lines"] if rest > 0 else shown)
