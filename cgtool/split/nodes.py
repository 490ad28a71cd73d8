"""The kinds of nodes in Dynamo's graph, and access to their example values and source lines.

The kinds are::

    INPUT      a tensor placeholder
    SIZE       a number computed from sizes; each piece that needs it recomputes it from its tensors
    CONSTANT   a tensor stored in the graph; copied into each piece that uses it
    TENSOR     an op that returns a tensor
    BUNDLE     an op that returns several tensors; getitems stay with it
    EFFECT     an op whose result, if any, cannot cross a boundary
    CONTEXT    enters or leaves autocast; each piece enters the regions that it needs
    DROPPED    has no effect on inference
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from enum import Enum, auto
from pathlib import Path
from typing import Any

import torch
from torch import fx

from cgtool.errors import SplitError
from cgtool.graph.targets import RUN_BODIES
from cgtool.split import _torch as private

_NUMBERS = (bool, int, float, str, torch.SymInt, torch.SymFloat, torch.SymBool, torch.dtype, torch.device, torch.layout)
_DROPPED_NAMES = frozenset(
    {
        "_log_api_usage_once",
        "_set_grad_enabled",
        "_enter_inference_mode",
        "_exit_inference_mode",
        "_record_function_enter",
        "_record_function_enter_new",
        "_record_function_exit",
        "_saved_tensors_hooks_disable",
        "_saved_tensors_hooks_enable",
        "_maybe_load_decompositions",
        "lazy_load_decompositions",
    }
)
#: Methods that read a data-dependent number from a tensor.
_READS_DATA = frozenset({"item", "tolist", "__bool__", "__int__", "__float__", "__index__"})
#: Parts of the names of functions that return a number and have a side effect.
_CHANGES_STATE = ("_set_", "set_", "_lazy", "lazy_")


class Kind(Enum):
    """See the module's docstring."""

    INPUT = auto()
    SIZE = auto()
    CONSTANT = auto()
    TENSOR = auto()
    BUNDLE = auto()
    EFFECT = auto()
    CONTEXT = auto()
    DROPPED = auto()


#: Kinds whose nodes run inside a piece.
RUNS = frozenset({Kind.TENSOR, Kind.BUNDLE, Kind.EFFECT})


def kind_of(node: fx.Node) -> Kind:
    """Return the kind of a node.

    Raises:
        SplitError: A piece cannot contain it: a module, a higher-order op, a constant that is not a tensor.
    """
    value = example(node)
    if node.op == "placeholder":
        return Kind.INPUT if isinstance(value, torch.Tensor) else Kind.SIZE
    if node.op == "get_attr":
        return _constant(node)
    is_higher = isinstance(node.target, private.HigherOrderOperator)
    if node.target is private.SDPA_BACKEND:
        why = "it selects the attention kernels of the whole process; put `with sdpa_kernel(...)` around the call of"
        raise cannot_split(node, f"{why} the model, both where it is warmed and where it is served")
    if node.target is private.SET_GRAD and _leaves_grad_mode(node):
        raise cannot_split(
            node, "grad mode stays on after the call; write `with torch.enable_grad():` around its lines"
        )
    if short_name(node) == "_tensor_version":  # an op of prims that exists only in tracing processes
        raise cannot_split(node, "a piece cannot read the version counter of a tensor; move it out of forward")
    if node.op == "call_module" or (is_higher and getattr(node.target, "__name__", "") not in RUN_BODIES):
        raise cannot_split(node, "it runs a subgraph; write the model without it, or put it into a custom op")
    if is_dropped(node):
        return Kind.DROPPED
    if node.target in (private.ENTER_AUTOCAST, private.EXIT_AUTOCAST):
        return Kind.CONTEXT
    if isinstance(value, torch.Tensor):
        return Kind.TENSOR
    if any(True for _ in tensors_in(value)):
        return Kind.BUNDLE
    return Kind.SIZE if _is_number(value) and _is_pure(node) else Kind.EFFECT


def _leaves_grad_mode(node: fx.Node) -> bool:
    """Return whether `node` is the last one that sets grad mode, and enables it; the trace starts with it disabled."""
    *_, last = node.graph.find_nodes(op="call_function", target=node.target)
    return node is last and bool(node.args[0])


def is_dropped(node: fx.Node) -> bool:
    """Return whether `node` has no effect on inference."""
    return short_name(node) in _DROPPED_NAMES


