"""`cgtool.ops`: the registry of splitting ops, and the list of attention ops."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cgtool import ops
from cgtool.errors import UsageError
from cgtool.ops import KNOWN_ATTENTION_OPS, register_splitting_op, registered_splitting_ops


@pytest.fixture(autouse=True)
def registry_of_this_test(monkeypatch):
    """Undo registrations, which would affect later files."""
    monkeypatch.setattr(ops, "_registered", dict(ops._registered))


def test_registering_an_op_twice_has_no_effect():
    register_splitting_op("test_ops::first")
    register_splitting_op("test_ops.second.default")
    register_splitting_op("test_ops::first")
    ours = [name for name in registered_splitting_ops() if name.startswith("test_ops")]
    assert ours == ["test_ops::first", "test_ops.second.default"]


@pytest.mark.parametrize(
    "name", ["", "attention", "ns::", "::op", "a::b::c", "ns::op.", "ns op", "ns::op.x.y", "ns::op\n"]
)
def test_an_invalid_op_name_is_refused(name):
    with pytest.raises(UsageError, match="is not the name of an op"):
        register_splitting_op(name)
    assert name not in registered_splitting_ops()


@pytest.mark.parametrize(
    "name",
    [
        "torch.nn.functional.scaled_dot_product_attention",
        "aten::scaled_dot_product_attention",
        "aiter::unified_attention_with_output",
        "aiter::mla_attention",
        "vllm::unified_attention_with_output",
        "trtllm::attn_custom_op_inplace",
    ],
)
def test_common_attention_ops_are_known(name):
    assert name in KNOWN_ATTENTION_OPS


def test_known_ops_have_valid_and_unique_names():
    before = registered_splitting_ops()
    for name in KNOWN_ATTENTION_OPS:
        register_splitting_op(name)
    assert set(registered_splitting_ops()) == {*before, *KNOWN_ATTENTION_OPS}
    assert len(set(KNOWN_ATTENTION_OPS)) == len(KNOWN_ATTENTION_OPS)


def test_importing_the_module_does_not_import_torch():
    code = "import sys, cgtool.model; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
