"""Converts Dynamo's guards to the plan's guards: each is encoded as data while its object is alive.

A guard without a rule is an error that names it. The only guards dropped are those implied by others (`_IMPLIED` gives
the reasons) and those that concern only this process or only Dynamo.
"""

from __future__ import annotations

import enum
import functools
import json
import re
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from torch.torch_version import TorchVersion

from cgtool.errors import TraceError
from cgtool.guards.kinds import NoRuleError, describe, encode_literal, names_of
from cgtool.guards.sources import OF_CALL, PARTS, Roots
from cgtool.plan.records import Guard, source_words
from cgtool.trace import _torch as private
from cgtool.trace.objects import has_identity
from cgtool.trace.sources import FILLED_AT_FIRST_USE, Frame, UnknownSourceError, source_text, variable_of

#: Dynamo's guards that the plan implies otherwise, and how.
_IMPLIED = {
    "GRAD_MODE": "entries are for inference; a call that needs gradients is refused",
    "GLOBAL_STATE": "state guards",
    "DETERMINISTIC_ALGORITHMS": "state guards",
    "TORCH_FUNCTION_STATE": "state guards",
    "DEFAULT_DEVICE": "state guards",
    "FUNCTORCH_STACK_MATCH": "state guards",
    "DUAL_LEVEL": "entries are for inference",
    "AUTOGRAD_SAVED_TENSORS_HOOKS": "entries are for inference",
    "FSDP_TRAINING_STATE": "entries are for inference",
    "SHAPE_ENV": "symbol ranges and relations of the variant",
    "WEAKREF_ALIVE": "the source of a dead object no longer resolves",
    "DISPATCH_KEY_SET_MATCH": "the inputs' types and devices, and state guards",
}

#: A name in the scope that `collections.namedtuple` creates for each class: always `tuple.__new__`.
_NAMED_TUPLE = re.compile(r"G\['___unnamed_scope_\w+'\](\['_tuple_new'\](\.__self__)?)?")

#: Functions that Dynamo substitutes for the model's calls: torch's version covers them, and a load would have to import
#: Dynamo to check them.
_DYNAMO_CODE = re.compile(r"(global|module):torch\._dynamo\b")

#: The cache in which an enum flag keeps the combinations created so far.
_FLAG_CACHE = re.compile(r"\._value2member_map_\b")
#: The parts of itself that a path caches on demand.
_PATH_CACHE = re.compile(rf"\.({'|'.join(PurePath.__slots__)})\b")
#: The context variable in which torch keeps the program's value of a setting (from torch 2.15).
_SETTING_OVERRIDE = re.compile(r'(.*)\._config\["(\w+)"\]\.user_override(\.get)?')
#: A value of a dict whose key a source cannot spell.
_VALUE_BY_INDEX = re.compile(r"\|values\[\d+\]")
#: An attribute that importing Dynamo sets, whatever the program had set.
_SET_BY_DYNAMO = re.compile(r".*\btorch\.distributions\b.*\._validate_args")
#: A call whose result is covered by the factor `target`.
_TARGET_CALL = ".current_accelerator()"

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_HOOK_DICT = re.compile(rf"(.*)\.(?:{'|'.join(_HOOKS)})\b")

_KINDS = {
    "TYPE_MATCH": "type",
    "CLASS_MATCH": "value",
    "BOOL_MATCH": "value",
    "NONE_MATCH": "value",
    "CONSTANT_MATCH": "value",
    "EQUALS_MATCH": "value",
    "CONSTANT_SUBCLASS_MATCH": "value",
    "ID_MATCH": "value",
    "FUNCTION_MATCH": "value",
    "CLOSURE_MATCH": "value",
    "BUILTIN_MATCH": "value",
    "MODULE_MATCH": "value",
    "SEQUENCE_LENGTH": "length",
    "TUPLE_ITERATOR_LEN": "length",
    "RANGE_ITERATOR_MATCH": "length",
    "DICT_KEYS_MATCH": "keys",
    "MAPPING_KEYS_CHECK": "keys",
    "DICT_VERSION": "value",
    # Process groups, which are opaque objects to Dynamo from torch 2.12 on.
    "OPAQUE_OBJ_GUARD_FN_MATCH": "value",
    "FAKE_SCRIPT_TYPE_MATCH": "type",
    "DTENSOR_SPEC_MATCH": "value",
    "EMPTY_NN_MODULE_HOOKS_DICT": "empty",
    "TENSOR_MATCH": "tensor",
    "NN_MODULE": "type",
}
_WITH_ARGUMENT = {
    "HASATTR": ("attr", "hasattr"),
    "NOT_PRESENT_IN_GENERIC_DICT": ("attr", "absent"),
    "DICT_CONTAINS": ("key", "contains"),
    "DICT_NOT_CONTAINS": ("key", "contains"),
    "SET_CONTAINS": ("key", "contains"),
    "SET_NOT_CONTAINS": ("key", "contains"),
}


