"""All private names of torch that the split uses, as of torch 2.13.0, unchanged since 2.11.

Must not import torch._dynamo or torch._inductor. Any graph with symbols has imported torch.utils._sympy already.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch._C import _functorch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import maybe_get_fake_mode
from torch.amp import autocast_mode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.traceback import preserve_node_meta
from torch.utils._sympy import functions
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import bound_sympy

__all__ = ["HigherOrderOperator", "OpOverload", "OpOverloadPacket"]

#: The functions that enter and leave an autocast region in a graph.
ENTER_AUTOCAST: Any = autocast_mode._enter_autocast
EXIT_AUTOCAST: Any = autocast_mode._exit_autocast
#: The function that enters `torch.nn.attention.sdpa_kernel` in a graph.
SDPA_BACKEND: Any = getattr(torch.nn.attention, "_backend_from_string", None)
#: The function that turns gradients on and off in a graph; the transforms of torch.func use it.
SET_GRAD: Any = torch._C._set_grad_enabled

_ROUNDINGS = (functions.TruncToInt, functions.FloorToInt, functions.CeilToInt, functions.RoundToInt)

#: Ops that in inference only run the body that is their first argument → the position of the body's first argument.
BODY_OPS: dict[str, int] = {"tag_activation_checkpoint": 1, "invoke_subgraph": 2, "wrap": 1}


def fake_mode_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return the mode of a fake tensor as a context manager."""
    return maybe_get_fake_mode(tensor) or contextlib.nullcontext()


def op_name(op: OpOverload | OpOverloadPacket) -> str:
    """Return `ns::op.overload` of an overload, `ns::op` of a packet."""
    namespace, _, rest = str(op).partition(".")
    return f"{namespace}::{rest}"


def aten_packet(short: str) -> OpOverloadPacket | None:
    """Return the ATen op with a name, or None."""
    packet = getattr(torch.ops.aten, short, None) if short and not short.startswith("__") else None
    return packet if isinstance(packet, OpOverloadPacket) else None


def overloads_of(op: OpOverload | OpOverloadPacket) -> list[OpOverload]:
    """Return all overloads of a packet, or the overload itself."""
    return [op] if isinstance(op, OpOverload) else [getattr(op, name) for name in overload_names(op)]


def overload_names(op: OpOverloadPacket) -> list[str]:
    """Return the names of a packet's overloads."""
    return [str(name) for name in op.overloads()]  # type: ignore[no-untyped-call]  # torch leaves it untyped


def storage_key(tensor: torch.Tensor) -> int | None:
    """Return an identifier of a tensor's storage, or None if it has no accessible storage."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError, AttributeError):
        return None


def is_wrapped(value: Any) -> bool:
    """Return whether a value is a tensor wrapped by torch.vmap or torch.func."""
    return isinstance(value, torch.Tensor) and bool(_functorch.is_functorch_wrapped_tensor(value))


@contextlib.contextmanager
def tracing_under(tensor: torch.Tensor) -> Iterator[Any]:
    """Enter the mode of a fake tensor and yield it; functorch levels and the grad mode are restored on exit."""
    depth = _functorch.get_dynamic_layer_stack_depth()
    with torch.no_grad(), fake_mode_of(tensor) as mode, enable_python_dispatcher():
        try:
            yield mode
        finally:
            _functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)


def plain_graph(function: Callable[..., Any], values: list[Any]) -> GraphModule:
    """Trace a function with these values into plain ops."""
    with preserve_node_meta():
        traced: GraphModule = make_fx(function)(*values)
    return traced


def version_of(tensor: torch.Tensor) -> int:
    """Return how often the tensor's memory was written to; 0 if that is not counted."""
    return 0 if tensor.is_inference() else int(tensor._version)


def expr_of(value: Any) -> Any:
    """Return the sympy expression of a SymInt, SymFloat or SymBool, with the ShapeEnv's replacements applied."""
    return value.node.expr


def shape_env_of(value: Any) -> Any:
    """Return the ShapeEnv of a symbolic number or of a tensor with symbolic sizes; else None."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.shape_env
    if isinstance(value, torch.Tensor):
        for size in (*value.shape, *value.stride()):
            if isinstance(size, torch.SymInt):
                return size.node.shape_env
    return None


def symbol_range(shape_env: Any, symbol: sympy.Symbol) -> tuple[int, int | None]:
    """Return the smallest and the largest size of a symbol; None means no limit."""
    bounds = shape_env.var_to_range[symbol]
    low = 0 if bounds.lower in (-int_oo, -sympy.oo) else max(0, int(bounds.lower))
    # torch limits data-dependent sizes to sys.maxsize or one less
    is_open = bounds.upper in (int_oo, sympy.oo) or int(bounds.upper) >= sys.maxsize - 1
    return low, None if is_open else int(bounds.upper)


def comes_from_data(symbol: Any) -> bool:
    """Return whether a symbol is data-dependent: an op computes it from the values of a tensor."""
    return bool(free_unbacked_symbols(symbol))


def relations_of(shape_env: Any) -> Iterator[Any]:
    """Yield the relations between sizes that the trace relies on, as sympy expressions with replacements applied."""
    asserted = (assertion for group in shape_env.deferred_runtime_asserts.values() for assertion in group)
    for guard in (*shape_env.guards, *asserted):
        yield shape_env.simplify(shape_env.replace(guard.expr))


def guards_of(shape_env: Any) -> Iterator[tuple[Any, str]]:
    """Yield the guards of the trace on sizes, as sympy expressions, with their source locations."""
    for guard in () if shape_env is None else shape_env.guards:
        yield shape_env.replace(guard.expr), str(guard.sloc)


def reals_in(expr: Any) -> Iterator[Any]:
    """Yield the real numbers of sizes that an expression rounds or compares, except quotients of integers."""
    for part in sympy.preorder_traversal(expr):
        if isinstance(part, (*_ROUNDINGS, sympy.core.relational.Relational)):
            for real in part.args:
                symbols = real.free_symbols
                if symbols and all(symbol.is_integer for symbol in symbols) and _takes_operations(real):
                    yield real


def only_divides(real: Any) -> bool:
    """Return whether a real number is computed by divisions only, whose order torch preserves."""
    quotients = (functions.ToFloat, functions.IntTrueDiv, functions.FloatTrueDiv, sympy.Float)
    return all(part.is_integer or isinstance(part, quotients) for part in sympy.preorder_traversal(real))


def _takes_operations(number: Any) -> bool:
    is_quotient = isinstance(number, functions.IntTrueDiv) and all(arg.is_integer for arg in number.args)
    if is_quotient or isinstance(number, (functions.ToFloat, *_ROUNDINGS)):
        return False
    # a rounded subexpression is an integer, and `reals_in` yields its argument separately
    inner = number.replace(lambda part: isinstance(part, _ROUNDINGS), lambda _: sympy.Integer(1))
    return bool(inner.has(sympy.Float, functions.IntTrueDiv, functions.FloatTrueDiv, functions.ToFloat))


def implied_by_ranges(shape_env: Any, expr: Any) -> bool:
    """Return whether `expr` is true for all sizes in the symbols' ranges."""
    if expr == sympy.true:
        return True
    ranges = {symbol: shape_env.var_to_range[symbol] for symbol in expr.free_symbols}
    bounds: Any = bound_sympy(expr, ranges)
    return bool(bounds.is_singleton()) and bool(bounds.lower == sympy.true)
