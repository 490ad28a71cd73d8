"""`verify --repair`: fix the problems that a check finds. Importable without torch; compiling imports it.

The repair depends on the damaged file (see the table in `cgtool.toolkit.verify.checks`)::

    an artifact              linked from an intact unit or another entry; otherwise compiled from the stored plan
    a corrupt orphan         removed
    plan.json, texts         copied from another rank that has the same bytes; a text is otherwise rewritten
    a manifest, plan.json    set aside with the rank's folder if no copy exists: the model must be warmed again
    key.json                 set aside with the entry: nothing else holds its factors
    a lookup marker          recreated from the digests in the manifest
    a unit                   its artifact copied from an entry; otherwise the unit is removed, and compiled on demand

Setting aside is one rename into the trash, which the next prune or warm empties; every other repair writes or removes a
whole file. A repair that is killed therefore leaves each file as it was or repaired, and the next repair continues.

Not repaired are files that a newer cgtool wrote, files that the system does not allow to be read, which may be intact,
and files behind a symlink in place of a folder. Nothing is compiled for an entry that this machine does not support,
because its key names another machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from cgtool.config import CompilationConfig
from cgtool.errors import CacheCorruptError, CacheError, CgtoolError
from cgtool.events import OnEvent
from cgtool.plan.grammar import Record, sha256_hex
from cgtool.plan.pieces import EAGER
from cgtool.plan.shapes import Shape, is_size, of_sizes, shape_text
from cgtool.store.entry import Entry, EntryWriter, ObjectStore, entry_with_plan
from cgtool.store.files import ARTIFACT_MODE, RECORD_MODE, read_bytes, remove, write_atomic
from cgtool.store.layout import (
    ARTIFACTS,
    CODE_FILE,
    KEY_FILE,
    MANIFEST_FILE,
    PLAN_FILE,
    UNIT_FILE,
    CacheLayout,
    RankName,
)
from cgtool.store.lock import file_lock
from cgtool.store.lookup import LookupStore
from cgtool.store.pruned import flush, is_inside, put_aside
from cgtool.store.records import Key, Manifest
from cgtool.toolkit.coverage import Hole
from cgtool.toolkit.verify.checks import EntryCheck, Finding, Findings
from cgtool.toolkit.verify.verdict import Verdict, process_settings

#: (variant, piece index, shape, adaptor, tuned): a row without its artifact.
_Place = tuple[int, int, Shape, str, bool]

_WARM = "Warm the model again."
_LOST = b"# This file was damaged. It is for people only; loading does not need it.\n"


Action = Literal["linked", "rewritten", "removed", "set_aside", "compiled", "not_repaired"]


class Repair(Record, frozen=True, kw_only=True):
    """The repair of one problem, as `verify --json` prints it."""

    #: The damaged file, relative to the cache's root.
    path: str
    #: Stable, for programs.
    action: Action
    #: What was done, or why nothing was done.
    sentence: str

    @property
    def is_done(self) -> bool:
        """Whether the problem was repaired."""
        return self.action != "not_repaired"


def repair_entry(layout: CacheLayout, found: EntryCheck) -> Iterator[Repair]:
    """Repair what can be repaired of an entry without compiling, and yield each repair."""
    folder = layout.entry_dir(found.name)
    repairable = []
    for problem in found.problems:
        skipped = _skipped(layout, problem)
        if skipped is not None:
            yield skipped
        else:
            repairable.append(problem)
    of_key = [problem for problem in repairable if layout.root / problem.path == folder / KEY_FILE]
    if of_key:
        yield _set_aside(layout, folder, of_key[0], [manifest.name for manifest in found.manifests])
        return
    for problem in repairable:
        above = (layout.root / problem.path).parent
        if problem.kind == "lookup":
            yield _recreate_marker(layout, problem)
        elif above == folder / ARTIFACTS:
            yield from _repair_artifact(layout, found, problem)
        else:
            yield from _repair_rank_file(layout, found, problem)


def repair_units(layout: CacheLayout, found: Findings) -> Iterator[Repair]:
    """Repair units, and yield each repair."""
    for problem in found.problems:
        path = layout.root / problem.path
        skipped = _skipped(layout, problem)
        if skipped is not None:
            yield skipped
            continue
        with file_lock(path.parent / "lock"):
            try:
                data = None if path.name == UNIT_FILE else _copy(_in_entries(layout, path.name), path.name[:64])
            except CacheError as error:
                yield _unreadable_source(problem, path, error)
                continue
            if data is not None:
                _put(layout, path, data, mode=ARTIFACT_MODE)
                yield _repair(problem, "linked", f"{path} was copied from an entry.")
                continue
            remove(path.parent / UNIT_FILE)
            _clear(layout, path)
            yield _repair(problem, "removed", f"{path} was removed: it is compiled again when needed.")


def compile_again(
    layout: CacheLayout, found: EntryCheck, holes: Iterable[Hole], verdict: Verdict, on_event: OnEvent
) -> Iterator[Repair]:
    """Compile the damaged artifacts and the holes of an entry from its plan, and yield each repair."""
    folder = layout.entry_dir(found.name) / ARTIFACTS
    paths_of = [layout.root / problem.path for problem in found.problems]
    broken = {path.name: path for path in paths_of if path.parent == folder}
    holes = list(holes)
    if found.key is None or not (broken or holes):
        return
    for manifest in found.manifests:
        rows = [row for row in manifest.rows if row.artifact.file in broken]
        places = [(row.variant, row.piece_index, row.shape, row.adaptor, row.tuned) for row in rows]
        of_rank = (hole for hole in holes if (hole.rank, hole.prefix) == (manifest.rank, manifest.prefix))
        places += [_place_of_hole(manifest, hole) for hole in of_rank]
        if not places:
            continue
        paths = sorted({broken[row.artifact.file] for row in rows}) or [layout.manifest_file(manifest.name)]
        obstacle = _obstacle(found.key, verdict)
        try:
            if not obstacle:
                _compile(layout, found.key, manifest.name, places, on_event)
        except CgtoolError as error:
            obstacle = str(error)
        for path in paths:
            below = str(path.relative_to(layout.root))
            if obstacle:
                yield Repair(path=below, action="not_repaired", sentence=f"{path} was not recompiled: {obstacle}")
            else:
                yield Repair(path=below, action="compiled", sentence=f"{path}: its pieces were recompiled.")


def _repair_artifact(layout: CacheLayout, found: EntryCheck, problem: Finding) -> Iterator[Repair]:
    """Restore an artifact from an intact copy; a misplaced one matches its digest, and must be compiled instead."""
    path = layout.root / problem.path
    digest, _, kind = path.name.partition(".")
    if not any(row.artifact.file == path.name for manifest in found.manifests for row in manifest.rows):
        _clear(layout, path)
        yield _repair(problem, "removed", f"{path} was removed: no manifest names it.")
        return
    if problem.kind == "misplaced":
        return
    units: list[Path] = []
    with contextlib.suppress(OSError):
        units += layout.units_dir.glob(f"*/*/{path.name}")
    for source in (*units, *_in_entries(layout, path.name)):
        try:
            if source == path or _intact(source, digest) is None:
                continue
        except CacheError:
            continue  # another copy, or the compiler, will do
        if not path.is_file():  # opening a pipe in its place would block
            _clear(layout, path)
        ObjectStore(layout.entry_dir(found.name)).link_from(source, digest, kind)
        yield _repair(problem, "linked", f"{path} was copied from {source}, which is intact.")
        return


def _in_entries(layout: CacheLayout, name: str) -> Iterator[Path]:
    for hash_ in layout.hashes():
        yield layout.entry_dir(hash_) / ARTIFACTS / name


def _repair_rank_file(layout: CacheLayout, found: EntryCheck, problem: Finding) -> Iterator[Repair]:
    """Repair a file of a rank's folder, or set the folder aside."""
    path = layout.root / problem.path
    name = next((name for name in layout.rank_names(found.name) if layout.rank_dir(name) == path.parent), None)
    if name is None:
        yield _repair(problem, "not_repaired", problem.sentence)
        return
    manifest = next((manifest for manifest in found.manifests if manifest.name == name), None)
    record = None if manifest is None or path.name == MANIFEST_FILE else manifest.files.get(path.name)
    if manifest is not None and record is not None:
        others = (layout.rank_dir(other.name) / path.name for other in found.manifests)
        try:
            data = _copy(others, record.sha256)
        except CacheError as error:
            yield _unreadable_source(problem, path, error)
            return
        if data is not None:
            _put(layout, path, data, mode=RECORD_MODE)
            yield _repair(problem, "rewritten", f"{path} was copied from another rank.")
            return
        if path.name != PLAN_FILE:
            if found.key is not None and name in found.plans:
                _rewrite(layout, found.key, manifest, path.name)
                yield _repair(problem, "rewritten", f"{path}, which is for people only, was rewritten.")
            return
    yield _set_aside(layout, path.parent, problem, [name])


