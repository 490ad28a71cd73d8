"""Examples: which variants a model's dynamic dimensions need, and an example's tensors at each variant's sizes."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from cgtool.dims import Dims
from cgtool.errors import ModelError, UsageError
from cgtool.guards.signature import CallSignature
from cgtool.model import ExampleCall
from cgtool.trace.examples import arguments_for, unique_names, variants_of

pytestmark = pytest.mark.torch


class Model:
    def forward(self, x, mask=None, flag=False, **more):
        return x


SIGNATURE = CallSignature.of(Model().forward)


def variants(*specs):
    dims = Dims.of({f"p{i}": {0: spec} for i, spec in enumerate(specs)})
    return variants_of(dims, dims.by_name)


VARIANTS = [
    ([], [{}]),
    (["n"], [{}, {"n": 1}]),
    ([("n",)], [{}, {"n": 1}]),
    ([("n", 0)], [{}, {"n": 1}, {"n": 0}]),
    ([("n", 0, None)], [{}, {"n": 1}, {"n": 0}]),
    ([("n", 1, 64)], [{}, {"n": 1}]),
    ([("n", 2, None)], [{}]),
    ([("n", 5, 9)], [{}]),
    ([("n", 1, 1)], [{"n": 1}]),
    ([("n", 0, 0)], [{"n": 0}]),
    ([("n", 0, 1)], [{"n": 1}, {"n": 0}]),
    ([("n", 2, 2)], [{}]),
    (["n", "m"], [{}, {"m": 1}, {"n": 1}, {"n": 1, "m": 1}]),
    (["n", ("m", 2, 8)], [{}, {"n": 1}]),
    (["n", "n"], [{}, {"n": 1}]),
    ([("n", 1, 1), "m"], [{"n": 1}, {"n": 1, "m": 1}]),
]


@pytest.mark.parametrize(("specs", "expected"), VARIANTS)
def test_every_size_has_a_variant(specs, expected):
    assert list(map(dict, variants(*specs))) == expected


def test_three_dimensions_have_a_variant_for_each_set_of_ones():
    found = variants("a", "b", "c")
    assert len(found) == 8
    assert [len(fixed) for fixed in found] == [0, 1, 1, 1, 2, 2, 2, 3]


def test_bounds_given_once_hold_for_every_place_of_the_name():
    for dynamic in (
        {"x": {0: ("n", 2, 8)}, "mask": {0: "n"}},
        {"x": {0: "n"}, "mask": {0: ("n", 2, 8)}},
        {"x": {0: ("n", 2, 8)}, "mask": {0: ("n", 2, 8)}},
    ):
        dims = Dims.of(dynamic)
        assert (dims.by_name["n"].min, dims.by_name["n"].max) == (2, 8)
        assert [(p.parameter, p.dim, p.name) for p in dims.places] == [("x", 0, "n"), ("mask", 0, "n")]
    with pytest.raises(UsageError, match="'n' has two different bounds"):
        Dims.of({"x": {0: ("n", 2, 8)}, "mask": {0: ("n", 2, 9)}})


BAD = [
    {"x": {0: 5}},
    {"x": {0: None}},
    {"x": {0: ()}},
    {"x": {0: "not a name"}},
    {"x": {0: ""}},
    {"x": {0: ("n", -1)}},
    {"x": {0: ("n", 5, 4)}},
    {"x": {0: ("n", 1, 2, 3)}},
    {"x": {0: ("n", 1.0, 2)}},
    {"x": {0: ("n", True, 2)}},
    {"x": {0: ("n", 1, "8")}},
    {"x": {0: (1, "n")}},
    {"x": {"0": "n"}},
    {"x": {True: "n"}},
    {"x": {0: ["n"]}},
    {"x": "n"},
    {"x": ["n"]},
    {"x": None},
]


@pytest.mark.parametrize("dynamic", BAD, ids=repr)
def test_a_malformed_dimension_is_refused(dynamic):
    if dynamic == {"x": {0: ["n"]}}:  # as JSON has no tuples
        assert Dims.of(dynamic).by_name["n"].min == 1
        return
    with pytest.raises(UsageError, match=r"dynamic\['x'\].*index"):
        Dims.of(dynamic)


def at(call, dynamic, fixed=None):
    return arguments_for(call, SIGNATURE, Dims.of(dynamic), fixed or {})


def test_an_example_of_an_allowed_size_is_used_unchanged():
    x = torch.rand(3, 4)
    arguments, marked = at(ExampleCall(args=(x,)), {"x": {0: "n"}})
    assert arguments["x"] is x
    ((tensor, dim, name),) = marked
    assert (tensor is x, dim, name) == (True, 0, "n")


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("fixed", [{}, {"n": 0}, {"n": 1}])
def test_tensors_take_the_size_of_the_variant(rows, fixed):
    x = torch.arange(rows * 4).view(rows, 4)
    arguments, marked = at(ExampleCall(args=(x,)), {"x": {0: ("n", 0)}}, fixed)
    size = fixed.get("n", max(rows, 2))
    given = arguments["x"]
    assert given.shape == (size, 4)
    assert given.dtype == x.dtype
    assert given is x or given._base is None
    assert bool(marked) == (not fixed)
    if rows:
        assert all(torch.equal(given[i], x[i % rows]) for i in range(size))
    else:
        assert not given.any()


WITHIN = [((5, None), 3, 5), ((2, 4), 9, 4), ((2, 4), 3, 3), ((1, 2), 1, 2)]


@pytest.mark.parametrize(("bounds", "rows", "size"), WITHIN)
def test_an_example_outside_the_bounds_is_resized_to_fit(bounds, rows, size):
    arguments, _ = at(ExampleCall(args=(torch.zeros(rows),)), {"x": {0: ("n", *bounds)}})
    assert len(arguments["x"]) == size


def test_dimensions_with_the_same_name_get_the_same_size():
    call = ExampleCall(args=(torch.zeros(1, 4), torch.zeros(4, 1)))
    dynamic = {"x": {0: "n"}, "mask": {1: "n"}}
    arguments, marked = at(call, dynamic)
    assert (arguments["x"].shape, arguments["mask"].shape) == ((2, 4), (4, 2))
    assert [(dim, name) for _, dim, name in marked] == [(0, "n"), (1, "n")]
    arguments, marked = at(call, dynamic, {"n": 1})
    assert (arguments["x"].shape, arguments["mask"].shape, marked) == ((1, 4), (4, 1), [])


def test_several_dimensions_of_one_tensor_are_sized_together():
    arguments, marked = at(ExampleCall(args=(torch.ones(4, 1, 3),)), {"x": {0: "n", 1: "m", -1: "k"}}, {"n": 1})
    assert arguments["x"].shape == (1, 2, 3)
    assert [name for _, _, name in marked] == ["m", "k"]
    assert all(tensor is arguments["x"] for tensor, _, _ in marked)


def test_an_absent_argument_has_no_dimensions():
    for call in (ExampleCall(args=(torch.zeros(3),)), ExampleCall(args=(torch.zeros(3), None))):
        arguments, marked = at(call, {"x": {0: "n"}, "mask": {0: "n", 1: "m"}})
        assert arguments["mask"] is None
        assert [name for _, _, name in marked] == ["n"]


def test_an_argument_among_the_keyword_arguments_is_found():
    call = ExampleCall(args=(torch.zeros(3),), kwargs={"bias": torch.zeros(3, 5)})
    arguments, marked = at(call, {"x": {0: "n"}, "bias": {0: "n"}}, {"n": 1})
    assert arguments["more"]["bias"].shape == (1, 5)
    arguments, marked = at(call, {"x": {0: "n"}, "bias": {0: "n"}})
    assert [(dim, name) for _, dim, name in marked] == [(0, "n"), (0, "n")]


def test_the_tensors_of_the_example_are_not_modified():
    x = torch.arange(12.0).view(3, 4)
    before = x.clone()
    arguments, _ = at(ExampleCall(args=(x,)), {"x": {0: "n"}}, {"n": 1})
    arguments["x"].fill_(-1)
    assert torch.equal(x, before)


LAYOUTS = [
    (lambda n: torch.empty(n, 3, 4), 0),
    (lambda n: torch.empty(2, n, 4), 1),
    (lambda n: torch.empty(6, n).t(), 0),
    (lambda n: torch.empty(n, 6).t(), 1),
    (lambda n: torch.empty(n, 3, 8)[:, :, :5], 0),
    (lambda n: torch.empty(n, 3, 8)[..., 3:], 0),
    (lambda n: torch.empty(2, n, 3, 8).transpose(1, 2), 2),
    (lambda n: torch.empty(n, 3, 4, 4).to(memory_format=torch.channels_last), 0),
    (lambda n: torch.empty(n, 3, 4, 4)[:, :, ::2], 0),
]


RESIZED = [(case, 5, fixed) for case in range(len(LAYOUTS)) for fixed in ({"n": 1}, {"n": 0}, {})]
#: With one row there is nothing to see of some layouts.
RESIZED += [(case, 1, {}) for case, (make, _) in enumerate(LAYOUTS) if not make(1).is_contiguous() or case < 2]


@pytest.mark.parametrize(("case", "rows", "fixed"), RESIZED)
def test_a_resized_tensor_keeps_the_layout_of_the_example(case, rows, fixed):
    make, dim = LAYOUTS[case]
    arguments, _ = at(ExampleCall(args=(make(rows),)), {"x": {dim: ("n", 0)}}, fixed)
    given, wanted = arguments["x"], make(fixed.get("n", max(rows, 2)))
    assert given.shape == wanted.shape
    sized = [i for i, size in enumerate(wanted.shape) if size > 1]
    if given.numel():
        assert [given.stride(i) for i in sized] == [wanted.stride(i) for i in sized]


def test_an_expanded_example_is_resized_too():
    arguments, _ = at(ExampleCall(args=(torch.arange(4.0).expand(3, 4),)), {"x": {0: "n"}}, {"n": 1})
    assert torch.equal(arguments["x"], torch.arange(4.0).view(1, 4))


MISSING = [
    ({"x": {2: "n"}}, {}, "names dimension 2 of 'x'"),
    ({"x": {-3: "n"}}, {}, "names dimension -3 of 'x'"),
    ({"flag": {0: "n"}}, {}, "names dimension 0 of 'flag'"),
    ({"flag": {0: ("n", 1, 1)}}, {"n": 1}, "names dimension 0 of 'flag'"),
    ({"x": {0: "n"}, "mask": {7: "n"}}, {}, "names dimension 7 of 'mask'"),
    ({"x": {5: ("n", 1, 1)}}, {"n": 1}, "names dimension 5 of 'x'"),
]


@pytest.mark.parametrize(("dynamic", "fixed", "words"), MISSING)
def test_a_dimension_missing_from_the_example_is_reported(dynamic, fixed, words):
    with pytest.raises(ModelError, match=words):
        at(ExampleCall(args=(torch.zeros(3, 4), torch.zeros(3), True)), dynamic, fixed)


def test_an_unknown_parameter_is_reported():
    signature = CallSignature.of(Plain().forward)
    with pytest.raises(ModelError, match="has no parameter 'y'; its parameters are: x"):
        arguments_for(ExampleCall(args=(torch.zeros(3),)), signature, Dims.of({"y": {0: "n"}}), {})


class Plain:
    def forward(self, x):
        return x


def test_an_example_that_does_not_match_is_reported_by_name():
    with pytest.raises(ModelError, match="The example call 'decode' does not match"):
        at(ExampleCall(name="decode"), {"x": {0: "n"}})


def test_examples_must_have_unique_names():
    unique_names([ExampleCall(name="prefill"), ExampleCall(name="decode")])
    with pytest.raises(UsageError, match="same name"):
        unique_names([ExampleCall(), ExampleCall()])
    with pytest.raises(UsageError, match="at least one"):
        unique_names([])
