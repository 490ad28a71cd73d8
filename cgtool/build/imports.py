"""Importing the modules that register a piece's custom ops, in a process that never saw the model.

One item is {"module": name, "file": path or null}: a file is named where the module is no module that an import
statement finds, as a script that the user named by its path. Must not import torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cgtool.errors import ModelError


def import_providers(imports: Iterable[Mapping[str, Any]]) -> None:
    """Import each module once, in order.

    Args:
        imports: See the head of this module.

    Raises:
        ModelError: A module is not here, or its code raised.
    """
    for item in imports:
        name, file = str(item["module"]), item.get("file")
        if name in sys.modules:
            continue
        try:
            if file is None:
                importlib.import_module(name)
            else:
                _import_file(name, Path(file))
        except Exception as error:  # the code of a user raises what it likes
            raise ModelError(
                f"{file or name}, which provides custom ops of the model, could not be imported by a process that "
                f"builds its pieces: {type(error).__name__}: {error}. Make it importable from a fresh process.",
                path=str(file or name),
                actual=str(error),
            ) from error


def _import_file(name: str, path: Path) -> None:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        msg = f"{path} is no Python file"
        raise ImportError(msg)
    folder = str(path.parent)
    if folder not in sys.path:  # as for a script: its neighbours can be imported
        sys.path.insert(0, folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:  # whatever ended it: half a module is none
        del sys.modules[name]
        raise
