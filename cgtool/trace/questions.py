"""What code asks about its tensors that Dynamo answers once and for all, and the plan does not hold otherwise.

A plan lets a call pass where gradients are not needed, whichever of its tensors could have them, where a dimension of
size one has any stride, and whether or not two arguments are one tensor. Code that may ask for one of these, by a name
or by a string, gets a guard on the answer for all tensors that it could mean.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from cgtool.guards.kinds import describe
from cgtool.guards.state import current, names_for_code
from cgtool.plan.records import Guard
from cgtool.trace.names import compares_objects, names_in
from cgtool.trace.objects import is_of_call

#: Kinds of guards, and the names by which code asks what they see.
_QUESTIONS: dict[str, frozenset[str]] = {
    "requires_grad": frozenset({"requires_grad"}),
    "is_leaf": frozenset({"is_leaf", "grad_fn", "retains_grad"}),
    "has_grad": frozenset({"grad"}),
    "is_view": frozenset({"_base", "_is_view"}),
    "is_inference": frozenset({"is_inference"}),
    "steps_of_one": frozenset({"stride", "as_strided", "dim_order"}),
}


def question_guards(
    codes: Iterable[types.CodeType], names: frozenset[str], objects: Mapping[str, Any]
) -> Iterator[Guard]:
    """Yield guards on what the traced code may ask.

    Args:
        codes: The code that the trace went through.
        names: The names that it holds, and those of the functions that it reaches by other names.
        objects: {source: object} of all that it could mean, the graph's inputs among them.
    """
    with torch.no_grad():  # as the trace was made, whatever holds around the warm
        asked = {name: current(name) for name in names_for_code(names)}
    for name, answer in asked.items():
        yield Guard(source=f"state:{name}", kind="state", expected=answer)
    # torch's own modules hold names such as `stride` for settings of theirs.
    codes = list(codes)
    outside = names_in(code for code in codes if not _is_torchs(code))
    for kind, words in _QUESTIONS.items():
        if not (outside if kind == "steps_of_one" else names).isdisjoint(words):
            for source, value in objects.items():
                if isinstance(value, torch.Tensor):
                    yield Guard(source=source, kind=kind, expected=describe(kind, value))
    if compares_objects(names, codes):
        yield from _distinct_arguments(objects)


def _is_torchs(code: types.CodeType) -> bool:
    return code.co_filename.startswith(f"{Path(torch.__file__).parent}/")


def _distinct_arguments(objects: Mapping[str, Any]) -> Iterator[Guard]:
    """Yield guards that the objects of a call are different ones, and none of the model's own of the same class."""
    firsts = {id(value): source for source, value in reversed(list(objects.items()))}
    given = [source for source in reversed(firsts.values()) if is_of_call(source)]
    for source in given:
        yield Guard(source=source, kind="distinct:arguments", expected=True)
    for source, other in itertools.product(given, firsts.values()):
        value = objects[source]
        if is_of_call(other) or isinstance(value, (list, dict, set)):
            continue
        if describe("type", value) == describe("type", objects[other]):
            yield Guard(source=source, kind=f"same:{other}", expected=False)
