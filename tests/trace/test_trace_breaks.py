"""Errors for code that cannot be traced: the user's line, the cause, and what to do."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import re
import types
import warnings

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from trace_harness import EAGER, agree, plan_of, served

import cgtool
from cgtool.compiler.pipeline import warm
from cgtool.errors import GraphBreakError, TraceError
from cgtool.model import ExampleCall, ModelSpec

pytestmark = pytest.mark.torch

_log = logging.getLogger(__name__)
SEEN = []
STATE, COUNTER = {"calls": 0}, 0


class Model(nn.Module):
    """Calls a function with itself and its argument."""

    total = 0

    def __init__(self, body):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.count = 0
        self.history = []
        self.register_buffer("ticks", torch.zeros(4))
        self.body = body

    def forward(self, x):
        return self.body(self, self.layer(x))


def prints(model, y):
    print("rows", y.shape[0])  # noqa: T201
    return y


def item(model, y):
    scale = y.max().item()
    return y * scale


def branch(model, y):
    if y.sum() > 0:
        return y
    return -y


def python_number(model, y):
    return y * float(y.sum())


def to_list(model, y):
    return y * len(y[0].tolist())


def list_of_any_length(model, y):
    return y * len(torch.bincount(y.long().flatten().abs()).tolist())


def nonzero(model, y):
    return y[torch.nonzero(y[:, 0] > 0).squeeze(-1)]


def masked(model, y):
    return y[y > 0]


def file(model, y):
    with open("/dev/null") as stream:  # noqa: PTH123
        stream.read()
    return y


def bytes_of_python(model, y):
    return y + torch.frombuffer(bytearray(16), dtype=torch.float32)


def explicit(model, y):
    torch._dynamo.graph_break()
    return y


def layer_made_as_it_runs(model, y):
    return nn.Linear(4, 4)(y)


AT_TRACE = [
    (layer_made_as_it_runs, "when the model is built"),
    (branch, "pass it in, or keep it a tensor"),
    (to_list, "pass it in, or keep it a tensor"),
    (list_of_any_length, "pass it in, or keep it a tensor"),
    (file, "custom op"),
    (bytes_of_python, "custom op"),
    (explicit, "custom op"),
]


@pytest.mark.parametrize(("body", "advice"), AT_TRACE, ids=lambda case: getattr(case, "__name__", ""))
def test_a_graph_break_reports_the_users_line_and_a_hint(body, advice):
    with pytest.raises(GraphBreakError) as caught:
        plan_of(Model(body), torch.rand(3, 4), dynamic={"x": {0: "n"}})
    text = str(caught.value)
    assert shown_line(text, body), text
    assert advice in text.splitlines()[-1], text
    assert "is_compiling" not in text
    assert len(text) < 2500
    assert not any(words in text for words in ("report an issue", "TORCH_LOGS", "User Stack", "Caused by"))


@pytest.mark.parametrize("body", [item, python_number, nonzero, masked])
def test_data_dependent_values_can_be_computed_with(tmp_path, body):
    model = Model(body)
    loaded = served(tmp_path, model, torch.rand(3, 4), dynamic={"x": {0: "n"}})
    for rows in (3, 1, 5):
        agree(loaded, model, torch.rand(rows, 4))


class Whole(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        part = self.part
        return part(x) + 1


@pytest.mark.parametrize("otherwise", ["raise", "eager"])
def test_a_call_of_a_compiled_model_is_refused_with_its_line(tmp_path, otherwise):
    part = cgtool.compile(
        nn.Linear(4, 4).eval(), example_args=(torch.rand(3, 4),), config=EAGER, cache_dir=tmp_path, otherwise=otherwise
    )
    with pytest.raises(GraphBreakError, match="has compiled already") as caught:
        plan_of(Whole(part).eval(), torch.rand(3, 4), dynamic={})
    assert shown_line(str(caught.value), Whole.forward), str(caught.value)
    assert "original module" in str(caught.value)


def shown_line(text, function):
    """Return whether a message shows file:line, in function, and the line's text, of the function or its caller."""
    lines, start = inspect.getsourcelines(function)
    for number, line in re.findall(rf"{re.escape(__file__)}:(\d+), in \w+: (.*)", text):
        here = int(number) - start
        if 0 <= here < len(lines) and line == lines[here].strip() and "def " not in line:
            return True
    return False


