"""What a comparison finds, and what finds it: facts of two sides by name, and lines of two texts. No torch here.

Only digests of source files are stored, so which line of the model's own files changed is known of lines that a trace
went through, as the comments of `computation_graph.py` quote them::

    # <file name>:<line>, in <function>: <the line without its margin>
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

#: Begins a line of `detail` that names where else the same was found.
ALSO = "also: "

_NUMBER = re.compile(r"\d+")
#: Lines around a change that are shown with it.
_CONTEXT = 2
#: A list of changes that is longer serves nobody; what is left out is counted.
_MOST_LINES = 60
#: Lists that differ in more lines than this are not aligned: that takes time in their square.
_MOST_ALIGNED = 1500

_COMMENT = re.compile(r"^ *# ([^:\n]+):(\d{1,9}), in ([^:\n]+): (.*)$", re.MULTILINE)
#: How alike two lines are, from 0 to 1, of which one is taken to have become the other.
_ALIKE = 0.6

_Name = TypeVar("_Name")
_Value = TypeVar("_Value")


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One thing in which two sides differ; its fields are what `diff --json` prints of it."""

    #: Its kind.
    what: What
    #: Where it is: "config.level", "self.layers.0.eps", "default/piece 2".
    path: str
    #: What the first side has; None where it has nothing, as below.
    old: Json
    new: Json
    #: It as people read it; holds words of models and caches as they stand, so it is quoted where shown.
    sentence: str
    #: More lines: a diff of a graph or of a file's lines, the paths of what changed alike.
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


class TracedLine(NamedTuple):
    """A line that a trace went through: file, number from 1, function, and code without the margin."""

    file: str
    line: int
    function: str
    code: str


class LineChanges(NamedTuple):
    """What became of the traced lines of one file."""

    #: The first change: "tiny_llama.py, line 82, in forward: `a` is `b` now"; "" where none is known.
    sentence: str = ""
    #: All changes, as a diff.
    detail: tuple[str, ...] = ()
    #: Whether there were lines to compare: an entry that was shipped without its debug files has none.
    known: bool = True


_NOTHING_KNOWN = LineChanges(known=False)


def with_lines(difference: Difference, changes: LineChanges) -> Difference:
    """Return the difference of a source file with the lines that changed, where they are known."""
    old, new = (short(str(side)) for side in (difference.old, difference.new))
    said = f" (its digest was {old} and is {new} now)"
    if changes.sentence:
        said = f": {changes.sentence}"
    elif changes.known:
        said += ", in no line that a trace shows: a comment, or code that leaves no operation behind"
    return replace(difference, sentence=f"{difference.path} has changed{said}", detail=changes.detail)


def traced_lines(graph: str) -> tuple[TracedLine, ...]:
    """Return the lines that the text of a graph quotes, each once, in the order in which they were traced first."""
    # Every layer quotes the same lines: records are made of what is left of thousands.
    found = dict.fromkeys(_COMMENT.findall(graph))
    return tuple(TracedLine(file, int(line), function, code) for file, line, function, code in found)


def between_graphs(module: str, old: Sequence[TracedLine], new: Sequence[TracedLine]) -> LineChanges:
    """Return what changed among the traced lines of a module's file between two entries."""
    if not old or not new:
        return _NOTHING_KNOWN
    name = _file_name(module, (*old, *new))
    before, after = _in_file(name, old), _in_file(name, new)
    texts = [[f"in {line.function}: {line.code}" for line in side] for side in (before, after)]
    pairs = matched(*texts)
    kept = {left for left, _ in pairs}, {right for _, right in pairs}
    gone = [line for position, line in enumerate(before) if position not in kept[0]]
    come = [line for position, line in enumerate(after) if position not in kept[1]]
    return LineChanges(_first_change(gone, come), line_diff(*texts))


def in_file_now(module: str, traced: Sequence[TracedLine], text: str) -> LineChanges:
    """Return which traced lines of a module's file are not in it any more."""
    if not traced:
        return _NOTHING_KNOWN
    then = _in_file(_file_name(module, traced), traced)
    now = [line.strip() for line in text.splitlines()]
    gone = [line for line in then if line.code not in now]
    detail = [f"- {line.file}:{line.line}, in {line.function}: {line.code}" for line in gone]
    come: list[TracedLine] = []
    if gone:
        known = {line.code for line in then}
        new = [code for code in now if code and code not in known]
        for code in difflib.get_close_matches(gone[0].code, new, n=1, cutoff=_ALIKE):
            come = [gone[0]._replace(line=now.index(code) + 1, code=code)]
            detail.append(f"+ {come[0].file}:{come[0].line}: {code}")
    return LineChanges(_first_change(gone, come), tuple(detail))


def _file_name(module: str, lines: Iterable[TracedLine]) -> str:
    """The name of a module's file: that of a package is `__init__.py`, if no line was traced in another."""
    own = f"{module.rpartition('.')[2]}.py"
    files = {line.file for line in lines}
    return own if own in files or "__init__.py" not in files else "__init__.py"


def _in_file(name: str, lines: Iterable[TracedLine]) -> list[TracedLine]:
    return sorted((line for line in lines if line.file == name), key=lambda line: line.line)


def _first_change(gone: Sequence[TracedLine], come: Sequence[TracedLine]) -> str:
    if not gone and not come:
        return ""
    more = max(len(gone), len(come)) - 1
    others = f", and {more} more line{'s' * (more > 1)}" if more > 0 else ""
    first = min((*gone, *come), key=lambda line: line.line)
    where = f"{first.file}, line {first.line}, in {first.function}"
    if gone and come:
        return f"{where}: `{gone[0].code}` is `{come[0].code}` now{others}"
    return f"{where}: `{first.code}` is {'gone' if gone else 'new'}{others}"
