"""Lines of the model's own files, as the comments of `computation_graph.py` quote them. No torch here.

Only digests of source files are stored, so which line changed is known of lines that a trace went through. A comment::

    # <file name>:<line>, in <function>: <the line without its margin>
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from cgtool.records import dataclass
from cgtool.toolkit.diff.lines import line_diff, matched

_COMMENT = re.compile(
    r"^ *# (?P<file>[^:\n]+):(?P<line>\d{1,9}), in (?P<function>[^:\n]+): (?P<code>.*)$", re.MULTILINE
)
#: How alike two lines are, from 0 to 1, of which one is taken to have become the other.
_ALIKE = 0.6


@dataclass(frozen=True, kw_only=True)
class TracedLine:
    """A line that a trace went through.

    Args:
        file: The file's name without its folder.
        line: Its number, from 1.
        function: The function that it stands in.
        code: The line without its margin.
    """

    file: str
    line: int
    function: str
    code: str


@dataclass(frozen=True, kw_only=True)
class LineChanges:
    """What became of the traced lines of one file.

    Args:
        sentence: The first change: "tiny_llama.py, line 82, in forward: `a` is `b` now"; "" where none is known.
        detail: All changes, as a diff.
        known: Whether there were lines to compare: an entry that was shipped without its debug files has none.
    """

    sentence: str
    detail: tuple[str, ...]
    known: bool = True


#: Of entries whose lines are not there.
NOTHING_KNOWN = LineChanges(sentence="", detail=(), known=False)


def traced_lines(graph: str) -> tuple[TracedLine, ...]:
    """Return the lines that a computation graph quotes, each once, in the order in which they were traced first.

    Args:
        graph: The text of `computation_graph.py`.
    """
    # Every layer quotes the same lines: records are made of what is left of thousands.
    found = dict.fromkeys(_COMMENT.findall(graph))
    return tuple(
        TracedLine(file=file, line=int(line), function=function, code=code) for file, line, function, code in found
    )


def file_name(module: str, lines: Iterable[TracedLine]) -> str:
    """Return the name of a module's file: that of a package is `__init__.py`, if no line was traced in another."""
    own = f"{module.rpartition('.')[2]}.py"
    files = {line.file for line in lines}
    return own if own in files or "__init__.py" not in files else "__init__.py"


def between_graphs(module: str, old: Sequence[TracedLine], new: Sequence[TracedLine]) -> LineChanges:
    """Return what changed among the traced lines of a module's file between two entries."""
    if not old or not new:
        return NOTHING_KNOWN
    name = file_name(module, (*old, *new))
    before, after = _in_file(name, old), _in_file(name, new)
    texts = (
        [f"in {line.function}: {line.code}" for line in before],
        [f"in {line.function}: {line.code}" for line in after],
    )
    pairs = matched(*texts)
    gone = _without(before, {left for left, _ in pairs})
    come = _without(after, {right for _, right in pairs})
    return LineChanges(sentence=_first_change(gone, come), detail=line_diff(*texts))


def in_file_now(module: str, traced: Sequence[TracedLine], text: str) -> LineChanges:
    """Return which traced lines of a module's file are not in it any more.

    Args:
        module: The module.
        traced: The lines of an entry.
        text: The file as it is now.
    """
    if not traced:
        return NOTHING_KNOWN
    then = _in_file(file_name(module, traced), traced)
    now = [line.strip() for line in text.splitlines()]
    gone = [line for line in then if line.code not in now]
    known = {line.code for line in then}
    new = [
        TracedLine(file=line.file, line=number, function=line.function, code=code)
        for line in gone[:1]
        for number, code in enumerate(now, start=1)
        if code and code not in known
    ]
    alike = difflib.get_close_matches(gone[0].code, [line.code for line in new], n=1, cutoff=_ALIKE) if gone else []
    come = [line for line in new if line.code in alike][:1]
    detail = [f"- {line.file}:{line.line}, in {line.function}: {line.code}" for line in gone]
    detail += [f"+ {line.file}:{line.line}: {line.code}" for line in come]
    return LineChanges(sentence=_first_change(gone, come), detail=tuple(detail))


def _in_file(name: str, lines: Iterable[TracedLine]) -> list[TracedLine]:
    return sorted((line for line in lines if line.file == name), key=lambda line: line.line)


def _without(lines: Sequence[TracedLine], kept: set[int]) -> list[TracedLine]:
    return [line for position, line in enumerate(lines) if position not in kept]


def _first_change(gone: Sequence[TracedLine], come: Sequence[TracedLine]) -> str:
    more = max(len(gone), len(come)) - 1
    others = f", and {more} more {'line' if more == 1 else 'lines'}" if more > 0 else ""
    if not gone and not come:
        return ""
    first = min((*gone, *come), key=lambda line: line.line)
    where = f"{first.file}, line {first.line}, in {first.function}"
    if gone and come:
        return f"{where}: `{gone[0].code}` is `{come[0].code}` now{others}"
    return f"{where}: `{first.code}` is {'gone' if gone else 'new'}{others}"
