"""`cgtool verify`: check that cached files are intact and load on this machine.

Must not import torch; the toolkit and the tables are imported when the command runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cgtool.cli import failures
from cgtool.cli.options import build_options, cache_dir_option, cache_options, cache_root, output_options, place_options
from cgtool.cli.text import count_text, cut, first, secs_text, size_text
from cgtool.store.layout import short

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cgtool.cli.output import Output
    from cgtool.toolkit.model_choice import ModelChoice
    from cgtool.toolkit.verify.checks import Finding
    from cgtool.toolkit.verify.load import LoadProof
    from cgtool.toolkit.verify.repair import Repair
    from cgtool.toolkit.verify.run import EntryReport, VerifyReport

EXAMPLES = """\b
Examples:
  cgtool verify
  cgtool verify 3f9a --world-size 8
  cgtool verify /mnt/shared/cache --strict
  cgtool verify llama.tar.zst
  cgtool verify s3://models/cgtool
  cgtool verify --repair
  cgtool verify 3f9a --load
  cgtool verify --load --model fixtures/tiny_llama.py:build --arg num_layers=4
  cgtool verify --json | jq '.entries[].verdict'
"""

#: The text for one entry and for several, and its colour.
_VERDICTS = {
    "loads": ("loads, but recompiling is advised", "load, but recompiling is advised", "yellow"),
    "unsupported": ("is unsupported on this machine", "are unsupported on this machine", "red"),
}
#: Limits of the output: an untrusted cache may hold lines of any length, and a damaged disk has many problems.
_LINE_CHARACTERS = 1000
_MOST_NAMED = 8


@click.command(epilog=EXAMPLES)
@click.argument("targets", nargs=-1, metavar="[HASH...|PATH|URL]")
@click.option("--strict", is_flag=True, help="Fail if any entry is not optimal on this machine.")
@click.option(
    "--world-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="Require N ranks of each entry. Default: ranks 0 to the highest that it has.",
)
@click.option("--repair", is_flag=True, help="Repair damaged files; recompile those that have no intact copy.")
@click.option("--load", is_flag=True, help="Open every artifact in a fresh process that cannot compile.")
@click.option(
    "--model", metavar="MODEL", help="With --load, also load this model and call it once. MODEL is as for cgtool warm."
)
@build_options
@cache_options
@place_options
@click.option(
    "--jobs", type=click.IntRange(min=1), metavar="N", help="Read N files in parallel. Default: one for each core."
)
@cache_dir_option
@output_options
def verify(*, output: Output, targets: tuple[str, ...], **options: Any) -> int:
    """Check every file of the cache against its digest, and whether this machine can load each entry.

    HASH is a prefix of a hash that `cgtool inspect cache` lists. PATH is a cache, one entry (its directory, or
    PATH:HASH), or a bundle to check before importing it. URL is a store, as for `cgtool push`; URL:HASH is one entry of
    it. The default is the whole cache. Without --load and --repair, nothing is executed or changed.

    The verdict on an entry is one of: optimal; loads, but recompiling is advised; unsupported on this machine.

    Exit code 3: a file is damaged or missing, or loading would refuse an entry because of its permissions or a missing
    signature. A verdict alone gives 3 if a named HASH, entry or bundle is unsupported, if a cache has no supported
    entry, or with --strict; otherwise entries for other machines are not a failure.
    """
    from cgtool.cli.progress import reporting
    from cgtool.toolkit.verify.run import verify as run

    settings = {name: options[name] for name in ("strict", "world_size", "jobs", "load", "repair", "rank")}
    settings |= {"model": _model(options), "names_cache": options["cache_dir"] is not None}
    with reporting(output) as on_event:
        report = run(targets, cache_dir=cache_root(options["cache_dir"]), **settings, on_event=on_event)
    output.report(report, _show)
    return failures.DONE if report.ok else failures.CHECK_FAILED


def _model(options: dict[str, Any]) -> ModelChoice | None:
    from cgtool.toolkit.model_choice import ModelChoice

    names = ("factory_args", "device", "dtype", "pythonpath", "prefix")
    if options["model"] is None:
        given = [
            f"--{'arg' if name == 'factory_args' else name}"
            for name in (*names, "rank")
            if options[name] not in (None, {}, ())
        ]
        if given:
            raise click.UsageError(f"{given[0]} needs a model. Name it with --model.")
        return None
    if not options["load"]:
        raise click.UsageError("--model needs --load. Give --load too.")
    return ModelChoice(model=options["model"], **{name: options[name] for name in names})


def _show(output: Output, report: VerifyReport) -> None:
    """Print a table of the entries, the problems of each, and a summary."""
    from cgtool.cli.columns import show_rows

    units = report.units
    if not report.entries and (units is None or not units.files):
        output.line(f"The cache at {report.root} is empty: nothing to verify.")
        return
    show_rows(output, ("hash", "model", ">files", ">size", ">problems", "verdict"), map(_cells, report.entries))
    _show_verdicts(output, report.entries)
    for entry in report.entries:
        hash_ = short(entry.hash)
        _show_repairs(output, entry.repairs)
        _show_problems(output, hash_, entry.problems)
        missing = list(_missing(entry))
        if missing:
            output.line(f"{hash_} is incomplete; warm the model again to add the missing parts:", style="red")
            _show_lines(output, missing)
    _show_repairs(output, () if units is None else units.repairs)
    notes = [note for entry in report.entries for note in entry.notes]
    if units is not None:
        _show_problems(output, "units", units.problems)
        notes += units.notes
    for line in first([cut(note.sentence, _LINE_CHARACTERS) for note in notes]):
        output.note(f"Note: {line}", style="dim")
    if report.load is not None:
        _show_load(output, report.load)
    output.line(_summary(report), style="bold")


def _cells(entry: EntryReport) -> tuple[object, ...]:
    wrong = len(entry.problems) + len(entry.holes) + len(entry.missing_ranks) + bool(entry.unknown_pieces)
    verdict = "unfinished" if entry.is_unfinished else entry.verdict.level
    models = cut(", ".join(entry.models))
    return short(entry.hash), models, entry.files, size_text(entry.size_bytes), wrong, verdict


def _show_verdicts(output: Output, entries: Sequence[EntryReport]) -> None:
    """Print each verdict once with all its entries: thousands may come from the same machine."""
    alike: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for entry in entries:
        if entry.verdict.reasons and not entry.is_unfinished:
            alike.setdefault((entry.verdict.level, entry.verdict.reasons), []).append(short(entry.hash))
    for (level, reasons), hashes in alike.items():
        named = ", ".join(hashes[:_MOST_NAMED])
        more = f" and {len(hashes) - _MOST_NAMED} more" if len(hashes) > _MOST_NAMED else ""
        one, several, color = _VERDICTS[level]
        output.line(f"{named}{more} {several if len(hashes) > 1 else one}:", style=color)
        for reason in reasons:
            output.line(f"  - {reason}")


def _missing(entry: EntryReport) -> Iterator[str]:
    from cgtool.plan.shapes import shape_text  # imports msgspec, which `--help` does not need

    for hole in entry.holes:
        where = f"piece {hole.piece_index} of variant {hole.variant}, rank {hole.rank} {hole.prefix}"
        yield f"{where}, has no artifact for the shape {shape_text(hole.shape)}"
    for prefix, rank in entry.missing_ranks:
        yield f"rank {rank} of {prefix} is missing"
    if entry.unknown_pieces:
        yield f"{count_text(entry.unknown_pieces, 'compiled piece')} missing that only the plan names"


def _show_repairs(output: Output, repairs: Sequence[Repair]) -> None:
    if repairs:
        output.line("Repairs:", style="bold")
        _show_lines(output, [f"{repair.action.replace('_', ' ')}: {repair.sentence}" for repair in repairs])


def _show_problems(output: Output, what: str, problems: Sequence[Finding]) -> None:
    if problems:
        output.line(f"{what}: {count_text(len(problems), 'damaged or missing file')}:", style="red")
        _show_lines(output, [problem.sentence for problem in problems])


def _show_load(output: Output, proof: LoadProof) -> None:
    for opened in proof.entries:
        count = f"{short(opened.hash)} rank {opened.rank} {opened.prefix}: {count_text(opened.opened, 'artifact')}"
        output.line(f"{count} opened in a process that cannot compile", style="red" if opened.problems else "green")
        _show_lines(output, [f"{one.path[:10]} {one.sentence}".strip() for one in opened.problems])
    model = proof.model
    if model is None:
        output.note(
            "Note: artifacts were opened but not run. Name a model with --model to load and call it.", style="dim"
        )
    elif model.called:
        name = "the entry" if model.hash is None else short(model.hash)
        output.line(f"{name}: the model was loaded and called once in a process that cannot compile", style="green")
    else:
        output.line(f"The model was not called: {cut(model.sentence, _LINE_CHARACTERS)}", style="red")
    if proof.compiled:
        output.line("Loading tried to compile:", style="red")
        _show_lines(output, proof.compiled)


def _show_lines(output: Output, lines: Sequence[str]) -> None:
    for line in first(lines):
        output.line(f"  - {cut(line, _LINE_CHARACTERS)}")


def _summary(report: VerifyReport) -> str:
    read = f"{count_text(report.files, 'file')}, {size_text(report.size_bytes)}, {secs_text(report.secs)}"
    if not report.ok:
        bad = report.failed
        units = len(report.units.problems) if report.units is not None else 0
        parts = [f"{count_text(bad, 'entry', 'entries')} of {len(report.entries)}"] * bool(bad)
        parts += [count_text(units, "file of units", "files of units")] * bool(units)
        parts += ["loading"] * bool(report.load is not None and not report.load.ok)
        return f"Verification failed: {' and '.join(parts)} (read {read})"
    others = sum(entry.verdict.level == "unsupported" and not entry.is_unfinished for entry in report.entries)
    more = f"; {others} of them for other machines" if others else ""
    return f"Verified {count_text(len(report.entries), 'entry', 'entries')} in {report.root} ({read}){more}"
