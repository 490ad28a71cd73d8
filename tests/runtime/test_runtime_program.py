"""The stitched program: outputs, strides, freed intermediates, and no code from a malicious plan."""

from __future__ import annotations

import re
import weakref
from typing import NamedTuple

import hand_plans as hand
import pytest
import torch
from msgspec.structs import replace

from cgtool.errors import ArtifactError, CgtoolError
from cgtool.graph.values import encode_value
from cgtool.plan.pieces import Node, SymbolRange
from cgtool.plan.records import Guard, Input, Step
from cgtool.runtime.call import LoadedModel
from cgtool.runtime.dispatch import PiecewiseBackend
from cgtool.runtime.generate import op_names
from cgtool.runtime.op_by_op import piece_function

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_grad")]


class Pair(NamedTuple):
    left: object
    right: object


class Bag(dict):
    """A subclass of dict."""


@pytest.fixture
def model():
    torch.manual_seed(0)
    return hand.Model()


def test_an_output_is_built_from_its_template(model):
    template = [
        "call",
        "hand_plans:Output",
        [],
        [
            ["hidden", ["v", 5]],
            [
                "extra",
                [
                    "dict",
                    [
                        ["rows", ["expr", "2*s0 + 1"]],
                        [3, ["tuple", [["v", 5], ["const", None], ["const", ["f", "1e-06"]]]]],
                        ["pair", ["call", "test_runtime_program:Pair", [["v", 4], ["const", "x'y"]], []]],
                        ["bag", ["call", "test_runtime_program:Bag", [], [["a", ["list", []]]]]],
                        ["weight", ["source", "self.first.weight"]],
                        ["given", ["source", "arg:mask"]],
                        ["x", ["source", "arg:x"]],
                        ["top", ["call", "torch.return_types:max", [["tuple", [["v", 4], ["v", 5]]]], []]],
                        ["dtype", ["const", ["dtype", "float16"]]],
                    ],
                ],
            ],
        ],
    ]
    loaded = hand.load(model, hand.variant(output=template, call_guards=()))
    x, mask = torch.randn(3, hand.WIDTH), object()
    got = loaded(x, mask)
    assert type(got) is hand.Output
    assert torch.equal(got.hidden, model(x))
    assert list(got.extra) == ["rows", 3, "pair", "bag", "weight", "given", "x", "top", "dtype"]
    assert got.extra["rows"] == 7
    assert got.extra[3] == (got.hidden, None, 1e-06)
    assert type(got.extra["pair"]) is Pair
    assert got.extra["pair"].right == "x'y"
    assert got.extra["bag"] == {"a": []}
    assert type(got.extra["bag"]) is Bag
    assert got.extra["weight"] is model.first.weight
    assert got.extra["given"] is mask
    assert got.extra["x"] is x
    assert type(got.extra["top"]) is torch.return_types.max
    assert got.extra["top"].values is got.extra["pair"].left
    assert got.extra["dtype"] is torch.float16


def test_mutable_constants_are_new_in_each_call(model):
    loaded = hand.load(model, hand.variant(output=["const", ["d", ["a", ["l", 1, 2]]]]))
    x = torch.randn(3, hand.WIDTH)
    loaded(x)["a"].append(3)
    assert loaded(x) == {"a": [1, 2]}


def test_a_returned_input_is_the_same_object(model):
    loaded = hand.load(model, hand.variant(output=["tuple", [["v", 0], ["v", 1]]]))
    x = torch.randn(3, hand.WIDTH)
    got = loaded(x)
    assert got[0] is x
    assert got[1] is model.first.weight


def _attention(name, **meta):
    """The plan with another op in the middle, whose fake implementation promises these strides."""
    row = hand.tensor("s0", hand.WIDTH, **meta)
    middle = hand.graph([hand.ROWS], [hand.call(f"torch.ops.cgtool_runtime_test.{name}", "%0")], ["%1"], [row])
    steps = list(hand.variant().steps)
    steps[1] = replace(steps[1], graph=middle.identity())
    return hand.variant(steps=tuple(steps), output=["tuple", [["v", 4], ["v", 5]]]), middle


def test_strides_that_differ_from_the_fake_implementation_are_repaired(model):
    made, middle = _attention("attn", stride=(1, "s0"))
    x = torch.randn(3, hand.WIDTH)
    attention, out = hand.load(model, made, graphs=[middle])(x)
    assert attention.stride() == (1, 3)
    assert torch.equal(attention, model.first(x) * 2)
    assert torch.allclose(out, model(x))


