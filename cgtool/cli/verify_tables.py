"""The report of `verify` as people read it.

Must not import torch. Strings of a cache go through `plain`, never into markup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cgtool.cli.columns import show_rows
from cgtool.cli.text import count_text, secs_text, size_text
from cgtool.plan.shapes import shape_text
from cgtool.store.layout import short

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cgtool.cli.output import Output
    from cgtool.toolkit.verify.findings import Problem
    from cgtool.toolkit.verify.load import LoadProof
    from cgtool.toolkit.verify.repair import Repair
    from cgtool.toolkit.verify.report import EntryReport, VerifyReport
    from cgtool.toolkit.verify.verdict import Level

_COLORS = {"optimal": "green", "loads": "yellow", "unsupported": "red"}
#: What is said of one entry, and of several.
_WORDS = {
    "loads": ("loads, and compiling again is advised", "load, and compiling again is advised"),
    "unsupported": ("is unsupported here", "are unsupported here"),
}
#: A stranger may give a model a name of any length, and a damaged disk has no end of problems.
_NAME_CHARACTERS = 60
_MOST_LINES = 20
_MOST_NAMED = 8


def show_verify(output: Output, report: VerifyReport) -> None:
    """Print a table of the entries, then what is wrong with each, and one line that sums up."""
    if not report.entries and (report.units is None or not report.units.num_files):
        output.line(f"The cache at {report.root} is empty: nothing to verify.")
        return
    show_rows(output, ("hash", "model", ">files", ">size", ">problems", "verdict"), map(_cells, report.entries))
    _show_verdicts(output, report.entries)
    for entry in report.entries:
        _show_repairs(output, entry.repairs)
        _show_entry(output, entry)
    _show_repairs(output, report.unit_repairs)
    if report.units is not None:
        _show_problems(output, "units", report.units.problems)
    notes = [note for entry in report.entries for note in entry.findings.notes]
    notes += report.units.notes if report.units is not None else ()
    for note in notes[:_MOST_LINES]:
        output.note(f"Note: {_cut(note.sentence)}", style="dim")
    if len(notes) > _MOST_LINES:
        output.note(f"Note: and {len(notes) - _MOST_LINES} more, which --json shows.", style="dim")
    if report.load is not None:
        _show_load(output, report.load)
    output.line(_summary(report), style="bold")


def _cells(entry: EntryReport) -> tuple[object, ...]:
    findings = entry.findings
    wrong = len(findings.problems) + len(entry.holes) + len(entry.missing_ranks) + bool(entry.unknown_pieces)
    verdict = "unfinished" if entry.is_unfinished else entry.verdict.level
    size = size_text(findings.size_bytes)
    return short(findings.hash), _name(", ".join(entry.models)), findings.num_files, size, wrong, verdict


def _show_verdicts(output: Output, entries: Sequence[EntryReport]) -> None:
    """Print each verdict once, with all entries that have it: thousands may come from one machine."""
    alike: dict[tuple[Level, tuple[str, ...]], list[str]] = {}
    for entry in entries:
        if entry.verdict.reasons and not entry.is_unfinished:
            alike.setdefault((entry.verdict.level, entry.verdict.reasons), []).append(short(entry.findings.hash))
    for (level, reasons), hashes in alike.items():
        output.line(f"{_named(hashes)} {_WORDS[level][len(hashes) > 1]}:", style=_COLORS[level])
        for reason in reasons:
            output.line(f"  - {reason}")


def _named(hashes: Sequence[str]) -> str:
    named = ", ".join(hashes[:_MOST_NAMED])
    return named if len(hashes) <= _MOST_NAMED else f"{named} and {len(hashes) - _MOST_NAMED} more"


def _show_entry(output: Output, entry: EntryReport) -> None:
    hash_ = short(entry.findings.hash)
    _show_problems(output, hash_, entry.findings.problems)
    missing = [
        f"piece {hole.piece_index} of variant {hole.variant}, rank {hole.rank} {hole.prefix}, has nothing for the "
        f"shape {shape_text(hole.shape)}"
        for hole in entry.holes
    ]
    missing += [f"rank {rank} of {prefix} is missing" for prefix, rank in entry.missing_ranks]
    if entry.unknown_pieces:
        missing.append(f"{count_text(entry.unknown_pieces, 'compiled piece')} missing that only the plan could name")
    if missing:
        output.line(f"{hash_} is incomplete; warm the model again to add what is missing:", style="red")
        _show_lines(output, missing)


def _show_repairs(output: Output, repairs: Sequence[Repair]) -> None:
    lines = [f"{repair.action.replace('_', ' ')}: {_cut(repair.sentence)}" for repair in repairs]
    if lines:
        output.line("Repairs:", style="bold")
        _show_lines(output, lines)


def _show_load(output: Output, proof: LoadProof) -> None:
    for opened in proof.opened:
        words = f"{short(opened.name.hash)} rank {opened.name.rank} {opened.name.prefix}"
        count = count_text(opened.opened, "artifact")
        output.line(f"{words}: {count} opened where nothing can be compiled", style="green" if opened.ok else "red")
        _show_lines(output, [_cut(f"{one.file[:10]} {one.sentence}".strip()) for one in opened.problems])
    if proof.model is None:
        output.note(
            "Note: artifacts were opened and not run. Name a model with --model to load and call it.", style="dim"
        )
    elif proof.model.called:
        name = short(proof.model.name.hash) if proof.model.name is not None else "the entry"
        output.line(f"{name}: the model was loaded and called once where nothing can be compiled", style="green")
    else:
        output.line(f"The model was not called: {_cut(proof.model.sentence)}", style="red")
    if proof.compiled:
        output.line("It tried to compile:", style="red")
        _show_lines(output, [_cut(command) for command in proof.compiled])


def _show_problems(output: Output, what: str, problems: Sequence[Problem]) -> None:
    if problems:
        output.line(f"{what}: {count_text(len(problems), 'file')} not as it must be:", style="red")
        _show_lines(output, [_cut(problem.sentence) for problem in problems])


def _show_lines(output: Output, lines: Sequence[str]) -> None:
    for line in lines[:_MOST_LINES]:
        output.line(f"  - {line}")
    if len(lines) > _MOST_LINES:
        output.line(f"  - and {len(lines) - _MOST_LINES} more, which --json shows")


def _summary(report: VerifyReport) -> str:
    read = f"{count_text(report.num_files, 'file')}, {size_text(report.size_bytes)}, {secs_text(report.secs)}"
    if not report.ok:
        bad = len(report.failed)
        units = len(report.units.problems) if report.units is not None else 0
        parts = [f"{count_text(bad, 'entry', 'entries')} of {len(report.entries)}"] * bool(bad)
        parts += [count_text(units, "file of units", "files of units")] * bool(units)
        parts += ["the load"] * bool(report.load is not None and not report.load.ok)
        return f"Not verified: {' and '.join(parts)} (read {read})"
    others = sum(entry.verdict.level == "unsupported" and not entry.is_unfinished for entry in report.entries)
    more = f"; {others} of them {'is' if others == 1 else 'are'} for other machines" if others else ""
    return f"Verified {count_text(len(report.entries), 'entry', 'entries')} in {report.root} ({read}){more}"


def _name(text: str) -> str:
    return text if len(text) <= _NAME_CHARACTERS else f"{text[:_NAME_CHARACTERS]}…"


def _cut(text: str) -> str:
    most = 1000
    return text if len(text) <= most else f"{text[:most]}…"
