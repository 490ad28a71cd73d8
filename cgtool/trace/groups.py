"""Names process groups in a graph by their ranks, because a process numbers groups in the order of their creation."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from cgtool.guards import _torch as private
from cgtool.guards.kinds import describe
from cgtool.plan.records import Guard
from cgtool.trace.closure import is_covered_by_versions


def name_groups(
    graph_module: fx.GraphModule,
    guards: Sequence[Guard],
    call_guards: Sequence[Guard],
    codes: Sequence[types.CodeType],
) -> Iterator[Guard]:
    """Make collectives name groups by their ranks; yield the model's guards, and guards on names that stay.

    Dynamo guards the name of a group even if only torch reads it; the guard on the group's ranks replaces it. A name
    stays in the graph if a string of the model equals it, or if no guard covers the group: then every process must have
    a group of these ranks under that name.

    Args:
        graph_module: Dynamo's graph, with its nested graphs.
        guards: Conditions on the model.
        call_guards: Conditions on each call.
        codes: The traced code.
    """
    names = private.register_groups()
    if not names:
        yield from guards
        return
    if not any("group_name" in code.co_names for code in codes if not is_covered_by_versions(code.co_filename)):
        groups = {f"{guard.source}.group_name" for guard in guards if _is_group(guard.expected)}
        guards = [guard for guard in guards if guard.source not in groups]
    yield from guards
    facts = list(_walk([guard.expected for guard in guards]))
    strings = {fact for fact in (*facts, *_walk([guard.expected for guard in call_guards])) if isinstance(fact, str)}
    strings.update(constant for code in codes for constant in code.co_consts if isinstance(constant, str))
    guarded_groups = [fact for fact in facts if _is_group(fact)]
    kept: set[str] = set()

    def by_ranks(value: Any) -> Any:
        group = describe(f"group:{value}", None) if isinstance(value, str) else None
        if group is None:
            return value
        if value in strings or group not in guarded_groups:
            kept.add(value)
        return value if value in kept else names.get(value, value)

    for part in graph_module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                if node.op == "call_function" and str(node.target).startswith("_c10d_functional"):
                    node.args, node.kwargs = map_aggregate(node.args, by_ranks), map_aggregate(node.kwargs, by_ranks)
            part.recompile()
    for name in sorted(kept):
        yield Guard(source="self", kind=f"group:{name}", expected=describe(f"group:{name}", None))


def _is_group(fact: Any) -> bool:
    return isinstance(fact, list) and fact[:1] == ["group"]


def _walk(facts: Any) -> Iterator[Any]:
    """Yield a nested value and all values in it."""
    yield facts
    if isinstance(facts, list | tuple | dict):
        for fact in facts.values() if isinstance(facts, dict) else facts:
            yield from _walk(fact)
