"""`cgtool export`: parse what is wanted, write it, print what was written.

Must not import torch; the command itself loads as it runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cgtool.cli import failures
from cgtool.cli.options import (
    cache_dir_option,
    cache_folder,
    entries_chosen,
    entries_options,
    read_shapes,
    sign_option,
    talk_options,
)
from cgtool.cli.text import count_text, size_text

if TYPE_CHECKING:
    from cgtool.cli.output import Output
    from cgtool.toolkit.bundle.export import ExportReport

EXAMPLES = """\b
Examples:
  cgtool export llama.tar.zst
  cgtool export llama.tar.zst 3f9a --rank 0 --shape general --shape 8
  cgtool export layer/cache --folder --no-debug --all
  cgtool export release.tar.zst --all --sign key.pem
  cgtool export s3://models/llama.tar.zst
  cgtool export oci://registry.example.com/team/llama-cache:v1
  cgtool export - 3f9a | ssh server cgtool import - --trust
"""


@click.command(epilog=EXAMPLES)
@click.argument("dest", type=click.Path(), metavar="DEST")
@entries_options
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    callback=read_shapes,
    metavar="SHAPE",
    help="Only artifacts for this shape: general, 8, 2-64 or batch=4:seq=2-64. Repeatable.",
)
@click.option("--no-debug", is_flag=True, help="Without computation_graph.py and transformed_code.py.")
@click.option("--folder", is_flag=True, help="Write a folder, which serves as a cache as it stands, and no file.")
@click.option(
    "--level", type=click.IntRange(1, 19), default=3, show_default=True, help="How hard zstd tries to make it small."
)
@sign_option
@cache_dir_option
@talk_options
def export(*, output: Output, dest: str, **options: Any) -> int:
    """Write entries of the cache to DEST, a .tar.zst here or behind a URL, or - for standard output.

    A DEST such as oci://HOST/REPOSITORY:TAG becomes a container image whose files serve as a cache, for `COPY --from`
    in a Dockerfile and for pods that mount images. Each artifact is a layer, which images share.

    HASH is the beginning of a hash that `inspect cache` lists. Without any, all entries are written if they are of one
    model. The same entries give the same archive, byte for byte before it is packed. DEST appears whole or not at all.
    """
    # The command itself: what `--help` does without.
    from cgtool.remote.stores import is_remote
    from cgtool.toolkit.bundle.export import export as run
    from cgtool.toolkit.remote import export_to

    _check(dest, options, output)
    more: dict[str, Any] = {"choice": entries_chosen(options), "cache_dir": cache_folder(options["cache_dir"])}
    more |= {name: options[name] for name in ("level", "sign")}
    if is_remote(dest):
        report = export_to(dest, **more)
    else:
        report = run(sys.stdout.buffer if dest == "-" else Path(dest), folder=options["folder"], **more)
    output.report(report, _show)
    return failures.DONE


def _show(output: Output, report: ExportReport) -> None:
    """Print what was written; to standard error where standard output took the bundle."""
    # Rich and msgspec: what `--help` does without.
    from cgtool.cli.columns import show_rows
    from cgtool.store.layout import short

    entries = count_text(len({entry.hash for entry in report.entries}), "entry", "entries")
    packed = f", {size_text(report.written_bytes)} packed" if report.form == "archive" else ""
    signed = f", signed by {', '.join(map(short, report.signed_by))}" if report.signed_by else ""
    line = f"Wrote {entries} ({size_text(report.size_bytes)}{packed}{signed}) to {report.dest}"
    if report.dest == "-":
        output.note(line.removesuffix(" to -"))
        return
    rows = [(short(entry.hash), entry.model, entry.rank, entry.prefix, entry.rows) for entry in report.entries]
    show_rows(output, ("hash", "model", ">rank", "prefix", ">rows"), rows)
    output.line(line)
    if report.form == "image":
        output.note(
            f"In a Dockerfile: COPY --from={report.dest.removeprefix('oci://')} / /var/cache/cgtool/", style="dim"
        )
    elif not report.signed_by:
        output.note("It is not signed: whoever imports it must say --trust. Sign with --sign KEY.", style="dim")


def _check(dest: str, options: dict[str, Any], output: Output) -> None:
    from cgtool.remote.stores import is_remote  # records, which `--help` does without

    if options["folder"] and is_remote(dest):
        message = "A store takes a bundle as one file. Leave out --folder, or push entries with cgtool push."
        raise click.UsageError(message)
    if dest != "-":
        return
    if options["folder"]:
        raise click.UsageError("A folder cannot be written to standard output. Name a place for it.")
    if output.as_json:
        message = "Standard output takes either the bundle or the report. Name a file to write to, or leave out --json."
        raise click.UsageError(message)
    if sys.stdout.isatty():
        raise click.UsageError("A bundle is no text for a terminal. Redirect the output, or name a file.")
