"""A model that is loaded in a fresh process gives what eager gives, at every size and with every adaptor."""

from __future__ import annotations

import pytest
from e2e_harness import FIXTURES, LLAMA, SERVED, SIZES, compare, counts, warm

pytestmark = pytest.mark.torch

MOE, ENCODER, VISION = (f"{FIXTURES / name}.py:build" for name in ("tiny_moe", "tiny_encoder", "tiny_vision"))
TOKENS = [{"num_tokens": n} for n in (*range(1, 65), 100, 512)]
GRID = [{"batch": b, "seq": s} for b in (1, 2, 3, 4, 5, 8) for s in (1, 2, 3, 7, 8, 16, 33, 64, 128)]
IMAGES = [{"batch": n} for n in (*range(1, 10), 15, 16, 17, 33)]


def check(model, root, calls, **options):
    """Every call equals eager's."""
    report = compare(model, root, calls, **options)
    assert report["failures"] == []
    assert report["calls"] == len(calls)
    return report


#: The default, and what serves a piece that it does not take.
ALL_ADAPTORS = ("aot_inductor", "inductor_standalone")
ADAPTORS = ("aot_inductor", pytest.param("inductor_standalone", marks=pytest.mark.slow))


def warmed(model, root, adaptor, *arguments):
    """Warm with an adaptor, from which no piece may fall back."""
    return unfallen(warm(model, root, "--adaptor", adaptor, *arguments), adaptor)


def unfallen(report, adaptor):
    """A report, after it was seen that every artifact of it is the adaptor's."""
    assert {artifact["adaptor"] for artifact in report["artifacts"]} == {adaptor}
    return report


@pytest.fixture
def sized(sized_cache):
    """Return a function that warms a fixture for its sizes: the default once in a session, and copied from there."""

    def made(name, root, adaptor):
        if adaptor != "aot_inductor":
            return warmed(f"{FIXTURES / name}.py:build", root, adaptor, "--compile-sizes", SIZES[name])
        shared = sized_cache(name)
        shared.copy(root)
        return unfallen(shared.report, adaptor)

    return made


def test_a_fixture_as_native_code_at_every_size(aot_cache):
    """Compiled for the general shape alone, by whichever test came first; layers, and two dimensions, are slow."""
    checked = check(f"{SERVED}:vision", aot_cache("vision"), IMAGES)
    assert checked["imported"] == []


@pytest.mark.parametrize("adaptor", [*ADAPTORS, pytest.param("inductor", marks=pytest.mark.slow), "eager"])
def test_llama_with_each_adaptor(tmp_path, sized, adaptor):
    root = tmp_path / "cache"
    report = sized("tiny_llama", root, adaptor)
    assert (*counts(report), report["compiled"]) == (9, 4, 3, 6, 6)
    checked = check(LLAMA, root, TOKENS)
    assert (checked["imported"] == []) == (adaptor in {"aot_inductor", "eager"})
    # What was chosen at `warm` need not be said at `load`, and may be.
    check(LLAMA, root, TOKENS[:8], config={"adaptor": adaptor, "compile_sizes": [1]})


@pytest.mark.slow
@pytest.mark.parametrize("adaptor", ALL_ADAPTORS)
def test_mixture_of_experts(tmp_path, sized, adaptor):
    root = tmp_path / "cache"
    report = sized("tiny_moe", root, adaptor)
    assert (*counts(report), report["compiled"]) == (5, 2, 3, 9, 9)
    check(MOE, root, TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("adaptor", ALL_ADAPTORS)
def test_encoder_over_batch_and_sequence(tmp_path, sized, adaptor):
    """Two dynamic dimensions: one variant for both, one for each that is 1, one for both."""
    root = tmp_path / "cache"
    report = sized("tiny_encoder", root, adaptor)
    assert report["variants"] == 4
    assert counts(report)[:3] == (5, 2, 3)
    assert len(report["artifacts"]) == report["compiled"] == 5 * 3
    check(ENCODER, root, GRID)


@pytest.mark.slow
@pytest.mark.parametrize("adaptor", ALL_ADAPTORS)
def test_vision_over_batch(tmp_path, sized, adaptor):
    root = tmp_path / "cache"
    report = sized("tiny_vision", root, adaptor)
    assert counts(report)[:3] == (5, 2, 3)
    assert len(report["artifacts"]) == report["compiled"] == 9
    check(VISION, root, IMAGES)


@pytest.mark.slow  # matrix products of these dtypes are tuned one by one
@pytest.mark.parametrize("adaptor", ["inductor_standalone", "aot_inductor"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_llama_of_another_dtype(tmp_path, dtype, adaptor):
    root, argument = tmp_path / "cache", ("--arg", f'dtype="{dtype}"', "--arg", "num_layers=2")
    assert warmed(LLAMA, root, adaptor, *argument, "--compile-sizes", "1,8")["compiled"] == 9
    check(LLAMA, root, TOKENS, arguments={"dtype": dtype, "num_layers": 2})
