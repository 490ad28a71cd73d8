"""Making chunks of bytes in a thread, a few ahead of whoever uses them. Must not import torch.

Reading and hashing let go of Python's lock, and so does packing: the two go on at the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import Full, Queue

_DEPTH = 16
_LOOK_SECS = 0.1


def ahead(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield what `chunks` yields, which runs in a thread of its own; what it raises is raised here.

    Args:
        chunks: It is left where it is when the caller stops early.
    """
    queue: Queue[bytes | BaseException | None] = Queue(_DEPTH)
    stopped = threading.Event()
    maker = threading.Thread(target=_make, args=(chunks, queue, stopped), name="cgtool-ahead", daemon=True)
    maker.start()
    try:
        while (chunk := queue.get()) is not None:
            if isinstance(chunk, BaseException):
                raise chunk
            yield chunk
    finally:
        stopped.set()
        maker.join()


def _make(chunks: Iterator[bytes], queue: Queue[bytes | BaseException | None], stopped: threading.Event) -> None:
    last: BaseException | None = None
    try:
        for chunk in chunks:
            if not _put(queue, chunk, stopped):
                return
    except BaseException as error:  # noqa: BLE001 - it is the caller's, who raises it
        last = error
    _put(queue, last, stopped)


def _put(
    queue: Queue[bytes | BaseException | None], item: bytes | BaseException | None, stopped: threading.Event
) -> bool:
    while not stopped.is_set():
        try:
            queue.put(item, timeout=_LOOK_SECS)
        except Full:
            continue
        return True
    return False
