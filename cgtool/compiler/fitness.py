"""What of a piece a compiler may not be given, and what code of AOTInductor cannot call.

The whole piece runs as it stands, or ops of it are split out: they run between pieces, and the rest is compiled. Those
are ops that draw random numbers, of which a compiler's code would draw others than eager does; those of which its code
would serve one size alone; and what AOTInductor's code cannot call. The last is known before a compile of ops that
Inductor calls through a C function which this torch lacks and of custom ops whose schema says what a package cannot; or
a compile fails, and names the op.
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
#: Types of a schema that torch does not write into a package, or does not read back.
_UNSAID = re.compile(r"\bDict\[|\bcomplex\b|\bList\[(List\[|Optional\[(?!Tensor\]))")
#: Looks through all of Inductor's modules, and every piece of every variant asks.
_shims_of_templates = cache(_torch.shims_of_templates)


@dataclass(frozen=True, kw_only=True)
class Fitness:
    """What is known of a piece before it is compiled.

    Args:
        as_it_stands: Why it must run as it stands whatever a compiler could make of it, or None.
        calls: What it calls, as `cgtool.split.bodies.call_of` has it → the ops that this came to.
        apart: What it calls that no compiler may be given → why.
        device: The type of device that it works on.
    """

    as_it_stands: str | None
    calls: Mapping[tuple[NodeKind, str], frozenset[Any]]
    apart: Mapping[tuple[NodeKind, str], str] = field(default_factory=dict)
    device: str

    def without_code(self) -> set[tuple[NodeKind, str]]:
        """Return what code of AOTInductor cannot call."""
        return {call for call, ops in self.calls.items() if any(_is_uncallable(op, self.device) for op in ops)}

    def calling(self, op: str) -> set[tuple[NodeKind, str]]:
        """Return what came to an op that an error names, by its schema or its C function, with or without overload."""
        plain = re.sub(r"(_out)?(_v\d)?$", "", op)
        return {call for call, ops in self.calls.items() if any({op, plain} & _names_of(one) for one in ops)}


def fitness_of(graph: PieceGraph) -> Fitness:
    """Look at a piece.

    A compiler looks into a custom op that is composed of others, whose Python nobody can look at again at load.
    """
    device = next((meta.device for meta in (*graph.inputs, *graph.results)), "cpu")
    composed = [name for name in graph.ops if not is_torch_op(name) and is_composite(name)]
    if composed:
        reason = (
            f"the op {composed[0]} is composed of other ops (CompositeImplicitAutograd), by code that cannot be watched"
        )
        return Fitness(as_it_stands=reason, calls={}, device=device)
    try:
        called = rebuild(graph).called
    except CompileError as error:
        has_data = any(symbol.min < FIRST_DYNAMIC for symbol in graph.symbols)
        reason = f"it works on sizes that come from data: {error}" if has_data else str(error)
        return Fitness(as_it_stands=reason, calls={}, device=device)
    calls: dict[tuple[NodeKind, str], frozenset[Any]] = {}
    apart: dict[tuple[NodeKind, str], str] = {}
    for index, ops in called.found.items():
        call = graph.nodes[index].kind, graph.nodes[index].target or ""
        calls[call] = calls.get(call, frozenset()) | ops
        if index in called.drawing:
            apart[call] = "Compiled code would draw other random numbers than eager does"
        elif index in called.fixing:
            apart[call] = "Compiled code would serve one size alone of what these ops take"
    return Fitness(as_it_stands=None, calls=calls, apart=apart, device=device)


def op_named_by(error: BaseException) -> str | None:
    """Return the op that a failed compile is about; None where none is named."""
    chain = list(chain_of(error))
    named = [*map(_op_at_fault, chain), *(op_named_in(str(one)) for one in chain)]
    return next(filter(None, named), None)


def _op_at_fault(error: BaseException) -> str | None:
    """Return the op that Inductor was writing a call of as it failed, or None."""
    frames = traceback.walk_tb(error.__traceback__)
    ops = (getattr(frame.f_locals.get("self"), "op_overload", None) for frame, _ in frames)
    return next((_torch.op_name(op) for op in ops if isinstance(op, OpOverload)), None)


def _names_of(op: Any) -> set[str]:
    """Return what errors call an op: `ns::op.overload`, `ns::op`, and the end of the name of its C function."""
    name = _torch.op_name(op)
    plain, _, overload = name.partition(".")
    short = plain.partition("::")[2]
    return {name, plain, short, f"{short}_{overload}"}


def _is_uncallable(op: Any, device: str) -> bool:
    if is_torch_op(_torch.op_name(op)):
        return not all(_has_shim(name, device) for name in _shims_of_templates(op))
    schema = schema_of(op)
    return any(result.alias_info for result in schema.returns) or any(
        _UNSAID.search(str(item.type)) for item in (*schema.arguments, *schema.returns)
    )


@cache
def _has_shim(name: str, device: str) -> bool:
    """Return whether torch declares the C function by which native code calls `at::name`."""
    shim = re.compile(rf"\baoti_torch_{device}_{name.removesuffix('::call').rpartition('::')[2]}(_v\d)?\(")
    headers = [path for path in _HEADERS.rglob("*.h") if not path.is_dir()]
    return not headers or any(shim.search(path.read_text(encoding="utf-8", errors="replace")) for path in headers)
