"""Factors of the environment: what changes them, what does not, and what reading them costs."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cgtool.runtime import factors

pytestmark = pytest.mark.torch

SOURCE = """
import json, sys
from cgtool.runtime.factors import environment_factors
heavy = ("torch._inductor", "torch._dynamo", "sympy", "triton")
found = []
for step in json.loads(sys.argv[1]):
    exec(step)
    found.append(environment_factors())
    if step == "":
        found.append([name for name in heavy if name in sys.modules])
print(json.dumps(found))
"""
NAMES = ["torch", "triton", "python", "compiler", "target", "precision", "inductor_environment", "inductor"]


def factors_after(*steps, **changes):
    """Return the factors of a fresh process after each step; after the empty step also what heavy things it loaded."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent), **changes}
    done = subprocess.run(
        [sys.executable, "-c", SOURCE, json.dumps(steps)], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_inductor_changes_nothing_and_changing_it_does():
    plain, loaded, imported, patched, places, changed = factors_after(
        "",
        "import torch._inductor.config as c, torch._inductor.compile_fx",
        "with c.patch(max_fusion_size=3): pass",
        "c.compile_threads = 3; c.trace.debug_dir = '/x'",
        "c.max_fusion_size = 3",
    )
    assert loaded == []
    assert list(plain) == NAMES
    assert imported == patched == places == plain
    assert changed == {**plain, "inductor": {"max_fusion_size": 3}}


def test_where_things_are_changes_nothing_and_what_changes_code_is_named(tmp_path):
    [found, _] = factors_after(
        "",
        HOME=str(tmp_path),
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path),
        MASTER_PORT="29501",
        PYTHONHASHSEED="7",
        TORCHINDUCTOR_MAX_AUTOTUNE="1",
    )
    plain = factors.environment_factors()
    variables = {**plain["inductor_environment"], "TORCHINDUCTOR_MAX_AUTOTUNE": "1"}
    assert found == {**plain, "inductor_environment": variables}


@pytest.mark.parametrize("backend", ["", "cuda.matmul.", "cudnn.", "cudnn.conv.", "mkldnn.", "mkldnn.matmul."])
def test_the_precision_of_each_backend_is_a_factor_however_they_differ(backend):
    *path, last = f"{backend}fp32_precision".split(".")
    owner = functools.reduce(getattr, path, torch.backends)
    before, was = factors.environment_factors()["precision"], getattr(owner, last)
    other = "ieee" if was == "tf32" else "tf32"
    setattr(owner, last, other)
    try:
        assert factors.environment_factors()["precision"] != before
    finally:
        setattr(owner, last, was)
    assert factors.environment_factors()["precision"] == before


def test_precision_is_a_factor():
    before = factors.environment_factors()["precision"]
    torch.set_float32_matmul_precision("high")
    try:
        assert factors.environment_factors()["precision"] != before
    finally:
        torch.set_float32_matmul_precision("highest")
    assert factors.environment_factors()["precision"] == before
