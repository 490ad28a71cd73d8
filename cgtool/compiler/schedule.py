"""Compiling the work that a plan needs: each unique artifact once, several at a time, eagerly what no compiler takes.

A piece goes down a chain of adaptors until one takes it: aot_inductor, inductor_standalone, eager. Only what a compiler
says of the piece moves it down; a worker that died, hung or found no memory or disk fails its units, the others go on,
and one error at the end names all that failed.

A piece that goes to a worker has a thread that waits for it. What only this process can compile, and what compiles at
once, is done by the calling thread meanwhile. So at most one piece is compiled in this process, always by the thread
that asked for the warm, and an interruption reaches it.
"""

from __future__ import annotations

import contextvars
import dataclasses
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from cgtool.compiler.adaptors.interface import op_named_in
from cgtool.compiler.cluster import Cluster
from cgtool.compiler.generated import Texts
from cgtool.compiler.manager import Built, CompilerManager, next_adaptor
from cgtool.compiler.pool import WorkerPool
from cgtool.compiler.request import StaysHereError
from cgtool.compiler.wanted import Work
from cgtool.errors import CompileError, UnitsFailedError, WorkerError
from cgtool.events import Event, OnEvent
from cgtool.plan.grammar import digest_of
from cgtool.plan.pieces import AOT_INDUCTOR, EAGER
from cgtool.plan.shapes import shape_text
from cgtool.store.entry import ObjectStore
from cgtool.store.records import Fallback, Row

_log = logging.getLogger(__name__)

#: How many pieces a line of progress names.
_MOST_LISTED = 6


#: Called with the number of a variant and its rows.
OnVariant = Callable[[int, tuple[Row, ...]], None]


class SplitAgainError(Exception):
    """Ops at which pieces failed to compile are to run between pieces: the same traces are split anew."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What came of it."""

    #: A row for each item of the work that has an artifact of its own.
    rows: tuple[Row, ...]
    #: How many artifacts this process compiled.
    compiled: int
    secs: float
    #: The pieces that another adaptor serves than the one that was asked for.
    fallbacks: tuple[Fallback, ...]
    #: Pieces whose artifacts were not proved this time, each with its reason; a later warm tries again.
    unproved: tuple[tuple[int, str], ...]
    #: Artifact digest → what its compiler wrote for people.
    generated: Mapping[str, Texts]


def compile_work(
    work: Iterable[Work],
    *,
    objects: ObjectStore,
    manager: CompilerManager,
    pool: WorkerPool | Cluster | None = None,
    split_out: Callable[[str, str], bool] = lambda *_: False,
    on_variant: OnVariant | None = None,
    on_event: OnEvent,
) -> Compiled:
    """Compile or reuse every artifact of `work` and put it into an entry.

    A piece that no compiler takes for all of its variant's sizes runs as it stands, and is reported; one that none
    takes for a concrete size or a range alone is an error. `split_out` is asked of a piece and the op at which it
    fails: whether that can run between pieces instead. `on_variant` is called with a variant and its rows as soon as
    all of them are compiled; it must not block. Events come from one thread at a time.

    Raises:
        SplitAgainError: Ops are to be split out; what could be compiled is stored.
        UnitsFailedError: Some pieces could not be compiled; what could be is stored.
        ConfigError: The compiler does not know an option.
        ProofCrashError: The process that proves artifacts died.
        CacheError: The cache cannot be written.
    """
    started = time.perf_counter()
    # what serves all sizes comes first: where it falls to eager, nothing else of the piece is compiled
    groups = sorted(unique(work), key=lambda group: not group[0].is_base)
    tasks = [_Task(items=group, work=group[0]) for group in groups]
    run = _Run(tasks, objects, manager, pool, split_out=split_out, on_variant=on_variant, on_event=on_event)
    run.go()
    if run.in_parts:
        raise SplitAgainError
    served = run.served()
    _raise_failures(list(dict.fromkeys(task for _, task in served if task.error is not None)))
    done = [(item, task, task.built) for item, task in served if task.built is not None]
    units = {task: unit for _, task, unit in done}.values()
    return Compiled(
        rows=tuple(item.row(task.work.adaptor, unit.artifact) for item, task, unit in done),
        compiled=sum(not unit.reused for unit in units),
        secs=time.perf_counter() - started,
        fallbacks=tuple(
            item.fallback(task.work.adaptor, "; ".join(task.refusals)) for item, task, _ in done if task.refusals
        ),
        unproved=tuple((item.piece_index, unit.unproved) for item, _, unit in done if unit.unproved),
        generated={unit.artifact.digest: unit.generated for unit in units if unit.generated},
    )


