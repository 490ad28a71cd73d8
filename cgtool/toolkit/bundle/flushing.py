"""Flushing many new files to the disk at a time. Must not import torch.

One flush after another waits for the disk each time; a disk takes many together in the time of one.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from cgtool.store.files import cache_error

_THREADS = 16
#: Files that are open and wait for their flush.
_MOST_OPEN = 64


class Flusher:
    """Flushes and closes files behind the caller's back; what failed is raised at the end of the block."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="cgtool-flush")
        self._free = threading.Semaphore(_MOST_OPEN)
        self._failed: list[tuple[OSError, Path]] = []

    def close(self, descriptor: int, path: Path) -> None:
        """Flush and close a file, now or soon; waits where too many are open."""
        self._free.acquire()
        self._pool.submit(self._close, descriptor, path)

    def _close(self, descriptor: int, path: Path) -> None:
        try:
            os.fsync(descriptor)
        except OSError as error:
            self._failed.append((error, path))
        finally:
            os.close(descriptor)
            self._free.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for every flush.

        Raises:
            CacheError: A file could not be flushed, and nothing else is being raised.
        """
        self._pool.shutdown(wait=True)
        if self._failed and error is None:
            failed, path = self._failed[0]
            raise cache_error(failed, path) from failed
