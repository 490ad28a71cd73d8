"""A model named on the command line: building it, here or in a child, and the code that loads it.

Importable without torch; building the model imports it.
"""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import field

from cgtool.config import CompilationConfig
from cgtool.errors import UsageError
from cgtool.events import Event, OnEvent, ignore
from cgtool.model import ModelSpec
from cgtool.plan.grammar import Record


class ModelChoice(Record, frozen=True, kw_only=True):
    """A model as named on the command line, and how to build it."""

    #: The MODEL argument: "path/to/file.py:factory", "package.module:factory", "hf:PATH".
    model: str
    factory_args: dict[str, Any] = field(default_factory=dict)
    #: "fake" builds the module without allocating its weights; "real" builds it as the factory does.
    weights: Literal["fake", "real"] = "fake"
    #: The device to build the module on, as torch spells it; None leaves it to the factory.
    device: str | None = None
    #: The default floating-point dtype, as torch spells it; None leaves it to the factory.
    dtype: str | None = None
    #: Folders to put first on `sys.path`.
    pythonpath: tuple[str, ...] = ()
    #: Which compiled part of the model this is; None takes the factory's value.
    prefix: str | None = None
    #: Dynamic dimension → the smallest and largest size that must be served, in addition to the factory's.
    require: dict[str, tuple[int, int]] = field(default_factory=dict)

    def build(self, *, weights: Literal["fake", "real"] | None = None, on_event: OnEvent = ignore) -> ModelSpec:
        """Build the model.

        Args:
            weights: Overrides `self.weights`.
            on_event: Called as torch is imported and the model is built.

        Raises:
            ModelError: The model cannot be found or built.
        """
        began = time.perf_counter()
        on_event(Event(phase="model", message="importing torch"))
        # Imported lazily: it imports torch, which takes seconds.
        from cgtool.models import resolve_model

        on_event(Event(phase="model", message=self.model))
        spec = resolve_model(
            self.model,
            factory_args=dict(self.factory_args),
            weights=weights or self.weights,
            device=self.device,
            dtype=self.dtype,
            pythonpath=self.pythonpath,
        )
        on_event(Event(phase="model", message=self.model, secs=time.perf_counter() - began))
        prefix = spec.prefix if self.prefix is None else self.prefix
        return dataclasses.replace(spec, prefix=prefix, require={**spec.require, **self.require})


def require_cache(config: CompilationConfig) -> None:
    """Raise a UsageError if the configuration switches the cache off."""
    if config.disable_cache:
        message = (
            "The cache is switched off (--no-cache, CGTOOL_DISABLE_CACHE or disable_cache), so nothing is stored or "
            "found. Switch it on and try again; only cgtool.compile works without a cache."
        )
        raise UsageError(message)


def load_call(module: str, place: Mapping[str, Any]) -> str:
    """Return the Python expression that loads `module` with the keyword arguments `place`: "cgtool.load(module)"."""
    return _call("cgtool.load", module, **place)


def start_line(choice: ModelChoice, place: Mapping[str, Any]) -> str:
    """Return a shell command that builds the model with real weights, loads it from the cache and calls it once."""
    build = _call(
        "resolve_model",
        repr(choice.model),
        factory_args=choice.factory_args or None,
        weights="real",
        device=choice.device,
        dtype=choice.dtype,
        pythonpath=choice.pythonpath or None,
    )
    statements = (
        "import cgtool, torch",
        "from cgtool.models import resolve_model",
        f"spec = {build}",
        f"model = {load_call('spec.module', place)}",
        "torch.set_grad_enabled(False)",
        "print(model(*spec.calls[0].args, **spec.calls[0].kwargs))",
    )
    return f"{_python()} -c {_quoted('; '.join(statements))}"


def _call(function: str, first: str, **keywords: Any) -> str:
    named = [f"{name}={value!r}" for name, value in keywords.items() if value is not None]
    return f"{function}({', '.join([first, *named])})"


def _quoted(code: str) -> str:
    # Double quotes around Python's single quotes are more readable, if the shell would not expand anything inside.
    return f'"{code}"' if not set(code) & set('"$`\\!') else shlex.quote(code)


def _python() -> str:
    found = shutil.which("python")
    same = found is not None and Path(found).absolute() == Path(sys.executable).absolute()
    return "python" if same else shlex.quote(sys.executable)
