"""Kinds of guards: which property of an object a guard compares, and the message when it changed.

A guard is (source, kind, expected) and holds when `describe(kind, resolve(source)) == expected`. The same function
records and checks a guard, so the two cannot drift apart. Kinds::

    value              the object as a literal, see below
    digest             the digest of that literal, for objects whose literal is long
    type               its class, by qualified name; for a fake tensor, the class of the tensor that it stands for
    class:<json>       the definition of a class, see `code.py`; the argument names the containers to include
    named:<json>       which of these names are attributes of the object itself, or globals of the module
    registered:<json>  which of these classes are registered with an ABC, or with an ABC that inherits from it
    attributes         the names of all attributes of the object itself, in order
    length             [class, number of elements]
    keys               the keys of a dict, in order
    empty              whether it has no elements
    hooks              the number of hooks of a module
    contains:<json>    whether it contains that key
    named_keys:<json>  which of these keys it contains
    hasattr:<name>     whether it has the attribute
    absent:<name>      whether its instance dict has no such name
    computed:<name>    the value of a `functools.cached_property` of its class, cached yet or not
    settles:<json>     whether the object is one of these literals
    tensor             [class, dtype, shape, stride, device type]
    same:<source>      whether it is the same object as another source
    distinct:<digest>  whether no other source with this exact kind resolves to the same object
    apart:<source>     whether two tensors share no memory
    group:<name>       the process group registered with torch under that name in this process
    requires_grad, is_leaf, has_grad, is_view, is_inference, is_buffer
                       these properties of a tensor
    steps_of_one       the strides of a tensor's dimensions of size one; null where the other strides imply it
    code               the digest of a function's code
    answers            the results of a transformers probe for each combination of its flags
    ops                the compiler's view of a custom op, see `code.py`
    state              global state of torch, see `state.py`

Grammar of an encoded literal::

    literal = null | bool | int | "text" | ["f", repr] | ["c", repr, repr] | ["b", hex] | ["e"]
            | ["t"|"l"|"size", literal...] | ["set"|"frozenset", literal... sorted] | ["d", [literal, literal]...]
            | ["dtype", name] | ["device", text] | ["layout", name] | ["format", name]
            | ["slice", literal, literal, literal] | ["range", int, int, int] | ["enum", "module:Class", name]
            | ["type", "module:Class"] | ["function", "module:name", digest] | ["module", name] | ["op", name]
            | ["plain", "module:Class", repr]    a path, a date, a pattern
            | ["typing", "module:Class", text | literal...]    a type variable, a parametrized type and its arguments
            | ["group", [number...], rank, size] a process group, and this process's rank in it
            | ["mesh", device, [number...], [literal...] names, [literal...] groups]    a device mesh, flattened
            | ["sharding", literal mesh, [text...] placements, [size...], [[number...]...]]    a DTensor's sharding

A device is encoded as its type only: its index belongs to the process, not to the program.
"""

from __future__ import annotations

import abc
import enum
import functools
import hashlib
import inspect
import json
import sys
import types
import typing
from collections.abc import Callable, Iterable
from types import MemberDescriptorType, ModuleType
from typing import Any

import msgspec
import torch
from torch import nn

from cgtool.errors import GuardError, TraceError
from cgtool.guards import _torch as private
from cgtool.guards import state
from cgtool.guards.code import code_digest, define, holds, instance_dict, plain_text, registered
from cgtool.guards.sources import (
    PARTS,
    NotImportedError,
    Roots,
    canonical_module_name,
    parse_source,
    qualified_name,
    stored_keys,
)
from cgtool.plan.grammar import canonical_json, digest_of
from cgtool.plan.records import Guard, source_words

Json = Any

#: The dicts in which a module keeps its hooks.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_CONTAINERS: dict[Any, str] = {tuple: "t", list: "l", torch.Size: "size"}


class NoRuleError(TraceError):
    """A live object that cannot be encoded as data."""


