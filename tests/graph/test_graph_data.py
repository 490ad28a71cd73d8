"""`cgtool.graph`: encoded values round-trip, and only allowed targets resolve."""

from __future__ import annotations

import math
import operator

import pytest
import sympy
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own spelling
from torch import fx
from torch.utils._sympy.functions import FloorDiv, Mod

from cgtool.errors import ArtifactError, SplitError, UsageError
from cgtool.graph import expressions, values
from cgtool.graph.specialise import restrict
from cgtool.graph.sympy_text import expression_text
from cgtool.graph.targets import check_method, resolve_target, target_name
from cgtool.plan.pieces import Node, PieceGraph, SymbolRange, TensorMeta

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (torch.sin, "torch.sin"),
        (F.silu, "torch.nn.functional.silu"),
        (F.linear, "torch._C._nn.linear"),
        (operator.add, "_operator.add"),
        (math.sqrt, "math.sqrt"),
        (max, "builtins.max"),
        (F.max_pool2d, "torch.nn.functional.max_pool2d"),
        (torch.einsum, "torch.functional.einsum"),
        (torch.ops.aten.mm.default, "torch.ops.aten.mm.default"),
        (torch.ops.aten.mm, "torch.ops.aten.mm"),
        (torch.sym_max, "torch.sym_max"),
        (torch.amp.autocast_mode._enter_autocast, "torch.amp.autocast_mode._enter_autocast"),
        (torch.fft.fft, "torch.fft.fft"),
    ],
)
def test_a_target_round_trips(fn, name):
    assert target_name(fn) == name
    assert resolve_target(name) is fn


@pytest.mark.parametrize(
    "name",
    [
        "builtins.eval",
        "builtins.exec",
        "_operator.call",
        "_operator.methodcaller",
        "torch.load",
        "torch.from_file",
        "torch.hub.load",
        "torch.import_ir_module",
        "torch.ops.load_library",
        "torch.ops.aten.mm.__call__",
        "torch.nn.functional.warnings",
        "torch.nn.functional.boolean_dispatch",
        "torch._C._nn._parse_to",
        "torch.Tensor.numpy",
        "torch.Tensor.__reduce_ex__",
        "os.system",
        "torch..sin",
        "torch.sin; import os",
        "torch.ops.nowhere.nothing",
        "",
    ],
)
def test_only_ops_resolve(name):
    with pytest.raises(ArtifactError):
        resolve_target(name)


def test_the_error_names_a_user_function():
    def helper(x):
        return x

    with pytest.raises(SplitError, match="helper"):
        target_name(helper)
    with pytest.raises(SplitError, match="lambda"):
        target_name(lambda x: x)


@pytest.mark.parametrize("name", ["__class__", "__reduce__", "numpy", "apply_", "nothing", "untyped_storage"])
def test_only_methods_of_tensors_are_accepted(name):
    with pytest.raises(ArtifactError):
        check_method(name)


def test_methods_of_tensors_are_accepted():
    for name in ("view", "add_", "__getitem__", "transpose", "to"):
        assert check_method(name) == name


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        1,
        1.0,
        -0.0,
        float("inf"),
        1e-06,
        "%1",
        1 + 2j,
        (1, [2, (3.5,)]),
        {"a": 1, 2: (None,)},
        slice(None, 3, None),
        ...,
        torch.bfloat16,
        torch.device("cpu"),
        torch.strided,
        torch.channels_last,
    ],
    ids=repr,
)
def test_a_value_round_trips_with_its_type(value):
    encoded = values.encode_value(value, lambda node: node)
    decoded = values.decode_value(encoded, lambda ref: ref)
    assert repr(decoded) == repr(value)
    assert type(decoded) is type(value)


def test_true_one_and_one_point_zero_are_encoded_differently():
    written = [repr(values.encode_value(value, lambda node: node)) for value in (True, 1, 1.0, "1")]
    assert len(set(written)) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_a_constant_tensor_round_trips_bit_by_bit(dtype):
    tensor = torch.tensor([[0, 1, 3], [2, 0, 5]], dtype=dtype).t()
    found = values.decode_value(values.encode_value(tensor, lambda node: node), lambda ref: ref)
    assert found.dtype == dtype
    assert torch.equal(found, tensor)


def test_empty_and_zero_dimensional_constants_round_trip():
    for tensor in (torch.empty(0, 3), torch.tensor(2.5)):
        found = values.decode_value(values.encode_value(tensor, lambda node: node), lambda ref: ref)
        assert found.shape == tensor.shape
        assert torch.equal(found, tensor)


def test_references_are_found_in_order():
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    names = {a: "%0", b: "%1"}
    encoded = values.encode_value(([b, 2], {"k": a}), names.__getitem__)
    assert values.refs_of(encoded) == ["%1", "%0"]


@pytest.mark.parametrize(
    "data",
    [
        "x",
        "%01",
        "%-1",
        {"f": "1e-6"},
        {"f": 1},
        {"x": 1},
        {},
        {"t": 3},
        1.5,
        {"dtype": "Tensor"},
        {"graph": [1, [], 2, 3]},
    ],
)
def test_a_value_outside_the_grammar_is_refused(data):
    with pytest.raises(ArtifactError):
        values.decode_value(data, lambda ref: ref)


def test_the_error_names_an_unsupported_value():
    with pytest.raises(SplitError, match="Generator"):
        values.encode_value(torch.Generator(), lambda node: node)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "s0.real",
        "s0[0]",
        "s9",
        "1.5",
        "s0 if s0 else 1",
        "max(s0)",
        "s0 ** s0",
        "s0 < s0 < 3",
        "",
        "9**99",
        "True",
    ],
)
def test_an_expression_outside_the_grammar_is_refused(text):
    with pytest.raises(ArtifactError):
        expressions.check_expression(text, ["s0"])