def test_a_print_is_reported_with_its_line(capsys):
    with pytest.raises(GraphBreakError) as caught:
        plan_of(Model(prints), torch.rand(3, 4))
    assert shown_line(str(caught.value), prints), str(caught.value)
    assert "torch.compiler.is_compiling()" in str(caught.value)
    assert capsys.readouterr().out == ""


def test_a_print_guarded_by_is_compiling_is_no_graph_break(tmp_path, capsys):
    def body(model, y):
        if not torch.compiler.is_compiling():
            print("eager")  # noqa: T201
        return y

    model = Model(body)
    loaded = served(tmp_path, model, torch.rand(3, 4))
    loaded(torch.rand(3, 4))
    assert capsys.readouterr().out == ""


def shapes_do_not_fit(model, y):
    return y @ torch.zeros(5, 5)


def raises(model, y):
    raise ValueError("the rows must be even")


def divides(model, y):
    return y / (0 // model.count)


def asks_for_what_is_not_there(model, y):
    return y + model.no_such_layer(y)


OWN_ERRORS = [
    (shapes_do_not_fit, r"reduction dim"),
    (raises, "ValueError: the rows must be even"),
    (divides, "ZeroDivisionError: integer division"),
    (asks_for_what_is_not_there, "no_such_layer"),
]


@pytest.mark.parametrize(("body", "words"), OWN_ERRORS, ids=lambda case: getattr(case, "__name__", ""))
def test_an_error_raised_by_the_model_is_reported_as_such(body, words):
    with pytest.raises(TraceError, match=words) as caught:
        plan_of(Model(body), torch.rand(3, 4))
    assert not isinstance(caught.value, GraphBreakError)
    assert str(caught.value).startswith("The model fails on the example: ")
    assert str(caught.value).endswith("Correct the example or the model.")
    assert shown_line(str(caught.value), body), str(caught.value)


def counts(model, y):
    model.count += 1
    return y


def remembers(model, y):
    model.history.append(1)
    return y


def keeps_a_parameter(model, y):
    model.last = model.layer.weight
    return y


def writes_a_global(model, y):
    SEEN.append(y.shape[0])
    return y


def rebinds_a_global(model, y):
    global COUNTER  # noqa: PLW0603 - what is tested
    COUNTER += 1
    return y


def writes_a_global_dict(model, y):
    STATE["calls"] = STATE["calls"] + 1
    return y


def counts_on_the_class(model, y):
    type(model).total += 1
    return y


SIDE_EFFECTS = [
    (counts, r"changes count"),
    (remembers, r"changes history"),
    (keeps_a_parameter, r"changes last"),
    (writes_a_global, r"changes .*SEEN"),
    (rebinds_a_global, "COUNTER"),
    (writes_a_global_dict, "STATE"),
    (counts_on_the_class, "total"),
]


@pytest.mark.parametrize(("body", "words"), SIDE_EFFECTS, ids=lambda case: getattr(case, "__name__", ""))
def test_a_side_effect_is_reported_with_its_target(body, words):
    with pytest.raises(TraceError, match=words) as caught:
        plan_of(Model(body), torch.rand(3, 4))
    assert "Keep state in buffers that are written in place" in str(caught.value)
    assert "If it fills a cache, call the model once before it is compiled" in str(caught.value)


def test_a_restored_attribute_is_no_side_effect(tmp_path):
    def body(model, y):
        model.count = 5
        y = y + model.count
        model.count = 0
        return y

    model = Model(body)
    agree(served(tmp_path, model, torch.rand(3, 4)), model, torch.rand(3, 4))


def fixed_by_code(model, y):
    return y.view(3, 2, 2)


def fixed_by_branch(model, y):
    return y * 2 if y.shape[0] == 3 else y


@pytest.mark.parametrize("body", [fixed_by_code, fixed_by_branch])
def test_a_dynamic_dimension_fixed_by_the_code_is_reported(body):
    with pytest.raises(
        TraceError, match=r"should be dynamic is not: x, dimension 0, is always 3 in this model because of `"
    ) as caught:
        plan_of(Model(body), torch.rand(3, 4), dynamic={"x": {0: ("n", 2, None)}})
    assert "Remove it from `dynamic`, or change the code that fixes it." in str(caught.value)


class NoTensors(nn.Module):
    def forward(self, x):
        return 5


def test_a_model_without_tensor_ops_is_refused():
    with pytest.raises(TraceError, match=r"This model's forward does nothing with tensors"):
        plan_of(NoTensors(), 3)


class Partial(nn.Module):
    def scaled(self, x, factor):
        return x * factor

    forward = functools.partialmethod(scaled, factor=2)


class CompiledAlready(nn.Module):
    @torch.compile
    def forward(self, x):
        return x * 2


class OfNoModule(nn.Module):
    forward = types.FunctionType((lambda self, x: x * 2).__code__, {})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Partial, "is a partial, not a function"),
        (CompiledAlready, "is already wrapped by torch.compile"),
        (OfNoModule, "belongs to no module"),
    ],
)
def test_a_forward_that_is_not_a_plain_function_of_a_module_is_refused(make, words):
    with pytest.raises(TraceError, match=f"^The method to compile {words}"):
        plan_of(make(), torch.rand(3, 4))


