"""Handwritten pieces that native code may get wrong, because it neither checks inputs nor has Python semantics."""

from __future__ import annotations

import piece_ops  # noqa: F401 - registers the custom ops that pieces below call
from piece_cases import Case, W, X, call, graph, method, size, tensor

_OPS = "torch.ops.cgtool_user."
_ZERO = (("s0", 0, None),)
_EMPTY_TOO = ({"s0": 0}, {"s0": 1}, {"s0": 9})


def _arithmetic(dtype, tolerance):
    """An elementwise piece and a reduction of one dtype."""
    other = tensor("s0", 8, dtype=dtype)
    nodes = [call("torch.add", "%0", "%1"), call("torch.mul", "%2", "%1"), call("torch.sum", "%3", -1)]
    return Case(piece=graph([other, other], nodes, ["%3", "%4"]), tolerance=tolerance)


DTYPES = {
    "float16": 2e-2,
    "bfloat16": 1e-1,
    "float64": 1e-12,
    "int8": 0.0,
    "uint8": 0.0,
    "int16": 0.0,
    "int32": 0.0,
    "int64": 0.0,
    "complex64": 1e-5,
}

CUSTOM_OPS = {
    "a custom op of several results": Case(
        piece=graph(
            [X],
            [
                call("torch.sin", "%0"),
                call(_OPS + "halves", "%1", 3),
                call("_operator.getitem", "%2", 0),
                call("_operator.getitem", "%2", 1),
                call("torch.cos", "%4"),
            ],
            ["%3", "%5"],
        )
    ),
    "a custom op with arguments of every kind": Case(
        piece=graph(
            [X, tensor(8)],
            [
                size("%0", 0),
                call(
                    _OPS + "every_kind.default",
                    "%0",
                    "%1",
                    [1, 2],
                    [{"f": "0.5"}, {"f": "1.5"}],
                    {"f": "0.25"},
                    {"s": "wide"},
                    {"dtype": "float64"},
                    {"device": "cpu"},
                    flag=True,
                    count="%2",
                ),
                call(
                    _OPS + "every_kind.default",
                    "%0",
                    None,
                    [3],
                    [{"f": "0.5"}, {"f": "1.5"}],
                    {"f": "1e+30"},
                    {"s": "wide"},
                    {"dtype": "bfloat16"},
                    {"device": "cpu"},
                    flag=True,
                    count=4,
                ),
            ],
            ["%3", "%4"],
        )
    ),
    "a custom op of lists": Case(
        piece=graph(
            [X, X],
            [
                call("torch.exp", "%1"),
                call(_OPS + "mapped", ["%0", "%2"], [None, "%0"]),
                call("_operator.getitem", "%3", 0),
                call("_operator.getitem", "%3", 1),
                call("torch.add", "%4", "%5"),
            ],
            ["%6", "%5"],
        )
    ),
    "a custom op that writes to an input of the piece": Case(
        piece=graph(
            [X, X],
            [
                call("torch.sin", "%1"),
                call(_OPS + "accumulate", "%0", "%2"),
                call(_OPS + "advance", "%0", "%2"),
                call("torch.cos", "%0"),
            ],
            ["%4", "%5"],
        )
    ),
    "a custom op that writes to a view": Case(
        piece=graph(
            [X, X],
            [
                call("torch.sin", "%1"),
                method("narrow", "%0", 1, 2, 4),
                method("narrow", "%2", 1, 0, 4),
                call(_OPS + "accumulate", "%3", "%4"),
            ],
            ["%2"],
        )
    ),
    "a custom op that gives other strides": Case(
        piece=graph([X], [call(_OPS + "transposed", "%0"), call("torch.sin", "%1")], ["%1", "%2"])
    ),
}