def _rewrite(layout: CacheLayout, key: Key, manifest: Manifest, file: str) -> None:
    """Rewrite a damaged text for people: from the plan, or as a placeholder line."""
    data = _LOST
    if file == CODE_FILE:
        from cgtool.plan.rendering import plan_text  # imported lazily: rarely needed

        data = plan_text(entry_with_plan(layout, manifest.name)[1]).encode()

    def change(entry: Entry | None) -> tuple[Manifest, dict[str, bytes]]:
        return (manifest if entry is None else entry.manifest), {file: data}

    EntryWriter(layout, key, rank=manifest.rank, prefix=manifest.prefix).update(change)


def _recreate_marker(layout: CacheLayout, problem: Finding) -> Repair:
    """Recreate a lookup marker, and replace whatever is in the place of its folder."""
    marker = layout.root / problem.path
    if not marker.parent.is_dir():
        remove(marker.parent)
    LookupStore(layout).add(marker.parent.name, marker.name)
    return _repair(problem, "rewritten", f"{marker} was recreated: load finds the entry again.")


def _set_aside(layout: CacheLayout, folder: Path, problem: Finding, names: Iterable[RankName]) -> Repair:
    """Move a folder into the trash, holding the locks of these ranks' writers."""
    with ExitStack() as locks:
        for name in names:
            locks.enter_context(file_lock(layout.entry_lock(name)))
        target = put_aside(layout, str(folder))
    flush(layout, folder.parent)
    where = "" if target is None else f" as {target}, until the next prune or warm"
    broken = layout.root / problem.path
    sentence = f"{broken} cannot be restored from this cache, so {folder} was set aside{where}. {_WARM}"
    return _repair(problem, "set_aside", sentence)


