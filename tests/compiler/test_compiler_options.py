"""Options of Inductor, and the digest of everything but the graph that decides an artifact."""

from __future__ import annotations

import pytest
import torch

from cgtool.compiler.adaptors.interface import get_adaptor
from cgtool.compiler.options import inductor_patches
from cgtool.errors import ConfigError

pytestmark = pytest.mark.torch

OPTIONS = {"epilogue_fusion": False}


def test_only_concrete_sizes_are_autotuned():
    assert "max_autotune" not in inductor_patches({}, max_autotune=False)
    tuned = inductor_patches({}, max_autotune=True)
    assert tuned["max_autotune"] is True
    assert tuned["coordinate_descent_tuning"] is True


def test_user_options_override_defaults():
    found = inductor_patches({"max-autotune": False, "cpp.threads": 3}, max_autotune=True)
    assert found["max_autotune"] is False
    assert found["cpp.threads"] == 3
    assert found["coordinate_descent_tuning"] is True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_autotun": True}, "nearest is 'max_autotune'"),
        ({"triton.cudagraph": True}, "nearest is 'triton.cudagraphs'"),
        ({"freezing": True}, "weights are inputs"),
        ({"triton.cudagraphs": True}, "cudagraph_mode"),
        ({"fx_graph_cache": False}, "disable_cache"),
        ({"epilogue_fusion": "no"}, "takes a bool"),
    ],
)
def test_an_unknown_or_reserved_option_is_an_error(options, message):
    with pytest.raises(ConfigError, match=message):
        inductor_patches(options, max_autotune=False)
    with pytest.raises(ConfigError, match=message):
        get_adaptor("inductor_standalone").compute_hash(options)


def test_the_hash_depends_on_options_adaptors_and_settings(monkeypatch):
    import torch._inductor.config as inductor_config

    standalone = get_adaptor("inductor_standalone")
    plain = standalone.compute_hash({})
    with inductor_config.patch(max_fusion_size=7):
        changed = standalone.compute_hash({})
    torch.set_float32_matmul_precision("high")
    try:
        precise = standalone.compute_hash({})
    finally:
        torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    found = {
        plain,
        changed,
        precise,
        standalone.compute_hash(OPTIONS),
        standalone.compute_hash({}, max_autotune=True),
        get_adaptor("inductor").compute_hash({}),
        get_adaptor("eager").compute_hash({}),
    }
    assert len(found) == 7


def test_the_hash_does_not_depend_on_paths(monkeypatch, tmp_path):
    import torch._inductor.config as inductor_config

    standalone = get_adaptor("inductor_standalone")
    before = standalone.compute_hash({})
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with inductor_config.patch({"compile_threads": 1, "trace.debug_dir": str(tmp_path), "fx_graph_cache": False}):
        assert standalone.compute_hash({}) == before


@pytest.mark.parametrize("adaptor", ["inductor_standalone", "inductor"])
def test_autotuned_code_computes_the_same(adaptor):
    from piece_cases import W, call, graph, tensor

    piece = graph([tensor(8, 8), W], [call("torch._C._nn.linear", "%0", "%1")], ["%2"], symbols=())
    compiler = get_adaptor(adaptor)
    compiled = compiler.compile(piece, options=OPTIONS, max_autotune=True)
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    torch.testing.assert_close(compiler.load(compiled.artifact, piece)([x, w])[0], torch.nn.functional.linear(x, w))
