"""Caches to prune, and concurrent changes to them. Must not import torch."""

from __future__ import annotations

import os
from pathlib import Path

from cache_maker import manifest_of

from cgtool.plan.grammar import digest_of
from cgtool.store.entry import EntryWriter, read_entry
from cgtool.store.layout import CacheLayout, RankName
from cgtool.store.records import Artifact, Factor, Key, Row, VariantCounts
from cgtool.store.units import UnitStore

DAY = 86400.0
MODELS = ("Llama", "Qwen")


def lay(
    root: Path,
    number: int,
    *,
    model: str = "Toy",
    created: str = "2026-01-01T00:00:00.000Z",
    pieces: tuple[str, ...] = ("own",),
    used: float | None = None,
    rank: int = 0,
    factors: tuple[Factor, ...] = (),
    facts: str | None = None,
) -> RankName:
    """Publish an entry whose artifacts are units of the cache; entries share the units of equal pieces.

    Args:
        number: The number of the entry, which changes its hash.
        pieces: The text of each artifact; "own" is unique to this entry.
        used: The time of the last load, in seconds since the epoch.
        facts: The digest of its lookup key; None means that of the model.
    """
    layout = CacheLayout(root=root)
    key = Key.of([Factor(name="config", value=number), *factors])
    writer = EntryWriter(layout, key, rank=rank, prefix="backbone")
    units = UnitStore(layout)
    rows = []
    for index, text in enumerate(pieces):
        data = f"{text} {number if text == 'own' else ''}".encode() * 100
        unit = digest_of(data.decode())
        record = units.find(unit) or put_unit(units, unit, data)
        units.link_into(writer.objects, unit, record)
        rows.append(Row(variant=0, shape={}, piece_index=index, adaptor="eager", artifact=record))
    manifest = manifest_of(
        writer.name,
        model=model,
        adaptor="eager",
        splitting_ops=(),
        variants=(VariantCounts(name="default", pieces=9, splitting_pieces=0, unique_pieces=9),),
        rows=tuple(rows),
        created=created,
        lookup=(facts_of(model) if facts is None else facts,),
    )
    writer.publish(manifest, {"plan.json": b"{}", "computation_graph.py": b"#\n", "transformed_code.py": b"##\n"})
    if used is not None:
        path = layout.used_file(writer.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b".")
        os.utime(path, (used, used))
    return writer.name


def put_unit(units: UnitStore, key: str, data: bytes) -> Artifact:
    with units.lock(key):
        record = Artifact.of(data, kind="eager", compile_secs=1.0, kernels=1)
        units.put(key, data, record)
        return record


def facts_of(model: str) -> str:
    return digest_of(["facts", model])


def is_whole(root: Path, name: RankName) -> bool:
    """Return whether an entry exists; an incomplete entry is an error."""
    layout = CacheLayout(root=root)
    entry = read_entry(layout, name, files=("plan.json", "computation_graph.py", "transformed_code.py"))
    if entry is None:
        return False
    for row in entry.manifest.rows:
        entry.artifact(row.artifact)
    if not layout.key_file(name.hash).exists():
        raise AssertionError("an entry without its key")
    return True


def units_in(root: Path) -> set[str]:
    return {path.name for path in CacheLayout(root=root).units_dir.glob("*/*")}


def files_in(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}


def rest(path: Path, secs: float) -> None:
    """Make a file or folder appear unchanged for some time."""
    at = path.lstat().st_mtime - secs
    os.utime(path, (at, at), follow_symlinks=False)
