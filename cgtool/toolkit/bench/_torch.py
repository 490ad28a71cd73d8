"""Private torch APIs that torch's own ways to start need, verified in torch 2.13.0 and 2.11.

Importing this module imports Dynamo. Only starts that need Dynamo import it, within their measured time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo


def mark_dynamic(tensors: Iterable[tuple[torch.Tensor, tuple[int, ...]]]) -> None:
    """Mark the dimensions that the model's factory declares dynamic."""
    for tensor, dims in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, list(dims))


def precompile(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], path: Path
) -> tuple[str, ...]:
    """Compile with torch's AOT precompile into one file; return notes."""
    try:
        compiled: Any = torch.compile(function, fullgraph=True)
        compiled.aot_compile((args, kwargs)).save_compiled_function(str(path))
    except Exception as error:  # the class depends on the torch version, so the message is matched
        # Guards that torch cannot serialize have to be dropped by a filter. This one ships with torch.
        keep = getattr(torch.compiler, "keep_portable_guards_unsafe", None)
        if keep is None or "guard" not in str(error).lower():
            raise
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, options={"guard_filter_fn": keep})
        compiled.aot_compile((args, kwargs)).save_compiled_function(str(path))
        return ("only guards on tensors, shapes and global state are kept; torch could not serialize the others",)
    return ()


def load_precompiled(path: Path) -> Callable[..., Any]:
    """Load a precompiled function; its first argument is the module."""
    with path.open("rb") as file:
        loaded: Callable[..., Any] = torch.compiler.load_compiled_function(file)
    return loaded
