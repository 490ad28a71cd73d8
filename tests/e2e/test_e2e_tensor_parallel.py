"""Models whose parameters are DTensors: two ranks warm one, load it in new processes, and equal the unsharded model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from e2e_harness import cgtool, forked_ranks, two_ranks

pytest.importorskip("torch")

import torch

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
]

MODELS = Path(__file__).with_name("sharded_model.py")
SERVED = ("split", "split_in_a_submesh", "split_without_gradients")
MISSES = {
    "whole": r'k.weight was "float32\[8, 8\] cpu Shard\(dim=0\)" and is "float32\[8, 8\] cpu" now',
    "with_other_placements": r'before.weight was "float32\[8\] cpu" and is "float32\[8\] cpu Replicate\(\)" now',
    "with_a_layer_whole": r"Shard\(dim=-1\) when this was compiled and is .*Replicate\(\) now",
    "with_ranks_in_another_order": r"of the ranks \[0, 1\] in .* and is .* of the ranks \[1, 0\] in ",
}


def manifests(root):
    return [json.loads(path.read_text()) for path in root.rglob("manifest.json")]


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    """Return a cache that `cgtool warm` filled as two ranks, and its manifests."""
    root = tmp_path_factory.mktemp("warmed")
    ended = two_ranks(f"{MODELS}:build", root)
    assert [ran.code for ran in ended] == [0, 0], ended[0].err + ended[1].err
    return root, manifests(root)


def test_ranks_warm_and_prove_a_sharded_model_in_one_entry(warmed):
    _, (first, second) = warmed
    assert first["hash"] == second["hash"]
    for variant in (*first["variants"], *second["variants"]):
        assert variant["proved_at"], variant
    digests = [{row["artifact"]["digest"] for row in manifest["rows"]} for manifest in (first, second)]
    assert len(digests[0] - digests[1]) == 1  # each has its own part of the embedding


@pytest.fixture(scope="module")
def loaded(warmed):
    return forked_ranks({}, MODELS, "loaded", warmed[0], *SERVED, *MISSES)


@pytest.mark.parametrize("name", SERVED)
def test_new_ranks_load_models_that_are_sharded_the_same_way(loaded, name):
    for results in loaded:
        assert results[name] == [True] * 3, results[name]


@pytest.mark.parametrize("name", MISSES)
def test_a_model_that_is_sharded_differently_misses_with_the_reason(loaded, name):
    for results in loaded:
        assert re.search(MISSES[name], results[name]), results[name]


def test_a_model_with_sequence_parallelism_is_served(tmp_path):
    results = forked_ranks({}, MODELS, "served", tmp_path, "eager", "split_in_the_sequence")
    assert results == [{"split_in_the_sequence": [True] * 3}] * 2
    assert all(variant["proved_at"] for manifest in manifests(tmp_path) for variant in manifest["variants"])


def test_an_autocast_region_applies_to_sharded_computation(tmp_path):
    assert forked_ranks({}, MODELS, "equals_eager", tmp_path, "InBfloat16") == [[True] * 2] * 2
    assert all(variant["proved_at"] for manifest in manifests(tmp_path) for variant in manifest["variants"])


def test_dtensors_as_arguments_or_results_are_refused(tmp_path):
    for errors in forked_ranks({}, MODELS, "refused", tmp_path):
        assert re.match(
            r"The model returns a DTensor\.\n.*sharded_model.py.*\n.*\(`\.to_local\(\)`\)", errors["returned"]
        )
        assert errors["given"].startswith("x is a DTensor, a tensor subclass that an artifact cannot take.")


def test_one_process_warms_all_ranks_of_a_sharded_model(tmp_path):
    options = ("--world-size", 2, "--jobs", 0, "--adaptor", "eager")
    ran = cgtool("warm", f"{MODELS}:build", "--cache-dir", tmp_path, *options, forks=True)
    assert ran.code == 0, ran.err
    assert forked_ranks({}, MODELS, "loaded", tmp_path, "split") == [{"split": [True] * 3}] * 2


@pytest.mark.slow
def test_four_ranks_sharded_in_pairs_fill_one_entry_and_load_it(tmp_path):
    name = "split_in_a_submesh"
    assert forked_ranks({}, MODELS, "served", tmp_path, "eager", name, ranks=4) == [{name: [True] * 3}] * 4
    assert len({manifest["hash"] for manifest in manifests(tmp_path)}) == 1


@pytest.mark.slow
def test_native_pieces_of_a_sharded_model_equal_the_unsharded_one(tmp_path):
    assert forked_ranks({}, MODELS, "served", tmp_path, "aot_inductor", "split") == [{"split": [True] * 3}] * 2


@pytest.fixture
def llama(tmp_path):
    """Return the folder of a Llama that transformers can shard."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, pad_token_id=0))
    model.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.slow
def test_a_model_that_transformers_shards_equals_the_unsharded_one(llama, tmp_path):
    root = tmp_path / "cache"
    ended = two_ranks(f"{MODELS}:build_llama", root, "--arg", f"folder={llama}", "--weights", "real")
    assert [ran.code for ran in ended] == [0, 0], ended[0].err + ended[1].err
    assert all(variant["proved_at"] for manifest in manifests(root) for variant in manifest["variants"])
    assert forked_ranks({}, MODELS, "llama_equals_the_whole", llama, root) == [[True] * 3] * 2


@pytest.mark.slow
def test_a_model_that_transformers_shards_generates_the_same_tokens(llama, tmp_path):
    assert forked_ranks({}, MODELS, "llama_generates_as_the_whole", llama, tmp_path / "cache") == [True] * 2
