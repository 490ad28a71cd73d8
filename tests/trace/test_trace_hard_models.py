"""Hard models: each call equals eager or is refused with a message, or warm reports what is wrong."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import hard_models as models
import torch
from trace_harness import EAGER, outcome, served

import cgtool
from cgtool import errors
from cgtool.errors import CgtoolError

pytestmark = pytest.mark.torch

GOOD = [name for name, case in models.CASES.items() if case.fails is None]
BAD = [name for name, case in models.CASES.items() if case.fails is not None]


def warmed(case, root):
    example = case.example()
    return served(root, case.build(), *example.args, dynamic=case.dynamic, **example.kwargs)


@pytest.mark.parametrize("name", GOOD)
def test_calls_are_equal_to_eager_or_refused(name, tmp_path):
    case = models.CASES[name]
    loaded, eager = warmed(case, tmp_path), case.build()
    for call_name, make in case.served.items():
        assert outcome(eager, loaded, make) == "equal", call_name
    for make in case.tried.values():
        outcome(eager, loaded, make)


@pytest.mark.parametrize("name", BAD)
def test_unsupported_models_are_refused_at_warm(name, tmp_path):
    case = models.CASES[name]
    kind, _, words = str(case.fails).partition(": ")
    with pytest.raises(CgtoolError) as caught:
        warmed(case, tmp_path)
    assert isinstance(caught.value, getattr(errors, kind, CgtoolError))
    assert words in str(caught.value)
    assert not list(tmp_path.rglob("manifest.json"))


def test_warming_does_not_change_the_model(tmp_path):
    for name in ("CountsInBuffer", "ScattersIntoCache", "WritesToInput"):
        case = models.CASES[name]
        module, example = case.build(), case.example()
        before = {key: value.clone() for key, value in module.state_dict().items()}
        given = [value.clone() for value in example.args]
        cgtool.compile(module, example_args=example.args, cache_dir=tmp_path, config=EAGER)
        assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
        assert all(map(torch.equal, example.args, given))


FACTOR = {"value": 2.0}


def composed(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR["value"]


@pytest.fixture(scope="module")
def composite_op():
    library = torch.library.Library("cgtool_hard_composite", "DEF")
    library.define("scaled(Tensor x) -> Tensor")
    library.impl("scaled", composed, "CompositeImplicitAutograd")
    yield
    library._destroy()


class CallsComposite(models.Base):
    def forward(self, x):
        return torch.ops.cgtool_hard_composite.scaled(self.linear(x))


def test_an_op_implemented_in_python_is_not_inlined(composite_op, tmp_path, monkeypatch):
    module = CallsComposite().eval()
    config = cgtool.CompilationConfig(adaptor="inductor_standalone", jobs=0, proof=False)
    loaded = served(tmp_path, module, models.x(), config=config)
    monkeypatch.setitem(FACTOR, "value", 3.0)
    torch.testing.assert_close(loaded(models.x()), module(models.x()))
