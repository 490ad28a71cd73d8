"""The decode step of a causal language model of transformers: its key-value cache has one length, and is arguments.

`StaticCacheStep` is what is traced: the model around a cache whose tensors it is given, which it writes to in place.
`generating` puts what was compiled of it in the model's place, for `generate()`::

    generate() ──▶ copy of the model ──▶ StaticCacheForward ──▶ LoadedModel of a StaticCacheStep
                   (weights shared)      takes a StaticCache     takes its tensors by name

Tensors by name: `position_ids` where the model takes them; `mask`, or `mask_<kind>` where layers differ in kind
(batch, 1, seq, length); `key_<i>` and `value_<i>` (batch, heads, length, width), and `length_<i>`, the number of tokens
in them, of layer i. Needs transformers, and is imported for its models alone.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_outputs import CausalLMOutputWithPast

from cgtool.errors import GuardError, ModelError, UsageError
from cgtool.model import ExampleCall, ModelSpec
from cgtool.plan.pieces import TensorMeta
from cgtool.plan.records import Plan
from cgtool.runtime.call import LoadedModel
from cgtool.runtime.find import Found
from cgtool.runtime.otherwise import AnyCall, Otherwise

PREFIX: Final = "static_cache"
#: How many tokens a cache holds where nobody says, and the model takes as many.
USUAL_LENGTH: Final = 2048
#: The sizes of the example: neither 0 nor 1.
_BATCH: Final = 2
_SEQ: Final = 16

#: Arguments of a call that a step takes, or that say nothing where there is a cache.
_TAKEN: Final = frozenset(
    {"input_ids", "position_ids", "attention_mask", "past_key_values", "use_cache", "logits_to_keep", "return_dict"}
)


#: How many dimensions a mask has that says which tokens count, and one that attention takes.
_OF_TOKENS: Final = 2
_OF_SCORES: Final = 4
#: What a configuration may ask for that a step does not give.
_WANTED: Final = ("output_attentions", "output_hidden_states", "output_router_logits")


class StaticCacheStep(nn.Module):
    """A causal language model around a static cache whose tensors are its arguments; returns logits.

    Args:
        model: The model; its forward is what runs.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        takes = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in takes
        #: Whether it gives the logits of the last token alone, which is all that `generate()` asks for.
        self.keeps_last = "logits_to_keep" in takes
        self.eval()

    def forward(self, input_ids: torch.Tensor, **tensors: torch.Tensor) -> torch.Tensor:
        """Run the model on tokens that follow those in the cache.

        Shapes:
            input_ids: (batch, seq)
            logits: (batch, 1, vocabulary), or (batch, seq, vocabulary) of a model that takes no `logits_to_keep`
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
        more: dict[str, Any] = {"position_ids": tensors["position_ids"]} if self.takes_positions else {}
        if self.keeps_last:
            more["logits_to_keep"] = 1
        output = self.model.forward(  # its hooks run around the compiled step
            input_ids=input_ids,
            attention_mask=masks or tensors.get("mask"),
            past_key_values=cache,
            use_cache=True,
            **more,
        )
        logits: torch.Tensor = output.logits
        return logits


def checked(model: Any) -> Any:
    """Return a model that can have such a step.

    Raises:
        ModelError: It is no causal language model of transformers.
    """
    can_generate = getattr(model, "can_generate", None)
    if can_generate is None or not can_generate() or getattr(model.config, "is_encoder_decoder", False):
        kind = type(model).__name__
        msg = (
            f"A static cache is for a causal language model of transformers, and {kind} is none. Hand over what "
            "AutoModelForCausalLM returns."
        )
        raise ModelError(msg, path="cache", expected="a causal language model", actual=kind)
    return model


def length_refused(length: int | None, found: Found) -> tuple[str, ...]:
    """Say why an entry does not serve a cache of `length` tokens; any length serves None."""
    held = _length_of(found.plan)
    if length is None or length == held:
        return ()
    return (f"its cache holds {held} tokens, and one of {length} is asked for",)


def static_cache_spec(model: nn.Module, length: int | None = None) -> ModelSpec:
    """Return the decode step of a model as what is compiled: prefill and decode are variants of one example call.

    Args:
        model: A causal language model of transformers, on any device, the meta device included.
        length: How many tokens the cache holds, prompt and answer; None: what the model takes, 2048 at most.

    Raises:
        ModelError: It is no such model, or its cache is more than keys and values.
        UsageError: It takes fewer tokens.
    """
    config: Any = checked(model).config
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    limit = limit if isinstance(limit, int) and limit > 0 else None
    length = min(limit or USUAL_LENGTH, USUAL_LENGTH) if length is None else length
    if length < 1 or (limit is not None and length > limit):
        msg = f"A cache of {length} tokens does not fit {type(model).__name__}, which takes 1 to {limit or 'any'}."
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
    for name, dtype in _masks(model, cache).items():
        kwargs[name] = _causal(torch.zeros((), dtype=torch.int64, device=device), (_BATCH, seq, length), dtype)
        dynamic[name] = {0: "batch", 2: "seq"}
    for name, tensor in _tensors(cache):
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
    """Return a cache of one sequence after one token: each layer knows its shapes.

    Raises:
        ModelError: A layer keeps something else than keys and values, or the model does not run with such a cache.
    """
    config: Any = model.config
    cache = StaticCache(config=config.get_text_config(decoder=True), max_cache_len=length)
    kinds = {type(layer).__name__ for layer in cache.layers if not _is_plain(layer)}
    if kinds:
        msg = f"The cache of {type(model).__name__} has {', '.join(sorted(kinds))}, and a static one here has keys and "
        msg += "values alone. Compile the model without --cache."
        raise ModelError(msg, path="cache", actual=sorted(kinds))
    _renew(cache, length)
    ids = torch.zeros((1, 1), dtype=torch.int64, device=next(model.parameters()).device)
    try:
        with torch.no_grad(), _experts_of_any_dtype(model):
            model(input_ids=ids, past_key_values=cache, use_cache=True)
    except Exception as error:  # the code of a model raises what it likes
        msg = f"{type(model).__name__} does not run with a static cache: {type(error).__name__}: {error}"
        raise ModelError(msg, path="cache") from error
    return cache


@contextmanager
def _experts_of_any_dtype(model: Any) -> Iterator[None]:
    """Run experts in a way that fake tensors of every dtype can take; transformers chooses among several."""
    before = model.get_experts_implementation() if hasattr(model, "get_experts_implementation") else {}
    grouped = "grouped_mm" in before.values() if isinstance(before, Mapping) else False
    if grouped:
        model.set_experts_implementation({k: "batched_mm" if v == "grouped_mm" else v for k, v in before.items()})
    try:
        yield
    finally:
        if grouped:
            model.set_experts_implementation(before)


def _is_plain(layer: Any) -> bool:
    return type(layer) in (StaticLayer, StaticSlidingWindowLayer)


def _renew(cache: Any, length: int) -> None:
    """Give an empty cache layers that hold `length` tokens each: what a window leaves out, the masks leave out."""
    cache.layers = [StaticLayer(max_cache_len=length) for _ in cache.layers]


def _tensors(cache: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for index, layer in enumerate(cache.layers):
        yield f"key_{index}", layer.keys
        yield f"value_{index}", layer.values
        yield f"length_{index}", layer.cumulative_length


def _masks(model: nn.Module, cache: Any) -> dict[str, torch.dtype]:
    """Return the masks that the model is given, by the names of a step's arguments, with their dtypes."""
    named = _named_masks(_masks_for(model, cache, (1, 1), next(model.parameters()).device))
    missing = [name for name, mask in named.items() if not isinstance(mask, torch.Tensor) or mask.dim() != _OF_SCORES]
    if missing:
        msg = (
            f"The attention of {type(model).__name__} takes no mask over the cache "
            f"({getattr(model.config, '_attn_implementation', None)}). Choose attn_implementation='sdpa'."
        )
        raise ModelError(msg, path="attn_implementation", expected="sdpa")
    return {name: mask.dtype for name, mask in named.items()}


