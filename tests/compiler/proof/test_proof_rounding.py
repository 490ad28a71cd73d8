"""If the proof rejects an artifact in half precision, it is compiled again with eager's rounding."""

from __future__ import annotations

import proof_doubles  # noqa: F401 - for the adaptor that it registers
import pytest
import torch

import cgtool
from cgtool import CompilationConfig, ExampleCall, ModelSpec
from cgtool.compiler.pipeline import warm

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("forked_children")]


def warmed(dtype, root, **options):
    model = torch.nn.Linear(8, 8).to(dtype).eval()
    spec = ModelSpec(
        module=model,
        calls=[ExampleCall(args=(torch.rand(3, 8, dtype=dtype),))],
        dynamic={"input": {0: ("rows", 2, 64)}},
    )
    config = CompilationConfig(adaptor="double", jobs=0, inductor_compile_config=options)
    return model, warm(spec, config=config, cache_dir=root)


@torch.no_grad()
def test_a_mismatch_in_half_precision_is_compiled_again_with_rounding(tmp_path):
    model, result = warmed(torch.bfloat16, tmp_path)
    assert result.manifest.fallbacks == ()
    assert [row.artifact.proved for row in result.manifest.rows] == [True]
    x = torch.rand(5, 8, dtype=torch.bfloat16)
    torch.testing.assert_close(cgtool.load(model, cache_dir=tmp_path)(x), model(x))


@pytest.mark.parametrize(("dtype", "options"), [(torch.float32, {}), (torch.bfloat16, {"rounds": False})])
def test_no_second_compile_for_float32_or_if_the_user_sets_the_option(tmp_path, dtype, options):
    _, result = warmed(dtype, tmp_path, **options)
    assert [fallback.adaptor for fallback in result.manifest.fallbacks] == ["eager"]
