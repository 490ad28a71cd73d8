"""Warm a small base model of transformers with the `eager` adaptor, load it, and compare it with eager.

An outcome is one of::

    "served"           equals eager at every size that was tried
    "eager: ..."       no small configuration runs in eager: why
    "refused: ..."     cgtool's own error
    "defect: ..."      anything else: a wrong result, another error, a crash, a timeout
"""

from __future__ import annotations

import copy
import dataclasses
import json
import multiprocessing
from pathlib import Path
from typing import Any

import tiny_configs
import torch
from torch.utils._pytree import tree_leaves
from transformers import CONFIG_MAPPING

import cgtool
from cgtool import CompilationConfig, ModelSpec
from cgtool.compiler.pipeline import warm
from cgtool.errors import CgtoolError
from cgtool.models import resolve_model

MOST_PARAMETERS = 300_000_000
CONFIG = CompilationConfig(adaptor="eager", jobs=0)
#: Sizes of the dynamic dimensions, by the names that `hf:` gives them, besides those of the example.
SIZES = (
    {"batch": 2, "images": 2, "seq": 9, "target": 3},
    {"batch": 3, "images": 3, "seq": 7, "target": 5},
    {"batch": 5, "images": 4, "seq": 11, "target": 2},
)


def outcome(name: str, folder: Path) -> str:
    """Return the outcome for an architecture (`model_type`); `folder` is empty and receives its config and cache."""
    spec, why = runnable(name, folder)
    if spec is None:
        return f"eager: {why}"
    try:
        with torch.no_grad():
            warm(_above_one(resolve_model(f"hf:{folder}")), config=CONFIG, cache_dir=folder / "cache")
            loaded = cgtool.load(spec.module, cache_dir=folder / "cache")
    except CgtoolError as error:
        return f"refused: {error}"
    except Exception as error:  # noqa: BLE001 - any other error is a defect
        return f"defect: {type(error).__name__}: {error}"
    return compared(spec, loaded)


def outcome_apart(name: str, folder: Path, *, limit_secs: float) -> str:
    """Return the outcome, determined in a separate process that may crash or hang."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sweep"])
    report = folder / "outcome.txt"
    process = context.Process(target=_write_outcome, args=(name, folder, report))
    process.start()
    process.join(limit_secs)
    if process.is_alive():
        process.kill()
        process.join()
        return f"defect: no end within {limit_secs:.0f} s"
    return report.read_text() if report.is_file() else f"defect: a crash, exit code {process.exitcode}"


def _write_outcome(name: str, folder: Path, report: Path) -> None:
    torch.set_num_threads(1)
    report.write_text(outcome(name, folder))


def runnable(name: str, folder: Path) -> tuple[ModelSpec | None, str]:
    """Return the smallest candidate of the architecture that runs in eager, with real weights; else None and why."""
    why = ""
    for fields in tiny_configs.candidates(CONFIG_MAPPING[name]):
        (folder / "config.json").write_text(json.dumps(fields))
        try:
            if sum(weight.numel() for weight in resolve_model(f"hf:{folder}").module.parameters()) > MOST_PARAMETERS:
                why = why or "it has no small configuration"
                continue
            spec = resolve_model(f"hf:{folder}", weights="real")
            with torch.no_grad():
                spec.module(**copy.deepcopy(spec.calls[0].kwargs))
        except Exception as error:  # noqa: BLE001 - an inconsistent configuration may fail in any way
            why = why or f"{type(error).__name__}: {error}"
        else:
            return spec, ""
    return None, why


def _above_one(spec: ModelSpec) -> ModelSpec:
    """Restrict a spec to sizes from 2, which gives it a single variant."""
    named = {
        parameter: {
            dim: (name, 2, None) if isinstance(name, str) else (name[0], 2, name[2]) for dim, name in of.items()
        }
        for parameter, of in spec.dynamic.items()
    }
    return dataclasses.replace(spec, dynamic=named)


def compared(spec: ModelSpec, loaded: Any, *, tolerance: float = 1e-4) -> str:
    """Compare both at every size. A refusal is fine except for the sizes of the example."""
    for index, sizes in enumerate(({}, *SIZES)):
        kwargs = _resized(spec, sizes)
        with torch.no_grad():
            try:
                expected = _seeded(spec.module, kwargs)
            except Exception:  # noqa: BLE001 - the model itself does not run at this size
                continue
            try:
                got = _seeded(loaded, kwargs)
            except CgtoolError as error:
                if index == 0:
                    return f"refused: {error}"
                continue
        try:
            torch.testing.assert_close(
                _tensors(got), _tensors(expected), rtol=tolerance, atol=tolerance, equal_nan=True
            )
        except AssertionError as error:
            return f"defect: at {sizes or 'the sizes of the example'}: {error}"
    return "served"


def _resized(spec: ModelSpec, sizes: dict[str, int]) -> dict[str, Any]:
    resized = dict(spec.calls[0].kwargs)
    for parameter, dims in spec.dynamic.items():
        for dim, dynamic in dims.items():
            name, _, most = (dynamic, 1, None) if isinstance(dynamic, str) else dynamic
            was = resized[parameter].shape[dim]
            size = min(sizes.get(name, was), most or was * 8)
            resized[parameter] = resized[parameter].index_select(
                dim, torch.arange(size, device=resized[parameter].device) % was
            )
    return resized


def _seeded(function: Any, kwargs: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return function(**copy.deepcopy(kwargs))


def _tensors(value: Any) -> list[torch.Tensor]:
    plain = value.to_tuple() if hasattr(value, "to_tuple") else value
    return [leaf for leaf in tree_leaves(plain) if isinstance(leaf, torch.Tensor)]
