"""Small versions of every base model in `MODEL_MAPPING` of transformers equal eager or are refused with a reason."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers")

import tiny_configs
from sweep import outcome, outcome_apart
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

pytestmark = pytest.mark.torch

#: One of each kind: decoders, experts, an encoder, encoder-decoders, images, sound, two towers.
SERVED = ("llama", "gpt2", "mixtral", "bert", "t5", "vit", "convnext", "whisper", "wav2vec2", "clip")
#: The most different ones; the others are slow. Experts run in test_static_cache.py.
FIRST = ("t5", "convnext", "whisper")
#: One layer of each stack suffices here; test_every_architecture_... has two.
SHALLOW = {"whisper": {"encoder_layers": 1, "decoder_layers": 1}}
PARTS = 20


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FIRST else [pytest.mark.slow]) for name in SERVED]
)
def test_the_compiled_model_equals_eager(tmp_path, name, monkeypatch):
    monkeypatch.setattr(tiny_configs, "OVERRIDES", tiny_configs.OVERRIDES | SHALLOW)
    assert outcome(name, tmp_path) == "served"


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_architecture_equals_eager_or_is_refused_with_a_reason(tmp_path, record_property, part):
    outcomes = {}
    for name in sorted(MODEL_MAPPING_NAMES)[part::PARTS]:
        (tmp_path / name).mkdir()
        outcomes[name] = outcome_apart(name, tmp_path / name, limit_secs=300)
    (tmp_path / "outcomes.json").write_text(json.dumps(outcomes, indent=1))
    record_property("outcomes", outcomes)
    assert {name: text for name, text in outcomes.items() if text.startswith("defect")} == {}
