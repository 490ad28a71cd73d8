"""From the text of `MODEL` to a `ModelSpec`.

Grammar::

    MODEL = path ".py:" factory | module ":" factory | "hf:" path

    path      a file; for hf: a folder with a config.json, or such a file
    module    dotted, as in an import statement
    factory   a function of the module (dots allowed) that returns a ModelSpec or (module, args)

Owns the context in which a factory runs: fake tensors, default device, default dtype. The user's modules are imported
outside of it, so that no tensor that outlives the factory becomes fake.
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
        weights: "fake" builds under fake tensors, which need no memory and no values; "real" builds for real.
        device: The default device while the factory runs; torch's own default when None.
        dtype: The default dtype while the factory runs, "bfloat16" for example; torch's own default when None.
        pythonpath: Folders to look for modules in, before all others.
        dynamic: Which dimensions change from call to call, in place of what the factory says. A factory that returns
            `(module, args)` says that none does.

    Returns:
        The model in eval mode. Under fake weights its parameters, its buffers and the tensors of its example calls are
        fake tensors of one mode.

    Raises:
        UsageError: `text`, `weights`, `device` or `dtype` has no meaning, or the factory takes other arguments.
        ModelError: The model could not be found or built; the message shows the user's own line.
    """
    if weights not in ("fake", "real"):
        raise UsageError(
            f"Weights are fake or real, and not {weights!r}. Choose one.", expected="fake|real", actual=weights
        )
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
        made = _call(factory, arguments, file=file, name=name, mode=mode, device=target, dtype=default_dtype)
        spec = _spec(made, name, file)
    if dynamic is not None:
        spec = replace(spec, dynamic=dynamic)
    return _finish(spec, mode, target or torch.get_default_device())


def _factory(text: str) -> tuple[Callable[..., Any], Path | str | None, str]:
    """Return the factory, the file that it lives in, and what to call it in messages."""
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        hint = f" {text} names no factory: write {text}:build, if build is its name." if text.endswith(".py") else ""
        raise UsageError(f"{text!r} is no MODEL.{hint} {_FORMS}", expected=_FORMS, actual=text)
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
    """Call the factory where its tensors come out as asked, and turn what it raises into a sentence."""
    try:
        with ExitStack() as stack:
            stack.enter_context(user_code.running_user_code())
            stack.enter_context(_defaults(device, dtype))
            if mode is not None:
                stack.enter_context(building_fakes(mode))
            return factory(**arguments)
    except CgtoolError:
        raise
    except Exception as error:  # the user's factory raises what it likes
        if mode is not None and blames_fake_tensors(error):
            advice = (
                "It asks for values, and weights are fake while a model is only compiled. Build it for real with "
                "--weights real, or write the model so that building it reads no tensor."
            )
            raise user_code.failure(f"{name} cannot be built with fake weights", error, file, advice) from error
        advice = "Mend the factory, or pass it other arguments with --arg name=value."
        raise user_code.failure(f"{name} raised", error, file, advice) from error


def _spec(made: Any, name: str, file: Path | str | None) -> ModelSpec:
    """Return what a factory made as a `ModelSpec`."""
    if isinstance(made, ModelSpec):
        spec = made
    elif isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], tuple | list):  # noqa: PLR2004  # a pair
        spec = ModelSpec(module=made[0], calls=[ExampleCall(args=tuple(made[1]))])
    else:
        what = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        msg = f"{name} returned {what}. Let it return a cgtool.ModelSpec, or (module, args) with args a tuple."
        raise ModelError(msg, path=file, expected="ModelSpec | (module, args)", actual=what)
    if not isinstance(spec.module, nn.Module):
        kind = type(spec.module).__name__
        msg = f"The module that {name} returned is a {kind}. Let it be a torch.nn.Module."
        raise ModelError(msg, path=file, expected="torch.nn.Module", actual=kind)
    if not callable(getattr(spec.module, spec.method, None)):
        msg = f"{type(spec.module).__name__} has no method {spec.method}. Name the one to compile in ModelSpec.method."
        raise ModelError(msg, path=file, expected=spec.method)
    if not spec.calls:
        msg = f"{name} returned a ModelSpec without calls. Give it one or more cgtool.ExampleCall."
        raise ModelError(msg, path=file, expected="one or more ExampleCall")
    return spec


def _finish(spec: ModelSpec, mode: FakeTensorMode | None, device: torch.device) -> ModelSpec:
    """Put the module into eval mode and make fake what is not yet."""
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
    """Make `device` and `dtype` torch's defaults, and put back what they were."""
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
    """Return the device asked for, which this machine must have."""
    if device is None:
        return None
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        msg = f"{device!r} is no device. Write cpu, cuda or cuda:0, for example."
        raise UsageError(msg, actual=device) from error
    if found.type == "cuda" and not torch.cuda.is_available():
        msg = f"This machine has no CUDA device that torch {torch.__version__} can use. Warm where the model will run."
        raise UsageError(msg, expected=str(found), actual="cpu")
    return found


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return the dtype asked for, which must be a floating one."""
    if dtype is None:
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if isinstance(found, torch.dtype) and found.is_floating_point:
        return found
    msg = f"{dtype!r} is no floating dtype. Write float32, bfloat16 or float16, for example."
    raise UsageError(msg, expected="a floating dtype", actual=str(dtype))
