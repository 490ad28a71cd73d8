"""A process of a bench: one-line errors, resized inputs, compared outputs."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
import torch

from cgtool.errors import CacheMissError, UsageError
from cgtool.model import ExampleCall, ModelSpec
from cgtool.toolkit.bench.calls import compare, dimension_of, read_outputs, resized, weights_digest, write_outputs
from cgtool.toolkit.bench.child import one_line
from cgtool.toolkit.bench.ways import Difference

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("error", "line"),
    [
        pytest.param(ValueError(), "ValueError", id="silent"),
        pytest.param(ValueError("\n  one\n  two"), "ValueError: one", id="first line"),
        pytest.param(
            RuntimeError("failed, reason: Info(\nresult=0,\nx is 1\nmore"),
            "RuntimeError: failed, reason: Info( result=0, x is 1",
            id="goes on",
        ),
        pytest.param(
            CacheMissError("Nothing fits:", reasons=("a is b", "c")),
            "CacheMissError: Nothing fits: a is b",
            id="reason",
        ),
        pytest.param(ValueError("x" * 999), "ValueError: " + "x" * 398 + " …", id="long"),
    ],
)
def test_an_error_is_one_line(error, line):
    assert one_line(error) == line


class Two(torch.nn.Module):
    def forward(self, ids, mask=None):
        return ids if mask is None else ids * mask


def spec(**changes):
    ids, mask = torch.arange(6).reshape(2, 3), torch.arange(10, 16).reshape(2, 3)
    dims = {0: "batch", 1: ("seq", 2, 8)}
    call = ExampleCall(args=(ids,), kwargs={"mask": mask})
    return ModelSpec(**{"module": Two(), "calls": [call], "dynamic": {"ids": dims, "mask": dims}, **changes})


def test_inputs_grow_by_repetition_and_shrink_by_truncation():
    (ids,), kwargs = resized(spec(), "seq", 5)
    assert ids.tolist() == [[0, 1, 2, 0, 1], [3, 4, 5, 3, 4]]
    assert kwargs["mask"].tolist() == [[10, 11, 12, 10, 11], [13, 14, 15, 13, 14]]
    (ids,), _ = resized(spec(), "batch", 1)
    assert ids.tolist() == [[0, 1, 2]]
    assert not ids.is_inference()


@pytest.mark.parametrize("size", [1, 9])
def test_a_size_outside_the_models_bounds_is_refused(size):
    with pytest.raises(UsageError, match="The size of seq must be from 2 to 8"):
        resized(spec(), "seq", size)


def test_the_resized_dimension_is_the_requested_or_the_last_one():
    assert dimension_of(spec(), None) == "seq"
    assert dimension_of(spec(), "batch") == "batch"
    assert dimension_of(spec(dynamic={}), None) is None
    with pytest.raises(UsageError, match="it has: batch, seq"):
        dimension_of(spec(), "sequence")


class Pair(NamedTuple):
    hidden: torch.Tensor
    count: int


HIDDEN = torch.linspace(-3, 4, 24).reshape(2, 12)
OUTPUT = {"hidden": HIDDEN.bfloat16(), "rest": (Pair(HIDDEN.T, 3), torch.arange(4), torch.empty(0, 3), None, object())}


@pytest.fixture
def eager(tmp_path):
    write_outputs(tmp_path / "reference", {"one": OUTPUT})
    return read_outputs(tmp_path / "reference")["one"]


def changed(hidden=HIDDEN, count=3, ids=None):
    rest = (Pair(hidden.T, count), torch.arange(4) if ids is None else ids, torch.empty(0, 3), None, object())
    return {"hidden": HIDDEN.bfloat16(), "rest": rest}


def test_the_same_output_has_no_difference(eager):
    assert compare(eager, OUTPUT) == Difference(worst=0.0, tolerance=5e-2, problem=None)


def test_rounding_is_measured_and_not_a_problem(eager):
    rounded = HIDDEN.clone()
    rounded[1, 3] += 4e-5
    difference = compare(eager, changed(rounded))
    assert difference.problem is None
    assert difference.worst == pytest.approx(1e-5, rel=0.05)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        pytest.param(
            changed(HIDDEN + 0.01), r"output\['rest'\]\[0\]\[0\] differs from eager's by 2.5e-03", id="values"
        ),
        pytest.param(changed(HIDDEN.double()), "float64", id="dtype"),
        pytest.param(changed(HIDDEN[:1]), r"\[12, 1\], and eager's is torch.float32 \[12, 2\]", id="shape"),
        pytest.param(changed(HIDDEN.where(HIDDEN > -3, torch.nan)), "infinite or NaN at other positions", id="nan"),
        pytest.param(changed(count=4), r"\[1\] differs from eager's", id="number"),
        pytest.param(changed(ids=torch.tensor([0, 1, 2, 4])), "differs from eager's", id="integers"),
        pytest.param({"hidden": HIDDEN.bfloat16()}, "structure differs", id="structure"),
    ],
)
def test_every_other_difference_is_a_problem(eager, output, message):
    problem = compare(eager, output).problem
    assert problem is not None
    assert re.search(message, problem)


def test_the_digest_of_weights_does_not_depend_on_the_number_of_threads():
    torch.manual_seed(0)
    module = torch.nn.Sequential(*(torch.nn.Linear(width, 257) for width in range(250, 270)))
    for number, dtype in enumerate((torch.bfloat16, torch.complex64, torch.bool, torch.float8_e4m3fn, torch.int64)):
        module.register_buffer(f"buffer{number}", (torch.randn(4, 3) * 3).to(dtype).t())
    module.register_buffer("nothing", torch.empty(0))
    before = torch.get_num_threads()
    digests = set()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        digests.add(weights_digest(module))
    torch.set_num_threads(before)
    assert len(digests) == 1
    with torch.no_grad():
        module[0].weight[3, 4] *= 1.0000001
    assert weights_digest(module) not in digests
