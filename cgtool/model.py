"""What a user says of a model: the module, example calls, dynamic dimensions. Plain records, no torch.

A factory named by `MODEL` on the command line returns a `ModelSpec` or a plain `(module, args)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cgtool.errors import ModelError

#: parameter -> dimension -> name, or (name, min, max)
DynamicDims = Mapping[str, Mapping[int, "str | tuple[str, int, int | None]"]]


@dataclass(frozen=True, kw_only=True)
class ExampleCall:
    """One example call of the model; each is traced into variants of its own.

    Args:
        args: Positional arguments, without the module itself.
        kwargs: Keyword arguments.
        name: How people call it: "prefill", "decode", ...

    Raises:
        ModelError: One of them is of another type.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    name: str = "default"

    def __post_init__(self) -> None:
        """Refuse a tensor in the tuple's place, and the like."""
        _check(self, "args", (tuple, list), "a tuple, such as (x,)")
        _check(self, "kwargs", Mapping, 'a dict, such as {"x": x}')
        _check(self, "name", str, "a string")


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How a model is served, which `cgtool check` needs to know and compiling does not.

    Args:
        runner: Takes what `cgtool.load` returned (at level 0 the module itself) and a `CompilationConfig`, and returns
            a `cgtool.ModelRunner` of it over a KV cache that is the check's own.
        token_embeddings: Modules that turn token ids into rows, by their names in the model.
    """

    runner: Callable[[Any, Any], Any]
    token_embeddings: Sequence[str] = ("embed_tokens",)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model and how it is called.

    Args:
        module: The `torch.nn.Module`.
        calls: One or more example calls.
        dynamic: Which dimensions change from call to call: `{"input_ids": {0: "batch", 1: ("seq", 1, 4096)}}`.
            Dimensions with the same name have the same size. Bounds are inclusive; the default is 1 to no limit.
        splitting_ops: Ops to split at; None means the attention ops known to cgtool and those registered with
            `splitting=True` that are in the graph.
        method: The method of the module that is compiled.
        prefix: Which compiled part of the model this is ("backbone", "eagle_head", ...).
        name: What `inspect` shows; the class's name by default.
        require: Dynamic dimension → its smallest and its largest size: further variants are traced until all of
            these sizes are served, at which the model itself runs.
        static_where_fixed: Whether a dynamic dimension that the model's code fixes is served at the example's size
            alone, with a note; it is an error otherwise.
        serving: How it is served, for `cgtool check`.
        notes: What its author tells the user of it as it is warmed, a sentence each.

    Raises:
        ModelError: One of them is of another type.
    """

    module: Any
    calls: Sequence[ExampleCall]
    dynamic: DynamicDims = field(default_factory=dict)
    splitting_ops: Sequence[str] | None = None
    method: str = "forward"
    prefix: str = "backbone"
    name: str | None = None
    require: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    static_where_fixed: bool = False
    serving: Serving | None = None
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Refuse what is of another type; what `dynamic` says is read where the model is."""
        _check(self, "calls", (tuple, list), "a list of cgtool.ExampleCall")
        for call in self.calls:
            if not isinstance(call, ExampleCall):
                raise _wrong(self, "calls[...]", call, "a cgtool.ExampleCall")
        for name in ("splitting_ops", "notes"):
            _check(self, name, (tuple, list, type(None)), "a list of strings")
        for name in ("method", "prefix"):
            _check(self, name, str, "a string")
        _check(self, "require", Mapping, 'a dict, such as {"batch": (1, 8)}')
        for name, bounds in self.require.items():
            if not (isinstance(bounds, (tuple, list)) and [type(bound) for bound in bounds] == [int, int]):
                raise _wrong(self, f"require[{name!r}]", bounds, "the smallest and the largest size, such as (1, 8)")


def _check(record: Any, name: str, types: Any, form: str) -> None:
    value = getattr(record, name)
    if not isinstance(value, types):
        raise _wrong(record, name, value, form)


def _wrong(record: Any, name: str, value: object, form: str) -> ModelError:
    place, kind = f"{type(record).__name__}.{name}", type(value).__qualname__
    return ModelError(f"{place} is of the type {kind}. Give {form}.", path=place, expected=form, actual=kind)
