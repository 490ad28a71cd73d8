"""`verify --repair`: mends what was found wrong, and compiles again what nothing else has.

What needs no compiler is `cgtool.toolkit.verify.repair`'s. What is left of an entry, damaged artifacts and holes, is
compiled from its stored plan, without a trace, as adding a size is. An entry that this machine does not support is
never compiled for: its key names another one. Importable without torch, which compiling imports.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cgtool.config import EAGER, CompilationConfig
from cgtool.errors import CacheError, CgtoolError
from cgtool.events import OnEvent
from cgtool.plan.records import Plan, parse_plan
from cgtool.plan.shapes import Shape, is_size, of_sizes, shape_text
from cgtool.store.entry import Entry, EntryWriter, read_entry
from cgtool.store.key import Key
from cgtool.store.layout import ARTIFACTS, CODE_FILE, GRAPH_FILE, PLAN_FILE, CacheLayout, RankName
from cgtool.store.records import Manifest, Row
from cgtool.toolkit.coverage import Hole
from cgtool.toolkit.verify.findings import EntryFindings
from cgtool.toolkit.verify.repair import Repair
from cgtool.toolkit.verify.verdict import Verdict, of_the_process

if TYPE_CHECKING:
    from cgtool.compiler.wanted import Work

_WARM = "Warm the model again."


@dataclass(frozen=True, kw_only=True)
class _Place:
    """What one artifact is to serve."""

    variant: int
    piece_index: int
    shape: Shape
    adaptor: str
    tuned: bool


_LOST = b"# This file was damaged. It is for people alone, and loading does without it.\n"


def rewrite_texts(layout: CacheLayout, findings: EntryFindings) -> Iterator[Repair]:
    """Write the texts for people anew whose bytes are lost: from the plan, or with a line that says so.

    Args:
        layout: Where the cache lies.
        findings: What a check found in the entry.

    Raises:
        CacheError: The cache cannot be written.
    """
    if findings.key is None:
        return
    for manifest in findings.manifests:
        folder = layout.rank_dir(manifest.name)
        broken = {problem.path.name for problem in findings.problems if problem.path.parent == folder}
        if PLAN_FILE in broken:
            continue
        for file in sorted(broken & {GRAPH_FILE, CODE_FILE} & manifest.files.keys()):
            _rewrite(layout, findings.key, manifest, file)
            sentence = f"{folder / file}, which is for people alone, was written anew."
            yield Repair(path=folder / file, action="rewritten", sentence=sentence)


def compile_again(
    layout: CacheLayout, findings: EntryFindings, holes: Iterable[Hole], verdict: Verdict, on_event: OnEvent
) -> Iterator[Repair]:
    """Compile the damaged artifacts and the holes of an entry, and yield what came of it.

    Args:
        layout: Where the cache lies.
        findings: What a check found in the entry.
        holes: Shapes that pieces lack.
        verdict: Whether this machine supports the entry.
        on_event: Told of each artifact.

    Raises:
        CacheError: The cache cannot be written.
    """
    broken = {problem.path.name: problem.path for problem in findings.problems if problem.path.parent.name == ARTIFACTS}
    holes = list(holes)
    if findings.key is None or not (broken or holes):
        return
    for manifest in findings.manifests:
        rows = [row for row in manifest.rows if row.artifact.file in broken]
        wanted = [hole for hole in holes if (hole.rank, hole.prefix) == (manifest.rank, manifest.prefix)]
        if not rows and not wanted:
            continue
        paths = {broken[row.artifact.file] for row in rows} or {layout.manifest_file(manifest.name)}
        why_not = _why_not(findings.key, verdict)
        try:
            if not why_not:
                places = [*map(_of_row, rows), *(_of_hole(manifest, hole) for hole in wanted)]
                _compile(layout, findings.key, manifest.name, places, on_event)
        except CgtoolError as error:
            why_not = str(error)
        for path in sorted(paths):
            if why_not:
                sentence = f"{path} was not compiled again: {why_not}"
                yield Repair(path=path, action="not_repaired", sentence=sentence)
            else:
                yield Repair(path=path, action="compiled", sentence=f"{path}: its pieces were compiled again.")


def _why_not(key: Key, verdict: Verdict) -> str:
    if verdict.level == "unsupported":
        return f"this machine does not support the entry. {_WARM}"
    settings = of_the_process(key)
    if settings:
        return f"it was compiled in a process that sets {', '.join(settings)}. {_WARM}"
    return ""


def _rewrite(layout: CacheLayout, key: Key, manifest: Manifest, file: str) -> None:
    writer = EntryWriter(layout, key, rank=manifest.rank, prefix=manifest.prefix)
    data = _LOST
    if file == CODE_FILE:
        from cgtool.plan.rendering import plan_text  # for the rare repair alone

        entry = read_entry(layout, manifest.name)
        if entry is not None:
            data = plan_text(_plan(layout, entry)).encode()

    def change(entry: Entry | None) -> tuple[Manifest, dict[str, bytes]]:
        return (manifest if entry is None else entry.manifest), {file: data}

    writer.update(change)


def _plan(layout: CacheLayout, entry: Entry) -> Plan:
    return parse_plan(entry.files[PLAN_FILE], path=layout.rank_dir(entry.name) / PLAN_FILE)


def _compile(layout: CacheLayout, key: Key, name: RankName, places: list[_Place], on_event: OnEvent) -> None:
    """Compile what is to serve some places of one rank, from its plan, and publish the rows."""
    # Imports torch, which a repair that compiles nothing does without.
    from cgtool.compiler.pipeline import add_to_entry

    entry = read_entry(layout, name)
    if entry is None:
        raise CacheError(f"There is no entry {name.flat} any more. {_WARM}", path=layout.rank_dir(name))
    plan = _plan(layout, entry)
    config = CompilationConfig.from_mapping(key.value("config") or {})
    work = [_work(plan, place) for place in places]
    add_to_entry(layout, key, name, plan, work, config=config, on_event=on_event)


def _of_row(row: Row) -> _Place:
    return _Place(
        variant=row.variant, piece_index=row.piece_index, shape=row.shape, adaptor=row.adaptor, tuned=row.tuned
    )


def _of_hole(manifest: Manifest, hole: Hole) -> _Place:
    known = {fallback.place: fallback.adaptor for fallback in manifest.fallbacks}
    adaptor = known.get((hole.variant, hole.piece_index, shape_text(hole.shape)), manifest.adaptor)
    base = of_sizes(manifest.variants[hole.variant].fixed)
    tuned = is_size(hole.shape) and hole.shape != base
    return _Place(variant=hole.variant, piece_index=hole.piece_index, shape=hole.shape, adaptor=adaptor, tuned=tuned)


def _work(plan: Plan, place: _Place) -> Work:
    from cgtool.compiler.wanted import work_at

    steps = plan.variants[place.variant].steps
    step = next((step for step in steps if step.piece == place.piece_index), None)
    if step is None:
        msg = f"The manifest names piece {place.piece_index}, which its plan has not. {_WARM}"
        raise CacheError(msg)
    tuned = place.tuned and place.adaptor != EAGER
    return work_at(plan, place.variant, step, place.shape, adaptor=place.adaptor, tuned=tuned)
