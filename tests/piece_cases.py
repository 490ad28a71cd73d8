"""Handwritten pieces, one for each feature of real pieces that compilers must handle."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec.structs import replace

from cgtool.plan.pieces import Node, PieceGraph, SymbolRange, TensorMeta

_LIBRARY = torch.library.Library("cgtool_cases", "FRAGMENT")
_LIBRARY.define("scaled(Tensor x, float factor) -> Tensor")
_LIBRARY.define("fill(Tensor x, Tensor(a!) out) -> ()")
_LIBRARY.impl("scaled", lambda x, factor: x * factor, "CPU")


def _fill(x, out):
    out.copy_(x)


_LIBRARY.impl("fill", _fill, "CPU")
torch.library.register_fake("cgtool_cases::scaled", lambda x, factor: torch.empty_like(x), lib=_LIBRARY)
torch.library.register_fake("cgtool_cases::fill", lambda x, out: None, lib=_LIBRARY)


def tensor(*shape, stride=None, dtype="float32"):
    if stride is None:
        found: list = []
        step: int | str = 1
        for dim in reversed(shape):
            found.insert(0, step)
            step = (
                step * dim
                if isinstance(dim, int) and isinstance(step, int)
                else (dim if step == 1 else f"{step}*{dim}")
            )
        stride = found
    return TensorMeta(dtype=dtype, shape=tuple(shape), stride=tuple(stride), device="cpu")


def call(target, *args, **kwargs):
    return Node(kind="function", target=target, args=args, kwargs=kwargs)


def method(target, *args, **kwargs):
    return Node(kind="method", target=target, args=args, kwargs=kwargs)


def size(ref, dim):
    return Node(kind="size", target=None, args=(ref, dim), kwargs={})


def graph(inputs, nodes, outputs, *, symbols=(("s0", 2, None),), facts=(), aliases=(), results=None):
    return PieceGraph(
        symbols=tuple(SymbolRange(name=name, min=low, max=high) for name, low, high in symbols),
        facts=tuple(facts),
        inputs=tuple(inputs),
        aliases=tuple(aliases),
        nodes=tuple(nodes),
        outputs=tuple(outputs),
        results=tuple(results or (tensor(1),) * len(outputs)),
        ops={},
    )


def with_results(piece):
    """Return `piece` with its results on fake inputs."""
    from cgtool.compiler.fx_piece import rebuild
    from cgtool.graph.values import tensor_meta

    made = rebuild(piece)
    found = [node.meta["val"] for node in made.module.graph.output_node().args[0]] if piece.outputs else []
    return replace(piece, results=tuple(tensor_meta(value, made.names) for value in found))


@dataclass(frozen=True, kw_only=True)
class Case:
    piece: PieceGraph
    sizes: tuple[dict[str, int], ...] = ({"s0": 2}, {"s0": 13})
    tolerance: float = 1e-5
    #: A tolerance for each output and each input, instead of one for all.
    tolerances: tuple[float, ...] = ()


X = tensor("s0", 8)
W = tensor(8, 8)
_CONST = {
    "dtype": "float32",
    "shape": [8],
    "data": base64.b64encode(torch.arange(8, dtype=torch.float32).numpy().tobytes()).decode(),
}

CASES = {
    "two inputs": Case(
        piece=graph([X, W], [call("torch._C._nn.linear", "%0", "%1"), call("torch.nn.functional.silu", "%2")], ["%3"])
    ),
    "concrete sizes": Case(
        piece=graph([tensor(5, 8), W], [call("torch._C._nn.linear", "%0", "%1")], ["%2"], symbols=()), sizes=({},)
    ),
    "write to an input": Case(piece=graph([X, X], [method("add_", "%0", 1), call("torch.mul", "%2", "%1")], ["%3"])),
    "write to an input and return it": Case(piece=graph([X], [method("mul_", "%0", {"f": "2.0"})], ["%1"])),
    "write and no output": Case(piece=graph([X, X], [call("torch.sin", "%0"), method("copy_", "%1", "%2")], [])),
    "an output that is a view of an input": Case(
        piece=graph([X], [method("transpose", "%0", 0, 1), call("torch.cos", "%0")], ["%1", "%2"])
    ),
    "one output twice": Case(piece=graph([X], [call("torch.sin", "%0")], ["%1", "%1"])),
    "an output that is an input": Case(piece=graph([X], [call("torch.sin", "%0")], ["%0", "%1"])),
    "nothing at all": Case(piece=graph([X], [], ["%0"])),
    "only views": Case(piece=graph([X], [method("unsqueeze", "%0", 0)], ["%1"])),
    "zero-dimensional": Case(
        piece=graph([X, tensor()], [call("torch.sum", "%0"), call("_operator.mul", "%2", "%1")], ["%2", "%3"])
    ),
    "indices": Case(
        piece=graph(
            [tensor("s0", dtype="int64"), tensor(8, 8)], [call("torch.nn.functional.embedding", "%0", "%1")], ["%2"]
        )
    ),
    "bool mask": Case(
        piece=graph(
            [X, tensor("s0", 8, dtype="bool")],
            [call("torch.logical_not", "%1"), method("masked_fill", "%0", "%2", {"f": "-inf"})],
            ["%3", "%2"],
        )
    ),
    "bfloat16": Case(
        piece=graph(
            [tensor("s0", 8, dtype="bfloat16"), tensor(8, dtype="bfloat16")],
            [
                method("to", "%0", {"dtype": "float32"}),
                call("_operator.mul", "%2", "%1"),
                method("to", "%3", {"dtype": "bfloat16"}),
            ],
            ["%4"],
        ),
        tolerance=2e-2,
    ),
    "constants": Case(
        piece=graph(
            [X],
            [call("_operator.add", "%0", {"const": _CONST}), call("_operator.mul", "%1", {"f": "0.125"})],
            ["%2"],
        )
    ),
    "arithmetic on sizes": Case(
        piece=graph(
            [X],
            [
                size("%0", 0),
                call("_operator.mul", "%1", 2),
                call("_operator.floordiv", "%2", 2),
                method("view", "%0", "%3", 2, 4),
                call("_operator.mul", "%4", "%2"),
                call("torch.arange", "%1", dtype={"dtype": "int64"}, device={"device": "cpu"}),
            ],
            ["%5", "%6"],
        )
    ),
    "a tuple of results": Case(
        piece=graph(
            [X],
            [
                call("torch.functional.split", "%0", [2, 6], dim=-1),
                call("_operator.getitem", "%1", 0),
                call("_operator.getitem", "%1", 1),
                call("torch.functional.einsum", {"s": "ab,ac->bc"}, "%2", "%3"),
            ],
            ["%4"],
        )
    ),
    "slices and assignment": Case(
        piece=graph(
            [X],
            [
                method("clone", "%0"),
                call("_operator.getitem", "%0", {"t": [{"ellipsis": 0}, {"slice": [None, 4, None]}]}),
                call(
                    "_operator.setitem", "%1", {"t": [{"slice": [None, None, None]}, {"slice": [4, None, None]}]}, "%2"
                ),
            ],
            ["%1"],
        )
    ),
    "transposed input": Case(
        piece=graph([tensor(8, "s0", stride=[1, 8]), W], [call("torch.matmul", "%1", "%0")], ["%2"])
    ),
    "aliased inputs": Case(
        piece=graph([X, X], [call("torch.add", "%0", "%1")], ["%2"], aliases=((0, 1),)),
    ),
    "a fact": Case(
        piece=graph(
            [X],
            [
                size("%0", 0),
                call("_operator.floordiv", "%1", 4),
                method("view", "%0", "%2", 4, 8),
                method("sum", "%3", 1),
            ],
            ["%4"],
            facts=["s0 % 4 == 0"],
        ),
        sizes=({"s0": 4}, {"s0": 12}),
    ),
    "two symbols": Case(
        piece=graph(
            [tensor("s0", "s1"), tensor("s1", "s0")],
            [call("torch.matmul", "%0", "%1"), call("torch.softmax", "%2", dim=-1)],
            ["%3"],
            symbols=(("s0", 2, None), ("s1", 2, 64)),
        ),
        sizes=({"s0": 2, "s1": 2}, {"s0": 7, "s1": 64}, {"s0": 5, "s1": 5}),
    ),
    "custom ops": Case(
        piece=graph(
            [X],
            [
                call("torch.ops.cgtool_cases.scaled.default", "%0", {"f": "3.0"}),
                method("new_empty", "%1", [2, 8]),
                call("torch.cos", "%1"),
                call("torch.empty_like", "%3"),
                call("torch.ops.cgtool_cases.fill", "%3", "%4"),
            ],
            ["%4"],
        )
    ),
    "a cat with an empty part, which Inductor copies in the strides of the other": Case(
        piece=graph(
            [X],
            [
                method("transpose", "%0", 0, 1),
                call("torch.sin", "%1"),
                call("_operator.getitem", "%2", {"slice": [None, 0, None]}),
                call("torch.cat", ["%2", "%3"], dim=0),
            ],
            ["%4"],
            results=(tensor(8, "s0"),),
        )
    ),
    "a cat that is repeated along a dimension, as keys of one head are": Case(
        piece=graph(
            [X, X],
            [
                call("torch.cat", ["%0", "%1"], dim=-1),
                method("unsqueeze", "%2", 1),
                method("expand", "%3", -1, 3, -1),
            ],
            ["%4"],
            results=(tensor("s0", 3, 16, stride=(16, 0, 1)),),
        )
    ),
    "autocast": Case(
        piece=graph(
            [X, W],
            [
                call("torch.amp.autocast_mode._enter_autocast", {"s": "cpu"}, {"dtype": "bfloat16"}, True, None),
                call("torch._C._nn.linear", "%0", "%1"),
                call("torch.amp.autocast_mode._exit_autocast", "%2"),
                method("float", "%3"),
            ],
            ["%3", "%5"],
        ),
        tolerance=5e-2,
    ),
}

#: A cat of two memory formats: eager returns the first, the trace recorded the second.
OTHERWISE_LAID = graph(
    [tensor("s0", 3, 4, 4), tensor("s0", 3, 4, 4, stride=(48, 1, 12, 3))],
    [call("torch.cat", ["%0", "%1"], 1)],
    ["%2"],
    results=(tensor("s0", 6, 4, 4, stride=(96, 1, 24, 6)),),
)


def inputs_of(case, sizes, seed=0):
    """Return real tensors for a case's piece; aliased ones share their storage."""
    from cgtool.graph.expressions import evaluate

    torch.manual_seed(seed)
    found = []
    for meta in case.piece.inputs:
        shape = [evaluate(dim, sizes) for dim in meta.shape]
        stride = [evaluate(step, sizes) for step in meta.stride]
        dtype = getattr(torch, meta.dtype)
        # enough elements for these strides, which may overlap
        count = 0 if 0 in shape else 1 + sum((dim - 1) * step for dim, step in zip(shape, stride, strict=True))
        real = dtype.is_floating_point or dtype.is_complex
        values = torch.randn(count) if real else torch.randint(0, 2, (count,))
        found.append(values.to(dtype).as_strided(shape, stride))
    for group in case.piece.aliases:
        for position in group[1:]:
            found[position] = found[group[0]].view(found[position].shape)
    return found


