"""The caches of torch's compiler and of Triton, and torch's single-file caches. Must not import torch.

    /tmp/torchinductor_<user>/               or TORCHINDUCTOR_CACHE_DIR
      fxgraph/<key[1:3]>/<key>/<digest>      compiled graphs, pickled; one file for each set of guards of a key
      aotautograd/<key>/<digest>             AOTAutograd's wrappers of the graphs, pickled
      <two letters>/c<...>.py .cpp .so .h .main.cpp .main.so .kernel.so .best_config ...    generated code
      precompiled_headers/                   large, and rebuilt when missing
      triton/<device>/<hash>/                Triton's cache
      locks/                                 empty files

A graph's file names the code that it needs, and holds a copy in case the code is missing. Keys are "f" or "a" and 51
letters of base32.

    ~/.triton/cache/<hash>/         or TRITON_CACHE_DIR; 52 letters of base32, in other versions hexadecimal or base64
      __grp__<kernel>.json          {"child_paths": {file name: absolute path}}
      <kernel>.json                 metadata: target, warps, stages, shared memory, version
      <kernel>.cubin .hsaco         the binary; .spv for Intel
      <kernel>.ptx .amdgcn .llir .ttgir .ttir .source     the intermediate stages
      <name>.so                     a launcher, instead of the files above
      tmp.pid_<pid>_<id>/           being written

The group's file holds absolute paths, so Triton does not find a folder that was moved, and silently compiles again.

Source: torch/_inductor/codecache.py and torch/_functorch/_aot_autograd/autograd_cache.py of torch 2.13,
triton/runtime/cache.py of Triton 3.9. `cgtool.toolkit.foreign.formats` describes the single files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from cgtool.errors import CacheError
from cgtool.plan.pieces import Json
from cgtool.toolkit.foreign.formats import Member, read_structure, sniff
from cgtool.toolkit.foreign.records import (
    ForeignArtifact,
    ForeignCache,
    ForeignEntry,
    binary_artifact,
    file_artifact,
    read_json,
)
from cgtool.toolkit.foreign.tree import File, Tree, display_text, join, open_regular

_GRAPHS, _AUTOGRAD_GRAPHS, _TRITON = "fxgraph", "aotautograd", "triton"
_CODE_FOLDER = re.compile(r"[a-z2-7]{2}")
_CODE_FILE = re.compile(r"c[a-z2-7]{51}\..+|[a-z2-7]{51,52}\..+")
_KINDS = {".so": "native_code", ".o": "native_code", ".py": "generated_code", ".cpp": "generated_code"}
_HEADERS = (".h", ".gch", ".pch", ".hpp", ".pch.d")
_TEMPORARY = (".tmp", ".lock")

_KERNEL_FOLDER = re.compile(r"[A-Z2-7]{52}|[0-9a-f]{64}|[A-Za-z0-9_-]{43}")
_GROUP = "__grp__"
_BINARIES = (".cubin", ".hsaco", ".spv")
_STEPS = (".ptx", ".amdgcn", ".llir", ".ttgir", ".ttir", ".source", ".spvasm", ".gluon")
_KERNEL_FILES = {
    **dict.fromkeys(_BINARIES, "kernel_binary"),
    **dict.fromkeys(_STEPS, "kernel_code"),
    ".json": "metadata",
    ".so": "native_code",
}
_VERSION = re.compile(r"[0-9A-Za-z.+-]{1,40}")
_HEAD_BYTES = 256


def is_torch_inductor(path: Path) -> bool:
    """Return whether a folder is torch's compile cache."""
    try:
        children = {child.name: child for child in path.iterdir() if child.is_dir()}
        return not children.keys().isdisjoint((_GRAPHS, _AUTOGRAD_GRAPHS)) or any(
            _CODE_FILE.fullmatch(file.name)
            for name, child in children.items()
            if _CODE_FOLDER.fullmatch(name) and not child.is_symlink()
            for file in child.iterdir()
        )
    except OSError:
        return False


