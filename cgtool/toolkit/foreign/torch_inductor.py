"""Reading torch's own compile cache, the folder that TORCHINDUCTOR_CACHE_DIR names. Must not import torch.

    /tmp/torchinductor_<user>/
      fxgraph/<key[1:3]>/<key>/<digest>      compiled graphs, pickle; the digests are of one key under several guards
      aotautograd/<key>/<digest>             the same around them, pickle
      <two letters>/c<...>.py .cpp .so .h .main.cpp .main.so .kernel.so .best_config ...    generated code
      precompiled_headers/                   large, and made again
      triton/<device>/<hash>/                Triton's cache, see cgtool.toolkit.foreign.triton
      locks/                                 empty files

A graph's file names the code that it needs and writes it anew where it is missing. Keys are "f" or "a" and 51 letters
of base32.

Source: torch/_inductor/codecache.py and torch/_functorch/_aot_autograd/autograd_cache.py of torch 2.13.
"""

from __future__ import annotations

import re
from pathlib import Path

from cgtool.toolkit.foreign.entries import made_entry, pickle_artifact, plain_artifact
from cgtool.toolkit.foreign.records import ForeignArtifact, ForeignCache, ForeignEntry
from cgtool.toolkit.foreign.tree import File, Tree, join, size_of
from cgtool.toolkit.foreign.triton import kernel_entry, versions_of

FX_FOLDER = "fxgraph"
AOT_FOLDER = "aotautograd"
TRITON_FOLDER = "triton"
_CODE_FOLDER = re.compile(r"[a-z2-7]{2}")
_CODE_FILE = re.compile(r"c[a-z2-7]{51}\..+|[a-z2-7]{51,52}\..+")
_KINDS = {".so": "native_code", ".o": "native_code", ".py": "generated_code", ".cpp": "generated_code"}
_HEADERS = (".h", ".gch", ".pch", ".hpp", ".pch.d")
_SHARED_CODE = (
    "compiled graphs share it, and a process that runs may be about to open it; the whole cache may be removed when "
    "no process uses it"
)


def is_torch_inductor(path: Path) -> bool:
    """Return whether torch keeps its compile cache in a folder."""
    try:
        names = {child.name: child for child in path.iterdir()}
        if any(names[name].is_dir() for name in (FX_FOLDER, AOT_FOLDER) if name in names):
            return True
        return any(
            _CODE_FILE.fullmatch(file.name)
            for name, child in names.items()
            if _CODE_FOLDER.fullmatch(name) and child.is_dir() and not child.is_symlink()
            for file in child.iterdir()
        )
    except OSError:
        return False


def read_torch_inductor(path: Path) -> ForeignCache:
    """Return what torch's compile cache holds.

    Args:
        path: The folder that TORCHINDUCTOR_CACHE_DIR names.
    """
    warnings: list[str] = []
    tree = Tree(path, warnings)
    graphs = [*_graphs(tree), *_autograd_graphs(tree)]
    kernels = _kernels(tree)
    entries = [*graphs, *kernels, *_code(tree)]
    rest = _rest(tree, {entry.path.relative_to(path).as_posix() for entry in (*graphs, *kernels)})
    if rest:
        why = "it belongs to no one graph; the whole cache may be removed when no process uses it"
        entries.append(made_entry("other files", "other", path, rest, (), deletable=False, why_not=why))
    return ForeignCache(
        system="torch_inductor",
        version=versions_of(kernels),
        root=path,
        entries=tuple(entries),
        size_bytes=size_of(tree.files.values()),
        warnings=tuple(warnings),
        deletion=(
            "The folder of a compiled graph, of an AOTAutograd graph or of a Triton kernel may be removed: torch "
            "compiles it again. Generated code is shared: remove it only with the whole folder, when no process uses "
            "it."
        ),
    )


def _graphs(tree: Tree) -> list[ForeignEntry]:
    return [
        _graph(tree, join(join(FX_FOLDER, group), key), key, "graph", "compiled_graph")
        for group in tree.folders(FX_FOLDER)
        for key in tree.folders(join(FX_FOLDER, group))
        if not key.startswith(".")  # being written or removed
    ]


def _autograd_graphs(tree: Tree) -> list[ForeignEntry]:
    return [
        _graph(tree, join(AOT_FOLDER, key), key, "autograd_graph", "autograd_graph")
        for key in tree.folders(AOT_FOLDER)
        if not key.startswith(".")
    ]


def _graph(tree: Tree, folder: str, key: str, kind: str, what: str) -> ForeignEntry:
    files = tree.under(folder)
    artifacts = [pickle_artifact(tree, file, what, top=folder) for file in files if not _is_temporary(file)]
    problems = () if artifacts else ("it holds no graph",)
    return made_entry(key, kind, tree.top / folder, files, artifacts, problems=problems)


def _kernels(tree: Tree) -> list[ForeignEntry]:
    return [
        kernel_entry(tree, join(join(TRITON_FOLDER, device), group), name=f"{TRITON_FOLDER}/{device}/{group}")
        for device in tree.folders(TRITON_FOLDER)
        for group in tree.folders(join(TRITON_FOLDER, device))
        if not group.startswith(".")
    ]


def _code(tree: Tree) -> list[ForeignEntry]:
    """The generated code as one entry, if there is any."""
    code = [file for folder in tree.folders() if _CODE_FOLDER.fullmatch(folder) for file in tree.under(folder)]
    artifacts = [_code_artifact(tree, file) for file in code if not _is_temporary(file)]
    entry = made_entry(
        "generated code", "generated_code", tree.top, code, artifacts, deletable=False, why_not=_SHARED_CODE
    )
    return [entry] if code else []


def _rest(tree: Tree, claimed: set[str]) -> list[File]:
    """The files that are neither generated code nor in one of the claimed folders, which lie two or three deep."""
    rest = []
    for path, file in tree.files.items():
        parts = path.split("/")
        is_code = len(parts) > 1 and _CODE_FOLDER.fullmatch(parts[0])
        if not is_code and not any("/".join(parts[:depth]) in claimed for depth in (2, 3)):
            rest.append(file)
    return rest


def _code_artifact(tree: Tree, file: File) -> ForeignArtifact:
    what = "header" if file.name.endswith(_HEADERS) else _KINDS.get(Path(file.name).suffix, "data")
    return plain_artifact(tree, file, what)


def _is_temporary(file: File) -> bool:
    return file.name.startswith(".") or file.name.endswith((".tmp", ".lock"))
