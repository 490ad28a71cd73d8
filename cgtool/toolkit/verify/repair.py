"""`verify --repair`: mends what a check finds. Importable without torch, which compiling imports.

By the place that a problem lies in (see the table of `cgtool.toolkit.verify.checks`)::

    an artifact              linked again from an intact unit or another entry; else compiled from the stored plan
    a corrupt orphan         removed
    plan.json, texts         taken from another rank that has the same bytes; a text is else written anew
    a manifest, plan.json    set aside with its rank's folder, where no other copy is there: the model is warmed again
    key.json                 set aside with the entry: its factors are nowhere else
    a mark of the lookup     made again, from the digests in the manifest
    a unit                   its artifact taken from an entry, or else the unit forgotten: it is compiled when asked for

Setting aside is one rename into the trash, which the next prune or warm empties; everything else is a file written
whole, or removed. So whenever this process dies, each file is as it was or mended, and the next repair goes on. Left
alone is what a newer cgtool wrote, what the system does not let be read, which may be as good as ever, and what lies
behind a link in place of a folder. An entry that this machine does not support is not compiled for, since its key names
another machine.
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

#: What one artifact is to serve: a row without its artifact.
_Place = tuple[int, int, Shape, str, bool]

_WARM = "Warm the model again."
_LOST = b"# This file was damaged. It is for people alone, and loading does without it.\n"


Action = Literal["linked", "rewritten", "removed", "set_aside", "compiled", "not_repaired"]


class Repair(Record, frozen=True, kw_only=True):
    """What was done about one problem, as `verify --json` prints it."""

    #: The file that was wrong, below the cache's root.
    path: str
    #: A stable word for programs.
    action: Action
    #: What was done, or why nothing was.
    sentence: str

    @property
    def is_done(self) -> bool:
        """Whether anything was done."""
        return self.action != "not_repaired"


def repair_entry(layout: CacheLayout, found: EntryCheck) -> Iterator[Repair]:
    """Mend what can be mended of an entry without compiling, and yield what was done."""
    folder = layout.entry_dir(found.name)
    known = []
    for problem, left in _mendable(layout, found.problems):
        if left is not None:
            yield left
        else:
            known.append(problem)
    of_key = [problem for problem in known if layout.root / problem.path == folder / KEY_FILE]
    if of_key:
        yield _set_aside(layout, folder, of_key[0], [manifest.name for manifest in found.manifests])
        return
    for problem in known:
        above = (layout.root / problem.path).parent
        if problem.kind == "lookup":
            yield _marked(layout, problem)
        elif above == folder / ARTIFACTS:
            yield from _artifact(layout, found, problem)
        else:
            yield from _rank_file(layout, found, problem)


def repair_units(layout: CacheLayout, found: Findings) -> Iterator[Repair]:
    """Mend units, and yield what was done."""
    for problem, left in _mendable(layout, found.problems):
        path = layout.root / problem.path
        if left is not None:
            yield left
            continue
        with file_lock(path.parent / "lock"):
            try:
                data = None if path.name == UNIT_FILE else _copy(_in_entries(layout, path.name), path.name[:64])
            except CacheError as error:
                yield _left_alone(problem, path, error)
                continue
            if data is not None:
                _put(layout, path, data, mode=ARTIFACT_MODE)
                yield _repair(problem, "linked", f"{path} was taken from an entry that has it.")
                continue
            remove(path.parent / UNIT_FILE)
            _clear(layout, path)
            yield _repair(problem, "removed", f"{path} was removed: it is compiled when asked for.")


def compile_again(
    layout: CacheLayout, found: EntryCheck, holes: Iterable[Hole], verdict: Verdict, on_event: OnEvent
) -> Iterator[Repair]:
    """Compile the damaged artifacts and the holes of an entry from its plan, and yield what came of it."""
    folder = layout.entry_dir(found.name) / ARTIFACTS
    paths_of = [layout.root / problem.path for problem in found.problems]
    broken = {path.name: path for path in paths_of if path.parent == folder}
    wanted = list(holes)
    if found.key is None or not (broken or wanted):
        return
    for manifest in found.manifests:
        rows = [row for row in manifest.rows if row.artifact.file in broken]
        places = [(row.variant, row.piece_index, row.shape, row.adaptor, row.tuned) for row in rows]
        places += [
            _of_hole(manifest, one) for one in wanted if (one.rank, one.prefix) == (manifest.rank, manifest.prefix)
        ]
        if not places:
            continue
        paths = sorted({broken[row.artifact.file] for row in rows}) or [layout.manifest_file(manifest.name)]
        why_not = _why_not(found.key, verdict)
        try:
            if not why_not:
                _compile(layout, found.key, manifest.name, places, on_event)
        except CgtoolError as error:
            why_not = str(error)
        for path in paths:
            below = str(path.relative_to(layout.root))
            if why_not:
                yield Repair(path=below, action="not_repaired", sentence=f"{path} was not compiled again: {why_not}")
            else:
                yield Repair(path=below, action="compiled", sentence=f"{path}: its pieces were compiled again.")


def _artifact(layout: CacheLayout, found: EntryCheck, problem: Finding) -> Iterator[Repair]:
    """Mend an artifact from a copy of its bytes; one whose bytes are those of its name is left to the compiler."""
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
            continue  # another one, or the compiler, does as well
        if not path.is_file():  # a pipe in its place would be waited for
            _clear(layout, path)
        ObjectStore(layout.entry_dir(found.name)).link_from(source, digest, kind)
        yield _repair(problem, "linked", f"{path} was taken from {source}, which is intact.")
        return


def _in_entries(layout: CacheLayout, name: str) -> Iterator[Path]:
    for hash_ in layout.hashes():
        yield layout.entry_dir(hash_) / ARTIFACTS / name


def _rank_file(layout: CacheLayout, found: EntryCheck, problem: Finding) -> Iterator[Repair]:
    """Mend a file of a rank's folder, or set the folder aside."""
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
            yield _left_alone(problem, path, error)
            return
        if data is not None:
            _put(layout, path, data, mode=RECORD_MODE)
            yield _repair(problem, "rewritten", f"{path} was taken from another rank.")
            return
        if path.name != PLAN_FILE:
            if found.key is not None and name in found.plans:
                _rewrite(layout, found.key, manifest, path.name)
                yield _repair(problem, "rewritten", f"{path}, which is for people alone, was written anew.")
            return
    yield _set_aside(layout, path.parent, problem, [name])


