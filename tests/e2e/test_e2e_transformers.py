"""Small models of transformers, split at attention and with two dynamic dimensions, equal eager."""

from __future__ import annotations

import json

import pytest
from e2e_harness import compare, inspect, units, warm

pytest.importorskip("transformers")

pytestmark = [pytest.mark.torch, pytest.mark.slow]

LAYERS = 3
_DECODER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}
CONFIGS = {
    "llama": _DECODER,
    "qwen3": {**_DECODER, "head_dim": 16},
    "gemma": {**_DECODER, "head_dim": 16},
    "gpt2": {"n_embd": 64, "n_layer": LAYERS, "n_head": 4, "vocab_size": 128, "n_positions": 256},
    "mixtral": {**_DECODER, "num_local_experts": 4},
    "bert": {key: value for key, value in _DECODER.items() if key != "num_key_value_heads"},
    "vit": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    },
}
GRID = [{"batch": b, "seq": s} for b in (1, 2, 3, 5) for s in (*range(1, 18), 31, 32, 33, 63, 64)]
#: One row of every number of tokens, as a server's decode and prefill have it.
ROW = [{"batch": 1, "seq": s} for s in range(1, 65)]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("adaptor", ["inductor_standalone", "aot_inductor"])
@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_equal_eagers_in_another_process(tmp_path, name, adaptor):
    folder, root = tmp_path / name, tmp_path / "cache"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": name, **CONFIGS[name]}))
    model = f"hf:{folder}"
    report = warm(model, root, "--adaptor", adaptor)
    assert [artifact for artifact in report["artifacts"] if artifact["adaptor"] != adaptor] == []
    two = name != "vit"
    assert report["splitting_pieces"] == LAYERS
    assert report["pieces"] == 2 * LAYERS + 1
    assert report["unique_pieces"] == 3
    assert report["variants"] == (4 if two else 2)
    assert report["compiled"] == len(report["artifacts"]) == units(root) <= 3 * report["variants"]
    assert inspect(root)["hash"] == report["hash"]
    again = warm(model, root, "--adaptor", adaptor)
    assert (again["hit"], again["compiled"], again["trace_secs"]) == (True, 0, 0.0)
    calls = [*GRID, *ROW] if two else [{"batch": b} for b in range(1, 18)]
    checked = compare(model, root, calls)
    assert checked["failures"] == []
    assert checked["calls"] == len(calls)
