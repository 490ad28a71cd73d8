"""The unique compiled pieces of a fixture, as a warm would compile them."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import torch

from cgtool.compiler.request import Provider
from cgtool.compiler.stitch import stitch
from cgtool.compiler.wanted import wanted
from cgtool.config import CompilationConfig
from cgtool.events import ignore

FIXTURES = Path(__file__).parents[3] / "fixtures"


def imports_of(fixture):
    """Return the modules that register a fixture's custom ops."""
    names = ("tiny_llama", fixture) if fixture == "tiny_moe" else (fixture,)
    return tuple(Provider(module=name, file=str(FIXTURES / f"{name}.py")) for name in names)


def pieces_of(fixture, *, build=None, general=False):
    """Return all unique pieces that a fixture's plan compiles; with `general`, those of its general variant only."""
    sys.path.insert(0, str(FIXTURES))
    try:
        factory = importlib.import_module(fixture).build
    finally:
        sys.path.remove(str(FIXTURES))
    spec = factory(**(build or {}))
    if general:
        spec = replace(spec, dynamic={name: _from_two(dims) for name, dims in spec.dynamic.items()})
    with torch.no_grad():
        found = stitch(spec, None, ignore)
    work = wanted(found.plan, CompilationConfig(), found.fallbacks)
    return list({item.graph.identity(): item.graph for item in work}.values())


def _from_two(dims):
    """Return dynamic dimensions without size 1, which would get a variant of its own."""
    named = {dim: (name, 1, None) if isinstance(name, str) else name for dim, name in dims.items()}
    return {dim: (name, 2, most) for dim, (name, _, most) in named.items()}
