"""A piece's graph as a function: every kind of node and value, freed intermediates, closed autocast regions."""

from __future__ import annotations

import weakref

import hand_plans as hand
import pytest
import torch

from cgtool.graph.values import encode_value
from cgtool.runtime.program import op_names, piece_function

pytestmark = pytest.mark.torch

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
    want = part + part + torch.tensor([1.0, 2, 3, 4]) - 1
    assert torch.equal(run(nodes, "%11", x), want)


def test_intermediates_die_with_their_last_use():
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
    # The op's argument is alive while it runs, what came before it is not.
    assert [alive for _, alive in refs] == [[], [True], [False, True], [False, False, True]]


def test_a_value_that_nothing_uses_is_computed_and_forgotten():
    x = torch.zeros(2, 4)
    run([hand.method("add_", "%0", 1), hand.call("torch.sin", "%0")], "%2", x)
    assert torch.equal(x, torch.ones(2, 4))


def test_an_input_may_be_an_output_and_an_output_may_come_twice():
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


def test_ops_are_named_for_people():
    assert op_names(hand.ATTENTION) == ("cgtool_runtime_test.attn.default",)
    assert op_names(hand.LINEAR) == ("torch._C._nn.linear",)
