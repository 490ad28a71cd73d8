"""Environment factors: what changes them, and what does not."""

from __future__ import annotations

import functools
import importlib
import json

import pytest
import torch
from cli_harness import environment, forked

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


def forked_factors(**changes):
    """Return the factors of a process that has imported nothing but torch and what loads."""
    ran = forked(SOURCE, env=environment(**changes))
    assert ran.code == 0, ran.err
    found, heavy = json.loads(ran.out)
    assert heavy == []
    return found


def test_folders_and_ports_change_no_factor_but_variables_that_change_code_do(tmp_path):
    found = forked_factors(
        HOME=str(tmp_path),
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path),
        MASTER_PORT="29501",
        TORCHINDUCTOR_MAX_AUTOTUNE="1",
    )
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
