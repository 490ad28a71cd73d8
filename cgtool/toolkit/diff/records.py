"""Differences, and comparisons of mappings and of lines. Must not import torch.

A cache stores only digests of source files. Changed source lines are therefore known only for lines that the trace went
through, which comments in `computation_graph.py` quote::

    # <file name>:<line>, in <function>: <the line without indentation>
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from cgtool.plan.pieces import Json
from cgtool.store.layout import short

What = Literal["factor", "source", "guard", "piece", "artifact", "coverage", "fallback", "entry"]

#: Prefix of a line of `detail` that names another place with the same difference.
ALSO = "also: "

_NUMBER = re.compile(r"\d+")
#: Lines of context around a change.
_CONTEXT_LINES = 2
#: Longer diffs are cut, and the number of omitted lines is shown.
_MAX_LINES = 60
#: Lists that differ in more lines are not aligned, because alignment takes quadratic time.
_MAX_ALIGNED_LINES = 1500

_COMMENT = re.compile(r"^ *# ([^:\n]+):(\d{1,9}), in ([^:\n]+): (.*)$", re.MULTILINE)
#: Similarity, from 0 to 1, from which a new line is taken for the changed form of an old one.
_SIMILARITY = 0.6

_Name = TypeVar("_Name")
_Value = TypeVar("_Value")


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One difference between two sides; its fields are those of `diff --json`."""

    #: Its kind.
    what: What
    #: The location: "config.level", "self.layers.0.eps", "default/piece 2".
    path: str
    #: The value of the first side; None, here and in `new`, if the side has none.
    old: Json
    new: Json
    #: May hold text from models and caches, so it must be escaped for a terminal.
    sentence: str
    #: More lines: a diff of a graph or of source lines, or the paths of equal differences.
    detail: tuple[str, ...] = ()

    @classmethod
    def of_one_side(
        cls, what: What, path: str, value: Json, sentence: str, *, gone: bool, detail: Iterable[str] = ()
    ) -> Difference:
        """Make the difference of a value that only one side has: the first if it is `gone`."""
        old, new = (value, None) if gone else (None, value)
        return cls(what=what, path=path, old=old, new=new, sentence=sentence, detail=tuple(detail))


def changes(
    old: Mapping[_Name, _Value], new: Mapping[_Name, _Value]
) -> Iterator[tuple[_Name, _Value | None, _Value | None]]:
    """Yield (name, old value, new value) for each name whose values differ; a missing value is None."""
    for name in [*old, *(name for name in new if name not in old)]:
        if old.get(name) != new.get(name):
            yield name, old.get(name), new.get(name)


def was_and_is(subject: str, old: object, new: object) -> str:
    """Describe the change of a subject ("the size rows"); None means that it does not exist."""
    if old is None:
        return f"{subject} is {new} now and was not there before"
    return f"{subject} was {old} and is gone now" if new is None else f"{subject} was {old} and is {new} now"


def only_in(*, gone: bool) -> str:
    """Return the predicate of a subject that only one side has: the first if it is `gone`."""
    return f"is only in the {'first' if gone else 'second'}"


def merge_alike(differences: Iterable[Difference]) -> list[Difference]:
    """Merge differences that are equal except for numbers in the path, as in several layers; keep the order."""
    groups: dict[tuple[str, str, str, str], list[Difference]] = {}
    for difference in differences:
        key = difference.what, _NUMBER.sub("#", difference.path), repr(difference.old), repr(difference.new)
        groups.setdefault(key, []).append(difference)
    merged = []
    for first, *others in groups.values():
        if others:
            where = others[0].path if len(others) == 1 else f"{len(others)} more, up to {others[-1].path}"
            detail = (*first.detail, *(f"{ALSO}{other.path}" for other in others))
            merged.append(replace(first, sentence=f"{first.sentence} (also {where})", detail=detail))
        else:
            merged.append(first)
    return merged


def located(differences: Iterable[Difference], where: str) -> list[Difference]:
    """Prefix paths and sentences with a location such as "rank 1 backbone", unless it is empty."""
    return [
        replace(difference, path=f"{where}: {difference.path}", sentence=f"{where}: {difference.sentence}")
        if where
        else difference
        for difference in differences
    ]


def match_lines(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int]]:
    """Return the positions of equal lines, in order; if too much differs, only of the common start and end."""
    shorter = min(len(old), len(new))
    start = next((i for i in range(shorter) if old[i] != new[i]), shorter)
    end = next((i for i in range(shorter - start) if old[-1 - i] != new[-1 - i]), shorter - start)
    pairs = [(i, i) for i in range(start)]
    left, right = old[start : len(old) - end], new[start : len(new) - end]
    if len(left) + len(right) <= 2 * _MAX_ALIGNED_LINES:
        for block in difflib.SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks():
            pairs += [(start + block.a + i, start + block.b + i) for i in range(block.size)]
    return pairs + [(len(old) - end + i, len(new) - end + i) for i in range(end)]


