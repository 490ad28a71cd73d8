"""Inductor through `standalone_compile`: one self-contained artifact per piece, of kind "aot".

The bytes are what torch's `CompiledArtifact.save(format="binary")` writes: a header, torch's own key, and a pickle of
torch's that holds generated source. Opening them needs the exact torch that wrote them. On a machine that has not seen
them before, torch builds the C++ kernels in them with the host's compiler, in its own cache folder; a graph is neither
traced nor compiled.
"""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cgtool.compiler import _torch
from cgtool.compiler.adaptors.interface import CompiledPiece, CompilerInterface, PieceCallable
from cgtool.compiler.compiler_hash import inductor_hash
from cgtool.compiler.fx_piece import rebuild
from cgtool.compiler.options import inductor_patches
from cgtool.errors import ArtifactError, CgtoolError, CompileError
from cgtool.graph.constants import constants_of
from cgtool.plan.pieces import Json, PieceGraph


class InductorStandaloneAdaptor(CompilerInterface):
    """Compiles pieces with `torch._inductor.standalone_compile`."""

    name = "inductor_standalone"

    def compute_hash(self, options: Mapping[str, Json], *, max_autotune: bool = False) -> str:
        """Return the digest of torch, compiler, target and options."""
        return inductor_hash(self.name, inductor_patches(options, max_autotune=max_autotune))

    def compile(self, graph: PieceGraph, *, options: Mapping[str, Json], max_autotune: bool = False) -> CompiledPiece:
        """Compile a piece into one artifact."""
        patches = inductor_patches(options, max_autotune=max_autotune)
        start = time.perf_counter()
        before = _torch.num_generated_kernels()
        with _torch.compiling(fresh_tag()):
            piece = rebuild(graph)
            try:
                compiled = _torch.standalone(piece.module, piece.inputs, patches)
                _torch.forget_origin(compiled)
                artifact = _saved(compiled)
            except CgtoolError:
                raise
            except Exception as error:  # a compiler fails in any way it likes: what follows names it
                raise compile_error(error) from error
            guards = piece.new_guards(graph)
        return CompiledPiece(
            artifact=artifact,
            kernels=_torch.num_generated_kernels() - before,
            compile_secs=time.perf_counter() - start,
            guards=guards,
        )

    def load(self, data: bytes, graph: PieceGraph) -> PieceCallable:
        """Return the callable that an artifact holds."""
        with tempfile.TemporaryDirectory(prefix="cgtool-load-") as folder, torch.no_grad():
            # torch opens a path: a private copy of the bytes whose digest was checked
            path = Path(folder) / "artifact"
            path.write_bytes(data)
            try:
                ours = _torch.has_torch_key(data)
                run = _torch.load_standalone(str(path)) if ours else None
            except Exception as error:  # a pickle of torch's fails in any way it likes
                raise load_error(error) from error
        if run is None:
            raise ArtifactError(
                f"This artifact was compiled by another build of torch than this {torch.__version__}. Warm again with "
                "this one.",
                actual=torch.__version__,
            )
        return as_list(run, graph)


def _saved(artifact: Any) -> bytes:
    with tempfile.TemporaryDirectory(prefix="cgtool-save-") as folder:
        path = Path(folder) / "artifact"
        artifact.save(path=str(path), format="binary")
        data = path.read_bytes()
    if not data:
        raise CompileError("Inductor saved an artifact without bytes; the piece can run eagerly (adaptor 'eager')")
    return data


def fresh_tag() -> str:
    """Return a word that no other compile has.

    A hit in torch's caches would come without the guards that its compile added, and their keys do not know what a
    custom op's fake implementation says.
    """
    return f"cgtool-{uuid.uuid4().hex}"


def compile_error(error: BaseException) -> CompileError:
    """Return the sentence for a failure inside a compiler."""
    reason = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, _torch.bypass_errors()) or "serialize" in reason[0]:
        return CompileError(
            f"Inductor compiled the piece and cannot save it: {' '.join(line.strip() for line in reason[:3])}; the "
            f"piece can run eagerly (adaptor 'eager')",
            actual=reason[0],
        )
    if "C++ compile error" in reason[0]:
        said = _compiler_said(reason)
        return CompileError(
            f"the C++ compiler failed on what Inductor wrote for the piece: {said}; the piece can run eagerly (adaptor "
            f"'eager')",
            actual=said,
        )
    return CompileError(
        f"Inductor could not compile the piece: {type(error).__name__}: {reason[0]}; the piece can run eagerly "
        f"(adaptor 'eager')",
        actual=reason[0],
    )


def _compiler_said(lines: list[str]) -> str:
    """Return the line of a C++ compiler's output that says why it failed."""
    start = next((n for n, line in enumerate(lines) if line.strip() == "Output:"), 0)
    output = [line.strip() for line in lines[start + 1 :] if line.strip()]
    return next((line for line in output if "error" in line.lower()), output[0] if output else "it said nothing")


def load_error(error: BaseException) -> ArtifactError:
    """Return the sentence for a failure inside a loader."""
    reason = (str(error).strip().splitlines() or [""])[0]
    if type(error).__name__ == "InvalidCxxCompiler":  # torch gave it several homes
        return ArtifactError(
            "Torch builds the C++ of this artifact as it is opened, and no C++ compiler works here. Install one, or "
            "warm the model with the adaptor 'aot_inductor', whose packages need none.",
            actual=reason,
        )
    return ArtifactError(
        f"Torch could not open the artifact: {type(error).__name__}: {reason}. Warm again with what is here now.",
        actual=reason,
    )


def as_list(run: Any, graph: PieceGraph) -> PieceCallable:
    """Return `run` as a function that empties a list of inputs and returns a list of exactly the piece's outputs."""
    num_outputs = len(graph.outputs)
    constants = tuple(constants_of(graph))

    def call(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        args = (*inputs, *constants)
        inputs.clear()
        return list(run(*args))[:num_outputs]

    return call
