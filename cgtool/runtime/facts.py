"""What is known of a model without tracing it: facts that lead to an entry, and factors that must equal its own.

Cheap on purpose: no file is read and nothing is run. The environment's factors come from `cgtool.guards.environment`.
"""

from __future__ import annotations

from typing import Any

import torch

from cgtool.digests import digest_of
from cgtool.guards.environment import environment_factors
from cgtool.guards.names import qualified_name
from cgtool.pieces import Json
from cgtool.records import dataclass


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The live side of a key.

    Args:
        lookup: The digest of what the model is; it leads to candidates.
        factors: Factors by name: "model", "state" and those of the environment.
    """

    lookup: str
    factors: dict[str, Json]


def facts_of(module: torch.nn.Module) -> Facts:
    """Return the facts of `module` as it is now."""
    model = {"class": qualified_name(type(module))}
    state = state_of(module)
    return Facts(
        lookup=digest_of([model, state]),
        factors={"model": model, "state": state, **environment_factors()},
    )


def state_of(module: torch.nn.Module) -> Json:
    """Return the module's tensors by name ("float32[64, 128] cpu"), and which names share one tensor."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    tensors: dict[str, str] = {}
    for kind in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        for name, tensor in kind:
            tensors[name] = _spelled(tensor)
            other = first.setdefault(id(tensor), name)
            if other != name:
                tied[name] = other
    return {"tensors": tensors, "tied": tied}


def _spelled(tensor: Any) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)} {tensor.device.type}{_layout(tensor)}"


def _layout(tensor: Any) -> str:
    """Return what is unusual about how a tensor lies in memory; a stride of a dimension of size 1 says nothing."""
    if tensor.layout is not torch.strided:
        return f" {tensor.layout}"
    if tensor.is_contiguous():
        return ""
    return f" strides {[step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]}"
