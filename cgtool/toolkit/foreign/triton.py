"""Reading Triton's cache, the folder that TRITON_CACHE_DIR names or ~/.triton/cache. Must not import torch.

    <hash>/                       52 letters of base32, the SHA-256; hexadecimal or base64 in other versions
      __grp__<kernel>.json        {"child_paths": {file name: absolute path}}
      <kernel>.json               what it was compiled for and with: target, warps, stages, shared memory, version
      <kernel>.cubin .hsaco       the code that runs; .spv for Intel
      <kernel>.ptx .amdgcn .llir .ttgir .ttir .source     the steps before
      <name>.so                   a launcher, instead of all that
      tmp.pid_<pid>_<id>/         being written

The group's file names absolute paths: a folder that was moved is not found, and Triton compiles again without a word.

Source: triton/runtime/cache.py of Triton 3.9.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cgtool.errors import CacheError
from cgtool.plan.pieces import Json
from cgtool.toolkit.foreign.entries import made_entry, plain_artifact, read_json
from cgtool.toolkit.foreign.records import ForeignArtifact, ForeignCache, ForeignEntry
from cgtool.toolkit.foreign.tree import File, Tree, join, size_of
from cgtool.toolkit.foreign.words import shown

_HASH = re.compile(r"[A-Z2-7]{52}|[0-9a-f]{64}|[A-Za-z0-9_-]{43}")
_GROUP = "__grp__"
_BINARIES = (".cubin", ".hsaco", ".spv")
_STEPS = (".ptx", ".amdgcn", ".llir", ".ttgir", ".ttir", ".source", ".spvasm", ".gluon")
_CACHE = "cache"
_UNFINISHED = "tmp.pid_"
_VERSION = re.compile(r"[0-9A-Za-z.+-]{1,40}")


def find_triton(path: Path) -> Path | None:
    """Return the folder that holds Triton's groups: `path`, or the "cache" in it; None if neither does."""
    for folder in (path, path / _CACHE):
        if _holds_groups(folder):
            return folder
    return None


def read_triton(path: Path) -> ForeignCache:
    """Return what Triton's cache holds.

    Args:
        path: The folder that TRITON_CACHE_DIR names, or the one above ".../cache".
    """
    root = find_triton(path) or path
    warnings: list[str] = []
    tree = Tree(root, warnings)
    names = [name for name in tree.folders() if _HASH.fullmatch(name)]
    entries = [kernel_entry(tree, name, name=name) for name in names]
    rest = [file for name in tree.folders() if name not in set(names) for file in tree.under(name)]
    rest += [tree.files[name] for name in tree.names()]
    if rest:
        why = "Triton did not write it in a form that is known"
        entries.append(made_entry("other files", "other", root, rest, (), deletable=False, why_not=why))
    return ForeignCache(
        system="triton",
        version=versions_of(entries),
        root=root,
        entries=tuple(entries),
        size_bytes=size_of(tree.files.values()),
        warnings=tuple(warnings),
        deletion="A hash folder may be removed whole: Triton compiles the kernel again when it is asked for next.",
    )


def kernel_entry(tree: Tree, folder: str, *, name: str) -> ForeignEntry:
    """Return the entry of one of Triton's hash folders.

    Args:
        tree: What holds it.
        folder: Where, under the tree's top.
        name: What to call it.
    """
    files = tree.under(folder)
    problems: list[str] = []
    metadata = _metadata(tree, folder, problems)
    target = _target_text(metadata)
    artifacts = [_artifact(tree, file, folder, target) for file in files]
    has_launcher = any(file.name.endswith(".so") for file in files)
    if metadata is None and not has_launcher and not problems:
        problems.append("it has no metadata of a kernel and no launcher")
    if metadata is not None and not any(file.name.endswith(_BINARIES) for file in files):
        problems.append("it has no code that runs: the kernel is not whole")
    problems += _group_problems(tree, folder)
    if any(name.startswith(_UNFINISHED) for name in tree.folders(folder)):
        problems.append("it holds what a process was writing and did not finish")
    return made_entry(
        name,
        "kernel" if metadata is not None or not has_launcher else "launcher",
        tree.top / folder,
        files,
        artifacts,
        factors=metadata,
        problems=tuple(problems),
    )