PIECES = {
    "writes through views": Case(
        piece=graph(
            [X, X],
            [
                method("narrow", "%0", 1, 0, 2),
                method("add_", "%2", 1),
                method("select", "%0", 1, 5),
                method("mul_", "%4", {"f": "3.0"}),
                call("torch.mul", "%0", "%1"),
                method("t", "%1"),
                method("copy_", "%7", 2),
            ],
            ["%6"],
        )
    ),
    "a write to the last rows and elements": Case(
        piece=graph(
            [X],
            [
                method("clone", "%0"),
                call("_operator.setitem", "%1", {"slice": [-2, None, None]}, 1),
                method("view", "%1", -1),
                call("_operator.setitem", "%3", {"slice": [-3, None, None]}, 2),
                call("_operator.getitem", "%1", {"t": [{"ellipsis": 0}, {"slice": [-2, None, None]}]}),
                method("mul_", "%5", {"f": "3.0"}),
            ],
            ["%1"],
            symbols=(("s0", 3, None),),
        ),
        sizes=({"s0": 3}, {"s0": 8}),
    ),
    "a write to an input with gaps": Case(
        piece=graph([tensor("s0", 8, stride=[16, 2])], [method("mul_", "%0", {"f": "2.0"})], ["%1"])
    ),
    "outputs that are views of each other": Case(
        piece=graph(
            [X], [call("torch.sin", "%0"), method("narrow", "%1", 1, 2, 3), method("t", "%1")], ["%1", "%2", "%3"]
        )
    ),
    "inputs and outputs that are one": Case(
        piece=graph([X, X], [method("view", "%0", -1), method("t", "%2")] and [method("t", "%0")], ["%0", "%2", "%0"])
    ),
    "outputs that are views as another dtype": Case(
        piece=graph(
            [X, tensor("s0", 8, dtype="complex64")],
            [
                call("torch.view_as_real", "%1"),
                method("select", "%2", -1, 1),
                call("torch.sin", "%1"),
                call("torch.view_as_real", "%4"),
                call("torch.ops.aten.view.dtype", "%0", {"dtype": "int32"}),
                call("torch.ops.aten.view.dtype", "%0", {"dtype": "int8"}),
                method("narrow", "%7", 1, 3, 5),
            ],
            ["%2", "%3", "%4", "%5", "%6", "%8"],
        )
    ),
    "an input returned after a write to it": Case(
        piece=graph([X], [method("add_", "%0", 1), method("narrow", "%0", 1, 0, 3)], ["%0", "%2"])
    ),
    "an expanded input": Case(
        piece=graph([tensor("s0", 8, stride=[0, 1]), X], [call("torch.add", "%0", "%1")], ["%2"])
    ),
    "a sliding input": Case(piece=graph([tensor("s0", 4, stride=[1, 1])], [method("sum", "%0", 1)], ["%1"])),
    "channels last": Case(
        piece=graph(
            [tensor("s0", 4, 6, 6, stride=[144, 1, 24, 4]), tensor(3, 4, 3, 3)],
            [call("torch.conv2d", "%0", "%1"), call("torch.relu", "%2")],
            ["%3"],
        ),
        tolerance=1e-4,
    ),
    "nothing given": Case(
        piece=graph([tensor(0, 8), X], [call("torch.cat", ["%0", "%1"]), call("torch.sin", "%0")], ["%2", "%3"])
    ),
    "sizes from nothing on": Case(
        piece=graph(
            [X, W],
            [call("torch._C._nn.linear", "%0", "%1"), call("torch.sum", "%2", 0), call("torch.sin", "%2")],
            ["%3", "%4"],
            symbols=_ZERO,
        ),
        sizes=_EMPTY_TOO,
    ),
    "a scalar of each kind": Case(
        piece=graph(
            [tensor(dtype="int64"), tensor(dtype="bool"), tensor()],
            [
                call("torch.where", "%1", "%2", "%0"),
                call("torch.add", "%0", 1),
                call("torch.logical_not", "%1"),
            ],
            ["%3", "%4", "%5"],
            symbols=(),
        ),
        sizes=({},),
    ),
    "constants of several dtypes": Case(
        piece=graph(
            [X],
            [
                call(
                    "torch.index_select",
                    "%0",
                    1,
                    {"const": {"dtype": "int64", "shape": [2], "data": "AQAAAAAAAAAAAAAAAAAAAA=="}},
                ),
                call("torch.where", {"const": {"dtype": "bool", "shape": [2], "data": "AQA="}}, "%1", {"f": "0.0"}),
                call("torch.add", "%2", {"const": {"dtype": "float32", "shape": [], "data": "AAAAQA=="}}),
            ],
            ["%3"],
        )
    ),
    "a relation of two sizes": Case(
        piece=graph(
            [tensor("s0", "s1"), tensor("s0", "s1")],
            [
                size("%0", 0),
                size("%0", 1),
                call("_operator.mul", "%2", "%3"),
                call("_operator.floordiv", "%4", 4),
                method("reshape", "%0", "%5", 4),
                method("sum", "%6", 0),
                call("_operator.truediv", "%1", "%4"),
            ],
            ["%7", "%8"],
            symbols=(("s0", 2, None), ("s1", 2, 64)),
            facts=["s1 % 4 == 0", "s1 <= 8*s0"],
        ),
        sizes=({"s0": 2, "s1": 4}, {"s0": 9, "s1": 64}),
    ),
    "attention": Case(
        piece=graph(
            [tensor(2, "s0", 8)],
            [
                method("unsqueeze", "%0", 1),
                call("torch._C._nn.scaled_dot_product_attention", "%1", "%1", "%1", is_causal=True),
            ],
            ["%2"],
        )
    ),
    "a scatter and a sort": Case(
        piece=graph(
            [X],
            [
                method("sort", "%0", -1),
                call("_operator.getitem", "%1", 0),
                call("_operator.getitem", "%1", 1),
                call("torch.zeros_like", "%0"),
                method("scatter_add", "%4", 1, "%3", "%2"),
                method("cumsum", "%5", 0),
            ],
            ["%6", "%3"],
        )
    ),
    **{f"dtype {name}": _arithmetic(name, tolerance) for name, tolerance in DTYPES.items()},
}
PIECES["inputs and outputs that are one"] = Case(piece=graph([X, X], [method("t", "%0")], ["%0", "%2", "%1", "%0"]))
