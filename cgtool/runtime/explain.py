"""Why no variant serves a call, in words: the slow path behind `cgtool.runtime.call_guards`, by the same records."""

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
from cgtool.runtime.weights import make_problem


class Explainer:
    """Says what of one variant a call does not meet.

    Args:
        variant: The variant.
        inputs: Those of its inputs that `accept` checks.
        variants: All variants, whose sizes together are what a user may pass.
        signature: How the user names the arguments.
        module: The live model.
        device_index: What a device without an index means; None: any.
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
        self._display_name = signature.display_name
        self._module = module
        self._device_index = device_index
        self._bindings = find_bindings(variant, inputs)
        self._dims = variant.dim_of

    def failures(self, arguments: Mapping[str, Any]) -> Failures:
        """Return what of the variant `arguments`, the root locals of a call, does not meet."""
        roots = Roots(self._module, self._signature.method, arguments)
        guards: dict[str, None] = {}
        for failure in self._failed(roots):
            guards.update(dict.fromkeys(self._guard(failure.guard, failure.actual, failure.sentence, roots)))
        tensors, problems = self._tensors(roots)
        kinds = dict.fromkeys([*problems, *guards])
        return Failures(kinds=tuple(kinds), sizes=tuple(self._sizes(tensors, self._values(tensors))))

    def _failed(self, roots: Roots) -> list[Failure]:
        try:
            return check(self.variant.call_guards, roots) or self._of_another_class(roots)
        except CgtoolError:
            raise
        except Exception as error:  # noqa: BLE001 - a guard that cannot even be looked at does not hold, whatever the reason
            said = f"the arguments cannot be looked at ({type(error).__name__}: {error})"
            return [Failure(guard=Guard(source="self", kind="value", expected=None), actual=None, sentence=said)]

    def _of_another_class(self, roots: Roots) -> list[Failure]:
        """Return the arguments whose class is not the one that goes by its name."""
        found = []
        for guard in self.variant.call_guards:
            wanted = known_class(guard.expected) if guard.kind == "type" else None
            if wanted is not None and type(roots.resolve(guard.source)) is not wanted:
                said = f"{source_words(guard.source)} is of a class that is not {guard.expected}, whose name it has"
                found.append(Failure(guard=guard, actual=guard.expected, sentence=said))
        return found

    def _guard(self, guard: Guard, actual: Any, sentence: str, roots: Roots) -> list[str]:
        source = parse_source(guard.source)
        if source.root == "state":
            return [state.explain_state(source.names[0], guard.expected, actual)]
        if guard.source == f"arg:{self._signature.var_keyword}":
            passed = _passed(guard, actual)
            if passed:
                return passed
        if guard.kind == "value" and source_words(guard.source) not in sentence:
            # What is there now has no spelling as data, so its type must do.
            kind = type(roots.resolve(guard.source)).__qualname__
            name = self._display_name(guard.source)
            return [f"{name} was {spell(guard.expected)} when this was compiled and is a {kind} now"]
        return [sentence.replace(source_words(guard.source), self._display_name(guard.source)).rstrip(".")]

    def _tensors(self, roots: Roots) -> tuple[dict[int, Any], list[str]]:
        """Return the tensors that are of the right make, by index, and what is wrong with the others."""
        tensors: dict[int, Any] = {}
        problems: list[str] = []
        for index, item in enumerate(self._inputs):
            name = self._display_name(item.source)
            try:
                value = roots.resolve(item.source)
            except SourceError:
                problems.append(_was_passed(name, now=False))
                continue
            if value is None:
                problems.append(f"{name} is None and was a tensor when this was traced")
                continue
            problem = make_problem(value, item.meta, self._device_index)
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

    def _sizes(self, tensors: Mapping[int, Any], values: Mapping[str, int]) -> list[str]:
        found = [
            f"{self._called(symbol.name)} is {values[symbol.name]} and must be {self._allowed(symbol)}"
            for symbol in self.variant.symbols
            if symbol.name in values and not _within(values[symbol.name], symbol.min, symbol.max)
        ]
        found += [
            f"{self._where(binding.tensor, binding.dim)} is {size} and must be a multiple of {binding.factor}"
            for binding in self._bindings
            if binding.tensor in tensors and (size := read_binding(binding, tensors[binding.tensor])) % binding.factor
        ]
        for relation in self.variant.relations:
            with contextlib.suppress(ArtifactError):
                if not evaluate(relation, values):
                    found.append(f"the sizes ({self._said(values)}) do not meet {self._named(relation)}")
        for index, tensor in tensors.items():
            found += self._shape(index, tensor, values)
        return found

    def _shape(self, index: int, tensor: Any, values: Mapping[str, int]) -> list[str]:
        meta = self._inputs[index].meta
        found = []
        for dim, (size, want) in enumerate(zip(tensor.shape, meta.shape, strict=True)):
            wanted = _value(want, values)
            if wanted is not None and size != wanted:
                by = f" ({self._named(want)})" if type(want) is str else ""
                found.append(f"{self._where(index, dim)} is {size} and must be {wanted}{by}")
        stride = tuple(_value(step, values) for step in meta.stride)
        known = tuple(step for step in stride if step is not None)
        if not found and len(known) == len(stride) and strides_matter(tensor, known):
            name = self._display_name(self._inputs[index].source)
            advice = f"; pass {name}.contiguous()" if _is_contiguous(tensor.shape, known) else ""
            found.append(f"{name} has the strides {tensor.stride()} and was traced with {known}{advice}")
        return found

    def _where(self, index: int, dim: int) -> str:
        return f"the size of {self._display_name(self._inputs[index].source)} in dimension {dim}"

    def _called(self, symbol: str) -> str:
        if symbol in self._dims:
            return self._dims[symbol]
        binding = next(binding for binding in self._bindings if binding.symbol == symbol)
        return self._where(binding.tensor, binding.dim)

    def _named(self, text: Dim) -> str:
        spoken = str(text)
        for symbol, name in sorted(self._dims.items(), key=lambda item: -len(item[0])):
            spoken = spoken.replace(symbol, name)
        return spoken

    def _said(self, values: Mapping[str, int]) -> str:
        return ", ".join(f"{self._dims[symbol]} {value}" for symbol, value in values.items() if symbol in self._dims)

    def _allowed(self, symbol: SymbolRange) -> str:
        """Say what the variants together allow for a dimension, not only this one."""
        name = self._dims.get(symbol.name)
        spans = [(symbol.min, symbol.max)]
        for variant in self._variants if name is not None else ():
            if name in variant.fixed:
                spans.append((variant.fixed[name], variant.fixed[name]))
            carriers = variant.dims.get(str(name), ())
            spans += [(other.min, other.max) for other in variant.symbols if other.name in carriers]
        return " or ".join(map(_span_words, joined_ranges(spans)))


@dataclass(frozen=True, kw_only=True)
class Failures:
    """What of a variant a call does not meet: sentences without their full stop.

    Args:
        kinds: About types, dtypes, values and state.
        sizes: About sizes and strides of tensors that are otherwise as they should be.
    """

    kinds: tuple[str, ...]
    sizes: tuple[str, ...]


def read_binding(binding: Binding, tensor: Any) -> int:
    """Return the size or stride that `binding` reads."""
    return int(tensor.stride(binding.dim) if binding.is_stride else tensor.size(binding.dim))


def refusal(
    explainers: Sequence[Explainer], arguments: Mapping[str, Any], uncovered: Callable[[int], str]
) -> GuardError:
    """Return the error of a call that no variant serves.

    Args:
        explainers: One for each variant, in order.
        arguments: The root locals of the call.
        uncovered: Says, for a variant whose guards all hold, which sizes were compiled for it.
    """
    found = [explainer.failures(arguments) for explainer in explainers]
    # Another size is a smaller difference than another type; a variant for one size is the farther the more it fixes.
    order = sorted(
        range(len(found)),
        key=lambda i: (len(found[i].kinds), len(explainers[i].variant.fixed), len(found[i].sizes), i),
    )
    if not order:
        return GuardError("The plan holds no variant, so no call can be served: warm again.")
    nearest = order[0]
    name = explainers[nearest].variant.name
    fixed = ", ".join(f"{dim} {size}" for dim, size in explainers[nearest].variant.fixed.items())
    reasons = found[nearest].kinds + found[nearest].sizes or (uncovered(nearest),)
    more = f"; {reasons[1]}" if len(reasons) > 1 else ""
    more += f"; and {len(reasons) - 2} more" if len(reasons) > 2 else ""  # noqa: PLR2004 - two are shown
    count = "The compiled model" if len(found) == 1 else f"None of the {len(found)} compiled variants"
    verb = "does not serve" if len(found) == 1 else "serves"
    return GuardError(
        f"{reasons[0]}{more}. {count} {verb} this call; the nearest is {name!r}{' with ' + fixed if fixed else ''}. "
        "Change the call, or warm with an example like it.",
        path=name,
        actual=reasons,
    )


def _passed(guard: Guard, actual: Any) -> list[str]:
    """Say of a wrapper's keyword arguments which were passed then and which are now."""
    if guard.kind == "keys" and type(actual) is list:
        missing = [_was_passed(str(key), now=False) for key in guard.expected if key not in actual]
        return missing + [_was_passed(str(key), now=True) for key in actual if key not in guard.expected]
    if guard.kind.startswith("contains:") and type(actual) is bool:
        return [_was_passed(guard.kind.removeprefix("contains:").strip('"'), now=actual)]
    return []