class Around(nn.Linear):
    def __call__(self, *args):
        return super().__call__(*args) * 2


def test_code_that_runs_around_forward_is_refused():
    with pytest.raises(TraceError, match="overrides __call__; move its code into forward"):
        plan_of(Around(4, 4), torch.rand(3, 4))
    hooked = nn.Linear(4, 4)
    handle = hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(TraceError, match="has hooks, which run around forward"):
        plan_of(hooked, torch.rand(3, 4))
    handle.remove()
    plan_of(hooked, torch.rand(3, 4))


def test_training_mode_is_refused(tmp_path):
    spec = ModelSpec(module=nn.Linear(4, 4).train(), calls=[ExampleCall(args=(torch.rand(3, 4),))])
    with pytest.raises(TraceError, match=r"training mode.*Call model\.eval\(\) first"):
        warm(spec, config=EAGER, cache_dir=tmp_path)
    assert list(tmp_path.rglob("manifest.json")) == []


class Wrapped(torch.Tensor):
    """A tensor subclass that wraps another tensor, as quantised weights do."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts, _context, _size, _stride):
        return Wrapped(parts["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, _types, args=(), kwargs=None):
        plain = [arg.inner if isinstance(arg, Wrapped) else arg for arg in args]
        found = func(*plain, **(kwargs or {}))
        return Wrapped(found) if func is torch.ops.aten.detach.default else found


class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(Wrapped(torch.rand(4, 4)), requires_grad=False)

    def forward(self, x):
        return x @ self.weight


def test_a_tensor_subclass_is_refused_by_name():
    with pytest.raises(TraceError, match=r"weight.* is a Wrapped, a tensor subclass that an artifact cannot take"):
        plan_of(Quantised(), torch.rand(3, 4))


def test_a_failed_trace_does_not_affect_the_next(tmp_path):
    for _ in range(2):
        with pytest.raises(TraceError):
            plan_of(Model(branch), torch.rand(3, 4), dynamic={"x": {0: "n"}})
    model = Model(lambda model, y: y * math.pi)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Guards may run slower")  # Dynamo warns on Python 3.13.0
        agree(served(tmp_path, model, torch.rand(3, 4), dynamic={"x": {0: "n"}}), model, torch.rand(5, 4))


def test_log_once_methods_added_by_libraries_are_left_out_of_the_graph(monkeypatch):
    class Telling(nn.Module):
        def forward(self, x):
            _log.warning_once("seen")
            return x + 1

    monkeypatch.setattr(logging.Logger, "warning_once", functools.lru_cache(logging.Logger.warning), raising=False)
    plan_of(Telling(), torch.ones(4))
