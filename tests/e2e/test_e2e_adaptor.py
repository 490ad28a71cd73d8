"""An adaptor that another distribution brings takes a model the whole way, in every process that is started for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from e2e_harness import REPO, cgtool, python, warm

pytestmark = pytest.mark.torch

MODEL = f"{REPO / 'tests/cli/cli_sample_model.py'}:build"
ADAPTOR = '''
"""A compiler whose artifact is the piece itself, under a word of its own."""

import sys

from cgtool import CompiledPiece, CompilerInterface
from cgtool.plan.grammar import canonical_json, digest_of
from cgtool.runtime.program import piece_function

WORD = b"worded\\n"


class Worded(CompilerInterface):
    name = "worded"

    def compute_hash(self, options, *, max_autotune=False):
        return digest_of({"adaptor": self.name, "options": options})

    def compile(self, graph, *, options, max_autotune=False):
        with open(options["log"], "a") as log:
            log.write(f"{sys.argv[0]}\\n")
        return CompiledPiece(artifact=WORD + graph.canonical(), kernels=1)

    def load(self, data, graph):
        if data != WORD + graph.canonical():
            raise ValueError("another piece")
        return piece_function(graph)
'''
COMPARE = """
import sys
import torch
import cgtool
sys.path.insert(0, sys.argv[2])
import cli_sample_model
torch.manual_seed(1)
spec = cli_sample_model.build()
spec.module.eval()
loaded = cgtool.load(spec.module, cache_dir=sys.argv[1])
with torch.no_grad():
    for rows in (1, 3, 9):
        x = torch.rand(rows, 8)
        torch.testing.assert_close(loaded(x), spec.module(x))
"""


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """An environment in which a distribution that brings the adaptor is installed."""
    site = tmp_path / "site"
    metadata = site / "worded-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: worded\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[cgtool.adaptors]\nworded = worded_adaptor:Worded\n")
    (site / "worded_adaptor.py").write_text(ADAPTOR)
    return {"PYTHONPATH": os.pathsep.join([str(site), str(REPO)])}


def compared(root, **options):
    return python("-c", COMPARE, root, REPO / "tests/cli", **options)


def test_an_adaptor_of_another_distribution_warms_travels_and_loads(installed, tmp_path, cache_root):
    log = tmp_path / "log"
    arguments = ("--adaptor", "worded", "--jobs", "1", "--inductor-config", f'{{"log": "{log}"}}')
    report = warm(MODEL, cache_root, *arguments, env=installed)
    assert (report["compiled"], report["notes"]) == (4, [])
    assert log.read_text().split() == ["-c"] * 4  # a worker's program
    assert warm(MODEL, cache_root, *arguments, env=installed)["hit"]

    bundle, there = tmp_path / "bundle.tar.zst", tmp_path / "there"
    assert cgtool("export", bundle, "--cache-dir", cache_root, env=installed).code == 0
    taken = cgtool("import", bundle, "--trust", "--cache-dir", there, env=installed)
    assert taken.code == 0, taken.err
    assert {path.suffix for path in there.rglob("artifacts/*")} == {".worded"}
    verified = cgtool("verify", "--load", "--cache-dir", there, env=installed)
    assert verified.code == 0, verified.out + verified.err
    shown = cgtool("inspect", "cache", there, "--json", env=installed).report
    assert [entry["adaptor"] for entry in shown["entries"]] == ["worded"]
    done = compared(there, env=installed)
    assert done.code == 0, done.err


def test_where_the_distribution_is_not_installed_it_is_named(installed, tmp_path, cache_root):
    log = tmp_path / "log"
    arguments = ("--adaptor", "worded", "--jobs", "0", "--no-proof", "--inductor-config", f'{{"log": "{log}"}}')
    warm(MODEL, cache_root, *arguments, env=installed)
    done = compared(cache_root)
    assert "ConfigError: There is no adaptor 'worded'" in done.err
    assert "entry-point group cgtool.adaptors" in done.err
    bundle = tmp_path / "bundle.tar.zst"
    assert cgtool("export", bundle, "--cache-dir", cache_root, env=installed).code == 0
    taken = cgtool("import", bundle, "--trust", "--cache-dir", tmp_path / "there")
    assert taken.code == 3
    assert "of a kind that no adaptor here makes" in taken.err
    refused = cgtool("warm", MODEL, "--adaptor", "worded", "--cache-dir", tmp_path / "new")
    assert refused.code == 2
    assert "adaptors are aot_inductor, inductor_standalone, inductor, eager" in refused.err
