"""Lines of the model's own files, as the comments of `computation_graph.py` quote them. No torch here.

Only digests of source files are stored, so which line changed is known of lines that a trace went through. A comment::

    # <file name>:<line>, in <function>: <the line without its margin>
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from cgtool.store.layout import short
from cgtool.toolkit.diff.records import Difference, line_diff, matched

_COMMENT = re.compile(r"^ *# ([^:\n]+):(\d{1,9}), in ([^:\n]+): (.*)$", re.MULTILINE)
#: How alike two lines are, from 0 to 1, of which one is taken to have become the other.
_ALIKE = 0.6


class TracedLine(NamedTuple):
    """A line that a trace went through: file, number from 1, function, and code without the margin."""

    file: str
    line: int
    function: str
    code: str


class LineChanges(NamedTuple):
    """What became of the traced lines of one file.

    Args:
        sentence: The first change: "tiny_llama.py, line 82, in forward: `a` is `b` now"; "" where none is known.
        detail: All changes, as a diff.
        known: Whether there were lines to compare: an entry that was shipped without its debug files has none.
    """

    sentence: str = ""
    detail: tuple[str, ...] = ()
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
