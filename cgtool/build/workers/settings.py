"""What of torch's global state was changed in the parent and must hold in a worker, as JSON.

Grammar::

    settings = {"torch": {name: value}, "inductor": {name: value}}

Of Inductor's options only those that were changed are written; what the environment gave is the worker's own. The
compiler hash counts most of it too: a worker that could not take over a setting refuses its units.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from cgtool.build.workers import _torch
from cgtool.build.workers.unit import StaysHereError
from cgtool.graph.metas import dtype_of
from cgtool.guards._torch import changed_inductor_settings
from cgtool.pieces import Json

#: name → (how to read it, how to set it). Values are JSON.
_STATE: dict[str, tuple[Callable[[], Json], Callable[[Any], object]]] = {
    "float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic": (
        lambda: [torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()],
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "default_dtype": (
        lambda: str(torch.get_default_dtype()).removeprefix("torch."),
        lambda value: torch.set_default_dtype(dtype_of(value)),
    ),
    "default_device": (
        lambda: str(torch.get_default_device()),
        torch.set_default_device,
    ),
}
#: Switches of torch.backends: dotted names, plain values.
_BACKENDS = (
    "cuda.matmul.allow_tf32",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cudnn.allow_tf32",
    "cudnn.benchmark",
    "cudnn.deterministic",
    "mkldnn.enabled",
)


def changed_settings() -> dict[str, Json]:
    """Return the settings of this process that a worker does not have by itself.

    Raises:
        StaysHereError: One of them is no JSON: a function, an object.
    """
    inductor = changed_inductor_settings()
    for name, value in inductor.items():
        _check(f"torch._inductor.config.{name}", value)
    return {"torch": torch_settings(), "inductor": inductor}


def torch_settings() -> dict[str, Json]:
    """Return what of torch's own state decides what its ops give in this process."""
    return {name: read() for name, (read, _) in _STATE.items()} | {name: _get(name) for name in _BACKENDS}


def apply_settings(settings: Mapping[str, Json]) -> None:
    """Make the settings of another process those of this one, for good: only a worker process does that."""
    if settings.get("inductor"):
        _torch.set_inductor_options(settings["inductor"])
    for name, value in settings.get("torch", {}).items():
        if name in _STATE:
            read, write = _STATE[name]
            if read() != value:
                write(value)
        elif name in _BACKENDS and _get(name) != value:
            _set(name, value)


def _check(name: str, value: Json) -> None:
    try:
        same = json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        same = False
    if not same:
        raise StaysHereError(
            f"the setting {name} is {value!r:.80}, which a file cannot hold; leave it at its default to compile in "
            "worker processes",
            path=name,
        )


def _get(name: str) -> Json:
    value: Any = torch.backends
    for part in name.split("."):
        value = getattr(value, part)
    return value if isinstance(value, bool) else str(value)


def _set(name: str, value: Json) -> None:
    owner: Any = torch.backends
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    setattr(owner, last, value)
