"""Ops that AOTInductor code cannot call run between pieces; the rest stays native, and a load needs only torch."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_harness import compare, inspect, warm

pytestmark = pytest.mark.torch

MODEL = f"{Path(__file__).parents[1] / 'refused_ops.py'}:build"
#: The first is recognized by its schema, before workers start.
OPS = [("nested", 0), *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("bounded", "summed"))]


@pytest.mark.parametrize(("name", "jobs"), OPS)
def test_an_op_that_native_code_cannot_call_runs_between_pieces(tmp_path, name, jobs):
    report = warm(MODEL, tmp_path, "--arg", f"name={name}", "--jobs", jobs, forks=True)
    (note,) = [note for note in report["notes"] if "so they run between pieces" in note]
    assert note.startswith("Code of aot_inductor cannot call these ops")
    assert f"cgtool_refused::{name}" in note
    assert "refused_ops.py:" in note
    assert report["fallbacks"] == []
    assert {row["adaptor"] for row in report["artifacts"]} == {"aot_inductor"}
    entry = inspect(tmp_path)
    assert entry["pieces"] == 3
    checked = compare(MODEL, tmp_path, [{"rows": rows} for rows in (2, 5, 64)], arguments={"name": name})
    assert (checked["calls"], checked["failures"]) == (3, [])
    assert not {"torch._dynamo", "torch._inductor"} & set(checked["imported"])


def test_an_adaptor_that_can_call_every_op_gets_the_whole_graph(tmp_path):
    report = warm(MODEL, tmp_path, "--adaptor", "eager")
    assert not any("between pieces" in note for note in report["notes"])
