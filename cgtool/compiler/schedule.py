"""Compile the work that a plan needs: each unique artifact once, several at a time.

If an adaptor rejects a piece, the next one tries: aot_inductor, inductor_standalone, eager. Only a rejection of the
piece itself counts. A worker that crashed, hung, or ran out of memory or disk fails its units; the others go on, and
one error at the end names all failures.

One thread waits for each piece that is with a worker. The calling thread meanwhile compiles what only this process can
compile, and what needs no compiler. So at most one piece compiles in this process, always in the thread that started
the warm, where an interruption reaches it.
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

#: How many pieces a progress line lists.
_MOST_LISTED = 6


#: Called with the index of a variant and its rows.
OnVariant = Callable[[int, tuple[Row, ...]], None]


class SplitAgainError(Exception):
    """Pieces failed to compile at ops that can run between pieces: split the same traces again."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The result of compiling the work of a plan."""

    #: The rows of the manifest for the compiled work.
    rows: tuple[Row, ...]
    #: The number of artifacts that this process compiled.
    compiled: int
    secs: float
    #: The pieces that fell back to another adaptor than the configured one.
    fallbacks: tuple[Fallback, ...]
    #: (piece, reason) for artifacts that could not be proved this time; a later warm tries again.
    unproved: tuple[tuple[int, str], ...]
    #: Artifact digest → the compiler's generated code and tuning results.
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
    """Compile or reuse every artifact of `work`, and add it to an entry.

    A piece that no compiler accepts for all sizes of its variant runs eagerly, and is reported as a fallback; one that
    none accepts for a single size or range is an error.

    Args:
        work: What to compile.
        objects: The artifacts of the entry.
        manager: Compiles one artifact, or finds it.
        pool: The workers; None compiles in this process.
        split_out: Called with a piece and the op at which it fails to compile; returns whether that op can run between
            pieces instead.
        on_variant: Called with a variant and its rows as soon as all of them are compiled; must not block.
        on_event: Receives progress events, from one thread at a time.

    Raises:
        SplitAgainError: Split the plan again; finished artifacts are stored.
        UnitsFailedError: Some pieces could not be compiled; finished artifacts are stored.
        ConfigError: The compiler does not support an option.
        ProofCrashError: The process that proves artifacts crashed.
        CacheError: The cache cannot be written.
    """
    started = time.perf_counter()
    # General artifacts first: if one falls back to eager, nothing else of its piece is compiled.
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
    """Yield the work in groups that share one artifact, in the order of their first use."""
    groups: dict[str, list[Work]] = {}
    for item in work:
        made_from = [item.piece, shape_text(item.shape), item.graph.identity()]
        name = digest_of([*made_from, item.adaptor, item.tuned, item.is_base])
        groups.setdefault(name, []).append(item)
    yield from groups.values()


@dataclass(kw_only=True, eq=False)
class _Task:
    """Work that shares one artifact, and its current state."""

    items: list[Work]
    #: One of the items, with the adaptor that compiles it.
    work: Work
    #: Why the configured adaptor does not compile it: one sentence for each adaptor that rejected it.
    refusals: list[str] = field(default_factory=list)
    built: Built | None = None
    error: CompileError | None = None

    @property
    def variants(self) -> set[int]:
        """The variants that use its artifact."""
        return {item.variant for item in self.items}

    @property
    def label(self) -> str:
        """The pieces and the shape, as text: "pieces 2, 4, 6 (general)"."""
        indices = sorted({item.piece_index for item in self.items})
        listed = ", ".join(map(str, indices[:_MOST_LISTED]))
        more = f" and {len(indices) - _MOST_LISTED} more" if len(indices) > _MOST_LISTED else ""
        return f"{'piece' if len(indices) == 1 else 'pieces'} {listed}{more} ({shape_text(self.work.shape)})"


class _Run:
    """Runs all tasks until each has a unit or an error; errors that concern no single piece end the run at once.

    Attributes:
        tasks: All tasks.
        as_it_stands: (variant, piece) of pieces that fell back to eager, and so run eagerly at every size.
        in_parts: The identities of pieces to split again.
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
        #: The number of unfinished tasks of each variant.
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
        """Return the work that gets a row: a piece that runs eagerly has no artifacts for single sizes."""
        return [
            (item, task)
            for task in self.tasks
            for item in task.items
            if item.is_base or item.place not in self.as_it_stands
        ]

    def go(self) -> None:
        pool = self._pool
        for task in self.tasks:
            self._manager.key(task.work)  # raises a ConfigError for an unsupported option before anything starts
            self._queue_of(task.work).put(task)
        away = sum(self._manager.uses_workers(task.work.adaptor) for task in self.tasks)
        count = 0
        if pool is not None:
            pool.start(away)
            count = min(pool.jobs + 1, away)  # one more: a proof may run while all workers are busy
        for _ in range(count):
            # torch keeps settings per thread context: give the threads those of this one.
            context = contextvars.copy_context()
            threading.Thread(target=context.run, args=(self._serve,), name="cgtool-warm", daemon=True).start()
        try:
            while self._left and self._fatal is None:
                waiting = self._here.get()
                if waiting is not None:
                    self._step(waiting, in_worker=False)
        except BaseException as error:  # end the other threads, too
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
        """Wait for workers; the body of the threads, which never compile."""
        while (task := self._for_workers.get()) is not None:
            try:
                self._step(task, in_worker=True)
            except BaseException as error:  # noqa: BLE001 - raised again by the thread that started the run
                self._fatal = self._fatal or error
                self._end(task)

    def _step(self, task: _Task, *, in_worker: bool) -> None:
        """Give a task to its adaptor once, and queue it again if another adaptor or process is to try."""
        with self._lock:  # a task is moot if all of its pieces have fallen back to eager meanwhile
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
        """Move a rejected task to the next adaptor; return its queue, or None if there is no other adaptor."""
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
        """Report a variant whose tasks have all ended, if all succeeded; the lock is held."""
        served = [(item, task.work.adaptor, task.built) for item, task in self.served() if item.variant == variant]
        rows = [item.row(adaptor, unit.artifact) for item, adaptor, unit in served if unit is not None]
        if len(rows) == len(served):
            on_variant(variant, tuple(rows))

    def _tell(self, message: str | None = None, *, secs: float | None = None) -> None:
        """Report one task, or all running tasks; the lock is held."""
        words = self._at_work() if message is None else message
        total = len(self.tasks)
        self._on_event(Event(phase="compile", message=words, done=total - self._left, total=total, secs=secs))

    def _at_work(self) -> str:
        """Describe what is running: each task, or the number of tasks of a cluster and its progress."""
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
