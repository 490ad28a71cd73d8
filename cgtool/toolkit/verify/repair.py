"""Mending what a check found, as far as it goes without compiling. Must not import torch.

    an artifact              linked again from an intact unit or another entry; else it must be compiled
    a corrupt orphan         removed
    a manifest's or a key's  rewritten, where only its spelling was wrong
    plan.json, …             taken from another rank that has the same bytes
    a manifest, plan.json    set aside with its rank's folder, where no other copy is there: the model is warmed again
    key.json                 set aside with the entry: its factors are nowhere else
    a mark of the lookup     made again, from the digests in the manifest
    a unit                   its artifact taken from an entry, or else the unit forgotten: it is compiled when asked for

Setting aside is one rename into the trash, which the next prune or warm empties; everything else is a file written
whole, or removed. So whenever this process dies, each file is as it was or mended, and the next repair goes on. What a
newer cgtool wrote is left alone, and so is what the system does not let be read, which may be as good as ever, and what
lies behind a link in place of a folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from cgtool.errors import CacheCorruptError, CacheError
from cgtool.plan.grammar import sha256_hex
from cgtool.plan.pieces import Json
from cgtool.records import dataclass
from cgtool.store.entry import ObjectStore
from cgtool.store.files import read_bytes, remove, write_atomic
from cgtool.store.layout import ARTIFACTS, KEY_FILE, MANIFEST_FILE, PLAN_FILE, UNIT_FILE, CacheLayout, RankName
from cgtool.store.lock import FileLock
from cgtool.store.lookup import LookupStore
from cgtool.store.pruned import flush, is_inside, put_aside
from cgtool.store.records import Manifest
from cgtool.toolkit.verify.findings import EntryFindings, Problem, UnitFindings

Action = Literal["linked", "rewritten", "removed", "set_aside", "compiled", "not_repaired"]

_WARM = "Warm the model again."
#: Of what was found so nobody knows whether it is damaged.
_UNKNOWN = ("schema", "unreadable")


@dataclass(frozen=True, kw_only=True)
class Repair:
    """What was done about one problem.

    Args:
        path: The file that was wrong.
        action: A stable word for programs.
        sentence: What was done, or why nothing was.
    """

    path: Path
    action: Action
    sentence: str

    def to_json(self, root: Path) -> Json:
        """Return the repair as JSON; its path is spelled below the cache's root."""
        path = self.path.relative_to(root) if self.path.is_relative_to(root) else self.path
        return {"path": str(path), "action": self.action, "sentence": self.sentence}


def repair_entry(layout: CacheLayout, findings: EntryFindings) -> Iterator[Repair]:
    """Mend what can be mended of an entry without compiling, and yield what was done.

    Args:
        layout: Where the cache lies.
        findings: What a check found in the entry; another check tells what is left.

    Raises:
        CacheError: The cache cannot be written.
    """
    problems = [problem for problem in findings.problems if problem.kind not in _UNKNOWN]
    for problem in findings.problems:
        if problem.kind in _UNKNOWN:
            yield Repair(path=problem.path, action="not_repaired", sentence=problem.sentence)
    of_key = [problem for problem in problems if problem.path.name == KEY_FILE]
    if of_key:
        names = [RankName(hash=findings.hash, rank=m.rank, prefix=m.prefix) for m in findings.manifests]
        yield _set_aside(layout, layout.entry_dir(findings.hash), of_key[0].path, names)
        return
    for problem in problems:
        if not is_inside(layout, str(problem.path)):
            yield _behind_link(problem)
        elif problem.kind == "lookup":
            yield _marked(layout, problem.path)
        elif problem.path.parent.name == ARTIFACTS:
            yield from _artifact(layout, findings, problem)
        else:
            yield from _rank_file(layout, findings, problem)


def repair_units(layout: CacheLayout, findings: UnitFindings) -> Iterator[Repair]:
    """Mend units, and yield what was done.

    Args:
        layout: Where the cache lies.
        findings: What a check found among them.

    Raises:
        CacheError: The cache cannot be written.
    """
    for problem in findings.problems:
        path = problem.path
        if problem.kind in _UNKNOWN:
            yield Repair(path=path, action="not_repaired", sentence=problem.sentence)
            continue
        if not is_inside(layout, str(path)):
            yield _behind_link(problem)
            continue
        with FileLock(path.parent / "lock"):
            try:
                data = None if path.name == UNIT_FILE else _copy(_entries(layout, path.name), path.name[:64])
            except CacheError as error:
                yield _left_alone(path, error)
                continue
            if data is not None:
                _write(layout, path, data, mode=0o444)
                yield Repair(path=path, action="linked", sentence=f"{path} was taken from an entry that has it.")
                continue
            remove(path.parent / UNIT_FILE)
            _clear(layout, path)
            yield Repair(path=path, action="removed", sentence=f"{path} was removed: it is compiled when asked for.")


def _behind_link(problem: Problem) -> Repair:
    sentence = (
        f"{problem.path} is behind a link in place of a folder of the cache, and is left as it is. Remove the link."
    )
    return Repair(path=problem.path, action="not_repaired", sentence=sentence)


