"""The decode step of a transformers causal language model with a key-value cache of fixed length.

`StaticCacheStep` is the traced module: it takes the tensors of the cache as arguments, and writes to them in place.
`with_compiled_step` returns a copy of the model whose `generate()` runs the compiled step::

    generate() ──▶ copy of the model ──▶ StaticCacheForward ──▶ LoadedModel of a StaticCacheStep
                   (weights shared)      takes a StaticCache     takes its tensors by name

The named tensors are `position_ids`, if the model takes it; `mask`, or a `mask_<kind>` for each kind of layer (batch,
1, seq, length); and for each layer i, `key_<i>` and `value_<i>` (batch, heads, length, width) and `length_<i>`, the
number of tokens in the cache. Requires transformers, and is imported only for its models.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import re
import types
import typing
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from transformers.cache_utils import StaticCache, StaticLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from cgtool.errors import GuardError, ModelError, UsageError
from cgtool.model import ExampleCall, ModelSpec
from cgtool.plan.pieces import TensorMeta
from cgtool.plan.records import Plan
from cgtool.runtime.call import LoadedModel
from cgtool.runtime.find import MatchedEntry
from cgtool.runtime.otherwise import AnyCall, Otherwise
from cgtool.runtime.static_tensors import (
    CACHE_NAMES,
    cache_in,
    cache_name,
    causal_mask,
    is_plain,
    mask_dtypes,
    masks_for,
    named_masks,
    renew,
    tensors_of,
)

PREFIX: Final = "static_cache"
#: The default length of a cache in tokens, unless the model's limit is lower.
DEFAULT_LENGTH: Final = 2048
#: The sizes of the example, which must not be 0 or 1.
_BATCH: Final = 2
_SEQ: Final = 16

#: Arguments that a step takes, or that have no effect with a cache.
_ACCEPTED: Final = frozenset(
    {"input_ids", "position_ids", "attention_mask", *CACHE_NAMES, "use_cache", "logits_to_keep", "return_dict"}
)
#: The number of dimensions of a padding mask.
_PADDING_MASK_DIMS: Final = 2
#: Configuration fields that request outputs a step does not return.
_EXTRA_OUTPUTS: Final = ("output_attentions", "output_hidden_states", "output_router_logits")


class StaticCacheStep(nn.Module):
    """A causal language model around a static cache whose tensors are its arguments; returns logits.

    Args:
        model: The model whose forward runs.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        takes = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in takes
        #: Whether it returns only the logits of the last token, which are the ones that `generate()` needs.
        self.keeps_last = "logits_to_keep" in takes
        self.cache_name = cache_name(takes)
        self.eval()

    def forward(self, input_ids: torch.Tensor, **tensors: torch.Tensor) -> torch.Tensor:
        """Run the model on tokens that follow those in the cache.

        Shapes:
            input_ids: (batch, seq)
            logits: (batch, 1, vocabulary), or (batch, seq, vocabulary) if the model has no `logits_to_keep`
        """
        layers: list[Any] = []
        while (key := tensors.get(f"key_{len(layers)}")) is not None:
            layer: Any = StaticLayer(max_cache_len=key.shape[2])
            layer.keys, layer.values = key, tensors[f"value_{len(layers)}"]
            layer.cumulative_length = tensors[f"length_{len(layers)}"]
            layer.dtype, layer.device, layer.is_initialized = key.dtype, key.device, True
            layers.append(layer)
        cache = StaticCache.__new__(StaticCache)
        super(StaticCache, cache).__init__(layers=layers)
        masks = {name[5:]: mask for name, mask in tensors.items() if name[:5] == "mask_"}
        more: dict[str, Any] = {self.cache_name: cache}
        if self.takes_positions:
            more["position_ids"] = tensors["position_ids"]
        if self.keeps_last:
            more["logits_to_keep"] = 1
        output = self.model.forward(  # not __call__: the model's hooks run around the compiled step
            input_ids=input_ids,
            attention_mask=masks or tensors.get("mask"),
            use_cache=True,
            **more,
        )
        logits: torch.Tensor = output.logits
        return logits


def check_model(model: Any) -> Any:
    """Return the model after checking that it can have a static cache.

    Raises:
        ModelError: It is not a causal language model of transformers.
    """
    can_generate = getattr(model, "can_generate", None)
    if can_generate is None or not can_generate() or getattr(model.config, "is_encoder_decoder", False):
        kind = type(model).__name__
        msg = (
            f"A static cache requires a causal language model of transformers; {kind} is not one. Pass a model from "
            "AutoModelForCausalLM."
        )
        raise ModelError(msg, path="cache", expected="a causal language model", actual=kind)
    return model


