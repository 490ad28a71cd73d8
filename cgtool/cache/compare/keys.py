"""Two keys, factor by factor; of a source file also which traced line, of the environment which variable. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable

from cgtool.cache.compare.records import Difference, together
from cgtool.cache.compare.traced import LineChanges
from cgtool.cache.key import FACTOR_ORDER, FactorDifference, Key, differences
from cgtool.cache.layout import short
from cgtool.records import replace

#: Says what became of the traced lines of a module's file.
Lines = Callable[[str], LineChanges]

#: Factors that have no place of their own in `FACTOR_ORDER`, and beside which they tell as much.
_BESIDE = {"ops": "sources", "precision": "target", "inductor_environment": "inductor"}
#: Where one of these differs, guards differ because of it.
_GUARDS_FOLLOW = frozenset({"sources", "ops", "model", "state", "calls", "torch", "python"})
#: What a trace came through.
_TRACED = frozenset({"sources", "ops"})
_VARIABLES = "inductor_environment"


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
    named = _BESIDE.get(factor, factor)
    return (FACTOR_ORDER.index(named) if named in FACTOR_ORDER else len(FACTOR_ORDER)), factor


def _described(found: FactorDifference, lines: Lines) -> Difference:
    module = found.path.removeprefix("sources.") if found.factor == "sources" else None
    difference = Difference(
        what="factor" if module is None else "source",
        path=found.path,
        old=found.old,
        new=found.new,
        sentence=found.sentence,
    )
    if found.factor == _VARIABLES and found.path != _VARIABLES:
        name = found.path.removeprefix(f"{_VARIABLES}.")
        return replace(difference, sentence=f"the environment variable {found.sentence.replace(found.path, name, 1)}")
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
