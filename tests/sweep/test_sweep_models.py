"""Hard little models: each call is served as eager serves it, or refused in a sentence, or warm says what is wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import sweep_models as models
import torch
from sweep_harness import outcome, warmed

import cgtool
from cgtool import errors
from cgtool.errors import CgtoolError, GuardError

pytestmark = pytest.mark.torch

GOOD = [name for name, case in models.CASES.items() if case.fails is None]
BAD = [name for name, case in models.CASES.items() if case.fails is not None]
#: Where a compiler adds something to the question: aliases, writes, strides, randomness, regions.
COMPILED = [
    *("WritesToInput", "WritesToFirst", "written_twice_example", "written_overlapping_example", "CountsInBuffer"),
    *("TiedBufferViews", "ScattersIntoCache", "ReturnsInputs", "ReturnsOneTwice", "LooksAtStrides", "TakesTransposed"),
    *("DrawsRandom", "DropsAlways", "AutocastInside", "ReturnsSizes", "DynamicLast", "StructOutputs"),
]


#: Of these, what is proved in a child process too, which takes longer than the rest: what is wrong shows here anyway.
PROVED = "WritesToFirst"


def check(name: str, cache: Path, adaptor: str, **fields: Any) -> None:
    case = models.CASES[name]
    loaded = warmed(case.build(), case.example(), cache, dynamic=case.dynamic, adaptor=adaptor, **fields)
    eager = case.build()
    for call_name, make in case.served.items():
        assert outcome(eager, loaded, make) == "equal", call_name
    for make in case.tried.values():
        outcome(eager, loaded, make)


@pytest.mark.parametrize("name", GOOD)
def test_calls_are_equal_to_eager_or_refused(name, tmp_path):
    check(name, tmp_path, "eager")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if number % 3 else []) for number, name in enumerate(COMPILED)]
)
def test_compiled_calls_are_equal_to_eager_or_refused(name, tmp_path):
    check(name, tmp_path, "inductor_standalone", proof=name == PROVED)


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_kept_is_said_at_warm(name, tmp_path):
    case = models.CASES[name]
    kind, _, words = str(case.fails).partition(": ")
    with pytest.raises(CgtoolError) as caught:
        warmed(case.build(), case.example(), tmp_path, dynamic=case.dynamic)
    assert isinstance(caught.value, getattr(errors, kind, CgtoolError))
    assert words in str(caught.value)
    assert not list(tmp_path.rglob("manifest.json"))


def test_a_module_that_forward_imports_need_not_be_imported_at_load(tmp_path):
    case = models.CASES["ImportsInForward"]
    warmed(case.build(), case.example(), tmp_path, dynamic=case.dynamic)
    sys.modules.pop("sweep_late")
    loaded = cgtool.load(case.build(), cache_dir=tmp_path)
    assert outcome(case.build(), loaded, lambda: models.call(models.x(5))) == "equal"


def test_the_grad_mode_that_forward_asks_for_is_the_traced_one(tmp_path):
    case = models.CASES["BranchesOnGradMode"]
    module = case.build().requires_grad_(False)
    loaded = warmed(module, case.example(), tmp_path)
    with torch.enable_grad(), pytest.raises(GuardError, match="grad mode is True and was False"):
        loaded(models.x())
    with torch.inference_mode():
        torch.testing.assert_close(loaded(models.x()), module(models.x()))


def test_warming_changes_nothing_of_the_model(tmp_path):
    for name in ("CountsInBuffer", "ScattersIntoCache", "WritesToInput"):
        case = models.CASES[name]
        module, example = case.build(), case.example()
        before = {key: value.clone() for key, value in module.state_dict().items()}
        given = [value.clone() for value in example.args]
        with torch.no_grad():
            cgtool.compile(
                module, example_args=example.args, cache_dir=tmp_path, config=cgtool.CompilationConfig(adaptor="eager")
            )
        assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
        assert all(map(torch.equal, example.args, given))


FACTOR = {"value": 2.0}


def composed(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR["value"]


@pytest.fixture(scope="module")
def composite_op():
    library = torch.library.Library("cgtool_sweep_composite", "DEF")
    library.define("scaled(Tensor x) -> Tensor")
    library.impl("scaled", composed, "CompositeImplicitAutograd")
    yield
    library._destroy()


class CallsComposite(models.Base):
    def forward(self, x):
        return torch.ops.cgtool_sweep_composite.scaled(self.linear(x))


def test_an_op_composed_in_python_is_not_compiled_in(composite_op, tmp_path, monkeypatch):
    module = CallsComposite().eval()
    loaded = warmed(module, models.call(models.x()), tmp_path, adaptor="inductor_standalone")
    monkeypatch.setitem(FACTOR, "value", 3.0)
    with torch.no_grad():
        torch.testing.assert_close(loaded(models.x()), module(models.x()))
