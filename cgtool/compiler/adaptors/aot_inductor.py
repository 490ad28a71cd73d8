"""AOTInductor: one package of native code per piece, of kind "pt2", which torch's C++ loader opens without Inductor.

A package is built in an empty folder whose name depends only on the piece and its options. Paths enter native code, so
this makes the bytes of equal pieces equal. Packages do not contain the generated sources.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx

from cgtool.compiler._torch import symbol_of
from cgtool.compiler.adaptors import _torch
from cgtool.compiler.adaptors.inductor import InductorBase
from cgtool.compiler.adaptors.interface import PieceCallable
from cgtool.compiler.fx_piece import RebuiltPiece
from cgtool.errors import CacheError, CompileError, SplitError
from cgtool.graph._torch import share_storage
from cgtool.graph.sympy_text import expression_text
from cgtool.graph.values import dtype_text
from cgtool.plan.grammar import digest_of
from cgtool.plan.pieces import AOT_INDUCTOR, Dim, Json, PieceGraph
from cgtool.runtime.aoti_package import OUTPUTS, WRITTEN, open_package
from cgtool.store.artifacts import Package, pack
from cgtool.store.lock import file_lock

_KERNELS = (".cubin", ".fatbin", ".hsaco", ".spv")
_NATIVE = ".wrapper.so"
_SOURCES = frozenset({".cpp", ".cu", ".h", ".py"})
#: torch's names for kinds of arguments of custom ops.
_FLOATS = frozenset({"as_float", "as_floats"})
_LISTS_LOST_EMPTY = frozenset({"as_ints", "as_sym_ints", "as_tensors", "as_optional_tensors"})


class AotInductorAdaptor(InductorBase):
    """Compiles pieces with AOTInductor."""

    name = AOT_INDUCTOR
    packaged = True

    def _build(
        self,
        piece: RebuiltPiece,
        graph: PieceGraph,
        patches: Mapping[str, Json],
        tag: str,  # noqa: ARG002 - packages are not found by tag
    ) -> tuple[bytes, Mapping[str, str]]:
        outputs = _hold_back_views(piece, graph)
        metadata = {WRITTEN: json.dumps(sorted(piece.written))}
        if outputs is not None:
            metadata[OUTPUTS] = json.dumps(outputs)
        with _build_folder(digest_of([graph.identity(), patches])) as folder:
            files = _torch.compile_aot(piece.module, piece.inputs, patches, folder=str(folder))
            embedded = bool(patches.get("aot_inductor.embed_kernel_binary"))
            return pack(_package(files, embedded=embedded, metadata=metadata)), _sources(folder)

    def load(self, data: bytes, graph: PieceGraph) -> PieceCallable:
        """Open a package."""
        return open_package(data, graph)


def _package(files: list[str], *, embedded: bool, metadata: dict[str, str]) -> Package:
    """Return the files that torch wrote as a package, without sources."""
    paths = [Path(file) for file in files]
    native = [path for path in paths if path.name.endswith(_NATIVE)]
    if len(native) != 1:
        raise CompileError(
            "AOTInductor wrote no native code for the piece; the piece can run eagerly (adaptor 'eager')",
            actual=[path.name for path in paths],
        )
    stem = native[0].name.removesuffix(".so")
    # not every version of torch lists it
    extern = native[0].with_name(stem + ".json")
    if extern.exists():
        _check_extern(json.loads(extern.read_bytes()))
    return Package(
        native=native[0].read_bytes(),
        metadata={**json.loads(native[0].with_name(stem + "_metadata.json").read_bytes()), **metadata},
        extern=extern.read_bytes() if extern.exists() else None,
        kernels={} if embedded else {path.name: path.read_bytes() for path in paths if path.suffix in _KERNELS},
    )


def _sources(folder: Path) -> dict[str, str]:
    """Return the generated sources by file name, without the digests in the names."""
    found: dict[str, str] = {}
    for path in sorted(path for path in folder.rglob("*") if path.suffix in _SOURCES):
        _, _, plain = path.name.partition(".")  # c<digest>.wrapper.cpp
        count = sum(name.endswith(plain) for name in found)
        found[f"{count}.{plain}" if count else plain] = path.read_text(encoding="utf-8", errors="replace")
    return found


def _check_extern(calls: Json) -> None:
    """Reject calls of custom ops whose arguments torch does not read back as it wrote them.

    Infinity and NaN become text, and an empty list of numbers or tensors becomes None.
    """
    for call in (entry["node"] for entry in calls["nodes"]):
        for given in call["inputs"]:
            for kind, value in given["arg"].items():
                numbers = value if isinstance(value, list) else [value]
                lost = kind in _LISTS_LOST_EMPTY and not numbers
                if lost or (kind in _FLOATS and any(isinstance(number, str) for number in numbers)):
                    raise CompileError(
                        f"AOTInductor cannot store {value} for the argument {given['name']} of {call['target']}; the "
                        f"piece can run eagerly (adaptor 'eager')",
                        path=call["target"],
                        actual=value,
                    )


@contextlib.contextmanager
def _build_folder(name: str) -> Iterator[Path]:
    """Yield an empty folder of this name, locked against other processes and removed afterwards."""
    parent = Path(tempfile.gettempdir()) / f"cgtool-{os.getuid()}"
    parent.mkdir(mode=0o700, exist_ok=True)
    found = parent.lstat()
    if found.st_uid != os.getuid() or parent.is_symlink() or found.st_mode & 0o022:
        msg = f"{parent} belongs to another user, or others can write to it. Remove it, or set TMPDIR elsewhere."
        raise CacheError(msg, path=parent)
    folder = parent / name[:32]
    with file_lock(parent / f"{name[:32]}.lock"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _hold_back_views(piece: RebuiltPiece, graph: PieceGraph) -> list[Json] | None:
    """Change `piece` to return each memory once, and return the recipe for its outputs; None if nothing changes.

    Native code preserves values but not aliasing: a view of an input is returned as a copy if the input was written to,
    or if the compiler has no such view. So an output that shares memory with an input or with another output is left
    out, and the package's metadata says how to derive it (see `cgtool.runtime.aoti_package`).
    """
    placeholders = piece.module.graph.find_nodes(op="placeholder")
    wanted: list[fx.Node] = list(piece.module.graph.output_node().args[0])[: len(graph.outputs)]  # type: ignore[arg-type]  # a tuple of nodes, as rebuilt
    roots = [_root(node) for node in wanted]
    shared = {root for n, root in enumerate(roots) if root.op == "placeholder" or root in roots[:n]}
    returned: list[fx.Node] = []
    recipe: list[Json] = []
    for node, root in zip(wanted, roots, strict=True):
        source = root if root in shared else node
        if source.op != "placeholder" and source not in returned:
            returned.append(source)
        if source in returned:
            kind, index = "native", returned.index(source)
        else:
            kind, index = "input", placeholders.index(source)
        recipe.append([kind, index, *_view(node, source, piece, graph)])
    if recipe == [["native", n] for n in range(len(graph.outputs))] and recipe:
        return None
    _set_outputs(piece, returned)
    return recipe


def _set_outputs(piece: RebuiltPiece, outputs: list[fx.Node]) -> None:
    graph = piece.module.graph
    end = graph.output_node()
    if not outputs:  # compilers need an output: add an empty tensor
        with graph.inserting_before(end):
            nothing = graph.call_function(torch.empty, ((0,),))
        with piece.mode:
            nothing.meta["val"] = nothing.meta["example_value"] = torch.empty((0,))
        outputs = [nothing]
    end.args = (tuple(outputs),)
    piece.module.recompile()


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("example_value")
    parts = value if isinstance(value, tuple | list) else [value]
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _root(node: fx.Node) -> fx.Node:
    """Return the base of `node`: the first tensor in the chain of views that it ends."""
    memory = node.meta["example_value"]
    root: fx.Node = node
    while True:
        sharing = [other for other in node.all_input_nodes if any(share_storage(memory, t) for t in _tensors(other))]
        if not sharing:
            return root
        node = sharing[0]
        if isinstance(node.meta["example_value"], torch.Tensor):
            root = node


def _view(node: fx.Node, source: fx.Node, piece: RebuiltPiece, graph: PieceGraph) -> list[Json]:
    """Return the sizes, strides, offset and dtype of `node` as a view of `source`; empty if they are the same."""
    seen, whole = node.meta["example_value"], source.meta["example_value"]
    if node is source or seen is whole:
        return []
    as_it_is = seen.is_conj() == whole.is_conj() and seen.is_neg() == whole.is_neg()
    if not as_it_is or whole.itemsize % seen.itemsize:
        raise CompileError(
            f"an output of the piece views memory of {whole.dtype} as {seen.dtype} in a way that a package cannot "
            f"express; the piece can run eagerly (adaptor 'eager')",
            expected=str(whole.dtype),
            actual=str(seen.dtype),
        )
    # the runtime reads a symbol from an input that has the bare symbol as a size
    names = {t: ours for t, ours in piece.names.items() if any(ours in meta.shape for meta in graph.inputs)}
    offset = _dim(seen.storage_offset() - whole.storage_offset() * (whole.itemsize // seen.itemsize), names)
    dtype = [] if seen.dtype == whole.dtype else [dtype_text(seen.dtype)]
    return [[_dim(dim, names) for dim in seen.shape], [_dim(step, names) for step in seen.stride()], offset, *dtype]


def _dim(size: Any, names: dict[str, str]) -> Dim:
    if not isinstance(size, torch.SymInt):
        return int(size)
    expr = symbol_of(size)
    if expr.is_number:
        return int(expr)
    try:
        return expression_text(expr, names)
    except SplitError as error:
        msg = f"an output of the piece is a view by {expr}, which a plan cannot express ({error}); it can run eagerly"
        raise CompileError(msg, actual=str(expr)) from error
