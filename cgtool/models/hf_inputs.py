"""Example inputs for a model of transformers, derived from its signature, its docstring and its config.

transformers documents each argument of `forward` with its dtype and a shape whose dimensions have names. The names are
looked up in the config; sizes that neither gives have default values. The example has the main input, the arguments
without a default, the decoder's ids of an encoder-decoder, and the second input of a model with two towers.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from cgtool.errors import ModelError, UsageError

#: The sizes of the example: small, and neither 0 nor 1.
_BATCH: Final = 2
_SEQ: Final = 16
#: The `--arg` names that configure the example.
OPTIONS: Final = ("attention_mask", "image_size")

#: Shapes of arguments, used if the docstring has none.
_DEFAULT_SHAPES: Final[Mapping[str, str]] = {
    "input_ids": "batch_size, sequence_length",
    "decoder_input_ids": "batch_size, target_length",
    "attention_mask": "batch_size, sequence_length",
    "decoder_attention_mask": "batch_size, target_length",
    "token_type_ids": "batch_size, sequence_length",
    "bbox": "batch_size, sequence_length, 4",
    "pixel_values": "batch_size, num_channels, height, width",
    "pixel_values_videos": "batch_size, num_frames, num_channels, height, width",
    "input_values": "batch_size, num_samples",
    "input_features": "batch_size, feature_size, sequence_length",
    "inputs_embeds": "batch_size, sequence_length, hidden_size",
    "past_values": "batch_size, context_length",
    "task_inputs": "batch_size, task_seq_len",
    "audio_mel": "batch_size, frames, num_mel_bins",
    "audio_mel_mask": "batch_size, frames",
}
#: Arguments whose documented shape is vague or wrong in some models, so that the default is used.
_MISDOCUMENTED: Final = frozenset(
    {"input_ids", "decoder_input_ids", "attention_mask", "decoder_attention_mask", "pixel_values_videos"}
)
#: For the name of a dimension: the config fields that give its size besides the field of the same name, and a default.
_DIM_SIZES: Final[Mapping[str, tuple[tuple[str, ...], int]]] = {
    "num_channels": (("in_channels", "in_chans", "num_input_channels"), 3),
    "num_input_channels": ((), 1),
    "channels": (("audio_channels", "num_channels"), 1),
    "audio_channels": ((), 1),
    "num_frames": (("frames_per_clip",), 8),
    "feature_size": (("num_mel_bins",), 80),
    "mel_bins": (("num_mel_bins",), 80),
    "num_mel_bins": (("input_feat_size",), 80),
    "feature_dim": (
        ("feature_projection_input_dim", "input_feat_per_channel", "input_dim", "num_mel_bins", "feature_size"),
        80,
    ),
    "hidden_size": (("d_model", "hidden_dim"), 64),
    "context_length": (("prediction_length",), 32),
    "max_length": ((), 64),
    "num_features": (("num_time_features",), 0),
    "state_dim": ((), 8),
    "task_seq_len": ((), 77),
    "input_size": ((), 1),
}
#: Arguments with an element for each token.
_SEQUENCES: Final = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "bbox", "decoder_input_ids", "decoder_attention_mask"}
)
#: Names of a sequence's length besides `sequence_length`.
_LENGTHS: Final = frozenset(
    "seq_len seq_length input_ids_length target_length num_samples time_steps audio_length frames".split()  # noqa: SIM905
)
#: Samples of raw audio: a quarter of a second at 16 kHz.
_SAMPLES: Final = 4000
_FRAMES: Final = 64
_IMAGE_SIDE: Final = 224
#: A vocabulary size for models that hash characters and have no vocabulary.
_ANY_VOCAB: Final = 32
#: Arguments that models need for a trace to equal eager. Without them, eager leaves out a mask or inspects the ids,
#: which a trace does differently or cannot do.
_REQUIRED_TO_TRACE: Final = {
    "fsmt": "decoder_attention_mask",
    "longt5": "attention_mask",
    "paligemma": "token_type_ids",
    "switch_transformers": "attention_mask",
}
#: The input of a second tower, and the field with its config.
_TOWERS: Final = {"pixel_values": "vision_config", "input_features": "audio_config"}


def example_inputs(
    module: Any, config: Any, path: Path, options: Mapping[str, Any], *, device: str | None
) -> tuple[dict[str, Any], dict[str, dict[int, Any]]]:
    """Return the keyword arguments of an example call, and the dimensions that change from call to call.

    Reads only the signature, the docstring and the dtype of the model; `path` is for messages.
    """
    parameters = inspect.signature(module.forward).parameters
    names = list(_argument_names(module, config, parameters))
    required = _REQUIRED_TO_TRACE.get(getattr(config, "model_type", ""), "")
    if required in parameters and required not in options:
        names.append(required)
    if _flag(options, "attention_mask"):
        if "attention_mask" not in parameters or "input_ids" not in names:
            msg = f"{type(module).__name__} takes no attention_mask for ids. Leave out --arg attention_mask."
            raise UsageError(msg, path=path, actual="attention_mask")
        names.append("attention_mask")
    inputs = _Inputs(module, config, path, options, device)
    kwargs: dict[str, Any] = {}
    dynamic: dict[str, dict[int, Any]] = {}
    for name in dict.fromkeys(names):
        kwargs[name], dynamic[name] = inputs.make(name, tower="input_ids" in names and name in _TOWERS)
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if "use_cache" in parameters or (accepts_any and has_placeholders(config) and "input_ids" in names):
        # A cache object is not a tensor, so a plan could not describe it as an output.
        kwargs["use_cache"] = False
    return kwargs, dynamic


def _argument_names(module: Any, config: Any, parameters: Mapping[str, inspect.Parameter]) -> Iterator[str]:
    """Yield the names of the example's arguments."""
    main = module.main_input_name
    yield from (name for name in ([main] if isinstance(main, str) else main) if name in parameters)
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    yield from (name for name, p in parameters.items() if p.default is p.empty and p.kind in named)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        yield "decoder_input_ids"
    if main == "input_ids" and not has_placeholders(config):
        yield from (name for name, tower in _TOWERS.items() if name in parameters and hasattr(config, tower))


