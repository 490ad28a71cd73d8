"""`cgtool`: the command group, and the one place that turns an exception into a message and an exit code.

Must not import torch or a command's module: each command is imported when it is chosen.
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
    "warm": ("cgtool.cli.warm:warm", "Compile a model into the cache ahead of serving."),
    "bench": ("cgtool.cli.bench:bench", "Benchmark every way to start a model."),
    "inspect": ("cgtool.cli.inspect:inspect", "Inspect the cache, an entry, an artifact or a key."),
    "verify": ("cgtool.cli.verify:verify", "Check that cached files are intact and load on this machine."),
    "diff": ("cgtool.cli.diff:diff", "Compare two entries, caches or bundles."),
    "why": ("cgtool.cli.why:why", "Explain why a model hits or misses the cache."),
    "check": ("cgtool.cli.check:check", "Check that a model can be served from CUDA graphs."),
    "prune": ("cgtool.cli.prune:prune", "Remove old, stale or unreferenced data from the cache."),
    "export": ("cgtool.cli.export:export", "Export entries of the cache to a bundle."),
    "import": ("cgtool.cli.import_:import_", "Verify a bundle and import its entries into the cache."),
    "push": ("cgtool.cli.push:push", "Push entries of the cache to a remote store."),
    "pull": ("cgtool.cli.pull:pull", "Pull entries from a remote store, verify and cache them."),
    "completion": ("cgtool.cli.completion:completion", "Print or install shell completion (bash, zsh, fish)."),
}

EXAMPLES = """\b
Examples:
  cgtool warm fixtures/tiny_llama.py:build
  cgtool why fixtures/tiny_llama.py:build
  cgtool inspect cache
  cgtool bench fixtures/tiny_llama.py:build
"""


@click.group(cls=LazyGroup, table=COMMANDS, epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(cgtool_version, message="cgtool %(version)s")
def cgtool() -> None:
    """Compile PyTorch models ahead of serving, and start fresh processes from the compiled cache.

    `cgtool warm` traces a model, splits its graph into pieces, compiles each unique piece once and stores the result in
    a cache. In Python, `cgtool.load(model)` then starts from that cache without tracing the model again.

    Exit codes: 0 success, 1 failure, 2 usage error, 3 failed check, 130 Ctrl-C, 143 SIGTERM.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run `cgtool` and return its exit code. Errors are printed, not raised."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _ensure_streams()
    streams = sys.stdout, sys.stderr
    cgtool.was_invoked = False
    try:
        with failures.signals_raised():
            code = cgtool.main(args=arguments, prog_name="cgtool", standalone_mode=False)
            sys.stdout.flush()
    except SystemExit as error:
        # On EPIPE, click wraps both streams and exits with 1. Any other SystemExit comes from the model's code.
        reader_gone = (sys.stdout, sys.stderr) != streams
        sys.stdout, sys.stderr = streams
        if not reader_gone and not cgtool.was_invoked:  # click has answered a completion request
            return error.code if isinstance(error.code, int) else failures.FAILED
        return _end(BrokenPipeError() if reader_gone else error, arguments)
    except BaseException as error:  # noqa: BLE001 - the last handler of every exception
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
    _flush_or_discard_stdout()
    return failure.exit_code


def _ensure_streams() -> None:
    # A daemon may be started with closed streams, which Python sets to None.
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - lives as long as the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - lives as long as the process
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            # Escape characters that the terminal's encoding lacks instead of failing.
            reconfigure(errors="backslashreplace")


def _flush_or_discard_stdout() -> None:
    # If the buffer cannot be written, discard it: Python would report the same error again at exit.
    try:
        sys.stdout.flush()
    except OSError:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
