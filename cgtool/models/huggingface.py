"""`hf:PATH`: a base model of transformers, built from its config alone. Nothing is downloaded, no weights are read.

transformers is an optional extra and is imported when the first such model is asked for. Under fake weights the model
is built on the meta device, which every model of transformers knows how to do (it is how it loads checkpoints), and
gets its fake tensors afterwards.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
from pathlib import Path
from typing import Any, Final

import torch

from cgtool.errors import ModelError, UsageError
from cgtool.model import DynamicDims, ExampleCall, ModelSpec
from cgtool.models import user_code

#: The sizes of the example: small, and neither 0 nor 1.
_BATCH: Final = 2
_SEQ: Final = 16
#: What `--arg` may say beside the fields of the config.
_OPTIONS: Final = ("attention_mask",)


def build(path: Path, arguments: dict[str, Any], *, fake: bool, dtype: torch.dtype | None) -> ModelSpec:
    """Build the base model (`AutoModel`) of a config, with SDPA attention.

    Args:
        path: A folder with a config.json, or such a file.
        arguments: Fields of the config to set, and `attention_mask=True` for an example with a mask.
        fake: Build with meta tensors; otherwise with random weights that are the same each time.
        dtype: Of the weights; what the config says when None.

    Returns:
        The model; text models are called with `input_ids`, vision models with `pixel_values`, models of two towers
        with both, all by name.

    Raises:
        ModelError: transformers or the config is missing, or the model cannot be built from it.
        UsageError: An argument is no field of the config.
    """
    transformers = _transformers()
    fields = _read_config(path)
    options = {name: arguments[name] for name in _OPTIONS if name in arguments}
    overrides = {name: value for name, value in arguments.items() if name not in _OPTIONS}
    config = _config(transformers, path, fields, overrides)
    model_class = _model_class(transformers, path, config)
    module = _module(model_class, transformers, config, path, fake=fake, dtype=dtype)
    device = "meta" if fake else None
    kwargs, dynamic = _example(module, config, path, options, device=device)
    return ModelSpec(module=module.eval(), calls=[ExampleCall(kwargs=kwargs)], dynamic=dynamic)


def _transformers() -> Any:
    """Import transformers.

    Raises:
        ModelError: It is not installed.
    """
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        msg = f"hf: needs transformers, and {error.name} is not installed. Run pip install 'cgtool[transformers]'."
        raise ModelError(msg, expected="transformers", actual=None) from error


def _read_config(path: Path) -> dict[str, Any]:
    """Read the config as it stands in its file.

    Raises:
        ModelError: There is none, or it is not the config of a model.
    """
    file = path / "config.json" if path.is_dir() else path
    advice = "hf: takes a folder with a config.json of transformers, or such a file; nothing is downloaded."
    if not file.is_file():
        raise ModelError(f"{file} does not exist. {advice}", path=file, expected="config.json")
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} could not be read: {error}. {advice}", path=file, expected="JSON") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise ModelError(f"{file} names no model_type. {advice}", path=file, expected="model_type")
    return fields


def _config(transformers: Any, path: Path, fields: dict[str, Any], overrides: dict[str, Any]) -> Any:
    """Make the config, with the user's fields set before anything is computed from others."""
    model_type = fields["model_type"]
    if model_type not in transformers.CONFIG_MAPPING:
        remote = (
            " Its code comes with its weights, and hf: runs no such code: write a factory."
            if "auto_map" in fields
            else ""
        )
        msg = (
            f"transformers {transformers.__version__} knows no model of type {model_type!r} ({path}).{remote} "
            "Use a newer transformers, or write a factory in a file of your own."
        )
        raise ModelError(msg, path=path, expected="a known model_type", actual=model_type)
    config_class = transformers.CONFIG_MAPPING[model_type]
    known = sorted({*config_class().to_dict(), *getattr(config_class, "attribute_map", {}), *fields, *_OPTIONS})
    for name in overrides:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            msg = (
                f"{config_class.__name__} has no field {name}.{hint} --arg sets fields of the config, or {_OPTIONS[0]}."
            )
            raise UsageError(msg, path=name, expected=known, actual=name)
    merged = {**fields, **overrides}
    if "layer_types" in fields and "layer_types" not in overrides and isinstance(fields["layer_types"], list):
        merged["layer_types"] = _repeat(fields["layer_types"], merged.get("num_hidden_layers"))
    try:
        return config_class.from_dict(merged)
    except Exception as error:  # a config's own checks raise what they like
        msg = f"transformers made no {config_class.__name__} of {path}: {error} Correct the config or the --arg values."
        raise ModelError(msg, path=path) from error


def _repeat(pattern: list[Any], length: Any) -> list[Any]:
    """Cut or repeat a pattern over layers, so that another number of layers keeps it."""
    if not isinstance(length, int) or not pattern:
        return pattern
    return [pattern[index % len(pattern)] for index in range(length)]


