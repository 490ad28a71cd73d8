"""Generate Python from a plan: the only module of the runtime that compiles source text.

A string of a plan is matched against a grammar before it becomes part of a line. Values never become text; they are
constants in the function's namespace. The only builtin in the namespace is `__import__`, which torch's C code looks up
in the calling frame, and no line may name it: a line can use only the names that it was given.

The grammar of output templates is in `cgtool.plan.records`, that of literals in `cgtool.guards.kinds`. A class is
looked up by name and must be a container of fields: a dataclass, a named tuple, one of torch.return_types, or a
subclass of dict. Anything else is refused, so that a plan cannot call arbitrary code.
"""

from __future__ import annotations

import builtins
import contextlib
import enum
import functools
import inspect
import keyword
import re
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from typing import Any, cast

import torch

from cgtool.errors import ArtifactError, GuardError
from cgtool.graph.expressions import FUNCTIONS, check_expression, python_source
from cgtool.graph.values import FORMATS, LAYOUTS, decode_value, device_of, dtype_of
from cgtool.guards.sources import find_qualified
from cgtool.plan.pieces import Json, PieceGraph

_INDENT = "    "


class Code:
    """A function that is being generated.

    Args:
        label: The name of the source text in tracebacks.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.depth = 1
        self._lines: list[str] = []
        self._names: dict[str, Any] = {"__builtins__": {"__import__": builtins.__import__}, **FUNCTIONS}
        self._known: dict[int, str] = {}

    def add(self, line: str) -> None:
        """Add a line at the current depth."""
        self._lines.append(_INDENT * self.depth + line)

    def constant(self, value: Any) -> str:
        """Return the name of `value` in the function's namespace."""
        name = self._known.get(id(value))
        if name is None:
            # The namespace keeps the value alive, so its id is not reused.
            name = self._known[id(value)] = f"k{len(self._known)}"
            self._names[name] = value
        return name

    @property
    def next_line(self) -> int:
        """The number of the next line in the function's text."""
        return len(self._lines) + 2

    def define_later(self, name: str, parameters: Iterable[str]) -> Callable[..., Any]:
        """As `define`, but compile when the function is first called. Forbidden names are refused now."""
        if any("__import__" in line for line in self._lines):
            raise malformed("function", "__import__")
        return _Later(functools.partial(self.define, name, tuple(parameters)))

    def define(self, name: str, parameters: Iterable[str] = ()) -> Callable[..., Any]:
        """Compile the lines as `def name(parameters)` and return the function."""
        text = "\n".join([f"def {name}({', '.join(parameters)}):", *(self._lines or [_INDENT + "return None"]), ""])
        exec(compile(text, f"<cgtool {self.label}>", "exec"), self._names)  # noqa: S102 - the purpose of this module
        function: Any = self._names[name]
        if _names_import(function.__code__):
            raise malformed("function", "__import__")
        return cast("Callable[..., Any]", function)


class _Later:
    """A function that is compiled when it is first called; if two threads both compile it, the results are equal."""

    __slots__ = ("_function", "_make")

    def __init__(self, make: Callable[[], Callable[..., Any]]) -> None:
        self._make = make
        self._function: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        function = self._function
        if function is None:
            function = self._function = self._make()
        return function(*args)


def _names_import(code: types.CodeType) -> bool:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return "__import__" in code.co_names or any(map(_names_import, inner))


@functools.lru_cache(maxsize=65536)
def expression(dim: int | str, symbols: tuple[str, ...]) -> str:
    """Return a size of a plan as Python source over the names `symbols`, in parentheses if needed.

    Raises:
        ArtifactError: The size is neither an integer nor a valid expression over these symbols.
    """
    if type(dim) is int:
        return str(dim) if dim >= 0 else f"({dim})"
    if type(dim) is not str:
        raise malformed("size", dim)
    check_expression(dim, symbols)
    return dim if dim in symbols else f"({python_source(dim)})"


def tuple_source(parts: Iterable[str]) -> str:
    """Return the source of a tuple of `parts`."""
    return f"({''.join(f'{part}, ' for part in parts)})"


def check_identifier(text: Any) -> str:
    """Return `text` if it is a valid name of a keyword argument.

    Raises:
        ArtifactError: The name is invalid.
    """
    if type(text) is not str or not text.isascii() or not text.isidentifier() or keyword.iskeyword(text):
        raise malformed("name", text)
    return text


def malformed(what: str, data: Any) -> ArtifactError:
    """Return the error for a plan that violates its grammar."""
    return ArtifactError(
        f"The plan has an invalid {what}: {str(data)[:120]!r}. The cache is damaged or was modified. Warm the model "
        "again.",
        actual=data,
    )


_QUALIFIED = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*\Z"