def short_name(node: fx.Node) -> str:
    """Return the name of the function of `node`, without namespace and overload: "add", "index_put_"."""
    if isinstance(node.target, private.OpOverload | private.OpOverloadPacket):
        return private.op_name(node.target).partition("::")[2].partition(".")[0]
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def is_transform_step(node: fx.Node) -> bool:
    """Return whether `node` is a step of `torch.vmap` or `torch.func`, or a function of numpy as Dynamo writes it."""
    module = str(getattr(node.target, "__module__", ""))
    spaces = ("torch._functorch", "torch._C._functorch", "torch._dynamo.utils")
    return module.startswith(spaces) and not is_dropped(node)


def _constant(node: fx.Node) -> Kind:
    value = attribute_of(node)
    if isinstance(value, torch.Tensor):
        return Kind.CONSTANT
    if isinstance(value, fx.GraphModule):
        return Kind.DROPPED  # a body, which is encoded with the op that runs it
    raise cannot_split(node, f"it is a {type(value).__name__}; pass it as an argument, or make it a number")


def attribute_of(node: fx.Node) -> Any:
    """Return the attribute that a get_attr node reads."""
    return operator.attrgetter(str(node.target))(node.graph.owning_module)


def constant_of(node: fx.Node) -> torch.Tensor:
    """Return the tensor of a CONSTANT node."""
    constant: torch.Tensor = attribute_of(node)
    return constant


def example(node: fx.Node) -> Any:
    """Return the result of `node` during the trace: fake tensors, symbolic numbers, or None if Dynamo recorded none."""
    return node.meta.get("example_value")


def numbers_in(value: Any) -> tuple[Any, ...]:
    """Return the sizes and strides of a tensor, the items of a tuple or list, or the value itself."""
    if isinstance(value, torch.Tensor):
        return (*value.shape, *value.stride())
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def leaves_of(node: fx.Node) -> list[Any]:
    """Return the nodes among the arguments of `node` in the order of their encoding, with duplicates."""
    found: list[Any] = []
    fx.map_arg(node.args, found.append)
    for name in sorted(node.kwargs):
        fx.map_arg(node.kwargs[name], found.append)
    return found


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_number(item) or item is None for item in value)
    return isinstance(value, _NUMBERS)


def _is_pure(node: fx.Node) -> bool:
    """Return whether a node that returns a number can be left out because the number is computed from sizes."""
    if node.op == "call_method":
        return node.target not in _READS_DATA
    target = node.target
    if isinstance(target, private.OpOverload | private.OpOverloadPacket):
        return private.op_name(target).startswith("aten::sym_")
    name = getattr(target, "__name__", "")
    return not any(word in name for word in _CHANGES_STATE)


def is_getitem_of_bundle(node: fx.Node, kinds: dict[fx.Node, Kind]) -> bool:
    """Return whether `node` takes an item from the result of a BUNDLE node."""
    return (
        node.op == "call_function"
        and node.target is operator.getitem
        and isinstance(node.args[0], fx.Node)
        and kinds[node.args[0]] is Kind.BUNDLE
    )


_TORCH_FOLDER = f"{Path(torch.__file__).parent}/"
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ([^\n]+)(?:\n\s+([^\n]*\S))?')


def user_line(node: fx.Node) -> str | None:
    """Return the source line of `node`: "model.py:27, in forward: x = self.emb(ids)".

    Dynamo records no line for nodes that enter and leave a context, which get that of the next node.
    """
    frames: list[tuple[str, str, str, str]] = []
    while not frames and node.op != "output":
        frames = _FRAME.findall(node.meta.get("stack_trace") or node.stack_trace or "")
        node = node.next
    if not frames:
        return None
    # the innermost frame outside of torch, if any
    path, line, function, code = next((f for f in reversed(frames) if not f[0].startswith(_TORCH_FOLDER)), frames[-1])
    place = f"{path.replace(chr(92), '/').rsplit('/', 1)[-1]}:{line}, in {function.strip()}"
    return f"{place}: {code.strip()}" if code else place


def described(node: fx.Node) -> str:
    """Return the op and the source line of `node`, for messages."""
    name = short_name(node) or str(node.target)
    if isinstance(node.target, private.OpOverload | private.OpOverloadPacket):
        name = private.op_name(node.target)
    line = user_line(node)
    return f"{name} ({line})" if line else f"{name} (node {node.name})"


def cannot_split(node: fx.Node, why: str) -> SplitError:
    """Return the error for a node that a piece cannot contain; `why` ends with the remedy."""
    return SplitError(f"{described(node)} cannot be part of a piece: {why}.", path=node.name)
