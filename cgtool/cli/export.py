"""`cgtool export`: write entries of the cache to a bundle, a folder, a store or a registry.

Must not import torch; the toolkit is imported when the command runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cgtool.cli import failures
from cgtool.cli.options import (
    cache_dir_option,
    cache_root,
    check_shapes,
    entries_options,
    output_options,
    selected_entries,
    sign_option,
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
    callback=check_shapes,
    metavar="SHAPE",
    help="Select only artifacts for this shape: general, 8, 2-64 or batch=4:seq=2-64. Repeatable.",
)
@click.option("--folder", is_flag=True, help="Write a directory, which is usable as a cache, instead of a file.")
@click.option("--level", type=click.IntRange(1, 19), default=3, show_default=True, help="zstd compression level.")
@sign_option
@cache_dir_option
@output_options
def export(*, output: Output, dest: str, **options: Any) -> int:
    """Export entries of the cache to DEST: a .tar.zst file, the URL of one in a store, or - for standard output.

    If DEST is oci://HOST/REPOSITORY:TAG, the export is a container image whose files are usable as a cache, for `COPY
    --from` in a Dockerfile and for pods that mount images. Each artifact is a layer, which images share.

    HASH is a prefix of a hash that `cgtool inspect cache` lists. Without HASH, --all or --filter, all entries are
    exported, provided that they belong to one model. Equal entries give the same archive, byte for byte before
    compression. DEST is written whole or not at all.
    """
    from cgtool.remote.stores import is_remote
    from cgtool.toolkit.bundle.export import export as run
    from cgtool.toolkit.remote import export_to

    _check(dest, options, output)
    more: dict[str, Any] = {"choice": selected_entries(options), "cache_dir": cache_root(options["cache_dir"])}
    more |= {name: options[name] for name in ("level", "sign")}
    if is_remote(dest):
        report = export_to(dest, **more)
    else:
        report = run(sys.stdout.buffer if dest == "-" else Path(dest), folder=options["folder"], **more)
    output.report(report, _show)
    return failures.DONE


def _show(output: Output, report: ExportReport) -> None:
    """Print what was exported; on stderr if the bundle went to stdout."""
    from cgtool.cli.columns import show_rows
    from cgtool.store.layout import short

    entries = count_text(len({entry.hash for entry in report.entries}), "entry", "entries")
    packed = f", {size_text(report.written_bytes)} packed" if report.form == "archive" else ""
    signed = f", signed by {', '.join(map(short, report.signed_by))}" if report.signed_by else ""
    line = f"Exported {entries} ({size_text(report.size_bytes)}{packed}{signed}) to {report.dest}"
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
        output.note("The bundle is unsigned: importing it needs --trust. Sign it with --sign KEY.", style="dim")


def _check(dest: str, options: dict[str, Any], output: Output) -> None:
    from cgtool.remote.stores import is_remote  # imports msgspec, which `--help` does not need

    if options["folder"] and is_remote(dest):
        message = "A store holds a bundle as one file. Leave out --folder, or push entries with cgtool push."
        raise click.UsageError(message)
    if dest != "-":
        return
    if options["folder"]:
        raise click.UsageError("A directory cannot be written to standard output. Name a path for it.")
    if output.as_json:
        message = "Standard output cannot take both the bundle and the report. Name a file, or leave out --json."
        raise click.UsageError(message)
    if sys.stdout.isatty():
        raise click.UsageError("A bundle is binary data. Redirect the output, or name a file.")
