"""`cgtool import`: verify a bundle and import its entries into the cache.

Must not import torch; the toolkit is imported when the command runs.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cgtool.cli import failures
from cgtool.cli.options import cache_dir_option, cache_root, output_options, trust_options
from cgtool.cli.text import count_text, size_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cgtool.cli.output import Output
    from cgtool.toolkit.bundle.import_ import ImportedEntry, ImportReport

EXAMPLES = """\b
Examples:
  cgtool import llama.tar.zst --trust
  cgtool import release.tar.zst --require-signature release.pub
  cgtool import layer/cache --require-signature /etc/cgtool/keys --cache-dir /var/cache/models
  cgtool import s3://models/llama.tar.zst --require-signature release.pub
  cgtool import - --require-signature release.pub < release.tar.zst
"""

_GIB = 2**30


def _number(_: click.Context, option: click.Parameter, value: float) -> float:
    """Return a limit, unless it is NaN or an infinite size."""
    if math.isnan(value) or (option.name == "max_size" and math.isinf(value)):
        raise click.BadParameter(f"{value} is not a usable limit. Give a finite number.")
    return value


@click.command("import", epilog=EXAMPLES)
@click.argument("source", type=click.Path(), metavar="SRC")
@trust_options
@click.option(
    "--max-size",
    type=click.FloatRange(min=0, min_open=True),
    callback=_number,
    default=64,
    show_default=True,
    metavar="GIB",
    help="Refuse a bundle that is larger than this when unpacked.",
)
@click.option(
    "--max-ratio",
    type=click.FloatRange(min=1),
    callback=_number,
    default=250,
    show_default=True,
    metavar="N",
    help="Refuse a bundle that unpacks to more than N times its size.",
)
@cache_dir_option
@output_options
def import_(*, output: Output, source: str, **options: Any) -> int:
    """Import the entries in SRC into the cache.

    SRC is a file or directory that `cgtool export` wrote, the URL of a bundle, or - for standard input.

    A bundle contains native code, so it needs a signature by a key that you trust, or --trust. The whole bundle is
    checked before the cache changes: names, sizes, digests, records, packages, and whether this machine can load it.
    Entries that the cache already has are merged.

    Exit code 3: the bundle was refused. --json then gives a stable reason.
    """
    from cgtool.remote.stores import is_remote
    from cgtool.toolkit.bundle.import_ import import_bundle
    from cgtool.toolkit.remote import import_from

    names = ("trust", "require_signature", "any_machine", "replace", "max_ratio")
    settings = {name: options[name] for name in names}
    settings |= {"cache_dir": cache_root(options["cache_dir"]), "max_bytes": int(options["max_size"] * _GIB)}
    if is_remote(source):
        report = import_from(source, **settings)
    else:
        report = import_bundle(sys.stdin.buffer if source == "-" else Path(source), **settings)
    output.report(report, _show)
    return failures.DONE


def _show(output: Output, report: ImportReport) -> None:
    """Print the outcome of each entry."""
    from cgtool.store.layout import short  # imports msgspec, which `--help` does not need

    output.notes("Warning", report.warnings)
    show_entries(output, report.entries)
    count = count_text(len(report.entries), "entry", "entries")
    signed = f", signed by {short(report.signed_by)}" if report.signed_by else ""
    output.line(f"Imported {count} ({size_text(report.size_bytes)}{signed}) into {report.root}")


def show_entries(output: Output, entries: Iterable[ImportedEntry]) -> None:
    """Print a table of imported entries and their outcomes."""
    from cgtool.cli.columns import show_rows
    from cgtool.store.layout import short

    rows = [
        (short(one.hash), rank.model, rank.rank, rank.prefix, one.outcome, one.artifacts, size_text(one.size_bytes))
        for one in entries
        for rank in one.ranks
    ]
    show_rows(output, ("hash", "model", ">rank", "prefix", "outcome", ">artifacts", ">size"), rows)