def test_strides_that_match_the_fake_implementation_are_left_alone(model):
    made, middle = _attention("attn")
    plan = hand.plan(made, graphs=[middle])
    seen = []
    original = piece_function(hand.LINEAR)

    def last(args):
        seen.append(args[0].data_ptr())
        return original(args)

    opened = {**hand.opened(plan), (0, 2): PiecewiseBackend(general=last)}
    attention, _ = LoadedModel(model, plan, opened)(torch.randn(3, hand.WIDTH))
    assert seen == [attention.data_ptr()]


def test_a_dtype_that_differs_from_the_fake_implementation_is_refused(model):
    made, middle = _attention("wrong")
    message = r"cgtool_runtime_test.wrong returned a tensor of float64 .* fake implementation promised float32"
    with pytest.raises(ArtifactError, match=message):
        hand.load(model, made, graphs=[middle])(torch.randn(3, hand.WIDTH))


def test_an_artifact_with_too_few_outputs_is_reported(model):
    plan = hand.plan()
    opened = {**hand.opened(plan), (0, 2): PiecewiseBackend(general=lambda _args: [])}
    with pytest.raises(ArtifactError, match=r"Piece 2 .* did not return the 1 tensors of its graph .*got 0"):
        LoadedModel(model, plan, opened)(torch.randn(3, hand.WIDTH))


def test_intermediates_are_freed_after_their_last_use(model):
    plan = hand.plan()
    alive = []

    def watched(function):
        def run(args):
            alive.append([ref() is not None for ref in watched.refs])
            results = function(args)
            watched.refs += [weakref.ref(result) for result in results]
            return results

        return run

    watched.refs = []
    opened = {key: PiecewiseBackend(general=watched(backend.general)) for key, backend in hand.opened(plan).items()}
    out = LoadedModel(model, plan, opened)(torch.randn(3, hand.WIDTH))
    assert alive == [[], [False]]
    assert watched.refs[-1]() is out


def test_a_piece_that_empties_its_list_frees_its_inputs_while_it_runs(model):
    plan = hand.plan()
    seen = []

    def last(args):
        ref = weakref.ref(args[0])
        weight = args[1]
        args.clear()
        seen.append(ref() is None)
        return [torch.zeros(3, hand.WIDTH) @ weight]

    LoadedModel(model, plan, {**hand.opened(plan), (0, 2): PiecewiseBackend(general=last)})(torch.randn(3, hand.WIDTH))
    assert seen == [True]


def test_a_symbol_may_be_read_from_a_multiple_or_from_a_stride(model):
    doubled = hand.variant(
        inputs=(Input(source="arg:x", meta=hand.tensor("2*s0", hand.WIDTH)), *hand.variant().inputs[1:]),
        steps=tuple(replace(step, symbols={"s0": "2*s0"}) for step in hand.variant().steps),
        output=["tuple", [["v", 5], ["expr", "s0"]]],
    )
    loaded = hand.load(model, doubled)
    x = torch.randn(6, hand.WIDTH)
    out, half = loaded(x)
    assert torch.equal(out, model(x))
    assert half == 3
    with pytest.raises(CgtoolError, match="is 5 and must be a multiple of 2"):
        loaded(torch.randn(5, hand.WIDTH))
    strided = hand.variant(
        inputs=(
            Input(source="arg:x", meta=hand.tensor("s0", hand.WIDTH, stride=("s1", 1))),
            *hand.variant().inputs[1:],
        ),
        symbols=(*hand.variant().symbols, SymbolRange(name="s1", min=2, max=None)),
        output=["tuple", [["v", 5], ["expr", "s1"]]],
    )
    wide = torch.randn(3, 9)[:, : hand.WIDTH]
    out, step = hand.load(model, strided)(wide)
    assert torch.equal(out, model(wide))
    assert step == 9


EVIL = "__import__('os').system('true')"


