"""Wrap a plain function as a model, so that it can be traced, found and called like one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class FunctionModel(nn.Module):
    """A model whose forward is a function. Modules that the function calls are not registered as children.

    Args:
        function: The function to compile.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function
        self.eval()
