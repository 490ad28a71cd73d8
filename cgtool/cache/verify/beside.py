"""Looking into units in other processes, while this one reads the entries. Must not import torch; writes nothing.

Records are small, many, and parsed by Python, of which a process runs one thread at a time. A child is told the folder
`units` and takes each n-th folder in it. For each it writes a line of JSON, and in it the units of which there is
nothing to say::

    ["ab", [[key, artifact's file name, its bytes, the record's bytes], ...]]

All other units, and those of a child that did not come to its end, are looked into here. So nothing of what is found
wrong depends on a child.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from cgtool.cache.layout import CacheLayout
from cgtool.cache.verify.units import Seen, is_unit, sound_units, units_above

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from cgtool.cache.verify.beside import serve; serve(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))"
)
#: A child takes a tenth of a second to start, and a thousand units take about as long.
_WORTH_A_CHILD = 4000
_MOST_CHILDREN = 15


class Beside:
    """Children that look into units.

    Args:
        base: The folder `units`.
        count: How many children; none look into nothing.
    """

    def __init__(self, base: str, count: int) -> None:
        self._above = {above: number % count for number, above in enumerate(units_above(base))} if count else {}
        self._children: list[subprocess.Popen[bytes]] = []
        self._lines: dict[int, Future[list[bytes]]] = {}
        self._readers = ThreadPoolExecutor(max(count, 1), "cgtool-beside")
        for number in range(count):
            self._start(base, number, count)
        self._seen: dict[int, dict[str, bytes]] = {}

    def _start(self, base: str, number: int, count: int) -> None:
        command = [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path), base, str(number), str(count)]
        with contextlib.suppress(OSError):  # no memory for it, say: then it is done here
            child = subprocess.Popen(  # noqa: S603 - this very Python
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            self._children.append(child)
            if child.stdout is not None:
                self._lines[number] = self._readers.submit(child.stdout.readlines)

    def seen_in(self, above: str) -> Mapping[str, Seen]:
        """Return what a child saw in a folder of units, by the units' keys; waits until the child is done.

        Args:
            above: The folder's name.
        """
        number = self._above.get(above)
        if number is None or number not in self._lines:
            return {}
        if number not in self._seen:
            self._seen[number] = dict(map(_parted, self._lines[number].result()))
        line = self._seen[number].pop(above, b"")
        return _parsed(line, above)

    def close(self) -> None:
        """End the children, and wait until they have."""
        for child in self._children:
            child.kill()
        self._readers.shutdown()
        for child in self._children:
            child.wait()
            if child.stdout is not None:
                child.stdout.close()


def _parted(line: bytes) -> tuple[str, bytes]:
    return line[2:].partition(b'"')[0].decode("ascii", "replace"), line


def _parsed(line: bytes, above: str) -> dict[str, Seen]:
    try:
        _, units = json.loads(line)
    except ValueError:  # the child came to no end
        return {}
    return {
        key: Seen(name=name, size_bytes=size, record_bytes=record, num_records=1)
        for key, name, size, record in units
        if is_unit(key, above)
    }


@contextlib.contextmanager
def beside(layout: CacheLayout, jobs: int) -> Iterator[Beside]:
    """Start children where a cache has enough units for them; they end with the block, whatever ends it.

    Args:
        layout: Where the cache lies.
        jobs: How many processes may run, with this one.
    """
    base = str(layout.units_dir)
    count = min(jobs - 1, _MOST_CHILDREN, _about(base) // _WORTH_A_CHILD)
    if not sys.executable or getattr(sys, "frozen", False):  # a program that is no Python
        count = 0
    children = Beside(base, count)
    try:
        yield children
    finally:
        children.close()


def _about(base: str) -> int:
    """Return about how many units there are: keys are spread evenly over the folders."""
    above = units_above(base)
    some = above[:8]
    return sum(len(units_above(f"{base}/{name}")) for name in some) * len(above) // max(len(some), 1)


def serve(base: str, first: int, step: int) -> None:
    """Write what this child sees to its standard output; see the module's grammar."""
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):  # whoever asked says so
        for above in units_above(base)[first::step]:
            units = [
                [key, seen.name, seen.size_bytes, seen.record_bytes] for key, seen in sound_units(base, above).items()
            ]
            sys.stdout.write(json.dumps([above, units], separators=(",", ":")) + "\n")
