"""Garbage collection and a start: none of what a start makes is garbage. Imports the standard library alone."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Put off collections while the block runs.

    After `import torch` a full collection looks at some 170,000 objects, which takes longer than all else that a start
    does, and the objects that a start makes bring one about. Nothing is lost: the next one finds what became garbage.
    """
    if not gc.isenabled():
        yield
        return
    try:
        gc.disable()
        yield
    finally:
        gc.enable()
