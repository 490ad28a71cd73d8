"""`hf:PATH`: a model of transformers, built from its config. Nothing is downloaded and no weights are read.

transformers is an optional extra and is imported on first use. With fake weights, the model is built on the meta
device, which every model of transformers supports (checkpoints are loaded that way), and its tensors are replaced with
fake ones afterwards.
"""

from __future__ import annotations

import difflib
import importlib
import json
import re
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, Final

import torch

from cgtool.errors import ModelError, UsageError
from cgtool.model import ExampleCall, ModelSpec
from cgtool.models import hf_inputs, user_code
from cgtool.models._torch import FakeTensorMode
from cgtool.models.fake import make_fake

#: Names that `--arg` accepts in addition to the fields of the config.
_OPTIONS: Final = ("task", "attn_implementation", "cache", "cache_length", *hf_inputs.OPTIONS)
#: The only task that decodes with a cache.
_DECODES: Final = "causal-lm"


def build(
    path: Path, arguments: dict[str, Any], *, mode: FakeTensorMode | None, dtype: torch.dtype | None
) -> ModelSpec:
    """Build the model of a config: the base model (`AutoModel`), or one with the head of a task.

    Attention is SDPA if the architecture supports it, otherwise the choice of transformers.

    Args:
        path: A config.json, or a folder with one.
        arguments: Fields of the config, and options: `task="causal-lm"` for a head, `attn_implementation="eager"`,
            `attention_mask=True` for an example with a mask, `image_size=224` if the config has none;
            `cache="static"` and `cache_length=1024` for the decode step of a causal language model.
        mode: The fake mode that its tensors will belong to. The model is then built with meta tensors; if None, it is
            built with random weights that are the same each time.
        dtype: The dtype of the weights; the config's if None.

    Returns:
        The model and an example call with keyword arguments: `input_ids`, `pixel_values`, `input_features`, ..., the
        decoder's ids of an encoder-decoder, both inputs of a model with two towers.

    Raises:
        ModelError: transformers or the config is missing, or the model cannot be built from the config.
        UsageError: An argument is not a field of the config.
    """
    transformers = _transformers()
    fields = _read_config(path)
    options: dict[str, Any] = {name: arguments[name] for name in _OPTIONS if name in arguments}
    overrides = {name: value for name, value in arguments.items() if name not in _OPTIONS}
    config = _config(transformers, path, fields, overrides)
    if hasattr(config, "image_size") and "image_size" in options:
        config = _config(transformers, path, fields, {**overrides, "image_size": options.pop("image_size")})
    task = _task(options)
    auto_class, model_class = _model_class(transformers, path, config, task)
    attention = options.get("attn_implementation")
    fake = mode is not None
    module = _module(model_class, auto_class, config, path, attention=attention, fake=fake, dtype=dtype).eval()
    if "cache" in options:
        # Lazy: imports parts of transformers that a model without a cache does not need.
        from cgtool.runtime.static_cache import static_cache_spec

        if mode is not None:  # the cache's shapes come from running the model; on meta, some models choose GPU kernels
            make_fake(module, mode, torch.get_default_device())
        with mode or nullcontext():
            return static_cache_spec(module, options.get("cache_length"))
    device = "meta" if fake else None
    kwargs, dynamic = hf_inputs.example_inputs(module, config, path, options, device=device)
    notes = []
    if attention is None and getattr(module.config, "_attn_implementation", "sdpa") != "sdpa":
        notes.append(
            f"{type(module).__name__} has no SDPA attention in transformers {transformers.__version__}, so there "
            "is none to split at: it is compiled whole."
        )
    if hf_inputs.has_placeholders(config) and "input_ids" in kwargs:
        notes.append(
            "The example call has token ids only, since the number of placeholder ids depends on the image or sound. "
            "Write a factory for calls with images or sound."
        )
    return ModelSpec(
        module=module, calls=[ExampleCall(kwargs=kwargs)], dynamic=dynamic, notes=notes, static_where_fixed=True
    )


def _task(options: dict[str, Any]) -> Any:
    """Return the requested task; with a cache, the task that decodes."""
    task, cache, length = (options.get(name) for name in ("task", "cache", "cache_length"))
    if cache is None and length is None:
        return task
    if cache != "static":
        msg = f"{cache!r} is not a cache. Give --cache static." if cache else "--cache-length needs --cache static."
        raise UsageError(msg, path="cache", expected="static", actual=cache)
    if length is not None and type(length) is not int:
        msg = f"{length!r} is not a number of tokens. Give one such as --cache-length 1024."
        raise UsageError(msg, path="cache_length", actual=length)
    others = [name for name in hf_inputs.OPTIONS if name in options]
    if others or task not in (None, _DECODES):
        option = f"--arg {others[0]}" if others else f"--task {task}"
        msg = f"{option} cannot be combined with --cache static, which builds a {_DECODES} with its own mask. Drop it."
        raise UsageError(msg, path="cache", expected=_DECODES, actual=others or task)
    return _DECODES


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        msg = f"hf: needs transformers, but {error.name} is not installed. Run pip install 'cgtool[transformers]'."
        raise ModelError(msg, expected="transformers", actual=None) from error


