"""A model that is loaded in another process equals eager at every size, with every adaptor."""

from __future__ import annotations

import pytest
from e2e_harness import FIXTURES, LLAMA, SERVED, SIZES, compare, counts, warm

pytestmark = pytest.mark.torch

MOE, ENCODER, VISION = (f"{FIXTURES / name}.py:build" for name in ("tiny_moe", "tiny_encoder", "tiny_vision"))
TOKENS = [{"num_tokens": n} for n in (*range(1, 65), 100, 512)]
GRID = [{"batch": b, "seq": s} for b in (1, 2, 3, 4, 5, 8) for s in (1, 2, 3, 7, 8, 16, 33, 64, 128)]
IMAGES = [{"batch": n} for n in (*range(1, 10), 15, 16, 17, 33)]


def check(model, root, calls, **options):
    """Check that every call equals eager's; return the report."""
    report = compare(model, root, calls, **options)
    assert report["failures"] == []
    assert report["calls"] == len(calls)
    return report


#: The default, and the fallback for pieces that it cannot compile.
ADAPTORS = ("aot_inductor", "inductor_standalone")


def warmed(model, root, adaptor, *arguments):
    """Warm with an adaptor, and check that no artifact fell back to another one."""
    report = warm(model, root, "--adaptor", adaptor, *arguments)
    assert {artifact["adaptor"] for artifact in report["artifacts"]} == {adaptor}
    return report


def sized(name, root, adaptor):
    """Warm a fixture for its sizes, too."""
    return warmed(f"{FIXTURES / name}.py:build", root, adaptor, "--compile-sizes", SIZES[name])


def test_vision_as_native_code_at_every_size(native_vision):
    """Variants for one image and for more, each of a single piece; layers and two dynamic dimensions are slow."""
    assert check(f"{SERVED}:vision", native_vision.root, IMAGES)["imported"] == []


def test_llama_as_native_code(native_llama):
    """A single variant of nine pieces; the variant for one token is slow."""
    report, model = native_llama.report, f"{SERVED}:llama"
    assert (*counts(report), report["compiled"]) == (9, 4, 3, 3, 3)
    assert {artifact["adaptor"] for artifact in report["artifacts"]} == {"aot_inductor"}
    assert check(model, native_llama.root, TOKENS[1:])["imported"] == []
    # Options of `warm` may be repeated at `load`, but need not be.
    check(model, native_llama.root, TOKENS[1:8], config={"adaptor": "aot_inductor", "compile_sizes": [8]})


def check_llama(report, root, adaptor, num_artifacts):
    assert (*counts(report), report["compiled"]) == (9, 4, 3, num_artifacts, num_artifacts)
    assert {artifact["adaptor"] for artifact in report["artifacts"]} == {adaptor}
    checked = check(LLAMA, root, TOKENS)
    assert (checked["imported"] == []) == (adaptor in {"aot_inductor", "eager"})
    check(LLAMA, root, TOKENS[:8], config={"adaptor": adaptor, "compile_sizes": [1]})


def test_llama_with_eager_artifacts(eager_llama):
    check_llama(eager_llama.report, eager_llama.root, "eager", 9)


@pytest.mark.slow
@pytest.mark.parametrize("adaptor", [*ADAPTORS, "inductor"])
def test_llama_with_each_compiler(tmp_path, adaptor):
    check_llama(sized("tiny_llama", tmp_path, adaptor), tmp_path, adaptor, 6)


@pytest.mark.slow
@pytest.mark.parametrize("adaptor", ADAPTORS)
def test_mixture_of_experts(tmp_path, adaptor):
    root = tmp_path / "cache"
    report = sized("tiny_moe", root, adaptor)
    assert (*counts(report), report["compiled"]) == (5, 2, 3, 9, 9)
    check(MOE, root, TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("adaptor", ADAPTORS)
def test_encoder_over_batch_and_sequence(tmp_path, adaptor):
    """Two dynamic dimensions have four variants: each dimension is 1 or not."""
    root = tmp_path / "cache"
    report = sized("tiny_encoder", root, adaptor)
    assert report["variants"] == 4
    assert counts(report)[:3] == (5, 2, 3)
    assert len(report["artifacts"]) == report["compiled"] == 5 * 3
    check(ENCODER, root, GRID)


@pytest.mark.slow
@pytest.mark.parametrize("adaptor", ADAPTORS)
def test_vision_over_batch(tmp_path, adaptor):
    root = tmp_path / "cache"
    report = sized("tiny_vision", root, adaptor)
    assert counts(report)[:3] == (5, 2, 3)
    assert len(report["artifacts"]) == report["compiled"] == 9
    check(VISION, root, IMAGES)


@pytest.mark.slow  # matrix products of these dtypes are autotuned one by one
@pytest.mark.parametrize("adaptor", ["inductor_standalone", "aot_inductor"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_llama_of_another_dtype(tmp_path, dtype, adaptor):
    root, argument = tmp_path / "cache", ("--arg", f'dtype="{dtype}"', "--arg", "num_layers=2")
    assert warmed(LLAMA, root, adaptor, *argument, "--compile-sizes", "1,8")["compiled"] == 9
    check(LLAMA, root, TOKENS, arguments={"dtype": dtype, "num_layers": 2})
