"""`cgtool`: the group of commands, and the one place where an exception becomes words and an exit code.

Must not import torch, nor a command's module: each loads when it is chosen.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING

import click

from cgtool import __version__ as cgtool_version
from cgtool.cli import failures
from cgtool.cli.lazy import LazyGroup
from cgtool.cli.output import Output

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = {
    "warm": ("cgtool.cli.warm:warm", "Compile a model into the cache before it is served."),
    "bench": ("cgtool.cli.bench:bench", "Measure every way to start a model: what you would gain."),
    "inspect": ("cgtool.cli.inspect:inspect", "Look into the cache: its entries, or the pieces of one."),
    "verify": ("cgtool.cli.verify:verify", "Check every file of the cache, and whether this machine can load it."),
    "diff": ("cgtool.cli.diff:diff", "Name what differs between two entries, caches or bundles."),
    "why": ("cgtool.cli.why:why", "Say whether a model would hit, and if not, why."),
    "check": ("cgtool.cli.check:check", "Say whether a warmed model may be served from CUDA graphs."),
    "prune": ("cgtool.cli.prune:prune", "Remove from the cache what is old, stale, too much or left over."),
    "export": ("cgtool.cli.export:export", "Write entries of the cache as one file that can be shipped."),
    "import": ("cgtool.cli.import_:import_", "Take entries from a bundle into the cache, once all was checked."),
    "push": ("cgtool.cli.push:push", "Send entries of the cache to a remote store."),
    "pull": ("cgtool.cli.pull:pull", "Take entries of a remote store into the cache, once all was checked."),
    "completion": (
        "cgtool.cli.completion:completion",
        "Complete cgtool's commands and options in bash, zsh and fish.",
    ),
}

EXAMPLES = """\b
Examples:
  cgtool warm fixtures/tiny_llama.py:build
  cgtool bench fixtures/tiny_llama.py:build
  cgtool inspect cache
  cgtool inspect graph
"""


@click.group(cls=LazyGroup, table=COMMANDS, epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(cgtool_version, message="cgtool %(version)s")
def cgtool() -> None:
    """Compile models before they are served, and start fresh processes from what was compiled.

    `warm` traces a model, splits it, compiles every different piece once and stores all of it in a cache.
    `cgtool.load(model)` in Python then starts from that cache without tracing the model again.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 a check said no, 130 Ctrl-C, 143 SIGTERM.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run `cgtool` and return its exit code; prints, and never raises."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _have_streams()
    streams = sys.stdout, sys.stderr
    cgtool.was_invoked = False
    try:
        with failures.signals_raised():
            code = cgtool.main(args=arguments, prog_name="cgtool", standalone_mode=False)
            sys.stdout.flush()
    except SystemExit as error:
        # click says that a reader went away by wrapping both streams and leaving with 1; else it is a model's own exit.
        reader_gone = (sys.stdout, sys.stderr) != streams
        sys.stdout, sys.stderr = streams
        if not reader_gone and not cgtool.was_invoked:  # click has answered a shell that completes a command line
            return error.code if isinstance(error.code, int) else failures.FAILED
        return _end(BrokenPipeError() if reader_gone else error, arguments)
    except BaseException as error:  # noqa: BLE001 - the one place where every exception ends
        return _end(error, arguments)
    return code if isinstance(code, int) else failures.DONE


def _end(error: BaseException, arguments: Sequence[str]) -> int:
    failure = failures.failure_of(error)
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    output = Output(as_json="--json" in options, traceback="--traceback" in options)
    try:
        if output.traceback:
            traceback.print_exception(error)
        if failures.is_help(error):
            sys.stderr.write(failure.message + "\n")
        elif failure.message:
            output.error("\n  ".join([failure.message, *failure.reasons]))
        if output.as_json and failure.message:
            output.json(failure.to_json())
        sys.stdout.flush()
    except OSError:
        failure = failures.failure_of(BrokenPipeError()) if failure.exit_code == failures.DONE else failure
    _let_go_of_stdout()
    return failure.exit_code


def _have_streams() -> None:
    # A daemon may be started with its streams closed: Python has None for them then.
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - lives as long as the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - lives as long as the process
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            # A terminal that cannot show a character shows its escape instead of ending the command.
            reconfigure(errors="backslashreplace")


def _let_go_of_stdout() -> None:
    # What is still buffered cannot be written: Python would complain of it once more as it exits.
    try:
        sys.stdout.flush()
    except OSError:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
