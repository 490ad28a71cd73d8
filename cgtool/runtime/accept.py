"""Whether a variant serves a call: its call guards, symbols and tensors as one generated function.

The function takes the root locals of a call and returns what the variant's program needs, or None. It says nothing of
why: `cgtool.runtime.explain` does, on the slow path, by the same records.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from cgtool.digests import canonical_json
from cgtool.errors import ArtifactError, CgtoolError
from cgtool.graph.metas import device_of, dtype_of
from cgtool.guards import state
from cgtool.guards.kinds import are_apart, describe
from cgtool.guards.names import find_qualified, qualified_name
from cgtool.guards.sources import parse_source
from cgtool.plan.pieces import Dim, Json, TensorMeta
from cgtool.plan.records import Guard, Input, Variant
from cgtool.records import dataclass
from cgtool.runtime.generate import Code, expression, malformed, tuple_source
from cgtool.runtime.paths import Reader

#: (tensors of the call, values of the symbols, objects that the output passes through), or None
Accepted = tuple[tuple[torch.Tensor, ...], tuple[int, ...], tuple[Any, ...]]
Accept = Callable[..., Accepted | None]

_SYMBOL = re.compile(r"s[0-9]{1,6}\Z")
_SCALED = re.compile(r"(?:([1-9][0-9]*) ?\* ?(s[0-9]+)|(s[0-9]+) ?\* ?([1-9][0-9]*))\Z")
#: What Inductor's kernels for accelerators assume of the memory of their inputs, in bytes.
ALIGNMENT = 16
#: Devices whose kernels read memory wherever it begins: Inductor's C++ loads vectors unaligned.
ANYWHERE = frozenset({"cpu", "meta"})
_ACCESS = (AttributeError, KeyError, IndexError, TypeError, ValueError, ZeroDivisionError, CgtoolError)


def check_symbols(variant: Variant) -> tuple[str, ...]:
    """Return the variant's symbols.

    Raises:
        ArtifactError: A name is not of the form s<n>.
    """
    for symbol in variant.symbols:
        if not _SYMBOL.match(symbol.name):
            raise malformed("symbol", symbol.name)
    return tuple(symbol.name for symbol in variant.symbols)


@dataclass(frozen=True, kw_only=True)
class Binding:
    """Where the value of a symbol is read: `size(dim)` or `stride(dim)` of a call's tensor, divided by `factor`."""

    symbol: str
    tensor: int
    dim: int
    factor: int
    is_stride: bool


def find_bindings(variant: Variant, inputs: Sequence[Input]) -> tuple[Binding, ...]:
    """Return where each symbol of `variant` is read, in the order of the symbols.

    Raises:
        ArtifactError: A symbol is shown by no tensor of the call.
    """
    found: dict[str, Binding] = {}
    for scaled in (False, True):
        for is_stride in (False, True):
            for tensor, item in enumerate(inputs):
                for dim, size in enumerate(item.meta.stride if is_stride else item.meta.shape):
                    symbol, factor = _shown(size, scaled=scaled)
                    if symbol is not None and symbol not in found:
                        found[symbol] = Binding(
                            symbol=symbol, tensor=tensor, dim=dim, factor=factor, is_stride=is_stride
                        )
    hidden = [symbol.name for symbol in variant.symbols if symbol.name not in found]
    if hidden:
        msg = f"The size {hidden[0]} of the variant {variant.name!r} is shown by no tensor of a call: warm again."
        raise ArtifactError(msg, path=variant.name, actual=tuple(hidden))
    return tuple(found[symbol.name] for symbol in variant.symbols)


def _shown(size: Dim, *, scaled: bool) -> tuple[str | None, int]:
    if type(size) is not str:
        return None, 1
    if not scaled:
        return (size, 1) if _SYMBOL.match(size) else (None, 1)
    match = _SCALED.match(size)
    if match is None:
        return None, 1
    return match[2] or match[3], int(match[1] or match[4])


