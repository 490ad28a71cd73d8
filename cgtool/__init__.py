"""The public API of cgtool, each name loaded when it is first used.

Must not import torch, nor anything that does: `import cgtool` costs a few milliseconds, and every command that needs no
compiler starts through it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cgtool.api import compile, load  # noqa: A004  the name that a user of torch.compile looks for
    from cgtool.config import CompilationConfig, CompilationLevel, CUDAGraphMode
    from cgtool.errors import CacheMissError, CgtoolError, GuardError
    from cgtool.model import ExampleCall, ModelSpec
    from cgtool.runtime.custom_ops import direct_register_custom_op

__version__ = "0.1.0"

__all__ = [
    "CUDAGraphMode",
    "CacheMissError",
    "CgtoolError",
    "CompilationConfig",
    "CompilationLevel",
    "ExampleCall",
    "GuardError",
    "ModelSpec",
    "__version__",
    "compile",
    "direct_register_custom_op",
    "load",
]

#: Where each public name lives.
_HOMES = {
    "CUDAGraphMode": "cgtool.config",
    "CacheMissError": "cgtool.errors",
    "CgtoolError": "cgtool.errors",
    "CompilationConfig": "cgtool.config",
    "CompilationLevel": "cgtool.config",
    "ExampleCall": "cgtool.model",
    "GuardError": "cgtool.errors",
    "ModelSpec": "cgtool.model",
    "compile": "cgtool.api",
    "direct_register_custom_op": "cgtool.runtime.custom_ops",
    "load": "cgtool.api",
}


def __getattr__(name: str) -> Any:
    """Load a public name from where it lives, once."""
    import importlib  # kept out of start-up, as everything below is

    from cgtool.garbage import uncollected

    if name not in _HOMES:
        message = f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}"
        raise AttributeError(message)
    with uncollected():
        value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
