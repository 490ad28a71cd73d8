"""`cgtool completion`: parse what the user asked, and print or install what the shell needs.

Must not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cgtool.cli import failures
from cgtool.cli.options import talk_options

if TYPE_CHECKING:
    from cgtool.cli.output import Output
    from cgtool.toolkit.completion import Shell

EXAMPLES = """\b
Examples:
  cgtool completion --install
  cgtool completion zsh --install
  cgtool completion bash > /etc/bash_completion.d/cgtool
"""


@click.command(epilog=EXAMPLES)
@click.argument("shell", required=False, type=click.Choice(["bash", "zsh", "fish"]))
@click.option("--install", is_flag=True, help="Write it to where the shell finds it, for this user.")
@talk_options
def completion(*, output: Output, shell: Shell | None, install: bool) -> int:
    """Print what SHELL evaluates to complete cgtool's commands and options, or install it.

    Without SHELL it is the one that the variable SHELL names. `--install` writes one file into this user's folders;
    for zsh also a marked block at the end of ~/.zshrc. New shells complete then.
    """
    from cgtool.toolkit.completion import completion as run

    report = run(_script, shell=shell, install=install)
    if output.as_json:
        output.json(report)
    elif install:
        for path in report.written:
            output.line(f"Wrote {path}", whole=True)
        output.note(f"A new {report.shell} completes cgtool's commands and options.")
    else:
        click.echo(report.script, nl=False)
    return failures.DONE


def _script(shell: Shell) -> str:
    """Return click's own script: it calls cgtool with _CGTOOL_COMPLETE set and reads what may follow."""
    from click.shell_completion import BashComplete, FishComplete, ZshComplete

    from cgtool.cli.main import cgtool

    kinds = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
    maker = kinds[shell](cgtool, {}, "cgtool", "_CGTOOL_COMPLETE")
    return maker.source_template % maker.source_vars() + "\n"
