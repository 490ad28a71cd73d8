"""`cgtool completion`: print or install the shell's completion script.

Must not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cgtool.cli import failures
from cgtool.cli.options import output_options

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
@click.argument("shell", required=False, type=click.Choice(["bash", "zsh", "fish"]), metavar="[SHELL]")
@click.option("--install", is_flag=True, help="Install the script for this user.")
@output_options
def completion(*, output: Output, shell: Shell | None, install: bool) -> int:
    """Print or install the script with which SHELL completes cgtool's commands and options.

    SHELL is bash, zsh or fish; the default is the shell that the variable SHELL names. --install writes one file into
    this user's directories and, for zsh, a marked block at the end of ~/.zshrc. Completion works in new shells.
    """
    from cgtool.toolkit.completion import completion as run

    report = run(_script, shell=shell, install=install)
    if output.as_json:
        output.json(report)
    elif install:
        for path in report.written:
            output.line(f"Wrote {path}", whole=True)
        output.note(f"Start a new {report.shell} to use it.")
    else:
        click.echo(report.script, nl=False)
    return failures.DONE


def _script(shell: Shell) -> str:
    """Return click's own script, which calls cgtool with _CGTOOL_COMPLETE set and reads the candidates."""
    from click.shell_completion import BashComplete, FishComplete, ZshComplete

    from cgtool.cli.main import cgtool

    kinds = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
    completer = kinds[shell](cgtool, {}, "cgtool", "_CGTOOL_COMPLETE")
    return completer.source_template % completer.source_vars() + "\n"
