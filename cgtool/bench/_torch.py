"""The private names of torch that its own ways to start need, each read in torch 2.13.0 and 2.11.

Importing this module imports Dynamo: only a start that needs it does so, within the time that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo


def mark_dynamic(tensors: Iterable[tuple[torch.Tensor, tuple[int, ...]]]) -> None:
    """Tell Dynamo which dimensions change from call to call, as the model's factory told cgtool."""
    for tensor, dims in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, list(dims))


def precompile(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], path: Path) -> None:
    """Compile ahead of time with torch's own means, into one file.

    Raises:
        Exception: Whatever torch raises where it cannot.
    """
    compiled: Any = torch.compile(function, fullgraph=True)
    compiled.aot_compile((args, kwargs)).save_compiled_function(str(path))


def load_precompiled(path: Path) -> Callable[..., Any]:
    """Return the function of such a file; it takes the module first."""
    with path.open("rb") as file:
        loaded: Callable[..., Any] = torch.compiler.load_compiled_function(file)
    return loaded