def read_torch_inductor(path: Path) -> ForeignCache:
    """Read torch's compile cache: the folder that TORCHINDUCTOR_CACHE_DIR names."""
    tree = Tree(path)
    # A folder whose name starts with a dot is being written or removed.
    graphs = [folder for group in tree.folders(_GRAPHS) for folder in _visible(tree, join(_GRAPHS, group))]
    autograd = _visible(tree, _AUTOGRAD_GRAPHS)
    kernels = [folder for device in tree.folders(_TRITON) for folder in _visible(tree, join(_TRITON, device))]
    entries = [_graph(tree, folder, "graph", "compiled_graph") for folder in graphs]
    entries += [_graph(tree, folder, "autograd_graph", "autograd_graph") for folder in autograd]
    entries += [_kernel(tree, folder) for folder in kernels]
    claimed = {file.path for folder in (*graphs, *autograd, *kernels) for file in tree.under(folder)}
    code = [file for folder in tree.folders() if _CODE_FOLDER.fullmatch(folder) for file in tree.under(folder)]
    claimed.update(file.path for file in code)
    if code:
        why = (
            "compiled graphs share it, and a running process may be about to open it; the whole cache may be removed "
            "when no process uses it"
        )
        artifacts = [
            file_artifact(
                tree, file, "header" if file.name.endswith(_HEADERS) else _KINDS.get(Path(file.name).suffix, "data")
            )
            for file in code
            if not _is_temporary(file)
        ]
        entries.append(
            ForeignEntry.of(
                "generated code", "generated_code", tree, artifacts, files=code, deletable=False, why_not=why
            )
        )
    rest = [file for name, file in tree.files.items() if name not in claimed]
    why = "it belongs to no single graph; the whole cache may be removed when no process uses it"
    deletion = (
        "The folder of a compiled graph, of an AOTAutograd graph or of a Triton kernel may be removed: torch compiles "
        "it again. Generated code is shared: remove it only with the whole folder, when no process uses it."
    )
    entries += ForeignEntry.others(tree, rest, why)
    return ForeignCache.of("torch_inductor", tree, entries, version=_versions(entries), deletion=deletion)


def _visible(tree: Tree, folder: str) -> list[str]:
    return [join(folder, name) for name in tree.folders(folder) if not name.startswith(".")]


def _graph(tree: Tree, folder: str, kind: str, what: str) -> ForeignEntry:
    graphs = [file for file in tree.under(folder) if not _is_temporary(file)]
    artifacts = [file_artifact(tree, file, what, top=folder, pickled=True) for file in graphs]
    problems = () if artifacts else ("it does not hold a graph",)
    return ForeignEntry.of(folder.rpartition("/")[2], kind, tree, artifacts, folder=folder, problems=problems)


def _is_temporary(file: File) -> bool:
    return file.name.startswith(".") or file.name.endswith(_TEMPORARY)


def find_triton(path: Path) -> Path | None:
    """Return the folder of Triton's kernels: `path` or the "cache" in it; None if neither holds kernels."""
    return next((folder for folder in (path, path / "cache") if _holds_kernels(folder)), None)


def _holds_kernels(folder: Path) -> bool:
    try:
        return any(
            child.name.startswith(_GROUP) or child.suffix in (*_BINARIES, *_STEPS, ".so")
            for kernel in folder.iterdir()
            if _KERNEL_FOLDER.fullmatch(kernel.name) and kernel.is_dir() and not kernel.is_symlink()
            for child in kernel.iterdir()
        )
    except OSError:
        return False


def read_triton(path: Path) -> ForeignCache:
    """Read Triton's cache: the folder that TRITON_CACHE_DIR names, or the parent of ".../cache"."""
    tree = Tree(find_triton(path) or path)
    folders = [name for name in tree.folders() if _KERNEL_FOLDER.fullmatch(name)]
    entries = [_kernel(tree, folder) for folder in folders]
    rest = [file for file in tree.files.values() if file.path.partition("/")[0] not in set(folders)]
    entries += ForeignEntry.others(tree, rest, "Triton did not write it in a known format")
    deletion = "A hash folder may be removed whole: Triton compiles the kernel again when it is needed."
    return ForeignCache.of("triton", tree, entries, version=_versions(entries), deletion=deletion)


def _kernel(tree: Tree, folder: str) -> ForeignEntry:
    """Read one of Triton's hash folders."""
    files = tree.under(folder)
    problems: list[str] = []
    metadata = _metadata(tree, folder, problems)
    target = _target(metadata)
    artifacts = []
    for file in files:
        what = _KERNEL_FILES.get(Path(file.name).suffix, "data")
        rest: dict[str, Any] = {"target": target} if what in ("kernel_binary", "kernel_code") else {}
        artifacts.append(file_artifact(tree, file, what, top=folder, **rest))
    is_launcher = metadata is None and any(file.name.endswith(".so") for file in files)
    if metadata is None and not is_launcher and not problems:
        problems.append("it has neither the metadata of a kernel nor a launcher")
    if metadata is not None and not any(file.name.endswith(_BINARIES) for file in files):
        problems.append("it is incomplete: the kernel has no binary")
    for name, value in _read_jsons(tree, folder, problems, groups=True):
        _check_group(tree, folder, name, value, problems)
    if any(name.startswith("tmp.pid_") for name in tree.folders(folder)):
        problems.append("it holds a folder that a process did not finish writing")
    kind = "launcher" if is_launcher else "kernel"
    return ForeignEntry.of(folder, kind, tree, artifacts, folder=folder, factors=metadata, problems=tuple(problems))


