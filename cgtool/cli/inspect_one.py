"""`cgtool inspect entry`, `artifact` and `key`: parse, look, print.

Must not import torch; the commands themselves load as they run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from cgtool.cli import failures
from cgtool.cli.options import cache_dir_option, cache_folder, read_shapes, talk_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgtool.cli.output import Output


class _HasJson(Protocol):
    def to_json(self) -> dict[str, Any]: ...


_Report = TypeVar("_Report", bound=_HasJson)

ENTRY_EXAMPLES = """\b
Examples:
  cgtool inspect entry
  cgtool inspect entry 3f9a
  cgtool inspect entry 3f9a --json | jq '.holes'
  cgtool inspect entry 1572 --cache-dir ~/.cache/vllm
"""

ARTIFACT_EXAMPLES = """\b
Examples:
  cgtool inspect artifact 78e124d6
  cgtool inspect artifact 3f9a/2 --shape 8
  cgtool inspect artifact 3f9a/2 --shape general --json | jq '.kernels'
  cgtool inspect artifact add_one.cubin --cache-dir ~/.triton/cache
"""

KEY_EXAMPLES = """\b
Examples:
  cgtool inspect key
  cgtool inspect key 3f9a --json | jq '.factors[] | select(.name == "torch")'
  cgtool inspect key 1572 --cache-dir ~/.cache/vllm
"""


@click.command("entry", epilog=ENTRY_EXAMPLES, short_help="Show what one entry is compiled for, and where holes are.")
@click.argument("entry", required=False, metavar="[HASH]")
@cache_dir_option
@talk_options
def inspect_entry(*, output: Output, entry: str | None, cache_dir: str | None) -> int:
    """Show what the entry HASH is compiled for: each piece, for each shape, on each rank.

    HASH is the beginning of a hash that `inspect cache` lists; a cache with one entry needs none. A hole is a shape
    that one piece lacks and another piece, or another rank, has. Proved is an artifact that was run and compared with
    its piece before it was stored.

    --cache-dir may name a cache of another system, as PATH of `inspect cache` may: then HASH is the beginning of an
    entry's name there, and what such a cache does not record is said in a sentence.
    """
    # The table needs rich, which `--help` does without.
    from cgtool.cli.foreign_one_tables import show_foreign_entry
    from cgtool.cli.inspect_one_tables import show_entry
    from cgtool.toolkit.foreign.inspect_entry import inspect_foreign_entry
    from cgtool.toolkit.inspect.entry import inspect_entry as run

    folder = cache_folder(cache_dir)
    foreign = inspect_foreign_entry(entry, cache_dir=folder)
    if foreign is not None:
        _print(output, foreign, show_foreign_entry)
    else:
        _print(output, run(entry, cache_dir=folder), show_entry)
    return failures.DONE


@click.command(
    "artifact", epilog=ARTIFACT_EXAMPLES, short_help="Show what one artifact holds, and which pieces it serves."
)
@click.argument("artifact", metavar="DIGEST|HASH/PIECE")
@click.option(
    "--shape",
    metavar="SHAPE",
    callback=read_shapes,
    help="Of a piece: for which shape, such as general, 8, 2-16 or batch=4:seq=2-64.",
)
@click.option("--variant", type=click.IntRange(min=0), metavar="N", help="Of a piece: which variant.")
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Of a piece: which rank.")
@click.option("--prefix", metavar="NAME", help="Of a piece: which compiled part of the model.")
@cache_dir_option
@talk_options
def inspect_artifact(
    *,
    output: Output,
    artifact: str,
    shape: str | None,
    variant: int | None,
    rank: int | None,
    prefix: str | None,
    cache_dir: str | None,
) -> int:
    """Show what an artifact holds: kernels, generated code, what it was compiled for and with, and what it serves.

    Name it by the beginning of its digest, or by the beginning of an entry's hash and a piece: 3f9a/2. It is read as
    data: nothing of it is unpickled or executed. Packages of aot_inductor hold no sources: what the compiler wrote is
    shown from beside the plan, where it was kept. Registers and shared memory are those of CUDA kernels that lie in
    the package as files of their own.

    --cache-dir may name a cache of another system. Then name a file by the beginning of its name or of its path below
    the entry, or by an entry and a piece or a path: 1572/0. Of a kernel of Triton's, what its metadata says is shown;
    of what holds code that Inductor generated, that code, though it lies in a pickle.
    """
    # The tables need rich, which `--help` does without.
    from cgtool.cli.foreign_one_tables import show_foreign_artifact
    from cgtool.cli.inspect_one_tables import show_artifact
    from cgtool.toolkit.foreign.inspect_artifact import inspect_foreign_artifact
    from cgtool.toolkit.inspect.artifact import ArtifactOptions
    from cgtool.toolkit.inspect.artifact import inspect_artifact as run

    asked = ArtifactOptions(
        artifact=artifact,
        shape=shape,
        variant=variant,
        rank=rank,
        prefix=prefix,
        cache_dir=cache_folder(cache_dir),
    )
    foreign = inspect_foreign_artifact(asked)
    if foreign is not None:
        _print(output, foreign, show_foreign_artifact)
    else:
        _print(output, run(asked), show_artifact)
    return failures.DONE


@click.command("key", epilog=KEY_EXAMPLES, short_help="Show every factor of an entry's key.")
@click.argument("entry", required=False, metavar="[HASH]")
@cache_dir_option
@talk_options
def inspect_key(*, output: Output, entry: str | None, cache_dir: str | None) -> int:
    """Show every factor of the key of the entry HASH, with its value, those that tell most about a miss first.

    HASH is the beginning of a hash that `inspect cache` lists; a cache with one entry needs none.

    --cache-dir may name a cache of another system: what that wrote of the key is shown (cache_key_factors.json of vLLM,
    the options of a Triton kernel), and what it did not write is said in a sentence.
    """
    # The lines need rich, which `--help` does without.
    from cgtool.cli.foreign_one_tables import show_foreign_key
    from cgtool.cli.inspect_one_tables import show_key
    from cgtool.toolkit.foreign.inspect_entry import inspect_foreign_key
    from cgtool.toolkit.inspect.key import inspect_key as run

    folder = cache_folder(cache_dir)
    foreign = inspect_foreign_key(entry, cache_dir=folder)
    if foreign is not None:
        _print(output, foreign, show_foreign_key)
    else:
        _print(output, run(entry, cache_dir=folder), show_key)
    return failures.DONE


def _print(output: Output, report: _Report, show: Callable[[Output, _Report], None]) -> None:
    if output.as_json:
        output.json(report.to_json())
    else:
        show(output, report)
