"""Reading a mega-cache file, or one compiled artifact, that lies alone. Must not import torch.

The forms are in `cgtool.toolkit.foreign.binary`.
"""

from __future__ import annotations

from pathlib import Path

from cgtool.errors import CacheError
from cgtool.toolkit.foreign.binary import Member, read_structure, sniff
from cgtool.toolkit.foreign.entries import binary_artifact, made_entry
from cgtool.toolkit.foreign.records import ForeignArtifact, ForeignCache, ForeignEntry
from cgtool.toolkit.foreign.tree import File, Tree, opened, size_of

_HEAD_BYTES = 256


def detect_file(path: Path) -> str | None:
    """Return "mega_cache" or "compiled_artifact" if a file begins as one, else None."""
    try:
        with opened(path, follow=True) as stream:
            return sniff(stream.read(_HEAD_BYTES))
    except (CacheError, OSError):
        return None


def read_file(path: Path) -> ForeignCache:
    """Return what a mega-cache or a compiled artifact holds.

    Args:
        path: The file.
    """
    warnings: list[str] = []
    tree = Tree(path, warnings)
    system = detect_file(path) or "mega_cache"
    files = list(tree.files.values())
    entries: tuple[ForeignEntry, ...] = ()
    if not files:
        warnings.append(f"{path} is gone or no regular file.")
    else:
        made = _artifact_entry if system == "compiled_artifact" else _mega_entry
        entries = (made(path, tree, files[0]),)
    return ForeignCache(
        system=system,
        version=None,
        root=path,
        entries=entries,
        size_bytes=size_of(files),
        warnings=tuple(warnings),
        deletion="The file may be removed whole; a program that loads it by its name must then do without.",
    )


def _mega_entry(path: Path, tree: Tree, file: File) -> ForeignEntry:
    problems: tuple[str, ...] = ()
    artifacts: tuple[ForeignArtifact, ...] = ()
    try:
        with tree.opened(file.path) as stream:
            structure = read_structure(stream)
    except CacheError as error:
        problems = (str(error),)
    else:
        artifacts = tuple(map(_member, structure.members))
        if not structure.checked:
            problems = ("its checksum was not compared, for it is too large to read now",)
    return made_entry(path.name, "mega_cache", path, [file], artifacts, problems=problems)


def _member(member: Member) -> ForeignArtifact:
    return ForeignArtifact(
        path=f"{member.kind}/{member.key}",
        what="member",
        size_bytes=member.size_bytes,
        holds_pickle=member.protocol is not None,
        members=() if member.protocol is None else (f"pickle protocol {member.protocol}",),
        problems=() if member.size_bytes else ("zero bytes",),
    )


def _artifact_entry(path: Path, tree: Tree, file: File) -> ForeignEntry:
    artifact, torch_key = binary_artifact(tree, file)
    whole = ForeignArtifact(**{**vars(artifact), "path": path.name})
    factors = None if torch_key is None else {"torch_key": torch_key}
    return made_entry(path.name, "artifact", path, [file], [whole], factors=factors)
