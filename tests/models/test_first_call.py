"""What transformers does at a model's first call alone: hooks on its layers, where hidden states are asked for."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

transformers = pytest.importorskip("transformers")

import cgtool  # noqa: E402

pytestmark = pytest.mark.torch
CONFIG = cgtool.CompilationConfig(adaptor="eager", jobs=0)
ASKED = {"output_hidden_states": True, "use_cache": False}


def model():
    torch.manual_seed(0)
    fields = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**fields, num_key_value_heads=2, vocab_size=32)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("ran_before", [False, True])
def test_hidden_states_are_those_of_eager_whether_hooks_were_installed_by_then(tmp_path, ran_before):
    ids = torch.arange(6)[None]
    with torch.no_grad():
        options = {"dynamic": {"input_ids": {1: ("seq", 2, None)}}, "config": CONFIG, "cache_dir": tmp_path}
        cgtool.compile(model(), example_args=(ids,), example_kwargs=ASKED, **options)
        live = model()
        if ran_before:
            live(ids, **ASKED)
        loaded = cgtool.load(live, config=CONFIG, cache_dir=tmp_path)
        for given in (ids, ids[:, :4]):
            expected, found = model()(given, **ASKED), loaded(given, **ASKED)
            assert len(found.hidden_states) == 3
            torch.testing.assert_close(found.hidden_states, expected.hidden_states)
            torch.testing.assert_close(found.logits, expected.logits)
