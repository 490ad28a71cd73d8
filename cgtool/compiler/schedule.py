"""Running compile tasks: in this thread, and in as many others as there are workers to wait for.

A task goes to a thread that waits for a worker, where its adaptor has workers; what only this process can compile, and
what compiles at once, is done by the calling thread meanwhile. So at most one piece is compiled in this process, always
by the thread that asked for the warm, and an interruption reaches it.
"""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
from dataclasses import dataclass

from cgtool.compiler.manager import Built
from cgtool.compiler.managers import Managers, next_adaptor
from cgtool.compiler.wanted import Work
from cgtool.compiler.workers.pool import WorkerPool
from cgtool.compiler.workers.request import StaysHereError
from cgtool.config import EAGER
from cgtool.errors import CompileError, WorkerError
from cgtool.events import Event, OnEvent
from cgtool.store.entry import ObjectStore

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Task:
    """Work that one artifact serves, and what came of it so far.

    Args:
        items: The work.
        label: What it is, for people.
        adaptor: The adaptor that is to compile it, or did; "" before the first.
        reason: Why that is not the adaptor that was asked for; "" where it is.
        unit: The artifact, once it is there.
        error: Why there is none.
    """

    items: list[Work]
    label: str
    adaptor: str = ""
    reason: str = ""
    unit: Built | None = None
    error: CompileError | None = None

    def __post_init__(self) -> None:
        self.adaptor = self.adaptor or self.items[0].adaptor

    @property
    def is_base(self) -> bool:
        """Whether it serves every size of its variants."""
        return all(item.is_base for item in self.items)

    @property
    def max_autotune(self) -> bool:
        """Whether the compiler may take its time."""
        return self.items[0].tuned and self.adaptor != EAGER


def run_tasks(
    tasks: list[Task], *, objects: ObjectStore, managers: Managers, pool: WorkerPool | None, on_event: OnEvent
) -> None:
    """Do all tasks; each then has a unit or an error.

    Args:
        tasks: What to do, the first first.
        objects: The entry's artifacts.
        managers: The compilers.
        pool: Workers, `pool.jobs` of them at a time; None: everything is compiled in this process.
        on_event: Told of each task, from one thread at a time.

    Raises:
        CgtoolError: Whatever is no single piece's fault; nothing more is begun then.
    """
    _Run(tasks, objects, managers, on_event).run(pool)


class _Run:
    def __init__(self, tasks: list[Task], objects: ObjectStore, managers: Managers, on_event: OnEvent) -> None:
        self._tasks = tasks
        self._objects = objects
        self._managers = managers
        self._on_event = on_event
        self._shared: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._local: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: dict[int, str] = {}
        self._left = len(tasks)
        self._fatal: BaseException | None = None
        self._as_it_stands: set[tuple[int, int]] = set()

    def run(self, pool: WorkerPool | None) -> None:
        for task in self._tasks:
            first = task.items[0]
            self._managers.get(task.adaptor).key(first.graph, first.origin, max_autotune=task.max_autotune)
            self._enqueue(task)
        away = sum(self._managers.get(task.adaptor).has_workers for task in self._tasks)
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
                waiting = self._local.get()
                if waiting is not None:
                    self._step(waiting, in_worker=False)
        except BaseException as error:  # whatever ends this thread ends the others
            self._fatal = self._fatal or error
            raise
        finally:
            for _ in range(count):
                self._shared.put(None)
        if self._fatal is not None:
            raise self._fatal

    def _enqueue(self, task: Task) -> None:
        (self._shared if self._managers.get(task.adaptor).has_workers else self._local).put(task)

    def _serve(self) -> None:
        """What the threads do: they wait for workers, and never compile."""
        while (task := self._shared.get()) is not None:
            try:
                self._step(task, in_worker=True)
            except BaseException as error:  # noqa: BLE001  raised again by the thread that asked for it all
                self._fatal = self._fatal or error
                self._end(task)

    def _step(self, task: Task, *, in_worker: bool) -> None:
        """Give a task to its adaptor once."""
        if self._fatal is not None or self._is_moot(task):
            self._end(task)
            return
        self._begin(task)
        try:
            first = task.items[0]
            task.unit = self._managers.get(task.adaptor).ensure(
                first.graph,
                first.origin,
                objects=self._objects,
                max_autotune=task.max_autotune,
                in_worker=in_worker,
            )
        except StaysHereError as reason:
            _log.info("%s is compiled in this process and not in a worker: %s.", task.label, reason)
            self._pause(task)
            self._local.put(task)
        except WorkerError as error:
            task.error = error
            self._end(task)
        except CompileError as error:
            self._fall(task, error)
        else:
            self._end(task)

    def _fall(self, task: Task, error: CompileError) -> None:
        """Give a task that an adaptor refused to the next one."""
        follower = next_adaptor(task.adaptor)
        if follower is None or (follower == EAGER and not task.is_base):
            task.error = error
            self._end(task)
            return
        _log.info("%s goes from %s to %s: %s", task.label, task.adaptor, follower, error)
        task.reason = f"{task.reason}; {task.adaptor}: {error}" if task.reason else f"{task.adaptor}: {error}"
        task.adaptor = follower
        self._pause(task)
        if follower == EAGER:
            with self._lock:
                self._as_it_stands.update(item.place for item in task.items)
        self._enqueue(task)

    def _is_moot(self, task: Task) -> bool:
        """Return whether all that a task is for runs as it stands, whatever the size."""
        with self._lock:
            return not task.is_base and all(item.place in self._as_it_stands for item in task.items)

    def _begin(self, task: Task) -> None:
        with self._lock:
            self._running[id(task)] = task.label
            self._tell()

    def _pause(self, task: Task) -> None:
        with self._lock:
            self._running.pop(id(task), None)

    def _end(self, task: Task) -> None:
        with self._lock:
            self._running.pop(id(task), None)
            self._left -= 1
            unit = task.unit
            if unit is not None and self._fatal is None:
                said = f"{task.label}, compiled before" if unit.reused else task.label
                self._tell(said, secs=0.0 if unit.reused else unit.artifact.compile_secs)
                if self._running:
                    self._tell()
            elif task.error is not None and self._fatal is None:
                self._tell(f"{task.label} failed", secs=0.0)
            if self._left == 0 or self._fatal is not None:
                self._local.put(None)

    def _tell(self, message: str | None = None, *, secs: float | None = None) -> None:
        """Tell of one task, or of all that run now; the lock is held."""
        words = "; ".join(self._running.values()) if message is None else message
        total = len(self._tasks)
        self._on_event(Event(phase="compile", message=words, done=total - self._left, total=total, secs=secs))
