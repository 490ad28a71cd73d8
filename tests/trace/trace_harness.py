"""Warms a model with the `eager` adaptor, in this process, and holds what was loaded to eager's word."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch.utils import _pytree as pytree

import cgtool
from cgtool import CompilationConfig, ExampleCall, ModelSpec
from cgtool.compiler.pipeline import warm
from cgtool.compiler.stitch import stitch

EAGER = CompilationConfig(adaptor="eager")


def spec_of(module, *args, dynamic=None, calls=None, method="forward", **kwargs):
    """Return the spec of a model with one example call, or with `calls`."""
    calls = calls or [ExampleCall(args=args, kwargs=kwargs)]
    return ModelSpec(module=module.eval(), calls=calls, dynamic=dynamic or {}, method=method)


def plan_of(module, *args, **options):
    """Return what tracing and splitting a model give."""
    with torch.no_grad():
        return stitch(spec_of(module, *args, **options), None, lambda _: None)


def served(root: Path, module, *args, **options):
    """Warm a model and load it."""
    with torch.no_grad():
        warm(spec_of(module, *args, **options), config=EAGER, cache_dir=root)
        return cgtool.load(module, cache_dir=root)


def agree(loaded, method, *args, **kwargs):
    """Hold one call to eager's word, and return what the model returned."""
    theirs, ours = copy.deepcopy((args, kwargs)), copy.deepcopy((args, kwargs))
    with torch.no_grad():
        expected = method(*theirs[0], **theirs[1])
        got = loaded(*ours[0], **ours[1])
    assert type(got) is type(expected)
    have, have_spec = pytree.tree_flatten(got)
    want, want_spec = pytree.tree_flatten(expected)
    assert have_spec == want_spec
    for one, other in zip(have, want, strict=True):
        assert type(one) is type(other), (one, other)
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other)
        elif not hasattr(other, "__dict__"):
            assert one == other
    return got
