"""Values that calls leave in attributes of the model: as data, and as the state that the next call finds.

Dynamo's bytecode, which is not shipped, sets the attributes. Their values are read from the model after the traced
call, like the output. Attributes that a trace did not read may have any value.
"""

from __future__ import annotations

import contextlib
import dis
import json
import re
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from cgtool.guards.code import holds
from cgtool.guards.kinds import names_of
from cgtool.guards.sources import Place, Roots, leads_to, parse_source
from cgtool.plan.grammar import canonical_json
from cgtool.plan.pieces import Json
from cgtool.plan.records import Guard
from cgtool.trace import _torch as private
from cgtool.trace.closure import is_covered_by_versions
from cgtool.trace.objects import is_computed, is_of_call

#: A place and its value.
Held = tuple[Place, Any]
_NAME = re.compile(r"[A-Za-z0-9_]+", re.ASCII)
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.Size)
#: Kinds of guards on the keys of a dict.
_KEY_KINDS = ("keys", "length", "empty", "named_keys")


def can_keep(source: str, name: str, owner: Any) -> bool:
    """Return whether `setattr` on an object of the model has the same effect as the write in traced code."""
    cls = type(owner)
    is_code = callable(owner) and not isinstance(owner, nn.Module)
    if not source.startswith("self") or is_code or not holds(owner, "__dict__") or is_computed(cls, name):
        return False
    sets: Any = cls.__setattr__
    return sets is nn.Module.__setattr__ or sets is object.__setattr__


def can_be_kept(value: Any) -> bool:
    """Return whether a call can leave a value: not a parameter, which `setattr` registers, nor a mutable container."""
    if isinstance(value, torch.Tensor):
        return not isinstance(value, nn.Parameter)
    return type(value) in _PLAIN or (type(value) is tuple and all(map(can_be_kept, value)))


def unique_sources(module: nn.Module, arguments: Mapping[str, Any], places: Iterable[str]) -> dict[int, str]:
    """Return {id: source} of the tensors of the model and of a call that have exactly one source besides `places`.

    Code may move a tensor that the graph never takes from one attribute to another.
    """
    found = {f"arg:{name}": value for name, value in arguments.items()}
    for path, part in module.named_modules():
        owner = f"self.{path}" if path else "self"
        for holder in (part._parameters, part._buffers, vars(part)):  # noqa: SLF001 - runs none of the model's code
            found |= {f"{owner}.{name}": value for name, value in holder.items() if _NAME.fullmatch(name)}
    sources: dict[int, list[str]] = {}
    for source, value in sorted(found.items(), key=lambda item: item[0] in places):
        if isinstance(value, torch.Tensor) and not (source in places and id(value) in sources):
            sources.setdefault(id(value), []).append(source)
    return {number: every[0] for number, every in sources.items() if len(every) == 1}


