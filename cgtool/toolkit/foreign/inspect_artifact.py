"""`inspect artifact` and `inspect graph` on a cache of another system. Prints nothing; importable without torch.

Nothing is unpickled or executed. JSON of `artifact`; `artifact` in it is as in `inspect cache`
(`cgtool.toolkit.foreign.records`), a kernel as in `inspect artifact` of cgtool's own::

    {"schema": 1, "system": str, "root": str, "entry": str, "artifact": {...}, "kernels": [kernel...],
     "facts": {str: json}, "compiler": str | null, "members": [{"name": str, "size_bytes": int}...],
     "sources": [{"language": str, "text": str}...], "warnings": [str...]}

and of `graph`, which vLLM and ATOM write as a text::

    {"schema": 1, "system": str, "root": str, "entry": str, "path": str, "text": str}
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgtool.errors import CacheError, UsageError
from cgtool.plan.shapes import is_asked, parse_shape
from cgtool.store.compiled_code import Kernel
from cgtool.store.layout import GRAPH_FILE
from cgtool.toolkit.contents import Contents
from cgtool.toolkit.foreign.contents import foreign_contents
from cgtool.toolkit.foreign.detect import read_foreign
from cgtool.toolkit.foreign.records import ForeignArtifact, ForeignCache, ForeignEntry, foreign_json, one_entry
from cgtool.toolkit.foreign.tree import Tree, shown
from cgtool.toolkit.inspect.artifact import ArtifactOptions
from cgtool.toolkit.inspect.graph import GraphOptions

SCHEMA = 1
_PIECE = re.compile(r"(.+)/([0-9]{1,9})\Z", re.DOTALL)
_MOST_LISTED = 20
_MOST_GRAPH_BYTES = 64 << 20
#: What Triton's metadata says of how a kernel is launched and what it takes.
_LAUNCH = (
    *("name", "target", "num_warps", "num_ctas", "num_stages", "warp_size", "waves_per_eu", "maxnreg", "shared"),
    *("tmem_size", "global_scratch_size", "profile_scratch_size", "triton_version"),
)


@dataclass(frozen=True, kw_only=True)
class ForeignArtifactReport:
    """What one artifact of another system's cache holds.

    Args:
        cache: The cache.
        entry: The entry that it is of.
        artifact: The artifact.
        contents: What is in it.
    """

    cache: ForeignCache
    entry: ForeignEntry
    artifact: ForeignArtifact
    contents: Contents

    @property
    def facts(self) -> dict[str, Any]:
        """What the system wrote of a kernel, and the code of the machine that it is for."""
        said = self.entry.factors if self.entry.kind == "kernel" and isinstance(self.entry.factors, dict) else {}
        return {**{name: said[name] for name in _LAUNCH if name in said}, **self.contents.target}

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Those that are named in it, or the one that its entry is."""
        name = self.facts.get("name")
        return self.contents.kernels or ((Kernel(name=name),) if isinstance(name, str) else ())

    def to_json(self) -> dict[str, Any]:
        """Return the document that `inspect artifact --json` prints."""
        return {
            "schema": SCHEMA,
            "system": self.cache.system,
            "root": str(self.cache.root),
            "entry": self.entry.name,
            "artifact": foreign_json(self.artifact),
            "kernels": [kernel.to_json() for kernel in self.kernels],
            "facts": self.facts,
            "compiler": self.contents.compiler,
            "members": [{"name": name, "size_bytes": size} for name, size in self.contents.members],
            "sources": [{"language": source.language, "text": source.text} for source in self.contents.sources],
            "warnings": list(self.contents.warnings),
        }


@dataclass(frozen=True, kw_only=True)
class ForeignGraphReport:
    """The whole graph of one part of an entry, as its system wrote it for people."""

    cache: ForeignCache
    entry: ForeignEntry
    path: Path
    text: str

    def to_json(self) -> dict[str, Any]:
        """Return the document that `inspect graph --json` prints."""
        return {
            "schema": SCHEMA,
            "system": self.cache.system,
            "root": str(self.cache.root),
            "entry": self.entry.name,
            "path": str(self.path),
            "text": self.text,
        }