def _versions(entries: Iterable[ForeignEntry]) -> str | None:
    """Return the versions of Triton in the kernels' metadata; None if there are none."""
    found = {entry.kernel.get("triton_version") for entry in entries}
    versions = sorted(version for version in found if isinstance(version, str) and _VERSION.fullmatch(version))
    return f"triton {', '.join(versions)}" if versions else None


def _metadata(tree: Tree, folder: str, problems: list[str]) -> dict[str, Json] | None:
    """Read the metadata of a kernel; None if it is missing or torn."""
    for name, value in _read_jsons(tree, folder, problems, groups=False):
        if isinstance(value, dict) and "name" in value:
            return value
        problems.append(f"{display_text(name)} is not the metadata of a kernel")
    return None


def _read_jsons(tree: Tree, folder: str, problems: list[str], *, groups: bool) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of a kernel's JSON files, or of its groups' files; an unreadable file is a problem."""
    for name in tree.names(folder):
        if name.endswith(".json") and name.startswith(_GROUP) is groups:
            try:
                value = read_json(tree, join(folder, name))
            except (CacheError, OSError) as error:
                problems.append(f"{display_text(name)} could not be read: {error}")
            else:
                yield name, value


def _target(metadata: dict[str, Json] | None) -> str | None:
    """Return the target of a kernel, such as "cuda:90" or "hip:gfx942"."""
    target = None if metadata is None else metadata.get("target")
    if isinstance(target, list):  # written by older versions
        backend, architecture, *_ = [*target, None, None]
    elif isinstance(target, dict):
        backend, architecture = target.get("backend"), target.get("arch")
    else:
        return None
    is_valid = isinstance(backend, str) and type(architecture) in (str, int)
    return f"{backend}:{architecture}"[:80] if is_valid else None


def _check_group(tree: Tree, folder: str, name: str, value: Any, problems: list[str]) -> None:
    children = value.get("child_paths") if isinstance(value, dict) else None
    if not isinstance(children, dict) or not all(isinstance(path, str) for path in children.values()):
        problems.append(f"{display_text(name)} is not a group of files")
        return
    names = set(tree.names(folder))
    problems += [
        f"{display_text(name)} names {display_text(child)}, which is missing"
        for child in children
        if child not in names
    ]
    elsewhere = {path.rpartition("/")[0] for path in children.values()} - {str(tree.top / folder)}
    if elsewhere:
        problems.append(
            f"{display_text(name)} was moved and still names files under {display_text(min(elsewhere))}: Triton opens "
            "those or compiles again"
        )


def detect_file(path: Path) -> str | None:
    """Return "mega_cache" or "compiled_artifact" if a file starts like one, else None."""
    try:
        with open_regular(path, follow=True) as stream:
            return sniff(stream.read(_HEAD_BYTES))
    except (CacheError, OSError):
        return None


def read_file(path: Path) -> ForeignCache:
    """Read a mega-cache or a single compiled artifact."""
    tree = Tree(path)
    system = detect_file(path) or "mega_cache"
    read = _compiled_artifact if system == "compiled_artifact" else _mega_cache
    entries = [read(tree, file) for file in tree.files.values()]
    if not entries:
        tree.warnings.append(f"{display_text(path)} was removed or is not a regular file.")
    deletion = "The file may be removed; a program that loads it by name will not find it."
    return ForeignCache.of(system, tree, entries, deletion=deletion)


def _mega_cache(tree: Tree, file: File) -> ForeignEntry:
    problems: tuple[str, ...] = ()
    members: tuple[Member, ...] = ()
    try:
        with tree.open(file.path) as stream:
            structure = read_structure(stream)
    except CacheError as error:
        problems = (str(error),)
    else:
        members = structure.members
        if not structure.checked:
            problems = ("its checksum was not compared because the file is too large",)
    artifacts = [
        ForeignArtifact(
            path=f"{member.kind}/{member.key}",
            what="member",
            size_bytes=member.size_bytes,
            holds_pickle=member.protocol is not None,
            members=() if member.protocol is None else (f"pickle protocol {member.protocol}",),
            problems=() if member.size_bytes else ("it is empty",),
        )
        for member in members
    ]
    return ForeignEntry.of(tree.top.name, "mega_cache", tree, artifacts, files=[file], problems=problems)


def _compiled_artifact(tree: Tree, file: File) -> ForeignEntry:
    artifact, torch_key = binary_artifact(tree, file)
    artifact = replace(artifact, path=tree.top.name)
    factors = None if torch_key is None else {"torch_key": torch_key}
    return ForeignEntry.of(tree.top.name, "artifact", tree, [artifact], files=[file], factors=factors)
