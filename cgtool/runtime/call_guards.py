"""Call guards as generated Python: one function per variant checks a call and reads its tensors and sizes.

The function takes the root locals of a call and returns the arguments of the variant's program, or None. It does not
report a reason: `cgtool.runtime.explain` finds the reason on the slow path, from the same records. The sources of the
plan are read anew at every call.
"""

from __future__ import annotations

import contextlib
import itertools
import keyword
import re
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from cgtool.errors import ArtifactError, CgtoolError
from cgtool.graph.expressions import symbols_of
from cgtool.graph.values import device_of, dtype_of
from cgtool.guards import state
from cgtool.guards.kinds import are_apart, describe
from cgtool.guards.sources import Accessor, Roots, Source, find_module, find_qualified, parse_source, qualified_name
from cgtool.plan.grammar import canonical_json
from cgtool.plan.pieces import Dim, Json, TensorMeta
from cgtool.plan.records import Guard, Input, Variant
from cgtool.runtime.generate import Code, expression, malformed, strides_matter, tuple_source

#: (tensors of the call, values of the symbols, objects that the output passes through), or None
Accepted = tuple[tuple[torch.Tensor, ...], tuple[int, ...], tuple[Any, ...]]
Accept = Callable[..., Accepted | None]

#: The pattern of a symbol's name.
SYMBOL = "s[0-9]{1,6}"
_SCALED = r"(?:([1-9][0-9]*) ?\* ?(s[0-9]+)|(s[0-9]+) ?\* ?([1-9][0-9]*))"
_ACCESS = (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError, ZeroDivisionError, CgtoolError)


def check_symbols(variant: Variant) -> tuple[str, ...]:
    """Return the variant's symbols.

    Raises:
        ArtifactError: A name is not of the form s<n>.
    """
    for symbol in variant.symbols:
        if not re.fullmatch(SYMBOL, symbol.name):
            raise malformed("symbol", symbol.name)
    return tuple(symbol.name for symbol in variant.symbols)


def with_sizes_from_data(variant: Variant, symbols: tuple[str, ...]) -> tuple[str, ...]:
    """Return a variant's symbols, followed by the symbols of the sizes that its splitting steps find in data."""
    texts = (text for step in variant.steps if step.splitting for text in step.symbols.values())
    return tuple(dict.fromkeys((*symbols, *(text for text in texts if re.fullmatch(SYMBOL, text)))))


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """How to read the value of a symbol: `size(dim)` or `stride(dim)` of a call's tensor, divided by `factor`."""

    symbol: str
    tensor: int
    dim: int
    factor: int
    is_stride: bool


def find_bindings(variant: Variant, inputs: Sequence[Input]) -> tuple[Binding, ...]:
    """Return a binding for each symbol of `variant`, in the order of the symbols.

    Raises:
        ArtifactError: A symbol cannot be read from any tensor of the call.
    """
    names = {symbol.name for symbol in variant.symbols}
    found: dict[str, Binding] = {}
    for scaled, is_stride in itertools.product((False, True), (False, True)):
        if len(found) < len(names):
            for tensor, item in enumerate(inputs):
                for dim, size in enumerate(item.meta.stride if is_stride else item.meta.shape):
                    symbol, factor = _symbol_and_factor(size) if scaled else (size, 1)
                    if symbol in names and symbol not in found:
                        found[str(symbol)] = Binding(
                            symbol=str(symbol), tensor=tensor, dim=dim, factor=factor, is_stride=is_stride
                        )
    hidden = [symbol.name for symbol in variant.symbols if symbol.name not in found]
    if hidden:
        msg = (
            f"The size {hidden[0]} of the variant {variant.name!r} cannot be read from any tensor of a call. "
            "Warm the model again."
        )
        raise ArtifactError(msg, path=variant.name, actual=tuple(hidden))
    return tuple(found[symbol.name] for symbol in variant.symbols)


def _symbol_and_factor(size: Dim) -> tuple[str | None, int]:
    """Return the symbol and the factor of a size that is a multiple of a symbol, else (None, 1)."""
    match = re.fullmatch(_SCALED, size) if type(size) is str else None
    return (None, 1) if match is None else (match[2] or match[3], int(match[1] or match[4]))


