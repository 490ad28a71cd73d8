"""Handwritten plans for the runtime's tests: two linear layers around a splitting op, without Dynamo or Inductor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from cgtool.plan.pieces import Node, PieceGraph, SymbolRange, TensorMeta
from cgtool.plan.records import Guard, Input, Plan, Step, Variant
from cgtool.runtime.call import LoadedModel
from cgtool.runtime.dispatch import PiecewiseBackend
from cgtool.runtime.op_by_op import piece_function

WIDTH = 4
LIBRARY = torch.library.Library("cgtool_runtime_test", "FRAGMENT")
LIBRARY.define("attn(Tensor x) -> Tensor")
LIBRARY.define("wrong(Tensor x) -> Tensor")
LIBRARY.impl("attn", lambda x: x * 2, "CompositeExplicitAutograd")
LIBRARY.impl("wrong", lambda x: x.double(), "CompositeExplicitAutograd")


@dataclass
class Output:
    hidden: torch.Tensor
    extra: Any = None


class Model(nn.Module):
    """Linear, attention, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.eps = 0.5
        self.eval()

    def forward(self, x, mask=None, *, scale=1.0):
        del mask, scale
        return self.last(torch.ops.cgtool_runtime_test.attn(self.first(x)))


def tensor(*shape, stride=None, dtype="float32", device="cpu") -> TensorMeta:
    if stride is None:
        steps: list[Any] = []
        step: Any = 1
        for size in reversed(shape):
            steps.append(step)
            step = size * step if isinstance(size, int) and isinstance(step, int) else f"{size}*{step}"
        stride = tuple(reversed(steps))
    return TensorMeta(dtype=dtype, shape=tuple(shape), stride=tuple(stride), device=device)


def call(target, *args, **kwargs) -> Node:
    return Node(kind="function", target=target, args=args, kwargs=kwargs)


def method(name, *args, **kwargs) -> Node:
    return Node(kind="method", target=name, args=args, kwargs=kwargs)


def size(ref, dim) -> Node:
    return Node(kind="size", target=None, args=(ref, dim), kwargs={})


def graph(inputs, nodes, outputs, results, symbols=(("s0", 2, None),)) -> PieceGraph:
    return PieceGraph(
        symbols=tuple(SymbolRange(name=n, min=low, max=high) for n, low, high in symbols),
        facts=(),
        inputs=tuple(inputs),
        aliases=(),
        nodes=tuple(nodes),
        outputs=tuple(outputs),
        results=tuple(results),
        ops={},
    )


ROWS = tensor("s0", WIDTH)
WEIGHT = tensor(WIDTH, WIDTH)
LINEAR = graph([ROWS, WEIGHT], [call("torch._C._nn.linear", "%0", "%1")], ["%2"], [ROWS])
ATTENTION = graph([ROWS], [call("torch.ops.cgtool_runtime_test.attn.default", "%0")], ["%1"], [ROWS])


def variant(**changes) -> Variant:
    linear, attention = LINEAR.identity(), ATTENTION.identity()
    steps = (
        Step(piece=0, splitting=False, graph=linear, symbols={"s0": "s0"}, inputs=(0, 1), outputs=(3,)),
        Step(piece=1, splitting=True, graph=attention, symbols={"s0": "s0"}, inputs=(3,), outputs=(4,)),
        Step(piece=2, splitting=False, graph=linear, symbols={"s0": "s0"}, inputs=(4, 2), outputs=(5,)),
    )
    made = Variant(
        name="prefill",
        fixed={},
        dims={"num_tokens": ("s0",)},
        symbols=(SymbolRange(name="s0", min=2, max=None),),
        relations=(),
        inputs=(
            Input(source="arg:x", meta=ROWS),
            Input(source="self.first.weight", meta=WEIGHT),
            Input(source="self.last.weight", meta=WEIGHT),
        ),
        model_guards=(Guard(source="self.eps", kind="value", expected=["f", "0.5"]),),
        call_guards=(Guard(source="arg:mask", kind="value", expected=None),),
        steps=steps,
        output=["v", 5],
    )
    return replace(made, **changes)


def one(name="decode", **changes) -> Variant:
    """A variant for one token, with all sizes fixed."""
    row = tensor(1, WIDTH)
    linear, attention = _fixed(LINEAR).identity(), _fixed(ATTENTION).identity()
    general = variant()
    steps = tuple(replace(step, symbols={}, graph=attention if step.splitting else linear) for step in general.steps)
    inputs = (Input(source="arg:x", meta=row), *general.inputs[1:])
    return replace(
        general, name=name, fixed={"num_tokens": 1}, dims={}, symbols=(), steps=steps, inputs=inputs, **changes
    )


def _fixed(general: PieceGraph) -> PieceGraph:
    row = tensor(1, WIDTH)
    inputs = [row if meta == ROWS else meta for meta in general.inputs]
    return replace(general, symbols=(), inputs=tuple(inputs), results=(row,))


def plan(*variants: Variant, graphs=(), method="forward") -> Plan:
    known = (LINEAR, ATTENTION, _fixed(LINEAR), _fixed(ATTENTION), *graphs)
    return Plan(
        method=method,
        qualname="hand_plans:Model",
        variants=variants or (variant(),),
        graphs={item.identity(): item for item in known},
    )


def opened(made: Plan) -> dict[tuple[int, int], PiecewiseBackend]:
    """Stand-ins for the loader's functions: every compiled piece runs op by op."""
    return {
        (index, step.piece): PiecewiseBackend(general=piece_function(made.graphs[step.graph]))
        for index, item in enumerate(made.variants)
        for step in item.steps
        if not step.splitting
    }


def load(model, *variants, **changes) -> LoadedModel:
    plan_ = plan(*variants, **changes)
    return LoadedModel(model, plan_, opened(plan_))
