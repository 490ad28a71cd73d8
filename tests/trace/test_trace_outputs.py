"""Outputs: containers, classes, sizes and constants are rebuilt; the rest is refused at warm."""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter, OrderedDict, namedtuple
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from trace_harness import agree, plan_of, served

from cgtool.errors import GuardError, SplitError, TraceError

pytestmark = pytest.mark.torch


Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 - both kinds of named tuples are met


class Typed(NamedTuple):
    hidden: torch.Tensor
    count: int = 0


@dataclasses.dataclass
class Inner:
    tensor: torch.Tensor
    label: str = "none"


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner
    items: list[Any]


@dataclasses.dataclass
class Computed:
    tensor: torch.Tensor
    twice: Any = dataclasses.field(init=False)

    def __post_init__(self):
        self.twice = self.tensor * 2


class Held:
    def __init__(self, tensor):
        self.tensor = tensor


class Colour(enum.Enum):
    RED = 1


class Model(nn.Module):
    """Returns the result of a function of a tensor, a value computed from it, and a constant."""

    def __init__(self, make):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.rate = 0.25
        self.register_buffer("table", torch.arange(4.0))
        self.make = make

    def forward(self, x, extra=None):
        return self.make(self, x, torch.tanh(self.layer(x)), extra)


def a_tensor(model, x, y, extra):
    return y


def nothing(model, x, y, extra):
    y.sum()


def a_list_in_a_tuple_in_a_dict(model, x, y, extra):
    return {"a": (y, [y * 2, None]), 3: [], (1, "b"): {}, None: ((),)}


def one_tensor_twice(model, x, y, extra):
    return [y, (y, y)]


def named_tuples(model, x, y, extra):
    return Pair(left=y, right=Typed(hidden=y + 1, count=7))


def dataclasses_in_each_other(model, x, y, extra):
    return Outer(inner=Inner(tensor=y), items=[Inner(tensor=y * 2, label="second")])


def an_ordered_dict(model, x, y, extra):
    return OrderedDict(b=y, a=OrderedDict(c=y + 1, d=[x.shape[0], x.dtype, x.device]))


def of_torch(model, x, y, extra):
    return torch.max(y, dim=-1), torch.sort(y, dim=-1)


def sizes(model, x, y, extra):
    return x.shape, x.shape[0], x.size(-1), x.shape[0] * 2 + 1, y.numel(), y.stride(), x.stride(), {"of": y.shape}


def constants(model, x, y, extra):
    return y, 1, True, 2.5, -0.0, 1e-9, float("-inf"), "text", None, b"bytes", 3j, torch.float16, ...


def more_constants(model, x, y, extra):
    return y, torch.device("cpu"), Colour.RED, range(3), slice(1, None), frozenset({1, 2}), {1, 2}


def attributes_of_the_model(model, x, y, extra):
    return y, model.rate, model.training


def what_was_passed_in(model, x, y, extra):
    return x, y, extra


def a_view_of_what_was_passed_in(model, x, y, extra):
    return x[1:], x.t(), y


def tensors_of_the_model(model, x, y, extra):
    return model.table, model.layer.weight, y * model.table


def an_unused_tensor_of_the_model(model, x, y, extra):
    return y, model.table


RETURNED = [
    a_tensor,
    nothing,
    a_list_in_a_tuple_in_a_dict,
    one_tensor_twice,
    named_tuples,
    dataclasses_in_each_other,
    an_ordered_dict,
    of_torch,
    sizes,
    constants,
    more_constants,
    attributes_of_the_model,
    what_was_passed_in,
    a_view_of_what_was_passed_in,
    tensors_of_the_model,
    an_unused_tensor_of_the_model,
]


@pytest.mark.parametrize("make", RETURNED, ids=lambda make: make.__name__)
def test_a_loaded_model_returns_what_the_model_returns(tmp_path, make):
    model = Model(make)
    loaded = served(tmp_path, model, torch.rand(3, 4), dynamic={"x": {0: "n"}})
    for rows in (3, 1, 2, 9):
        agree(loaded, model, torch.rand(rows, 4))


def test_outputs_that_are_the_same_object_stay_the_same_object(tmp_path):
    model = Model(one_tensor_twice)
    one, (other, third) = served(tmp_path, model, torch.rand(3, 4))(torch.rand(3, 4))
    assert one is other is third
    model = Model(what_was_passed_in)
    x, extra = torch.rand(3, 4), torch.rand(2)
    got = served(tmp_path, model, x, extra)(x, extra)
    assert got[0] is x
    assert got[2] is extra
    model = Model(tensors_of_the_model)
    got = served(tmp_path, model, x)(x)
    assert got[0] is model.table
    assert got[1] is model.layer.weight


def objects_that_are_there(model, x, y, extra):
    return y, extra, extra["held"], model.settings, model.table, model


def test_existing_objects_are_returned_themselves(tmp_path):
    model = Model(objects_that_are_there)
    model.settings = {"a": [1]}
    loaded = served(tmp_path, model, torch.rand(3, 4), {"held": Held(torch.rand(2))})
    extra = {"held": Held(torch.rand(2))}
    for _ in range(2):
        _, *got = loaded(torch.rand(3, 4), extra)
        there = (extra, extra["held"], model.settings, model.table, model)
        assert all(one is other for one, other in zip(got, there, strict=True))
        model.table = torch.rand(4)


