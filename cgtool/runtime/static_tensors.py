"""The tensors of a static cache of transformers, the masks that go with it, and what each version calls the cache.

Shared by the step that is compiled and by what calls it. Requires transformers, and is imported only for its models.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer
from transformers.masking_utils import create_masks_for_generate

from cgtool.errors import ModelError

#: What transformers calls the cache, in arguments and outputs: since 5.24, and before.
CACHE_NAMES: Final = ("cache", "past_key_values")
#: The number of dimensions of a mask that attention takes.
_ATTENTION_MASK_DIMS: Final = 4


def is_plain(layer: Any) -> bool:
    """Return whether a layer of a cache stores keys and values only."""
    return type(layer) in (StaticLayer, StaticSlidingWindowLayer)


def renew(cache: Any, length: int) -> None:
    """Replace the layers of an empty cache by layers of `length` tokens; masks take the place of sliding windows."""
    cache.layers = [StaticLayer(max_cache_len=length) for _ in cache.layers]


def tensors_of(cache: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a cache with the names of a step's arguments."""
    for index, layer in enumerate(cache.layers):
        yield f"key_{index}", layer.keys
        yield f"value_{index}", layer.values
        yield f"length_{index}", layer.cumulative_length


def mask_dtypes(model: nn.Module, cache: Any) -> dict[str, torch.dtype]:
    """Return the dtypes of the model's masks, by the names of a step's arguments."""
    named = named_masks(masks_for(model, cache, (1, 1), next(model.parameters()).device))
    if any(not isinstance(mask, torch.Tensor) or mask.dim() != _ATTENTION_MASK_DIMS for mask in named.values()):
        implementation = getattr(model.config, "_attn_implementation", None)
        msg = (
            f"The attention of {type(model).__name__} ({implementation}) does not take a mask over the cache. Use "
            "attn_implementation='sdpa'."
        )
        raise ModelError(msg, path="attn_implementation", expected="sdpa")
    return {name: mask.dtype for name, mask in named.items()}


def masks_for(
    model: nn.Module, cache: Any, shape: tuple[int, int], device: torch.device, **given: torch.Tensor | None
) -> Any:
    """Return the masks that `generate()` creates for a call with this cache."""
    create: Callable[..., Any] = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    named = {cache_name(inspect.signature(create).parameters): cache}
    arguments = {"attention_mask": None, "position_ids": None, **named, **given}
    embeds = torch.empty((*shape, 0), dtype=dtype, device=device)
    return create(config=model.config, inputs_embeds=embeds, **arguments)


def named_masks(masks: Any) -> dict[str, Any]:
    """Return masks by the names of a step's arguments; `masks` is one mask, or {kind of layer: mask}."""
    if isinstance(masks, Mapping):  # sorted: its order is that of a set, which differs between processes
        return {f"mask_{kind}": mask for kind, mask in sorted(masks.items())}
    return {"mask": masks}


def causal_mask(past: torch.Tensor, sizes: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return a causal mask: each token attends to itself and to all tokens before it.

    Args:
        past: The number of tokens in the cache.
        sizes: Batch, number of new tokens, and length of the cache.
        dtype: bool, or the dtype of a mask that is added to the scores.
    """
    batch, seq, length = sizes
    rows = torch.arange(seq, device=past.device) + past
    seen = torch.arange(length, device=past.device) <= rows[:, None]
    if dtype != torch.bool:
        seen = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    return seen.expand(batch, 1, seq, length).contiguous()


def cache_name(names: Container[str]) -> str:
    """Return what the cache is called among the arguments of a function, or the fields of an output."""
    return next((name for name in CACHE_NAMES if name in names), CACHE_NAMES[-1])


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among a call's arguments, under either of its names, or None."""
    return next((arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None), None)