def length_mismatch(length: int | None, found: MatchedEntry) -> tuple[str, ...]:
    """Return why an entry does not match a cache of `length` tokens; None accepts any length."""
    compiled = _length_of(found.plan)
    if length is None or length == compiled:
        return ()
    return (f"it was compiled for a cache of {compiled} tokens, and {length} are requested",)


def static_cache_spec(model: nn.Module, length: int | None = None) -> ModelSpec:
    """Return the spec that compiles a model's decode step; prefill and decode are variants of one example call.

    Args:
        model: A causal language model of transformers, on any device including meta.
        length: The length of the cache in tokens, for prompt and answer together; None means the model's limit, at most
            2048.

    Raises:
        ModelError: It is not such a model, or its cache holds more than keys and values.
        UsageError: The model's limit is lower than `length`.
    """
    config: Any = check_model(model).config
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    limit = limit if isinstance(limit, int) and limit > 0 else None
    length = min(limit or DEFAULT_LENGTH, DEFAULT_LENGTH) if length is None else length
    if length < 1 or (limit is not None and length > limit):
        allowed = f"from 1 to {limit} tokens" if limit else "at least 1 token"
        msg = f"The cache length {length} is out of range for {type(model).__name__}, which takes {allowed}."
        raise UsageError(msg, path="cache_length", expected=limit, actual=length)
    cache = _filled(model, length)
    seq = min(_SEQ, length)
    device = next(model.parameters()).device
    kwargs: dict[str, torch.Tensor] = {
        "input_ids": torch.arange(_BATCH * seq, device=device).remainder(32).view(_BATCH, seq)
    }
    dynamic: dict[str, dict[int, Any]] = {"input_ids": {0: "batch", 1: ("seq", 1, length)}}
    step = StaticCacheStep(model)
    if step.takes_positions:
        kwargs["position_ids"] = torch.arange(seq, device=device).repeat(_BATCH, 1)
        dynamic["position_ids"] = {0: "batch", 1: "seq"}
    for name, dtype in mask_dtypes(model, cache).items():
        kwargs[name] = causal_mask(torch.zeros((), dtype=torch.int64, device=device), (_BATCH, seq, length), dtype)
        dynamic[name] = {0: "batch", 2: "seq"}
    for name, tensor in tensors_of(cache):
        shape = (_BATCH, *tensor.shape[1:]) if tensor.dim() else ()
        kwargs[name] = torch.zeros(shape, dtype=tensor.dtype, device=device)
        dynamic |= {name: {0: "batch"}} if tensor.dim() else {}
    return ModelSpec(
        module=step,
        calls=[ExampleCall(kwargs=kwargs, name="step")],
        dynamic=dynamic,
        prefix=PREFIX,
        name=type(model).__name__,
    )


def _filled(model: nn.Module, length: int) -> Any:
    """Return a cache of one sequence after one token, in which every layer has its shapes.

    Raises:
        ModelError: A layer stores more than keys and values, or the model does not run with a static cache.
    """
    config: Any = model.config
    cache = StaticCache(config=config.get_text_config(decoder=True), max_cache_len=length)
    kinds = {type(layer).__name__ for layer in cache.layers if not is_plain(layer)}
    if kinds:
        msg = (
            f"The cache of {type(model).__name__} has layers of {', '.join(sorted(kinds))}; a static cache supports "
            "only keys and values. Compile the model without --cache."
        )
        raise ModelError(msg, path="cache", actual=sorted(kinds))
    renew(cache, length)
    ids = torch.zeros((1, 1), dtype=torch.int64, device=next(model.parameters()).device)
    try:
        with torch.no_grad(), _experts_of_any_dtype(model):
            named = {cache_name(inspect.signature(model.forward).parameters): cache}
            model(input_ids=ids, use_cache=True, **named)
    except Exception as error:  # a model's code may raise any error
        msg = f"{type(model).__name__} does not run with a static cache ({type(error).__name__}: {error}). "
        msg += "Compile the model without --cache."
        raise ModelError(msg, path="cache") from error
    return cache


@contextmanager
def _experts_of_any_dtype(model: Any) -> Iterator[None]:
    """Use an experts implementation of transformers that supports fake tensors of every dtype."""
    before = model.get_experts_implementation() if hasattr(model, "get_experts_implementation") else {}
    grouped = "grouped_mm" in before.values() if isinstance(before, Mapping) else False
    if grouped:
        model.set_experts_implementation({k: "batched_mm" if v == "grouped_mm" else v for k, v in before.items()})
    try:
        yield
    finally:
        if grouped:
            model.set_experts_implementation(before)


