"""Callables that behave like their model, and functions that behave like a model."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any

from torch import nn

#: Methods that return the module for chaining; through the callable they return the callable.
_CHAINED = frozenset(
    {"eval", "train", "to", "cpu", "cuda", "half", "float", "double", "bfloat16", "type", "requires_grad_", "apply"}
    | {"share_memory", "zero_grad"}
)


class AsModule(abc.ABC):
    """Forwards attributes to `module`: `state_dict`, `parameters`, `eval`, `to`, `config`, ...

    Setting or deleting an attribute sets or deletes it on the module, so that calls see it: `served.cache = None`.

    Attributes:
        module: The live model.
    """

    module: nn.Module
    #: Attributes that are stored on this object rather than on the module.
    _OWN: frozenset[str] = frozenset()

    @abc.abstractmethod
    def recheck(self) -> None:
        """Check all guards on the model and on globals again, after a deliberate change to the model.

        Raises:
            GuardError: A guard no longer holds; the message names it.
        """

    def __getattr__(self, name: str) -> Any:
        if name == "module" or name.startswith("__"):  # not set yet, or looked up by copy and pickle
            raise AttributeError(name)
        value = getattr(self.module, name)
        if name not in _CHAINED:
            return value

        @functools.wraps(value)
        def chained(*args: Any, **kwargs: Any) -> Any:
            value(*args, **kwargs)
            return self

        return chained

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN or name.startswith("__"):
            object.__setattr__(self, name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        if name in vars(self):
            object.__delattr__(self, name)
        else:
            delattr(self.module, name)


class FunctionModel(nn.Module):
    """A model whose forward is a function. Modules that the function calls are not registered as children.

    Args:
        function: The function to compile.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function
        self.eval()
