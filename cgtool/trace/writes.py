"""What a call changes on Python objects that were there before it: nothing that lasts, attributes that settle, or more.

A model may set plain attributes to what they keep from then on (`self.shift_size = 0` where the image is small). Its
graph must be the same before and after; then a plan says what was set, and each call sets it, as the model would.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from cgtool.errors import CgtoolError, TraceError
from cgtool.guards.kinds import encode_literal
from cgtool.plan.grammar import canonical_json
from cgtool.plan.records import Guard, Settled
from cgtool.trace import _torch as private
from cgtool.trace.sources import MODULE_DICTS, Frame, source_text

_PLAIN = (type(None), bool, int, float, str, tuple)


@dataclass(kw_only=True)
class Writes:
    """What a traced call writes.

    Args:
        settled: Plain attributes of the model.
        renewed: Source of a module and name of a tensor in it that is set to itself: nothing changes.
        changed: The sources of all else.
    """

    settled: list[Settled] = field(default_factory=list)
    renewed: list[tuple[str, str]] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)


def writes_of(output: Any, frame: Frame, inputs: Mapping[str, Any]) -> Writes:
    """Return what the traced call writes.

    Args:
        output: Dynamo's OutputGraph, before its bytecode ran.
        frame: How sources are written.
        inputs: Source → fake tensor of the graph's inputs.
    """
    found = Writes()
    for variable in private.modified_existing(output):
        name = _name_of(variable, frame)
        if _is_as_before(variable, name, frame):
            continue
        owner, _, last = name.rpartition(".")
        is_dict = last in MODULE_DICTS
        written = private.written_keys(variable) if is_dict else private.written_attributes(output, variable)
        for attribute, value in written.items():
            holder = owner if is_dict else name
            plain = None if is_dict else _plain(name, attribute, value, frame)
            if private.is_tensor(value, inputs.get(f"{holder}.{attribute}")):
                found.renewed.append((holder, attribute))  # `self.table = self.table.to(device)`, where it is there
            elif plain is None:
                found.changed.append(f"{holder}.{attribute}")
            else:
                found.settled.append(plain)
        if not written:
            found.changed.append(name)
    return found


def _is_as_before(variable: Any, name: str, frame: Frame) -> bool:
    try:
        return private.is_as_before(variable, frame.resolve(name))
    except (CgtoolError, LookupError, AttributeError):
        return False


def _plain(owner: str, name: str, value: Any, frame: Frame) -> Settled | None:
    try:
        module = frame.resolve(owner)
        if not isinstance(module, nn.Module):
            return None
        before, after = vars(module)[name], value.as_python_constant()
        if type(before) not in _PLAIN or type(after) not in _PLAIN:
            return None
        return Settled(source=owner, name=name, before=encode_literal(before), after=encode_literal(after))
    except (CgtoolError, NotImplementedError, LookupError, AttributeError):
        return None


def _name_of(variable: Any, frame: Frame) -> str:
    source = getattr(variable, "source", None)
    if source is None:
        return ""
    try:
        return source_text(source, frame)
    except TraceError:
        return str(source.name)


def settled_guards(guards: Iterable[Guard], settled: Sequence[Settled]) -> Iterator[Guard]:
    """Yield guards in which these attributes may be what they were or what they become."""
    texts = {f"{one.source}.{one.name}" for one in settled}
    yield from (guard for guard in guards if guard.source not in texts)
    for one in settled:
        either = canonical_json([one.before, one.after]).decode()
        yield Guard(source=f"{one.source}.{one.name}", kind=f"settles:{either}", expected=True)