def encode_literal(value: Any) -> Json:
    """Return `value` as data; two values have equal data if and only if they are equal.

    Raises:
        NoRuleError: No encoding is defined for this type.
    """
    if value is None or type(value) in {bool, int, str}:
        return value
    kind = type(value)
    if kind is types.FunctionType:
        return ["function", qualified_name(value), code_digest(value)]
    if kind in _CONTAINERS:
        return [_CONTAINERS[kind], *map(encode_literal, value)]
    if kind in {set, frozenset}:
        return [kind.__name__, *sorted(map(encode_literal, value), key=canonical_json)]
    if isinstance(value, dict) and kind.__module__ in {"builtins", "collections"}:
        return ["d", *([encode_literal(key), encode_literal(item)] for key, item in value.items())]
    scalar = _scalar(value)
    return scalar if scalar is not None else _object(value)


def _scalar(value: Any) -> Json:
    kind = type(value)
    if kind is float:
        return ["f", repr(value)]
    if kind is complex:
        return ["c", repr(value.real), repr(value.imag)]
    if kind is bytes:
        return ["b", value.hex()]
    if value is Ellipsis:
        return ["e"]
    if kind is slice:
        return ["slice", encode_literal(value.start), encode_literal(value.stop), encode_literal(value.step)]
    if kind is range:
        return ["range", value.start, value.stop, value.step]
    if kind is types.UnionType:
        return ["union", *map(encode_literal, value.__args__)]
    if isinstance(value, _SPECIAL_FORM):
        return ["plain", "typing:_SpecialForm", repr(value)]
    if isinstance(value, enum.Enum):
        return ["enum", qualified_name(kind), value.name]
    if _is_of_numpy(value, "ndarray", "generic") and not value.dtype.hasobject:
        is_short = value.size <= _SHORT_ARRAY
        text = repr(value.tolist()) if is_short else hashlib.sha256(value.tobytes()).hexdigest()
        return ["array", str(value.dtype), [*value.shape], text]
    return _torch_scalar(value)


def _torch_scalar(value: Any) -> Json:
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if isinstance(value, torch.device):
        return ["device", value.type]
    if isinstance(value, torch.layout):
        return ["layout", str(value).removeprefix("torch.")]
    if isinstance(value, torch.memory_format):
        return ["format", str(value).removeprefix("torch.")]
    return None


def _object(value: Any) -> Json:
    if isinstance(value, type):
        return ["type", qualified_name(value)]
    if isinstance(value, types.ModuleType):
        return ["module", canonical_module_name(value.__name__)]
    if isinstance(value, types.MethodType):
        return ["function", qualified_name(value), code_digest(value)]
    if isinstance(value, property) and value.fget is not None:
        return ["function", qualified_name(value.fget), code_digest(value.fget)]
    if isinstance(value, functools.cached_property):
        return ["function", qualified_name(value.func), code_digest(value.func)]
    if isinstance(value, types.CodeType):
        return ["function", value.co_qualname, code_digest(value)]
    if isinstance(value, _BUILTIN) or _is_ufunc(value):
        return ["function", _builtin_name(value), ""]
    if private.is_op(value):
        return ["op", str(value)]
    shared = private.shared_by_processes(value)
    if shared is not None:
        return shared
    text = plain_text(value)
    if text is not None:
        return ["plain", qualified_name(type(value)), text]
    annotation = _annotation(value)
    if annotation is not None:
        return annotation
    wrapped = getattr(value, "__wrapped__", None)
    if wrapped is not None and callable(value):
        return ["function", qualified_name(wrapped), code_digest(getattr(wrapped, "__func__", wrapped))]
    msg = f"A value of type {qualified_name(type(value))} cannot be encoded as data."
    raise NoRuleError(msg, actual=qualified_name(type(value)))


