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
    What was made counts as old afterwards, so that it is the next full one, and no quick one, that looks at all of it.
    """
    if not gc.isenabled():
        yield
        return
    try:
        gc.disable()
        yield
    finally:
        if not gc.get_freeze_count():  # else somebody froze what must stay so
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        gc.enable()