def _steps(**changes):
    first, *rest = hand.variant().steps
    return (replace(first, **changes), *rest)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"symbols": (SymbolRange(name=EVIL, min=2, max=None),)}, id="symbol"),
        pytest.param({"symbols": (SymbolRange(name="s0", min=EVIL, max=None),)}, id="bound"),
        pytest.param({"relations": (EVIL,)}, id="relation"),
        pytest.param({"relations": ("s0 == s9",)}, id="unknown symbol"),
        pytest.param({"call_guards": (Guard(source=EVIL, kind="value", expected=1),)}, id="guard source"),
        pytest.param({"call_guards": (Guard(source="arg:x if 1 else 2", kind="value", expected=1),)}, id="accessor"),
        pytest.param({"call_guards": (Guard(source="arg:nope", kind="value", expected=1),)}, id="argument"),
        pytest.param({"call_guards": (Guard(source="state:os", kind="state", expected=1),)}, id="state"),
        pytest.param({"inputs": (Input(source=f"arg:x[{EVIL}]", meta=hand.ROWS),)}, id="input source"),
        pytest.param({"inputs": (Input(source="arg:x", meta=hand.tensor(EVIL, 4)),)}, id="dimension"),
        pytest.param({"inputs": (Input(source="arg:x", meta=hand.tensor(4, 4, dtype="os")),)}, id="dtype"),
        pytest.param({"inputs": (Input(source="arg:x", meta=hand.tensor(4, 4, device="cpu;x")),)}, id="device"),
        pytest.param({"steps": _steps(inputs=(EVIL, 1))}, id="value id"),
        pytest.param({"steps": _steps(inputs=(5, 1))}, id="value before it is there"),
        pytest.param({"steps": _steps(outputs=(1,))}, id="value twice"),
        pytest.param({"steps": _steps(outputs=(True,))}, id="bool as id"),
        pytest.param({"steps": _steps(symbols={"s0": EVIL})}, id="step symbol"),
        pytest.param({"steps": _steps(symbols={})}, id="step without its symbol"),
        pytest.param({"steps": _steps(graph="nope")}, id="graph"),
        pytest.param({"output": EVIL}, id="template"),
        pytest.param({"output": ["v", 99]}, id="template value"),
        pytest.param({"output": ["v", "5; x"]}, id="template value text"),
        pytest.param({"output": ["expr", EVIL]}, id="template expression"),
        pytest.param({"output": ["source", EVIL]}, id="template source"),
        pytest.param({"output": ["call", EVIL, [], []]}, id="template class"),
        pytest.param({"output": ["call", "os:system", [["const", "true"]], []]}, id="template function"),
        pytest.param({"output": ["call", "subprocess:Popen", [["const", "true"]], []]}, id="template wrong class"),
        pytest.param({"output": ["call", "hand_plans:Output", [], [["a=1) or (", ["v", 5]]]]}, id="template field"),
        pytest.param({"output": ["const", ["function", "os:system", ""]]}, id="template literal"),
        pytest.param({"output": ["const", ["size", "x"]]}, id="template literal of another type"),
    ],
)
def test_a_malicious_plan_is_refused_before_code_is_generated(model, changes):
    with pytest.raises(CgtoolError):
        LoadedModel(model, hand.plan(hand.variant(**changes)), hand.opened(hand.plan()))


def test_a_weak_reference_is_followed_and_nothing_else_is_called(model):
    called = []
    model.trap = lambda: called.append(1)
    guard = Guard(source="arg:mask|call", kind="value", expected=1)
    loaded = hand.load(model, hand.variant(call_guards=(guard,)))
    with pytest.raises(CgtoolError):
        loaded(torch.randn(3, hand.WIDTH), model.trap)
    served = loaded._variants[0]
    assert served.accept(torch.randn(3, hand.WIDTH), model.trap, 1.0) is None


@pytest.mark.parametrize(
    "node",
    [
        pytest.param(hand.call("os.system", {"s": "true"}), id="module"),
        pytest.param(hand.call("builtins.eval", {"s": "1"}), id="builtin"),
        pytest.param(hand.call("builtins.getattr", "%0", {"s": "__class__"}), id="getattr"),
        pytest.param(hand.call("builtins.getattr", "%0", "%1"), id="getattr by value"),
        pytest.param(hand.call(EVIL), id="target"),
        pytest.param(hand.call(7), id="target no text"),
        pytest.param(hand.method("numpy", "%0"), id="method"),
        pytest.param(hand.method("__class__", "%0"), id="dunder"),
        pytest.param(hand.method("view", {"s": "x"}), id="method of no tensor"),
        pytest.param(hand.call("torch.sin", "%9"), id="reference ahead"),
        pytest.param(hand.call("torch.sin", "%2"), id="reference to itself"),
        pytest.param(hand.call("torch.sin", "%0; x"), id="reference text"),
        pytest.param(hand.call("torch.sin", "%" + "9" * 5000), id="huge reference"),
        pytest.param(hand.call("torch.sin", {"q": 1}), id="tag"),
        pytest.param(hand.call("torch.sin", 1.5), id="bare float"),
        pytest.param(Node(kind="function", target="torch.sin", args=(), kwargs={"a=1, b": 1}), id="keyword"),
        pytest.param(Node(kind="eval", target="1", args=(), kwargs={}), id="kind"),
        pytest.param(hand.size("%0", "1"), id="size"),
    ],
)
def test_a_malicious_piece_is_refused_before_code_is_generated(node):
    made = hand.graph([hand.ROWS, hand.WEIGHT], [node], ["%2"], [hand.ROWS])
    with pytest.raises(ArtifactError):
        piece_function(made)


