"""Guards on properties of tensors that code reads, that Dynamo folds, and that the plan does not check otherwise.

A plan accepts calls regardless of which tensors require gradients, of the strides of dimensions of size one, and of
whether two arguments are the same tensor. If code may read one of these, by a name or a string, all tensors that it
could refer to get a guard.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx

from cgtool.guards.kinds import describe
from cgtool.guards.state import current, names_for_code
from cgtool.plan.records import Guard
from cgtool.trace import _torch as private
from cgtool.trace.names import compares_objects, names_in
from cgtool.trace.objects import is_of_call

_LARGE = 1 << 40
#: Kinds of guards → the names by which code reads the property.
_QUESTIONS: dict[str, frozenset[str]] = {
    "requires_grad": frozenset({"requires_grad"}),
    "is_leaf": frozenset({"is_leaf", "grad_fn", "retains_grad"}),
    "has_grad": frozenset({"grad"}),
    "is_view": frozenset({"_base", "_is_view"}),
    "is_inference": frozenset({"is_inference"}),
    "is_buffer": frozenset({"Buffer", "_is_buffer"}),
    "steps_of_one": frozenset({"stride", "as_strided", "dim_order"}),
}


def question_guards(
    codes: Iterable[types.CodeType], names: frozenset[str], objects: Mapping[str, Any]
) -> Iterator[Guard]:
    """Yield guards on the properties that the traced code may read.

    Args:
        codes: The traced code.
        names: The names in it, and the names of functions that it reaches under other names.
        objects: {source: object} of everything that it could refer to, including the graph's inputs.
    """
    with torch.no_grad():  # as during the trace, whatever the caller's mode
        asked = {name: current(name) for name in names_for_code(names)}
    for name, answer in asked.items():
        yield Guard(source=f"state:{name}", kind="state", expected=answer)
    # torch's own modules use names such as `stride` for hyperparameters.
    codes = list(codes)
    outside = names_in(code for code in codes if not _is_torchs(code))
    for kind, words in _QUESTIONS.items():
        if not (outside if kind == "steps_of_one" else names).isdisjoint(words):
            for source, value in objects.items():
                if isinstance(value, torch.Tensor):
                    yield Guard(source=source, kind=kind, expected=describe(kind, value))
    if compares_objects(names, codes):
        yield from _distinct_arguments(objects)


def shown_steps(graph_module: fx.GraphModule, inputs: Mapping[str, Any], shape_env: Any) -> list[str]:
    """Return the inputs whose strides of dimensions of size one affect the strides of an output.

    A view, a copy or `zeros_like` keeps such a stride, and a sum or a product does not. So the graph is run on fake
    tensors with other strides there: on all inputs at once and, if an output changes, on each. If the graph cannot be
    run this way, every input counts.

    Args:
        graph_module: Dynamo's graph.
        inputs: {source: fake tensor} of its inputs.
        shape_env: Dynamo's ShapeEnv.
    """
    asked = [source for source, fake in inputs.items() if _has_one(fake)]
    results = cast("tuple[fx.Node, ...]", graph_module.graph.output_node().args[0])
    if not asked or not any(_has_one(node.meta["example_value"]) for node in results):
        return []
    sources = {id(fake): source for source, fake in inputs.items()}
    given = [node.meta["example_value"] for node in graph_module.graph.find_nodes(op="placeholder")]

    def shows(moved: Collection[str]) -> bool:
        values = [_moved(value) if sources.get(id(value)) in moved else value for value in given]
        made = _Steps(graph_module).run(*values)
        return any(value is not node.meta["example_value"] for value, node in zip(made, results, strict=True))

    try:
        with torch.no_grad(), inputs[asked[0]].fake_mode, shape_env.suppress_guards():
            return [source for source in asked if shows((source,))] if shows(asked) else []
    except Exception:  # noqa: BLE001 - an op may need something that fake tensors do not support
        return asked


class _Steps(fx.Interpreter):
    """Runs a graph on fake tensors with changed strides, as far as the change propagates.

    A node whose result keeps its strides returns the traced value, so that the nodes after it need not run.
    `empty_like` and similar ops keep the strides of a dense tensor, as the real ops do.
    """

    def run_node(self, n: fx.Node) -> Any:
        traced = n.meta.get("example_value")
        calls = n.op.startswith("call_")
        if calls and all(self.env[of] is of.meta.get("example_value") for of in n.all_input_nodes):
            return traced
        made = super().run_node(n)
        like = n.args[0] if n.args and "memory_format" not in n.kwargs else None
        if isinstance(like, fx.Node) and isinstance(made, torch.Tensor) and str(n.target).find("_like") >= 0:
            of = self.env[like]
            made = torch.empty_strided(made.shape, of.stride(), dtype=made.dtype, device=made.device)
        return traced if calls and _strides(made) == _strides(traced) else made


def _strides(value: Any) -> list[str]:
    return [str(leaf.stride()) for leaf in private.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _has_one(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and any(type(size) is int and size == 1 for size in value.shape)
    )


def _moved(fake: torch.Tensor) -> torch.Tensor:
    """Return a tensor like another, with an implausible stride in its dimensions of size one."""
    steps = [_LARGE if size == 1 else own for size, own in zip(fake.shape, fake.stride(), strict=True)]
    return torch.empty_strided(fake.shape, steps, dtype=fake.dtype, device=fake.device)


def _is_torchs(code: types.CodeType) -> bool:
    return code.co_filename.startswith(f"{Path(torch.__file__).parent}/")


def _distinct_arguments(objects: Mapping[str, Any]) -> Iterator[Guard]:
    """Yield guards that the objects of a call differ from each other and from the model's objects of the same class."""
    firsts = {id(value): source for source, value in reversed(list(objects.items()))}
    arguments = [source for source in reversed(firsts.values()) if is_of_call(source)]
    for source in arguments:
        yield Guard(source=source, kind="distinct:arguments", expected=True)
    for source, other in itertools.product(arguments, firsts.values()):
        value = objects[source]
        if is_of_call(other) or isinstance(value, (list, dict, set)):
            continue
        if describe("type", value) == describe("type", objects[other]):
            yield Guard(source=source, kind=f"same:{other}", expected=False)