@dataclass(kw_only=True)
class GuardRecorder:
    """Receives Dynamo's guards through its guard filter and converts them to the plan's.

    Args:
        frame: Returns the traced frame; the backend sets it before the filter runs.
        is_input: Returns whether a source names a tensor that the plan checks as an input.
    """

    frame: Callable[[], Frame]
    is_input: Callable[[str], bool]
    guards: dict[tuple[str, str], Guard] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    variables: set[str] = field(default_factory=set)

    def filter(self, entries: Sequence[Any]) -> list[bool]:
        """Record `entries`, and return which of them Dynamo should install: those that it can evaluate again."""
        for entry in entries:
            try:
                self._record(entry)
            except (NoRuleError, UnknownSourceError) as error:
                self.problems.append(f"{entry.guard_type} on {entry.name or 'global state'}: {error}")
        return [not private.is_of_numpy(entry.orig_guard.originating_source) for entry in entries]

    def finish(self) -> tuple[Guard, ...]:
        """Return the guards, in the order in which Dynamo gave them.

        Raises:
            TraceError: Some guard could not be encoded as data.
        """
        if self.problems:
            shown = "\n  ".join(self.problems[:8])
            msg = (
                f"This model's graph depends on {len(self.problems)} facts that cannot be stored as data:\n"
                f"  {shown}\nTurn these objects into plain values (numbers, strings, tuples, dtypes) or functions of a "
                "module, and warm again."
            )
            raise TraceError(msg, actual=tuple(self.problems))
        return tuple(self.guards.values())

    def _record(self, entry: Any) -> None:
        if entry.guard_type in _IMPLIED or _NAMED_TUPLE.fullmatch(entry.name):
            return
        if entry.guard_type == "HASATTR" and not isinstance(entry.orig_guard.create_fn, functools.partial):
            self._has_attribute(entry)
            return
        variable = variable_of(entry.orig_guard.originating_source)
        if variable is not None:  # a factor of the key, whether it is set or not
            self.variables.add(variable)
            return
        if entry.name.endswith(_TARGET_CALL) or isinstance(entry.value, TorchVersion):  # factors of the key
            return
        if private.is_of_numpy(entry.orig_guard.originating_source):
            return  # the graph contains the array, see `cgtool.trace.public_ops`
        text = source_text(entry.orig_guard.originating_source, self.frame())
        if any(pattern.match(text) for pattern in (_DYNAMO_CODE, FILLED_AT_FIRST_USE, _SET_BY_DYNAMO)):
            return
        if self._guard_owner_of_cache(text) or self._is_dtensor_requires_grad(text):
            return
        if entry.guard_type == "DUPLICATE_INPUT":
            self._same(text, entry)
            return
        if entry.guard_type in {"TENSOR_MATCH", "TYPE_MATCH"} and self.is_input(text):
            return
        if entry.guard_type in _WITH_ARGUMENT:
            self._with_argument(text, entry)
            return
        if entry.guard_type not in _KINDS:
            msg = f"cgtool has no rule for this kind of guard ({source_words(text)})."
            raise NoRuleError(msg, actual=entry.guard_type)
        self._keep(text, _KINDS[entry.guard_type], entry)

    def _guard_owner_of_cache(self, text: str) -> bool:
        """Return whether a source leads into a cache of an object; if so, guard the object's value instead."""
        setting = _SETTING_OVERRIDE.fullmatch(text)
        if setting is not None and isinstance(self.frame().resolve(setting[1]), types.ModuleType):
            source = f"{setting[1]}.{setting[2]}"
            self._add(source, "value", encode_literal(self.frame().resolve(source)))
            return True
        for pattern in (_FLAG_CACHE, _PATH_CACHE, _VALUE_BY_INDEX):
            found = pattern.search(text)
            if found is None:
                continue
            owner = text[: found.start()]
            held = self.frame().resolve(owner)
            if pattern is _VALUE_BY_INDEX and isinstance(held, dict):
                self._add(owner, "keys", describe("keys", held))
            elif isinstance(held, PurePath):
                self._add(owner, "value", encode_literal(held))
                return True
            elif isinstance(held, type) and issubclass(held, enum.Flag):
                return True  # its class is guarded
        return False

    def _is_dtensor_requires_grad(self, text: str) -> bool:
        """Return whether Dynamo itself reads `requires_grad` of a DTensor; `cgtool.trace.questions` covers the code."""
        owner, _, name = text.rpartition(".")
        return name == "requires_grad" and private.has_dtensor(self.frame().resolve(owner))

    def _keep(self, text: str, kind: str, entry: Any) -> None:
        if kind == "type" and _is_implied_type(text, entry.value):
            return
        if kind == "length" and isinstance(entry.value, dict):
            kind = "keys"
        self._add(text, kind, describe(kind, entry.value))

    def _with_argument(self, text: str, entry: Any) -> None:
        argument, word = _WITH_ARGUMENT[entry.guard_type]
        create = entry.orig_guard.create_fn
        if not isinstance(create, functools.partial) or not (argument in create.keywords or create.args):
            msg = f"cgtool cannot tell what this guard checks ({source_words(text)})."
            raise NoRuleError(msg, actual=entry.guard_type)
        value = create.keywords[argument] if argument in create.keywords else create.args[-1]
        if word == "contains":
            kind = f"contains:{json.dumps(encode_literal(value))}"
            # torch 2.11 has one guard with `invert` where 2.13 has two.
            is_inverted = "_NOT_" in entry.guard_type or create.keywords.get("invert", False)
            self._add(text, kind, expected=not is_inverted)
            return
        self._add(text, f"{word}:{value}", describe(f"{word}:{value}", entry.value))

    def _has_attribute(self, entry: Any) -> None:
        """Record HASATTR as in torch 2.11: its source is the attribute itself, which need not exist."""
        source = entry.orig_guard.originating_source
        while not hasattr(source, "member"):
            source = source.base
        base = source_text(source.base, self.frame())
        self._add(base, f"hasattr:{source.member}", bool(entry.has_value))

    def _same(self, text: str, entry: Any) -> None:
        if isinstance(entry.value, types.ModuleType):
            return  # a module is the same object under each of its names
        if not has_identity(entry.value):  # a device mesh
            self._add(text, "value", encode_literal(entry.value))
            return
        create = entry.orig_guard.create_fn
        other = create.keywords.get("source_b") if isinstance(create, functools.partial) else None
        if other is None:
            msg = f"cgtool cannot tell which other object this guard refers to ({source_words(text)})."
            raise NoRuleError(msg, actual=entry.guard_type)
        self._add(text, f"same:{source_text(other, self.frame())}", expected=True)

    def _add(self, text: str, kind: str, expected: Any) -> None:
        if _HOOK_DICT.fullmatch(text) and kind.startswith(("keys", "contains:")):
            # The keys are numbers of this process, so hooks are identified by their order.
            held, every = (self.frame().resolve(name) for name in (text, text.removesuffix("_with_kwargs")))
            if 0 < len(held) < len(every):
                raise NoRuleError(f"some hooks in {source_words(text)} take keyword arguments and some do not")
            kind, expected = "length", describe("length", held)
        self.guards.setdefault((text, kind), Guard(source=text, kind=kind, expected=expected))