def test_expressions_are_evaluated_and_renamed():
    text = "Max(s0 // 2, s1 % 8) * -s0 + s1 ** 2"
    expressions.check_expression(text, ["s0", "s1"])
    assert expressions.evaluate(text, {"s0": 9, "s1": 5}) == max(9 // 2, 5 % 8) * -9 + 25
    assert expressions.symbols_of(text) == ("s0", "s1")
    renamed = expressions.rename(text, {"s0": "a + b", "s1": "s0"})
    assert expressions.evaluate(renamed, {"a": 4, "b": 5, "s0": 5}) == expressions.evaluate(text, {"s0": 9, "s1": 5})
    assert expressions.evaluate("s0 % 8 == 0 and not s0 < 3", {"s0": 16}) is True
    assert expressions.evaluate(7, {}) == 7


def test_division_by_zero_is_an_artifact_error():
    with pytest.raises(ArtifactError, match="divides by zero"):
        expressions.evaluate("s0 // s1", {"s0": 1, "s1": 0})


def test_the_text_of_an_expression_does_not_depend_on_names():
    def build(first, second):
        a, b = (sympy.Symbol(name, positive=True, integer=True) for name in (first, second))
        expr = 2 * a * b + FloorDiv(a + 1, 4) - Mod(b, 8) - 3
        fact = sympy.Eq(a * 2, b)
        return [expression_text(e, {first: "s0", second: "s1"}) for e in (expr, fact, sympy.Max(a, b))]

    assert build("s27", "s52") == build("s99", "s11")


def test_text_and_sympy_agree_on_values():
    s0, s1 = (sympy.Symbol(name, positive=True, integer=True) for name in ("s0", "s1"))
    for expr in (
        2 * s0 * s1 - 3,
        FloorDiv(s0, 4) + Mod(s0 + s1, 8),
        (s0 - s1) * (s0 + 2) - s1**2,
        -s0 + s1,
        FloorDiv(s0 * 3, s1 + 1) * 2,
        Mod(s0, 3) * FloorDiv(s1, 2),
        sympy.Max(s0, s1 + 3),
    ):
        text = expression_text(expr, {"s0": "s0", "s1": "s1"})
        for a in range(2, 12):
            assert expressions.evaluate(text, {"s0": a, "s1": 13 - a}) == int(expr.subs({s0: a, s1: 13 - a}))


def test_the_error_names_a_fraction_and_an_unknown_symbol():
    s0 = sympy.Symbol("u0", positive=True, integer=True)
    with pytest.raises(SplitError, match="fraction"):
        expression_text(s0 / 2, {"u0": "s0"})
    with pytest.raises(SplitError, match="u0"):
        expression_text(s0 + 1, {})


def test_tensor_metadata_has_no_device_index():
    meta = values.tensor_meta(torch.empty(3, 4, dtype=torch.bfloat16).t())
    assert meta == TensorMeta(dtype="bfloat16", shape=(4, 3), stride=(1, 4), device="cpu")
    assert values.device_text("cuda:3") == "cuda"
    assert values.device_of("cuda", 3) == torch.device("cuda", 3)
    assert values.device_of("cpu", 3) == torch.device("cpu")
    with pytest.raises(ArtifactError):
        values.device_of("cuda:1")
    with pytest.raises(ArtifactError):
        values.dtype_of("Tensor")


def piece(**changes):
    fields = {
        "symbols": (SymbolRange(name="s0", min=2, max=None), SymbolRange(name="s1", min=2, max=64)),
        "facts": ("s0 % 2 == 0", "s0 > s1"),
        "inputs": (TensorMeta(dtype="float32", shape=("s0", "s1"), stride=("s1", 1), device="cpu"),),
        "aliases": (),
        "nodes": (Node(kind="function", target="torch.sin", args=("%0",), kwargs={}),),
        "outputs": ("%1",),
        "results": (TensorMeta(dtype="float32", shape=("s0", "s1"), stride=("s1", 1), device="cpu"),),
        "ops": {},
    }
    return PieceGraph(**{**fields, **changes})


def test_restrict_replaces_fixed_symbols_by_numbers():
    found = restrict(piece(), {"s0": (8, 8), "s1": (4, 4), "s9": (1, 1)})
    assert found.symbols == ()
    assert found.facts == ()
    assert found.inputs[0].shape == (8, 4)
    assert found.results[0].stride == (4, 1)
    partly = restrict(piece(), {"s1": (4, 4)})
    assert [s.name for s in partly.symbols] == ["s0"]
    assert partly.facts == ("s0 % 2 == 0", "s0 > 4")
    assert partly.inputs[0].shape == ("s0", 4)


def test_a_range_of_one_size_fixes_the_symbol():
    found = restrict(piece(), {"s0": (16, 32), "s1": (4, 4)})
    assert found.symbols == (SymbolRange(name="s0", min=16, max=32),)
    assert found.inputs[0].stride == (4, 1)


@pytest.mark.parametrize("sizes", [{"s0": 1}, {"s1": 65}, {"s0": 7, "s1": 3}, {"s0": 4, "s1": 6}])
def test_sizes_outside_the_traced_ones_are_refused(sizes):
    with pytest.raises(UsageError):
        restrict(piece(), {name: (size, size) for name, size in sizes.items()})


def test_a_range_outside_the_traced_one_is_refused():
    with pytest.raises(UsageError, match="2 to 64"):
        restrict(piece(), {"s1": (65, 128)})
