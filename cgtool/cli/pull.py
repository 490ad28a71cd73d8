"""`cgtool pull`: fetch entries of a remote store into the cache.

Must not import torch; the toolkit is imported when the command runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cgtool.cli import failures
from cgtool.cli.import_ import show_entries
from cgtool.cli.options import cache_dir_option, cache_root, output_options, trust_options
from cgtool.cli.text import count_text, secs_text

if TYPE_CHECKING:
    from cgtool.cli.output import Output
    from cgtool.toolkit.remote import PullReport

EXAMPLES = """\b
Examples:
  cgtool pull s3://models/cgtool --require-signature release.pub
  cgtool pull https://cache.example.com/dav 3f9a --trust
  cgtool pull file:///mnt/shared/cgtool --trust --cache-dir /var/cache/models
"""


@click.command(epilog=EXAMPLES)
@click.argument("url", metavar="URL")
@click.argument("hashes", nargs=-1, metavar="[HASH]...")
@trust_options
@cache_dir_option
@output_options
def pull(*, output: Output, url: str, hashes: tuple[str, ...], **options: Any) -> int:
    """Pull entries of the store at URL into the cache.

    URL is any that `cgtool push` accepts, or an https:// server without WebDAV. HASH is a prefix of a hash that `cgtool
    inspect cache URL` lists. Without HASH, all entries that this machine can load are pulled. Files that the cache
    already has are not fetched again.

    Entries contain native code, so they need a signature by a key that you trust, or --trust. An entry is checked
    completely before any of it enters the cache, as `cgtool import` checks a bundle. Exit code 3: an entry was refused.
    """
    from cgtool.cli.progress import reporting
    from cgtool.toolkit.remote import pull as run

    policy = {name: options[name] for name in ("trust", "require_signature", "any_machine")}
    folder = cache_root(options["cache_dir"])
    with reporting(output) as on_event:
        report = run(url, hashes, cache_dir=folder, **policy, replacing=options["replace"], on_event=on_event)
    output.report(report, _show)
    return failures.DONE


def _show(output: Output, report: PullReport) -> None:
    """Print the outcome of each entry."""
    output.notes("Warning", report.warnings)
    output.notes("Skipped", report.skipped)
    show_entries(output, report.entries)
    count = count_text(len(report.entries), "entry", "entries")
    output.line(f"Pulled {count} from {report.url} into {report.root} in {secs_text(report.secs)}")