def _rewrite(layout: CacheLayout, key: Key, manifest: Manifest, file: str) -> None:
    """Write a text for people anew whose bytes are lost: from the plan, or as a line that says so."""
    data = _LOST
    if file == CODE_FILE:
        from cgtool.plan.rendering import plan_text  # for the rare repair alone

        data = plan_text(entry_with_plan(layout, manifest.name)[1]).encode()

    def change(entry: Entry | None) -> tuple[Manifest, dict[str, bytes]]:
        return (manifest if entry is None else entry.manifest), {file: data}

    EntryWriter(layout, key, rank=manifest.rank, prefix=manifest.prefix).update(change)


def _marked(layout: CacheLayout, problem: Finding) -> Repair:
    """Make a mark of the lookup again; what is in the place of its folder goes out of the way."""
    mark = layout.root / problem.path
    if not mark.parent.is_dir():
        remove(mark.parent)
    LookupStore(layout).add(mark.parent.name, mark.name)
    return _repair(problem, "rewritten", f"{mark} was made again: load finds the entry.")


def _set_aside(layout: CacheLayout, folder: Path, problem: Finding, names: Iterable[RankName]) -> Repair:
    """Rename a folder out of the way, while no writer of these ranks is at work."""
    with ExitStack() as locks:
        for name in names:
            locks.enter_context(file_lock(layout.entry_lock(name)))
        target = put_aside(layout, str(folder))
    flush(layout, folder.parent)
    where = "" if target is None else f" as {target}, until the next prune or warm"
    broken = layout.root / problem.path
    sentence = f"{broken} cannot be made again from what is here, so {folder} was set aside{where}. {_WARM}"
    return _repair(problem, "set_aside", sentence)


def _mendable(layout: CacheLayout, problems: Iterable[Finding]) -> Iterator[tuple[Finding, Repair | None]]:
    """Yield each problem, with why it is left as it is where it is."""
    for problem in problems:
        path = layout.root / problem.path
        if problem.kind in ("schema", "unreadable"):
            yield problem, _repair(problem, "not_repaired", problem.sentence)
        elif not is_inside(layout, str(path)):
            sentence = (
                f"{path} is behind a link in place of a folder of the cache, and stays as it is. Remove the link."
            )
            yield problem, _repair(problem, "not_repaired", sentence)
        else:
            yield problem, None


def _repair(problem: Finding, action: Action, sentence: str) -> Repair:
    return Repair(path=problem.path, action=action, sentence=sentence)


def _left_alone(problem: Finding, path: Path, error: CacheError) -> Repair:
    sentence = f"{path} is left as it is, for what it can be mended from could not be read. {error}"
    return _repair(problem, "not_repaired", sentence)


def _copy(places: Iterable[Path], digest: str) -> bytes | None:
    """Return the bytes of the first of several files that holds what it should."""
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


def _put(layout: CacheLayout, path: Path, data: bytes, *, mode: int) -> None:
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


def _why_not(key: Key, verdict: Verdict) -> str:
    if verdict.level == "unsupported":
        return f"this machine does not support the entry. {_WARM}"
    settings = process_settings(key)
    return f"it was compiled in a process that sets {', '.join(settings)}. {_WARM}" if settings else ""


def _compile(layout: CacheLayout, key: Key, name: RankName, places: list[_Place], on_event: OnEvent) -> None:
    """Compile what is to serve some places of one rank, from its plan, and publish the rows."""
    # Imports torch, which a repair that compiles nothing does without.
    from cgtool.compiler.pipeline import add_to_entry
    from cgtool.compiler.wanted import work_at

    _, plan = entry_with_plan(layout, name)
    work = []
    for variant, piece, shape, adaptor, tuned in places:
        step = next((step for step in plan.variants[variant].steps if step.piece == piece), None)
        if step is None:
            raise CacheError(f"The manifest names piece {piece}, which its plan lacks. {_WARM}")
        work.append(work_at(plan, variant, step, shape, adaptor=adaptor, tuned=tuned))
    config = CompilationConfig.from_mapping(key.value("config") or {})
    add_to_entry(layout, key, name, plan, work, config=config, on_event=on_event)


def _of_hole(manifest: Manifest, hole: Hole) -> _Place:
    fallen = {fallback.place: fallback.adaptor for fallback in manifest.fallbacks}
    adaptor = fallen.get((hole.variant, hole.piece_index, shape_text(hole.shape)))
    base = of_sizes(manifest.variants[hole.variant].fixed)
    tuned = is_size(hole.shape) and hole.shape != base and adaptor != EAGER
    return hole.variant, hole.piece_index, hole.shape, adaptor or manifest.adaptor, tuned
