"""Records that describe a model: the module, its example calls and its dynamic dimensions. Must not import torch.

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
    """An example call of the model, which is traced into one or more variants.

    Args:
        args: Positional arguments, without the module itself.
        kwargs: Keyword arguments.
        name: A name for reports, such as "prefill" or "decode".

    Raises:
        ModelError: A field has the wrong type.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    name: str = "default"

    def __post_init__(self) -> None:
        """Check the fields' types, for instance that `args` is not a bare tensor."""
        _check_type(self, "args", (tuple, list), "a tuple, such as (x,)")
        _check_type(self, "kwargs", Mapping, 'a dict, such as {"x": x}')
        _check_type(self, "name", str, "a string")


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How `cgtool check` serves a model. Compiling does not use it.

    Args:
        runner: Takes what `cgtool.load` returned (at level 0 the module itself) and a `CompilationConfig`. Returns a
            `cgtool.ModelRunner` for it with a fresh KV cache.
        token_embeddings: The names of the modules that embed token ids.
    """

    runner: Callable[[Any, Any], Any]
    token_embeddings: Sequence[str] = ("embed_tokens",)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model and how it is called.

    Args:
        module: The `torch.nn.Module`.
        calls: One or more example calls.
        dynamic: The dimensions that change from call to call: `{"input_ids": {0: "batch", 1: ("seq", 1, 4096)}}`.
            Dimensions with the same name have the same size. Bounds are inclusive; the default is 1 to no limit.
        splitting_ops: The ops to split at. None means the attention ops known to cgtool and those registered with
            `splitting=True`, as far as the graph contains them.
        method: The method of the module to compile.
        prefix: The compiled part of the model ("backbone", "eagle_head", ...).
        name: The name that `inspect` shows. Defaults to the name of the class.
        require: Dynamic dimension → (smallest, largest) size. Further variants are traced until all of these sizes at
            which the model itself runs are covered.
        static_where_fixed: Compile a dynamic dimension that the model's code fixes for the example's size only, with
            a note, instead of raising an error.
        serving: How `cgtool check` serves the model.
        notes: Sentences to show to the user when the model is warmed.

    Raises:
        ModelError: A field has the wrong type.
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
        """Check the fields' types; `cgtool.dims` checks `dynamic`."""
        _check_type(self, "calls", (tuple, list), "a list of cgtool.ExampleCall")
        for call in self.calls:
            if not isinstance(call, ExampleCall):
                raise _type_error(self, "calls[...]", call, "a cgtool.ExampleCall")
        for name in ("splitting_ops", "notes"):
            _check_type(self, name, (tuple, list, type(None)), "a list of strings")
        for name in ("method", "prefix"):
            _check_type(self, name, str, "a string")
        _check_type(self, "require", Mapping, 'a dict, such as {"batch": (1, 8)}')
        for name, bounds in self.require.items():
            if not (isinstance(bounds, (tuple, list)) and [type(bound) for bound in bounds] == [int, int]):
                form = "a pair of the smallest and the largest size, such as (1, 8)"
                raise _type_error(self, f"require[{name!r}]", bounds, form)


def _check_type(record: Any, name: str, types: Any, form: str) -> None:
    value = getattr(record, name)
    if not isinstance(value, types):
        raise _type_error(record, name, value, form)


def _type_error(record: Any, name: str, value: object, form: str) -> ModelError:
    place, kind = f"{type(record).__name__}.{name}", type(value).__qualname__
    return ModelError(f"{place} must be {form}, not {kind}.", path=place, expected=form, actual=kind)
