"""Size lists compared with those of vLLM, TensorRT-LLM and ATOM, and padding."""

from __future__ import annotations

import logging

import pytest

from cgtool.config import CompilationConfig, resolve_capture_sizes
from cgtool.errors import UsageError
from cgtool.serving.sizes import (
    DEFAULT_CAPTURE_NUM_TOKENS,
    check_compile_sizes,
    context_capture_sizes,
    fit_sizes,
    padded_size,
    vllm_capture_sizes,
)

pytestmark = pytest.mark.torch


def test_a_single_cuda_graph_size_expands_to_atoms_pattern():
    sizes = resolve_capture_sizes(CompilationConfig(cuda_graph_sizes=[512]))
    assert sizes[:7] == (1, 2, 4, 8, 16, 32, 48)
    assert sizes[-2:] == (496, 512)
    assert len(sizes) == 4 + 32


def test_several_sizes_are_used_as_given():
    assert resolve_capture_sizes(CompilationConfig(cuda_graph_sizes=[3, 6])) == (3, 6)
    assert resolve_capture_sizes(CompilationConfig(cudagraph_capture_sizes=[5, 1])) == (1, 5)


def test_vllm_captures_35_sizes_up_to_256():
    sizes = vllm_capture_sizes(128)
    assert len(sizes) == 35
    assert sizes[:5] == (1, 2, 4, 8, 16)
    assert sizes[-2:] == (248, 256)


def test_vllms_sizes_are_limited_to_twice_the_batch_and_to_512():
    assert vllm_capture_sizes(4) == (1, 2, 4, 8)
    assert vllm_capture_sizes(4, uniform_query_len=2) == (1, 2, 4, 8, 16)
    assert vllm_capture_sizes(1000)[-3:] == (480, 496, 512)


@pytest.mark.parametrize(
    ("wanted", "batch", "seq", "kept"),
    [
        ([64, 120, 128, 200, 256], 1, 128, (64, 120, 127)),
        ([64, 120, 127, 128], 1, 128, (64, 120, 127)),
        ([64, 120], 1, 128, (64, 120)),
        ([64, 256], 2, 129, (64, 256)),
        ([64, 120, 128], 1, 1, ()),
        ([128, 200, 256], 1, 128, (127,)),
        ([256, 64, 64], 4, 128, (64, 256)),
    ],
)
def test_context_sizes_are_limited_to_the_largest_batch(wanted, batch, seq, kept):
    assert context_capture_sizes(wanted, max_batch_size=batch, max_seq_len=seq) == kept


def test_sizes_that_cannot_occur_are_logged(caplog):
    with caplog.at_level(logging.WARNING):
        context_capture_sizes([64, 128, 200], max_batch_size=1, max_seq_len=128)
    assert "[128, 200]" in caplog.text


def test_the_default_context_sizes_are_tensorrt_llms():
    assert context_capture_sizes(max_batch_size=64, max_seq_len=4096) == DEFAULT_CAPTURE_NUM_TOKENS
    assert DEFAULT_CAPTURE_NUM_TOKENS[:9] == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert DEFAULT_CAPTURE_NUM_TOKENS[-1] == 3072
    assert len(DEFAULT_CAPTURE_NUM_TOKENS) == 8 + 12


def test_oversize_batches_are_dropped_with_a_warning_or_refused(caplog):
    with caplog.at_level(logging.WARNING):
        assert fit_sizes([1, 4, 8, 16], max_num_seqs=8, max_num_tokens=100) == (1, 4, 8)
    assert "[16]" in caplog.text
    assert fit_sizes([1, 4, 8], max_num_seqs=8, max_num_tokens=12, uniform_query_len=3) == (1, 4)
    with pytest.raises(UsageError, match=r"\[16\] sequences are never used"):
        fit_sizes([1, 16], max_num_seqs=8, max_num_tokens=100, strict=True)
    with pytest.raises(UsageError, match="smaller sizes"):
        fit_sizes([16], max_num_seqs=8, max_num_tokens=100)


@pytest.mark.parametrize(("tokens", "padded"), [(0, None), (1, 1), (3, 4), (4, 4), (5, 8), (8, 8), (9, None)])
def test_a_batch_is_padded_to_the_next_size(tokens, padded):
    assert padded_size(tokens, (1, 2, 4, 8)) == padded


def test_a_compile_size_that_padding_changes_is_refused():
    check_compile_sizes([4, 8, 100], (1, 2, 4, 8))
    with pytest.raises(UsageError, match="padded to the captured size 8"):
        check_compile_sizes([6], (1, 2, 4, 8))
