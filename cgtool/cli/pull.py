"""`cgtool pull`: parse whom to trust, fetch what is wanted, print what came of it.

Must not import torch; the command itself loads as it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cgtool.cli import failures
from cgtool.cli.import_ import show_entries
from cgtool.cli.options import cache_dir_option, cache_folder, talk_options, trust_options
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
@talk_options
def pull(*, output: Output, url: str, hashes: tuple[str, ...], **options: Any) -> int:
    """Take entries of the store at URL into the cache.

    URL is as `cgtool push` takes it; plain https:// without WebDAV will do. HASH is the beginning of a hash that
    `cgtool inspect cache URL` lists; without any, all entries are taken that this machine can load. What the cache has
    already is not fetched again.

    What a store holds is native code. So it needs a signature of a key that you trust, or --trust. All of an entry is
    checked before anything of it is placed, as `cgtool import` checks a bundle; a refusal exits with 3.
    """
    # Rich and the command itself: what `--help` does without.
    from cgtool.cli.progress import reporting
    from cgtool.toolkit.remote import pull as run

    asked = {name: options[name] for name in ("trust", "require_signature", "any_machine")}
    folder = cache_folder(options["cache_dir"])
    with reporting(output) as on_event:
        report = run(url, hashes, cache_dir=folder, **asked, replacing=options["replace"], on_event=on_event)
    output.report(report, _show)
    return failures.DONE


def _show(output: Output, report: PullReport) -> None:
    """Print what became of each entry."""
    output.notes("Warning", report.warnings)
    output.notes("Left out", report.skipped)
    show_entries(output, report.entries)
    count = count_text(len(report.entries), "entry", "entries")
    output.line(f"Pulled {count} from {report.url} into {report.root} in {secs_text(report.secs)}")
