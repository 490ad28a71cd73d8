"""What a cache of another system holds: its records, and how they are made of files. Must not import torch.

The fields of each record are its JSON, in this order. Names, paths, factors and problems may hold anything that a
stranger wrote: show them through `cgtool.cli.text.plain`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from cgtool.errors import CacheError
from cgtool.plan.pieces import Json
from cgtool.plan.shapes import Shape
from cgtool.store.records import Factor, timestamp
from cgtool.toolkit.foreign.formats import MOST_BYTES, native_target, parse_json, pickle_protocol, read_structure
from cgtool.toolkit.foreign.tree import File, Tree, shown
from cgtool.toolkit.selection import selection_error

SCHEMA = 2

_HEAD_BYTES = 64
#: File systems round times, and a file is often looked at as it is written.
_SECS_AFTER_WRITING = 2.0
#: Text that a compiler or a person reads, and code that only a driver loads: a cache has thousands of them, and none is
#: opened for a listing.
_UNOPENED = (
    *(".py", ".cpp", ".h", ".hpp", ".json", ".best_config", ".lock"),
    *(".ptx", ".amdgcn", ".llir", ".ttgir", ".ttir", ".source", ".spvasm", ".gluon", ".cubin", ".hsaco", ".spv"),
)


class ForeignArtifact(msgspec.Struct, frozen=True, kw_only=True):
    """One compiled thing of an entry, or one that its index names and that is not there."""

    #: Where it lies under the entry's folder, with "/"; where it would lie if it is missing. An artifact may be a
    #: folder.
    path: str
    #: What it is, in one word: "compiled_artifact", "unpacked_artifact", "aot_model", "generated_code",
    #: "compiled_graph", "autograd_graph", "native_code", "header", "kernel_binary", "kernel_code", "metadata",
    #: "inductor_cache", "triton_cache", "member", ...
    what: str
    #: Its bytes on the disk; 0 where it is missing.
    size_bytes: int
    #: The rank as the system spells it: "0", or "0_0" for vLLM's rank and data-parallel rank; "" for all.
    rank: str = ""
    #: Which compiled part of the model; "" where the system names none.
    prefix: str = ""
    #: What it was compiled for; None where that is unknown.
    shape: Shape | None = None
    #: The piece's number; None where that is unknown.
    piece_index: int | None = None
    #: Whether loading it unpickles, that is: executes what it says.
    holds_pickle: bool = False
    #: What it runs on, such as "cuda:90" or "x86_64"; None where that is unknown.
    target: str | None = None
    #: What it holds, each in a few words.
    members: tuple[str, ...] = ()
    #: What is wrong with it, each a clause.
    problems: tuple[str, ...] = ()


class ForeignEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What a system keeps and looks up as one thing."""

    #: What the system calls it: a hash, a key.
    name: str
    #: "model", "aot_model", "graph", "autograd_graph", "generated_code", "kernel", "launcher", "mega_cache",
    #: "artifact", "shared" or "other".
    kind: str
    #: Its folder, or its file.
    path: Path
    #: In the index's order, then what no index names.
    artifacts: tuple[ForeignArtifact, ...]
    #: Its bytes on the disk, a file of several names once.
    size_bytes: int
    #: How many names of files it has.
    num_files: int
    #: When its oldest file was written, in UTC; None where it has none.
    created: str | None
    #: When one of its files was read last, in UTC, as the file system noted it; None where no file was read after it
    #: was written. No foreign system keeps a stamp of its own, and many disks are mounted without.
    last_used: str | None
    #: As artifacts spell them.
    ranks: tuple[str, ...] = ()
    #: The compiled parts of the model.
    prefixes: tuple[str, ...] = ()
    #: The key's factors as the system wrote them in JSON; None where it wrote none.
    factors: Json = None
    #: What is wrong with it and with no single artifact.
    problems: tuple[str, ...] = ()
    #: Whether its path may be removed, and nothing else breaks.
    deletable: bool = True
    #: Why it may not; "" where it may.
    why_not: str = ""

    @classmethod
    def of(
        cls,
        name: str,
        kind: str,
        tree: Tree,
        artifacts: Iterable[ForeignArtifact],
        *,
        folder: str = "",
        files: Iterable[File] | None = None,
        **rest: Any,
    ) -> ForeignEntry:
        """Return an entry with the sizes and times of `files`, or else of all files in its folder of the tree."""
        own = list(tree.under(folder) if files is None else files)
        used = [file.read for file in own if file.read > file.written + _SECS_AFTER_WRITING]
        return cls(
            name=name,
            kind=kind,
            path=tree.top / folder,
            artifacts=tuple(artifacts),
            size_bytes=size_of(own),
            num_files=len(own),
            created=_iso(min((file.written for file in own), default=None)),
            last_used=_iso(max(used, default=None)),
            **rest,
        )

    @classmethod
    def others(cls, tree: Tree, files: Iterable[File], why: str) -> list[ForeignEntry]:
        """Return what lies in a cache and belongs to none of its entries as one entry, if there is any."""
        own = list(files)
        return [cls.of("other files", "other", tree, (), files=own, deletable=False, why_not=why)] if own else []

    @property
    def key_factors(self) -> tuple[Factor, ...]:
        """What the system wrote of the key, as factors; none where it wrote nothing."""
        said = self.factors if isinstance(self.factors, dict) else {} if self.factors is None else {"": self.factors}
        return tuple(Factor(name=name, value=value) for name, value in said.items())

    @property
    def kernel(self) -> dict[str, Json]:
        """The metadata that Triton wrote of a kernel; {} where this is another thing."""
        return self.factors if self.kind == "kernel" and isinstance(self.factors, dict) else {}

    def all_problems(self) -> Iterator[str]:
        """Yield its problems and those of its artifacts, which are named."""
        yield from self.problems
        for artifact in self.artifacts:
            for problem in artifact.problems:
                yield f"{artifact.path}: {problem}"


