"""`cgtool diff`: parse two sides, compare, print what differs.

Must not import torch; the command itself loads as it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cgtool.cli import failures
from cgtool.cli.options import cache_dir_option, cache_folder, talk_options

if TYPE_CHECKING:
    from cgtool.cli.output import Output

EXAMPLES = """\b
Examples:
  cgtool diff 3f9a 81c2
  cgtool diff 3f9a --here
  cgtool diff ~/.cache/cgtool /mnt/shared/cache
  cgtool diff /mnt/shared/cache:3f9a ~/.cache/cgtool:81c2
  cgtool diff ~/.cache/vllm:1572 /mnt/shared/vllm
  cgtool diff monday.tar.zst tuesday.tar.zst --json | jq -r '.differences[0].sentence'
"""


@click.command(epilog=EXAMPLES, short_help="Name what differs between two entries, caches or bundles.")
@click.argument("old", metavar="A")
@click.argument("new", metavar="[B]", required=False)
@click.option("--here", is_flag=True, help="Compare the entry A with this machine: versions, compiler, processor, GPU.")
@click.option("--all", "everything", is_flag=True, help="Show every difference with all of its lines.")
@cache_dir_option
@talk_options
def diff(*, output: Output, old: str, new: str | None, here: bool, everything: bool, cache_dir: str | None) -> int:
    """Name what differs between A and B, the most telling first: the field, the line, the guard, the version.

    A and B are each a cache's folder, an entry (the beginning of its hash, ROOT:HASH, or its folder), or a bundle. Runs
    no code of a model and needs no torch. Exit code 0 where they are equal, 3 where they differ.

    Both may also be caches of one other system, or entries of such (ROOT:NAME), which is told by looking: vLLM, ATOM,
    torch, Triton, or a mega-cache file. Then the entries, factors and artifacts that differ are named.
    """
    # The command and rich: what `--help` does without.
    from cgtool.cli.diff_words import show_diff
    from cgtool.toolkit.diff.run import DiffOptions
    from cgtool.toolkit.diff.run import diff as run

    report = run(DiffOptions(old=old, new=new, here=here, cache_dir=cache_folder(cache_dir)))
    if output.as_json:
        output.json(report.to_json())
    else:
        show_diff(output, report, everything=everything)
    return failures.DONE if report.equal else failures.CHECK_SAID_NO
