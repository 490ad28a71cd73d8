"""Collectives in forward: compiled under fake process groups, proved and called by all ranks together."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
from e2e_harness import cgtool, forked_ranks, two_ranks

pytest.importorskip("torch")

import torch

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
]

MODELS = Path(__file__).with_name("collectives_model.py")
SERVED = (
    "InPlace",
    "AllReduce",
    "ByName",
    "AllGather",
    "ReduceScatter",
    "AllToAll",
    "Subgroup",
    "TwoGroups",
    "CustomOp",
    "Mesh",
)
WRONG = (r"Rank 1 failed: The compiled call does not match", r"does not match the model")
REFUSED = {
    "WrongOnOne": WRONG,
    "WrongAtItsOnlySize": WRONG,
}


def results_of(folder, adaptor, jobs, *names, ranks=2, **env):
    """Return the results of each rank for each model, and the manifests."""
    results = forked_ranks(env, MODELS, folder / "cache", adaptor, jobs, *names, ranks=ranks)
    return results, [json.loads(path.read_text()) for path in (folder / "cache").rglob("manifest.json")]


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory):
    return results_of(tmp_path_factory.mktemp("two"), "eager", 0, *SERVED, *REFUSED)


@pytest.mark.parametrize("name", SERVED)
def test_two_ranks_serve_a_model_with_collectives(of_two_ranks, name):
    for results in of_two_ranks[0]:
        assert all(equal is True for equal in results[name]), results[name]


@pytest.mark.parametrize("name", REFUSED)
def test_each_rank_reports_a_failed_proof(of_two_ranks, name):
    for results, message in zip(of_two_ranks[0], REFUSED[name], strict=True):
        assert re.search(message, results[name]), results[name]


def test_all_ranks_prove_calls_with_collectives_together(of_two_ranks):
    _, manifests = of_two_ranks
    assert len(manifests) == 2 * len(SERVED)
    assert len({manifest["hash"] for manifest in manifests}) == len(SERVED)  # an entry has both ranks
    for variant in (variant for manifest in manifests for variant in manifest["variants"]):
        assert "proof_gap" not in variant, variant["proof_gap"]
        assert variant["proved_at"]


def warmed_by_one_process(folder, size, *options):
    arguments = (f"{MODELS}:build", "--cache-dir", folder / "cache", "--world-size", size, *options, "--json")
    report = cgtool("warm", *arguments, forks=True).report
    assert any("was not run: it has collectives" in note for note in report["notes"])


def test_a_worker_outside_the_group_compiles_a_piece_with_collectives(tmp_path):
    warmed_by_one_process(tmp_path, 2, "--splitting-ops", "", "--jobs", 1)
    manifests = [json.loads(path.read_text()) for path in tmp_path.rglob("manifest.json")]
    first, second = [row["artifact"] for manifest in manifests for row in manifest["rows"]]
    assert first["digest"] == second["digest"]
    assert first["kind"] == "pt2"


def test_native_code_that_never_releases_the_gil_ends_with_an_error(tmp_path):
    options = ("--jobs", 0, "--adaptor", "eager", "--compile-timeout", 2)
    ran = cgtool("warm", f"{MODELS}:build_alone", "--arg", "name=Holding", "--cache-dir", tmp_path, *options)
    assert ran.code == -signal.SIGKILL
    assert "Error: Native code held Python's lock for 2 s (compile_timeout) while whole calls were proved" in ran.err


def test_a_warm_rank_takes_part_in_the_proof_of_a_cold_one(tmp_path):
    for _ in range(2):
        ended = two_ranks(f"{MODELS}:build_together", tmp_path, "--arg", "name=AllReduce")
        assert [ran.code for ran in ended] == [0, 0], ended
        manifests = {path.parts[-3]: json.loads(path.read_text()) for path in tmp_path.rglob("manifest.json")}
        assert sorted(manifests) == ["rank_0", "rank_1"]
        assert all(variant["proved_at"] for manifest in manifests.values() for variant in manifest["variants"])
        (folder,) = tmp_path.glob("torch_compile_cache/*/rank_1")
        shutil.rmtree(folder)
    assert "was warm already" in ended[0].out


def test_a_factory_that_creates_the_group_itself_gets_a_hint(tmp_path):
    options = ("--arg", "name=TwoGroups", "--cache-dir", tmp_path, "--world-size", 2)
    ran = cgtool("warm", f"{MODELS}:build_alone", *options, forks=True)
    assert ran.code == 1
    assert "`if not torch.distributed.is_initialized():`" in ran.err


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_load_an_entry_that_one_process_warmed_under_a_fake_group(tmp_path, size):
    warmed_by_one_process(tmp_path, size, "--jobs", 0, "--adaptor", "eager")
    results, manifests = results_of(tmp_path, "eager", 0, "TwoGroups", ranks=size, ONLY_LOAD="1")
    assert results == [{"TwoGroups": [True] * 3}] * size
    assert sorted(manifest["rank"] for manifest in manifests) == list(range(size))


@pytest.mark.slow
def test_four_ranks_reduce_in_pairs_and_all_together_between_compiled_pieces(tmp_path):
    results, manifests = results_of(tmp_path, "aot_inductor", 1, "TwoGroups", ranks=4)
    assert results == [{"TwoGroups": [True] * 3}] * 4
    assert len({row["artifact"]["digest"] for manifest in manifests for row in manifest["rows"]}) == 2
    assert all(variant["proved_at"] for manifest in manifests for variant in manifest["variants"])
