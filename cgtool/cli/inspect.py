"""`cgtool inspect`, and its commands `cache` and `graph`: parse, look, print.

Must not import torch; the commands themselves load as they run.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cgtool.cli import failures
from cgtool.cli.lazy import LazyGroup
from cgtool.cli.options import cache_dir_option, cache_folder, talk_options
from cgtool.errors import UsageError

if TYPE_CHECKING:
    from cgtool.cli.output import Output

COMMANDS = {
    "cache": ("cgtool.cli.inspect:inspect_cache", "List the cache's entries and what they hold."),
    "entry": ("cgtool.cli.inspect_one:inspect_entry", "Show what one entry is compiled for, and where holes are."),
    "artifact": (
        "cgtool.cli.inspect_one:inspect_artifact",
        "Show what one artifact holds, and which pieces it serves.",
    ),
    "graph": ("cgtool.cli.inspect:inspect_graph", "Show the pieces of one entry as a table or a picture."),
    "key": ("cgtool.cli.inspect_one:inspect_key", "Show every factor of an entry's key."),
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
"""

GRAPH_EXAMPLES = """\b
Examples:
  cgtool inspect graph
  cgtool inspect graph 3f9a --variant 1
  cgtool inspect graph 3f9a --svg pieces.svg
"""


@click.group(
    cls=LazyGroup, table=COMMANDS, epilog=EXAMPLES, short_help="Look into the cache: its entries, or the pieces of one."
)
def inspect() -> None:
    """Look into the cache: its entries, or the pieces, artifacts and key of one.

    Runs no code of a model or of an artifact, and needs no torch.
    """


@click.command("cache", epilog=CACHE_EXAMPLES, short_help="List the cache's entries and what they hold.")
@click.argument("path", required=False, type=click.Path(), metavar="[PATH]")
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
def inspect_cache(
    *,
    output: Output,
    path: str | None,
    filters: tuple[str, ...],
    sort: str | None,
    limit: int | None,
    cache_dir: str | None,
) -> int:
    """List the entries of the cache at PATH and what they hold.

    Without PATH this is the cache that warm fills. Of an entry, size is what shipping it alone takes, with each
    different artifact once, and unshared what it would take with a file for each piece and shape. In the total, bytes
    that entries share count once. Saved is hits times the seconds that its different artifacts took to compile.

    Fields of --filter and --sort: hash, model, rank, prefix, adaptor, pieces, unique, artifacts, size, unshared,
    artifact_secs, saved_secs, hits, created, last_used. Operators: = != > >= < <= and ~ for 'contains'. A time is an
    age (30d, 12h: last_used>30d is more than 30 days ago) or a date (created>=2026-01-31), or never; an entry that
    was never used is as old as it was created.

    PATH may also be what another system wrote, which is told by looking: a cache of vLLM, ATOM, torch (the folder that
    TORCHINDUCTOR_CACHE_DIR names) or Triton, or a mega-cache file. Nothing of it is unpickled or executed. What is
    missing, torn or moved is named, and --filter and --sort take hash, prefix, artifacts, size, created, last_used.
    """
    # The table needs rich, which `--help` does without.
    from cgtool.cli.foreign_tables import show_foreign
    from cgtool.cli.inspect_tables import show_cache
    from cgtool.toolkit.inspect.cache import CacheOptions
    from cgtool.toolkit.inspect.cache import inspect_cache as run

    if path is not None and cache_dir is not None:
        message = "PATH and --cache-dir name the same thing. Give one of them."
        raise click.UsageError(message)
    asked = CacheOptions(
        path=cache_folder(cache_dir if path is None else path),
        filters=filters,
        sort=sort,
        limit=limit,
    )
    if show_foreign(output, asked):
        return failures.DONE
    report = run(asked)
    if output.as_json:
        output.json_of_many(report.to_json(), "entries", report.entries_json())
    else:
        show_cache(output, report)
    return failures.DONE


@click.command("graph", epilog=GRAPH_EXAMPLES, short_help="Show the pieces of one entry as a table or a picture.")
@click.argument("entry", required=False, metavar="[ENTRY]")
@click.option("--variant", metavar="NAME|N", help="Which variant: its number or its name. Default: the first.")
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Which rank of the entry.")
@click.option("--prefix", metavar="NAME", help="Which compiled part of the model.")
@click.option("--svg", metavar="FILE", help="Draw the pieces into a picture that needs no network.")
@click.option("--html", metavar="FILE", help="The same as a page.")
@cache_dir_option
@talk_options
def inspect_graph(
    *,
    output: Output,
    entry: str | None,
    variant: str | None,
    rank: int | None,
    prefix: str | None,
    svg: str | None,
    html: str | None,
    cache_dir: str | None,
) -> int:
    """Show the pieces of ENTRY, the beginning of a hash that `inspect cache` lists.

    A cache with one entry needs no ENTRY. Pieces of the same identity are compiled once.

    --cache-dir may name a cache of another system. vLLM and ATOM write the whole graph of a part as a text, which is
    shown; no other system holds pieces of a graph.
    """
    # The table needs rich, which `--help` does without.
    from cgtool.cli.foreign_one_tables import show_foreign_graph
    from cgtool.cli.graph import html_of, show_graph, svg_of
    from cgtool.toolkit.foreign.inspect_artifact import inspect_foreign_graph
    from cgtool.toolkit.inspect.graph import GraphOptions
    from cgtool.toolkit.inspect.graph import inspect_graph as run

    asked = GraphOptions(
        entry=entry,
        variant=variant,
        rank=rank,
        prefix=prefix,
        cache_dir=cache_folder(cache_dir),
    )
    foreign = inspect_foreign_graph(asked)
    if foreign is not None:
        if svg is not None or html is not None:
            message = "Entries of other systems hold no pieces to draw. Leave --svg and --html out to read the graph."
            raise click.UsageError(message)
        if output.as_json:
            output.json(foreign.to_json())
        else:
            show_foreign_graph(output, foreign)
        return failures.DONE
    report = run(asked)
    for file, draw in ((svg, svg_of), (html, html_of)):
        if file is not None:
            write_picture(Path(file), draw(report))
            output.note(f"Wrote {file}")
    if output.as_json:
        output.json(report.to_json())
    else:
        show_graph(output, report)
    return failures.DONE


def write_picture(path: Path, text: str) -> None:
    """Write a picture.

    Raises:
        UsageError: The file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} could not be written: {error.strerror}. Name another file.", path=path) from error