def _annotation(value: Any) -> Json:
    if type(value).__module__ not in _OF_ANNOTATIONS:
        return None
    from cgtool.guards.annotations import encode_annotation  # imported lazily: few guards are on annotations

    return encode_annotation(value, encode_literal)


#: Modules with the classes of annotations, such as `list[int]` and type variables.
_OF_ANNOTATIONS = frozenset({"typing", "typing_extensions", "types", "collections.abc"})
#: The class of `typing.Union`, `typing.ClassVar` and the like, which are named singletons.
_SPECIAL_FORM = type(typing.ClassVar)
#: NumPy arrays of up to this many elements are encoded in full, longer ones as a digest.
_SHORT_ARRAY = 16


def _is_of_numpy(value: Any, *kinds: str) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, tuple(getattr(numpy, kind) for kind in kinds))


def _is_ufunc(value: Any) -> bool:
    """Return whether `value` is one of NumPy's own ufuncs, such as `numpy.sqrt`, which NumPy's version covers."""
    return _is_of_numpy(value, "ufunc") and getattr(sys.modules["numpy"], value.__name__, None) is value


def _builtin_name(value: Any) -> str:
    owner = getattr(value, "__objclass__", None) or getattr(value, "__self__", None)
    if isinstance(owner, type):
        return f"{canonical_module_name(owner.__module__)}:{owner.__qualname__}.{value.__name__}"
    module = getattr(value, "__module__", None) or (owner.__name__ if isinstance(owner, types.ModuleType) else "")
    return f"{module}:{value.__name__}"


def describe(kind: str, value: Any) -> Json:
    """Return the property of `value` that guards of this kind compare.

    Raises:
        NoRuleError: The value cannot be encoded as data.
        GuardError: The kind is unknown.
    """
    word, _, argument = kind.partition(":")
    if word in _WITH_ARGUMENT:
        return _WITH_ARGUMENT[word](value, argument)
    if word not in _PLAIN:
        msg = f"The plan has a guard of the unknown kind {kind!r}; it was written by another version of cgtool."
        raise GuardError(msg, actual=kind)
    return _PLAIN[word](value)


def _length(value: Any) -> Json:
    try:
        return [qualified_name(type(value)), len(value)]
    except TypeError:
        return [qualified_name(type(value)), value.__length_hint__()]


def _tensor(value: Any) -> Json:
    return [
        _type(value),
        str(value.dtype).removeprefix("torch."),
        list(value.shape),
        list(value.stride()),
        value.device.type,
    ]


def _steps_of_one(tensor: Any) -> Json:
    strides, contiguous = [], 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if size == 1:
            strides.append(None if stride == contiguous else stride)
        contiguous = stride * size
    return strides[::-1]


def _contains(value: Any, key: str) -> Json:
    wanted = json.loads(key)
    if not isinstance(wanted, list):
        return _plain_key(wanted) in value
    return any(_literal_or_none(held) == wanted for held in list(value))  # a type, an enum member, a tuple


def _literal_or_none(value: Any) -> Json:
    try:
        return encode_literal(value)
    except NoRuleError:
        return None


def _answers(value: Any) -> Json:
    from cgtool.guards.transformers import answers  # imported lazily: only models of transformers need it

    return answers(value)


def _computed(value: Any, name: str) -> Json:
    """Return the value of a `functools.cached_property` without caching it: it may change until the first real use."""
    member, held = inspect.getattr_static(type(value), name, None), vars(value)
    if name in held or not isinstance(member, functools.cached_property):
        return encode_literal(held.get(name))
    before = set(held)
    try:
        return encode_literal(member.func(value))
    finally:
        for cached in held.keys() - before:  # other cached properties that this one reads
            del held[cached]


def own_attributes(value: Any) -> list[str]:
    """Return the names that an object itself holds, in order: attributes, slots, and the parts of an `nn.Module`."""
    if isinstance(value, ModuleType):
        return [name for name, held in list(vars(value).items()) if not _is_part(held, value)]
    return [*instance_dict(value), *_held_elsewhere(value)]


