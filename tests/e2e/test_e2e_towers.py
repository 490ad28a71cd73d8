"""Vision models of transformers, with and without text, from `cgtool warm` to another process."""

from __future__ import annotations

import json

import pytest
from e2e_harness import compare, warm

pytest.importorskip("transformers")

pytestmark = pytest.mark.torch

_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_VISION = {**_TOWER, "image_size": 32, "patch_size": 8}
_TEXT = {**_TOWER, "vocab_size": 128, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1}


def warmed(tmp_path, model_type, **fields):
    folder = tmp_path / model_type
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **fields}))
    warm(f"hf:{folder}", tmp_path / "cache", "--adaptor", "eager")
    return f"hf:{folder}"


@pytest.mark.slow
def test_a_model_whose_code_checks_the_grad_mode_is_served(tmp_path):
    # The head of SigLIP is torch's MultiheadAttention, which checks whether gradients are recorded.
    model = warmed(tmp_path, "siglip_vision_model", **_VISION)
    checked = compare(model, tmp_path / "cache", [{"batch": batch} for batch in (1, 2, 5)])
    assert (checked["calls"], checked["failures"]) == (3, [])


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["clip", "siglip"])
def test_models_of_images_and_texts_have_separate_batch_sizes(tmp_path, model_type):
    model = warmed(tmp_path, model_type, text_config=_TEXT, vision_config=_VISION)
    sizes = [{"batch": b, "seq": s, "images": i} for b, s, i in ((1, 1, 1), (1, 9, 3), (3, 16, 1), (4, 7, 2))]
    checked = compare(model, tmp_path / "cache", sizes)
    assert (checked["calls"], checked["failures"]) == (4, [])