class ForeignCache(msgspec.Struct, frozen=True, kw_only=True):
    """A cache of one system."""

    #: "vllm", "atom", "torch_inductor", "triton", "mega_cache" or "compiled_artifact".
    system: str
    #: Which version wrote it, where the files say so.
    version: str | None
    #: The folder that all entries lie in, or the file.
    root: Path
    #: By name.
    entries: tuple[ForeignEntry, ...]
    #: What all of it takes on the disk, a file of several names once.
    size_bytes: int
    warnings: tuple[str, ...]
    #: What may be removed from such a cache and when, in a sentence.
    deletion: str

    @classmethod
    def of(
        cls, system: str, tree: Tree, entries: Iterable[ForeignEntry], *, version: str | None = None, deletion: str
    ) -> ForeignCache:
        """Return the cache that a tree is."""
        return cls(
            system=system,
            version=version,
            root=tree.top,
            entries=tuple(entries),
            size_bytes=size_of(tree.files.values()),
            warnings=tuple(tree.warnings),
            deletion=deletion,
        )


def foreign_json(record: msgspec.Struct) -> dict[str, Any]:
    """Return a record's JSON form: its fields, paths as text."""
    found: dict[str, Any] = msgspec.to_builtins(record, enc_hook=str)
    return found


def one_entry(cache: ForeignCache, beginning: str | None) -> ForeignEntry:
    """Return the one entry of a cache that fits."""
    wanted = (beginning or "").lower()
    fitting = [
        entry
        for entry in cache.entries
        if any(name.lower().startswith(wanted) for name in (entry.name, entry.name.rpartition("/")[2]))
    ]
    exact = [entry for entry in fitting if entry.name == beginning]
    if len(exact or fitting) == 1:
        return (exact or fitting)[0]
    what = "Several entries fit" if fitting else "No entry fits"
    listed = [shown(entry.name) for entry in fitting or cache.entries]
    raise selection_error(f"{what}. Name one of these", listed, path=cache.root, actual=beginning)


def size_of(files: Iterable[File]) -> int:
    """Return what files take, one of several names once."""
    return sum({file.identity: file.size_bytes for file in files}.values())


def read_json(tree: Tree, path: str) -> Any:
    """Return the value of a JSON file."""
    return parse_json(tree.read(path, MOST_BYTES))


def file_artifact(
    tree: Tree, file: File, what: str, *, top: str = "", pickled: bool = False, **rest: Any
) -> ForeignArtifact:
    """Return the artifact of a file; its path is given under the folder `top`.

    No more than its beginning is read, and that only if its system unpickles it or its ending does not say what it is.
    """
    problems = [] if file.size_bytes else ["zero bytes"]
    head = b""
    if file.size_bytes and (pickled or not file.name.endswith(_UNOPENED)):
        try:
            with tree.opened(file.path) as stream:
                head = stream.read(_HEAD_BYTES)
        except (CacheError, OSError) as error:
            problems.append(str(error))
    protocol = pickle_protocol(head)
    if pickled:
        rest["members"] = () if protocol is None else (f"pickle protocol {protocol}",)
        problems += ["does not begin as a pickle does"] * (protocol is None and not problems)
    else:
        rest.setdefault("target", native_target(head))
        if file.name.endswith((".so", ".o")) and head and not head.startswith(b"\x7fELF"):
            problems.append("is no native code, by its beginning")
    return _artifact(file, what, problems, top=top, holds_pickle=pickled or protocol is not None, **rest)


def binary_artifact(
    tree: Tree, file: File, *, key: str | None = None, top: str = "", **rest: Any
) -> tuple[ForeignArtifact, str | None]:
    """Return the artifact of a file that `CompiledArtifact.save` wrote, and the digest of the torch that wrote it.

    `key` is what an index says that it is looked up by; None where no index does.
    """
    what, problems = "compiled_artifact", []
    try:
        with tree.opened(file.path) as stream:
            structure = read_structure(stream)
    except CacheError as error:  # what is too broken to tell is unpickled all the same
        problems = [str(error) if file.size_bytes else "zero bytes"]
        return _artifact(file, what, problems, top=top, holds_pickle=True, **rest), None
    if structure.is_mega:
        problems.append("is a mega-cache and no compiled artifact")
    if None not in (key, structure.key) and key != structure.key:
        problems.append(f"the index names the key {shown(key)}, and the file holds {shown(structure.key)}")
    if not structure.checked:
        problems.append("its checksum was not compared, for it is too large to read now")
    holds_pickle = any(member.protocol is not None for member in structure.members)
    members = tuple(member.describe() for member in structure.members)
    artifact = _artifact(file, what, problems, top=top, holds_pickle=holds_pickle, members=members, **rest)
    return artifact, structure.torch_key


def _artifact(file: File, what: str, problems: list[str], *, top: str, **rest: Any) -> ForeignArtifact:
    path = file.path.removeprefix(f"{top}/") if top else file.path
    return ForeignArtifact(path=path, what=what, size_bytes=file.size_bytes, problems=tuple(problems), **rest)


def _iso(secs: float | None) -> str | None:
    try:
        return None if secs is None else timestamp(secs)
    except (OverflowError, ValueError, OSError):  # a year that no calendar has
        return None
