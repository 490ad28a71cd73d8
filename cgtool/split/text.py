"""Rendering of a graph as `computation_graph.py`, for people, with shapes and pieces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from cgtool.errors import SplitError
from cgtool.graph.sympy_text import expression_text
from cgtool.graph.values import dtype_text, tensor_meta
from cgtool.split import _torch as private
from cgtool.split.cut import names_of
from cgtool.split.nodes import described, example, user_line
from cgtool.split.sizes import GraphSizes

_HEADER = '''"""The computation graph, for reading only.

A comment above a line is its place in the model's source. Dynamic sizes are s0, s1, ...
"""
'''


def graph_text(gm: fx.GraphModule, assignment: Mapping[str, int]) -> str:
    """Return the graph as Python, the same in every process, with comments where a piece begins."""
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder" and isinstance(example(n), torch.Tensor)]
    names = GraphSizes.of(inputs).names
    lines = [_HEADER, "def forward("]
    lines += [f"    {n.name}{_annotation(n, names)}," for n in gm.graph.nodes if n.op == "placeholder"]
    lines.append("):")
    piece: int | None = None
    where: str | None = None
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            continue
        index = assignment.get(node.name)
        if index is not None and index != piece:
            piece = index
            lines += ["", f"    # ---- piece {piece} ----"]
        line = user_line(node)
        if line is not None and line != where:
            where = line
            lines.append(f"    # {line}")
        lines.append(f"    {_statement(node, names)}")
    return "\n".join(lines) + "\n"


def _statement(node: fx.Node, names: Mapping[str, str]) -> str:
    if node.op == "output":
        return f"return {_value(node.args[0], names)}"
    assign = f"{node.name}{_annotation(node, names)} = "
    if node.op == "get_attr":
        return f"{assign}self.{node.target}"
    arguments = [_value(arg, names) for arg in node.args]
    arguments += [f"{name}={_value(value, names)}" for name, value in node.kwargs.items()]
    if node.op == "call_method":
        return f"{assign}{arguments[0]}.{node.target}({', '.join(arguments[1:])})"
    return f"{assign}{_callee(node)}({', '.join(arguments)})"


def _callee(node: fx.Node) -> str:
    known = names_of(node)
    if isinstance(node.target, private.OpOverload | private.OpOverloadPacket):
        return f"torch.ops.{private.op_name(node.target).replace('::', '.')}"
    dotted = sorted(
        (name for name in known if "::" not in name), key=lambda n: (not n.startswith("torch.nn"), len(n), n)
    )
    return dotted[0] if dotted else described(node).partition(" ")[0]


def _annotation(node: fx.Node, names: Mapping[str, str]) -> str:
    value = example(node)
    if isinstance(value, torch.Tensor):
        try:
            meta = tensor_meta(value, names)
        except SplitError:
            return f': "{dtype_text(value.dtype)}"'
        return f': "{meta.dtype}[{", ".join(map(str, meta.shape))}]"'
    if isinstance(value, torch.SymInt):
        return f': "{_value(value, names)}"'
    return ""


def _value(value: Any, names: Mapping[str, str]) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        try:
            return expression_text(private.expr_of(value), names)
        except SplitError:
            return "?"
    if isinstance(value, tuple):
        inner = ", ".join(_value(item, names) for item in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, list):
        return f"[{', '.join(_value(item, names) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_value(item, names)}' for key, item in value.items())}}}"
    if isinstance(value, slice):
        return f"slice({_value(value.start, names)}, {_value(value.stop, names)}, {_value(value.step, names)})"
    return repr(value)