def _masks_for(
    model: nn.Module, cache: Any, shape: tuple[int, int], device: torch.device, **given: torch.Tensor | None
) -> Any:
    """Return the masks that `generate()` makes for a call with this cache."""
    create: Callable[..., Any] = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    arguments = {"attention_mask": None, "position_ids": None, **given}
    embeds = torch.empty((*shape, 0), dtype=dtype, device=device)
    return create(config=model.config, inputs_embeds=embeds, past_key_values=cache, **arguments)


def _named_masks(masks: Any) -> dict[str, Any]:
    if isinstance(masks, Mapping):  # in the order of a set, which another process has otherwise
        return {f"mask_{kind}": mask for kind, mask in sorted(masks.items())}
    return {"mask": masks}


def _causal(past: torch.Tensor, sizes: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return the mask that lets each token see itself and all before it.

    Args:
        past: How many tokens the cache holds.
        sizes: Batch, tokens, and the length of the cache.
        dtype: Of the mask: bool, or what is added to the scores.
    """
    batch, seq, length = sizes
    rows = torch.arange(seq, device=past.device) + past
    seen = torch.arange(length, device=past.device) <= rows[:, None]
    if dtype != torch.bool:
        seen = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    return seen.expand(batch, 1, seq, length).contiguous()


class StaticCacheForward:
    """Takes what the forward of a model takes, with a `StaticCache`, and runs its compiled step.

    Args:
        model: The model.
        loaded: Its step, compiled.
    """

    def __init__(self, model: nn.Module, loaded: LoadedModel) -> None:
        self._model = model
        self._loaded = loaded
        self._signature = inspect.signature(model.forward)
        self._output = _output_class(model)
        step: Any = loaded.module
        self._takes_positions: bool = step.takes_positions
        self._keeps_last: bool = step.keeps_last
        self._layers = _layers_of(loaded.plan)
        self.length = _length_of(loaded.plan)
        probe = StaticCache(config=step.model.config.get_text_config(decoder=True), max_cache_len=1)
        _renew(probe, 1)
        self._masks = _masks(model, probe)
        #: How many tokens each cache holds at most: asking a GPU for it would wait for all that it has to do.
        self._held: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled step.

        Raises:
            GuardError: The call brings another cache than was compiled for, or something that a step does not take.
        """
        given = {**self._signature.bind_partial(*args).arguments, **kwargs} if args else kwargs
        ids: Any = given.get("input_ids")
        cache: Any = given.get("past_key_values")
        if isinstance(ids, torch.Tensor):
            self.fit(cache, ids)
        refusal = self._refusal(given)
        if refusal is not None:
            if isinstance(cache, StaticCache):
                self._held.pop(cache, None)  # the model itself may write to it now
            raise GuardError(refusal, path="past_key_values")
        logits = self._loaded(ids, **dict(self._arguments(given, ids, cache)))
        self._held[cache] += ids.shape[1]
        return self._output(logits=logits, past_key_values=cache)

    attempt = __call__

    def fit(self, cache: Any, ids: torch.Tensor) -> None:
        """Give a static cache that nobody wrote to the length that was compiled, unless it must hold more."""
        if not isinstance(cache, StaticCache) or not all(map(_is_plain, cache.layers)):
            return
        layers: list[Any] = cache.layers
        is_new = len(layers) == len(self._layers) and not any(layer.is_initialized for layer in layers)
        if not is_new or cache.get_max_length() > self.length:
            return
        _renew(cache, self.length)
        fresh: Any = cache.layers
        for layer, shapes in zip(fresh, self._layers, strict=True):
            # Without a token: the layer asks for heads, width and dtype alone.
            layer.lazy_initialization(
                *(
                    torch.empty((ids.shape[0], heads, 0, width), dtype=getattr(torch, dtype), device=ids.device)
                    for heads, width, dtype in shapes
                )
            )

    def _refusal(self, given: Mapping[str, Any]) -> str | None:
        if any(part.training for part in self._model.children()):  # which the copy shares
            return "The model is in training mode. Compiled entries are for inference: call model.eval() first."
        cache = given.get("past_key_values")
        if not isinstance(cache, StaticCache):
            kind = "no cache" if cache is None else f"a {type(cache).__name__}"
            return (
                f"The call brings {kind}, and this was compiled for a static cache of {self.length} tokens. Call "
                'generate() with cache_implementation="static", or without naming one.'
            )
        held = cache.get_max_length()
        if held > self.length:
            return (
                f"The cache holds {held} tokens, and this was compiled for {self.length}. Ask for fewer new tokens, "
                f"or warm with --cache-length {held}."
            )
        if held != self.length or not all(type(layer) is StaticLayer for layer in cache.layers):
            return (
                f"The cache was filled by another model, or for {held} tokens where this was compiled for "
                f"{self.length}. Hand over an empty one."
            )
        others = [name for name, value in given.items() if name not in _TAKEN and value not in (None, False)]
        if others or given.get("input_ids") is None:
            what = f"brings {', '.join(others)}" if others else "brings no input_ids"
            return f"The call {what}: a compiled step takes ids, their positions, a mask and a cache."
        config: Any = self._model.config
        wanted = [name for name in _WANTED if given.get(name) is None and getattr(config, name, False)]
        if wanted or not given.get("return_dict", True):
            what = f"{wanted[0]} of the model's configuration" if wanted else "return_dict=False"
            return f"{what} asks for another output than logits and a cache, which are what a compiled step gives."
        masks = given.get("attention_mask")
        if isinstance(masks, torch.Tensor) and masks.dim() > _OF_TOKENS and "mask" not in self._masks:
            kinds = " and ".join(name[5:] for name in self._masks)
            return f"The layers differ in their masks: pass a dict of {kinds}, or a mask of tokens."
        seq = given["input_ids"].shape[1]
        if self._held.get(cache, self.length) + seq > self.length:
            self._held[cache] = int(cache.get_seq_length())  # it may have been emptied
        if (asked := self._held[cache] + seq) > self.length:
            return (
                f"The cache would hold {asked} tokens, and this was compiled for {self.length}. Warm with a longer one."
            )
        if self._keeps_last and seq > 1 and not _is_one(given.get("logits_to_keep")):
            return "A compiled step gives the logits of the last token alone. Pass logits_to_keep=1."
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
        if masks is None or (isinstance(masks, torch.Tensor) and masks.dim() == _OF_TOKENS):
            masks = _masks_for(
                self._model,
                cache,
                (batch, seq),
                ids.device,
                attention_mask=masks,
                position_ids=given.get("position_ids"),
            )
        named = _named_masks(masks)
        for name, dtype in self._masks.items():
            mask = named.get(name)
            # transformers leaves out a mask that is causal and no more; a program takes one all the same.
            yield name, _causal(past, (batch, seq, self.length), dtype) if mask is None else mask.contiguous()
        yield from _tensors(cache)


def _output_class(model: Any) -> Any:
    """Return the class of what a model returns, by the annotation of its forward."""
    try:
        hint = typing.get_type_hints(model.forward).get("return")
    except Exception:  # noqa: BLE001 - an annotation may be any code
        hint = None
    found = (one for one in (hint, *typing.get_args(hint)) if isinstance(one, type) and dataclasses.is_dataclass(one))
    fields = {"logits", "past_key_values"}
    return next((one for one in found if fields <= {f.name for f in dataclasses.fields(one)}), CausalLMOutputWithPast)


def _is_one(value: Any) -> bool:
    return isinstance(value, int) and value == 1


def _layers_of(plan: Plan) -> list[tuple[tuple[int, int, str], ...]]:
    """Return (heads, width, dtype) of the keys and of the values of each layer, as they were compiled."""
    metas = _metas_of(plan)
    return [
        tuple((int(meta.shape[1]), int(meta.shape[3]), meta.dtype) for meta in (metas["key", i], metas["value", i]))
        for i in range(len(metas) // 2)
    ]


def _length_of(plan: Plan) -> int:
    """Return how many tokens the cache holds that was compiled for."""
    return int(_metas_of(plan)["key", 0].shape[2])


def _metas_of(plan: Plan) -> dict[tuple[str, int], TensorMeta]:
    metas = {}
    for item in plan.variants[0].inputs:
        if found := re.fullmatch(r'arg:tensors\["(key|value)_(\d+)"\]', item.source):
            metas[found[1], int(found[2])] = item.meta
    return metas


def generating(model: Any, loaded: LoadedModel, otherwise: Otherwise) -> nn.Module:
    """Return a copy of a model that shares its weights and whose forward is its compiled step, for `generate()`.

    Args:
        model: The model, which is left as it is.
        loaded: Its `StaticCacheStep`, compiled.
        otherwise: What a call gets that the step does not serve: "raise", or "eager" for the model itself.
    """
    step: Any = StaticCacheForward(model, loaded)
    name = type(model).__qualname__
    served: Any = copy.copy(model)

    def itself(*args: Any, **kwargs: Any) -> Any:
        return model.forward(*args, **kwargs)  # its hooks run around the copy's

    call = step if otherwise == "raise" else AnyCall(model, itself, name, otherwise, loaded=step)
    prepare = types.MethodType(type(model).prepare_inputs_for_generation, served)

    @functools.wraps(model.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    @functools.wraps(prepare)
    def prepare_inputs(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        step.fit(kwargs.get("past_key_values"), input_ids)  # masks are made for the cache as it is now
        return prepare(input_ids, *args, **kwargs)

    @functools.wraps(model.generate)
    def generate(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("past_key_values") is None:
            if (asked := kwargs.get("generation_config")) is None:
                kwargs.setdefault("cache_implementation", "static")
            elif asked.cache_implementation is None:
                kwargs["generation_config"] = copy.copy(asked)
                kwargs["generation_config"].cache_implementation = "static"
        return type(model).generate(served, *args, **kwargs)

    served.forward = forward
    served.generate = generate
    served.prepare_inputs_for_generation = prepare_inputs
    # Asked for by generate() where torch would compile the model.
    served.get_compiled_call = lambda _config: served.__call__
    served.recheck = loaded.recheck
    return served  # type: ignore[no-any-return]  # a copy of a module
