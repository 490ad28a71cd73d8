"""AOTInductor: one package of native code per piece, of kind "pt2", which torch's C++ loader opens without Inductor.

Packages are built in one folder per piece whose name follows from the piece and its options alone, wiped before: paths
enter native code, and so equal pieces give equal bytes. The sources stay out of the package.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from cgtool.compiler import _torch
from cgtool.compiler.adaptors.inductor_standalone import compile_error, fresh_tag
from cgtool.compiler.adaptors.interface import CompiledPiece, CompilerInterface, PieceCallable
from cgtool.compiler.compiler_hash import inductor_hash
from cgtool.compiler.fx_piece import rebuild
from cgtool.compiler.options import inductor_patches
from cgtool.compiler.outputs import hold_back_views
from cgtool.config import AOT_INDUCTOR
from cgtool.errors import CacheError, CgtoolError, CompileError
from cgtool.plan.grammar import digest_of
from cgtool.plan.pieces import Json, PieceGraph
from cgtool.runtime.aoti_package import OUTPUTS, open_package
from cgtool.store.artifacts import Package, pack
from cgtool.store.lock import FileLock

_KERNELS = (".cubin", ".fatbin", ".hsaco", ".spv")
_NATIVE = ".wrapper.so"
_SOURCES = frozenset({".cpp", ".cu", ".h", ".py"})
#: How torch calls kinds of arguments of custom ops.
_FLOATS = frozenset({"as_float", "as_floats"})
_LISTS_LOST_EMPTY = frozenset({"as_ints", "as_sym_ints", "as_tensors", "as_optional_tensors"})


class AotInductorAdaptor(CompilerInterface):
    """Compiles pieces with AOTInductor."""

    name = AOT_INDUCTOR

    def compute_hash(self, options: Mapping[str, Json], *, max_autotune: bool = False) -> str:
        """Return the digest of torch, compiler, target and options."""
        return inductor_hash(self.name, inductor_patches(options, max_autotune=max_autotune, packaged=True))

    def compile(self, graph: PieceGraph, *, options: Mapping[str, Json], max_autotune: bool = False) -> CompiledPiece:
        """Compile a piece into one package."""
        patches = inductor_patches(options, max_autotune=max_autotune, packaged=True)
        start = time.perf_counter()
        before = _torch.num_generated_kernels()
        with _torch.compiling(fresh_tag()), _build_folder(digest_of([graph.identity(), patches])) as folder:
            piece = rebuild(graph)
            outputs = hold_back_views(piece, graph)
            try:
                files = _torch.compile_aot(piece.module, piece.inputs, patches, folder=str(folder))
                embedded = bool(patches.get("aot_inductor.embed_kernel_binary"))
                package = _package(files, embedded=embedded, outputs=outputs)
            except CgtoolError:
                raise
            except Exception as error:  # a compiler fails in any way it likes: what follows names it
                raise compile_error(error) from error
            guards = piece.new_guards(graph)
            sources = _sources(folder)
        return CompiledPiece(
            artifact=pack(package),
            kernels=_torch.num_generated_kernels() - before,
            compile_secs=time.perf_counter() - start,
            guards=guards,
            sources=sources,
        )

    def load(self, data: bytes, graph: PieceGraph) -> PieceCallable:
        """Return the callable that a package holds."""
        return open_package(data, graph)


def _package(files: list[str], *, embedded: bool, outputs: list[Json] | None) -> Package:
    """Return what torch wrote as a package, without sources."""
    paths = [Path(file) for file in files]
    native = [path for path in paths if path.name.endswith(_NATIVE)]
    if len(native) != 1:
        raise CompileError(
            "AOTInductor wrote no native code for the piece; the piece can run eagerly (adaptor 'eager')",
            actual=[path.name for path in paths],
        )
    stem = native[0].name.removesuffix(".so")
    # torch does not list it in every version
    extern = native[0].with_name(stem + ".json")
    if extern.exists():
        _check_extern(json.loads(extern.read_bytes()))
    metadata = json.loads(native[0].with_name(stem + "_metadata.json").read_bytes())
    return Package(
        native=native[0].read_bytes(),
        metadata=metadata if outputs is None else {**metadata, OUTPUTS: json.dumps(outputs)},
        extern=extern.read_bytes() if extern.exists() else None,
        kernels={} if embedded else {path.name: path.read_bytes() for path in paths if path.suffix in _KERNELS},
    )


def _sources(folder: Path) -> dict[str, str]:
    """Return what torch wrote before it compiled, without the digests in the names of the files."""
    found: dict[str, str] = {}
    for path in sorted(path for path in folder.rglob("*") if path.suffix in _SOURCES):
        _, _, plain = path.name.partition(".")  # c<digest>.wrapper.cpp
        count = sum(name.endswith(plain) for name in found)
        found[f"{count}.{plain}" if count else plain] = path.read_text(encoding="utf-8", errors="replace")
    return found


def _check_extern(calls: Json) -> None:
    """Refuse calls of custom ops that torch writes and does not read back as they were.

    Infinite and undefined numbers become text, and a list without numbers or tensors comes back as None.
    """
    for call in (entry["node"] for entry in calls["nodes"]):
        for given in call["inputs"]:
            for kind, value in given["arg"].items():
                numbers = value if isinstance(value, list) else [value]
                lost = kind in _LISTS_LOST_EMPTY and not numbers
                if lost or (kind in _FLOATS and any(isinstance(number, str) for number in numbers)):
                    raise CompileError(
                        f"AOTInductor cannot say {value} for the argument {given['name']} of {call['target']}; the "
                        f"piece can run eagerly (adaptor 'eager')",
                        path=call["target"],
                        actual=value,
                    )


@contextlib.contextmanager
def _build_folder(name: str) -> Iterator[Path]:
    """Yield an empty folder of this name that no other process builds in meanwhile; it is removed afterwards."""
    parent = Path(tempfile.gettempdir()) / f"cgtool-{os.getuid()}"
    parent.mkdir(mode=0o700, exist_ok=True)
    found = parent.lstat()
    if found.st_uid != os.getuid() or parent.is_symlink() or found.st_mode & 0o022:
        msg = f"{parent} belongs to another user or others may write to it. Remove it, or set TMPDIR to another folder."
        raise CacheError(msg, path=parent)
    folder = parent / name[:32]
    with FileLock(parent / f"{name[:32]}.lock"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