class AcceptWriter:
    """Writes the function for one variant.

    Args:
        variant: The variant.
        inputs: Those of its inputs that are read from the call or have symbols.
        passed: Sources of objects that the output passes through, beside `inputs`.
        names: The root locals of a call.
        module: The live model.
        method: Its bound method that was traced.
        device_index: What a device without an index means; None: any.
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
            ArtifactError: The variant holds something outside its grammar.
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
        """Everything about a tensor that has nothing to do with symbols."""
        code, meta, name = self._code, item.meta, f"x{index}"
        code.add(f"{name} = {self._reader.read(item.source)}")
        device: Any = device_of(meta.device, self._device_index)
        classes = (code.constant(torch.Tensor), code.constant(nn.Parameter))
        kind = " and ".join(f"{code.constant(type)}({name}) is not {wanted}" for wanted in classes)
        at = f"{name}.device != {code.constant(device)}"
        if device.type == "cpu":
            at = f"not {name}.is_cpu"
        elif device.index is None:
            at = f"{name}.device.type != {code.constant(device.type)}"
        tests = [
            f"({kind})",
            f"{name}.layout is not {code.constant(torch.strided)}",
            f"{name}.dtype is not {code.constant(dtype_of(meta.dtype))}",
            at,
            f"{name}.is_neg()",
            f"{name}.dim() != {len(meta.shape)}",
        ]
        if needs_alignment(device):
            # A view may begin anywhere. Copying it would be right for what is only read, and lose what is written.
            tests.append(f"{name}.data_ptr() % {ALIGNMENT}")
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
        # A stride of a dimension of size 1, or of a tensor without elements, says nothing.
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
        return _quick_condition(code, guard, value) or self._any_condition(guard, value)

    def _any_condition(self, guard: Guard, value: str) -> str:
        constant = self._code.constant
        return f"{constant(_sees)}({constant(guard.kind)}, {value}, {constant(canonical_json(guard.expected))})"


def _quick_condition(code: Code, guard: Guard, value: str) -> str | None:
    """Return a condition for the kinds and values that calls are full of, or None for the others."""
    kind, expected = guard.kind, guard.expected
    if kind == "value" and (expected is None or type(expected) is bool):
        return f"{value} is {expected}"
    if kind == "value" and type(expected) in (int, str):
        same_type = f"{code.constant(type)}({value}) is {code.constant(type(expected))}"
        return f"{same_type} and {value} == {code.constant(expected)}"
    if kind == "type":
        found = known_class(expected)
        return None if found is None else f"{code.constant(type)}({value}) is {code.constant(found)}"
    if kind == "keys" and all(type(key) is str for key in expected):
        return f"[*{value}] == {code.constant(list(expected))}"
    if kind == "empty":
        return f"({code.constant(len)}({value}) == 0) is {bool(expected)}"
    return None


def known_class(name: Json) -> type | None:
    """Return the class of that qualified name, or None where none is imported."""
    # A class of a call's argument is there already: nothing is imported because a plan names it.
    if str(name).partition(":")[0] not in sys.modules:
        return None
    try:
        found = find_qualified(name)
    except (CgtoolError, AttributeError):
        return None
    return found if isinstance(found, type) and qualified_name(found) == name else None


def _sees(kind: str, value: Any, expected: bytes) -> bool:
    # Compared as bytes: 1 and True are equal in Python and two things in JSON.
    return canonical_json(describe(kind, value)) == expected


def needs_alignment(device: torch.device) -> bool:
    """Return whether compiled code for `device` relies on tensors that begin at a multiple of `ALIGNMENT` bytes."""
    return device.type not in ANYWHERE


def strides_matter(tensor: torch.Tensor, stride: tuple[int, ...]) -> bool:
    """Return whether `tensor` lies otherwise in memory than `stride` says."""
    if not tensor.numel():
        return False
    have = tensor.stride()
    return any(size > 1 and have[i] != stride[i] for i, size in enumerate(tensor.shape))
