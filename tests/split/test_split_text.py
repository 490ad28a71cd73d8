"""`computation_graph.py` is readable, deterministic and without paths."""

from __future__ import annotations

import ast

import pytest
import torch
from split_reference import OPS, capture

from cgtool.split.splitter import split_graph
from cgtool.split.text import graph_text

pytestmark = pytest.mark.torch


def function(a, b):
    c = OPS.mix(a * 2, b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        d = c @ b.t()
    left, right = d.chunk(2, 0)
    return left[1:, None] + 1.5, right, a.shape[0] + 1


def text() -> str:
    graph_module = capture(function, torch.rand(6, 4), torch.rand(6, 4), dynamic=[(0, 0), (1, 0)])
    return graph_text(graph_module, split_graph(graph_module, splitting_ops=["toysplit::mix"]).assignment)


def test_the_text_has_pieces_shapes_and_the_users_lines() -> None:
    shown = text()
    assert [line.strip() for line in shown.splitlines() if "----" in line] == [
        f"# ---- piece {i} ----" for i in range(3)
    ]
    assert "# test_split_text.py:" in shown
    assert "c = OPS.mix(a * 2, b)" in shown
    assert 'float32[s0, 4]"' in shown
    assert "torch.ops.toysplit.mix(" in shown


def test_the_text_is_deterministic_and_has_no_folders() -> None:
    shown = text()
    assert shown == text()
    assert "/" not in shown.replace("//", "")
    assert "0x" not in shown


def test_the_text_is_python() -> None:
    ast.parse(text())
