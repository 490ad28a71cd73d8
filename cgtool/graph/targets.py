"""Names of the functions and methods that a piece calls, and back. Owns which of them a piece may call at all.

Grammar: `ident(.ident)*` with one of the roots torch, _operator, math, builtins. A plan from a stranger is code, so a
name resolves only to what computes on tensors and numbers: overloads and packets of `torch.ops`, ATen's bindings,
`torch.nn.functional` and `torch.functional`, methods of tensors, arithmetic. Whatever opens files, loads code or calls
its argument does not resolve.

Must not import torch._dynamo, torch._inductor or sympy.
"""

from __future__ import annotations

import builtins
import math
import operator
import re
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
import torch.amp.autocast_mode
import torch.fft
import torch.functional
import torch.linalg
import torch.nn.functional
import torch.special

from cgtool.errors import ArtifactError, SplitError
from cgtool.graph import _torch

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*\Z")
_BUILTINS = frozenset({"abs", "bool", "divmod", "float", "getattr", "int", "len", "max", "min", "pow", "round", "sum"})
#: These call or look into what they are given.
_OPERATOR_DENIED = frozenset({"attrgetter", "call", "itemgetter", "methodcaller", "length_hint"})
#: These read files of the machine.
_TORCH_DENIED = frozenset({"from_file"})
#: Functions written in Python that Dynamo leaves in its graphs, beside all of torch.functional and nn.functional.
PYTHON_FUNCTIONS = frozenset(
    {
        "torch._check",
        "torch._check_is_size",
        "torch.amp.autocast_mode._enter_autocast",
        "torch.amp.autocast_mode._exit_autocast",
        "torch.sym_float",
        "torch.sym_int",
        "torch.sym_ite",
        "torch.sym_max",
        "torch.sym_min",
        "torch.sym_not",
        "torch.sym_sqrt",
        "torch.sym_sum",
    }
)
_PYTHON_MODULES = frozenset({"torch.functional", "torch.nn.functional"})
_BUILTIN_MODULES: dict[str, Any] = {
    "torch._C._nn": _torch.NATIVE_NN,
    "torch.fft": torch.fft,
    "torch.linalg": torch.linalg,
    "torch.nn.functional": torch.nn.functional,
    "torch.special": torch.special,
}
_METHODS_DENIED = frozenset(
    {"apply_", "backward", "map2_", "map_", "numpy", "register_hook", "register_post_accumulate_grad_hook"}
    | {"share_memory_", "storage", "untyped_storage", "set_", "resize_as_sparse_", "module_load", "reinforce"}
)
_ARITHMETIC = (
    "add",
    "and",
    "floordiv",
    "lshift",
    "matmul",
    "mod",
    "mul",
    "or",
    "pow",
    "rshift",
    "sub",
    "truediv",
    "xor",
)
_METHODS_DUNDER = frozenset(
    {f"__{prefix}{name}__" for prefix in ("", "i", "r") for name in _ARITHMETIC}
    | {f"__{name}__" for name in ("abs", "eq", "ge", "getitem", "gt", "invert", "le", "lt", "ne", "neg", "setitem")}
    | {f"__{name}__" for name in ("bool", "float", "index", "int", "len")}
)
#: What `builtins.getattr` may read of a tensor.
ATTRIBUTES = frozenset({"H", "T", "data", "device", "dtype", "imag", "mH", "mT", "ndim", "real", "shape"})


def target_name(fn: Callable[..., Any]) -> str:
    """Return the dotted name under which `resolve_target` finds `fn` again.

    Args:
        fn: The target of a `call_function` node.

    Returns:
        For example "torch.nn.functional.silu", "_operator.add", "torch.ops.aten.mm.default", "torch.ops.toy.attn".

    Raises:
        SplitError: `fn` has no name that holds in another process, or one that a piece may not call.
    """
    for name in _candidates(fn):
        try:
            found = resolve_target(name)
        except ArtifactError:
            continue
        if found is fn:
            return name
    label = f"{getattr(fn, '__module__', None) or ''}.{getattr(fn, '__qualname__', None) or fn!r}".lstrip(".")
    raise SplitError(
        f"the graph calls {label}, which is not an op that can be written down by name; make it a custom op "
        f"(torch.library.Library: define, impl, fake) or write it with torch functions",
        actual=label,
    )