def template_source(
    template: Json,
    code: Code,
    *,
    symbols: tuple[str, ...],
    value: Callable[[Any], str],
    source: Callable[[Any], str],
) -> str:
    """Return Python source that builds what `template` describes.

    Args:
        template: The template.
        code: The function that receives constants and classes.
        symbols: The variant's symbols.
        value: Returns the local variable of a value id.
        source: Returns the local variable of a source's object.

    Raises:
        ArtifactError: The template violates its grammar, or names a class that does not exist or is not a container.
    """

    def build(part: Json) -> str:
        if type(part) is not list or not part or type(part[0]) is not str:
            raise malformed("template", part)
        tag, *body = part
        if tag == "call" and len(body) == 3:  # noqa: PLR2004 - class, positional fields, named fields
            return call(*body)
        if len(body) != 1:
            raise malformed("template", part)
        [only] = body
        if tag == "v":
            return value(only)
        if tag == "const":
            return _constant(only, code)
        if tag == "expr":
            return expression(only, symbols)
        if tag == "source":
            return source(only)
        if tag in ("list", "tuple", "dict") and type(only) is list:
            return containers[tag](only)
        raise malformed("template", part)

    def pair(item: Json) -> str:
        if type(item) is not list or len(item) != 2:  # noqa: PLR2004 - a key and a value
            raise malformed("template", item)
        return f"{code.constant(decode_literal(item[0]))}: {build(item[1])}"

    def call(name: Json, by_place: Json, by_name: Json) -> str:
        made = _class_for(name, by_place, by_name)
        parts = [*map(build, by_place), *(f"{key}={build(item)}" for key, item in by_name)]
        return f"{code.constant(made)}({', '.join(parts)})"

    containers: dict[str, Callable[[list[Json]], str]] = {
        "list": lambda items: f"[{', '.join(map(build, items))}]",
        "tuple": lambda items: tuple_source(map(build, items)),
        "dict": lambda items: f"{{{', '.join(map(pair, items))}}}",
    }
    return build(template)


def _constant(data: Json, code: Code) -> str:
    value = decode_literal(data)
    if _holds_mutable(data):
        # Each call returns a new object, as the model does: the caller may modify it.
        return f"{code.constant(decode_literal)}({code.constant(data)})"
    return code.constant(value)


def _holds_mutable(data: Json) -> bool:
    return type(data) is list and (data[0] in ("l", "d", "set") or any(map(_holds_mutable, data[1:])))


def template_needs(template: Json, symbols: tuple[str, ...]) -> tuple[set[Any], list[str]]:
    """Return the value ids and the sources that `template` needs, each source once, in order.

    Raises:
        ArtifactError: As `template_source`.
    """
    values: set[Any] = set()
    sources: dict[str, None] = {}

    def value(number: Any) -> str:
        if type(number) is not int:
            raise malformed("value", number)
        values.add(number)
        return "_"

    def source(text: Any) -> str:
        if type(text) is not str:
            raise malformed("source", text)
        sources[text] = None
        return "_"

    template_source(template, Code("template"), symbols=symbols, value=value, source=source)
    return values, list(sources)


def _class_for(name: Json, by_place: Json, by_name: Json) -> type:
    """Return the class of an output after checking that it takes these fields."""
    if type(by_place) is not list or type(by_name) is not list:
        raise malformed("template", [name, by_place, by_name])
    if not all(type(item) is list and len(item) == 2 for item in by_name):  # noqa: PLR2004 - a name and a value
        raise malformed("template", by_name)
    made = _container_class(name)
    names = [check_identifier(key) for key, _ in by_name]
    # Some builtin classes have no signature.
    with contextlib.suppress(ValueError):
        try:
            inspect.signature(made).bind(*by_place, **dict.fromkeys(names))
        except TypeError as error:
            raise malformed(f"template of {name}", [by_place, by_name]) from error
    return made


def _container_class(name: Any) -> type:
    """Return the class `module:Qualname`, which must be a container of fields."""
    found = _find(name)
    if isinstance(found, type):
        is_named = isinstance(getattr(found, "_fields", None), tuple) or found.__module__ == "torch.return_types"
        is_tuple = found is torch.Size or (issubclass(found, tuple) and is_named)
        if is_tuple or is_dataclass(found) or issubclass(found, dict):
            return found
    msg = (
        f"The plan builds its output with {name}, which is not a dataclass, named tuple or dict in this process. Warm "
        "the model again."
    )
    raise ArtifactError(msg, path=name)


def _find(name: Any) -> Any:
    if type(name) is not str or not re.match(_QUALIFIED, name, re.ASCII):
        raise malformed("class", name)
    try:
        return find_qualified(name)
    except (GuardError, AttributeError) as error:
        msg = (
            f"The plan builds its output with {name}, which cannot be found ({error}). Import its module, or warm the "
            "model again."
        )
        raise ArtifactError(msg, path=name) from error