def line_diff(old: Sequence[str], new: Sequence[str]) -> tuple[str, ...]:
    """Return a diff with two lines of context; lines begin with "-", "+" or " "."""
    edits = list(difflib.unified_diff(old, new, n=_CONTEXT_LINES, lineterm=""))[3:]
    shown = ["..." if line.startswith("@@") else f"{line[0]} {line[1:]}" for line in edits]
    rest = len(shown) - _MAX_LINES
    return tuple([*shown[:_MAX_LINES], f"... {rest} more lines"] if rest > 0 else shown)


class TracedLine(NamedTuple):
    """A line that a trace went through: file, line number from 1, function, and code without indentation."""

    file: str
    line: int
    function: str
    code: str


class LineChanges(NamedTuple):
    """The changes to the traced lines of one file."""

    #: The first change: "tiny_llama.py, line 82, in forward: `a` is `b` now"; "" if none is known.
    sentence: str = ""
    #: All changes, as a diff.
    detail: tuple[str, ...] = ()
    #: False if there are no lines to compare, as in an entry that was shipped without its debug files.
    known: bool = True


_UNKNOWN_LINES = LineChanges(known=False)


def with_lines(difference: Difference, changes: LineChanges) -> Difference:
    """Add the changed lines, if known, to the difference of a source file."""
    old, new = (short(str(side)) for side in (difference.old, difference.new))
    text = f" (its digest was {old} and is {new} now)"
    if changes.sentence:
        text = f": {changes.sentence}"
    elif changes.known:
        text += ", in no traced line: a comment, or code that adds no operation to the graph"
    return replace(difference, sentence=f"{difference.path} has changed{text}", detail=changes.detail)


def traced_lines(graph: str) -> tuple[TracedLine, ...]:
    """Return the lines that the text of a graph quotes, each once, in the order of their first trace."""
    # Every layer quotes the same lines, so duplicates are dropped before records are made.
    lines = dict.fromkeys(_COMMENT.findall(graph))
    return tuple(TracedLine(file, int(line), function, code) for file, line, function, code in lines)


def between_graphs(module: str, old: Sequence[TracedLine], new: Sequence[TracedLine]) -> LineChanges:
    """Compare the traced lines of a module's file between two entries."""
    if not old or not new:
        return _UNKNOWN_LINES
    name = _file_name(module, (*old, *new))
    before, after = _in_file(name, old), _in_file(name, new)
    texts = [[f"in {line.function}: {line.code}" for line in side] for side in (before, after)]
    pairs = match_lines(*texts)
    kept = {left for left, _ in pairs}, {right for _, right in pairs}
    removed = [line for position, line in enumerate(before) if position not in kept[0]]
    added = [line for position, line in enumerate(after) if position not in kept[1]]
    return LineChanges(_first_change(removed, added), line_diff(*texts))


def in_file_now(module: str, traced: Sequence[TracedLine], text: str) -> LineChanges:
    """Compare the traced lines of a module's file with the current text of the file."""
    if not traced:
        return _UNKNOWN_LINES
    before = _in_file(_file_name(module, traced), traced)
    now = [line.strip() for line in text.splitlines()]
    removed = [line for line in before if line.code not in now]
    detail = [f"- {line.file}:{line.line}, in {line.function}: {line.code}" for line in removed]
    added: list[TracedLine] = []
    if removed:
        known = {line.code for line in before}
        candidates = [code for code in now if code and code not in known]
        for code in difflib.get_close_matches(removed[0].code, candidates, n=1, cutoff=_SIMILARITY):
            added = [removed[0]._replace(line=now.index(code) + 1, code=code)]
            detail.append(f"+ {added[0].file}:{added[0].line}: {code}")
    return LineChanges(_first_change(removed, added), tuple(detail))


def _file_name(module: str, lines: Iterable[TracedLine]) -> str:
    """Return the name of a module's file; `__init__.py` if only that was traced, as for a package."""
    name = f"{module.rpartition('.')[2]}.py"
    files = {line.file for line in lines}
    return name if name in files or "__init__.py" not in files else "__init__.py"


def _in_file(name: str, lines: Iterable[TracedLine]) -> list[TracedLine]:
    return sorted((line for line in lines if line.file == name), key=lambda line: line.line)


def _first_change(removed: Sequence[TracedLine], added: Sequence[TracedLine]) -> str:
    if not removed and not added:
        return ""
    more = max(len(removed), len(added)) - 1
    others = f", and {more} more line{'s' * (more > 1)}" if more > 0 else ""
    first = min((*removed, *added), key=lambda line: line.line)
    where = f"{first.file}, line {first.line}, in {first.function}"
    if removed and added:
        return f"{where}: `{removed[0].code}` is `{added[0].code}` now{others}"
    return f"{where}: `{first.code}` is {'gone' if removed else 'new'}{others}"
