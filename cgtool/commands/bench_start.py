"""The program of one process of a bench: what `cgtool.bench.child` measures, with the two doors that it goes through.

    python -c PROGRAM SYS_PATH_JSON REQUEST_FILE SPAWNED

Must not import torch as it loads: when torch is imported is part of what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cgtool.bench.child import Child
from cgtool.bench.request import Request
from cgtool.model import ModelSpec


def main(arguments: Sequence[str]) -> int:
    """Do what a request says.

    Args:
        arguments: The request's file, and when this process was spawned by the monotonic clock.

    Returns:
        The exit code.
    """
    path, spawned = arguments
    child = Child(Request.read(Path(path)), spawned=float(spawned), resolver=_resolver, load=_load)
    return child.run()


def _resolver() -> Callable[..., ModelSpec]:
    from cgtool.models import resolve_model

    return resolve_model


def _load(*args: Any, **kwargs: Any) -> Callable[..., Any]:
    from cgtool.api import load

    return load(*args, **kwargs)
