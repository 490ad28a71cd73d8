"""Two ranks: `torchrun … cgtool warm` fills a folder for each, compiles once between them, and both load and agree."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_harness import torchrun, units

pytestmark = pytest.mark.torch

MODEL = Path(__file__).with_name("ranks_model.py")


def test_two_ranks_compile_once_between_them_and_equal_the_whole_model(tmp_path, worded_site):
    root = tmp_path / "cache"
    options = ("--json", "--quiet", "--jobs", "0", "--no-proof", "--adaptor", "worded")
    arguments = ("warm", f"{MODEL}:build", "--cache-dir", root, *options)
    reports = torchrun(worded_site, tmp_path / "warm", "-m", "cgtool", *arguments)
    assert sorted(report["rank"] for report in reports) == [0, 1]
    assert len({report["hash"] for report in reports}) == 1
    assert sum(report["compiled"] for report in reports) == units(root) == 3
    for rank in (0, 1):
        assert len(list(root.glob(f"torch_compile_cache/*/rank_{rank}/*/manifest.json"))) == 1
    # Each holds half of the weights; the sums over both equal the model that holds all.
    loaded = torchrun(worded_site, tmp_path / "load", MODEL, root)
    assert loaded == [{"rank": rank, "equal": [True] * 3} for rank in (0, 1)]