def inspect_foreign_artifact(options: ArtifactOptions) -> ForeignArtifactReport | None:
    """Show what an artifact of another system's cache holds.

    Args:
        options: Which artifact: the beginning of its file's name or of its path below the entry, or the beginning of an
            entry's name, "/" and a piece or a path.

    Returns:
        The artifact; None where cgtool wrote what lies there, or no known system did.

    Raises:
        UsageError: No artifact fits, or several do; the message lists them.
        CacheError: The cache went away while it was read.
    """
    cache = read_foreign(options.cache_dir)
    if cache is None:
        return None
    if options.variant is not None:
        raise UsageError("Entries of other systems have no variants. Leave --variant out.", actual=options.variant)
    there = [(entry, artifact) for entry in cache.entries for artifact in entry.artifacts]
    fitting = [pair for pair in there if _fits(*pair, options)]
    exact = [pair for pair in fitting if options.artifact in (pair[1].path, f"{pair[0].name}/{pair[1].path}")]
    chosen = exact if len(exact) == 1 else fitting
    if len(chosen) != 1:
        raise _not_one(fitting or there, options, fits=bool(fitting))
    entry, artifact = chosen[0]
    return ForeignArtifactReport(
        cache=cache, entry=entry, artifact=artifact, contents=foreign_contents(entry, artifact)
    )


def inspect_foreign_graph(options: GraphOptions) -> ForeignGraphReport | None:
    """Show the whole graph that vLLM or ATOM wrote beside an entry's artifacts.

    Args:
        options: Which entry, rank and prefix.

    Returns:
        The graph; None where cgtool wrote what lies there, or no known system did.

    Raises:
        UsageError: No entry fits, or several do; the message lists them.
        CacheError: The system writes no graph, or none is there; or it cannot be read.
    """
    cache = read_foreign(options.cache_dir)
    if cache is None:
        return None
    entry = one_entry(cache, options.entry)
    tree = Tree(entry.path, [])
    paths = [
        path
        for path in sorted(tree.files)
        if path.rpartition("/")[2] == GRAPH_FILE
        and (options.rank is None or re.search(rf"(?:\A|/)rank_{options.rank}[_/]", path))
        and (options.prefix is None or path.split("/")[-2:-1] == [options.prefix])
    ]
    if not paths:
        message = (
            f"The entry {shown(entry.name)} holds no graph: of other systems only vLLM and ATOM write one, and that "
            "not cut into pieces. Look at what it holds with: cgtool inspect entry"
        )
        raise CacheError(message, path=entry.path)
    text = tree.read(paths[0], _MOST_GRAPH_BYTES).decode("utf-8", "backslashreplace")
    return ForeignGraphReport(cache=cache, entry=entry, path=entry.path / paths[0], text=text)


def _fits(entry: ForeignEntry, artifact: ForeignArtifact, options: ArtifactOptions) -> bool:
    wanted = options.artifact
    piece = _PIECE.match(wanted)
    names = (entry.name, entry.name.rpartition("/")[2])
    if piece is not None and artifact.piece_index == int(piece[2]) and any(n.startswith(piece[1]) for n in names):
        named = True
    else:
        starts = (artifact.path, artifact.path.rpartition("/")[2], *(f"{name}/{artifact.path}" for name in names))
        named = any(start.startswith(wanted) for start in starts)
    return (
        named
        and (
            options.shape is None
            or (artifact.shape is not None and is_asked(artifact.shape, parse_shape(options.shape)))
        )
        and (options.rank is None or artifact.rank.partition("_")[0] == str(options.rank))
        and options.prefix in (None, artifact.prefix)
    )


def _not_one(
    pairs: Sequence[tuple[ForeignEntry, ForeignArtifact]], options: ArtifactOptions, *, fits: bool
) -> UsageError:
    what = "Several artifacts fit" if fits else "No artifact fits"
    listed = [f"  {shown(f'{entry.name}/{artifact.path}')}" for entry, artifact in pairs[:_MOST_LISTED]]
    if len(pairs) > _MOST_LISTED:
        listed.append(f"  and {len(pairs) - _MOST_LISTED} more, which cgtool inspect entry shows")
    advice = "Name one of these, or choose by --shape, --rank and --prefix"
    return UsageError("\n".join([f"{what}. {advice}:", *listed]), actual=options.artifact)
