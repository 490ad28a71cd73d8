"""What all readers of folders need: an entry from its files, and artifacts from single files. Must not import torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cgtool.errors import CacheError
from cgtool.toolkit.foreign.binary import native_target, pickle_protocol, read_structure
from cgtool.toolkit.foreign.literals import MOST_BYTES, parse_json
from cgtool.toolkit.foreign.records import ForeignArtifact, ForeignEntry
from cgtool.toolkit.foreign.tree import File, Tree, created_of, size_of, used_of
from cgtool.toolkit.foreign.words import shown

_HEAD_BYTES = 64
_ELF_ENDINGS = (".so", ".o")
#: Text that a compiler or a person reads, and code that only a driver loads.
_PLAIN_ENDINGS = (
    *(".py", ".cpp", ".h", ".hpp", ".json", ".best_config", ".lock"),
    *(".ptx", ".amdgcn", ".llir", ".ttgir", ".ttir", ".source", ".spvasm", ".gluon", ".cubin", ".hsaco", ".spv"),
)


def made_entry(
    name: str, kind: str, path: Path, files: Iterable[File], artifacts: Iterable[ForeignArtifact], **rest: Any
) -> ForeignEntry:
    """Return an entry with the sizes and times of its files.

    Args:
        name: What the system calls it.
        kind: See `ForeignEntry`.
        path: Its folder or file.
        files: All that are its own.
        artifacts: What it holds.
        rest: More fields of the entry.
    """
    own = list(files)
    return ForeignEntry(
        name=name,
        kind=kind,
        path=path,
        artifacts=tuple(artifacts),
        size_bytes=size_of(own),
        num_files=len(own),
        created=created_of(own),
        last_used=used_of(own),
        **rest,
    )


def pickle_artifact(tree: Tree, file: File, what: str, *, top: str = "", **rest: Any) -> ForeignArtifact:
    """Return the artifact of a file that its system unpickles; what it begins with is read and nothing else."""
    problems: list[str] = []
    members: tuple[str, ...] = ()
    head = _head(tree, file, problems)
    protocol = pickle_protocol(head)
    if protocol is not None:
        members = (f"pickle protocol {protocol}",)
    elif file.size_bytes and not problems:
        problems.append("does not begin as a pickle does")
    return ForeignArtifact(
        path=_below(file, top),
        what=what,
        size_bytes=file.size_bytes,
        holds_pickle=True,
        members=members,
        problems=tuple(problems),
        **rest,
    )


def plain_artifact(tree: Tree, file: File, what: str, *, top: str = "", **rest: Any) -> ForeignArtifact:
    """Return the artifact of a file that is no pickle by its name.

    A cache has thousands of files, so only native code and what has no known ending is opened, for its beginning.
    """
    problems: list[str] = []
    if file.name.endswith(_PLAIN_ENDINGS):
        head = b""
        problems += ["zero bytes"] * (file.size_bytes == 0)
    else:
        head = _head(tree, file, problems)
        rest.setdefault("target", native_target(head))
    if file.name.endswith(_ELF_ENDINGS) and head and not head.startswith(b"\x7fELF"):
        problems.append("is no native code, by its beginning")
    return ForeignArtifact(
        path=_below(file, top),
        what=what,
        size_bytes=file.size_bytes,
        holds_pickle=pickle_protocol(head) is not None,
        problems=tuple(problems),
        **rest,
    )


def binary_artifact(
    tree: Tree, file: File, *, key: str | None = None, top: str = "", **rest: Any
) -> tuple[ForeignArtifact, str | None]:
    """Return the artifact of a file that `CompiledArtifact.save` wrote, and the digest of the torch that wrote it.

    Args:
        tree: Where it lies.
        file: The file.
        key: What an index says that it is looked up by; None where no index does.
        top: The folder that its path is given under.
        rest: More fields of the artifact.
    """
    members: tuple[str, ...] = ()
    torch_key = None
    problems: list[str] = []
    holds_pickle = True  # what is too broken to tell is unpickled all the same
    try:
        with tree.opened(file.path) as stream:
            structure = read_structure(stream)
    except CacheError as error:
        problems.append("zero bytes" if file.size_bytes == 0 else str(error))
    else:
        members = tuple(member.words() for member in structure.members)
        torch_key = structure.torch_key
        holds_pickle = structure.holds_pickle
        if structure.header == "mega_cache":
            problems.append("is a mega-cache and no compiled artifact")
        if None not in (key, structure.key) and key != structure.key:
            problems.append(f"the index names the key {shown(key)}, and the file holds {shown(structure.key)}")
        if not structure.checked:
            problems.append("its checksum was not compared, for it is too large to read now")
    artifact = ForeignArtifact(
        path=_below(file, top),
        what="compiled_artifact",
        size_bytes=file.size_bytes,
        holds_pickle=holds_pickle,
        members=members,
        problems=tuple(problems),
        **rest,
    )
    return artifact, torch_key


def read_json(tree: Tree, path: str) -> Any:
    """Return the value of a JSON file.

    Raises:
        CacheError: It cannot be read, is torn, or is over a limit; the sentence is a clause without the path.
    """
    return parse_json(tree.read(path, MOST_BYTES))


def _head(tree: Tree, file: File, problems: list[str]) -> bytes:
    if file.size_bytes == 0:
        problems.append("zero bytes")
        return b""
    try:
        with tree.opened(file.path) as stream:
            return stream.read(_HEAD_BYTES)
    except (CacheError, OSError) as error:
        problems.append(str(error))
        return b""


def _below(file: File, top: str) -> str:
    return file.path.removeprefix(f"{top}/") if top else file.path or file.name