def same_as_eager(run, case, sizes, change=lambda tensors: tensors, *, strides=True):
    """Compare one call with the piece run op by op: values, strides, writes and aliasing."""
    from cgtool.runtime.op_by_op import piece_function

    ours, theirs = change(inputs_of(case, sizes)), change(inputs_of(case, sizes))
    with torch.no_grad():
        found, expected = list(run(list(ours))), list(piece_function(case.piece)(list(theirs)))
    assert len(found) == len(expected) == len(case.piece.outputs)
    tolerances = case.tolerances or (case.tolerance,) * (len(found) + len(ours))
    for left, right, near in zip([*found, *ours], [*expected, *theirs], tolerances, strict=True):
        torch.testing.assert_close(left, right, atol=near, rtol=near, check_stride=strides and left.numel() > 0)
    assert _sharing(ours, found) == _sharing(theirs, expected)


def _sharing(inputs, outputs):
    """Return which outputs share storage with which inputs and earlier outputs."""
    storages = [tensor.untyped_storage().data_ptr() or id(tensor) for tensor in (*inputs, *outputs)]
    return [[one == other for other in storages[:n]] for n, one in enumerate(storages)]


def in_a_process(source, *args, cwd=None, **changes):
    """Run a program with the folder of this file as its first argument, and return its output."""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", source, str(here), *map(str, args)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(here.parent), **changes},
        cwd=cwd,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