def _is_implied_type(text: str, value: Any) -> bool:
    """Return whether a type guard is redundant: those on the dicts that torch creates in every module."""
    last = text.rpartition(".")[2]
    plain_dict = type(value).__module__ in {"builtins", "collections"}
    return (last in PARTS or last.endswith("_hooks")) and plain_dict


def split_guards(guards: Sequence[Guard]) -> tuple[tuple[Guard, ...], tuple[Guard, ...]]:
    """Return (model guards, call guards): those checked at load, and those checked at each call."""
    model = tuple(g for g in guards if not g.source.startswith(OF_CALL))
    call = tuple(g for g in guards if g.source.startswith(OF_CALL))
    return model, call


def combined(recorded: Sequence[Guard], touched: Sequence[Guard]) -> tuple[Guard, ...]:
    """Return Dynamo's guards and those on everything that it could have read, without duplicates.

    Class definitions come first, because they explain most. For a module without hooks, one guard on the number of
    hooks replaces those on each empty dict. A guard that a name is absent is dropped if a `named` guard covers it.
    """
    kept = {(guard.source, guard.kind): guard for guard in touched if guard.kind.startswith("class:")}
    named = {
        guard.source: names_of(guard.kind.removeprefix("named:"))
        for guard in touched
        if guard.kind.startswith("named:")
    }
    hooked = {found[1] for guard in recorded if guard.kind != "empty" and (found := _HOOK_DICT.match(guard.source))}
    for guard in recorded:
        owner, _, last = guard.source.rpartition(".")
        word, _, name = guard.kind.partition(":")
        if guard.kind == "empty" and last in _HOOKS and guard.expected is True and owner not in hooked:
            kept.setdefault((owner, "hooks"), Guard(source=owner, kind="hooks", expected=0))
        elif not (word == "absent" and guard.expected is True and name in named.get(guard.source, ())):
            kept[guard.source, guard.kind] = guard
    for guard in touched:
        kept.setdefault((guard.source, guard.kind), guard)
    return tuple(kept.values())


def module_frame(output: Any, roots: Roots) -> Frame:
    """Return the meaning of the first frame's names, from the method and Dynamo's OutputGraph."""
    function = getattr(roots.method, "__func__", roots.method)
    code = function.__code__
    takes_self = function is not roots.method and code.co_argcount > 0
    return Frame(
        owner=code.co_varnames[0] if takes_self else None,
        free=frozenset(code.co_freevars),
        module=function.__globals__["__name__"],
        global_names=dict(output.import_sources),
        roots=roots,
    )