def _held_elsewhere(value: Any) -> list[str]:
    """Return the names that an object holds outside its `__dict__`."""
    if isinstance(value, torch.nn.Module):
        return [name for part in PARTS for name in vars(value)[part]]
    return [name for name in _slots(type(value)) if holds(value, name)]


def _is_part(held: Any, module: ModuleType) -> bool:
    """Return whether `held` is a submodule of `module`: it appears once something imports it."""
    # `type` and not `isinstance`, which reads `__class__`: a deprecated object of torch.distributed warns then.
    return issubclass(type(held), ModuleType) and held.__name__.startswith(f"{module.__name__}.")


def _slots(cls: type) -> tuple[str, ...]:
    return tuple(
        name
        for owner in cls.__mro__
        if owner.__module__ != "builtins" and "__slots__" in vars(owner)
        for name, member in vars(owner).items()
        if isinstance(member, MemberDescriptorType)
    )


@functools.lru_cache(maxsize=1024)
def names_of(argument: str) -> frozenset[str]:
    """Return the names in the argument of a kind such as `named:<json>`."""
    return frozenset(json.loads(argument))


def named(value: Any, names: frozenset[str]) -> list[str]:
    """Return which of these names an object itself holds, sorted; it may hold thousands of others."""
    own = instance_dict(value)
    found = names & own.keys()
    if isinstance(value, ModuleType):
        return sorted(name for name in found if not _is_part(own[name], value))
    return sorted(found.union(names.intersection(_held_elsewhere(value))))


def _registered(value: type, argument: str) -> Json:
    found: set[str] = set()
    waiting: list[Any] = [value]
    while waiting:
        abstract = waiting.pop()
        found.update(map(qualified_name, registered(abstract)))
        waiting.extend(heir for heir in abstract.__subclasses__() if isinstance(heir, abc.ABCMeta))
    return sorted(names_of(argument).intersection(found))


def _plain_key(key: Json) -> Any:
    return tuple(map(_plain_key, key[1:])) if isinstance(key, list) and key[:1] == ["t"] else key


def _type(value: Any) -> Json:
    if private.is_fake(value):
        return qualified_name(torch.nn.Parameter if isinstance(value, torch.nn.Parameter) else torch.Tensor)
    return qualified_name(type(value))


