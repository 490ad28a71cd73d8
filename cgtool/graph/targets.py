"""Names of the functions and methods that a piece calls, their resolution, and the list of those that are allowed.

Grammar: `ident(.ident)*` with one of the roots torch, _operator, math, builtins. A plan may come from a stranger and
runs as code, so a name resolves only to the following: ATen ops without string arguments, under any of their names
(`torch.ops.aten.mm`, `torch.mm`, the method `mm`), a list of ATen ops with string arguments, custom ops registered in
this process, the functions of `torch.nn.functional` and `torch.functional`, and arithmetic. Nothing that opens files,
loads code or calls its argument is allowed.

Must not import torch._dynamo, torch._inductor or sympy.
"""

from __future__ import annotations

import builtins
import math
import operator
import re
from collections.abc import Callable
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType
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
from cgtool.ops import is_torch_op

_NAME = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*"
_BUILTINS = frozenset({"abs", "bool", "divmod", "float", "getattr", "int", "len", "max", "min", "pow", "round", "sum"})
_IN_PLACE = ("add", "and", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow", "rshift", "sub", "truediv", "xor")
_OPERATORS = frozenset(
    {*_IN_PLACE, *(f"i{name}" for name in _IN_PLACE), "and_", "or_"}
    | {"abs", "concat", "contains", "eq", "ge", "getitem", "gt", "index", "inv", "invert", "is_", "is_not", "le", "lt"}
    | {"ne", "neg", "not_", "pos", "setitem", "truth"}
)
#: ATen ops with a string argument that only selects a computation: how to round, where to pad, which norm. Other ops
#: with strings are refused, because a string may be the name of a file (`from_file`, `save`). Plain ops such as `add`
#: are listed because TorchScript gives them overloads for strings.
_WITH_STRINGS = frozenset(
    {"_assert_async", "_assert_scalar", "_convolution_mode", "_functional_assert_async", "_functional_assert_scalar"}
    | {"_linalg_eigh", "_linalg_svd", "_mixed_dtypes_linear", "_sparse_mm", "_sparse_semi_structured_linear"}
    | {"add", "any", "conv1d", "conv2d", "conv3d", "copy", "count", "div", "div_", "divide", "divide_", "einsum", "eq"}
    | {"ge", "gelu", "gelu_", "gt", "index", "index_reduce", "index_reduce_", "le", "len", "lt", "meshgrid"}
    | {"nanquantile", "ne", "pad", "pad_sequence", "quantile", "scatter", "scatter_", "scatter_reduce"}
    | {"scatter_reduce_", "searchsorted", "segment_reduce", "slice", "sort", "split", "stft"}
    | {f"fft_{inverse}{kind}fft{dims}" for inverse in ("", "i") for kind in ("", "r", "h") for dims in ("", "2", "n")}
    | {
        f"linalg_{name}"
        for name in ("cond", "eigh", "eigvalsh", "lstsq", "matrix_norm", "norm", "qr", "svd", "svdvals")
    }
)
#: Namespaces of torch's own ops that a piece may call. In those of collectives, all ops are allowed: their strings name
#: a reduction or a process group.
_COMPUTING = frozenset({"aten", "prims", "quantized", "quantized_decomposed"})
_COLLECTIVES = frozenset({"_c10d_functional", "_c10d_functional_autograd"})
#: Higher-order ops that only run the bodies among their arguments.
RUN_BODIES = frozenset({"associative_scan", "cond", "flex_attention", "map_impl", "scan", "while_loop"})
#: Python functions that Dynamo puts into its graphs, besides those of torch.functional and torch.nn.functional.
PYTHON_FUNCTIONS = frozenset(
    {
        "torch._check",
        "torch._check_is_size",
        "torch._sym_sqrt",
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
#: Modules of functions, and the prefix of the ATen ops behind them.
_MODULES: dict[str, tuple[Any, str]] = {
    "torch._C._nn": (_torch.NATIVE_NN, ""),
    "torch.fft": (torch.fft, "fft_"),
    "torch.functional": (torch.functional, ""),
    "torch.linalg": (torch.linalg, "linalg_"),
    "torch.nn.functional": (torch.nn.functional, ""),
    "torch.special": (torch.special, "special_"),
}
_WRITTEN_IN_PYTHON = frozenset({"torch.functional", "torch.nn.functional"})
#: Methods of tensors that are not ATen ops.
_METHODS = frozenset(
    {"bfloat16", "bool", "byte", "cdouble", "cfloat", "char", "double", "float", "half", "int", "long", "short"}
    | {"cpu", "cuda", "dim_order", "ndimension", "nelement", "new", "new_tensor", "to_sparse_coo", "tolist", "type"}
    | {"unique", "_is_all_true"}
)
#: ATen ops that are also methods, and change more of a tensor than its values.
_METHODS_DENIED = frozenset({"backward", "resize_as_sparse_", "set_"})
_METHODS_DUNDER = frozenset(
    {f"__{prefix}{name}__" for prefix in ("", "i", "r") for name in _IN_PLACE}
    | {f"__{name}__" for name in ("abs", "eq", "ge", "getitem", "gt", "invert", "le", "lt", "ne", "neg", "setitem")}
    | {f"__{name}__" for name in ("bool", "float", "index", "int", "len")}
)
#: The attributes of tensors that `builtins.getattr` may read.
ATTRIBUTES = frozenset({"H", "T", "data", "device", "dtype", "imag", "mH", "mT", "ndim", "real", "shape"})


def target_name(fn: Callable[..., Any]) -> str:
    """Return the dotted name that `resolve_target` resolves to `fn`.

    Args:
        fn: The target of a `call_function` node.

    Returns:
        For example "torch.nn.functional.silu", "_operator.add", "torch.ops.aten.mm.default", "torch.ops.toy.attn".

    Raises:
        SplitError: `fn` has no name that is valid in other processes, or a piece may not call it.
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
        f"the graph calls {label}, which a plan cannot store by name; make it a custom op (torch.library.Library: "
        f"define, impl, fake), or use torch functions instead",
        actual=label,
    )


def _candidates(fn: Any) -> list[str]:
    if isinstance(fn, _torch.OpOverload | _torch.OpOverloadPacket):
        return [f"torch.ops.{_torch.op_name(fn)}"]
    if isinstance(fn, _torch.HigherOrderOperator):
        return [f"torch.ops.higher_order.{fn.__name__}"]
    short = getattr(fn, "__name__", "")
    module = getattr(fn, "__module__", None)
    names = [f"{module}.{short}"] if module else []
    if short:
        names += [f"torch.{short}", f"_operator.{short}", f"math.{short}", f"builtins.{short}", f"torch.Tensor.{short}"]
    for where, (space, _) in _MODULES.items():
        names += sorted(f"{where}.{name}" for name, value in vars(space).items() if value is fn)
    return names


@lru_cache(maxsize=4096)
def _resolved(name: str) -> Callable[..., Any]:
    if not re.fullmatch(_NAME, name):
        msg = f"{name!r} is not the name of an op. The plan was changed or truncated; warm the model again."
        raise ArtifactError(msg, actual=name)
    root, _, rest = name.partition(".")
    fn: Callable[..., Any] | None = None
    if root == "builtins" and rest in _BUILTINS:
        fn = getattr(builtins, rest)
    elif root == "math" and not rest.startswith("_"):
        fn = getattr(math, rest, None)
    elif root == "_operator" and rest in _OPERATORS:
        fn = getattr(operator, rest, None)
    elif name.startswith("torch.ops."):
        fn = _resolve_op(name)
    elif root == "torch":
        fn = _resolve_torch(name)
    if not callable(fn):
        raise ArtifactError(
            f"{name} is not an op that a piece may call with this torch. If a library provides it, import that "
            f"library first; otherwise warm the model again.",
            actual=name,
        )
    return fn


def _resolve_op(name: str) -> Any:
    namespace, *parts = name.split(".")[2:]
    if namespace == "higher_order":
        return getattr(torch.ops.higher_order, parts[0], None) if parts[0] in RUN_BODIES and len(parts) == 1 else None
    if len(parts) not in (1, 2) or namespace.startswith("__"):
        return None
    is_free = namespace in _COLLECTIVES or not is_torch_op(f"{namespace}::")
    if not is_free and not (namespace in _COMPUTING and _only_computes(namespace, parts[0])):
        return None
    found: Any = getattr(torch.ops, namespace)
    for part in parts:
        found = getattr(found, part, None)
    return found if isinstance(found, _torch.OpOverload | _torch.OpOverloadPacket) else None


def _only_computes(namespace: str, name: str) -> bool:
    """Return whether torch has this op, and it takes no string that could be the name of a file."""
    if namespace == "aten" and name in _WITH_STRINGS:
        return True
    types = _torch.argument_types(f"{namespace}::{name}")
    return types is not None and not any("str" in text for text in types)


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
        return fn if _torch.is_builtin_of_torch(last, fn) and _only_computes("aten", last) else None
    if module not in _MODULES or last.startswith("_"):
        return None
    space, prefix = _MODULES[module]
    fn = getattr(space, last, None)
    if isinstance(fn, FunctionType):
        return fn if module in _WRITTEN_IN_PYTHON and fn.__module__ in _WRITTEN_IN_PYTHON else None
    return fn if isinstance(fn, BuiltinFunctionType) and _only_computes("aten", f"{prefix}{last}") else None


def resolve_target(name: str) -> Callable[..., Any]:
    """Return the function with the name that `target_name` returned.

    Raises:
        ArtifactError: The name is outside the grammar, is not an op, or its library was not imported.
    """
    try:
        return _resolved(name)
    except (AttributeError, RuntimeError) as error:
        raise ArtifactError(f"{name} could not be found: {error}. Warm the model again.", actual=name) from error


def is_method(name: str) -> bool:
    """Return whether a "method" node may call `name` on a tensor."""
    if not callable(getattr(torch.Tensor, name, None)):
        return False
    if name.startswith("__"):
        return name in _METHODS_DUNDER
    return name in _METHODS or (name[:1] != "_" and name not in _METHODS_DENIED and _only_computes("aten", name))


def check_method(name: str) -> str:
    """Return `name` if a "method" node may call it.

    Raises:
        ArtifactError: It is not a method of tensors, or a piece may not call it.
    """
    if not is_method(name):
        msg = f"{name!r} is not a method of tensors that a piece may call. Warm the model again."
        raise ArtifactError(msg, actual=name)
    return name
