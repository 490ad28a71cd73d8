"""Finds what a compiler must not be given: whole pieces that run eagerly, and ops that are split out.

An op that is split out runs between pieces, and the rest is compiled. Such ops are

- those that draw random numbers, because compiled code would draw different numbers from eager;
- those for which compiled code would serve only one size;
- those that AOTInductor's code cannot call. Some of these are known before a compile: ops that Inductor calls through
  a C function that this torch does not declare, and custom ops whose schema a package cannot express. Others are found
  when a compile fails and names the op.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from cgtool.compiler import _torch
from cgtool.compiler.adaptors.interface import op_named_in
from cgtool.compiler.fx_piece import rebuild
from cgtool.dims import FIRST_DYNAMIC
from cgtool.errors import CompileError, chain_of
from cgtool.graph._torch import OpOverload
from cgtool.guards._torch import schema_of
from cgtool.guards.code import is_composite
from cgtool.ops import is_torch_op
from cgtool.plan.pieces import NodeKind, PieceGraph

_HEADERS = Path(torch.__file__).parent / "include/torch/csrc/inductor/aoti_torch"
#: Schema types that torch does not write into a package, or does not read back.
_UNSUPPORTED_TYPES = re.compile(r"\bDict\[|\bcomplex\b|\bList\[(List\[|Optional\[(?!Tensor\]))")
#: Cached, since it searches all of Inductor's modules and is called for every piece of every variant.
_shims_of_templates = cache(_torch.shims_of_templates)


@dataclass(frozen=True, kw_only=True)
class Fitness:
    """What is known of a piece before it is compiled.

    Args:
        eager_reason: Why the whole piece must run eagerly, or None.
        calls: Each call in the graph, as `cgtool.split.bodies.call_of` returns it → the ops that it decomposes into.
        split_out: Calls that no compiler may be given → why.
        device: The device type of the piece.
    """

    eager_reason: str | None
    calls: Mapping[tuple[NodeKind, str], frozenset[Any]]
    split_out: Mapping[tuple[NodeKind, str], str] = field(default_factory=dict)
    device: str

    def uncallable(self) -> set[tuple[NodeKind, str]]:
        """Return the calls that AOTInductor's code cannot make."""
        return {call for call, ops in self.calls.items() if any(_is_uncallable(op, self.device) for op in ops)}

    def calls_to(self, op: str) -> set[tuple[NodeKind, str]]:
        """Return the calls that decompose into an op, which may be named by its schema or C function, as errors do."""
        plain = re.sub(r"(_out)?(_v\d)?$", "", op)
        return {call for call, ops in self.calls.items() if any({op, plain} & _names_of(called) for called in ops)}


def fitness_of(graph: PieceGraph) -> Fitness:
    """Examine a piece.

    A piece with a composite custom op runs eagerly: compilers inline the op's Python code, which a load cannot check.
    """
    device = next((meta.device for meta in (*graph.inputs, *graph.results)), "cpu")
    composed = [name for name in graph.ops if not is_torch_op(name) and is_composite(name)]
    if composed:
        reason = (
            f"the op {composed[0]} is composed of other ops (CompositeImplicitAutograd), and cgtool cannot detect "
            f"changes to its code"
        )
        return Fitness(eager_reason=reason, calls={}, device=device)
    try:
        called = rebuild(graph).called
    except CompileError as error:
        has_data = any(symbol.min < FIRST_DYNAMIC for symbol in graph.symbols)
        reason = f"it has sizes that come from data: {error}" if has_data else str(error)
        return Fitness(eager_reason=reason, calls={}, device=device)
    calls: dict[tuple[NodeKind, str], frozenset[Any]] = {}
    split_out: dict[tuple[NodeKind, str], str] = {}
    for index, ops in called.found.items():
        call = graph.nodes[index].kind, graph.nodes[index].target or ""
        calls[call] = calls.get(call, frozenset()) | ops
        if index in called.drawing:
            split_out[call] = "Compiled code would draw different random numbers from eager"
        elif index in called.fixing:
            split_out[call] = "Compiled code would serve only one size of these ops"
    return Fitness(eager_reason=None, calls=calls, split_out=split_out, device=device)


def op_named_by(error: BaseException) -> str | None:
    """Return the op that made a compile fail, if the error or one of its causes names it."""
    chain = list(chain_of(error))
    named = [*map(_op_at_fault, chain), *(op_named_in(str(cause)) for cause in chain)]
    return next(filter(None, named), None)


def _op_at_fault(error: BaseException) -> str | None:
    """Return the op whose call Inductor was generating when it failed, by the error's traceback."""
    frames = traceback.walk_tb(error.__traceback__)
    ops = (getattr(frame.f_locals.get("self"), "op_overload", None) for frame, _ in frames)
    return next((_torch.op_name(op) for op in ops if isinstance(op, OpOverload)), None)


def _names_of(op: Any) -> set[str]:
    """Return the names of an op in errors: `ns::op.overload`, `ns::op`, and the end of its C function's name."""
    name = _torch.op_name(op)
    plain, _, overload = name.partition(".")
    short = plain.partition("::")[2]
    return {name, plain, short, f"{short}_{overload}"}


def _is_uncallable(op: Any, device: str) -> bool:
    if is_torch_op(_torch.op_name(op)):
        return not all(_has_shim(name, device) for name in _shims_of_templates(op))
    schema = schema_of(op)
    return any(result.alias_info for result in schema.returns) or any(
        _UNSUPPORTED_TYPES.search(str(item.type)) for item in (*schema.arguments, *schema.returns)
    )


@cache
def _has_shim(name: str, device: str) -> bool:
    """Return whether torch's headers declare the C function by which native code calls `at::name`."""
    shim = re.compile(rf"\baoti_torch_{device}_{name.removesuffix('::call').rpartition('::')[2]}(_v\d)?\(")
    headers = [path for path in _HEADERS.rglob("*.h") if not path.is_dir()]
    return not headers or any(shim.search(path.read_text(encoding="utf-8", errors="replace")) for path in headers)