def _model_class(transformers: Any, path: Path, config: Any) -> Any:
    """Import the base model's class here: under fake tensors or on meta, its module's own tensors would become so."""
    if type(config) not in transformers.MODEL_MAPPING:
        kind = type(config).__name__
        msg = f"transformers has no base model for {kind} ({path}). Write a factory in a file of your own."
        raise ModelError(msg, path=path, actual=kind)
    found = transformers.MODEL_MAPPING[type(config)]
    if isinstance(found, tuple):
        found = found[0]
    if config.is_encoder_decoder or found.main_input_name not in ("input_ids", "pixel_values"):
        msg = (
            f"hf: builds models that take input_ids or pixel_values alone, and {found.__name__} takes others. Write a "
            "factory in a file of your own that returns the module and an example call."
        )
        raise ModelError(msg, path=path, expected="input_ids | pixel_values", actual=found.main_input_name)
    return found


def _module(
    model_class: Any, transformers: Any, config: Any, path: Path, *, fake: bool, dtype: torch.dtype | None
) -> torch.nn.Module:
    """Build the model on the default device, or on meta."""
    extra = {} if dtype is None else {"dtype": dtype}
    try:
        with user_code.running_user_code():
            if fake:
                with torch.device("meta"):
                    module = transformers.AutoModel.from_config(config, attn_implementation="sdpa", **extra)
            else:
                with torch.random.fork_rng(_cuda_devices()):
                    torch.manual_seed(0)
                    module = transformers.AutoModel.from_config(config, attn_implementation="sdpa", **extra)
    except Exception as error:  # the code of a model raises what it likes
        advice = "Correct the config or the --arg values."
        if fake:
            advice += " If it reads values while it is built, --weights real builds it for real."
        msg = f"{model_class.__name__} could not be built from {path}: {type(error).__name__}: {error}\n{advice}"
        raise ModelError(msg, path=path) from error
    return module  # type: ignore[no-any-return]  # transformers is typed as Any here


def _cuda_devices() -> list[int]:
    """Return the devices whose random state building a model changes; asking for all of many would warn."""
    device = torch.get_default_device()
    if device.type != "cuda":
        return []
    return [torch.cuda.current_device() if device.index is None else device.index]


def _example(
    module: Any, config: Any, path: Path, options: dict[str, Any], *, device: str | None
) -> tuple[dict[str, Any], DynamicDims]:
    """Return the arguments of the example call, and which of their dimensions change."""
    if module.main_input_name == "pixel_values":
        if options:
            msg = f"{type(module).__name__} takes images and no attention_mask. Leave --arg attention_mask out."
            raise UsageError(msg, path=path, actual=sorted(options))
        return {"pixel_values": _pixels(module, config, path, device)}, {"pixel_values": {0: "batch"}}
    text = config.get_text_config()  # of two towers, the one that takes words
    if not isinstance(getattr(text, "vocab_size", None), int):
        msg = f"The config of {path} has no vocab_size to make an example of input_ids from. Write a factory."
        raise ModelError(msg, path=path, expected="vocab_size")
    limit = getattr(text, "max_position_embeddings", None)
    seq = min(_SEQ, limit) if isinstance(limit, int) else _SEQ
    ids = torch.arange(_BATCH * seq, dtype=torch.int64, device=device).view(_BATCH, seq) % text.vocab_size
    dims = {0: "batch", 1: ("seq", 1, limit if isinstance(limit, int) else None)}
    kwargs: dict[str, Any] = {"input_ids": ids}
    dynamic: dict[str, Any] = {"input_ids": dims}
    if _flag(options, "attention_mask"):
        kwargs["attention_mask"] = torch.ones((_BATCH, seq), dtype=torch.int64, device=device)
        dynamic["attention_mask"] = dims
    takes = inspect.signature(module.forward).parameters
    if "pixel_values" in takes and hasattr(config, "vision_config"):
        kwargs["pixel_values"] = _pixels(module, config.vision_config, path, device)
        dynamic["pixel_values"] = {0: "images"}
    if "use_cache" in takes:
        # A cache object is no tensor: it would be an output that a plan cannot describe.
        kwargs["use_cache"] = False
    return kwargs, dynamic


def _pixels(module: Any, config: Any, path: Path, device: str | None) -> torch.Tensor:
    """Return an example image batch of the size that the config names."""
    size = getattr(config, "image_size", None)
    channels = getattr(config, "num_channels", None)
    height, width = (size, size) if isinstance(size, int) else (tuple(size or ()) or (None, None))
    if not isinstance(channels, int) or not isinstance(height, int) or not isinstance(width, int):
        msg = f"The config of {path} has no num_channels and image_size to make an example from. Write a factory."
        raise ModelError(msg, path=path, expected="num_channels, image_size")
    shape = (_BATCH, channels, height, width)
    dtype = next(module.parameters()).dtype
    numel = _BATCH * channels * height * width
    return torch.linspace(-1, 1, numel, device=device).sin().view(shape).to(dtype)


def _flag(options: dict[str, Any], name: str) -> bool:
    """Return an option that is true or false.

    Raises:
        UsageError: It is something else.
    """
    value = options.get(name, False)
    if not isinstance(value, bool):
        raise UsageError(
            f"{name} is true or false, and not {value!r}. Write --arg {name}=true.", path=name, actual=value
        )
    return value