def test_generated_code_cannot_reach_builtins(model):
    loaded = hand.load(model)
    served = loaded._variants[0]
    for function in (served.accept._make(), served.program._make(), served.bound._same):
        assert list(function.__globals__["__builtins__"]) == ["__import__"]
        assert not re.search("import|exec|eval", " ".join(function.__code__.co_names))


def test_a_step_without_a_piece_runs_op_by_op(model):
    sizes = hand.graph([hand.ROWS], [hand.call("torch.relu", "%0")], ["%1"], [hand.ROWS])
    step = Step(piece=-1, splitting=True, graph=sizes.identity(), symbols={"s0": "s0"}, inputs=(5,), outputs=(6,))
    made = hand.variant(steps=(*hand.variant().steps, step), output=["v", 6])
    plan = hand.plan(made, graphs=[sizes])
    opened = {key: value for key, value in hand.opened(plan).items() if key[1] >= 0}
    x = torch.randn(3, hand.WIDTH)
    assert torch.equal(LoadedModel(model, plan, opened)(x), model(x).relu())


X = hand.ROWS


def run(nodes, output, *inputs, metas=None):
    function = piece_function(hand.graph(metas or [X] * len(inputs), nodes, [output], [X]))
    args = list(inputs)
    [result] = function(args)
    assert args == []
    return result


def test_sizes_methods_containers_and_constants():
    x = torch.randn(3, 4)
    nodes = [
        hand.size("%0", 0),
        hand.call("_operator.mul", "%1", 2),
        hand.method("view", "%0", "%2", 2),
        hand.call("torch.cat", ["%3", "%3"], dim=1),
        hand.call("_operator.getitem", "%4", {"t": [{"slice": [None, "%1", None]}, {"ellipsis": 0}]}),
        hand.method("to", "%5", {"dtype": "float64"}),
        hand.call("torch.full_like", "%6", {"f": "-inf"}),
        hand.call("_operator.add", "%6", "%6"),
        hand.call("torch.maximum", "%7", "%8"),
        hand.call("_operator.add", "%9", {"const": encode_value(torch.tensor([1.0, 2, 3, 4]), None)["const"]}),
        hand.method("add_", "%10", {"f": "0.5"}, alpha=-2),
    ]
    part = torch.cat([x.view(6, 2)] * 2, dim=1)[:3, ...].to(torch.float64)
    expected = part + part + torch.tensor([1.0, 2, 3, 4]) - 1
    assert torch.equal(run(nodes, "%11", x), expected)


def test_a_piece_frees_intermediates_after_their_last_use():
    refs = []
    library = hand.LIBRARY
    if not hasattr(torch.ops.cgtool_runtime_test, "watch"):
        library.define("watch(Tensor x) -> Tensor")

        def watch(x):
            out = x + 1
            refs.append((weakref.ref(out), [ref() is not None for ref, _ in refs]))
            return out

        library.impl("watch", watch, "CompositeExplicitAutograd")
    nodes = [hand.call("torch.ops.cgtool_runtime_test.watch", f"%{i}") for i in range(4)]
    out = run(nodes, "%4", torch.zeros(2, 4))
    assert torch.equal(out, torch.full((2, 4), 4.0))
    # While the op runs, its argument is alive, but earlier values are not.
    assert [alive for _, alive in refs] == [[], [True], [False, True], [False, False, True]]


def test_an_unused_value_is_computed_and_dropped():
    x = torch.zeros(2, 4)
    run([hand.method("add_", "%0", 1), hand.call("torch.sin", "%0")], "%2", x)
    assert torch.equal(x, torch.ones(2, 4))


def test_an_input_may_be_an_output_and_outputs_may_repeat():
    x = torch.zeros(2, 4)
    function = piece_function(hand.graph([X], [hand.call("torch.sin", "%0")], ["%0", "%1", "%1"], [X] * 3))
    first, second, third = function([x])
    assert first is x
    assert second is third


def test_autocast_regions_close_when_an_op_raises():
    enter = hand.call("torch.amp.autocast_mode._enter_autocast", {"s": "cpu"}, {"dtype": "bfloat16"}, True, None)
    leave = hand.call("torch.amp.autocast_mode._exit_autocast", "%2")
    nodes = [enter, hand.call("torch._C._nn.linear", "%0", "%1"), leave]
    made = hand.graph([X, hand.WEIGHT], nodes, ["%3"], [X])
    function = piece_function(made)
    weight = torch.randn(4, 4)
    assert function([torch.randn(3, 4), weight])[0].dtype is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(RuntimeError, match="shape"):
        function([torch.randn(3, 5), weight])
    assert not torch.is_autocast_enabled("cpu")


def test_op_names_are_readable():
    assert op_names(hand.ATTENTION) == ("cgtool_runtime_test.attn.default",)
    assert op_names(hand.LINEAR) == ("torch._C._nn.linear",)
