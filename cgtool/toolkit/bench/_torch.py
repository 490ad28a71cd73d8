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


def precompile(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], path: Path
) -> tuple[str, ...]:
    """Compile ahead of time with torch's own means, into one file."""
    try:
        compiled: Any = torch.compile(function, fullgraph=True)
        compiled.aot_compile((args, kwargs)).save_compiled_function(str(path))
    except Exception as error:  # of several classes in several versions: only its words tell what it is
        # Guards that torch cannot write down are the user's to drop, with a filter such as this one of torch's.
        keep = getattr(torch.compiler, "keep_portable_guards_unsafe", None)
        if keep is None or "guard" not in str(error).lower():
            raise
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, options={"guard_filter_fn": keep})
        compiled.aot_compile((args, kwargs)).save_compiled_function(str(path))
        return (
            "only guards on tensors, shapes and global state are kept, since torch could not write down the others",
        )
    return ()


def load_precompiled(path: Path) -> Callable[..., Any]:
    """Return the function of such a file; it takes the module first."""
    with path.open("rb") as file:
        loaded: Callable[..., Any] = torch.compiler.load_compiled_function(file)
    return loaded
