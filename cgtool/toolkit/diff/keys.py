"""Two keys, factor by factor; of a source file also which traced line. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable

from cgtool.records import replace
from cgtool.store.key import FACTOR_ORDER, FactorDifference, Key, differences
from cgtool.store.layout import short
from cgtool.toolkit.diff.records import Difference, together
from cgtool.toolkit.diff.traced import LineChanges

#: Says what became of the traced lines of a module's file.
Lines = Callable[[str], LineChanges]

#: Where one of these differs, guards differ because of it.
_GUARDS_FOLLOW = frozenset({"sources", "variables", "ops", "model", "state", "calls", "torch", "python"})
#: What a trace came through.
_TRACED = frozenset({"sources", "ops"})


def factor_differences(old: Key, new: Key, lines: Lines) -> list[Difference]:
    """Return the factors in which two keys differ, leaf by leaf, but for "guards", which is a digest of many.

    Args:
        old: The first side's key.
        new: The second side's.
        lines: Asked of each module whose file differs.
    """
    found = [difference for difference in differences(old, new) if difference.factor != "guards"]
    found.sort(key=lambda difference: _telling(difference.factor))
    return together(_described(difference, lines) for difference in found)


def leads(difference: Difference) -> bool:
    """Return whether guards that differ do so because of a factor's difference.

    A file or an op that only one side's trace came through does not: it follows itself from what the guards tell.
    """
    factor = re.split(r"[.\[]", difference.path, maxsplit=1)[0]
    return factor in _GUARDS_FOLLOW and not (factor in _TRACED and None in (difference.old, difference.new))


def _telling(factor: str) -> tuple[int, str]:
    return (FACTOR_ORDER.index(factor) if factor in FACTOR_ORDER else len(FACTOR_ORDER)), factor


def _described(found: FactorDifference, lines: Lines) -> Difference:
    module = found.path.removeprefix("sources.") if found.factor == "sources" else None
    difference = Difference(
        what="factor" if module is None else "source",
        path=found.path,
        old=found.old,
        new=found.new,
        sentence=found.sentence,
    )
    if module is None or not (isinstance(found.old, str) and isinstance(found.new, str)):
        return difference
    return with_lines(difference, lines(module))


def with_lines(difference: Difference, changes: LineChanges) -> Difference:
    """Return the difference of a source file with the lines that changed, where they are known."""
    old, new = (short(str(side)) for side in (difference.old, difference.new))
    if changes.sentence:
        sentence = f"{difference.path} has changed: {changes.sentence}"
    else:
        sentence = f"{difference.path} has changed (its digest was {old} and is {new} now)"
        if changes.known:
            sentence += ", in no line that a trace shows: a comment, or code that leaves no operation behind"
    return replace(difference, sentence=sentence, detail=changes.detail)
