"""One base model of transformers, small: warmed with the `eager` adaptor, loaded, and held to eager's word.

An outcome is one of::

    "served"           every size that was tried gave what eager gives
    "eager: ..."       no small configuration was found that eager itself runs: why
    "refused: ..."     cgtool says in a sentence why not
    "defect: ..."      anything else: another answer, another error, a crash, no end
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
#: Sizes of the dynamic dimensions, by what `hf:` calls them, beside those of the example.
SIZES = (
    {"batch": 2, "images": 2, "seq": 9, "target": 3},
    {"batch": 3, "images": 3, "seq": 7, "target": 5},
    {"batch": 5, "images": 4, "seq": 11, "target": 2},
)


def outcome(name: str, folder: Path) -> str:
    """Return what came of an architecture (`model_type`); `folder` is empty and takes its config and its cache."""
    spec, why = runnable(name, folder)
    if spec is None:
        return f"eager: {why}"
    try:
        with torch.no_grad():
            warm(_above_one(resolve_model(f"hf:{folder}")), config=CONFIG, cache_dir=folder / "cache")
            loaded = cgtool.load(spec.module, cache_dir=folder / "cache")
    except CgtoolError as error:
        return f"refused: {error}"
    except Exception as error:  # noqa: BLE001 - whatever else it is, it should have been a sentence
        return f"defect: {type(error).__name__}: {error}"
    return compared(spec, loaded)


def outcome_apart(name: str, folder: Path, *, limit_secs: float) -> str:
    """Return the outcome, found in a process of its own that may crash or hang."""
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
    """Return the smallest of the architecture's small models that eager runs, with real weights."""
    said = ""
    for fields in tiny_configs.candidates(CONFIG_MAPPING[name]):
        (folder / "config.json").write_text(json.dumps(fields))
        try:
            if sum(weight.numel() for weight in resolve_model(f"hf:{folder}").module.parameters()) > MOST_PARAMETERS:
                said = said or "it has no small configuration"
                continue
            spec = resolve_model(f"hf:{folder}", weights="real")
            with torch.no_grad():
                spec.module(**copy.deepcopy(spec.calls[0].kwargs))
        except Exception as error:  # noqa: BLE001 - a configuration that does not hold together fails in any way
            said = said or f"{type(error).__name__}: {error}"
        else:
            return spec, ""
    return None, said


def _above_one(spec: ModelSpec) -> ModelSpec:
    """Return a spec of one variant: sizes from 2."""
    named = {
        parameter: {
            dim: (name, 2, None) if isinstance(name, str) else (name[0], 2, name[2]) for dim, name in of.items()
        }
        for parameter, of in spec.dynamic.items()
    }
    return dataclasses.replace(spec, dynamic=named)


def compared(spec: ModelSpec, loaded: Any, *, tolerance: float = 1e-4) -> str:
    """Call both at every size; a size that was not warmed for is refused, and the example's must be served."""
    for index, sizes in enumerate(({}, *SIZES)):
        kwargs = _resized(spec, sizes)
        with torch.no_grad():
            try:
                expected = _seeded(spec.module, kwargs)
            except Exception:  # noqa: BLE001 - a size that the model itself does not run at, which it says as it likes
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
        for dim, said in dims.items():
            name, _, most = (said, 1, None) if isinstance(said, str) else said
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
