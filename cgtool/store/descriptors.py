"""Descriptors of open files that Ctrl-C cannot lose. Must not import torch.

Python raises KeyboardInterrupt as a call returns, which is before the number that `os.open` returned lies in a
variable. A process that goes on after that, as a notebook does, would hold the file for ever.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any


def made(make: Callable[..., int], *arguments: Any) -> Iterable[int]:
    """Return what makes a descriptor as it is unpacked, or as a list is extended by it, within one step of Python.

    Args:
        make: Returns the descriptor: `os.open`, `os.memfd_create`. Must not be written in Python.
        arguments: What it is called with.
    """
    return map(make, *[(argument,) for argument in arguments])


@contextlib.contextmanager
def opened(make: Callable[..., int], *arguments: Any) -> Iterator[int]:
    """Hold a descriptor while the block runs.

    Args:
        make: As for `made`.
        arguments: As for `made`.

    Raises:
        OSError: From `make`.
    """
    [descriptor] = made(make, *arguments)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
