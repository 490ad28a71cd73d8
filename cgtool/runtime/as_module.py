"""What people ask of a module in their hands, asked of a callable that runs one: the module answers."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

#: Methods of a module that return it, to be chained: here they return the callable.
_CHAINED = frozenset(
    {"eval", "train", "to", "cpu", "cuda", "half", "float", "double", "bfloat16", "type", "requires_grad_", "apply"}
)


class AsModule:
    """Has every attribute of `module` that it has not itself: `state_dict`, `parameters`, `eval`, `to`, `config`, ...

    Attributes:
        module: The live model.
    """

    module: nn.Module

    def __getattr__(self, name: str) -> Any:
        if name == "module" or name.startswith("__"):  # not there yet, or asked for by copy and pickle
            raise AttributeError(name)
        value = getattr(self.module, name)
        if name not in _CHAINED:
            return value

        @functools.wraps(value)
        def chained(*args: Any, **kwargs: Any) -> Any:
            value(*args, **kwargs)
            return self

        return chained