def _candidates(fn: Any) -> list[str]:
    if isinstance(fn, _torch.OpOverload | _torch.OpOverloadPacket):
        return [f"torch.ops.{_torch.op_name(fn)}"]
    if isinstance(fn, _torch.HigherOrderOperator):
        return []
    short = getattr(fn, "__name__", "")
    module = getattr(fn, "__module__", None)
    found = [f"{module}.{short}"] if module else []
    if short:
        found += [f"torch.{short}", f"_operator.{short}", f"math.{short}", f"builtins.{short}", f"torch.Tensor.{short}"]
    found += [f"{where}.{name}" for where, space in _BUILTIN_MODULES.items() for name in _names_of(space, fn)]
    return found


def _names_of(space: Any, fn: Any) -> list[str]:
    return sorted(name for name, value in vars(space).items() if value is fn)


@lru_cache(maxsize=4096)
def _resolved(name: str) -> Callable[..., Any]:
    if not _NAME.match(name):
        raise ArtifactError(f"{name!r} is not the name of an op; the plan was changed or torn: warm again", actual=name)
    root, _, rest = name.partition(".")
    fn: Callable[..., Any] | None = None
    if root == "builtins" and rest in _BUILTINS:
        fn = getattr(builtins, rest)
    elif root == "math" and not rest.startswith("_"):
        fn = getattr(math, rest, None)
    elif root == "_operator" and not rest.startswith("_") and rest not in _OPERATOR_DENIED:
        fn = getattr(operator, rest, None)
    elif name.startswith("torch.ops."):
        fn = _resolve_op(name)
    elif root == "torch":
        fn = _resolve_torch(name)
    if not callable(fn):
        raise ArtifactError(
            f"{name} is not an op that a piece may call with this torch; if a library provides it, import that "
            f"library first, else warm again",
            actual=name,
        )
    return fn


def _resolve_op(name: str) -> Any:
    parts = name.split(".")[2:]
    if len(parts) not in (2, 3) or any(part.startswith("__") for part in parts[:1]):
        return None
    found: Any = torch.ops
    for part in parts:
        found = getattr(found, part, None)
    return found if isinstance(found, _torch.OpOverload | _torch.OpOverloadPacket) else None


def _resolve_torch(name: str) -> Any:
    module, _, last = name.rpartition(".")
    if module in ("torch.Tensor", "torch._C.TensorBase"):
        return getattr(torch.Tensor, last) if is_method(last) else None
    if name in PYTHON_FUNCTIONS:
        found: Any = torch
        for part in name.split(".")[1:]:
            found = getattr(found, part, None)
        return found
    if module == "torch":
        fn = getattr(torch, last, None)
        return fn if last not in _TORCH_DENIED and _torch.is_builtin_of_torch(last, fn) else None
    if module in _BUILTIN_MODULES or module in _PYTHON_MODULES:
        space = _BUILTIN_MODULES.get(module) or getattr(torch, "functional")  # noqa: B009 - mypy: a module attribute
        fn = None if last.startswith("_") else getattr(space, last, None)
        return fn if _computes(module, fn) else None
    return None


def _computes(module: str, fn: Any) -> bool:
    if fn is None or isinstance(fn, type | ModuleType):
        return False
    return not hasattr(fn, "__code__") or fn.__module__ in (module, *_PYTHON_MODULES)


def resolve_target(name: str) -> Callable[..., Any]:
    """Return the function that `target_name` called `name`.

    Raises:
        ArtifactError: The name is outside the grammar, is not an op, or its library was not imported.
    """
    try:
        return _resolved(name)
    except (AttributeError, RuntimeError) as error:
        raise ArtifactError(f"{name} could not be looked up: {error}; warm again", actual=name) from error


def is_method(name: str) -> bool:
    """Return whether a "method" node may call `name` on a tensor."""
    if name.startswith("_"):
        return name in _METHODS_DUNDER
    return name not in _METHODS_DENIED and callable(getattr(torch.Tensor, name, None))


def check_method(name: str) -> str:
    """Return `name` if a "method" node may call it.

    Raises:
        ArtifactError: It is not a method of tensors, or one that a piece may not call.
    """
    if not is_method(name):
        raise ArtifactError(f"{name!r} is not a method of tensors that a piece may call; warm again", actual=name)
    return name
