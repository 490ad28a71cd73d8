"""A small cache with every file that a check reads, and bits to flip in it. Imports no torch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cache_samples import UNIT, files_of, manifest_of, put_row, sample_key, writer

from cgtool.store.layout import CacheLayout
from cgtool.store.records import Artifact
from cgtool.store.units import UnitStore

HASH = sample_key().hash
NATIVE = bytes(range(256)) * 3


def lay(root: Path) -> CacheLayout:
    """Create an entry of two ranks that share an artifact, and a unit that the entry links to."""
    layout = CacheLayout(root=root)
    units = UnitStore(layout)
    record = Artifact.of(NATIVE, kind="eager", compile_secs=1e-7, kernels=1, guards=("s0 < 9é",))
    units.put(UNIT, NATIVE, record)
    for rank in (0, 1):
        to = writer(root, rank=rank)
        units.link_into(to.objects, UNIT, record)
        rows = (
            put_row(to, data=NATIVE),
            put_row(to, piece=2, data=b"rank %d" % rank),
            put_row(to, shape="num_tokens=8", data=b"8"),
        )
        to.publish(manifest_of(to, rows, model="modèle"), files_of(f"rank {rank}"))
    return layout


def entry_files(layout: CacheLayout) -> list[Path]:
    """Every file of the entry, sorted."""
    return sorted(path for path in layout.entry_dir(HASH).rglob("*") if path.is_file())


@dataclass(frozen=True, kw_only=True)
class Flip:
    """One bit of one file."""

    path: Path
    at: int
    bit: int

    def do(self) -> None:
        """Flip the bit in place, so that the inode stays the same, as on a failing disk."""
        mode = self.path.stat().st_mode
        self.path.chmod(0o644)
        with self.path.open("r+b") as file:
            file.seek(self.at)
            (value,) = file.read(1)
            file.seek(self.at)
            file.write(bytes([value ^ (1 << self.bit)]))
        self.path.chmod(mode)


def flips(files: list[Path], count: int, *, seed: int) -> Iterator[Flip]:
    """Yield seeded flips, distributed over the files by size."""
    draw = random.Random(seed)
    sizes = [path.stat().st_size for path in files]
    for path in draw.choices(files, sizes, k=count):
        yield Flip(path=path, at=draw.randrange(path.stat().st_size), bit=draw.randrange(8))
