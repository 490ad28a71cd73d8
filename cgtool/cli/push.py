"""`cgtool push`: parse what is wanted, send it, print what was sent.

Must not import torch; the command itself loads as it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cgtool.cli import failures
from cgtool.cli.options import (
    cache_dir_option,
    cache_folder,
    entries_chosen,
    entries_options,
    sign_option,
    talk_options,
)
from cgtool.cli.text import count_text, secs_text, size_text

if TYPE_CHECKING:
    from cgtool.cli.output import Output
    from cgtool.toolkit.remote import PushReport

EXAMPLES = """\b
Examples:
  cgtool push s3://models/cgtool
  cgtool push https://cache.example.com/dav 3f9a
  cgtool push oci://registry.example.com/team/models:llama
  cgtool push file:///mnt/shared/cgtool --all --sign key.pem
"""


@click.command(epilog=EXAMPLES)
@click.argument("url", metavar="URL")
@entries_options
@click.option("--no-debug", is_flag=True, help="Without computation_graph.py and transformed_code.py.")
@sign_option
@cache_dir_option
@talk_options
def push(*, output: Output, url: str, **options: Any) -> int:
    """Send entries of the cache to the store at URL.

    URL is s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, az://CONTAINER/FOLDER, https://HOST/FOLDER of a server with
    WebDAV, oci://HOST/REPOSITORY:TAG, or file:///FOLDER. Credentials are those that the cloud's own tools use. HASH is
    the beginning of a hash that `inspect cache` lists; without any, all entries are sent if they are of one model.

    What is there already is not sent again. An entry is seen once all of it is there.
    """
    # Rich and the command itself: what `--help` does without.
    from cgtool.cli.progress import reporting
    from cgtool.toolkit.remote import push as run

    choice = entries_chosen(options)
    folder = cache_folder(options["cache_dir"])
    with reporting(output) as on_event:
        report = run(url, choice=choice, cache_dir=folder, sign=options["sign"], on_event=on_event)
    output.report(report, _show)
    return failures.DONE


def _show(output: Output, report: PushReport) -> None:
    """Print what was sent of each entry."""
    # Rich and msgspec: what `--help` does without.
    from cgtool.cli.columns import show_rows
    from cgtool.store.layout import short

    output.notes("Warning", report.warnings)
    rows = [(short(one.hash), one.model, one.outcome, one.files, size_text(one.size_bytes)) for one in report.entries]
    show_rows(output, ("hash", "model", "outcome", ">files", ">sent"), rows)
    count = count_text(len(report.entries), "entry", "entries")
    sent = size_text(sum(one.size_bytes for one in report.entries))
    output.line(f"Pushed {count} ({sent} sent) to {report.url} in {secs_text(report.secs)}")
