"""Options that many commands share, each spelled once.

Must not import torch.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cgtool.cli import logs
from cgtool.cli.output import Output

if TYPE_CHECKING:
    from collections.abc import Callable


def talk_options(function: Callable[..., int | None]) -> Callable[..., int | None]:
    """Add `--json`, `--quiet`, `--verbose` and `--traceback`, and hand the command an `Output` made from them."""

    @click.option("--json", "as_json", is_flag=True, help="Print the report, or the error, as JSON on stdout.")
    @click.option("-q", "--quiet", is_flag=True, help="No progress and no advice: only errors on stderr.")
    @click.option("-v", "--verbose", is_flag=True, help="Show what the libraries log, on stderr.")
    @click.option("--traceback", is_flag=True, help="Show where an error came from.")
    @functools.wraps(function)
    def command(*, as_json: bool, quiet: bool, verbose: bool, traceback: bool, **options: Any) -> int | None:
        if quiet and verbose:
            message = "--quiet and --verbose exclude each other. Give one of them."
            raise click.UsageError(message)
        output = Output(as_json=as_json, quiet=quiet, verbose=verbose, traceback=traceback)
        logs.configure(output)
        return function(output=output, **options)

    return command


cache_dir_option = click.option(
    "--cache-dir",
    metavar="DIR",
    help="The cache's root. Default: CGTOOL_CACHE_DIR, else the user's cache folder.",
)


def cache_folder(given: str | None) -> Path | None:
    """Return the cache's root as the settings have it (flag, variable, file); None where none of them names one.

    Args:
        given: The value of the flag.

    Raises:
        ConfigError: A configuration file or a variable cannot be read or understood.
    """
    from cgtool.cli.settings import load_settings  # kept out of `--help`

    folder = load_settings(flags={"cache_dir": given}).config.cache_dir
    return Path(folder) if folder else None
