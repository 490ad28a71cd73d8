"""A call's writes to objects that existed before it: attributes that settle, those kept for the next call, others.

A model may set a plain attribute once and for all (`self.shift_size = 0` if the image is small). Its graph must be the
same before and after; the plan then records the value, and each call sets it, as the model would. For other values in
attributes, see `cgtool.trace.kept`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from cgtool.errors import CgtoolError, TraceError
from cgtool.guards.kinds import describe, encode_literal
from cgtool.guards.sources import PARTS
from cgtool.plan.grammar import canonical_json
from cgtool.plan.records import Guard, Settled
from cgtool.trace import _torch as private
from cgtool.trace.breaks import line_of
from cgtool.trace.kept import can_keep, without_names
from cgtool.trace.sources import FILLED_AT_FIRST_USE, Frame, source_text

_PLAIN = (type(None), bool, int, float, str, tuple)


@dataclass(kw_only=True)
class Writes:
    """The writes of a traced call.

    Args:
        settled: Plain attributes of the model that get their final value.
        renewed: The sources of tensors of modules that are set to themselves: nothing changes.
        inherited: Plain attributes that a module inherits from its class and sets to the same value: nothing changes.
        kept: The sources of attributes and dict items of the model in which each call may leave another value.
        changed: The sources of all other objects that change.
        written: The sources of all written attributes, changed or not.
        lines: {source: user's line that writes it}, where Dynamo reports it.
    """

    settled: list[Settled] = field(default_factory=list)
    renewed: list[str] = field(default_factory=list)
    inherited: list[Settled] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)


def writes_of(output: Any, frame: Frame, inputs: Mapping[str, Any]) -> Writes:
    """Return the writes of the traced call.

    Args:
        output: Dynamo's OutputGraph, before its bytecode runs.
        frame: The traced frame.
        inputs: Source → fake tensor of the graph's inputs.
    """
    found = Writes()
    for variable, differs in private.written_existing(output):
        name = _name_of(variable, frame)
        found.written += [f"{name}.{attribute}" for attribute in private.written_attributes(output, variable)]
        if not differs or FILLED_AT_FIRST_USE.match(name) or _is_as_before(variable, name, frame):
            continue
        owner, _, last = name.rpartition(".")
        is_dict = last in PARTS
        written = private.written_keys(variable) if is_dict else private.written_attributes(output, variable)
        holder = owner if is_dict else name
        line = line_of(private.frames_of_writes(output, variable))
        found.lines.update({name: line} | {f"{holder}.{attribute}": line for attribute in written})
        for attribute, value in written.items():
            plain = None if is_dict else _plain(name, attribute, value, frame)
            place = f"{holder}.{attribute}"
            if private.is_tensor(value, inputs.get(place)):
                found.renewed.append(place)  # `self.table = self.table.to(device)`, already on that device
            elif plain is None:
                is_kept = can_keep(holder, attribute, frame.resolve(holder))
                (found.kept if is_kept else found.changed).append(place)
            elif not _is_same(plain):
                found.settled.append(plain)
            elif attribute not in vars(frame.resolve(holder)):
                found.inherited.append(plain)
        if not written:
            keys = _keys_written(variable, name, frame)
            found.lines.update(dict.fromkeys(keys, line))
            (found.kept if keys else found.changed).extend(keys or [name])
    return found


def _keys_written(variable: Any, name: str, frame: Frame) -> list[str]:
    """Return the sources of the items that a dict of the model gains, or [] if it also loses items."""
    held = frame.resolve(name) if name.startswith("self") else None
    if type(held) is not dict or getattr(variable, "should_reconstruct_all", True):
        return []
    keys = private.written_keys(variable)
    return [f"{name}[{json.dumps(key)}]" for key in keys] if all(type(key) in (str, int) for key in keys) else []


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
        before, after = inspect.getattr_static(module, name), value.as_python_constant()
        if type(before) not in _PLAIN or type(after) not in _PLAIN:
            return None
        plain = Settled(source=owner, name=name, before=encode_literal(before), after=encode_literal(after))
        return plain if name in vars(module) or _is_same(plain) else None
    except (CgtoolError, NotImplementedError, LookupError, AttributeError):
        return None


def _is_same(plain: Settled) -> bool:
    return canonical_json(plain.before) == canonical_json(plain.after)  # as JSON, 1 is not True


def _name_of(variable: Any, frame: Frame) -> str:
    source = getattr(variable, "source", None)
    if source is None:
        return ""
    try:
        return source_text(source, frame)
    except TraceError:
        return str(source.name)


def computed_guards(guards: Iterable[Guard], module: nn.Module, names: Collection[str]) -> Iterator[Guard]:
    """Yield the guards with those on cached properties of these names replaced by guards on the computed values.

    A trace treats them as plain properties, and the model's first call caches them: the guards hold before and after.
    """
    computed: dict[str, dict[str, Guard]] = {}
    for path, part in module.named_modules():
        source = f"self.{path}" if path else "self"
        members = {name: value for owner in reversed(type(part).__mro__) for name, value in vars(owner).items()}
        for name in names & members.keys():
            if isinstance(members[name], functools.cached_property):
                with contextlib.suppress(Exception):  # an error of the user's code appears when the model reads it
                    found = describe(f"computed:{name}", part)
                    guard = Guard(source=source, kind=f"computed:{name}", expected=found)
                    computed.setdefault(source, {})[name] = guard
    for guard in guards:
        owner, _, last = guard.source.rpartition(".")
        if guard.source in computed and guard.kind.startswith("named:"):
            yield without_names(guard, computed[guard.source])
        elif guard.kind != "value" or last not in computed.get(owner, ()):
            yield guard
    for each in computed.values():
        yield from each.values()


def inherited_guards(guards: Iterable[Guard], inherited: Sequence[Settled]) -> Iterator[Guard]:
    """Yield the guards, changed so that these attributes may be the module's own or its class's."""
    names: dict[str, set[str]] = {}
    for attribute in inherited:
        names.setdefault(attribute.source, set()).add(attribute.name)
        yield Guard(source=attribute.place, kind="value", expected=attribute.before)
    for guard in guards:
        if guard.kind.startswith("named:") and guard.source in names:
            yield without_names(guard, names[guard.source])
        elif guard.kind != "value" or all(guard.source != attribute.place for attribute in inherited):
            yield guard


def settled_guards(guards: Iterable[Guard], settled: Sequence[Settled]) -> Iterator[Guard]:
    """Yield the guards, changed so that these attributes may have their value from before or after the call."""
    places = {attribute.place for attribute in settled}
    yield from (guard for guard in guards if guard.source not in places)
    for attribute in settled:
        either = canonical_json([attribute.before, attribute.after]).decode()
        yield Guard(source=attribute.place, kind=f"settles:{either}", expected=True)