class AcceptWriter:
    """Generates the function that accepts calls for one variant.

    Args:
        variant: The variant.
        inputs: The inputs of the variant that come from the call or have symbols.
        passed: Sources of objects, other than `inputs`, that the output passes through.
        names: The root locals of a call.
        module: The live model.
        method: The bound method that was traced.
        device_index: The device that a device without an index refers to; None accepts any.
    """

    def __init__(
        self,
        variant: Variant,
        inputs: Sequence[Input],
        *,
        passed: Sequence[str],
        names: Sequence[str],
        module: Any,
        method: Any,
        device_index: int | None,
    ) -> None:
        self._variant = variant
        self._inputs = inputs
        self._passed = passed
        self._parameters = [f"a{i}" for i in range(len(names))]
        self._device_index = device_index
        self._symbols = check_symbols(variant)
        self._code = Code("guards")
        self._reader = Reader(self._code, module, method, dict(zip(names, self._parameters, strict=True)))

    def function(self) -> Accept:
        """Return the function.

        Raises:
            ArtifactError: The variant violates its grammar.
            SourceError: A source is malformed.
        """
        code = self._code
        code.add("try:")
        code.depth += 1
        guards = sorted(self._variant.call_guards, key=lambda guard: not guard.source.startswith("state:"))
        distinct = [guard.source for guard in guards if guard.kind.startswith("distinct:")]
        for guard in guards:
            if not guard.kind.startswith("distinct:"):
                code.add(f"if not ({self._condition(guard)}): return None")
        if distinct:
            objects = [f"{code.constant(id)}({self._reader.read(source)})" for source in distinct]
            code.add(f"if {code.constant(len)}({{{', '.join(objects)}}}) != {len(distinct)}: return None")
        for index, item in enumerate(self._inputs):
            self._tensor(index, item)
        self._sizes()
        values = [tuple_source(f"x{i}" for i in range(len(self._inputs))), tuple_source(self._symbols)]
        values.append(tuple_source(self._reader.read(source) for source in self._passed))
        code.add(f"return {', '.join(values)}")
        code.depth -= 1
        code.add(f"except {code.constant(_ACCESS)}: return None")
        return code.define_later("accept", self._parameters)

    def _tensor(self, index: int, item: Input) -> None:
        """Add the checks of a tensor that do not involve symbols."""
        code, meta, name = self._code, item.meta, f"x{index}"
        code.add(f"{name} = {self._reader.read(item.source)}")
        device: Any = device_of(meta.device, self._device_index)
        classes = (code.constant(torch.Tensor), code.constant(nn.Parameter))
        wrong_class = " and ".join(f"{code.constant(type)}({name}) is not {cls}" for cls in classes)
        wrong_device = f"{name}.device != {code.constant(device)}"
        if device.type == "cpu":
            wrong_device = f"not {name}.is_cpu"
        elif device.index is None:
            wrong_device = f"{name}.device.type != {code.constant(device.type)}"
        tests = [
            f"({wrong_class})",
            f"{name}.layout is not {code.constant(torch.strided)}",
            f"{name}.dtype is not {code.constant(dtype_of(meta.dtype))}",
            wrong_device,
            f"{name}.is_neg()",
            f"{name}.dim() != {len(meta.shape)}",
        ]
        if dtype_of(meta.dtype).is_complex:
            tests.append(f"{name}.is_conj()")
        code.add(f"if {' or '.join(tests)}: return None")

    def _sizes(self) -> None:
        code, variant = self._code, self._variant
        for binding in find_bindings(variant, self._inputs):
            read = f"x{binding.tensor}.{'stride' if binding.is_stride else 'size'}({binding.dim})"
            if binding.factor == 1:
                code.add(f"{binding.symbol} = {read}")
            else:
                code.add(f"{binding.symbol}, rest = {code.constant(divmod)}({read}, {binding.factor})")
                code.add("if rest: return None")
        for symbol in variant.symbols:
            upper = "" if symbol.max is None else f" <= {symbol.max}"
            code.add(f"if not {symbol.min} <= {symbol.name}{upper}: return None")
        for relation in variant.relations:
            if not set(symbols_of(relation)) <= set(self._symbols):
                continue  # involves sizes from data, which the program checks once it knows them
            code.add(f"if not {self._expression(relation)}: return None")
        for index, item in enumerate(self._inputs):
            self._shape(f"x{index}", item.meta)

    def _shape(self, name: str, meta: TensorMeta) -> None:
        code = self._code
        if not meta.shape:
            return
        shape = tuple_source(self._expression(size) for size in meta.shape)
        stride = tuple_source(self._expression(step) for step in meta.stride)
        code.add(f"if {name}.shape != {shape}: return None")
        # The stride of a dimension of size 1, or of a tensor without elements, is irrelevant.
        code.add(f"if {name}.stride() != {stride} and {code.constant(strides_matter)}({name}, {stride}): return None")

    def _expression(self, dim: Dim) -> str:
        return expression(dim, self._symbols)

    def _condition(self, guard: Guard) -> str:
        code = self._code
        source = parse_source(guard.source)
        if source.root == "state":
            return state.condition(source.names[0], guard.expected, code.constant)
        value = self._reader.read(guard.source)
        if guard.kind.startswith("same:"):
            return f"({value} is {self._reader.read(guard.kind.removeprefix('same:'))}) is {bool(guard.expected)}"
        if guard.kind.startswith("apart:"):
            other = self._reader.read(guard.kind.removeprefix("apart:"))
            return f"{code.constant(are_apart)}({value}, {other}) is {bool(guard.expected)}"
        quick = _quick_condition(code, guard, value)
        if quick is not None:
            return quick
        expected = code.constant(canonical_json(guard.expected))
        return f"{code.constant(_equals)}({code.constant(guard.kind)}, {value}, {expected})"


