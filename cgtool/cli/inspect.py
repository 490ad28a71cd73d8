"""`cgtool inspect` and its subcommands.

Must not import torch; the toolkit and the tables are imported when a command runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cgtool.cli import failures
from cgtool.cli.lazy import LazyGroup
from cgtool.cli.options import cache_dir_option, cache_root, check_shapes, opened_cache, output_options

if TYPE_CHECKING:
    from cgtool.cli.output import Output

COMMANDS = {
    "cache": ("cgtool.cli.inspect:inspect_cache", "List the entries of a cache."),
    "entry": ("cgtool.cli.inspect:inspect_entry", "Show the shapes that an entry covers, and its holes."),
    "artifact": ("cgtool.cli.inspect:inspect_artifact", "Show the contents of an artifact and the pieces that use it."),
    "graph": ("cgtool.cli.inspect:inspect_graph", "Show the pieces of an entry as a table or a picture."),
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
    """Inspect the cache: its entries, or the pieces, artifacts and key of one entry.

    This runs no code of a model or an artifact, and does not need torch.
    """


@click.command("cache", epilog=CACHE_EXAMPLES)
@click.argument("path", required=False, type=click.Path(), metavar="[PATH|URL]")
@click.option(
    "--filter",
    "filters",
    multiple=True,
    metavar="EXPR",
    help="Show only entries that match FIELD OPERATOR VALUE: last_used>30d, size>1GB, model~llama. Repeatable: all "
    "must match.",
)
@click.option(
    "--sort",
    metavar="FIELD[:asc|desc]",
    help="Sort by a field: text in ascending order, figures in descending order. Default: by hash.",
)
@click.option("--limit", type=click.IntRange(min=0), metavar="N", help="Show at most N entries.")
@cache_dir_option
@output_options
def inspect_cache(*, output: Output, path: str | None, cache_dir: str | None, **chosen: Any) -> int:
    """List the entries of the cache at PATH.

    PATH defaults to the cache that `cgtool warm` fills. URL is a store, as for `cgtool push`; no artifacts are fetched.

    Columns: size is the size of an entry shipped alone, each distinct artifact counted once; unshared is its size with
    a file for each piece and shape; saved is the number of hits times the compile time of its distinct artifacts. The
    total counts bytes that entries share once.

    Fields for --filter and --sort: hash, model, rank, prefix, adaptor, pieces, unique, artifacts, size, unshared,
    artifact_secs, saved_secs, hits, created, last_used. Operators: = != > >= < <= and ~ for 'contains'. A time is an
    age (30d, 12h; last_used>30d means more than 30 days ago), a date (created>=2026-01-31) or never. An unused entry's
    age counts from its creation.

    PATH can also be a cache of another system, which is detected from its contents: vLLM, ATOM, torch (the directory
    TORCHINDUCTOR_CACHE_DIR) or Triton, or a mega-cache file. Nothing in it is unpickled or executed. Missing, torn or
    moved files are reported. --filter and --sort then accept hash, prefix, artifacts, size, created and last_used.
    """
    from cgtool.cli.inspect_tables import show_cache
    from cgtool.toolkit.inspect.cache import inspect_cache as run

    with opened_cache(path, cache_dir) as (folder, mirror):
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
@output_options
def inspect_entry(*, output: Output, entry: str | None, cache_dir: str | None) -> int:
    """Show the shapes that the entry HASH covers, for each piece and rank.

    HASH is a prefix of a hash that `cgtool inspect cache` lists. It can be omitted if the cache has only one entry. A
    hole is a shape that one piece lacks but another piece or rank has. A proved artifact was run and compared with its
    piece before it was stored.

    --cache-dir can name a cache of another system, as for `cgtool inspect cache`. HASH is then a prefix of an entry's
    name there, and a note says what that system does not record.
    """
    from cgtool.cli.inspect_tables import show_entry
    from cgtool.toolkit.inspect.entry import inspect_entry as run

    output.report(run(entry, cache_dir=cache_root(cache_dir)), show_entry)
    return failures.DONE


@click.command("artifact", epilog=ARTIFACT_EXAMPLES)
@click.argument("artifact", metavar="DIGEST|HASH/PIECE")
@click.option(
    "--shape",
    metavar="SHAPE",
    callback=check_shapes,
    help="Shape of HASH/PIECE: general, 8, 2-16 or batch=4:seq=2-64.",
)
@click.option("--variant", type=click.IntRange(min=0), metavar="N", help="Variant of HASH/PIECE.")
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Rank of HASH/PIECE.")
@click.option("--prefix", metavar="NAME", help="Compiled part of the model that HASH/PIECE belongs to.")
@cache_dir_option
@output_options
def inspect_artifact(*, output: Output, artifact: str, cache_dir: str | None, **chosen: Any) -> int:
    """Show the contents of an artifact: kernels, generated code, target, compiler, and the pieces that use it.

    Name the artifact by a prefix of its digest, or by a prefix of an entry's hash and a piece: 3f9a/2. It is read as
    data: nothing in it is unpickled or executed.

    Packages of aot_inductor contain no sources; generated code is shown from the files next to the plan, if they were
    kept. Registers and shared memory are known for CUDA kernels that are separate files of the package.

    --cache-dir can name a cache of another system. Name a file there by a prefix of its name or of its path below the
    entry, or by an entry and a piece or path: 1572/0. For a Triton kernel, its metadata is shown; for code that
    Inductor generated, the code, even if it is stored in a pickle.
    """
    from cgtool.cli.inspect_tables import show_artifact
    from cgtool.toolkit.inspect.artifact import inspect_artifact as run

    output.report(run(artifact, **chosen, cache_dir=cache_root(cache_dir)), show_artifact)
    return failures.DONE


@click.command("graph", epilog=GRAPH_EXAMPLES)
@click.argument("entry", required=False, metavar="[HASH]")
@click.option("--variant", metavar="NAME|N", help="Variant, by name or number. Default: the first.")
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Rank of the entry.")
@click.option("--prefix", metavar="NAME", help="Compiled part of the model.")
@click.option("--svg", metavar="FILE", help="Draw the pieces as a self-contained SVG picture.")
@click.option("--html", metavar="FILE", help="Write the picture as a self-contained HTML page.")
@cache_dir_option
@output_options
def inspect_graph(
    *, output: Output, entry: str | None, svg: str | None, html: str | None, cache_dir: str | None, **chosen: Any
) -> int:
    """Show the pieces into which the graph of the entry HASH is split.

    HASH is a prefix of a hash that `cgtool inspect cache` lists. It can be omitted if the cache has only one entry.
    Pieces with the same identity are compiled once.
    """
    from cgtool.cli.graph import html_of, show_graph, svg_of
    from cgtool.cli.pages import write_text
    from cgtool.toolkit.inspect.graph import inspect_graph as run

    report = run(entry, **chosen, cache_dir=cache_root(cache_dir))
    for file, draw in ((svg, svg_of), (html, html_of)):
        if file is not None:
            write_text(Path(file), draw(report))
            output.note(f"Wrote {file}")
    output.report(report, show_graph)
    return failures.DONE


@click.command("key", epilog=KEY_EXAMPLES)
@click.argument("entry", required=False, metavar="[HASH]")
@cache_dir_option
@output_options
def inspect_key(*, output: Output, entry: str | None, cache_dir: str | None) -> int:
    """Show every factor of the entry HASH's key and its value, the likeliest causes of a miss first.

    HASH is a prefix of a hash that `cgtool inspect cache` lists. It can be omitted if the cache has only one entry.

    --cache-dir can name a cache of another system. The recorded parts of its key are shown (vLLM's
    cache_key_factors.json, the options of a Triton kernel), and a note says what that system does not record.
    """
    from cgtool.cli.inspect_tables import show_key
    from cgtool.toolkit.inspect.entry import inspect_key as run

    output.report(run(entry, cache_dir=cache_root(cache_dir)), show_key)
    return failures.DONE
