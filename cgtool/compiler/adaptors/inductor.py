"""Inductor: what its adaptors share, and the two whose artifacts Inductor itself opens.

`inductor_standalone` compiles through `standalone_compile`. An artifact of kind "aot" is what torch's
`CompiledArtifact.save(format="binary")` writes: a header, torch's own key, and a pickle of torch's that holds generated
source.

`inductor` compiles through `compile_fx` and saves what torch's caches gained. An artifact of kind "mega" is::

    8 bytes     length of the head, big endian
    head        canonical JSON {"schema": 1, "torch": version, "tag": str, "options": {...}}
    rest        nothing for a piece without ops, else what `torch.compiler.save_cache_artifacts` gave (pickles of torch)

Opening puts those bytes into torch's caches and asks `compile_fx` for the piece: the hit is required, under a tag that
no other compile has, so that neither a compile nor a result from elsewhere can take its place. The pickles hold torch's
repro script, which names the TORCH* variables of the machine that compiled: `inductor_standalone` leaves it out.

Both need the exact torch that wrote them. On a machine that has not seen them before, torch builds the C++ kernels in
them with the host's compiler, in its own cache folder; a graph is neither traced nor compiled.
"""

from __future__ import annotations

import json
import tempfile
import uuid
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from cgtool.compiler.adaptors import _torch
from cgtool.compiler.adaptors.interface import CompiledPiece, CompilerInterface, PieceCallable
from cgtool.compiler.fitness import op_named_by
from cgtool.compiler.fx_piece import RebuiltPiece, rebuild
from cgtool.compiler.options import inductor_hash, inductor_patches
from cgtool.errors import ArtifactError, CgtoolError, CompileError, first_line
from cgtool.graph.values import constants_of
from cgtool.plan.grammar import canonical_json
from cgtool.plan.pieces import Json, PieceGraph
from cgtool.runtime.op_by_op import piece_function

_SCHEMA = 1
_LENGTH_BYTES = 8


class InductorBase(CompilerInterface):
    """What adaptors of Inductor share: options, digest, the rebuilt piece, guards, and errors as sentences.

    Attributes:
        packaged: Whether artifacts are packages of native code.
    """

    packaged = False
    rounding = MappingProxyType({"emulate_precision_casts": True})

    def compute_hash(self, options: Mapping[str, Json], *, max_autotune: bool = False) -> str:
        """Return the digest of torch, compiler, target and options."""
        return inductor_hash(self.name, inductor_patches(options, max_autotune=max_autotune, packaged=self.packaged))

    def compile(self, graph: PieceGraph, *, options: Mapping[str, Json], max_autotune: bool = False) -> CompiledPiece:
        """Compile a piece into one artifact."""
        patches = inductor_patches(options, max_autotune=max_autotune, packaged=self.packaged)
        # A hit in torch's caches would come without the guards that its compile added, and their keys do not know what
        # a custom op's fake implementation says: so no two compiles share a tag.
        tag = f"cgtool-{uuid.uuid4().hex}"
        before = _torch.num_generated_kernels()
        # code of Inductor's own names the device: always the first, which is all that a worker knows of
        first = torch.accelerator.device_index(0 if torch.accelerator.is_available() else None)
        with first, _torch.compiling(tag), _torch.checks_that_raise(), warnings.catch_warnings():
            # where Python makes errors of warnings, a warning of Inductor's is still no reason to turn a piece away
            warnings.simplefilter("ignore")
            piece = rebuild(graph)
            try:
                artifact, sources = self._build(piece, graph, patches, tag)
            except CgtoolError:
                raise
            except Exception as error:  # a compiler fails in any way it likes: what follows names it
                raise _compile_error(error) from error
            guards = piece.new_guards(graph)
        return CompiledPiece(
            artifact=artifact, kernels=_torch.num_generated_kernels() - before, guards=guards, sources=sources
        )

    @abstractmethod
    def _build(
        self, piece: RebuiltPiece, graph: PieceGraph, patches: Mapping[str, Json], tag: str
    ) -> tuple[bytes, Mapping[str, str]]:
        """Return the artifact of a piece, and what the compiler wrote beside it; torch is set up for a compile."""


