"""Models of transformers on a GPU, with the adaptor that is the default: every piece native, and served as eager."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch
from sweep import compared, runnable

import cgtool
from cgtool import CompilationConfig
from cgtool.compiler.pipeline import warm
from cgtool.models import resolve_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "name", ["llama", "phi3", "qwen2_moe", "gemma3_text", "gpt_oss", "deepseek_v3", "vit", "whisper"]
)
def test_no_piece_falls_back_and_outputs_equal_eager(tmp_path, name, dtype):
    spec, why = runnable(name, tmp_path)
    assert spec is not None, why
    result = warm(
        resolve_model(f"hf:{tmp_path}", device=DEVICE, dtype=dtype),
        config=CompilationConfig(jobs=2),
        cache_dir=tmp_path / "cache",
    )
    assert result.manifest.fallbacks == ()
    spec = resolve_model(f"hf:{tmp_path}", device=DEVICE, dtype=dtype, weights="real")
    loaded = cgtool.load(spec.module, cache_dir=tmp_path / "cache")
    # 8 bits of mantissa: eager rounds after every operation, a fused kernel once.
    assert compared(spec, loaded, tolerance=0.05) == "served"
