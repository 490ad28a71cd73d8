"""All private names of torch that `cgtool.graph` uses, as of torch 2.13.0, unchanged since 2.11.

Must not import torch._dynamo, torch._inductor or sympy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

__all__ = ["HigherOrderOperator", "OpOverload", "OpOverloadPacket"]

#: Namespaces of builtin functions, in lookup order.
VARIABLE_FUNCTIONS: Any = torch._C._VariableFunctions
NATIVE_NN: Any = torch._C._nn


def is_builtin_of_torch(name: str, fn: object) -> bool:
    """Return whether `fn` is the function `torch.<name>` of ATen's bindings."""
    return getattr(VARIABLE_FUNCTIONS, name, None) is fn


def argument_types(name: str) -> list[str] | None:
    """Return the argument types of all overloads of the op `ns::name`, or None if there is no such op.

    Overloads for named dimensions (`mean.names_dim`, until torch 2.12) are left out: their schemas contain strings.
    """
    overloads = torch._C._jit_get_schemas_for_operator(name)
    schemas = [schema for schema in overloads if "name" not in schema.overload_name.lower()]
    return [str(argument.type) for schema in schemas for argument in schema.arguments] if schemas else None


def op_name(op: Any) -> str:
    """Return `namespace.name.overload` of an overload, `namespace.name` of a packet."""
    return str(op)


def share_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors, real or fake, share a storage."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
