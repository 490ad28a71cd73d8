"""Records of another system's cache, and functions that make them from files. Must not import torch.

The fields of each record are its JSON, in this order. Names, paths, factors and problems are untrusted text: print them
through `cgtool.cli.text.plain`.
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
from cgtool.toolkit.foreign.formats import MAX_BYTES, native_target, parse_json, pickle_protocol, read_structure
from cgtool.toolkit.foreign.tree import File, Tree, display_text
from cgtool.toolkit.selection import selection_error

SCHEMA = 2

_HEAD_BYTES = 64
#: A read within this time of writing does not count: file systems round times, and writers read their files back.
_SECS_AFTER_WRITING = 2.0
#: Suffixes of text and of code for drivers. A cache has thousands of these files, and a listing opens none of them.
_UNOPENED = (
    *(".py", ".cpp", ".h", ".hpp", ".json", ".best_config", ".lock"),
    *(".ptx", ".amdgcn", ".llir", ".ttgir", ".ttir", ".source", ".spvasm", ".gluon", ".cubin", ".hsaco", ".spv"),
)


class ForeignArtifact(msgspec.Struct, frozen=True, kw_only=True):
    """One artifact of an entry, or a missing one that the entry's index names."""

    #: Path below the entry's folder, with "/"; the expected path if it is missing. An artifact may be a folder.
    path: str
    #: Its type: "compiled_artifact", "unpacked_artifact", "aot_model", "generated_code", "compiled_graph",
    #: "autograd_graph", "native_code", "header", "kernel_binary", "kernel_code", "metadata", "inductor_cache",
    #: "triton_cache", "member", ...
    what: str
    #: Bytes on disk; 0 if it is missing.
    size_bytes: int
    #: The rank as the system spells it: "0", or "0_0" for vLLM's rank and data-parallel rank; "" for all.
    rank: str = ""
    #: The compiled part of the model; "" if the system names none.
    prefix: str = ""
    #: The shape that it was compiled for; None if unknown.
    shape: Shape | None = None
    #: None if unknown.
    piece_index: int | None = None
    #: Whether loading it unpickles, which can execute code.
    holds_pickle: bool = False
    #: The target device or processor, such as "cuda:90" or "x86_64"; None if unknown.
    target: str | None = None
    #: Short descriptions of its contents.
    members: tuple[str, ...] = ()
    #: Clauses that describe faults.
    problems: tuple[str, ...] = ()


class ForeignEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The unit that a system stores and looks up."""

    #: The system's name for it: a hash or a key.
    name: str
    #: "model", "aot_model", "graph", "autograd_graph", "generated_code", "kernel", "launcher", "mega_cache",
    #: "artifact", "shared" or "other".
    kind: str
    #: Its folder or file.
    path: Path
    #: In the order of the index, followed by artifacts that no index names.
    artifacts: tuple[ForeignArtifact, ...]
    #: Bytes on disk; a file with several hard links counts once.
    size_bytes: int
    #: Number of file names.
    num_files: int
    #: When its oldest file was written, in UTC; None if it has no files.
    created: str | None
    #: The latest access time of its files, in UTC; None if no file was read after it was written. No other system keeps
    #: its own stamps, and many file systems are mounted without access times.
    last_used: str | None
    #: As spelled in its artifacts.
    ranks: tuple[str, ...] = ()
    #: The compiled parts of the model.
    prefixes: tuple[str, ...] = ()
    #: The factors of the key, as the system wrote them in JSON; None if it wrote none.
    factors: Json = None
    #: Faults that do not belong to a single artifact.
    problems: tuple[str, ...] = ()
    #: Whether its path can be removed without breaking anything else.
    deletable: bool = True
    #: Why it is not deletable; "" if it is.
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
        """Make an entry with the sizes and times of `files`, by default of all files in its folder."""
        files = list(tree.under(folder) if files is None else files)
        reads = [file.read for file in files if file.read > file.written + _SECS_AFTER_WRITING]
        return cls(
            name=name,
            kind=kind,
            path=tree.top / folder,
            artifacts=tuple(artifacts),
            size_bytes=size_of(files),
            num_files=len(files),
            created=_iso(min((file.written for file in files), default=None)),
            last_used=_iso(max(reads, default=None)),
            **rest,
        )

    @classmethod
    def others(cls, tree: Tree, files: list[File], why: str) -> list[ForeignEntry]:
        """Return one entry for the files that belong to no other entry, if there are any."""
        return [cls.of("other files", "other", tree, (), files=files, deletable=False, why_not=why)] if files else []

    @property
    def key_factors(self) -> tuple[Factor, ...]:
        """The factors of the key that the system recorded."""
        if self.factors is None:
            return ()
        factors = self.factors if isinstance(self.factors, dict) else {"": self.factors}
        return tuple(Factor(name=name, value=value) for name, value in factors.items())

    @property
    def kernel(self) -> dict[str, Json]:
        """Triton's metadata of a kernel; {} if the entry is not a kernel."""
        return self.factors if self.kind == "kernel" and isinstance(self.factors, dict) else {}

    def all_problems(self) -> Iterator[str]:
        """Yield its problems, and those of its artifacts with their paths."""
        yield from self.problems
        for artifact in self.artifacts:
            for problem in artifact.problems:
                yield f"{artifact.path}: {problem}"