@dataclass(frozen=True, kw_only=True)
class State:
    """A state in which calls leave a model.

    Args:
        held: The values of the places that calls have set.
        dynamic: (tensor, dimension) of the sizes among them that change from call to call.
        calls: The number of calls that lead to it.
        sizes: The sizes of the dynamic dimensions in these calls; None if they are those of the next call.
    """

    held: tuple[Held, ...] = ()
    dynamic: tuple[tuple[torch.Tensor, int], ...] = ()
    calls: int = 0
    sizes: Mapping[str, int] | None = None

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Put the model into this state while the block runs."""
        before = [(place, place.get()) for place, _ in self.held]
        try:
            for place, value in self.held:
                place.set(value)
            yield
        finally:
            put_back(before)

    def is_looked_at(self, sources: Iterable[str]) -> bool:
        """Return whether one of these sources leads to a tensor that calls left."""
        texts = [place.text for place, value in self.held if isinstance(value, (torch.Tensor, tuple))]
        return any(leads_to(source, texts) for source in sources)


def put_back(held: Sequence[Held]) -> None:
    """Restore the values of places, in reverse order, since a place may appear more than once."""
    for place, value in reversed(held):
        place.set(value)


class NextState:
    """Builds the state that the next call finds, with empty tensors for the graph's outputs: nothing is computed.

    Args:
        promised: The outputs of the graph, as fake tensors.
        roots: The model, and the arguments of the traced call.
        marked: (tensor, dimension, name) of each dimension that was symbolic.
    """

    def __init__(self, promised: Sequence[Any], roots: Roots, marked: Iterable[tuple[torch.Tensor, int, str]]) -> None:
        self._promised = promised
        self._roots = roots
        self._marked = {(id(tensor), dim % tensor.dim()) for tensor, dim, _ in marked}
        self._made: dict[int, torch.Tensor] = {}
        self._dynamic: list[tuple[torch.Tensor, int]] = []

    def after(self, state: State, left: Iterable[Held], templates: Mapping[str, Json]) -> State:
        """Return the state that the next call finds.

        Args:
            state: The state before the call.
            left: The values that the call left, as Dynamo's bytecode set them.
            templates: The templates of these values, by source.
        """
        held = {place.text: (place, value) for place, value in state.held}
        for place, value in left:
            before, found = place.get(), self._value(templates[place.text], value)
            held[place.text] = place, found
            self._dynamic += _grown(before, found)
        dynamic = tuple((tensor, dim) for tensor, dim in (*state.dynamic, *self._dynamic) if tensor.shape[dim] > 1)
        return replace(state, held=tuple(held.values()), dynamic=dynamic, calls=state.calls + 1)

    def _value(self, template: Json, value: Any) -> Any:
        tag, *rest = template
        if tag == "tuple":
            return tuple(self._value(*pair) for pair in zip(rest[0], value, strict=True))
        if tag == "call":  # torch.Size
            sizes = rest[1][0][1]
            return torch.Size(one[1] if one[0] == "const" else self._value(one, None) for one in sizes)
        if tag == "out" and not isinstance(self._promised[rest[0]], torch.Tensor):
            return private.hint_of(self._promised[rest[0]])
        if tag == "out":
            return self._like(self._promised[rest[0]])
        if tag in {"size", "stride"}:
            return getattr(self._roots.resolve(rest[0]), tag)(rest[1])
        # The next call has other arguments.
        return self._like(value) if tag == "source" and is_of_call(rest[0]) else value

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._made:
            sizes, steps = (tuple(map(private.hint_of, every)) for every in (tensor.shape, tensor.stride()))
            made = torch.empty_strided(sizes, steps, dtype=tensor.dtype, device=tensor.device)
            self._made[id(tensor)] = made
            sizes_now = enumerate(tensor.shape)
            changing = [dim for dim, s in sizes_now if not isinstance(s, int) or (id(tensor), dim) in self._marked]
            self._dynamic += [(made, dim) for dim in changing]
        return self._made[id(tensor)]


def _grown(before: Any, found: Any) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield (tensor, dimension) of the sizes that a call changed in a place."""
    if type(before) is tuple and type(found) is tuple:
        for pair in zip(before, found, strict=False):
            yield from _grown(*pair)
    elif isinstance(before, torch.Tensor) and isinstance(found, torch.Tensor) and before.dim() == found.dim():
        yield from ((found, dim) for dim, size in enumerate(found.shape) if size != before.shape[dim])


def looked_at(sources: Iterable[str], guards: Iterable[Guard]) -> tuple[str, ...]:
    """Return the sources in the model that Dynamo read: the graph's inputs and the sources of its guards."""
    found = dict.fromkeys(sources)
    for guard in guards:
        found.update(dict.fromkeys(_sources_of(guard)))
    return tuple(source for source in found if source.startswith("self"))


