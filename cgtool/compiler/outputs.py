"""Which outputs of a piece native code gives, and which are views to be taken of what it was given or gave.

Native code keeps values, and not that two tensors are one memory: a view of an input comes back as a copy where the
input was written to, or where the compiler has no such view. So an output that shares memory with an input, or with
another output, is left out, and the package says how to take it again; the runtime's `views` owns that grammar.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from cgtool.compiler import _torch
from cgtool.compiler.fx_piece import RebuiltPiece
from cgtool.errors import CompileError, SplitError
from cgtool.graph._torch import share_storage
from cgtool.graph.sympy_text import expression_text
from cgtool.plan.pieces import Dim, Json, PieceGraph


def hold_back_views(piece: RebuiltPiece, graph: PieceGraph) -> list[Json] | None:
    """Change `piece` to give each memory once, and return how its outputs are made of that; None if as it gives them.

    Raises:
        CompileError: An output reads another's memory in a way that cannot be written down.
    """
    wanted = _output(piece)[: len(graph.outputs)]
    roots = [_root(node) for node in wanted]
    shared = {root for n, root in enumerate(roots) if root.op == "placeholder" or root in roots[:n]}
    given: list[fx.Node] = []
    recipe: list[Json] = []
    for node, root in zip(wanted, roots, strict=True):
        source = root if root in shared else node
        if source.op != "placeholder" and source not in given:
            given.append(source)
        kind, index = ("native", given.index(source)) if source in given else ("input", _position(piece, source))
        recipe.append([kind, index, *_view(node, source, piece, graph)])
    if recipe == [["native", n] for n in range(len(graph.outputs))] and recipe:
        return None
    _give(piece, given)
    return recipe


def _output(piece: RebuiltPiece) -> list[fx.Node]:
    return list(piece.module.graph.output_node().args[0])  # type: ignore[arg-type]  # a tuple of nodes, as rebuilt


def _position(piece: RebuiltPiece, node: fx.Node) -> int:
    return [other for other in piece.module.graph.nodes if other.op == "placeholder"].index(node)


def _give(piece: RebuiltPiece, given: list[fx.Node]) -> None:
    graph = piece.module.graph
    end = graph.output_node()
    if not given:  # compilers want one output: the smallest that there is
        with graph.inserting_before(end):
            nothing = graph.call_function(torch.empty, ((0,),))
        with piece.mode:
            nothing.meta["val"] = nothing.meta["example_value"] = torch.empty((0,))
        given = [nothing]
    end.args = (tuple(given),)
    piece.module.recompile()


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("example_value")
    parts = value if isinstance(value, tuple | list) else [value]
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _root(node: fx.Node) -> fx.Node:
    """Return the first tensor of the graph whose memory `node` shares, as views were taken one of another."""
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
    """Return sizes, strides and offset by which `source` shows `node`, or nothing where they are the same."""
    seen, whole = node.meta["example_value"], source.meta["example_value"]
    if node is source or seen is whole:
        return []
    if seen.dtype != whole.dtype or seen.is_conj() != whole.is_conj() or seen.is_neg() != whole.is_neg():
        raise CompileError(
            f"an output of the piece reads memory of {whole.dtype} as {seen.dtype}, which a package cannot say; the "
            f"piece can run eagerly (adaptor 'eager')",
            expected=str(whole.dtype),
            actual=str(seen.dtype),
        )
    names = {theirs: ours for theirs, ours in piece.names.items() if _is_shown(ours, graph)}
    offset = _dim(seen.storage_offset() - whole.storage_offset(), names)
    return [[_dim(dim, names) for dim in seen.shape], [_dim(step, names) for step in seen.stride()], offset]


def _is_shown(symbol: str, graph: PieceGraph) -> bool:
    """Return whether some input has `symbol` itself as a size, from which the runtime reads it."""
    return any(symbol in meta.shape for meta in graph.inputs)


def _dim(size: Any, names: dict[str, str]) -> Dim:
    if not isinstance(size, torch.SymInt):
        return int(size)
    expr = _torch.symbol_of(size)
    if expr.is_number:
        return int(expr)
    try:
        return expression_text(expr, names)
    except SplitError as error:
        msg = f"an output of the piece is a view by {expr}, which a plan cannot say ({error}); it can run eagerly"
        raise CompileError(msg, actual=str(expr)) from error
