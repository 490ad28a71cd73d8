"""The public API of cgtool, with every name imported on first use.

Must not import torch, directly or indirectly: every command imports this package, and most need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cgtool.adaptor_registry import register_adaptor
    from cgtool.api import compile, load  # noqa: A004  named like torch.compile
    from cgtool.compiler.adaptors.interface import CompiledPiece, CompilerInterface
    from cgtool.config import CompilationConfig
    from cgtool.config_values import CompilationLevel, CUDAGraphMode
    from cgtool.decorator import support_torch_compile
    from cgtool.errors import CacheMissError, CgtoolError, GraphError, GuardError
    from cgtool.host import counters
    from cgtool.model import ExampleCall, ModelSpec, Serving
    from cgtool.runtime.custom_ops import direct_register_custom_op
    from cgtool.serving.batch import BatchLimits, Request
    from cgtool.serving.capture import capture_cudagraphs
    from cgtool.serving.check import check_model
    from cgtool.serving.dispatcher import CudagraphDispatcher
    from cgtool.serving.forward_context import (
        BatchDescriptor,
        Context,
        DPMetadata,
        ForwardContext,
        get_forward_context,
        reset_forward_context,
        set_forward_context,
    )
    from cgtool.serving.model import GraphedModel
    from cgtool.serving.modes import AttentionCGSupport
    from cgtool.serving.runner import ModelRunner
    from cgtool.serving.wrapper import CUDAGraphWrapper

__version__ = "0.1.0"

__all__ = [
    "AttentionCGSupport",
    "BatchDescriptor",
    "BatchLimits",
    "CUDAGraphMode",
    "CUDAGraphWrapper",
    "CacheMissError",
    "CgtoolError",
    "CompilationConfig",
    "CompilationLevel",
    "CompiledPiece",
    "CompilerInterface",
    "Context",
    "CudagraphDispatcher",
    "DPMetadata",
    "ExampleCall",
    "ForwardContext",
    "GraphError",
    "GraphedModel",
    "GuardError",
    "ModelRunner",
    "ModelSpec",
    "Request",
    "Serving",
    "__version__",
    "capture_cudagraphs",
    "check_model",
    "compile",
    "counters",
    "direct_register_custom_op",
    "get_forward_context",
    "load",
    "register_adaptor",
    "reset_forward_context",
    "set_forward_context",
    "support_torch_compile",
]

#: The module of each public name.
_HOMES = {
    "AttentionCGSupport": "cgtool.serving.modes",
    "BatchDescriptor": "cgtool.serving.forward_context",
    "CUDAGraphMode": "cgtool.config_values",
    "CUDAGraphWrapper": "cgtool.serving.wrapper",
    "CacheMissError": "cgtool.errors",
    "CgtoolError": "cgtool.errors",
    "CompilationConfig": "cgtool.config",
    "CompilationLevel": "cgtool.config_values",
    "CompiledPiece": "cgtool.compiler.adaptors.interface",
    "CompilerInterface": "cgtool.compiler.adaptors.interface",
    "Context": "cgtool.serving.forward_context",
    "CudagraphDispatcher": "cgtool.serving.dispatcher",
    "DPMetadata": "cgtool.serving.forward_context",
    "ExampleCall": "cgtool.model",
    "ForwardContext": "cgtool.serving.forward_context",
    "GraphedModel": "cgtool.serving.model",
    "GraphError": "cgtool.errors",
    "GuardError": "cgtool.errors",
    "BatchLimits": "cgtool.serving.batch",
    "ModelRunner": "cgtool.serving.runner",
    "ModelSpec": "cgtool.model",
    "Request": "cgtool.serving.batch",
    "Serving": "cgtool.model",
    "capture_cudagraphs": "cgtool.serving.capture",
    "check_model": "cgtool.serving.check",
    "compile": "cgtool.api",
    "counters": "cgtool.host",
    "direct_register_custom_op": "cgtool.runtime.custom_ops",
    "get_forward_context": "cgtool.serving.forward_context",
    "load": "cgtool.api",
    "register_adaptor": "cgtool.adaptor_registry",
    "reset_forward_context": "cgtool.serving.forward_context",
    "set_forward_context": "cgtool.serving.forward_context",
    "support_torch_compile": "cgtool.decorator",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    import importlib  # these imports are lazy, too, so that `import cgtool` stays cheap

    from cgtool.host import gc_paused

    if name not in _HOMES:
        message = f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}"
        raise AttributeError(message)
    with gc_paused():
        value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