def absent_attributes(guards: Iterable[Guard], codes: Iterable[types.CodeType]) -> Iterator[str]:
    """Yield the model's absent attributes that code may have looked up: names that it both sets and reads.

    Dynamo does not report a lookup that fails, as with a caught AttributeError.
    """
    loaded: set[str] = set()
    stored: set[str] = set()
    for code in codes:
        if not is_covered_by_versions(code.co_filename):
            for step in dis.get_instructions(code):
                if step.opname in {"LOAD_ATTR", "LOAD_METHOD"}:
                    loaded.add(step.argval)
                elif step.opname == "STORE_ATTR":
                    stored.add(step.argval)
                elif isinstance(step.argval, str) and step.opname == "LOAD_CONST":
                    loaded.add(step.argval)  # the name in a getattr or setattr
                    stored.add(step.argval)
    for guard in guards if loaded & stored else ():
        if guard.kind.startswith("named:") and guard.source.startswith("self"):
            names = names_of(guard.kind.removeprefix("named:")) & loaded & stored
            yield from (f"{guard.source}.{name}" for name in sorted(names.difference(guard.expected)))


def _sources_of(guard: Guard) -> Iterator[str]:
    """Yield the sources that a guard depends on, including that of a name or key whose presence it checks."""
    word, _, argument = guard.kind.partition(":")
    yield guard.source
    if word in {"same", "apart"}:
        yield argument
    elif word in {"hasattr", "absent"}:
        yield f"{guard.source}.{argument}"
    elif word == "contains":
        yield f"{guard.source}[{json.dumps(json.loads(argument))}]"


def read_in_dict(places: Iterable[str], seen: Iterable[str]) -> list[str]:
    """Return the places that code reads through the `__dict__` of their owner."""
    split = {place: place.rpartition(".") for place in places}
    texts = {f'{owner}.__dict__["{name}"]': place for place, (owner, _, name) in split.items()}
    return [texts[text] for text in texts if any(leads_to(source, (text,)) for source in seen)]


def guards_of_states(
    guards: Iterable[Guard], seen: Iterable[str], places: Sequence[str]
) -> tuple[tuple[Guard, ...], tuple[Guard, ...]]:
    """Return (model guards, call guards) of a variant whose calls change the state of the model.

    Args:
        guards: The guards on the model as it was traced.
        seen: The sources that Dynamo read.
        places: The places in which calls of any variant leave a value.
    """
    read = {place for place in places if any(leads_to(source, (place,)) for source in seen)}
    named: dict[str, set[str]] = {}
    read_names: dict[str, set[str]] = {}
    dicts: set[str] = set()
    for place in places:
        source = parse_source(place)
        owner, key = source.prefixes[-1], str(source.accessors[-1].key)
        named.setdefault(owner, set()).add(key)
        if place in read:
            read_names.setdefault(owner, set()).add(key)
        if source.accessors[-1].word == "item":
            dicts.add(owner)
    of_model: list[Guard] = []
    of_call: list[Guard] = []
    guards = tuple(guards)
    # A value that a call leaves is not a parameter, but it may be another tensor of the model.
    tensors = {guard.source for guard in guards if (guard.kind, guard.expected) == ("type", "torch:Tensor")}
    may_alias = any(leads_to(source, read) for source in tensors)
    for guard in guards:
        word = guard.kind.partition(":")[0]
        changed = [source for source in _sources_of(guard) if leads_to(source, places)]
        if word == "distinct" and may_alias and guard.source in tensors:
            of_call += [guard] if not changed or leads_to(guard.source, read) else []
        if changed and word == "distinct":
            continue  # the kind names a group of sources that includes this place
        if changed:
            of_call += [guard] if all(leads_to(source, read) for source in changed) else []
        elif guard.source in dicts and word in _KEY_KINDS:
            of_call.append(guard)
        elif word == "named" and guard.source in named:
            of_model.append(without_names(guard, named[guard.source]))
            if guard.source in read_names:  # if the attribute is absent, the class's is read
                others = names_of(guard.kind.removeprefix("named:")) - read_names[guard.source]
                of_call.append(without_names(guard, others))
        else:
            of_model.append(guard)
    return tuple(of_model), tuple(of_call)


def without_names(guard: Guard, names: Collection[str]) -> Guard:
    """Return a `named` guard without these names."""
    remaining = sorted(names_of(guard.kind.removeprefix("named:")).difference(names))
    expected = [name for name in guard.expected if name in remaining]
    return Guard(source=guard.source, kind=f"named:{canonical_json(remaining).decode()}", expected=expected)
