"""`cgtool push`: send entries of the cache to a remote store.

Must not import torch; the toolkit is imported when the command runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cgtool.cli import failures
from cgtool.cli.options import (
    cache_dir_option,
    cache_root,
    entries_options,
    output_options,
    selected_entries,
    sign_option,
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
@sign_option
@cache_dir_option
@output_options
def push(*, output: Output, url: str, **options: Any) -> int:
    """Push entries of the cache to the store at URL.

    URL is s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, az://CONTAINER/FOLDER, https://HOST/FOLDER (a WebDAV server),
    oci://HOST/REPOSITORY:TAG or file:///FOLDER. Credentials are found as the cloud's own tools find them.

    HASH is a prefix of a hash that `cgtool inspect cache` lists. Without HASH, --all or --filter, all entries are
    pushed, provided that they belong to one model. Files that the store already has are not sent again. An entry
    becomes visible only once it is complete.
    """
    from cgtool.cli.progress import reporting
    from cgtool.toolkit.remote import push as run

    choice = selected_entries(options)
    folder = cache_root(options["cache_dir"])
    with reporting(output) as on_event:
        report = run(url, choice=choice, cache_dir=folder, sign=options["sign"], on_event=on_event)
    output.report(report, _show)
    return failures.DONE


def _show(output: Output, report: PushReport) -> None:
    """Print what was sent of each entry."""
    from cgtool.cli.columns import show_rows
    from cgtool.store.layout import short

    output.notes("Warning", report.warnings)
    rows = [(short(one.hash), one.model, one.outcome, one.files, size_text(one.size_bytes)) for one in report.entries]
    show_rows(output, ("hash", "model", "outcome", ">files", ">sent"), rows)
    count = count_text(len(report.entries), "entry", "entries")
    sent = size_text(sum(one.size_bytes for one in report.entries))
    output.line(f"Pushed {count} ({sent} sent) to {report.url} in {secs_text(report.secs)}")
