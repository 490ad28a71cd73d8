"""Compiling the work that a plan needs: each unique artifact once, several at a time, eagerly what no compiler takes.

A piece goes down a chain of adaptors until one takes it: aot_inductor, inductor_standalone, eager. Only what a compiler
says of the piece moves it down; a worker that died, hung or found no memory or disk fails its units, the others go on,
and one error at the end names all that failed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cgtool.compiler.generated import Texts
from cgtool.compiler.managers import Managers
from cgtool.compiler.schedule import Task, run_tasks
from cgtool.compiler.wanted import Work
from cgtool.compiler.workers.pool import WorkerPool
from cgtool.config import EAGER
from cgtool.errors import UnitsFailedError
from cgtool.events import OnEvent
from cgtool.plan.grammar import digest_of
from cgtool.plan.shapes import shape_text
from cgtool.store.entry import ObjectStore
from cgtool.store.records import Fallback, Row

#: How many pieces a line of progress names.
_MOST_LISTED = 6


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What came of it.

    Args:
        rows: A row for each item of the work that has an artifact of its own.
        compiled: How many artifacts this process compiled.
        secs: How long all of it took, in seconds.
        fallbacks: The pieces that another adaptor serves than the one that was asked for.
        unproved: Pieces whose artifacts were not proved this time, each with its reason; a later warm tries again.
        generated: Artifact digest → what its compiler wrote for people.
    """

    rows: tuple[Row, ...]
    compiled: int
    secs: float
    fallbacks: tuple[Fallback, ...] = ()
    unproved: tuple[tuple[int, str], ...] = ()
    generated: Mapping[str, Texts] = field(default_factory=dict)


def compile_work(
    work: Iterable[Work],
    *,
    objects: ObjectStore,
    managers: Managers,
    pool: WorkerPool | None = None,
    on_event: OnEvent,
) -> Compiled:
    """Compile or reuse every artifact of `work` and put it into an entry.

    A piece that no compiler takes for all of its variant's sizes runs as it stands, and is reported; one that none
    takes for a concrete size or a range alone is an error.

    Args:
        work: What is needed.
        objects: The entry's artifacts.
        managers: The compilers.
        pool: Workers to compile in; None compiles in this process, one piece after the other.
        on_event: Told of each artifact.

    Raises:
        UnitsFailedError: Some pieces could not be compiled; what could be is stored.
        ConfigError: The compiler does not know an option.
        ProofCrashError: The process that proves artifacts died.
        CacheError: The cache cannot be written.
    """
    started = time.perf_counter()
    # what serves all sizes comes first: where it falls to eager, nothing else of the piece is compiled
    groups = sorted(unique(work), key=lambda group: not all(item.is_base for item in group))
    tasks = [Task(items=group, label=_label(group)) for group in groups]
    run_tasks(tasks, objects=objects, managers=managers, pool=pool, on_event=on_event)
    # fell to eager; where eager was asked for, every size that was asked for has its artifact
    fallen = [task for task in tasks if task.is_base and task.adaptor == EAGER and task.reason]
    as_it_stands = {item.place for task in fallen for item in task.items}
    served = [(task, [item for item in task.items if item.is_base or item.place not in as_it_stands]) for task in tasks]
    _raise_failures([task for task, items in served if items and task.error is not None])
    done = [(item, task, task.unit) for task, items in served for item in items if task.unit is not None]
    return Compiled(
        rows=tuple(
            Row(**{**row_name(item), "adaptor": task.adaptor}, artifact=unit.artifact) for item, task, unit in done
        ),
        compiled=sum(task.unit is not None and not task.unit.reused for task, items in served if items),
        secs=time.perf_counter() - started,
        fallbacks=tuple(
            Fallback(
                variant=item.variant,
                piece_index=item.piece_index,
                shape=item.shape,
                adaptor=task.adaptor,
                reason=task.reason,
            )
            for item, task, _ in done
            if task.reason
        ),
        unproved=tuple((item.piece_index, unit.unproved) for item, _, unit in done if unit.unproved),
        generated={unit.artifact.digest: unit.generated for _, _, unit in done if unit.generated},
    )


def row_name(work: Work) -> dict[str, Any]:
    """Return what names a row of the manifest."""
    return {
        "variant": work.variant,
        "shape": work.shape,
        "piece_index": work.piece_index,
        "adaptor": work.adaptor,
        "tuned": work.tuned,
    }


def unique(work: Iterable[Work]) -> Iterator[list[Work]]:
    """Yield the work in groups that one artifact serves, in order of first need."""
    groups: dict[str, list[Work]] = {}
    for item in work:
        made_from = [item.piece, shape_text(item.shape), item.graph.identity()]
        name = digest_of([*made_from, item.adaptor, item.tuned, item.is_base])
        groups.setdefault(name, []).append(item)
    yield from groups.values()


def _raise_failures(failed: list[Task]) -> None:
    if not failed:
        return
    reasons = tuple(f"{task.label}: {task.error}" for task in failed)
    if len(failed) == 1:
        raise UnitsFailedError(f"Compiling {reasons[0]}") from failed[0].error
    names = "; ".join(task.label for task in failed)
    raise UnitsFailedError(
        f"{len(failed)} of the artifacts could not be compiled: {names}. What was finished is stored, and the same "
        "command goes on from there.",
        reasons=reasons,
    ) from failed[0].error


def _label(items: list[Work]) -> str:
    """Return what is compiled, for people: "pieces 2, 4, 6 (general)"."""
    indices = sorted({item.piece_index for item in items})
    listed = ", ".join(map(str, indices[:_MOST_LISTED]))
    more = f" and {len(indices) - _MOST_LISTED} more" if len(indices) > _MOST_LISTED else ""
    return f"{'piece' if len(indices) == 1 else 'pieces'} {listed}{more} ({shape_text(items[0].shape)})"
