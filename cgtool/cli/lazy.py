"""A click group whose commands' modules load only when one is chosen.

Must not import torch, nor any command's module: `cgtool --help` reads the short helps from the table alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Mapping


class LazyGroup(click.Group):
    """A group made from a table: name → ("module:attribute", short help).

    The short help stands in the table because reading it from the command would load the command's module.
    """

    def __init__(self, *args: Any, table: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.table = dict(table)
        #: Whether a command was run: else only the command line was read, for help or for a shell that completes it.
        self.was_invoked = False

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen command."""
        self.was_invoked = True
        return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the names in the table's order."""
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        """Load the module of a command and return the command; None for a name that the table lacks."""
        if cmd_name not in self.table:
            return None
        place, short_help = self.table[cmd_name]
        module, attribute = place.split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        command.short_help = short_help
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's
        """Write the commands and their short helps from the table."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, short_help) for name, (_, short_help) in self.table.items()])
