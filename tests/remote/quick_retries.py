"""Imports the clients of stores and has them retry almost immediately; see `remote_cli`."""

from __future__ import annotations

import contextlib
import importlib

for name in ("stores", "http", "buckets", "oci"):
    with contextlib.suppress(ImportError):  # extras may be missing
        module = importlib.import_module(f"cgtool.remote.{name}")
        if hasattr(module, "BACKOFF_SECS"):
            module.BACKOFF_SECS = 0.01