def versions_of(entries: Iterable[ForeignEntry]) -> str | None:
    """Return which versions of Triton compiled kernels, as their metadata says; None where none says."""
    said = {entry.factors.get("triton_version") for entry in entries if isinstance(entry.factors, dict)}
    known = sorted(version for version in said if isinstance(version, str) and _VERSION.fullmatch(version))
    return f"triton {', '.join(known)}" if known else None


def _metadata(tree: Tree, folder: str, problems: list[str]) -> Json:
    """What the kernel's JSON says; None where there is none, or it is torn."""
    for name in tree.names(folder):
        if not name.endswith(".json") or name.startswith(_GROUP):
            continue
        try:
            value = read_json(tree, join(folder, name))
        except (CacheError, OSError) as error:
            problems.append(f"{shown(name)} could not be read: {error}")
            continue
        if isinstance(value, dict) and "name" in value:
            return value
        problems.append(f"{shown(name)} is not the metadata of a kernel")
    return None


def _target_text(metadata: Any) -> str | None:
    """What a kernel runs on, such as "cuda:90" or "hip:gfx942"."""
    target = metadata.get("target") if isinstance(metadata, dict) else None
    if isinstance(target, list):  # as older versions wrote it
        backend, architecture, *_ = [*target, None, None]
    elif isinstance(target, dict):
        backend, architecture = target.get("backend"), target.get("arch")
    else:
        return None
    said = isinstance(backend, str) and type(architecture) in (str, int)
    return f"{backend}:{architecture}"[:80] if said else None


def _artifact(tree: Tree, file: File, folder: str, target: str | None) -> ForeignArtifact:
    suffix = Path(file.name).suffix
    if suffix in _BINARIES:
        return plain_artifact(tree, file, "kernel_binary", top=folder, target=target)
    if suffix in _STEPS:
        return plain_artifact(tree, file, "kernel_code", top=folder, target=target)
    what = {".json": "metadata", ".so": "native_code"}.get(suffix, "data")
    return plain_artifact(tree, file, what, top=folder)


def _group_problems(tree: Tree, folder: str) -> list[str]:
    problems: list[str] = []
    here = set(tree.names(folder))
    for name in sorted(here):
        if not (name.startswith(_GROUP) and name.endswith(".json")):
            continue
        try:
            value = read_json(tree, join(folder, name))
        except (CacheError, OSError) as error:
            problems.append(f"{shown(name)} could not be read: {error}")
            continue
        children = value.get("child_paths") if isinstance(value, dict) else None
        if not isinstance(children, dict) or not all(isinstance(path, str) for path in children.values()):
            problems.append(f"{shown(name)} is not a group of files")
            continue
        problems += [f"{shown(name)} names {shown(child)}, which is missing" for child in children if child not in here]
        elsewhere = {path.rpartition("/")[0] for path in children.values()} - {str(tree.top / folder)}
        if elsewhere:
            problems.append(
                f"{shown(name)} names files under {shown(min(elsewhere))}, where it does not lie now: it was moved, "
                "and Triton opens them there or compiles again"
            )
    return problems


def _holds_groups(folder: Path) -> bool:
    try:
        return any(
            _HASH.fullmatch(child.name) and child.is_dir() and not child.is_symlink() and _is_group(child)
            for child in folder.iterdir()
        )
    except OSError:
        return False


def _is_group(folder: Path) -> bool:
    try:
        return any(
            child.name.startswith(_GROUP) or child.suffix in {*_BINARIES, *_STEPS, ".so"} for child in folder.iterdir()
        )
    except OSError:
        return False
