"""Collectives in forward: compiled under groups that are faked, proved and called by all ranks together."""

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


def came_of(folder, adaptor, jobs, *names, ranks=2, **env):
    """Return what each rank says of each model, and the manifests."""
    said = forked_ranks(env, MODELS, folder / "cache", adaptor, jobs, *names, ranks=ranks)
    return said, [json.loads(path.read_text()) for path in (folder / "cache").rglob("manifest.json")]


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory):
    return came_of(tmp_path_factory.mktemp("two"), "eager", 0, *SERVED, *REFUSED)


@pytest.mark.parametrize("name", SERVED)
def test_what_two_ranks_exchange_is_served(of_two_ranks, name):
    for said in of_two_ranks[0]:
        assert all(equal is True for equal in said[name]), said[name]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_told_each_rank(of_two_ranks, name):
    for said, words in zip(of_two_ranks[0], REFUSED[name], strict=True):
        assert re.search(words, said[name]), said[name]


def test_whole_calls_with_collectives_are_proved_by_all_ranks_together(of_two_ranks):
    _, manifests = of_two_ranks
    assert len(manifests) == 2 * len(SERVED)
    assert len({manifest["hash"] for manifest in manifests}) == len(SERVED)  # one entry holds both ranks
    for variant in (variant for manifest in manifests for variant in manifest["variants"]):
        assert "proof_gap" not in variant, variant["proof_gap"]
        assert variant["proved_at"]


def warmed_by_one_process(folder, size, *options):
    arguments = (f"{MODELS}:build", "--cache-dir", folder / "cache", "--world-size", size, *options, "--json")
    report = cgtool("warm", *arguments, forks=True).report
    assert any("was not run: it has collectives" in note for note in report["notes"])


def test_a_worker_compiles_a_piece_with_a_collective_though_it_is_in_no_group(tmp_path):
    warmed_by_one_process(tmp_path, 2, "--splitting-ops", "", "--jobs", 1)
    manifests = [json.loads(path.read_text()) for path in tmp_path.rglob("manifest.json")]
    first, second = [row["artifact"] for manifest in manifests for row in manifest["rows"]]
    assert first["digest"] == second["digest"]
    assert first["kind"] == "pt2"


def test_native_code_that_never_gives_pythons_lock_back_ends_with_a_sentence(tmp_path):
    options = ("--jobs", 0, "--adaptor", "eager", "--compile-timeout", 5)
    ran = cgtool("warm", f"{MODELS}:build_alone", "--arg", "name=Holding", "--cache-dir", tmp_path, *options)
    assert ran.code == -signal.SIGKILL
    assert "Error: Native code held Python's lock for 5 s (compile_timeout) while whole calls were proved" in ran.err


def test_a_launched_rank_that_is_warm_makes_calls_with_one_that_is_not(tmp_path):
    for _ in range(2):
        ended = two_ranks(f"{MODELS}:build_together", tmp_path, "--arg", "name=AllReduce")
        assert [ran.code for ran in ended] == [0, 0], ended
        manifests = {path.parts[-3]: json.loads(path.read_text()) for path in tmp_path.rglob("manifest.json")}
        assert sorted(manifests) == ["rank_0", "rank_1"]
        assert all(variant["proved_at"] for manifest in manifests.values() for variant in manifest["variants"])
        (folder,) = tmp_path.glob("torch_compile_cache/*/rank_1")
        shutil.rmtree(folder)
    assert "was warm already" in ended[0].out


def test_a_factory_that_makes_the_group_itself_is_told_how_to_share_it(tmp_path):
    options = ("--arg", "name=TwoGroups", "--cache-dir", tmp_path, "--world-size", 2)
    ran = cgtool("warm", f"{MODELS}:build_alone", *options, forks=True)
    assert ran.code == 1
    assert "`if not torch.distributed.is_initialized():`" in ran.err


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_load_what_one_process_warmed_in_a_group_that_exchanges_nothing(tmp_path, size):
    warmed_by_one_process(tmp_path, size, "--jobs", 0, "--adaptor", "eager")
    said, manifests = came_of(tmp_path, "eager", 0, "TwoGroups", ranks=size, ONLY_LOAD="1")
    assert said == [{"TwoGroups": [True] * 3}] * size
    assert sorted(manifest["rank"] for manifest in manifests) == list(range(size))


@pytest.mark.slow
def test_four_ranks_exchange_in_pairs_and_all_together_between_compiled_pieces(tmp_path):
    said, manifests = came_of(tmp_path, "aot_inductor", 1, "TwoGroups", ranks=4)
    assert said == [{"TwoGroups": [True] * 3}] * 4
    assert len({row["artifact"]["digest"] for manifest in manifests for row in manifest["rows"]}) == 2
    assert all(variant["proved_at"] for manifest in manifests for variant in manifest["variants"])
