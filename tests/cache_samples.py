"""Sample entries for tests and the processes that they start. Must not import torch."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

from msgspec.structs import replace

from cgtool.plan.shapes import parse_shape, shape_text
from cgtool.store import leases
from cgtool.store import lock as lock_module
from cgtool.store.entry import Entry, EntryWriter, read_entry
from cgtool.store.key import read_key
from cgtool.store.layout import CacheLayout, RankName
from cgtool.store.machine import Driver, Machine
from cgtool.store.records import Artifact, Factor, Key, Manifest, Row, VariantCounts
from cgtool.store.units import UnitStore

FACTS = "cd" * 32
UNIT = "ab" * 32
#: A fully described machine with a GPU.
MACHINE = Machine(
    torch={"version": "2.13.0+cu130", "version_git": "cf30", "with_cuda": "13.0", "with_hip": None},
    triton="3.7.0",
    python="cpython 3.12",
    python_version="3.12.4",
    compiler="(Debian 12.2.0) 12.2.0",
    machine="x86_64",
    capability="AVX512",
    instructions="ab" * 32,
    accelerators=("sm_90 x132",),
    driver=Driver(cuda="13.0", version="580.65", devices=("sm_90 x132",)),
    glibc="2.36",
    code_variables={},
    cgtool={"version": "0.1.0", "source": None},
)


def sample_key(level: int = 3) -> Key:
    return Key.of([Factor(name="config", value={"level": level}), Factor(name="torch", value="2.13.0")])


def writer(root: Path, *, level: int = 3, rank: int = 0, prefix: str = "backbone") -> EntryWriter:
    return EntryWriter(CacheLayout(root=root), sample_key(level), rank=rank, prefix=prefix)


def put_row(to: EntryWriter, *, shape: str = "general", piece: int = 0, data: bytes = b"code", variant: int = 0) -> Row:
    digest = to.objects.put(data, "eager")
    return Row(
        variant=variant,
        shape=parse_shape(shape),
        piece_index=piece,
        adaptor="eager",
        artifact=Artifact(digest=digest, kind="eager", size_bytes=len(data), compile_secs=1.5, kernels=2),
    )


def manifest_of(to: EntryWriter, rows: tuple[Row, ...], *, model: str = "Toy") -> Manifest:
    return Manifest(
        hash=to.name.hash,
        rank=to.name.rank,
        prefix=to.name.prefix,
        model=model,
        level=3,
        adaptor="eager",
        splitting_ops=("ns::attn",),
        variants=(VariantCounts(name="default", pieces=9, splitting_pieces=4, unique_pieces=3),),
        rows=rows,
        lookup=(FACTS,),
    )


def files_of(text: str) -> dict[str, bytes]:
    return {
        "plan.json": json.dumps({"text": text}).encode(),
        "computation_graph.py": f"# {text}\n".encode(),
        "transformed_code.py": f"## {text}\n".encode(),
    }


def publish(root: Path, text: str = "one", *, level: int = 3, rank: int = 0, prefix: str = "backbone") -> RankName:
    """Publish an entry of one artifact with `text` in each of its parts."""
    to = writer(root, level=level, rank=rank, prefix=prefix)
    row = put_row(to, data=text.encode())
    to.publish(manifest_of(to, (row,), model=text), files_of(text))
    return to.name


def read_whole(root: Path, name: RankName) -> str | None:
    """Read all parts of an entry made by `publish` and return their text; a mixture is an error."""
    entry = read_entry(CacheLayout(root=root), name, files=tuple(files_of("")))
    return None if entry is None else text_of(entry)


def text_of(entry: Entry) -> str:
    text = entry.manifest.model
    artifacts = [entry.artifact(row.artifact) for row in entry.manifest.rows if not row.shape]
    if dict(entry.files) != files_of(text) or artifacts != [text.encode()]:
        raise AssertionError(f"a mixture: {text}, {entry.files}, {artifacts}")
    return text


def view(root: Path) -> dict[str, object]:
    """The content of a cache as readers see it: each rank's rows, its files and artifacts, and its signers."""
    layout = CacheLayout(root=root)
    found: dict[str, object] = {}
    for hash_ in layout.hashes():
        for name in layout.rank_names(hash_):
            entry = read_entry(layout, name, files=())
            if entry is None:
                continue
            if read_key(layout, hash_) is None:
                raise AssertionError(f"{name} has no key")
            entry = read_entry(layout, name, files=entry.manifest.files)
            artifacts = tuple(entry.artifact(row.artifact) for row in entry.manifest.rows)
            found[name.flat] = (
                tuple(shape_text(row.shape) for row in entry.manifest.rows),
                dict(entry.files),
                artifacts,
            )
    return found


def leftovers(root: Path) -> list[str]:
    """The names of hidden files, which are being published or were left behind by a dead writer."""
    return sorted(path.name for path in root.rglob(".*") if path.is_file())


# Functions that other processes run.


def publish_times(root: Path, texts: tuple[str, ...], times: int, until: Path | None = None) -> None:
    """Publish each text `count` times, and then until a file exists."""
    for done in itertools.count(1):
        for text in texts:
            publish(root, text)
        if done >= times and (until is None or until.exists()):
            return


def add_sizes(root: Path, sizes: tuple[int, ...]) -> None:
    to = writer(root)
    for size in sizes:
        to.add_rows([put_row(to, shape=f"num_tokens={size}", piece=size % 9, data=f"size {size}".encode())])


def compile_unit(root: Path, log: Path, secs: float, *, die: bool = False) -> None:
    units = UnitStore(CacheLayout(root=root))
    with units.lock(UNIT):
        if units.find(UNIT) is None:
            with log.open("a") as stream:
                stream.write("compiled\n")
            time.sleep(secs)
            if die:
                os.kill(os.getpid(), signal.SIGKILL)
            units.put(UNIT, b"unit", Artifact.of(b"unit", kind="eager", compile_secs=secs, kernels=1))


def without_locks(function: Callable[..., None], *args: object) -> None:
    with no_flock():
        function(*args)


def no_flock(number: int = errno.ENOLCK) -> AbstractContextManager[Any]:
    """A file system on which flock fails."""
    return mock.patch.object(leases.fcntl, "flock", side_effect=OSError(number, os.strerror(number)))


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """A process that has reached its limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    kept = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                kept.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in kept:
            os.close(descriptor)


def run_beside(*work: tuple[Callable[..., None], tuple[object, ...]]) -> None:
    """Call functions with their arguments concurrently, each in its own process, and check that none fails."""
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=function, args=arguments) for function, arguments in work]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(processes)


def hold_lock(path: Path, held: Path) -> None:
    with lock_module.file_lock(path):
        held.touch()
        time.sleep(60)


def with_shape(row: Row, shape: str) -> Row:
    return replace(row, shape=parse_shape(shape))


def sealed(record: Mapping[str, object]) -> bytes:
    """Arbitrary fields as JSON with a valid seal."""
    kept = {name: value for name, value in record.items() if name != "sha256"}
    body = json.dumps(kept, indent=1).removesuffix("\n}").encode()
    return body + b',\n "sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


def resealed(data: bytes, change: Callable[[dict[str, Any]], object] | dict[str, Any]) -> bytes:
    """The text of a sealed file with changed fields and a valid seal."""
    record = json.loads(data)
    if callable(change):
        change(record)
    else:
        record.update(change)
    return sealed(record)
