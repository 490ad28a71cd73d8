"""The base class of Inductor's adaptors, and the two adaptors whose artifacts Inductor itself opens.

`inductor_standalone` compiles through `standalone_compile`. An artifact of kind "aot" is written by torch's
`CompiledArtifact.save(format="binary")`: a header, torch's own key, and a pickle with generated source.

`inductor` compiles through `compile_fx` and saves the new content of torch's caches. An artifact of kind "mega" is::

    8 bytes     length of the head, big endian
    head        canonical JSON {"schema": 1, "torch": version, "tag": str, "options": {...}}
    rest        empty for a piece without ops, else the result of `torch.compiler.save_cache_artifacts` (pickles)

A load puts these bytes into torch's caches and requests the piece from `compile_fx`. It must be a cache hit, under a
tag that no other compile uses, so neither a new compile nor another result can take its place. The pickles contain
torch's repro script, which names the TORCH* variables of the compiling machine; `inductor_standalone` removes it.

Both kinds need the exact torch that wrote them. At the first load on a machine, torch builds their C++ kernels with the
host's compiler in its own cache folder; no graph is traced or compiled.
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
    """Base class of Inductor's adaptors: options, digest, rebuilt pieces, guards and error messages.

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
        # a hit in torch's caches would lack the guards that the compile added, and its keys ignore the fake
        # implementations of custom ops: so every compile gets its own tag
        tag = f"cgtool-{uuid.uuid4().hex}"
        before = _torch.num_generated_kernels()
        # Inductor's code names the device: always use the first
        first = torch.accelerator.device_index(0 if torch.accelerator.is_available() else None)
        with first, _torch.compiling(tag), _torch.checks_that_raise(), warnings.catch_warnings():
            # even if Python turns warnings into errors, a warning of Inductor must not reject the piece
            warnings.simplefilter("ignore")
            piece = rebuild(graph)
            try:
                artifact, sources = self._build(piece, graph, patches, tag)
            except CgtoolError:
                raise
            except Exception as error:  # compilers raise anything
                raise _compile_error(error) from error
            guards = piece.new_guards(graph)
        return CompiledPiece(
            artifact=artifact, kernels=_torch.num_generated_kernels() - before, guards=guards, sources=sources
        )

    @abstractmethod
    def _build(
        self, piece: RebuiltPiece, graph: PieceGraph, patches: Mapping[str, Json], tag: str
    ) -> tuple[bytes, Mapping[str, str]]:
        """Compile a piece; return its artifact and the generated sources that the artifact does not contain."""


class InductorStandaloneAdaptor(InductorBase):
    """Compiles pieces with `torch._inductor.standalone_compile`."""

    name = "inductor_standalone"

    def _build(
        self,
        piece: RebuiltPiece,
        graph: PieceGraph,  # noqa: ARG002 - the rebuilt piece is enough
        patches: Mapping[str, Json],
        tag: str,  # noqa: ARG002 - artifacts are not found by tag
    ) -> tuple[bytes, Mapping[str, str]]:
        compiled = _torch.standalone(piece.module, piece.inputs, patches)
        _torch.forget_origin(compiled)
        with tempfile.TemporaryDirectory(prefix="cgtool-save-") as folder:
            path = Path(folder) / "artifact"
            compiled.save(path=str(path), format="binary")
            data = path.read_bytes()
        if not data:
            raise CompileError("Inductor saved an empty artifact; the piece can run eagerly (adaptor 'eager')")
        return data, {}

    def load(self, data: bytes, graph: PieceGraph) -> PieceCallable:
        """Open an artifact."""
        with tempfile.TemporaryDirectory(prefix="cgtool-load-") as folder, torch.no_grad():
            # torch opens a path: give it a private copy of the verified bytes
            path = Path(folder) / "artifact"
            path.write_bytes(data)
            try:
                run = _torch.load_standalone(str(path)) if _torch.has_torch_key(data) else None
            except Exception as error:  # unpickling may raise anything
                raise _load_error(error) from error
        if run is None:
            raise ArtifactError(
                f"This artifact was compiled by another build of torch, and this is torch {torch.__version__}. Warm "
                "again with this build.",
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
            raise CompileError("Inductor compiled the piece but saved nothing; the piece can run eagerly")
        head = canonical_json({"schema": _SCHEMA, "torch": torch.__version__, "tag": tag, "options": patches})
        return len(head).to_bytes(_LENGTH_BYTES, "big") + head + (saved or b""), {}

    def load(self, data: bytes, graph: PieceGraph) -> PieceCallable:
        """Put an artifact into torch's caches, and return the callable from there."""
        head, saved = _parse(data)
        if not saved:  # a piece without ops
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
            except Exception as error:  # unpickling may raise anything
                raise _load_error(error) from error
        return _as_list(run, graph)


def _parse(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the head and the rest of an artifact of kind "mega"."""
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "big")
    try:
        head = json.loads(data[_LENGTH_BYTES:end])
        schema, version, _, _ = head["schema"], head["torch"], head["tag"], head["options"]
    except (ValueError, KeyError, TypeError) as error:
        msg = "An artifact of the adaptor 'inductor' is damaged. Warm again."
        raise ArtifactError(msg, actual=str(error)) from error
    if schema != _SCHEMA or version != torch.__version__:
        raise ArtifactError(
            f"This artifact was compiled by torch {version}, but this is torch {torch.__version__}. Warm again.",
            expected=version,
            actual=torch.__version__,
        )
    return head, data[end:]


def _refuse_to_compile(*_args: Any, **_kwargs: Any) -> Any:
    raise ArtifactError("Torch's caches do not find the piece of this artifact, and a load never compiles. Warm again.")


def _as_list(run: Any, graph: PieceGraph) -> PieceCallable:
    """Return `run` as a function that empties its list of inputs and returns the list of the piece's outputs."""
    num_outputs = len(graph.outputs)
    constants = tuple(constants_of(graph))

    def call(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        args = (*inputs, *constants)
        inputs.clear()
        return list(run(*args))[:num_outputs]

    return call


def _compile_error(error: BaseException) -> CompileError:
    """Describe a failure inside a compiler."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    reason = lines[0]
    if isinstance(error, _torch.bypass_errors()) or "serialize" in reason:
        message = f"Inductor compiled the piece but cannot save it: {' '.join(line.strip() for line in lines[:3])}"
    elif "C++ compile error" in reason:
        start = next((n for n, line in enumerate(lines) if line.strip() == "Output:"), 0)
        output = [line.strip() for line in lines[start + 1 :] if line.strip()] or ["no output"]
        reason = next((line for line in output if "error" in line.lower()), output[0])
        message = f"the C++ compiler failed on Inductor's code for the piece: {reason}"
    else:
        message = f"Inductor could not compile the piece: {type(error).__name__}: {reason}"
    message += "; the piece can run eagerly (adaptor 'eager')"
    return CompileError(message, path=op_named_by(error), actual=reason)


def _load_error(error: BaseException) -> ArtifactError:
    """Describe a failure inside a loader."""
    reason = first_line(error)
    if type(error).__name__ == "InvalidCxxCompiler":  # its module differs between versions of torch
        return ArtifactError(
            "Torch builds the C++ code of this artifact when it opens it, and no C++ compiler works here. Install one, "
            "or warm the model with the adaptor 'aot_inductor', whose packages need none.",
            actual=reason,
        )
    return ArtifactError(
        f"Torch could not open the artifact: {type(error).__name__}: {reason}. Warm again.", actual=reason
    )