_PLAIN: dict[str, Callable[[Any], Json]] = {
    "value": encode_literal,
    "digest": lambda value: digest_of(encode_literal(value)),
    "attributes": own_attributes,
    "answers": _answers,
    "type": _type,
    "length": _length,
    "keys": lambda value: [encode_literal(key) for key in stored_keys(value)],
    "empty": lambda value: len(value) == 0,
    "hooks": lambda module: sum(len(vars(module).get(name) or ()) for name in HOOKS),
    "tensor": _tensor,
    "requires_grad": lambda tensor: tensor.requires_grad,
    "is_leaf": lambda tensor: tensor.is_leaf,
    "has_grad": lambda tensor: tensor.is_leaf and tensor.grad is not None,
    "is_view": private.is_view,
    "is_inference": lambda tensor: tensor.is_inference(),
    "is_buffer": lambda tensor: isinstance(tensor, nn.Buffer),
    "steps_of_one": _steps_of_one,
    "code": lambda value: code_digest(getattr(getattr(value, "__func__", value), "__code__", value)),
}
_WITH_ARGUMENT: dict[str, Callable[[Any, str], Json]] = {
    "class": lambda value, argument: define(value, names_of(argument)),
    "named": lambda value, argument: named(value, names_of(argument)),
    "named_keys": lambda value, argument: sorted(names_of(argument).intersection(stored_keys(value))),
    "registered": _registered,
    "contains": _contains,
    "group": lambda _, name: private.shared_by_processes(private.group_named(name)),
    "hasattr": hasattr,
    "settles": lambda value, either: encode_literal(value) in json.loads(either),
    "computed": _computed,
    "absent": lambda value, name: name not in instance_dict(value),
}


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A guard that does not hold, with the actual value (None if it could not be evaluated) and a message."""

    guard: Guard
    actual: Json
    sentence: str


def evaluate(guard: Guard, roots: Roots) -> Json:
    """Return the value that `guard` compares, as it is now.

    Raises:
        SourceError: Its source no longer exists.
        NoRuleError: The object at its source cannot be encoded as data.
    """
    source = parse_source(guard.source)
    if source.root == "state":
        return state.current(source.names[0])
    if guard.kind.startswith("same:"):
        return roots.resolve(source) is roots.resolve(guard.kind.removeprefix("same:"))
    if guard.kind.startswith("apart:"):
        return are_apart(roots.resolve(source), roots.resolve(guard.kind.removeprefix("apart:")))
    return describe(guard.kind, roots.resolve(source))


def _evaluate_or_explain(guard: Guard, roots: Roots) -> Json:
    try:
        return evaluate(guard, roots)
    except GuardError:
        raise
    except Exception as error:  # None has no shape, a number has no length
        now = qualified_name(type(roots.resolve(guard.source)))
        name = source_words(guard.source)
        msg = f"{name} is of type {now} now, and was another kind of object when this was compiled ({error})."
        if isinstance(error, NoRuleError):
            from cgtool.plan.rendering import expected_words  # imported lazily: a hit does not need it

            was = expected_words(guard.kind, guard.expected)
            msg = f"{name} was {was} when this was compiled and is of type {now} now."
        raise GuardError(msg, actual=now) from error


def are_apart(one: Any, other: Any) -> bool:
    """Return whether two tensors have different storages; views of one storage are not apart, overlapping or not."""
    return bool(one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr())


def check(guards: Iterable[Guard], roots: Roots) -> list[Failure]:
    """Return the guards that do not hold now, in order."""
    failures: list[Failure] = []
    seen: dict[tuple[str, int], Guard] = {}
    for guard in guards:
        try:
            if guard.kind.startswith("distinct:"):
                first = seen.setdefault((guard.kind, id(roots.resolve(guard.source))), guard)
                if first is not guard:
                    both = f"{source_words(first.source)} and {source_words(guard.source)}"
                    message = f"{both} were two objects when this was compiled and are one now."
                    failures.append(Failure(guard=guard, actual=False, sentence=message))
                continue
            actual = _evaluate_or_explain(guard, roots)
        except NotImportedError:
            continue
        except GuardError as error:
            failures.append(Failure(guard=guard, actual=None, sentence=str(error)))
            continue
        if not equal_json(actual, guard.expected):
            failures.append(Failure(guard=guard, actual=actual, sentence=_changed_message(guard, actual)))
    return failures


def equal_json(one: Json, other: Json) -> bool:
    """Return whether two values are equal as JSON: unlike in Python, `True` is not `1`."""
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is list:
        return len(one) == len(other) and all(map(equal_json, one, other))
    if kind is dict:
        return one.keys() == other.keys() and all(equal_json(value, other[name]) for name, value in one.items())
    return bool(one == other)


def _changed_message(guard: Guard, actual: Json) -> str:
    """Return the expected and the actual value as a sentence: 'layers.0.eps was 1e-06 when this was compiled ...'."""
    from cgtool.plan.rendering import changed_words  # imported lazily: a hit does not need it

    try:
        return f"{changed_words(guard.source, guard.kind, guard.expected, actual, when=' when this was compiled')}."
    except (AttributeError, LookupError, TypeError, ValueError):  # a value that this kind never has: an edited plan
        name, expected = source_words(guard.source), str(guard.expected)[:80]
        return f"The plan expects {expected} of {name}, which this guard can never see; the plan was changed."
