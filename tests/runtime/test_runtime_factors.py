"""Environment factors: what changes them, and what does not."""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_harness import forked

from cgtool.runtime import factors

pytestmark = pytest.mark.torch

SOURCE = """
import json, sys
from cgtool.runtime.factors import environment_factors
factors = environment_factors()
heavy = ("torch._inductor", "torch._dynamo", "sympy", "triton")
print(json.dumps([factors, [name for name in heavy if name in sys.modules]]))
"""
NAMES = ["torch", "triton", "python", "compiler", "target", "precision", "inductor_environment", "inductor"]


def test_a_new_process_finds_the_same_factors_without_heavy_imports_wherever_its_folders_are(tmp_path):
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent.parent.parent),
        "HOME": str(tmp_path),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "MASTER_PORT": "29501",
        "PYTHONHASHSEED": "7",
        "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
    }
    done = subprocess.run([sys.executable, "-c", SOURCE], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    found, heavy = json.loads(done.stdout)
    assert heavy == []
    assert list(found) == NAMES
    plain = factors.environment_factors()
    variables = {**plain["inductor_environment"], "TORCHINDUCTOR_MAX_AUTOTUNE": "1"}
    assert found == {**plain, "inductor_environment": variables}


def test_importing_inductor_changes_no_factor_but_changing_its_settings_does():
    plain = forked_factors()
    importlib.import_module("torch._inductor.compile_fx")
    import torch._inductor.config as inductor

    assert factors.environment_factors() == plain
    with inductor.patch(max_fusion_size=3):
        assert factors.environment_factors() == {**plain, "inductor": {"max_fusion_size": 3}}
    assert factors.environment_factors() == plain
    with inductor.patch({"compile_threads": 3, "trace.debug_dir": "/x"}):
        assert factors.environment_factors() == plain


def forked_factors():
    """Return the factors of a process that has not imported Inductor."""
    ran = forked(SOURCE)
    assert ran.code == 0, ran.err
    found, heavy = json.loads(ran.out)
    assert heavy == []
    return found


@pytest.mark.parametrize("backend", ["", "cuda.matmul.", "cudnn.", "cudnn.conv.", "mkldnn.", "mkldnn.matmul."])
def test_the_precision_of_each_backend_is_a_factor(backend):
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
