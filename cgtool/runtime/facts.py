"""What is known of a model without tracing it: facts that lead to an entry, and factors that must equal its own.

Cheap on purpose: no file is read and nothing is run. The environment's factors come from `cgtool.guards.environment`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cgtool import host
from cgtool.digests import digest_of
from cgtool.guards import environment
from cgtool.guards.names import qualified_name
from cgtool.pieces import Json
from cgtool.records import dataclass


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The live side of a key.

    Args:
        lookup: The digest of what the model is; it leads to candidates.
        known: Factors by name: "model", "state" and those of the environment, but for the compiler.
    """

    lookup: str
    known: dict[str, Json]

    @property
    def compiler(self) -> str | None:
        """What the C++ compiler says of itself, or None where none works; waits for it."""
        return host.compiler_version()

    @property
    def factors(self) -> dict[str, Json]:
        """All factors by name."""
        return {**self.known, "compiler": self.compiler}


def facts_of(module: torch.nn.Module) -> Facts:
    """Return the facts of `module` as it is now."""
    host.ask_compiler()  # it answers while the model is looked at
    model = {"class": qualified_name(type(module))}
    state = state_of(module)
    return Facts(
        lookup=digest_of([model, state]),
        known={"model": model, "state": state, **environment.factors_but_compiler()},
    )


def state_of(module: torch.nn.Module) -> Json:
    """Return the module's tensors by name ("float32[64, 128] cpu"), and which names share one tensor."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    tensors: dict[str, str] = {}
    spelled: dict[Any, str] = {}
    holders = list(_modules(module, ""))
    for kind in ("_parameters", "_buffers"):
        for prefix, held in holders:
            for own, tensor in vars(held)[kind].items():
                if tensor is None:
                    continue
                name = prefix + own
                steps = tensor.stride() if tensor.layout is torch.strided else None  # a CSR tensor has none
                make = tensor.dtype, tensor.shape, steps, tensor.device, tensor.layout
                if make not in spelled:
                    spelled[make] = _spelled(tensor)
                tensors[name] = spelled[make]
                other = first.setdefault(id(tensor), name)
                if other != name:
                    tied[name] = other
    return {"tensors": tensors, "tied": tied}


def _modules(module: torch.nn.Module, prefix: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield every module under every name, with that name and a dot: `named_modules` costs much more."""
    pending = [(prefix, module)]
    while pending:
        prefix, module = pending.pop()
        yield prefix, module
        children = vars(module)["_modules"]
        pending += [(f"{prefix}{name}.", child) for name, child in reversed(children.items()) if child is not None]


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
