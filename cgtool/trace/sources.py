"""Translates Dynamo's sources to the plan's grammar (`cgtool.guards.sources`)."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cgtool.errors import TraceError
from cgtool.guards.sources import PARTS, Roots, SourceError, canonical_module_name
from cgtool.plan.records import source_words
from cgtool.trace import _torch as private

_S = private.dynamo_source
_NAME = re.compile(r"[A-Za-z0-9_]+", re.ASCII)
_MODULE = re.compile(r"[\w.-]+")
_IMPORT = "__import_"
#: A dict whose keys are numbers of this process.
_HOOKS = re.compile(r"_hooks(_with_kwargs|_always_called)?$")
#: A global that Dynamo creates for an object without a name in the frame: its id and the number of the trace.
_BY_ID = re.compile(r"_(\d+)_c\w+", re.ASCII)
#: Tables that are filled at their first use with what follows from classes and versions: the warnings that torch has
#: shown, transformers' classes of models and outputs, and einops' backend for each class of tensors.
TABLES = (
    ("torch.nn.attention.flex_attention", "_WARNINGS_SHOWN"),
    ("transformers.utils.output_capturing", "_CAN_RECORD_REGISTRY"),
    ("transformers.utils.generic", "_registered_model_output_types"),
    ("einops._backends", "_type2backend"),
    ("einops._backends", "_loaded_backends"),
)
FILLED_AT_FIRST_USE = re.compile("|".join(re.escape(f"global:{module}:{name}") + r"\b" for module, name in TABLES))


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The first frame of a trace, which defines the meaning of names in sources.

    Args:
        owner: The local that is the model itself ("self"); None if the model is `args[0]` of a wrapper.
        free: Names that the function closes over.
        module: The name of the module that the function's globals belong to.
        global_names: {name that Dynamo created for an imported module: name of the module}.
        roots: The live model, its method and the arguments of the traced call.
    """

    owner: str | None
    free: frozenset[str]
    module: str
    global_names: Mapping[str, str]
    roots: Roots | None = None

    def resolve(self, text: str) -> Any:
        """Return the live object of a source, or None if it does not exist."""
        try:
            return None if self.roots is None else self.roots.resolve(text)
        except SourceError:
            return None


class UnknownSourceError(TraceError):
    """A source of Dynamo that the plan's grammar cannot express."""


def source_text(source: Any, frame: Frame) -> str:
    """Return `source` in the plan's grammar.

    Raises:
        UnknownSourceError: The grammar cannot express it.
    """
    if isinstance(source, _S.LocalSource):
        return _local(source, frame)
    if isinstance(source, _S.GlobalSource):
        return _global(source.global_name, frame)
    if isinstance(source, _S.ImportSource):
        return f"module:{source.module_name}"
    for kind, spell in _CHAINED:
        if isinstance(source, kind):
            return spell(source, frame)
    if isinstance(source, _S.RandomValueSource):
        msg = "The model draws a number with Python's random, and compiled code would return the same one each time."
        raise UnknownSourceError(f"{msg} Draw it with torch, or pass it in.", actual="random")
    msg = f"A plan cannot express Dynamo's source {source.name!r} ({type(source).__name__})."
    raise UnknownSourceError(msg, actual=type(source).__name__)


def variable_of(source: Any) -> str | None:
    """Return the environment variable that a source reads: `os.environ` stores them in `_data`, under bytes."""
    index, holder = getattr(source, "index", None), getattr(source, "base", None)
    if isinstance(index, bytes) and getattr(holder, "member", None) == "_data":
        return os.fsdecode(index)
    return None


def _local(source: Any, frame: Frame) -> str:
    name = source.local_name
    if name == frame.owner:
        return "self"
    if name in frame.free:
        return f"free:{name}"
    return f"arg:{name}"


def _global(name: str, frame: Frame) -> str:
    if name in frame.global_names:
        return f"module:{frame.global_names[name]}"
    if name.startswith(_IMPORT):
        return f"module:{name.removeprefix(_IMPORT).replace('_dot_', '.')}"
    if name.startswith("__builtins_dict__"):
        return "module:builtins"
    by_id = _BY_ID.fullmatch(name)
    if by_id is not None and (module := _module_of_id(int(by_id[1]))) is not None:
        return f"module:{module}"
    if by_id is not None or (name.startswith("__") and not name.endswith("__")):
        msg = f"Dynamo created the global {name!r}, which exists only in this process."
        raise UnknownSourceError(msg, actual=name)
    module = canonical_module_name(frame.module)
    if not _MODULE.fullmatch(module):
        msg = f"The global {name!r} belongs to code outside any module (its name is {module!r}). Import it as a module."
        raise UnknownSourceError(msg, actual=module)
    return f"global:{module}:{name}"


