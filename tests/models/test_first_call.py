"""transformers installs hooks on a model's layers at its first call if hidden states are requested."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

transformers = pytest.importorskip("transformers")

import cgtool  # noqa: E402

pytestmark = pytest.mark.torch
CONFIG = cgtool.CompilationConfig(adaptor="eager", jobs=0)
KWARGS = {"output_hidden_states": True, "use_cache": False}


def model():
    torch.manual_seed(0)
    fields = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**fields, num_key_value_heads=2, vocab_size=32)
    return transformers.LlamaForCausalLM(config).eval()


def test_hidden_states_equal_eager_whether_or_not_hooks_are_installed_before_the_load(tmp_path):
    ids = torch.arange(6)[None]
    with torch.no_grad():
        options = {"dynamic": {"input_ids": {1: ("seq", 2, None)}}, "config": CONFIG, "cache_dir": tmp_path}
        cgtool.compile(model(), example_args=(ids,), example_kwargs=KWARGS, **options)
        for ran_before in (False, True):
            live = model()
            if ran_before:
                live(ids, **KWARGS)
            loaded = cgtool.load(live, config=CONFIG, cache_dir=tmp_path)
            for tokens in (ids, ids[:, :4]):
                expected, got = model()(tokens, **KWARGS), loaded(tokens, **KWARGS)
                assert len(got.hidden_states) == 3
                torch.testing.assert_close(got.hidden_states, expected.hidden_states)
                torch.testing.assert_close(got.logits, expected.logits)
