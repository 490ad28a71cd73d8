"""Warm a module, load it, and hold every call to eager's word: outputs, aliasing, writes to inputs and buffers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import cgtool
from cgtool.compiler.pipeline import warm
from cgtool.config import CompilationConfig
from cgtool.errors import GuardError
from cgtool.model import ExampleCall, ModelSpec


def call(*args: Any, **kwargs: Any) -> ExampleCall:
    return ExampleCall(args=args, kwargs=kwargs)


def config(adaptor: str = "eager", **fields: Any) -> CompilationConfig:
    return CompilationConfig(adaptor=adaptor, **fields)


def warmed(
    module: nn.Module,
    example: ExampleCall,
    cache: Path,
    *,
    dynamic: Mapping[str, Any] | None = None,
    adaptor: str = "eager",
    **fields: Any,
) -> Any:
    """Warm and load `module` as it is; compiled in this process, where a worker for each model costs more than it."""
    spec = ModelSpec(module=module, calls=(copied(example),), dynamic=dict(dynamic or {}))
    with torch.no_grad():
        warm(spec, config=config(adaptor, jobs=0, **fields), cache_dir=cache)
    return cgtool.load(module, cache_dir=cache)


def copied(example: ExampleCall) -> ExampleCall:
    """Copy a call's tensors and keep which of them are one tensor, and their strides."""
    args, kwargs = copy.deepcopy((example.args, dict(example.kwargs)))
    return dataclasses.replace(example, args=args, kwargs=kwargs)


def outcome(eager: nn.Module, loaded: Any, make: Callable[[], ExampleCall]) -> str:
    """Call both models and return "equal" or "refused"; anything else is an assertion that fails.

    `loaded` runs a module whose tensors were equal to those of `eager` before.
    """
    one, other = make(), make()
    with torch.no_grad():
        torch.manual_seed(7)
        expected = eager(*one.args, **one.kwargs)
        try:
            torch.manual_seed(7)
            got = loaded(*other.args, **other.kwargs)
        except GuardError as error:
            assert len(str(error)) > 20  # noqa: PT017 - a call may be refused or served
            eager.load_state_dict(loaded.module.state_dict())
            return "refused"
    assert_same(got, expected)
    assert_same((other.args, dict(other.kwargs)), (one.args, dict(one.kwargs)))
    assert_same(dict(loaded.module.named_buffers()), dict(eager.named_buffers()))
    assert aliases(got, other, loaded.module) == aliases(expected, one, eager)
    return "equal"


def assert_same(got: Any, expected: Any) -> None:
    """Hold two values to be of one structure, of equal types, and their tensors equal with their strides."""
    have, have_spec = pytree.tree_flatten(got)
    want, want_spec = pytree.tree_flatten(expected)
    assert type(got) is type(expected)
    assert have_spec == want_spec
    for one, other in zip(have, want, strict=True):
        assert type(one) is type(other), (one, other)
        if isinstance(other, torch.Tensor):
            assert one.stride() == other.stride() or one.numel() <= 1
            close = 2e-2 if other.dtype in {torch.bfloat16, torch.float16} else 2e-5
            torch.testing.assert_close(one, other, rtol=close, atol=close, equal_nan=True)
        elif not hasattr(other, "__dict__"):
            assert one == other or repr(one) == repr(other), (one, other)


def aliases(outputs: Any, given: ExampleCall, module: nn.Module) -> list[Any]:
    """Return which outputs are, or share memory with, which inputs and other outputs."""
    leaves = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]
    known = [t for t in pytree.tree_leaves((given.args, dict(given.kwargs))) if isinstance(t, torch.Tensor)]
    known += [*module.parameters(), *module.buffers()]
    others = known + leaves
    return [
        (i, j, leaf is other)
        for i, leaf in enumerate(leaves)
        for j, other in enumerate(others)
        if leaf.numel() and leaf.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    ]
