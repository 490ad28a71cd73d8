"""A plain function in the place of a model, so that it is traced, found and called as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class FunctionModel(nn.Module):
    """A model whose forward is a function; the modules that the function calls stay its own.

    Args:
        function: What is compiled.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function
        self.eval()
