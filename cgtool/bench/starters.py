"""How a built model becomes something to call, for each kind of way. All that a function here does counts as 'ready'.

Imports nothing of torch's compilers as it loads: each start pays for what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cgtool.bench.request import Request
from cgtool.errors import CgtoolError
from cgtool.model import ModelSpec

Starter = Callable[[ModelSpec, Request], Callable[..., Any]]
#: `cgtool.load`, imported as it is first called; given by the floor above.
Load = Callable[..., Callable[..., Any]]


def starter_of(kind: str, load: Load) -> Starter:
    """Return what starts a model in the way of that kind."""

    def start_cgtool(spec: ModelSpec, request: Request) -> Callable[..., Any]:
        return load(spec.module, cache_dir=request.cache, prefix=spec.prefix)

    starters: Mapping[str, Starter] = {
        "eager": _eager,
        "compile": _compile,
        "mega": _mega,
        "precompile": _precompiled,
        "cgtool": start_cgtool,
    }
    return starters[kind]


def _eager(spec: ModelSpec, request: Request) -> Callable[..., Any]:  # noqa: ARG001  a starter's signature
    # The module itself, as a user calls it: its hooks run.
    method: Callable[..., Any] = spec.module if spec.method == "forward" else getattr(spec.module, spec.method)
    return method


def _compile(spec: ModelSpec, request: Request) -> Callable[..., Any]:
    import torch

    from cgtool.bench._torch import mark_dynamic
    from cgtool.bench.inputs import dynamic_tensors

    mark_dynamic(dynamic_tensors(spec))
    return torch.compile(_eager(spec, request))


def _mega(spec: ModelSpec, request: Request) -> Callable[..., Any]:
    import torch

    if torch.compiler.load_cache_artifacts(Path(request.artifact).read_bytes()) is None:
        message = "torch took nothing from its mega-cache. Start in another way."
        raise CgtoolError(message, path=request.artifact)
    return _compile(spec, request)


def _precompiled(spec: ModelSpec, request: Request) -> Callable[..., Any]:
    from cgtool.bench._torch import load_precompiled

    loaded = load_precompiled(Path(request.artifact))

    def call(*args: Any, **kwargs: Any) -> Any:
        return loaded(spec.module, *args, **kwargs)

    return call