def _skipped(layout: CacheLayout, problem: Finding) -> Repair | None:
    """Return why a problem must not be repaired; None if it may be."""
    path = layout.root / problem.path
    if problem.kind in ("schema", "unreadable"):
        return _repair(problem, "not_repaired", problem.sentence)
    if not is_inside(layout, str(path)):
        sentence = f"{path} was left alone: a symlink replaces one of its folders in the cache. Remove the symlink."
        return _repair(problem, "not_repaired", sentence)
    return None


def _repair(problem: Finding, action: Action, sentence: str) -> Repair:
    return Repair(path=problem.path, action=action, sentence=sentence)


def _unreadable_source(problem: Finding, path: Path, error: CacheError) -> Repair:
    sentence = f"{path} was left alone: a copy that it could be restored from cannot be read. {error}"
    return _repair(problem, "not_repaired", sentence)


def _copy(places: Iterable[Path], digest: str) -> bytes | None:
    """Return the bytes of the first file that matches a digest; raise if none does and one could not be read."""
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
    except CacheCorruptError:  # not a regular file
        return None
    return data if data is not None and sha256_hex(data) == digest else None


def _put(layout: CacheLayout, path: Path, data: bytes, *, mode: int) -> None:
    if not path.is_file():
        _clear(layout, path)
    write_atomic(path, data, mode=mode)


def _clear(layout: CacheLayout, path: Path) -> None:
    """Remove a file, or move a folder in its place into the trash."""
    if not path.is_dir() or path.is_symlink():
        remove(path)
        return
    put_aside(layout, str(path))
    flush(layout, path.parent)


def _obstacle(key: Key, verdict: Verdict) -> str:
    """Return why an entry cannot be compiled in this process; "" if it can."""
    if verdict.level == "unsupported":
        return f"this machine does not support the entry. {_WARM}"
    settings = process_settings(key)
    return f"it was compiled in a process that sets {', '.join(settings)}. {_WARM}" if settings else ""


def _compile(layout: CacheLayout, key: Key, name: RankName, places: list[_Place], on_event: OnEvent) -> None:
    """Compile rows of one rank from its plan, and publish them."""
    # Imported lazily: these import torch.
    from cgtool.compiler.pipeline import add_to_entry
    from cgtool.compiler.wanted import work_at

    _, plan = entry_with_plan(layout, name)
    work = []
    for variant, piece, shape, adaptor, tuned in places:
        step = next((step for step in plan.variants[variant].steps if step.piece == piece), None)
        if step is None:
            raise CacheError(f"The manifest names piece {piece}, which is not in its plan. {_WARM}")
        work.append(work_at(plan, variant, step, shape, adaptor=adaptor, tuned=tuned))
    config = CompilationConfig.from_mapping(key.value("config") or {})
    add_to_entry(layout, key, name, plan, work, config=config, on_event=on_event)


def _place_of_hole(manifest: Manifest, hole: Hole) -> _Place:
    fallbacks = {fallback.place: fallback.adaptor for fallback in manifest.fallbacks}
    adaptor = fallbacks.get((hole.variant, hole.piece_index, shape_text(hole.shape)))
    base = of_sizes(manifest.variants[hole.variant].fixed)
    tuned = is_size(hole.shape) and hole.shape != base and adaptor != EAGER
    return hole.variant, hole.piece_index, hole.shape, adaptor or manifest.adaptor, tuned
