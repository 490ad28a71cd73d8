"""What a trace cannot keep, refused by name: what happens around the model's method and beside it, and addresses."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from cgtool.errors import TraceError
from cgtool.guards.kinds import check, encode_literal
from cgtool.guards.sources import Roots
from cgtool.plan.records import Guard, source_words
from cgtool.threads import beside_calls
from cgtool.trace import _torch as private
from cgtool.trace.closure import is_covered_by_versions

#: What holds of every model: its method is traced, and not the hooks around a call of it.
ALWAYS = (
    Guard(source="self.training", kind="value", expected=False),
    Guard(source="self", kind="hooks", expected=0),
    Guard(source="self|type.__call__", kind="value", expected=encode_literal(torch.nn.Module.__call__)),
    Guard(source="global:torch.nn.modules.module:_global_forward_hooks", kind="empty", expected=True),
    Guard(source="global:torch.nn.modules.module:_global_forward_pre_hooks", kind="empty", expected=True),
)


#: The same in words, for a model of which it does not hold.
_AROUND = {
    "self.training": "the model is in training mode; call model.eval() first",
    "self": "the model itself has hooks, which run around forward; put them on a submodule, or remove them",
    "self|type.__call__": "the model's class has a __call__ of its own; move what it does into forward",
}


def refuse_surroundings(roots: Roots) -> None:
    """Refuse a model whose call, or the call of whose parts, does more than its method."""
    method = getattr(roots.method, "__func__", roots.method)
    why = None
    if not isinstance(method, types.FunctionType):
        why = f"is a {type(method).__qualname__} and no function, which Dynamo does not trace; write a method"
    elif hasattr(method, "_torchdynamo_orig_callable"):
        why = "is under torch.compile, which would compile it once more; take that off"
    elif "__name__" not in method.__globals__:
        why = "belongs to no module (its globals have no __name__); import it from one"
    if why is not None:
        msg = f"What is to be compiled {why}."
        raise TraceError(msg, path=getattr(method, "__qualname__", None), actual=type(method).__qualname__)
    for name in ("__call__", "_wrapped_call_impl", "_call_impl"):
        if getattr(getattr(nn.Module, name), "__globals__", None) is not vars(nn.modules.module):
            msg = f"torch.nn.Module.{name} was replaced, and compiled code does not run it; put torch's own back."
            raise TraceError(msg, path=f"torch.nn.Module.{name}")
    for failure in check(ALWAYS, roots):
        why = _AROUND.get(failure.guard.source, "hooks for all modules are registered; remove them")
        msg = f"Compiled code runs the model's method alone, and a call of this model does more: {why}."
        raise TraceError(msg, path=source_words(failure.guard.source), actual=failure.actual)


def refuse_side_effects(changed: Iterable[str], lines: Mapping[str, str] = MappingProxyType({})) -> None:
    """Refuse a model that changes what these sources name, at these lines of its code, and does not put it back."""
    lasting = [text for text in changed if text and not text.startswith("arg:kwargs")]
    if lasting:
        names = ", ".join(source_words(text) for text in lasting[:4])
        where = "".join(dict.fromkeys(lines.get(text, "") for text in lasting[:4]))
        msg = (
            f"The model changes {names} while it runs, and a compiled graph would not.{where}\nKeep state in buffers "
            "that are written in place (`self.count.add_(1)`), or return it."
        )
        raise TraceError(msg, path=names, actual=tuple(lasting))


def refuse_beside_calls(kept: Sequence[str], lines: Mapping[str, str]) -> None:
    """Refuse a model whose calls leave something in these places, where other threads call it: a trace sets them."""
    if kept and beside_calls.get():
        names = ", ".join(source_words(text) for text in kept[:4])
        where = "".join(dict.fromkeys(lines.get(text, "") for text in kept[:4]))
        msg = (
            f"Calls leave something in {names}, which a trace in the background would change beneath calls of the "
            f"model itself.{where}\nPass otherwise='warm', with which calls wait for it."
        )
        raise TraceError(msg, path=names, actual=tuple(kept))


def refuse_subclasses(inputs: Mapping[str, Any]) -> None:
    """Refuse inputs, fake tensors by source, that an artifact cannot take."""
    for source, value in inputs.items():
        if private.is_traceable_wrapper_subclass(value):
            name = source_words(source)
            msg = (
                f"{name} is a {type(value).__name__}, a tensor subclass that an artifact cannot take. "
                "Unwrap it into plain tensors before the model is warmed."
            )
            raise TraceError(msg, path=name, actual=type(value).__name__)


def refuse_identities(codes: Iterable[types.CodeType]) -> None:
    """Refuse the user's code that asks for the number of an object: it is another one in each process."""
    for code in codes:
        if is_covered_by_versions(code.co_filename):
            continue
        for instruction in dis.get_instructions(code):
            if instruction.opname == "LOAD_GLOBAL" and instruction.argval == "id":
                line = instruction.positions.lineno if instruction.positions is not None else code.co_firstlineno
                where = f"{code.co_filename}:{line}"
                msg = (
                    f"{where}, in {code.co_qualname}: id() gives another number in each process, so nothing that is "
                    "made of it can be kept. Compare the objects with `is`, or put them into a set."
                )
                raise TraceError(msg, path=where, actual="id")