def _read_config(path: Path) -> dict[str, Any]:
    """Read the config from its file, unmodified."""
    file = path / "config.json" if path.is_dir() else path
    advice = "hf: takes a config.json of transformers or a folder with one; nothing is downloaded."
    if not file.is_file():
        raise ModelError(f"{file} does not exist. {advice}", path=file, expected="config.json")
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} could not be read: {error}. {advice}", path=file, expected="JSON") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise ModelError(f"{file} has no model_type. {advice}", path=file, expected="model_type")
    return fields


def _config(transformers: Any, path: Path, fields: dict[str, Any], overrides: dict[str, Any]) -> Any:
    """Create the config, with the overrides applied before derived fields are computed."""
    model_type = fields["model_type"]
    if model_type not in transformers.CONFIG_MAPPING:
        remote = (
            " Its code is in the model repository, and hf: does not run such code: write a factory."
            if "auto_map" in fields
            else ""
        )
        msg = (
            f"transformers {transformers.__version__} has no model of type {model_type!r} ({path}).{remote} "
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
                f"{config_class.__name__} has no field {name}.{hint} --arg sets a field of the config, "
                f"{', '.join(_OPTIONS[:-1])} or {_OPTIONS[-1]}."
            )
            raise UsageError(msg, path=name, expected=known, actual=name)
    merged = {**fields, **overrides}
    if "layer_types" in fields and "layer_types" not in overrides and isinstance(fields["layer_types"], list):
        merged["layer_types"] = _repeat(fields["layer_types"], merged.get("num_hidden_layers"))
    try:
        return config_class.from_dict(merged)
    except Exception as error:  # a config's own checks may raise anything
        msg = (
            f"transformers could not create a {config_class.__name__} from {path}: {error} Correct the config or the "
            "--arg values."
        )
        raise ModelError(msg, path=path) from error


def _repeat(pattern: list[Any], length: Any) -> list[Any]:
    """Cut or repeat a pattern over layers to fit another number of layers."""
    if not isinstance(length, int) or not pattern:
        return pattern
    return [pattern[index % len(pattern)] for index in range(length)]


def _model_class(transformers: Any, path: Path, config: Any, task: Any) -> tuple[Any, Any]:
    """Return the auto class of a task, and the model class that it builds for a config.

    This imports the model's class, which must not happen under fake tensors or on the meta device: the tensors of its
    module would become fake or meta.
    """
    kind = type(config).__name__
    heads = {_task_name(name): name for name in dir(transformers) if name.startswith("AutoModelFor")}
    known = [task for task, head in heads.items() if type(config) in _mapping(getattr(transformers, head))]
    if task is not None and task not in heads:
        msg = f"{task!r} is not a task. For {kind}, transformers has {', '.join(known) or 'none'}."
        raise UsageError(msg, path="task", expected=known, actual=task)
    auto_class = transformers.AutoModel if task is None else getattr(transformers, heads[task])
    if type(config) not in _mapping(auto_class):
        what = "base model" if task is None else f"model for {task}"
        advice = f"Use --task {' or '.join(known)}, or write" if known else "Write"
        msg = f"transformers has no {what} for {kind} ({path}). {advice} a factory in a file of your own."
        raise ModelError(msg, path=path, expected=known, actual=kind)
    try:
        classes = _mapping(auto_class)[type(config)]
        model_class = classes[0] if isinstance(classes, tuple) else classes
        model_class.forward  # noqa: B018  # raises in the placeholder for a model whose libraries are missing
    except (ImportError, ValueError, AttributeError) as error:
        msg = f"transformers cannot import the model of {kind} ({path}): {str(error).strip()}"
        raise ModelError(msg, path=path, actual=kind) from error
    return auto_class, model_class


def _mapping(auto_class: Any) -> Any:
    """Return the mapping of config class → model class of an auto class."""
    return auto_class._model_mapping  # noqa: SLF001 - not every task's mapping is exported


def _task_name(auto_class: str) -> str:
    """Return the name of a task: "causal-lm" for AutoModelForCausalLM."""
    words = re.findall(r"Seq2Seq|[A-Z]+(?![a-z])|[A-Z][a-z]+", auto_class.removeprefix("AutoModelFor"))
    return "-".join(word.lower() for word in words)


def _module(
    model_class: Any,
    auto_class: Any,
    config: Any,
    path: Path,
    *,
    attention: Any,
    fake: bool,
    dtype: torch.dtype | None,
) -> torch.nn.Module:
    """Build the model on the default device, or on the meta device if `fake`."""
    extra: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    if attention is not None:
        extra["attn_implementation"] = attention
    try:
        with user_code.running_user_code(), ExitStack() as stack:
            if fake:
                stack.enter_context(torch.device("meta"))
            else:
                stack.enter_context(torch.random.fork_rng(_cuda_devices()))
                torch.manual_seed(0)
            return auto_class.from_config(config, **extra)  # type: ignore[no-any-return]  # transformers is Any here
    except Exception as error:  # the model's code may raise anything
        advice = "Correct the config or the --arg values."
        if fake:
            advice += " If building it reads tensor values, use --weights real."
        msg = f"{model_class.__name__} could not be built from {path}: {type(error).__name__}: {error}\n{advice}"
        raise ModelError(msg, path=path) from error


def _cuda_devices() -> list[int]:
    """Return the devices whose random state building a model changes; `fork_rng` warns if given many devices."""
    device = torch.get_default_device()
    if device.type != "cuda":
        return []
    return [torch.cuda.current_device() if device.index is None else device.index]