class ForeignCache(msgspec.Struct, frozen=True, kw_only=True):
    """A cache of another system."""

    #: "vllm", "atom", "torch_inductor", "triton", "mega_cache" or "compiled_artifact".
    system: str
    #: The version that wrote it, if the files state it.
    version: str | None
    #: The folder of all entries, or the file.
    root: Path
    entries: tuple[ForeignEntry, ...]
    #: Bytes on disk; a file with several hard links counts once.
    size_bytes: int
    warnings: tuple[str, ...]
    #: Advice on what may be removed from such a cache, and when.
    deletion: str

    @classmethod
    def of(
        cls, system: str, tree: Tree, entries: Iterable[ForeignEntry], *, version: str | None = None, deletion: str
    ) -> ForeignCache:
        """Make the record of the cache in a tree."""
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
    """Return the JSON form of a record; paths are strings."""
    document: dict[str, Any] = msgspec.to_builtins(record, enc_hook=str)
    return document


def one_entry(cache: ForeignCache, beginning: str | None) -> ForeignEntry:
    """Return the only entry whose name starts with `beginning`, or raise UsageError."""
    prefix = (beginning or "").lower()
    matching = [
        entry
        for entry in cache.entries
        if any(name.lower().startswith(prefix) for name in (entry.name, entry.name.rpartition("/")[2]))
    ]
    exact = [entry for entry in matching if entry.name == beginning]
    if len(exact or matching) == 1:
        return (exact or matching)[0]
    problem = "Several entries match" if matching else "No entry matches"
    listed = [display_text(entry.name) for entry in matching or cache.entries]
    raise selection_error(f"{problem}. Name one of these", listed, path=cache.root, actual=beginning)


def size_of(files: Iterable[File]) -> int:
    """Return the size of files; one with several hard links counts once."""
    return sum({file.identity: file.size_bytes for file in files}.values())


def read_json(tree: Tree, path: str) -> Any:
    """Read a JSON file."""
    return parse_json(tree.read(path, MAX_BYTES))


def file_artifact(
    tree: Tree, file: File, what: str, *, top: str = "", pickled: bool = False, **rest: Any
) -> ForeignArtifact:
    """Make the artifact of a file; its path is relative to the folder `top`.

    Only the start of the file is read, and only if its system unpickles it or its suffix is unknown.
    """
    problems = [] if file.size_bytes else ["it is empty"]
    head = b""
    if file.size_bytes and (pickled or not file.name.endswith(_UNOPENED)):
        try:
            with tree.open(file.path) as stream:
                head = stream.read(_HEAD_BYTES)
        except (CacheError, OSError) as error:
            problems.append(str(error))
    protocol = pickle_protocol(head)
    if pickled:
        rest["members"] = () if protocol is None else (f"pickle protocol {protocol}",)
        problems += ["it does not start like a pickle"] * (protocol is None and not problems)
    else:
        rest.setdefault("target", native_target(head))
        if file.name.endswith((".so", ".o")) and head and not head.startswith(b"\x7fELF"):
            problems.append("it does not start like native code")
    return _artifact(file, what, problems, top=top, holds_pickle=pickled or protocol is not None, **rest)


def binary_artifact(
    tree: Tree, file: File, *, key: str | None = None, top: str = "", **rest: Any
) -> tuple[ForeignArtifact, str | None]:
    """Make the artifact of a file that `CompiledArtifact.save` wrote; also return the digest of torch in the file.

    `key` is its key according to an index; None without an index.
    """
    what, problems = "compiled_artifact", []
    try:
        with tree.open(file.path) as stream:
            structure = read_structure(stream)
    except CacheError as error:  # its system would still unpickle it
        problems = [str(error) if file.size_bytes else "it is empty"]
        return _artifact(file, what, problems, top=top, holds_pickle=True, **rest), None
    if structure.is_mega:
        problems.append("it is a mega-cache, not a compiled artifact")
    if None not in (key, structure.key) and key != structure.key:
        problems.append(
            f"the index names the key {display_text(key)}, and the file holds {display_text(structure.key)}"
        )
    if not structure.checked:
        problems.append("its checksum was not compared because the file is too large")
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
    except (OverflowError, ValueError, OSError):  # outside of the calendar's range
        return None