def _quick_condition(code: Code, guard: Guard, value: str) -> str | None:
    """Return a fast condition for the most common kinds and values, or None for the others."""
    kind, expected = guard.kind, guard.expected
    if kind == "value" and (expected is None or type(expected) is bool):
        return f"{value} is {expected}"
    if kind == "value" and type(expected) in (int, str):
        same_type = f"{code.constant(type)}({value}) is {code.constant(type(expected))}"
        return f"{same_type} and {value} == {code.constant(expected)}"
    if kind == "type":
        cls = known_class(expected)
        return None if cls is None else f"{code.constant(type)}({value}) is {code.constant(cls)}"
    if kind == "keys" and all(type(key) is str for key in expected):
        return f"[*{value}] == {code.constant(list(expected))}"
    if kind == "empty":
        return f"({code.constant(len)}({value}) == 0) is {bool(expected)}"
    return None


def known_class(name: Json) -> type | None:
    """Return the class of that qualified name, or None if it has not been imported."""
    # The class of an argument is imported already. A name in a plan must never cause an import.
    if str(name).partition(":")[0] not in sys.modules:
        return None
    try:
        found = find_qualified(name)
    except (CgtoolError, AttributeError):
        return None
    return found if isinstance(found, type) and qualified_name(found) == name else None


def _equals(kind: str, value: Any, expected: bytes) -> bool:
    # Compared as bytes: 1 and True are equal in Python, but not in JSON.
    return canonical_json(describe(kind, value)) == expected


class Reader:
    """Generates expressions that read sources.

    Args:
        code: The function that is being generated.
        module: The live model.
        method: The bound method that was traced.
        arguments: Root locals of the call → names of the function's parameters.
    """

    def __init__(self, code: Code, module: Any, method: Any, arguments: Mapping[str, str] | None = None) -> None:
        self._code = code
        self._module = module
        self._method = method
        self._arguments = arguments or {}

    def read(self, text: str) -> str:
        """Return an expression for the object that `text` names; if the object is gone, evaluating it raises.

        Modules on the path from the model are looked up now and bound, so the function must be generated again when
        the module tree changes. Their parameters, buffers and other attributes are read when the function runs.

        Raises:
            SourceError: The source is malformed, or a module on its path is gone.
            ArtifactError: The source names an argument that the model's method does not have.
        """
        source = parse_source(text)
        if source.root == "self":
            return self._from_module(source)
        return self._chain(self._root(source), source.accessors)

    def _root(self, source: Source) -> str:
        constant = self._code.constant
        if source.root == "arg":
            if source.names[0] not in self._arguments:
                raise malformed("argument name", source.text)
            return self._arguments[source.names[0]]
        if source.root == "global":
            return f"{constant(vars(find_module(source.names[0])))}[{constant(source.names[1])}]"
        if source.root == "module":
            return constant(find_module(source.names[0]))
        if source.root == "free":
            return f"{constant(_resolver(self._module, self._method, f'free:{source.names[0]}'))}()"
        raise malformed("source", source.text)

    def _from_module(self, source: Source) -> str:
        base, used = walk(self._module, source)
        rest = source.accessors[used:]
        holder = _holder(base, str(rest[0].key)) if rest and rest[0].word == "attr" else None
        if holder is None:
            return self._chain(self._code.constant(base), rest)
        return self._chain(f"{self._code.constant(holder)}[{self._code.constant(rest[0].key)}]", rest[1:])

    def _chain(self, text: str, accessors: tuple[Accessor, ...]) -> str:
        constant = self._code.constant
        for accessor in accessors:
            key = accessor.key
            if accessor.word == "attr" and str(key).isidentifier() and not keyword.iskeyword(str(key)):
                text = f"{text}.{key}"
            elif accessor.word == "attr":
                text = f"{constant(getattr)}({text}, {constant(key)})"
            elif accessor.word == "item":
                text = f"{text}[{key if type(key) is int else constant(key)}]"
            elif accessor.word == "type":
                text = f"{constant(type)}({text})"
            elif accessor.word == "call":
                text = f"{constant(_referent)}({text})"
            else:
                text = f"{constant(_LISTED[accessor.word])}({text}, {key})"
        return text


