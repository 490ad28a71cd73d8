"""The files of modules as they are on disk now, by digest. Must not import torch."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from cgtool.digests import sha256_hex
from cgtool.guards.sources import canonical_module_name


def sources_now(modules: Iterable[str]) -> dict[str, str | None]:
    """Return {module: SHA-256 of its file as it is on disk now}, None where there is no such module or file."""
    digests: dict[str, str | None] = {}
    for name in modules:
        module = sys.modules.get(name) or (
            sys.modules["__main__"] if canonical_module_name("__main__") == name else None
        )
        file = getattr(module, "__file__", None)
        try:
            digests[name] = sha256_hex(Path(file).read_bytes()) if file else None
        except OSError:
            digests[name] = None
    return digests
