"""Resolve the text of `MODEL` to a `ModelSpec`.

Grammar::

    MODEL = path ".py:" factory | module ":" factory | "hf:" path

    path      a file; after hf:, a config.json or a folder with one
    module    dotted, as in an import statement
    factory   a function of the module (dots allowed) that returns a ModelSpec or (module, args)

This module owns the context in which a factory runs: fake tensors, default device, default dtype. The user's modules
are imported outside of it, so that tensors that outlive the factory stay real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cgtool.errors import CgtoolError, ModelError, UsageError
from cgtool.model import DynamicDims, ExampleCall, ModelSpec
from cgtool.models import huggingface, user_code
from cgtool.models._torch import FakeTensorMode, blames_fake_tensors, building_fakes, new_fake_mode
from cgtool.models.fake import fake_arguments, make_fake

_FORMS = "MODEL is path/to/file.py:factory, package.module:factory, or hf:PATH."


def resolve_model(
    text: str,
    *,
    factory_args: Mapping[str, Any] | None = None,
    weights: str = "fake",
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    pythonpath: Sequence[str | Path] = (),
    dynamic: DynamicDims | None = None,
) -> ModelSpec:
    """Build the model that `MODEL` names. This runs the user's code.

    Args:
        text: `path/to/file.py:factory`, `package.module:factory` or `hf:PATH`.
        factory_args: Keyword arguments of the factory; fields of the config for `hf:`.
        weights: "fake" builds with fake tensors, which have no values and take no memory; "real" with real ones.
        device: The default device while the factory runs; torch's own default if None.
        dtype: The default dtype while the factory runs, for example "bfloat16"; torch's own default if None.
        pythonpath: Folders to search for modules before all others.
        dynamic: The dimensions that change from call to call; overrides those of the factory. A factory that returns
            `(module, args)` has none.

    Returns:
        The model in eval mode. With fake weights, its parameters, its buffers and the tensors of its example calls are
        fake tensors of one mode.

    Raises:
        UsageError: `text`, `weights`, `device` or `dtype` is invalid, or the factory takes other arguments.
        ModelError: The model could not be found or built. The message shows the responsible line of the user's code.
    """
    if weights not in ("fake", "real"):
        msg = f"Weights must be fake or real, not {weights!r}."
        raise UsageError(msg, expected="fake|real", actual=weights)
    mode = new_fake_mode() if weights == "fake" else None
    target = _device(device)
    default_dtype = _dtype(dtype)
    user_code.add_to_path([Path(folder).resolve() for folder in pythonpath])
    arguments = dict(factory_args or {})
    if text.startswith("hf:"):
        path = Path(text.removeprefix("hf:")).expanduser()
        with _defaults(target, None):
            spec = huggingface.build(path, arguments, mode=mode, dtype=default_dtype)
    else:
        factory, file, name = _factory(text)
        user_code.check_arguments(factory, name, arguments)
        result = _call(factory, arguments, file=file, name=name, mode=mode, device=target, dtype=default_dtype)
        spec = _spec(result, name, file)
    if dynamic is not None:
        spec = replace(spec, dynamic=dynamic)
    return _finish(spec, mode, target or torch.get_default_device())


def _factory(text: str) -> tuple[Callable[..., Any], Path | str | None, str]:
    """Return the factory, the file that defines it, and its name in messages."""
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        hint = f" Name its factory too, for example {text}:build." if text.endswith(".py") else ""
        raise UsageError(f"{text!r} is not a MODEL.{hint} {_FORMS}", expected=_FORMS, actual=text)
    path = Path(place).expanduser()
    if place.endswith(".py") or "/" in place or path.is_file():
        module = user_code.import_file(path)
    elif all(part.isidentifier() for part in place.split(".")):
        module = user_code.import_module(place)
    else:
        raise UsageError(f"{place!r} is neither a file nor a module. {_FORMS}", expected=_FORMS, actual=text)
    return user_code.find_factory(module, name), getattr(module, "__file__", None), text


def _call(
    factory: Callable[..., Any],
    arguments: dict[str, Any],
    *,
    file: Path | str | None,
    name: str,
    mode: FakeTensorMode | None,
    device: torch.device | None,
    dtype: torch.dtype | None,
) -> Any:
    """Call the factory in the requested context and convert what it raises into a `ModelError`."""
    try:
        with ExitStack() as stack:
            stack.enter_context(user_code.running_user_code())
            stack.enter_context(_defaults(device, dtype))
            if mode is not None:
                stack.enter_context(building_fakes(mode))
            return factory(**arguments)
    except CgtoolError:
        raise
    except Exception as error:  # the user's factory may raise anything
        if mode is not None and blames_fake_tensors(error):
            advice = (
                "It reads tensor values, and fake weights have none. Use --weights real, or change the model so that "
                "building it reads no tensor values."
            )
            raise user_code.failure(f"{name} cannot be built with fake weights", error, file, advice) from error
        advice = "Fix the factory, or pass it other arguments with --arg name=value."
        raise user_code.failure(f"{name} raised", error, file, advice) from error


def _spec(result: Any, name: str, file: Path | str | None) -> ModelSpec:
    """Convert the result of a factory to a `ModelSpec`."""
    if isinstance(result, ModelSpec):
        spec = result
    elif isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], tuple | list):  # noqa: PLR2004  # a pair
        spec = ModelSpec(module=result[0], calls=[ExampleCall(args=tuple(result[1]))])
    else:
        what = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        msg = f"{name} returned {what}. Let it return a cgtool.ModelSpec, or (module, args) with args a tuple."
        raise ModelError(msg, path=file, expected="ModelSpec | (module, args)", actual=what)
    if not isinstance(spec.module, nn.Module):
        kind = type(spec.module).__name__
        msg = f"{name} returned a {kind} as its module. Let it return a torch.nn.Module."
        raise ModelError(msg, path=file, expected="torch.nn.Module", actual=kind)
    if not callable(getattr(spec.module, spec.method, None)):
        msg = f"{type(spec.module).__name__} has no method {spec.method}. Set ModelSpec.method to the one to compile."
        raise ModelError(msg, path=file, expected=spec.method)
    if not spec.calls:
        msg = f"{name} returned a ModelSpec without calls. Give it at least one cgtool.ExampleCall."
        raise ModelError(msg, path=file, expected="one or more ExampleCall")
    return spec


def _finish(spec: ModelSpec, mode: FakeTensorMode | None, device: torch.device) -> ModelSpec:
    """Put the module into eval mode and, under a fake mode, replace its remaining real tensors."""
    spec.module.eval()
    if mode is None:
        return spec
    make_fake(spec.module, mode, device)
    calls = tuple(
        replace(
            call,
            args=tuple(fake_arguments(value, mode, device) for value in call.args),
            kwargs={key: fake_arguments(value, mode, device) for key, value in call.kwargs.items()},
        )
        for call in spec.calls
    )
    return replace(spec, calls=calls)


@contextmanager
def _defaults(device: torch.device | None, dtype: torch.dtype | None) -> Iterator[None]:
    """Make `device` and `dtype` torch's defaults inside the block."""
    before = torch.get_default_dtype()
    try:
        if dtype is not None:
            torch.set_default_dtype(dtype)
        if device is None:
            yield
        else:
            with device:
                yield
    finally:
        torch.set_default_dtype(before)


def _device(device: str | torch.device | None) -> torch.device | None:
    """Parse a device, which must exist on this machine."""
    if device is None:
        return None
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        msg = f"{device!r} is not a device. Give one such as cpu, cuda or cuda:0."
        raise UsageError(msg, actual=device) from error
    if parsed.type == "cuda" and not torch.cuda.is_available():
        msg = f"This machine has no CUDA device that torch {torch.__version__} can use. Warm where the model will run."
        raise UsageError(msg, expected=str(parsed), actual="cpu")
    return parsed


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Parse a dtype, which must be a floating-point one."""
    if dtype is None:
        return None
    parsed = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if isinstance(parsed, torch.dtype) and parsed.is_floating_point:
        return parsed
    msg = f"{dtype!r} is not a floating-point dtype. Give one such as float32, bfloat16 or float16."
    raise UsageError(msg, expected="a floating dtype", actual=str(dtype))
