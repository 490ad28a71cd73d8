"""Refuses models whose behavior a trace cannot capture: code around the method, side effects, object ids."""

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

#: Guards on every model: only the method is traced, and not the hooks around its call.
ALWAYS = (
    Guard(source="self.training", kind="value", expected=False),
    Guard(source="self", kind="hooks", expected=0),
    Guard(source="self|type.__call__", kind="value", expected=encode_literal(torch.nn.Module.__call__)),
    Guard(source="global:torch.nn.modules.module:_global_forward_hooks", kind="empty", expected=True),
    Guard(source="global:torch.nn.modules.module:_global_forward_pre_hooks", kind="empty", expected=True),
)
#: The sources of these guards → the error if one does not hold.
_AROUND = {
    "self.training": "the model is in training mode; call model.eval() first",
    "self": "the model itself has hooks, which run around forward; put them on a submodule, or remove them",
    "self|type.__call__": "the model's class overrides __call__; move its code into forward",
}


def refuse_surroundings(roots: Roots) -> None:
    """Refuse a model if calling it, or one of its parts, runs more code than the method."""
    method = getattr(roots.method, "__func__", roots.method)
    why = None
    if not isinstance(method, types.FunctionType):
        why = f"is a {type(method).__qualname__}, not a function, so Dynamo cannot trace it; write a method"
    elif hasattr(method, "_torchdynamo_orig_callable"):
        why = "is already wrapped by torch.compile; remove that"
    elif "__name__" not in method.__globals__:
        why = "belongs to no module (its globals have no __name__); import it from a module"
    if why is not None:
        msg = f"The method to compile {why}."
        raise TraceError(msg, path=getattr(method, "__qualname__", None), actual=type(method).__qualname__)
    for name in ("__call__", "_wrapped_call_impl", "_call_impl"):
        if getattr(getattr(nn.Module, name), "__globals__", None) is not vars(nn.modules.module):
            msg = f"torch.nn.Module.{name} was replaced, but compiled code does not run it; restore torch's own."
            raise TraceError(msg, path=f"torch.nn.Module.{name}")
    for failure in check(ALWAYS, roots):
        why = _AROUND.get(failure.guard.source, "hooks for all modules are registered; remove them")
        msg = f"Compiled code runs only the model's method, but a call of this model does more: {why}."
        raise TraceError(msg, path=source_words(failure.guard.source), actual=failure.actual)


def refuse_side_effects(changed: Iterable[str], lines: Mapping[str, str] = MappingProxyType({})) -> None:
    """Refuse a model that changes the objects of these sources and does not restore them; `lines` are its writes."""
    lasting = [text for text in changed if text and not text.startswith("arg:kwargs")]
    if lasting:
        names = ", ".join(source_words(text) for text in lasting[:4])
        where = "".join(dict.fromkeys(lines.get(text, "") for text in lasting[:4]))
        msg = (
            f"The model changes {names} while it runs, but a compiled graph would not.{where}\nKeep state in buffers "
            "that are written in place (`self.count.add_(1)`), or return it. If it fills a cache, call the model once "
            "before it is compiled, and before it is loaded."
        )
        raise TraceError(msg, path=names, actual=tuple(lasting))


def refuse_beside_calls(kept: Sequence[str], lines: Mapping[str, str]) -> None:
    """Refuse to trace beside other threads' calls if calls leave values in these places: the trace sets them too."""
    if kept and beside_calls.get():
        names = ", ".join(source_words(text) for text in kept[:4])
        where = "".join(dict.fromkeys(lines.get(text, "") for text in kept[:4]))
        msg = (
            f"Calls store values in {names}, which a background trace would change during other calls of the "
            f"model.{where}\nPass otherwise='warm', which makes calls wait for the trace."
        )
        raise TraceError(msg, path=names, actual=tuple(kept))


def refuse_subclasses(inputs: Mapping[str, Any]) -> None:
    """Refuse tensor subclasses among the inputs ({source: fake tensor}), which an artifact cannot take."""
    for source, value in inputs.items():
        if private.is_traceable_wrapper_subclass(value):
            name = source_words(source)
            msg = (
                f"{name} is a {type(value).__name__}, a tensor subclass that an artifact cannot take. "
                "Unwrap it into plain tensors before the model is warmed."
            )
            raise TraceError(msg, path=name, actual=type(value).__name__)


def refuse_identities(codes: Iterable[types.CodeType]) -> None:
    """Refuse user code that calls `id()`, whose result differs in each process."""
    for code in codes:
        if is_covered_by_versions(code.co_filename):
            continue
        for instruction in dis.get_instructions(code):
            if instruction.opname == "LOAD_GLOBAL" and instruction.argval == "id":
                line = instruction.positions.lineno if instruction.positions is not None else code.co_firstlineno
                where = f"{code.co_filename}:{line}"
                msg = (
                    f"{where}, in {code.co_qualname}: id() returns a different number in each process, so a compiled "
                    "graph cannot depend on it. Compare the objects with `is`, or put them into a set."
                )
                raise TraceError(msg, path=where, actual="id")