def _artifact(layout: CacheLayout, findings: EntryFindings, problem: Problem) -> Iterator[Repair]:
    path = problem.path
    digest, _, kind = path.name.partition(".")
    if not any(
        row.artifact.digest == digest and row.artifact.kind == kind for m in findings.manifests for row in m.rows
    ):
        _clear(layout, path)
        yield Repair(path=path, action="removed", sentence=f"{path} was removed: no manifest names it.")
        return
    for source in _elsewhere(layout, path):
        try:
            if _intact(source, digest) is None:
                continue
        except CacheError:
            continue  # another one, or the compiler, does as well
        if not path.is_file():  # a pipe in its place would be waited for
            _clear(layout, path)
        ObjectStore(layout.entry_dir(findings.hash)).link_from(source, digest, kind)
        yield Repair(path=path, action="linked", sentence=f"{path} was taken from {source}, which is intact.")
        return


def _elsewhere(layout: CacheLayout, path: Path) -> Iterator[Path]:
    """Yield where else an artifact may lie: the unit that it was linked from, other entries."""
    with contextlib.suppress(OSError):
        yield from layout.units_dir.glob(f"*/*/{path.name}")
    yield from (other for other in _entries(layout, path.name) if other != path)


def _entries(layout: CacheLayout, name: str) -> Iterator[Path]:
    for hash_ in layout.hashes():
        yield layout.entry_dir(hash_) / ARTIFACTS / name


def _rank_file(layout: CacheLayout, findings: EntryFindings, problem: Problem) -> Iterator[Repair]:
    """Mend a file of a rank's folder, or set the folder aside."""
    path = problem.path
    name = next((n for n in layout.rank_names(findings.hash) if layout.rank_dir(n) == path.parent), None)
    if name is None:
        yield Repair(path=path, action="not_repaired", sentence=problem.sentence)
        return
    manifest = next((m for m in findings.manifests if m.name == name), None)
    if manifest is not None and path.name != MANIFEST_FILE and (wanted := _digest(manifest, path.name)) is not None:
        others = (layout.rank_dir(other.name) / path.name for other in findings.manifests)
        try:
            data = _copy(others, wanted)
        except CacheError as error:
            yield _left_alone(path, error)
            return
        if data is not None:
            _write(layout, path, data)
            yield Repair(path=path, action="rewritten", sentence=f"{path} was taken from another rank.")
            return
        if path.name != PLAN_FILE:
            return  # what is for people alone is written anew by whoever knows the plan
    yield _set_aside(layout, path.parent, path, [name])


def _digest(manifest: Manifest, file: str) -> str | None:
    record = manifest.files.get(file)
    return None if record is None else record.sha256


def _marked(layout: CacheLayout, mark: Path) -> Repair:
    """Make a mark of the lookup again; what is in the place of its folder goes out of the way."""
    if not mark.parent.is_dir():
        remove(mark.parent)
    LookupStore(layout).add(mark.parent.name, mark.name)
    return Repair(path=mark, action="rewritten", sentence=f"{mark} was made again: load finds the entry.")


def _set_aside(layout: CacheLayout, folder: Path, broken: Path, names: Iterable[RankName]) -> Repair:
    """Rename a folder out of the way, while no writer of these ranks is at work."""
    with ExitStack() as locks:
        for name in names:
            locks.enter_context(FileLock(layout.entry_lock(name)))
        target = put_aside(layout, str(folder))
    flush(layout, folder.parent)
    where = "" if target is None else f" as {target}, until the next prune or warm"
    sentence = f"{broken} cannot be made again from what is here, so {folder} was set aside{where}. {_WARM}"
    return Repair(path=broken, action="set_aside", sentence=sentence)


def _left_alone(path: Path, error: CacheError) -> Repair:
    sentence = f"{path} is left as it is, for what it can be mended from could not be read. {error}"
    return Repair(path=path, action="not_repaired", sentence=sentence)


def _copy(places: Iterable[Path], digest: str) -> bytes | None:
    """Return the bytes of the first of several files that holds what it should.

    Raises:
        CacheError: None does, and one could not be read: it may be the one.
    """
    unread: CacheError | None = None
    for place in places:
        try:
            data = _intact(place, digest)
        except CacheError as error:
            unread = error
            continue
        if data is not None:
            return data
    if unread is not None:
        raise unread
    return None


def _intact(path: Path, digest: str) -> bytes | None:
    try:
        data = read_bytes(path)
    except CacheCorruptError:  # it is no file
        return None
    return data if data is not None and sha256_hex(data) == digest else None


def _write(layout: CacheLayout, path: Path, data: bytes, *, mode: int = 0o644) -> None:
    if not path.is_file():
        _clear(layout, path)
    write_atomic(path, data, mode=mode)


def _clear(layout: CacheLayout, path: Path) -> None:
    """Remove a file, or rename a folder that is in a file's place out of the way."""
    if not path.is_dir() or path.is_symlink():
        remove(path)
        return
    put_aside(layout, str(path))
    flush(layout, path.parent)
