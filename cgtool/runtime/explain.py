"""Explain why no variant accepts a call: the slow path behind `cgtool.runtime.call_guards`, over the same records."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cgtool.errors import ArtifactError, CgtoolError, GuardError, first_line
from cgtool.graph.expressions import evaluate
from cgtool.guards import state
from cgtool.guards.kinds import Failure, check
from cgtool.guards.signature import CallSignature
from cgtool.guards.sources import Roots, SourceError, parse_source
from cgtool.plan.pieces import Dim, SymbolRange
from cgtool.plan.records import Guard, Input, Variant, source_words
from cgtool.plan.rendering import spell
from cgtool.plan.shapes import joined_ranges
from cgtool.runtime.call_guards import Binding, find_bindings, known_class
from cgtool.runtime.generate import strides_matter
from cgtool.runtime.weights import tensor_problem


class Explainer:
    """Reports which requirements of one variant a call does not meet.

    Args:
        variant: The variant.
        inputs: The inputs of the variant that `accept` checks.
        variants: All variants; their sizes together are what a user may pass.
        signature: The signature that names the arguments.
        module: The live model.
        device_index: The device that a device without an index refers to; None accepts any.
    """

    def __init__(
        self,
        variant: Variant,
        inputs: Sequence[Input],
        *,
        variants: Sequence[Variant],
        signature: CallSignature,
        module: Any,
        device_index: int | None,
    ) -> None:
        self.variant = variant
        self._inputs = inputs
        self._variants = variants
        self._signature = signature
        self._module = module
        self._device_index = device_index
        self._bindings = find_bindings(variant, inputs)
        self._dims = variant.dim_of

    def failures(self, arguments: Mapping[str, Any]) -> Failures:
        """Return the requirements that `arguments` (the root locals of a call) do not meet."""
        roots = Roots(self._module, self._signature.method, arguments)
        guards: dict[str, None] = {}
        for failure in self._guard_failures(roots):
            guards.update(dict.fromkeys(self._reasons(failure.guard, failure.actual, failure.sentence, roots)))
        tensors, problems = self._tensors(roots)
        kinds = dict.fromkeys([*problems, *guards])
        return Failures(kinds=tuple(kinds), sizes=tuple(self._size_failures(tensors, self._values(tensors))))

    def _guard_failures(self, roots: Roots) -> list[Failure]:
        try:
            return check(self.variant.call_guards, roots) or self._other_classes(roots)
        except CgtoolError:
            raise
        except Exception as error:  # noqa: BLE001 - a guard that cannot be evaluated does not hold, whatever the reason
            sentence = f"the arguments cannot be inspected ({type(error).__name__}: {error})"
            return [Failure(guard=Guard(source="self", kind="value", expected=None), actual=None, sentence=sentence)]

    def _other_classes(self, roots: Roots) -> list[Failure]:
        """Return the arguments whose class has the expected name but is a different class."""
        failures = []
        for guard in self.variant.call_guards:
            expected = known_class(guard.expected) if guard.kind == "type" else None
            if expected is not None and type(roots.resolve(guard.source)) is not expected:
                sentence = f"{source_words(guard.source)} has a class named {guard.expected} that is not that class"
                failures.append(Failure(guard=guard, actual=guard.expected, sentence=sentence))
        return failures

    def _name(self, source: str) -> str:
        """Return a source as the user knows it."""
        return self._signature.display_name(source)

    def _reasons(self, guard: Guard, actual: Any, sentence: str, roots: Roots) -> list[str]:
        source = parse_source(guard.source)
        if source.root == "state":
            return [state.explain_state(source.names[0], guard.expected, actual)]
        if guard.source == f"arg:{self._signature.var_keyword}":
            reasons = _keyword_reasons(guard, actual)
            if reasons:
                return reasons
        name = self._name(guard.source)
        if guard.kind == "value" and source_words(guard.source) not in sentence:
            # The current value cannot be written as data, so name its type.
            kind = type(roots.resolve(guard.source)).__qualname__
            return [f"{name} was {spell(guard.expected)} when this was compiled and is a {kind} now"]
        return [sentence.replace(source_words(guard.source), name).rstrip(".")]

    def _tensors(self, roots: Roots) -> tuple[dict[int, Any], list[str]]:
        """Return the tensors of the right dtype, device and rank, by index, and the problems of the others."""
        tensors: dict[int, Any] = {}
        problems: list[str] = []
        for index, item in enumerate(self._inputs):
            name = self._name(item.source)
            try:
                value = roots.resolve(item.source)
            except SourceError:
                problems.append(_passed_reason(name, now=False))
                continue
            if value is None:
                problems.append(f"{name} is None and was a tensor when this was traced")
                continue
            problem = tensor_problem(value, item.meta, self._device_index)
            if problem is None:
                tensors[index] = value
            else:
                problems.append(f"{name} {problem}")
        return tensors, problems

    def _values(self, tensors: Mapping[int, Any]) -> dict[str, int]:
        values: dict[str, int] = {}
        for binding in self._bindings:
            if binding.tensor in tensors:
                values[binding.symbol] = read_binding(binding, tensors[binding.tensor]) // binding.factor
        return values

    def _size_failures(self, tensors: Mapping[int, Any], values: Mapping[str, int]) -> list[str]:
        failures = [
            f"{self._symbol_name(symbol.name)} is {values[symbol.name]} and must be {self._allowed(symbol)}"
            for symbol in self.variant.symbols
            if symbol.name in values and not _within(values[symbol.name], symbol.min, symbol.max)
        ]
        failures += [
            f"{self._size_name(binding.tensor, binding.dim)} is {size} and must be a multiple of {binding.factor}"
            for binding in self._bindings
            if binding.tensor in tensors and (size := read_binding(binding, tensors[binding.tensor])) % binding.factor
        ]
        sizes = ", ".join(f"{self._dims[symbol]} {value}" for symbol, value in values.items() if symbol in self._dims)
        for relation in self.variant.relations:
            with contextlib.suppress(ArtifactError):
                if not evaluate(relation, values):
                    failures.append(f"the sizes ({sizes}) do not satisfy {self._with_dim_names(relation)}")
        for index, tensor in tensors.items():
            failures += self._shape_failures(index, tensor, values)
        return failures

    def _shape_failures(self, index: int, tensor: Any, values: Mapping[str, int]) -> list[str]:
        meta = self._inputs[index].meta
        failures = []
        for dim, (size, expression) in enumerate(zip(tensor.shape, meta.shape, strict=True)):
            expected = _value(expression, values)
            if expected is not None and size != expected:
                formula = f" ({self._with_dim_names(expression)})" if type(expression) is str else ""
                failures.append(f"{self._size_name(index, dim)} is {size} and must be {expected}{formula}")
        stride = tuple(_value(step, values) for step in meta.stride)
        known = tuple(step for step in stride if step is not None)
        if not failures and len(known) == len(stride) and strides_matter(tensor, known):
            name = self._name(self._inputs[index].source)
            advice = f"; pass {name}.contiguous()" if _is_contiguous(tensor.shape, known) else ""
            failures.append(f"{name} has the strides {tensor.stride()} and was traced with {known}{advice}")
        return failures

    def _size_name(self, index: int, dim: int) -> str:
        return f"the size of {self._name(self._inputs[index].source)} in dimension {dim}"

    def _symbol_name(self, symbol: str) -> str:
        if symbol in self._dims:
            return self._dims[symbol]
        binding = next(binding for binding in self._bindings if binding.symbol == symbol)
        return self._size_name(binding.tensor, binding.dim)

    def _with_dim_names(self, expression: Dim) -> str:
        text = str(expression)
        for symbol, name in sorted(self._dims.items(), key=lambda item: -len(item[0])):
            text = text.replace(symbol, name)
        return text

    def _allowed(self, symbol: SymbolRange) -> str:
        """Return the sizes that all variants together allow for a dimension, not only this one."""
        name = self._dims.get(symbol.name)
        spans = [(symbol.min, symbol.max)]
        for variant in self._variants if name is not None else ():
            if name in variant.fixed:
                spans.append((variant.fixed[name], variant.fixed[name]))
            carriers = variant.dims.get(str(name), ())
            spans += [(other.min, other.max) for other in variant.symbols if other.name in carriers]
        return " or ".join(map(_span_text, joined_ranges(spans)))


@dataclass(frozen=True, kw_only=True)
class Failures:
    """The requirements of a variant that a call does not meet, as sentences without a full stop.

    Args:
        kinds: Failures of types, dtypes, values and state.
        sizes: Failures of sizes and strides of tensors that are otherwise as expected.
    """

    kinds: tuple[str, ...]
    sizes: tuple[str, ...]


def read_binding(binding: Binding, tensor: Any) -> int:
    """Return the size or stride that `binding` reads."""
    return int(tensor.stride(binding.dim) if binding.is_stride else tensor.size(binding.dim))


def refusal(
    explainers: Sequence[Explainer], arguments: Mapping[str, Any], uncovered: Callable[[int], str]
) -> GuardError:
    """Return the error for a call that no variant accepts.

    Args:
        explainers: The explainers of all variants, in order.
        arguments: The root locals of the call.
        uncovered: Returns which sizes were compiled for a variant, by its index; called if all its guards hold.
    """
    failures = [explainer.failures(arguments) for explainer in explainers]
    if not failures:
        return GuardError("The plan has no variants, so it cannot run any call. Warm the model again.")
    # A different size is nearer than a different type; the more sizes a variant fixes, the further away it is.
    nearest = min(
        range(len(failures)),
        key=lambda i: (len(failures[i].kinds), len(explainers[i].variant.fixed), len(failures[i].sizes), i),
    )
    variant = explainers[nearest].variant
    fixed = ", ".join(f"{dim} {size}" for dim, size in variant.fixed.items())
    reasons = failures[nearest].kinds + failures[nearest].sizes or (uncovered(nearest),)
    more = f"; {reasons[1]}" if len(reasons) > 1 else ""
    more += f"; and {len(reasons) - 2} more" if len(reasons) > 2 else ""  # noqa: PLR2004 - two are shown
    if len(failures) == 1:
        subject = f"The compiled variant {variant.name!r}{f' ({fixed})' if fixed else ''} does not accept this call"
    else:
        subject = (
            f"None of the {len(failures)} compiled variants accepts this call; the nearest is {variant.name!r}"
            f"{f' ({fixed})' if fixed else ''}"
        )
    return GuardError(
        f"{reasons[0]}{more}. {subject}. Change the call, or warm the model with an example like it.",
        path=variant.name,
        actual=reasons,
    )


def _keyword_reasons(guard: Guard, actual: Any) -> list[str]:
    """Return which keyword arguments of a wrapper were passed at compile time or are passed now, but not both."""
    if guard.kind == "keys" and type(actual) is list:
        missing = [_passed_reason(str(key), now=False) for key in guard.expected if key not in actual]
        return missing + [_passed_reason(str(key), now=True) for key in actual if key not in guard.expected]
    if guard.kind.startswith("contains:") and type(actual) is bool:
        return [_passed_reason(guard.kind.removeprefix("contains:").strip('"'), now=actual)]
    return []


def _passed_reason(name: str, *, now: bool) -> str:
    if now:
        return f"{name} is passed now and was not when this was compiled"
    return f"{name} was passed when this was compiled and is missing now"


def _value(dim: Dim, values: Mapping[str, int]) -> int | None:
    with contextlib.suppress(ArtifactError):
        return evaluate(dim, values)
    return None


def _within(value: int, low: int, high: int | None) -> bool:
    return low <= value and (high is None or value <= high)


def _span_text(span: tuple[int, int | None]) -> str:
    low, high = span
    if low == high:
        return str(low)
    return f"at least {low}" if high is None else f"from {low} to {high}"


def _is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    step = 1
    for size, have in zip(reversed(shape), reversed(stride), strict=True):
        if size > 1 and have != step:
            return False
        step *= size
    return True


#: Parts of torch's messages when memory runs out.
_NO_MEMORY = ("out of memory", "allocate memory")
#: Part of torch's message when native code fails; the reason itself goes to stderr.
_NATIVE_FAILED = "API call failed"


def call_failure(
    error: RuntimeError, method: str, variant: Variant, sizes: Sequence[int], tensors: Sequence[torch.Tensor]
) -> Exception | None:
    """Return the error to raise for a call that ran out of memory or used an index out of range, else None.

    Args:
        error: The error from torch. For native code, it says only that a call failed.
        method: The name of the method that was called.
        variant: The variant that ran.
        sizes: The values of its symbols.
        tensors: The tensors of the call and of the model.
    """
    message = first_line(error)
    if message.startswith("index out of bounds"):
        return IndexError(f"A call of {method} used an index out of range ({message}). Check the values of its inputs.")
    is_memory = isinstance(error, torch.OutOfMemoryError) or any(text in message for text in _NO_MEMORY)
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    had_failures = any(torch.cuda.memory_stats(device).get("num_ooms", 0) for device in devices)
    if not is_memory and not (had_failures and _NATIVE_FAILED in message):
        return None
    values = dict(zip((symbol.name for symbol in variant.symbols), sizes, strict=False))
    known = {name: values[symbols[0]] for name, symbols in variant.dims.items() if symbols and symbols[0] in values}
    dims = " and ".join(f"{name} = {size}" for name, size in {**known, **variant.fixed}.items())
    held = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()) / 2**20
    failed = "ran" if is_memory else "failed, and has probably run"
    msg = (
        f"A call of {method}{f' with {dims}' if dims else ''} {failed} out of memory; its arguments and weights take "
        f"{held:.0f} MiB: {message}. Use smaller inputs, or free some memory."
    )
    return torch.OutOfMemoryError(msg)
