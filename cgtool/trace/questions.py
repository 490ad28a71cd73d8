"""What code asks about its tensors that Dynamo answers once and for all, and the plan does not hold otherwise.

A plan lets a call pass where gradients are not needed, whichever of its tensors could have them, whether a tensor is a
parameter, and whether two arguments are one tensor. Code that asks for one of these gets a guard on the answer.
"""

from __future__ import annotations

import dis
import itertools
import types
from collections.abc import Iterable, Iterator

import torch

from cgtool.guards.kinds import describe
from cgtool.guards.names import qualified_name
from cgtool.guards.sources import Roots, parse_source
from cgtool.guards.state import current
from cgtool.plan import Guard
from cgtool.trace.files import is_covered_by_versions

_VARIABLES = frozenset({"LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_DEREF", "LOAD_ATTR"})


def question_guards(codes: Iterable[types.CodeType], inputs: Iterable[str], roots: Roots) -> Iterator[Guard]:
    """Yield guards on what the traced code asks.

    Args:
        codes: The code that the trace went through.
        inputs: The sources of the graph's tensors.
        roots: The live model and the arguments of the traced call.
    """
    codes, inputs = list(codes), list(inputs)
    users = [code for code in codes if not is_covered_by_versions(code.co_filename)]
    names = {name for code in users for name in code.co_names}
    arguments = [source for source in inputs if parse_source(source).is_call]
    if any("is_grad_enabled" in code.co_names for code in codes):
        yield Guard(source="state:grad_mode", kind="state", expected=current("grad_mode"))
    if "requires_grad" in names:
        for source in inputs:
            kind = "requires_grad"
            yield Guard(source=source, kind=kind, expected=describe(kind, roots.resolve(source)))
    if "Parameter" in names:
        for source in arguments:
            # A fake tensor stands for a plain one.
            is_parameter = isinstance(roots.resolve(source), torch.nn.Parameter)
            expected = qualified_name(torch.nn.Parameter if is_parameter else torch.Tensor)
            yield Guard(source=source, kind="type", expected=expected)
    if any(map(_compares_identity, users)):
        for one, other in itertools.combinations(arguments, 2):
            if roots.resolve(one) is not roots.resolve(other):
                yield Guard(source=one, kind=f"same:{other}", expected=False)


def _compares_identity(code: types.CodeType) -> bool:
    """Return whether the code says `a is b` of two variables."""
    pairs = itertools.pairwise(dis.get_instructions(code))
    return any(op.opname == "IS_OP" and before.opname in _VARIABLES for before, op in pairs)
