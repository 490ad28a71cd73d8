"""The unique compiled pieces of a fixture, as a warm would compile them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch

from cgtool.compiler.request import Provider
from cgtool.compiler.stitch import stitch
from cgtool.compiler.wanted import wanted
from cgtool.config import CompilationConfig
from cgtool.events import ignore

FIXTURES = Path(__file__).parents[3] / "fixtures"


def imports_of(fixture):
    """Return what registers a fixture's custom ops, as the prover takes it."""
    names = ("tiny_llama", fixture) if fixture == "tiny_moe" else (fixture,)
    return tuple(Provider(module=name, file=str(FIXTURES / f"{name}.py")) for name in names)


def pieces_of(fixture, *, build=None, **config):
    """Return {identity: piece} of all pieces that a fixture's plan compiles."""
    sys.path.insert(0, str(FIXTURES))
    try:
        factory = importlib.import_module(fixture).build
    finally:
        sys.path.remove(str(FIXTURES))
    with torch.no_grad():
        found = stitch(factory(**(build or {})), None, ignore)
    work = wanted(found.plan, CompilationConfig(**config), found.fallbacks)
    return {item.graph.identity(): item.graph for item in work}
