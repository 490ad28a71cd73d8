"""The line that starts from what was warmed: copyable, and true from the folder in which it was warmed.

Prints nothing; importable without torch.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEFAULT_PREFIX = "backbone"


def load_call(module: str, *, cache_dir: str | None, rank: int, prefix: str) -> str:
    """Return the Python expression that loads `module` from its entry: "cgtool.load(module)".

    Args:
        module: How the expression names the module.
        cache_dir: The cache's root where it is not the default one.
        rank: Named where it is not 0.
        prefix: Named where it is not "backbone".
    """
    return _call(
        "cgtool.load",
        module,
        cache_dir=cache_dir,
        rank=rank or None,
        prefix=None if prefix == DEFAULT_PREFIX else prefix,
    )


def start_line(
    model: str,
    *,
    factory_args: Mapping[str, Any],
    device: str | None,
    dtype: str | None,
    pythonpath: tuple[str, ...],
    cache_dir: str | None,
    rank: int,
    prefix: str,
) -> str:
    """Return a shell line that builds the model for real, loads it from the cache and calls it once.

    Args:
        model: MODEL as it was given to warm; the other arguments likewise.
        factory_args: Keyword arguments for the factory.
        device: Where the module is built.
        dtype: Its default floating dtype.
        pythonpath: Folders put on `sys.path` first.
        cache_dir: The cache's root where it is not the default one.
        rank: This process's place in a model-parallel group.
        prefix: Which compiled part of the model.
    """
    build = _call(
        "resolve_model",
        repr(model),
        factory_args=dict(factory_args) or None,
        weights="real",
        device=device,
        dtype=dtype,
        pythonpath=pythonpath or None,
    )
    statements = (
        "import cgtool, torch",
        "from cgtool.models import resolve_model",
        f"spec = {build}",
        f"model = {load_call('spec.module', cache_dir=cache_dir, rank=rank, prefix=prefix)}",
        "torch.set_grad_enabled(False)",
        "print(model(*spec.calls[0].args, **spec.calls[0].kwargs))",
    )
    return f"{_python()} -c {_quoted('; '.join(statements))}"


def _call(function: str, first: str, **keywords: Any) -> str:
    named = [f"{name}={value!r}" for name, value in keywords.items() if value is not None]
    return f"{function}({', '.join([first, *named])})"


def _quoted(code: str) -> str:
    # Double quotes around Python's single ones read better; the shell must find nothing to expand in them.
    return f'"{code}"' if not set(code) & set('"$`\\!') else shlex.quote(code)


def _python() -> str:
    found = shutil.which("python")
    same = found is not None and Path(found).absolute() == Path(sys.executable).absolute()
    return "python" if same else shlex.quote(sys.executable)