def unique(work: Iterable[Work]) -> Iterator[list[Work]]:
    """Yield the work in groups that one artifact serves, in order of first need."""
    groups: dict[str, list[Work]] = {}
    for item in work:
        made_from = [item.piece, shape_text(item.shape), item.graph.identity()]
        name = digest_of([*made_from, item.adaptor, item.tuned, item.is_base])
        groups.setdefault(name, []).append(item)
    yield from groups.values()


@dataclass(kw_only=True, eq=False)
class _Task:
    """Work that one artifact serves, and what came of it so far."""

    items: list[Work]
    #: One of these, with the adaptor that is to compile it, or did.
    work: Work
    #: Why that is not the adaptor that was asked for, one sentence for each that refused.
    refusals: list[str] = field(default_factory=list)
    built: Built | None = None
    error: CompileError | None = None

    @property
    def variants(self) -> set[int]:
        """The variants that its artifact serves."""
        return {item.variant for item in self.items}

    @property
    def label(self) -> str:
        """What is compiled, for people: "pieces 2, 4, 6 (general)"."""
        indices = sorted({item.piece_index for item in self.items})
        listed = ", ".join(map(str, indices[:_MOST_LISTED]))
        more = f" and {len(indices) - _MOST_LISTED} more" if len(indices) > _MOST_LISTED else ""
        return f"{'piece' if len(indices) == 1 else 'pieces'} {listed}{more} ({shape_text(self.work.shape)})"