class StaticCacheForward:
    """Runs the compiled step with the arguments of the model's forward and a `StaticCache`.

    Args:
        model: The model.
        loaded: The compiled step.
    """

    def __init__(self, model: nn.Module, loaded: LoadedModel) -> None:
        self._model = model
        self._loaded = loaded
        self._signature = inspect.signature(model.forward)
        self._output = _output_class(model)
        self._cache_name = cache_name(_field_names(self._output))
        step: Any = loaded.module
        self._takes_positions: bool = step.takes_positions
        self._keeps_last: bool = step.keeps_last
        self._layers = _layers_of(loaded.plan)
        self.length = _length_of(loaded.plan)
        probe = StaticCache(config=step.model.config.get_text_config(decoder=True), max_cache_len=1)
        renew(probe, 1)
        self._masks = mask_dtypes(model, probe)
        #: An upper bound of the tokens in each cache; reading the number from a GPU would synchronize with it.
        self._held: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled step.

        Raises:
            GuardError: The call's cache differs from the compiled one, or an argument is not supported by the step.
        """
        given = {**self._signature.bind_partial(*args).arguments, **kwargs} if args else kwargs
        ids: Any = given.get("input_ids")
        cache = cache_in(given)
        if isinstance(ids, torch.Tensor):
            self.fit(cache, ids)
        refusal = self._refusal(given)
        if refusal is not None:
            if isinstance(cache, StaticCache):
                self._held.pop(cache, None)  # the model itself may write to the cache after this
            raise GuardError(refusal, path=self._cache_name)
        logits = self._loaded(ids, **dict(self._arguments(given, ids, cache)))
        self._held[cache] += ids.shape[1]
        return self._output(logits=logits, **{self._cache_name: cache})

    attempt = __call__

    def fit(self, cache: Any, ids: torch.Tensor) -> None:
        """Resize an unused static cache to the compiled length, unless it must hold more."""
        if not isinstance(cache, StaticCache) or not all(map(is_plain, cache.layers)):
            return
        layers: list[Any] = cache.layers
        is_new = len(layers) == len(self._layers) and not any(layer.is_initialized for layer in layers)
        if not is_new or cache.get_max_length() > self.length:
            return
        renew(cache, self.length)
        fresh: Any = cache.layers
        for layer, shapes in zip(fresh, self._layers, strict=True):
            # Zero tokens: the layer reads only the batch, heads, width and dtype.
            layer.lazy_initialization(
                *(
                    torch.empty((ids.shape[0], heads, 0, width), dtype=getattr(torch, dtype), device=ids.device)
                    for heads, width, dtype in shapes
                )
            )

    def _refusal(self, given: Mapping[str, Any]) -> str | None:
        if any(child.training for child in self._model.children()):  # the copy has the same children
            return "The model is in training mode. Compiled models are for inference only: call model.eval() first."
        cache = cache_in(given)
        if not isinstance(cache, StaticCache):
            kind = "has no cache" if cache is None else f"has a {type(cache).__name__}"
            return (
                f"The call {kind}, but the model was compiled for a static cache of {self.length} tokens. Call "
                'generate() with cache_implementation="static", or leave it unset.'
            )
        max_length = cache.get_max_length()
        if max_length > self.length:
            return (
                f"The cache has room for {max_length} tokens, but the model was compiled for {self.length}. Generate "
                f"fewer tokens, or warm with --cache-length {max_length}."
            )
        if max_length != self.length or not all(type(layer) is StaticLayer for layer in cache.layers):
            return (
                f"The cache was filled by another model or has room for {max_length} tokens, but the model was "
                f"compiled for {self.length}. Pass an empty cache."
            )
        others = [name for name, value in given.items() if name not in _ACCEPTED and value not in (None, False)]
        if others or given.get("input_ids") is None:
            problem = f"passes {', '.join(others)}" if others else "has no input_ids"
            return f"The call {problem}. A compiled step takes only input_ids, position_ids, a mask and a cache."
        config: Any = self._model.config
        extra = [name for name in _EXTRA_OUTPUTS if given.get(name) is None and getattr(config, name, False)]
        if extra or not given.get("return_dict", True):
            cause = f"The model's configuration sets {extra[0]}" if extra else "The call passes return_dict=False"
            return f"{cause}. A compiled step returns only logits and a cache, as an output object: unset it."
        masks = given.get("attention_mask")
        if isinstance(masks, torch.Tensor) and masks.dim() > _PADDING_MASK_DIMS and "mask" not in self._masks:
            kinds = " and ".join(name[5:] for name in self._masks)
            return f"The model's layers use different masks. Pass a dict of {kinds}, or a 2-D padding mask."
        seq = given["input_ids"].shape[1]
        if self._held.get(cache, self.length) + seq > self.length:
            self._held[cache] = int(cache.get_seq_length())  # the cache may have been reset
        if (needed := self._held[cache] + seq) > self.length:
            return (
                f"The cache would need room for {needed} tokens, but the model was compiled for {self.length}. "
                "Generate fewer tokens, or warm with a longer --cache-length."
            )
        keep = given.get("logits_to_keep")
        if self._keeps_last and seq > 1 and not (isinstance(keep, int) and keep == 1):
            return "A compiled step returns only the logits of the last token. Pass logits_to_keep=1."
        return None

    def _arguments(self, given: Mapping[str, Any], ids: torch.Tensor, cache: Any) -> Iterator[tuple[str, torch.Tensor]]:
        batch, seq = ids.shape
        past = cache.layers[0].cumulative_length
        if self._takes_positions:
            positions = given.get("position_ids")
            if positions is None:
                positions = (torch.arange(seq, device=ids.device) + past)[None]
            yield "position_ids", positions.expand(batch, seq).contiguous()
        masks = given.get("attention_mask")
        if masks is None or (isinstance(masks, torch.Tensor) and masks.dim() == _PADDING_MASK_DIMS):
            masks = masks_for(
                self._model,
                cache,
                (batch, seq),
                ids.device,
                attention_mask=masks,
                position_ids=given.get("position_ids"),
            )
        named = named_masks(masks)
        for name, dtype in self._masks.items():
            mask = named.get(name)
            # transformers omits a purely causal mask, but the compiled program needs one.
            yield name, causal_mask(past, (batch, seq, self.length), dtype) if mask is None else mask.contiguous()
        yield from tensors_of(cache)


def _output_class(model: Any) -> Any:
    """Return the output class in the annotation of the model's forward, else `CausalLMOutputWithPast`."""
    try:
        hint = typing.get_type_hints(model.forward).get("return")
    except Exception:  # noqa: BLE001 - an annotation may be any code
        hint = None
    for candidate in (hint, *typing.get_args(hint)):
        if isinstance(candidate, type) and dataclasses.is_dataclass(candidate):
            fields = _field_names(candidate)
            if "logits" in fields and not fields.isdisjoint(CACHE_NAMES):
                return candidate
    return CausalLMOutputWithPast


