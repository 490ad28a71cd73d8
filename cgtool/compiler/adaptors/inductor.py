"""Inductor through `compile_fx`, saved as a mega-cache: what torch's caches gained by compiling the piece.

An artifact of kind "mega" is::

    8 bytes     length of the head, big endian
    head        canonical JSON {"schema": 1, "torch": version, "tag": str, "options": {...}}
    rest        nothing for a piece without ops, else what `torch.compiler.save_cache_artifacts` gave (pickles of torch)

Opening puts those bytes into torch's caches and asks `compile_fx` for the piece: the hit is required, under a tag that
no other compile has, so that neither a compile nor a result from elsewhere can take its place. The pickles hold torch's
repro script, which names the TORCH* variables of the machine that compiled: `inductor_standalone` leaves it out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import torch

from cgtool.compiler import _torch
from cgtool.compiler.adaptors.inductor_standalone import as_list, compile_error, fresh_tag, load_error
from cgtool.compiler.adaptors.interface import CompiledPiece, CompilerInterface, PieceCallable
from cgtool.compiler.compiler_hash import inductor_hash
from cgtool.compiler.fx_piece import rebuild
from cgtool.compiler.options import inductor_patches
from cgtool.errors import ArtifactError, CgtoolError, CompileError
from cgtool.plan.grammar import canonical_json
from cgtool.plan.pieces import Json, PieceGraph
from cgtool.runtime.pieces import piece_function

SCHEMA = 1
_LENGTH_BYTES = 8


class InductorAdaptor(CompilerInterface):
    """Compiles pieces with `torch._inductor.compile_fx`."""

    name = "inductor"

    def compute_hash(self, options: Mapping[str, Json], *, max_autotune: bool = False) -> str:
        """Return the digest of torch, compiler, target and options."""
        return inductor_hash(self.name, inductor_patches(options, max_autotune=max_autotune))

    def compile(self, graph: PieceGraph, *, options: Mapping[str, Json], max_autotune: bool = False) -> CompiledPiece:
        """Compile a piece and keep what torch's caches gained."""
        patches = inductor_patches(options, max_autotune=max_autotune)
        tag = fresh_tag()
        start = time.perf_counter()
        before = _torch.num_generated_kernels()
        with _torch.compiling(tag):
            piece = rebuild(graph)
            try:
                _, saved = _torch.run_compile_fx(piece.module, piece.inputs, patches, piece.mode)
            except CgtoolError:
                raise
            except Exception as error:  # a compiler fails in any way it likes: what follows names it
                raise compile_error(error) from error
            guards = piece.new_guards(graph)
        if not saved and graph.nodes:
            raise CompileError("Inductor compiled the piece and saved nothing; the piece can run eagerly")
        head = canonical_json({"schema": SCHEMA, "torch": torch.__version__, "tag": tag, "options": patches})
        return CompiledPiece(
            artifact=len(head).to_bytes(_LENGTH_BYTES, "big") + head + (saved or b""),
            kernels=_torch.num_generated_kernels() - before,
            compile_secs=time.perf_counter() - start,
            guards=guards,
        )

    def load(self, data: bytes, graph: PieceGraph) -> PieceCallable:
        """Return the callable that torch's caches hold once they took the artifact's bytes."""
        head, saved = _split(data)
        if not saved:  # nothing to compile: a piece without ops
            return piece_function(graph)
        with _torch.compiling(head["tag"]):
            piece = rebuild(graph)
            try:
                run = _torch.load_compile_fx(
                    saved,
                    piece.module,
                    piece.inputs,
                    patches=head["options"],
                    mode=piece.mode,
                    refuse=_refuse_to_compile,
                )
            except CgtoolError:
                raise
            except Exception as error:  # a pickle of torch's fails in any way it likes
                raise load_error(error) from error
        return as_list(run, graph)


def _split(data: bytes) -> tuple[dict[str, Any], bytes]:
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "big")
    try:
        head = json.loads(data[_LENGTH_BYTES:end])
        schema, version, _, _ = head["schema"], head["torch"], head["tag"], head["options"]
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError("An artifact of the adaptor 'inductor' is torn. Warm again.", actual=str(error)) from error
    if schema != SCHEMA or version != torch.__version__:
        raise ArtifactError(
            f"This artifact was compiled by torch {version} and this is torch {torch.__version__}. Warm again with it.",
            expected=version,
            actual=torch.__version__,
        )
    return head, data[end:]


def _refuse_to_compile(*_args: Any, **_kwargs: Any) -> Any:
    raise ArtifactError(
        "Torch's caches do not find the piece that this artifact holds, and nothing compiles at load. Warm again."
    )
