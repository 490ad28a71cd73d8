"""Warms a model with the `eager` adaptor in this process, and compares the loaded model with eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import cgtool
from cgtool import CompilationConfig, ExampleCall, ModelSpec
from cgtool.compiler.pipeline import warm
from cgtool.compiler.stitch import stitch
from cgtool.errors import GuardError

EAGER = CompilationConfig(adaptor="eager", jobs=0)


def spec_of(module, *args, dynamic=None, calls=None, method="forward", **kwargs):
    """Return the spec of a model with one example call, or with `calls`."""
    calls = calls or [ExampleCall(args=args, kwargs=kwargs)]
    return ModelSpec(module=module.eval(), calls=calls, dynamic=dynamic or {}, method=method)


def plan_of(module, *args, **options):
    """Trace and split a model."""
    with torch.no_grad():
        return stitch(spec_of(module, *args, **options), None, lambda _: None)


def served(root: Path, module, *args, config=EAGER, **options):
    """Warm a model and load it."""
    with torch.no_grad():
        warm(spec_of(module, *args, **options), config=config, cache_dir=root)
        return cgtool.load(module, cache_dir=root)


def agree(loaded, method, *args, **kwargs):
    """Assert that a call equals eager, and return its result."""
    theirs, ours = copy.deepcopy((args, kwargs)), copy.deepcopy((args, kwargs))
    with torch.no_grad():
        expected = method(*theirs[0], **theirs[1])
        got = loaded(*ours[0], **ours[1])
    assert_same((got, ours), (expected, theirs))
    assert aliases(got, ours, loaded.module) == aliases(expected, theirs, loaded.module)
    return got


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
    ours, theirs = (other.args, dict(other.kwargs)), (one.args, dict(one.kwargs))
    assert_same((got, ours), (expected, theirs))
    assert_same(dict(loaded.module.named_buffers()), dict(eager.named_buffers()))
    assert aliases(got, ours, loaded.module) == aliases(expected, theirs, eager)
    return "equal"


def assert_same(got: Any, expected: Any) -> None:
    """Assert that two values have the same structure and types, and tensors with equal values and strides."""
    have, have_spec = pytree.tree_flatten(got)
    want, want_spec = pytree.tree_flatten(expected)
    assert have_spec == want_spec
    for one, other in zip(have, want, strict=True):
        assert type(one) is type(other), (one, other)
        if isinstance(other, torch.Tensor):
            assert one.stride() == other.stride() or one.numel() <= 1
            torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5, equal_nan=True)
        elif not hasattr(other, "__dict__"):
            assert one == other or repr(one) == repr(other), (one, other)


def aliases(outputs: Any, arguments: Any, module: nn.Module) -> list[Any]:
    """Return which outputs are, or share memory with, which arguments, tensors of the model and other outputs."""
    leaves = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]
    known = [t for t in pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor)]
    others = [*known, *module.parameters(), *module.buffers(), *leaves]
    return [
        (i, j, leaf is other)
        for i, leaf in enumerate(leaves)
        for j, other in enumerate(others)
        if leaf.numel() and leaf.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    ]