def test_mutable_containers_are_new_for_each_call(tmp_path):
    loaded = served(tmp_path, Model(a_list_in_a_tuple_in_a_dict), torch.rand(3, 4))
    first, second = loaded(torch.rand(3, 4)), loaded(torch.rand(3, 4))
    first[3].append("ours")
    first["a"][1].clear()
    assert second[3] == []
    assert len(second["a"][1]) == 2
    assert loaded(torch.rand(3, 4))[3] == []


def test_containers_of_arguments_are_returned_unchanged(tmp_path):
    model = Model(lambda model, x, y, extra: (y, extra))
    extra = {"a": [torch.rand(2), None], "b": (1, "c")}
    loaded = served(tmp_path, model, torch.rand(3, 4), extra)
    given = {"a": [torch.rand(2), None], "b": (1, "c")}
    agree(loaded, model, torch.rand(3, 4), given)


def a_class_of_ones_own(model, x, y, extra):
    return {"held": [Held(y)]}


def make_local():
    @dataclasses.dataclass
    class Local:
        tensor: torch.Tensor

    return Local


LOCAL = make_local()


def a_class_of_a_function(model, x, y, extra):
    return LOCAL(tensor=y)


def a_field_that_is_computed(model, x, y, extra):
    return Computed(tensor=y)


def a_generator(model, x, y, extra):
    return (y * k for k in range(2))


def an_attribute_of_a_tensor(model, x, y, extra):
    y.mark = 1
    return (y,)


def a_tensor_made_of_a_constant(model, x, y, extra):
    return y, model.table.data


def data_as_a_number(model, x, y, extra):
    return y, extra.item()


def an_attribute_of_a_dataclass(model, x, y, extra):
    made = Inner(tensor=y)
    made.twice = y * 2
    return [made]


def an_attribute_of_an_ordered_dict(model, x, y, extra):
    made = OrderedDict(a=y)
    made.mark = 1
    return made


def a_counter(model, x, y, extra):
    return y, [Counter("aab")]


def a_ratio_of_sizes(model, x, y, extra):
    return y, x.shape[0] / 2


def a_number_of_data(model, x, y, extra):
    return y, y.sum().item()


CANNOT = [
    (a_class_of_ones_own, r"output\['held'\]\[0\] is of type .*:Held, which a loaded model cannot rebuild"),
    (a_class_of_a_function, r"output is of type .*<locals>.Local, which a loaded model cannot rebuild"),
    (an_attribute_of_a_tensor, r"output\[0\] has the attribute mark, which forward sets"),
    (a_tensor_made_of_a_constant, r"output\[1\] is a tensor that is neither computed by the graph nor passed in"),
    (a_field_that_is_computed, r"output is of type .*:Computed, which a loaded model cannot rebuild"),
    (a_generator, r"generator|output is of type"),
    (an_attribute_of_a_dataclass, r"output\[0\] has the attribute twice, which forward sets; make it a field"),
    (an_attribute_of_an_ordered_dict, r"output has the attribute mark, which forward sets; make it a field"),
    (a_counter, r"output\[1\]\[0\] is of type collections:Counter, which a loaded model cannot rebuild"),
    (a_ratio_of_sizes, "number"),
    (a_number_of_data, "number"),
]


@pytest.mark.parametrize(("make", "words"), CANNOT, ids=lambda case: getattr(case, "__name__", ""))
def test_outputs_that_cannot_be_rebuilt_are_refused_at_warm(make, words):
    with pytest.raises(TraceError, match=words):
        plan_of(Model(make), torch.rand(3, 4), dynamic={"x": {0: "n"}})


def test_a_number_read_from_data_is_refused():
    with pytest.raises(SplitError, match=r"return y, extra.item\(\)\) .*return tensors"):
        plan_of(Model(data_as_a_number), torch.rand(3, 4), torch.tensor(3))


SHOWN = [
    pytest.param(lambda x: x[:, 1:], True, id="slice"),
    pytest.param(lambda x: x.transpose(0, 1), True, id="transposed"),
    pytest.param(lambda x: x.clone(), True, id="copy"),
    pytest.param(torch.zeros_like, True, id="zeros_like"),
    pytest.param(lambda x: x + 1, False, id="sum"),
    pytest.param(lambda x: x @ x.t(), False, id="product"),
    pytest.param(lambda x: torch.cat([x, x]), False, id="joined"),
    pytest.param(lambda x: x.squeeze(0) * 2, False, id="squeezed"),
]


class Applied(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize(("function", "is_shown"), SHOWN)
def test_a_stride_of_a_dimension_of_size_one_is_guarded_if_an_output_depends_on_it(tmp_path, function, is_shown):
    model, part = Applied(function), torch.rand(2, 4)[::2]
    loaded = served(tmp_path, model, torch.rand(1, 4))
    if is_shown:
        with pytest.raises(GuardError, match="x was a tensor whose dimensions of size one have the strides"):
            loaded(part)
    else:
        assert agree(loaded, model, part).stride() == model(part).stride()