def _module_of_id(number: int) -> str | None:
    """Return the name of the module with this id: torch 2.13 finds `type(tensor)` through such a global for `torch`."""
    return next((module.__name__ for module in list(sys.modules.values()) if id(module) == number), None)


def _attribute(base: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        msg = f"The attribute {name!r} has a name that a plan cannot spell."
        raise UnknownSourceError(msg, actual=name)
    if not base.startswith("module:"):
        return f"{base}.{name}"
    whole = f"{base.removeprefix('module:')}.{name}"
    if whole in sys.modules and getattr(sys.modules.get(whole.rpartition(".")[0]), name, None) is sys.modules[whole]:
        return f"module:{whole}"  # a module that the model imports lazily is not imported yet at load
    return f"{base.replace('module:', 'global:', 1)}:{name}"


def _item(source: Any, frame: Frame) -> str:
    base = source_text(source.base, frame)
    index = source.index
    if isinstance(index, _S.ConstDictKeySource):
        return f"{base}|values[{index.index}]"
    if isinstance(index, bool) or not isinstance(index, (str, int)) or _HOOKS.search(base):
        held = frame.resolve(base)
        if isinstance(held, dict) and index in held:
            return f"{base}|values[{list(held).index(index)}]"
        msg = f"Dynamo's source {source.name!r} has a key that a plan cannot spell."
        raise UnknownSourceError(msg, actual=repr(index))
    if base.startswith("module:"):
        return _attribute(base, str(index))
    head, _, last = base.rpartition(".")
    if last == "__dict__" and index in PARTS:  # as torch.nn.Module.__setattr__ looks it up
        return f"{head}.{index}"
    if last in PARTS and isinstance(index, str) and _NAME.fullmatch(index) and not head.endswith(("]", "type")):
        return f"{head}.{index}"
    return f"{base}[{json.dumps(index)}]"


def _default(source: Any, frame: Frame) -> str:
    base = source_text(source.base, frame)
    return f"{base}.{source.field}[{json.dumps(source.idx_key)}]"


def _through(source: Any, frame: Frame) -> str:
    return source_text(source.base, frame)


def _with(suffix: str) -> Callable[[Any, Frame], str]:
    return lambda source, frame: source_text(source.base, frame) + suffix


def _nth(word: str) -> Callable[[Any, Frame], str]:
    return lambda source, frame: f"{source_text(source.base, frame)}|{word}[{source.index}]"


def _answer(source: Any, frame: Frame) -> str:
    function = source_words(source_text(source.base, frame))
    msg = (
        f"The result of {function}() is valid only in this process. "
        "Call it when the model is built, and keep the result in an attribute."
    )
    raise UnknownSourceError(msg, actual=source.name)


def _tensor_property(source: Any, _frame: Frame) -> str:
    msg = f"Dynamo's source {source.name!r} is a size, which the plan reads from the tensor itself."
    raise UnknownSourceError(msg, actual=source.name)


def _context_variable(source: Any, frame: Frame) -> str:
    base = source_text(source.base, frame)
    if not base.endswith(".user_override"):
        msg = f"{source_words(base)} is a context variable, whose value may differ at each call."
        raise UnknownSourceError(msg, actual=base)
    return f"{base}.get"


_CHAINED: tuple[tuple[type, Callable[[Any, Frame], str]], ...] = (
    (_S.TensorPropertySource, _tensor_property),
    (_S.NNModuleSource, _through),
    (getattr(_S, "SkipGuardSource", _S.NNModuleSource), _through),  # newer than torch 2.11
    (_S.CellContentsSource, lambda source, frame: _attribute(source_text(source.base, frame), "cell_contents")),
    (_S.AttrSource, lambda source, frame: _attribute(source_text(source.base, frame), source.member)),
    (_S.GenericAttrSource, lambda source, frame: _attribute(source_text(source.base, frame), source.member)),
    (_S.DefaultsSource, _default),
    (_S.TypeDictSource, _with("|dict")),
    (_S.TypeMROSource, _with(".__mro__")),
    (_S.TypeSource, _with("|type")),
    (_S.ClosureSource, _with(".__closure__")),
    (_S.CodeSource, _with(".__code__")),
    (_S.NamedTupleFieldsSource, _with("._fields")),
    (_S.DataclassFieldsSource, _with(".__dataclass_fields__")),
    (_S.CallFunctionNoArgsSource, _answer),
    (_S.WeakRefCallSource, _with("|call")),
    (getattr(_S, "ContextVarGetSource", _S.WeakRefCallSource), _context_variable),  # newer than torch 2.14
    (_S.ConstDictKeySource, _nth("keys")),
    (_S.NonSerializableSetGetItemSource, _nth("list")),
    (_S.GetItemSource, _item),
    (_S.DictGetItemSource, _item),
    (_S.DictSubclassGetItemSource, _item),
)
