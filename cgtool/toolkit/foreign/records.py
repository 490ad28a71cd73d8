"""What a cache of any system holds: records and their JSON. Must not import torch.

JSON of a cache::

    {"schema": 1, "system": str, "version": str | null, "root": str, "entries": [entry...], "size_bytes": int,
     "warnings": [str...], "deletion": str}

of an entry and of an artifact: their fields by name, a path as text, a shape as `cgtool.plan.shapes` writes it.
Names, paths, factors and problems may hold anything that a stranger wrote: show them through `cgtool.cli.text.plain`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cgtool.plan.pieces import Json
from cgtool.plan.shapes import Shape
from cgtool.records import dataclass
from cgtool.store.key import Factor

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class ForeignArtifact:
    """One compiled thing of an entry, or one that its index names and that is not there.

    Args:
        path: Where it lies under the entry's folder, with "/"; where it would lie if it is missing. An artifact may be
            a folder.
        what: What it is, in one word: "compiled_artifact", "unpacked_artifact", "aot_model", "generated_code",
            "compiled_graph", "autograd_graph", "native_code", "header", "kernel_binary", "kernel_code", "metadata",
            "inductor_cache", "triton_cache", "member", ...
        size_bytes: Its bytes on the disk; 0 where it is missing.
        rank: The rank as the system spells it: "0", or "0_0" for vLLM's rank and data-parallel rank; "" for all.
        prefix: Which compiled part of the model; "" where the system names none.
        shape: What it was compiled for; None where that is unknown.
        piece_index: The piece's number; None where that is unknown.
        holds_pickle: Whether loading it unpickles, that is: executes what it says.
        target: What it runs on, such as "cuda:90" or "x86_64"; None where that is unknown.
        members: What it holds, each in a few words.
        problems: What is wrong with it, each a clause.
    """

    path: str
    what: str
    size_bytes: int
    rank: str = ""
    prefix: str = ""
    shape: Shape | None = None
    piece_index: int | None = None
    holds_pickle: bool = False
    target: str | None = None
    members: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def to_json(self) -> Json:
        """Return the artifact as JSON."""
        return {
            "path": self.path,
            "what": self.what,
            "size_bytes": self.size_bytes,
            "rank": self.rank,
            "prefix": self.prefix,
            "shape": self.shape,
            "piece_index": self.piece_index,
            "holds_pickle": self.holds_pickle,
            "target": self.target,
            "members": list(self.members),
            "problems": list(self.problems),
        }


@dataclass(frozen=True, kw_only=True)
class ForeignEntry:
    """What a system keeps and looks up as one thing.

    Args:
        name: What the system calls it: a hash, a key.
        kind: "model", "aot_model", "graph", "autograd_graph", "generated_code", "kernel", "launcher", "mega_cache",
            "artifact", "shared" or "other".
        path: Its folder, or its file.
        artifacts: In the index's order, then what no index names.
        size_bytes: Its bytes on the disk, a file of several names once.
        num_files: How many names of files it has.
        created: When its oldest file was written, in UTC; None where it has none.
        last_used: When one of its files was read last, in UTC, as the file system noted it; None where no file was read
            after it was written. No foreign system keeps a stamp of its own, and many disks are mounted without.
        ranks: As artifacts spell them.
        prefixes: The compiled parts of the model.
        factors: The key's factors as the system wrote them in JSON; None where it wrote none.
        problems: What is wrong with it and with no single artifact.
        deletable: Whether its path may be removed, and nothing else breaks.
        why_not: Why it may not; "" where it may.
    """

    name: str
    kind: str
    path: Path
    artifacts: tuple[ForeignArtifact, ...]
    size_bytes: int
    num_files: int
    created: str | None
    last_used: str | None
    ranks: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    factors: Json = None
    problems: tuple[str, ...] = ()
    deletable: bool = True
    why_not: str = ""

    @property
    def key_factors(self) -> tuple[Factor, ...]:
        """What the system wrote of the key, as factors; none where it wrote nothing."""
        said = self.factors if isinstance(self.factors, dict) else {} if self.factors is None else {"": self.factors}
        return tuple(Factor(name=name, value=value) for name, value in said.items())

    def all_problems(self) -> Iterator[str]:
        """Yield its problems and those of its artifacts, which are named."""
        yield from self.problems
        for artifact in self.artifacts:
            for problem in artifact.problems:
                yield f"{artifact.path}: {problem}"

    def to_json(self) -> Json:
        """Return the entry as JSON."""
        return {
            "name": self.name,
            "kind": self.kind,
            "path": str(self.path),
            "artifacts": [artifact.to_json() for artifact in self.artifacts],
            "size_bytes": self.size_bytes,
            "num_files": self.num_files,
            "created": self.created,
            "last_used": self.last_used,
            "ranks": list(self.ranks),
            "prefixes": list(self.prefixes),
            "factors": self.factors,
            "problems": list(self.problems),
            "deletable": self.deletable,
            "why_not": self.why_not,
        }


@dataclass(frozen=True, kw_only=True)
class ForeignCache:
    """A cache of one system.

    Args:
        system: "cgtool", "vllm", "atom", "torch_inductor", "triton", "mega_cache" or "compiled_artifact".
        version: Which version wrote it, where the files say so.
        root: The folder that all entries lie in, or the file.
        entries: By name.
        size_bytes: What all of it takes on the disk, a file of several names once.
        warnings: What was skipped, and why.
        deletion: What may be removed from such a cache and when, in a sentence.
    """

    system: str
    version: str | None
    root: Path
    entries: tuple[ForeignEntry, ...]
    size_bytes: int
    warnings: tuple[str, ...]
    deletion: str

    def to_json(self) -> Json:
        """Return the cache as JSON; see the module's grammar."""
        return {
            "schema": SCHEMA,
            "system": self.system,
            "version": self.version,
            "root": str(self.root),
            "entries": [entry.to_json() for entry in self.entries],
            "size_bytes": self.size_bytes,
            "warnings": list(self.warnings),
            "deletion": self.deletion,
        }