class InductorStandaloneAdaptor(InductorBase):
    """Compiles pieces with `torch._inductor.standalone_compile`."""

    name = "inductor_standalone"

    def _build(
        self,
        piece: RebuiltPiece,
        graph: PieceGraph,  # noqa: ARG002 - the rebuilt piece says it all
        patches: Mapping[str, Json],
        tag: str,  # noqa: ARG002 - nothing is looked up by it
    ) -> tuple[bytes, Mapping[str, str]]:
        compiled = _torch.standalone(piece.module, piece.inputs, patches)
        _torch.forget_origin(compiled)
        with tempfile.TemporaryDirectory(prefix="cgtool-save-") as folder:
            path = Path(folder) / "artifact"
            compiled.save(path=str(path), format="binary")
            data = path.read_bytes()
        if not data:
            raise CompileError("Inductor saved an artifact without bytes; the piece can run eagerly (adaptor 'eager')")
        return data, {}

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
                raise _load_error(error) from error
        if run is None:
            raise ArtifactError(
                f"This artifact was compiled by another build of torch than this {torch.__version__}. Warm again with "
                "this one.",
                actual=torch.__version__,
            )
        return _as_list(run, graph)


class InductorAdaptor(InductorBase):
    """Compiles pieces with `torch._inductor.compile_fx`."""

    name = "inductor"

    def _build(
        self, piece: RebuiltPiece, graph: PieceGraph, patches: Mapping[str, Json], tag: str
    ) -> tuple[bytes, Mapping[str, str]]:
        _, saved = _torch.run_compile_fx(piece.module, piece.inputs, patches, piece.mode)
        if not saved and graph.nodes:
            raise CompileError("Inductor compiled the piece and saved nothing; the piece can run eagerly")
        head = canonical_json({"schema": _SCHEMA, "torch": torch.__version__, "tag": tag, "options": patches})
        return len(head).to_bytes(_LENGTH_BYTES, "big") + head + (saved or b""), {}

    def load(self, data: bytes, graph: PieceGraph) -> PieceCallable:
        """Return the callable that torch's caches hold once they took the artifact's bytes."""
        head, saved = _parted(data)
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
                raise _load_error(error) from error
        return _as_list(run, graph)


def _parted(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the head and the rest of an artifact of kind "mega"."""
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "big")
    try:
        head = json.loads(data[_LENGTH_BYTES:end])
        schema, version, _, _ = head["schema"], head["torch"], head["tag"], head["options"]
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError("An artifact of the adaptor 'inductor' is torn. Warm again.", actual=str(error)) from error
    if schema != _SCHEMA or version != torch.__version__:
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


def _as_list(run: Any, graph: PieceGraph) -> PieceCallable:
    """Return `run` as a function that empties a list of inputs and returns a list of exactly the piece's outputs."""
    num_outputs = len(graph.outputs)
    constants = tuple(constants_of(graph))

    def call(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        args = (*inputs, *constants)
        inputs.clear()
        return list(run(*args))[:num_outputs]

    return call


def _compile_error(error: BaseException) -> CompileError:
    """Return the sentence for a failure inside a compiler."""
    reason = str(error).strip().splitlines() or [type(error).__name__]
    said = reason[0]
    if isinstance(error, _torch.bypass_errors()) or "serialize" in said:
        words = f"Inductor compiled the piece and cannot save it: {' '.join(line.strip() for line in reason[:3])}"
    elif "C++ compile error" in said:
        start = next((n for n, line in enumerate(reason) if line.strip() == "Output:"), 0)
        output = [line.strip() for line in reason[start + 1 :] if line.strip()] or ["it said nothing"]
        said = next((line for line in output if "error" in line.lower()), output[0])
        words = f"the C++ compiler failed on what Inductor wrote for the piece: {said}"
    else:
        words = f"Inductor could not compile the piece: {type(error).__name__}: {said}"
    return CompileError(f"{words}; the piece can run eagerly (adaptor 'eager')", path=op_named_by(error), actual=said)


def _load_error(error: BaseException) -> ArtifactError:
    """Return the sentence for a failure inside a loader."""
    reason = first_line(error)
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
