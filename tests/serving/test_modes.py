"""The table of mode downgrades, row by row, and the aliases of older flags."""

from __future__ import annotations

import logging

import pytest

from cgtool.config import CompilationConfig
from cgtool.config_values import CUDAGraphMode
from cgtool.errors import ConfigError, UsageError
from cgtool.serving.modes import AttentionCGSupport, resolve_cudagraph_mode

pytestmark = pytest.mark.torch

NEVER, SINGLE, UNIFORM, ALWAYS = AttentionCGSupport


def resolve(requested, *supports, pieces=True, split=True, query_len=1, **options):
    return resolve_cudagraph_mode(
        CUDAGraphMode[requested],
        supports,
        has_pieces=pieces,
        attention_is_split=split,
        uniform_query_len=query_len,
        **options,
    )


@pytest.mark.parametrize(
    ("requested", "support", "options", "becomes"),
    [
        # FULL for mixed batches, support below ALWAYS
        ("FULL", UNIFORM, {}, "FULL_AND_PIECEWISE"),
        ("FULL", SINGLE, {}, "FULL_AND_PIECEWISE"),
        ("FULL", UNIFORM, {"split": False}, "FULL_DECODE_ONLY"),
        ("FULL", SINGLE, {"pieces": False, "split": False}, "FULL_DECODE_ONLY"),
        # FULL for decode batches, support NEVER
        ("FULL_AND_PIECEWISE", NEVER, {}, "PIECEWISE"),
        ("FULL_DECODE_ONLY", NEVER, {}, "PIECEWISE"),
        ("FULL_DECODE_ONLY", NEVER, {"pieces": False, "split": False}, "NONE"),
        # FULL for speculative decode batches, support below UNIFORM_BATCH
        ("FULL_AND_PIECEWISE", SINGLE, {"query_len": 3}, "PIECEWISE"),
        ("FULL_DECODE_ONLY", SINGLE, {"query_len": 3}, "PIECEWISE"),
        ("FULL_DECODE_ONLY", SINGLE, {"query_len": 3, "pieces": False, "split": False}, "NONE"),
        # two rows applied in turn
        ("FULL", SINGLE, {"query_len": 3}, "PIECEWISE"),
        # needs pieces, but there are none
        ("PIECEWISE", ALWAYS, {"pieces": False, "split": False}, "NONE"),
        ("FULL_AND_PIECEWISE", ALWAYS, {"pieces": False, "split": False}, "FULL_DECODE_ONLY"),
        # no splitting ops
        ("PIECEWISE", ALWAYS, {"split": False}, "NONE"),
        ("FULL_AND_PIECEWISE", ALWAYS, {"split": False}, "FULL"),
        ("FULL_AND_PIECEWISE", NEVER, {"split": False}, "NONE"),
        # no CUDA graphs
        ("FULL_AND_PIECEWISE", ALWAYS, {"can_capture": False}, "NONE"),
        ("FULL", NEVER, {"can_capture": False}, "NONE"),
    ],
)
def test_each_downgrade_logs_a_reason(requested, support, options, becomes, caplog):
    with caplog.at_level(logging.WARNING):
        resolved = resolve(requested, support, **options)
    assert resolved.mode.name == becomes
    assert resolved.reasons[0].startswith(f"cudagraph_mode {requested} becomes ")
    assert resolved.reasons[-1].split(" becomes ")[1].startswith(f"{becomes}: ")
    assert [record.getMessage() for record in caplog.records] == list(resolved.reasons)


@pytest.mark.parametrize(
    ("requested", "support", "query_len"),
    [
        ("NONE", NEVER, 1),
        ("PIECEWISE", NEVER, 1),
        ("FULL", ALWAYS, 4),
        ("FULL_DECODE_ONLY", SINGLE, 1),
        ("FULL_AND_PIECEWISE", SINGLE, 1),
        ("FULL_AND_PIECEWISE", UNIFORM, 4),
        ("FULL_AND_PIECEWISE", ALWAYS, 4),
    ],
)
def test_a_supported_mode_is_kept(requested, support, query_len, caplog):
    resolved = resolve(requested, support, query_len=query_len)
    assert (resolved.mode.name, resolved.reasons, caplog.records) == (requested, (), [])


def test_requesting_full_is_refused_if_attention_can_never_be_captured():
    with pytest.raises(UsageError, match="can never be captured"):
        resolve("FULL", NEVER)


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({}, "FULL_AND_PIECEWISE"),
        ({"cudagraph_mode": "FULL_DECODE_ONLY"}, "FULL_DECODE_ONLY"),
        ({"use_cudagraph": False}, "NONE"),
        ({"use_cudagraph": True, "full_cuda_graph": False}, "PIECEWISE"),
        ({"full_cuda_graph": True}, "FULL"),
        ({"cudagraph_mode": "FULL", "enforce_eager": True}, "NONE"),
        ({"level": 0}, "FULL_AND_PIECEWISE"),
    ],
)
def test_older_flags_select_a_mode(fields, mode):
    assert CompilationConfig(**fields).asked_cudagraph_mode.name == mode


def test_conflicting_flags_are_refused():
    for other in ({"cudagraph_mode": "FULL"}, {"use_cudagraph": False}):
        with pytest.raises(ConfigError, match="it is the older form of cudagraph_mode"):
            CompilationConfig(full_cuda_graph=True, **other)


def test_a_hybrid_model_has_the_lowest_support_of_its_backends():
    assert resolve("FULL", ALWAYS, SINGLE, UNIFORM).mode is CUDAGraphMode.FULL_AND_PIECEWISE
    assert resolve("FULL_AND_PIECEWISE", ALWAYS, NEVER).mode is CUDAGraphMode.PIECEWISE


def test_support_levels_are_ordered():
    assert NEVER < SINGLE < UNIFORM < ALWAYS
    assert [int(level) for level in AttentionCGSupport] == [0, 1, 2, 3]
