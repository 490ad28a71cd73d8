"""The adaptor that compiles nothing: a piece runs op by op, as Python generated from its graph.

The artifact is the graph's canonical JSON, of kind "json". Must not import Dynamo or Inductor.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cgtool.compiler.adaptors.interface import CompiledPiece, CompilerInterface, PieceCallable
from cgtool.errors import ArtifactError
from cgtool.plan.grammar import decode, digest_of
from cgtool.plan.pieces import EAGER, Json, PieceGraph
from cgtool.runtime.op_by_op import checked_function


class EagerAdaptor(CompilerInterface):
    """Runs pieces with torch alone."""

    name = EAGER
    compiles = False

    def compute_hash(
        self,
        options: Mapping[str, Json],  # noqa: ARG002 - they are Inductor's
        *,
        max_autotune: bool = False,  # noqa: ARG002 - nothing is tuned
    ) -> str:
        """Return a digest of torch's version; no option changes eager ops."""
        return digest_of({"adaptor": self.name, "torch": torch.__version__})

    def compile(
        self,
        graph: PieceGraph,
        *,
        options: Mapping[str, Json],  # noqa: ARG002 - they are Inductor's
        max_autotune: bool = False,  # noqa: ARG002 - nothing is tuned
    ) -> CompiledPiece:
        """Serialize the graph, after checking that a function can be generated from it."""
        checked_function(graph)
        return CompiledPiece(artifact=graph.canonical())

    def load(self, data: bytes, graph: PieceGraph) -> PieceCallable:
        """Return the piece as a generated Python function."""
        return checked_function(eager_graph(data, graph))


def eager_graph(data: bytes, graph: PieceGraph) -> PieceGraph:
    """Return the graph in an eager artifact, which must equal `graph`.

    Raises:
        ArtifactError: The artifact is damaged, or is that of a different piece.
    """
    try:
        found = decode(data, PieceGraph)
    except ValueError as error:
        raise ArtifactError(f"An eager artifact is damaged: {error}. Warm again.", actual=str(error)) from error
    if found != graph:
        raise ArtifactError(
            "An eager artifact holds a different piece from the one in its manifest. Warm again.",
            expected=graph.identity(),
            actual=found.identity(),
        )
    return found