def _was_passed(name: str, *, now: bool) -> str:
    if now:
        return f"{name} is passed now and was not when this was compiled"
    return f"{name} was passed when this was compiled and is missing now"


def _value(dim: Dim, values: Mapping[str, int]) -> int | None:
    with contextlib.suppress(ArtifactError):
        return evaluate(dim, values)
    return None


def _within(value: int, low: int, high: int | None) -> bool:
    return low <= value and (high is None or value <= high)


def _span_words(span: tuple[int, int | None]) -> str:
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


#: What torch says where there is no memory, and where native code failed and printed why.
_NO_MEMORY, _NATIVE_FAILED = ("out of memory", "allocate memory"), "API call failed"


def call_failure(
    error: RuntimeError, method: str, variant: Variant, sizes: Sequence[int], tensors: Sequence[torch.Tensor]
) -> Exception | None:
    """Return the sentence for a call that ran out of memory or was given a wrong index, or None for another failure.

    Args:
        error: What torch raised. Native code prints the reason and says no more than that it failed.
        method: What was called.
        variant: The variant that ran.
        sizes: The values of its symbols.
        tensors: The call's and the model's.
    """
    said = first_line(error)
    if said.startswith("index out of bounds"):
        return IndexError(f"A call of {method} was given an index that lies outside of what it indexes ({said}).")
    is_memory = isinstance(error, torch.OutOfMemoryError) or any(words in said for words in _NO_MEMORY)
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    refused = any(torch.cuda.memory_stats(device).get("num_ooms", 0) for device in devices)
    if not is_memory and not (refused and _NATIVE_FAILED in said):
        return None
    values = dict(zip((symbol.name for symbol in variant.symbols), sizes, strict=False))
    known = {name: values[symbols[0]] for name, symbols in variant.dims.items() if symbols and symbols[0] in values}
    at = " and ".join(f"{name} = {size}" for name, size in {**known, **variant.fixed}.items())
    held = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()) / 2**20
    failed = "ran" if is_memory else "failed, and has probably run"
    msg = (
        f"A call of {method}{f' with {at}' if at else ''} {failed} out of memory beside the {held:.0f} MiB of its "
        f"arguments and weights: {said}. Call it with less, or free some memory."
    )
    return torch.OutOfMemoryError(msg)