class _Run:
    """Does all tasks; each then has a unit or an error. Whatever is no single piece's fault ends the run at once.

    Attributes:
        tasks: All of them.
        as_it_stands: Variant and piece of what fell to eager: it runs so at every size.
        in_parts: The identities of pieces that are to be split anew.
    """

    def __init__(
        self,
        tasks: list[_Task],
        objects: ObjectStore,
        manager: CompilerManager,
        pool: WorkerPool | Cluster | None,
        *,
        split_out: Callable[[str, str], bool],
        on_variant: OnVariant | None,
        on_event: OnEvent,
    ) -> None:
        self.tasks = tasks
        self._pool = pool
        self._cluster = pool if isinstance(pool, Cluster) else None
        self.as_it_stands: set[tuple[int, int]] = set()
        self.in_parts: set[str] = set()
        self._split_out = split_out
        self._on_variant = on_variant
        #: How many tasks of each variant have not ended.
        self._unfinished = Counter(variant for task in tasks for variant in task.variants)
        self._objects = objects
        self._manager = manager
        self._on_event = on_event
        self._for_workers: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._here: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: dict[_Task, str] = {}
        self._left = len(tasks)
        self._fatal: BaseException | None = None

    def served(self) -> list[tuple[Work, _Task]]:
        """Return the work that gets a row: where a piece runs as it stands, nothing is compiled for single sizes."""
        return [
            (item, task)
            for task in self.tasks
            for item in task.items
            if item.is_base or item.place not in self.as_it_stands
        ]

    def go(self) -> None:
        pool = self._pool
        for task in self.tasks:
            self._manager.key(task.work)  # slow for the first, and an option that is unknown ends all of it here
            self._queue_of(task.work).put(task)
        away = sum(self._manager.uses_workers(task.work.adaptor) for task in self.tasks)
        count = 0
        if pool is not None:
            pool.start(away)
            count = min(pool.jobs + 1, away)  # one may wait for a proof while all workers work
        for _ in range(count):
            # settings of torch belong to a thread's context: the threads see those of this one
            context = contextvars.copy_context()
            threading.Thread(target=context.run, args=(self._serve,), name="cgtool-warm", daemon=True).start()
        try:
            while self._left and self._fatal is None:
                waiting = self._here.get()
                if waiting is not None:
                    self._step(waiting, in_worker=False)
        except BaseException as error:  # whatever ends this thread ends the others
            self._fatal = self._fatal or error
            raise
        finally:
            for _ in range(count):
                self._for_workers.put(None)
        if self._fatal is not None:
            raise self._fatal

    def _queue_of(self, work: Work) -> queue.SimpleQueue[_Task | None]:
        return self._for_workers if self._manager.uses_workers(work.adaptor) else self._here

    def _serve(self) -> None:
        """What the threads do: they wait for workers, and never compile."""
        while (task := self._for_workers.get()) is not None:
            try:
                self._step(task, in_worker=True)
            except BaseException as error:  # noqa: BLE001  raised again by the thread that asked for it all
                self._fatal = self._fatal or error
                self._end(task)

    def _step(self, task: _Task, *, in_worker: bool) -> None:
        """Give a task to its adaptor once, and put it into a queue again where that is not the end of it."""
        with self._lock:  # all that a task is for may run as it stands by now, whatever the size
            is_moot = not task.work.is_base and all(item.place in self.as_it_stands for item in task.items)
            is_moot = is_moot or task.work.piece in self.in_parts
            if self._fatal is None and not is_moot:
                self._running[task] = task.label
                self._tell()
        if task not in self._running:
            self._end(task)
            return
        goes_on = None
        try:
            task.built = self._manager.ensure(task.work, objects=self._objects, in_worker=in_worker)
        except StaysHereError as reason:
            _log.info("%s is compiled in this process and not in a worker: %s.", task.label, reason)
            goes_on = self._here
        except WorkerError as error:
            task.error = error
        except CompileError as error:
            goes_on = self._fall(task, error)
        if goes_on is None:
            self._end(task)
        else:
            with self._lock:
                self._running.pop(task)
            goes_on.put(task)

    def _fall(self, task: _Task, error: CompileError) -> queue.SimpleQueue[_Task | None] | None:
        """Turn a task that an adaptor refused to the next one; return where it goes on, None where nothing is left."""
        refused, follower = task.work.adaptor, next_adaptor(task.work.adaptor)
        op = error.path if isinstance(error.path, str) else op_named_in(str(error))
        if op is not None and refused == AOT_INDUCTOR and self._split_out(task.work.piece, op):
            _log.info("%s is split at %s: %s", task.label, op, error)
            with self._lock:
                self.in_parts.add(task.work.piece)
            return None
        if follower is None or (follower == EAGER and not task.work.is_base):
            task.error = error
            return None
        _log.info("%s goes from %s to %s: %s", task.label, refused, follower, error)
        task.refusals.append(f"{refused}: {error}")
        task.work = dataclasses.replace(task.work, adaptor=follower)
        if follower == EAGER:
            with self._lock:
                self.as_it_stands.update(item.place for item in task.items)
        return self._queue_of(task.work)

    def _end(self, task: _Task) -> None:
        with self._lock:
            self._running.pop(task, None)
            self._left -= 1
            self._unfinished.subtract(task.variants)
            unit = task.built
            if unit is not None and self._fatal is None:
                worker = None if self._cluster is None else self._cluster.made_by.get(unit.artifact.digest)
                said = f"{task.label}{f' by {worker}' if worker else ''}"
                said = f"{task.label}, compiled before" if unit.reused else said
                self._tell(said, secs=0.0 if unit.reused else unit.artifact.compile_secs)
                if self._running:
                    self._tell()
            elif task.error is not None and self._fatal is None:
                self._tell(f"{task.label} failed", secs=0.0)
            for variant in task.variants:
                if self._on_variant is not None and not self._unfinished[variant]:
                    self._hand_on(variant, self._on_variant)
            if self._left == 0 or self._fatal is not None:
                self._here.put(None)

    def _hand_on(self, variant: int, on_variant: OnVariant) -> None:
        """Report a variant whose tasks have all ended, if all of them succeeded; the lock is held."""
        served = [(item, task.work.adaptor, task.built) for item, task in self.served() if item.variant == variant]
        rows = [item.row(adaptor, unit.artifact) for item, adaptor, unit in served if unit is not None]
        if len(rows) == len(served):
            on_variant(variant, tuple(rows))

    def _tell(self, message: str | None = None, *, secs: float | None = None) -> None:
        """Tell of one task, or of all that run now; the lock is held."""
        words = self._at_work() if message is None else message
        total = len(self.tasks)
        self._on_event(Event(phase="compile", message=words, done=total - self._left, total=total, secs=secs))

    def _at_work(self) -> str:
        """Say what runs now: each task, or how many a cluster has and what its workers did so far."""
        if self._cluster is None:
            return "; ".join(self._running.values())
        return f"{len(self._running)} with the executor{self._cluster.progress}"


def _raise_failures(failed: list[_Task]) -> None:
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