def decode_literal(data: Json) -> Any:
    """Return the value that `cgtool.guards.kinds.encode_literal` encoded as `data`.

    Functions, modules and ops cannot be part of an output and are refused.

    Raises:
        ArtifactError: `data` violates the grammar.
    """
    if data is None or type(data) in (bool, int, str):
        return data
    if type(data) is not list or not data or type(data[0]) is not str:
        raise malformed("literal", data)
    tag, *rest = data
    decoder = _DECODERS.get(tag)
    if decoder is None:
        raise malformed("literal", data)
    try:
        return decoder(rest)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise malformed("literal", data) from error


def _text(rest: list[Json]) -> str:
    [text] = rest
    if type(text) is not str:
        raise TypeError(text)
    return text


def _enum(rest: list[Json]) -> Any:
    name, member = rest
    found = _find(name)
    if not (isinstance(found, type) and issubclass(found, enum.Enum)):
        raise TypeError(name)
    return found[member]


def _type(rest: list[Json]) -> type:
    found = _find(_text(rest))
    if not isinstance(found, type):
        raise TypeError(rest)
    return found


_DECODERS: dict[str, Callable[[list[Json]], Any]] = {
    "f": lambda rest: float(_text(rest)),
    "c": lambda rest: complex(float(rest[0]), float(rest[1])),
    "b": lambda rest: bytes.fromhex(_text(rest)),
    "e": lambda _rest: ...,
    "t": lambda rest: tuple(map(decode_literal, rest)),
    "l": lambda rest: list(map(decode_literal, rest)),
    "size": lambda rest: torch.Size(map(decode_literal, rest)),
    "set": lambda rest: set(map(decode_literal, rest)),
    "frozenset": lambda rest: frozenset(map(decode_literal, rest)),
    "d": lambda rest: {decode_literal(key): decode_literal(item) for key, item in rest},
    "dtype": lambda rest: dtype_of(_text(rest)),
    "device": lambda rest: device_of(_text(rest)),
    "layout": lambda rest: LAYOUTS[_text(rest)],
    "format": lambda rest: FORMATS[_text(rest)],
    "slice": lambda rest: slice(*map(decode_literal, rest)),
    "range": lambda rest: range(*rest),
    "enum": _enum,
    "type": _type,
}


def check_line(name: str, dtype: str, shape: str, stride: str, repair: str) -> str:
    """Return a line that calls `repair` if the tensor `name` does not have this dtype, shape and stride."""
    test = f"{name}.stride() != {stride} or {name}.shape != {shape} or {name}.dtype is not {dtype}"
    return f"if {test}: {name} = {repair}({name}, {dtype}, {shape}, {stride})"


def repairer(graph: PieceGraph) -> Callable[..., torch.Tensor]:
    """Return the function that `check_line` calls: it restrides a tensor, and raises for another shape or dtype."""

    def repair(value: Any, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        """Return `value` with the promised strides, which compiled pieces rely on but do not check."""
        if value.dtype is not dtype or tuple(value.shape) != shape:
            actual = f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
            expected = f"{str(dtype).removeprefix('torch.')} of shape {shape}"
            ops = ", ".join(op_names(graph))
            msg = (
                f"{ops} returned a tensor of {actual}, but its fake implementation promised {expected}. Correct the "
                "op or its fake implementation."
            )
            raise ArtifactError(msg, path=ops, expected=expected, actual=actual)
        if not strides_matter(value, stride):
            return value  # type: ignore[no-any-return]  # a value with a dtype is a tensor
        placed = torch.empty_strided(shape, stride, dtype=dtype, device=value.device)
        return placed.copy_(value)

    return repair


def op_names(graph: PieceGraph) -> tuple[str, ...]:
    """Return the distinct custom and ATen ops that `graph` calls, or all its functions if it calls no op."""
    targets = dict.fromkeys(node.target for node in graph.every_node() if node.kind == "function" and node.target)
    ops = [name.removeprefix("torch.ops.") for name in targets if name.startswith("torch.ops.")]
    return tuple(ops or targets)


def strides_matter(tensor: torch.Tensor, stride: Sequence[object]) -> bool:
    """Return whether the memory layout of `tensor` differs from `stride`, ignoring dimensions of size 1."""
    if not tensor.numel():
        return False
    actual = tensor.stride()
    return any(size > 1 and actual[i] != stride[i] for i, size in enumerate(tensor.shape))


def hole_value(data: Json) -> int | float | str:
    """Return a plan's constant for a hole.

    Raises:
        ArtifactError: A hole cannot hold this constant.
    """
    if type(data) is int:
        return data
    if type(data) is dict and list(data) in (["s"], ["f"]):
        value = decode_value(data, _no_reference)
        if type(value) in (str, float):
            return value  # type: ignore[no-any-return]  # `in` narrows nothing
    raise malformed("constant", data)


def _no_reference(ref: str) -> Any:
    raise malformed("constant", ref)