def walk(module: Any, source: Source) -> tuple[Any, int]:
    """Return the last submodule on the path from `module` along `source`, and the number of accessors to it."""
    base = module
    for index, accessor in enumerate(source.accessors):
        child = _child(base, accessor)
        if child is None:
            return base, index
        base = child
    return base, len(source.accessors)


class Places:
    """Finds the dicts in which a model's modules store the objects that sources name. Modules are looked up once.

    Args:
        module: The live model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._modules: dict[str, nn.Module | None] = {"self": module}

    def place(self, text: str) -> tuple[dict[str, Any], str] | None:
        """Return the dict and the key under which a module stores the object that `text` names.

        Returns:
            None if the source is not a parameter, buffer or plain attribute of a module.

        Raises:
            SourceError: The source is malformed.
        """
        owner, _, key = text.rpartition(".")
        base: Any = self.module(owner) if "[" not in text and "|" not in text else None
        if base is None:
            source = parse_source(text)
            if source.root != "self":
                return None
            base, used = walk(self._module, source)
            if used != len(source.accessors) - 1 or source.accessors[-1].word != "attr":
                return None
            key = str(source.accessors[-1].key)
        holder = _holder(base, key)
        return None if holder is None else (holder, key)

    def module(self, text: str) -> nn.Module | None:
        """Return the submodule that `text` names by attributes alone, or None if it names something else."""
        if text not in self._modules and ("[" in text or "|" in text):
            self._modules[text] = None
        if text not in self._modules:
            owner, _, name = text.rpartition(".")
            base = self.module(owner) if owner else None
            child = None if base is None else base._modules.get(name)  # noqa: SLF001 - as torch's named_modules does
            self._modules[text] = child if isinstance(child, nn.Module) else None
        return self._modules[text]


def _child(base: Any, accessor: Accessor) -> nn.Module | None:
    """Return the submodule that the accessor leads to, or None if it leads to something else."""
    if not isinstance(base, nn.Module):
        return None
    if accessor.word == "attr":
        return base._modules.get(str(accessor.key))  # noqa: SLF001 - read as torch's own named_modules does
    if accessor.word == "item" and isinstance(base, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        with contextlib.suppress(IndexError, KeyError, TypeError):
            found = base[accessor.key]  # type: ignore[index]  # a wrong key is suppressed
            return found if isinstance(found, nn.Module) else None
    return None


def _holder(base: Any, name: str) -> dict[str, Any] | None:
    """Return the dict of a module that stores the attribute, or None if it is computed (a property)."""
    if not isinstance(base, nn.Module):
        return None
    for holder in (vars(base), base._parameters, base._buffers):  # noqa: SLF001 - in the order of attribute lookup
        if name in holder:
            return holder
    return None


def _resolver(module: Any, method: Any, text: str) -> Callable[[], Any]:
    return lambda: Roots(module, method).resolve(text)


def _referent(base: Any) -> Any:
    if not isinstance(base, weakref.ref):
        msg = f"{base!r} is not a weak reference"
        raise TypeError(msg)
    return base()


_LISTED: dict[str, Callable[..., Any]] = {
    "dict": lambda base, _key: dict(vars(base)),
    "keys": lambda base, key: list(base)[key],
    "list": lambda base, key: list(base)[key],
    "values": lambda base, key: list(base.values())[key],
}