def has_placeholders(config: Any) -> bool:
    """Return whether ids contain placeholders for images or sound. Their number depends on the image or sound."""
    return any(re.search(r"(image|audio|video)_token_(id|index)$", key) for key in vars(config))


class _Inputs:
    """Creates the tensors of one model's example."""

    def __init__(self, module: Any, config: Any, path: Path, options: Mapping[str, Any], device: str | None) -> None:
        self._module = module
        self._config = config
        self._path = path
        self._device = device
        self._side = options.get("image_size")
        self._doc = inspect.getdoc(type(module).forward) or ""
        self._dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)

    def make(self, name: str, *, tower: bool) -> tuple[torch.Tensor, dict[int, Any]]:
        """Return the tensor for an argument, and its dynamic dimensions."""
        shape = self._shape(name)
        config = getattr(self._config, _TOWERS[name]) if tower else self._config
        # If a shape has the same ..._size twice, they are the height and the width.
        sizes = [
            self._size("width" if dim.endswith("_size") and dim in shape[:index] else dim, name, config)
            for index, dim in enumerate(shape)
        ]
        dims: dict[int, Any] = {}
        for index, dim in enumerate(shape):
            if dim == "batch_size":
                dims[index] = "images" if tower else "batch"
            elif name in _SEQUENCES and index == 1:
                dims[index] = ("target" if name.startswith("decoder_") else "seq", 1, self._limit())
        return self._tensor(name, sizes), dims

    def _shape(self, name: str) -> list[str]:
        """Return the names of an argument's dimensions."""
        match = re.search(rf"^\s*{re.escape(name)} \([^\n]*?of shape `[(\[]+([^`]*?)[)\]]+`", self._doc, re.MULTILINE)
        shape = match.group(1) if match is not None and name not in _MISDOCUMENTED else _DEFAULT_SHAPES.get(name)
        if name.startswith("pixel_values") and self._has_frames():
            shape = _DEFAULT_SHAPES["pixel_values_videos"]
        if name == "input_features" and (self._frames() is not None or not shape or shape.count(",") < 2):  # noqa: PLR2004
            # Whisper and similar models take spectrograms of fixed length, whatever the docstring says.
            shape = _DEFAULT_SHAPES[name] if self._frames() is not None else "batch_size, sequence_length, feature_dim"
        if shape is None:
            msg = (
                f"hf: cannot derive an example for the argument {name} of {type(self._module).__name__}. Write a "
                "factory in a file of your own that returns the module and an example call."
            )
            raise ModelError(msg, path=self._path, expected="a documented shape", actual=name)
        return [dim.strip() for dim in shape.split(",") if dim.strip()]

    def _has_frames(self) -> bool:
        config = getattr(self._config, "vision_config", self._config)
        return any(isinstance(getattr(config, field, None), int) for field in ("num_frames", "frames_per_clip"))

    def _size(self, dim: str, name: str, config: Any) -> int:
        if dim.isdigit():
            return int(dim)
        if dim in ("batch_size", "bs"):
            return _BATCH
        if dim in ("height", "width", "image_size", "frame_size"):
            return self._image_side(config, 1 if dim == "width" else 0)
        if "sequence_length" in dim or dim in _LENGTHS:
            return self._length(name, config)
        fields, default = _DIM_SIZES.get(dim, ((), 0))
        for field in (dim, *fields):
            value = getattr(config, field, None)
            if isinstance(value, int) and value > 0:
                return value
        if default:
            return default
        msg = (
            f"hf: cannot derive the size {dim} of the argument {name} of {type(self._module).__name__}. Write a "
            "factory in a file of your own that returns the module and an example call."
        )
        raise ModelError(msg, path=self._path, expected=dim)

    def _length(self, name: str, config: Any) -> int:
        """Return the length of the example's sequence."""
        limit = self._limit()
        if name == "input_features":
            return self._frames() or _FRAMES
        if name == "input_values":
            return _SAMPLES
        if name.startswith("past_") or name == "states":
            context: int = getattr(config, "context_length", None) or _FRAMES
            lags: list[int] = getattr(config, "lags_sequence", None) or [0]
            return context + max(lags)
        return _SEQ if limit is None else min(_SEQ, limit)

    def _frames(self) -> int | None:
        """Return the number of frames if the model takes spectrograms of fixed length."""
        audio = getattr(self._config, "audio_config", self._config)
        positions = getattr(audio, "max_source_positions", None)
        return 2 * positions if isinstance(positions, int) and hasattr(audio, "num_mel_bins") else None

    def _limit(self) -> int | None:
        limit = getattr(self._config.get_text_config(), "max_position_embeddings", None)
        return limit if isinstance(limit, int) and limit > 0 else None

    def _image_side(self, config: Any, axis: int) -> int:
        size = self._side
        for holder in (config, getattr(config, "vision_config", None), getattr(config, "backbone_config", None)):
            size = getattr(holder, "image_size", None) if size is None else size
        if isinstance(size, Mapping):
            size = [size.get("height"), size.get("width")]
        if isinstance(size, (tuple, list)) and len(size) > axis:
            size = size[axis]
        return size if isinstance(size, int) and size > 0 else _IMAGE_SIDE

    def _tensor(self, name: str, sizes: list[int]) -> torch.Tensor:
        """Return values that are valid for the model: ids of its vocabulary, ones for a mask, small numbers."""
        numel = math.prod(sizes)
        if name.endswith("_mask"):
            is_bool = re.search(rf"^\s*{re.escape(name)} \(`torch.BoolTensor`", self._doc, re.MULTILINE)
            dtype = torch.bool if is_bool or name.startswith("audio_mel") else torch.int64
            return torch.ones(sizes, dtype=dtype, device=self._device)
        if name.endswith("input_ids") or name in ("bbox", "task_inputs", "freq", "token_type_ids"):
            vocab = self._vocab() if name.endswith("input_ids") else 2
            return (torch.arange(numel, dtype=torch.int64, device=self._device) % vocab).view(sizes)
        return torch.linspace(-1, 1, numel, device=self._device).mul(50).sin().view(sizes).to(self._dtype)

    def _vocab(self) -> int:
        for config in (self._config.get_text_config(), self._config):
            size = getattr(config, "vocab_size", None)
            if isinstance(size, int):
                return size
        return _ANY_VOCAB


def _flag(options: Mapping[str, Any], name: str) -> bool:
    """Return a boolean option; False if it is absent."""
    value = options.get(name, False)
    if not isinstance(value, bool):
        msg = f"{name} must be true or false, not {value!r}. Give --arg {name}=true."
        raise UsageError(msg, path=name, actual=value)
    return value
