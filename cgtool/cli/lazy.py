"""A click group that imports a command's module only when the command is chosen.

Must not import torch or any command's module: `cgtool --help` reads the summaries from the table.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Mapping


class LazyGroup(click.Group):
    """A group built from a table: name → ("module:attribute", summary).

    The summary is in the table because reading it from the command would import the command's module.
    """

    def __init__(self, *args: Any, table: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.table = dict(table)
        #: True once a command runs; False if click only printed help or answered a completion request.
        self.was_invoked = False

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen command."""
        self.was_invoked = True
        return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the command names in the order of the table."""
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        """Import and return a command; None if the table has no such name."""
        if cmd_name not in self.table:
            return None
        place, short_help = self.table[cmd_name]
        module, attribute = place.split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        command.short_help = short_help
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's
        """Write the commands and their summaries from the table."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, short_help) for name, (_, short_help) in self.table.items()])
