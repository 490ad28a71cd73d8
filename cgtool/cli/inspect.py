"""`cgtool inspect` and its commands: parse, look, print.

Must not import torch; the commands themselves load as they run.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cgtool.cli import failures
from cgtool.cli.lazy import LazyGroup
from cgtool.cli.options import cache_dir_option, cache_folder, cache_named, read_shapes, talk_options

if TYPE_CHECKING:
    from cgtool.cli.output import Output

COMMANDS = {
    "cache": ("cgtool.cli.inspect:inspect_cache", "List the cache's entries and what they hold."),
    "entry": ("cgtool.cli.inspect:inspect_entry", "Show what one entry is compiled for, and where holes are."),
    "artifact": ("cgtool.cli.inspect:inspect_artifact", "Show what one artifact holds, and which pieces it serves."),
    "graph": ("cgtool.cli.inspect:inspect_graph", "Show the pieces of one entry as a table or a picture."),
    "key": ("cgtool.cli.inspect:inspect_key", "Show every factor of an entry's key."),
}

EXAMPLES = """\b
Examples:
  cgtool inspect cache
  cgtool inspect entry 3f9a
  cgtool inspect artifact 3f9a/2
"""

CACHE_EXAMPLES = """\b
Examples:
  cgtool inspect cache
  cgtool inspect cache /var/cache/models --sort size --limit 10
  cgtool inspect cache --filter "last_used>30d" --filter "model~llama"
  cgtool inspect cache --json | jq '.entries[].hash'
  cgtool inspect cache ~/.cache/vllm
  cgtool inspect cache s3://models/cgtool
"""

GRAPH_EXAMPLES = """\b
Examples:
  cgtool inspect graph
  cgtool inspect graph 3f9a --variant 1
  cgtool inspect graph 3f9a --svg pieces.svg
"""


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


@click.group(cls=LazyGroup, table=COMMANDS, epilog=EXAMPLES)
def inspect() -> None:
    """Look into the cache: its entries, or the pieces, artifacts and key of one.

    Runs no code of a model or of an artifact, and needs no torch.
    """


@click.command("cache", epilog=CACHE_EXAMPLES)
@click.argument("path", required=False, type=click.Path(), metavar="[PATH|URL]")
@click.option(
    "--filter",
    "filters",
    multiple=True,
    metavar="EXPR",
    help="Only entries that pass: FIELD OPERATOR VALUE, such as last_used>30d, size>1GB, model~llama. Repeatable.",
)
@click.option(
    "--sort", metavar="FIELD[:asc|desc]", help="By a field; text from a, figures from the most. Default: the hash."
)
@click.option("--limit", type=click.IntRange(min=0), metavar="N", help="At most so many entries.")
@cache_dir_option
@talk_options
def inspect_cache(*, output: Output, path: str | None, cache_dir: str | None, **chosen: Any) -> int:
    """List the entries of the cache at PATH and what they hold.

    Without PATH this is the cache that warm fills. Of an entry, size is what shipping it alone takes, with each
    different artifact once, and unshared what it would take with a file for each piece and shape. In the total, bytes
    that entries share count once. Saved is hits times the seconds that its different artifacts took to compile.

    Fields of --filter and --sort: hash, model, rank, prefix, adaptor, pieces, unique, artifacts, size, unshared,
    artifact_secs, saved_secs, hits, created, last_used. Operators: = != > >= < <= and ~ for 'contains'. A time is an
    age (30d, 12h: last_used>30d is more than 30 days ago) or a date (created>=2026-01-31), or never; an entry that
    was never used is as old as it was created.

    URL is a store, as `cgtool push` takes it; none of its artifacts is fetched.

    PATH may also be what another system wrote, which is told by looking: a cache of vLLM, ATOM, torch (the folder that
    TORCHINDUCTOR_CACHE_DIR names) or Triton, or a mega-cache file. Nothing of it is unpickled or executed. What is
    missing, torn or moved is named, and --filter and --sort take hash, prefix, artifacts, size, created, last_used.
    """
    # The table needs rich, which `--help` does without.
    from cgtool.cli.inspect_tables import show_cache
    from cgtool.toolkit.inspect.cache import inspect_cache as run

    with cache_named(path, cache_dir) as (folder, mirror):
        where = None if mirror is None else mirror.store.url
        report = run(folder, **chosen, where=where)
        if output.as_json:
            output.json_of_many(report.to_json(), "entries", report.entries_json())
        else:
            show_cache(output, report)
    return failures.DONE


@click.command("entry", epilog=ENTRY_EXAMPLES)
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
    from cgtool.cli.inspect_tables import show_entry
    from cgtool.toolkit.inspect.entry import inspect_entry as run

    output.report(run(entry, cache_dir=cache_folder(cache_dir)), show_entry)
    return failures.DONE


@click.command("artifact", epilog=ARTIFACT_EXAMPLES)
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
def inspect_artifact(*, output: Output, artifact: str, cache_dir: str | None, **chosen: Any) -> int:
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
    from cgtool.cli.inspect_tables import show_artifact
    from cgtool.toolkit.inspect.artifact import inspect_artifact as run

    output.report(run(artifact, **chosen, cache_dir=cache_folder(cache_dir)), show_artifact)
    return failures.DONE


@click.command("graph", epilog=GRAPH_EXAMPLES)
@click.argument("entry", required=False, metavar="[ENTRY]")
@click.option("--variant", metavar="NAME|N", help="Which variant: its number or its name. Default: the first.")
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Which rank of the entry.")
@click.option("--prefix", metavar="NAME", help="Which compiled part of the model.")
@click.option("--svg", metavar="FILE", help="Draw the pieces into a picture that needs no network.")
@click.option("--html", metavar="FILE", help="The same as a page.")
@cache_dir_option
@talk_options
def inspect_graph(
    *, output: Output, entry: str | None, svg: str | None, html: str | None, cache_dir: str | None, **chosen: Any
) -> int:
    """Show the pieces of ENTRY, the beginning of a hash that `inspect cache` lists.

    A cache with one entry needs no ENTRY. Pieces of the same identity are compiled once.
    """
    # The table needs rich, which `--help` does without.
    from cgtool.cli.graph import html_of, show_graph, svg_of
    from cgtool.cli.pages import write_text
    from cgtool.toolkit.inspect.graph import inspect_graph as run

    report = run(entry, **chosen, cache_dir=cache_folder(cache_dir))
    for file, draw in ((svg, svg_of), (html, html_of)):
        if file is not None:
            write_text(Path(file), draw(report))
            output.note(f"Wrote {file}")
    output.report(report, show_graph)
    return failures.DONE


@click.command("key", epilog=KEY_EXAMPLES)
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
    from cgtool.cli.inspect_tables import show_key
    from cgtool.toolkit.inspect.entry import inspect_key as run

    output.report(run(entry, cache_dir=cache_folder(cache_dir)), show_key)
    return failures.DONE
