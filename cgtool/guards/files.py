"""The files of modules as they are on disk now, by digest. Must not import torch."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

from cgtool.digests import sha256_hex
from cgtool.guards.sources import canonical_module_name


def sources_now(modules: Iterable[str]) -> dict[str, str | None]:
    """Return {module: SHA-256 of its file as it is on disk now}, None where there is no such module or file."""
    digests: dict[str, str | None] = {}
    for name in modules:
        file = _file_of(name)
        try:
            digests[name] = sha256_hex(Path(file).read_bytes()) if file else None
        except OSError:
            digests[name] = None
    return digests


def _file_of(name: str) -> str | None:
    module = sys.modules.get(name)
    if module is None and canonical_module_name("__main__") == name:
        module = sys.modules["__main__"]
    if module is not None:
        return getattr(module, "__file__", None)
    try:
        # One that forward imports need not have been imported yet, and is not run for this.
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    return spec.origin if spec is not None and spec.has_location else None