def _field_names(cls: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def _layers_of(plan: Plan) -> list[tuple[tuple[int, int, str], ...]]:
    """Return the compiled (heads, width, dtype) of each layer's keys and of its values."""
    metas = _metas_of(plan)
    return [
        tuple((int(meta.shape[1]), int(meta.shape[3]), meta.dtype) for meta in (metas["key", i], metas["value", i]))
        for i in range(len(metas) // 2)
    ]


def _length_of(plan: Plan) -> int:
    """Return the length, in tokens, of the cache that was compiled for."""
    return int(_metas_of(plan)["key", 0].shape[2])


def _metas_of(plan: Plan) -> dict[tuple[str, int], TensorMeta]:
    metas = {}
    for item in plan.variants[0].inputs:
        if match := re.fullmatch(r'arg:tensors\["(key|value)_(\d+)"\]', item.source):
            metas[match[1], int(match[2])] = item.meta
    return metas


def with_compiled_step(model: Any, loaded: LoadedModel, otherwise: Otherwise) -> nn.Module:
    """Return a copy of a model that shares its weights and generates with the compiled step.

    Args:
        model: The model, which is not modified.
        loaded: The compiled `StaticCacheStep` of the model.
        otherwise: How to handle a call that the step does not accept: "raise", or "eager" for the model itself.
    """
    step: Any = StaticCacheForward(model, loaded)
    name = type(model).__qualname__
    served: Any = copy.copy(model)

    def eager(*args: Any, **kwargs: Any) -> Any:
        return model.forward(*args, **kwargs)  # not __call__: the copy's __call__ runs the hooks

    call = step if otherwise == "raise" else AnyCall(model, eager, name, otherwise, loaded=step)
    prepare = types.MethodType(type(model).prepare_inputs_for_generation, served)

    @functools.wraps(model.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    @functools.wraps(prepare)
    def prepare_inputs(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        step.fit(cache_in(kwargs), input_ids)  # before masks are created for the cache
        return prepare(input_ids, *args, **kwargs)

    @functools.wraps(model.generate)
    def generate(*args: Any, **kwargs: Any) -> Any:
        if cache_in(kwargs) is None:
            if (config := kwargs.get("generation_config")) is None:
                kwargs.setdefault("cache_implementation", "static")
            elif config.cache_implementation is None:
                kwargs["generation_config"] = copy.copy(config)
                kwargs["generation_config"].cache_implementation = "static"
        return type(model).generate(served, *args, **kwargs)

    served.forward = forward
    served.generate = generate
    served.prepare_inputs_for_generation = prepare_inputs
    # generate() calls this instead of the model in cases where it would use torch.compile.
    served.get_compiled_call = lambda _config: served.__call__
    served.recheck = loaded.recheck
    return served  # type: ignore[no-any-return]  # a copy of a module
