"""Executors by URL: those that cgtool wraps, and those that other distributions bring.

    executor = name [":" rest]

The name is one of `dask`, `ray`, `slurm` and `mpi`, or that of an entry point of the group `cgtool.executors`: a
function that is given the whole text and returns a `concurrent.futures.Executor`. Dask and Ray can be told which
workers a call is not for; any other executor may give a call that a worker refused to that worker again.

Must not import torch, and imports an engine's own library only where it is asked for.
"""

from __future__ import annotations

import contextlib
import functools
import pkgutil
from collections.abc import Callable, Mapping
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ThreadPoolExecutor
from importlib.metadata import entry_points
from typing import Any

from cgtool.errors import ConfigError, ExecutorError

#: The entry-point group in which distributions name their executors.
GROUP = "cgtool.executors"
#: How many workers may die of one call.
MOST_DEATHS = 2
#: How long to wait for a cluster to answer at all, in seconds.
_CONNECT_SECS = 10.0

#: What an executor calls: bytes in, bytes out; the second argument is what it calls the worker.
Call = Callable[[bytes, str], bytes]


class NoWorkerError(Exception):
    """No worker is left that a call may go to."""


class WorkersDiedError(Exception):
    """What a future raises whose workers died: their names, as far as they are known, and how, as a sentence."""

    def __init__(self, workers: tuple[str, ...], reason: str) -> None:
        super().__init__(workers, reason)
        self.workers = workers
        self.reason = reason


class Engine:
    """Workers behind an executor, which neither says who they are nor can be told whom to avoid."""

    #: What submitting or a future raises where there is no executor any more.
    lost: tuple[type[BaseException], ...] = (BrokenExecutor, CancelledError)
    #: What a future raises where the worker died.
    died: tuple[type[BaseException], ...] = ()
    #: Whether workers have names, and `submit` heeds whom to avoid.
    can_avoid = False

    def __init__(self, executor: Executor, died: tuple[type[BaseException], ...] = ()) -> None:
        self._executor = executor
        self.died = died

    def submit(self, avoid: frozenset[str], call: Call, data: bytes) -> Future[bytes]:  # noqa: ARG002  cannot be told
        """Have a worker whose name is not in `avoid` call `call(data, name)`.

        Raises:
            NoWorkerError: There are workers, and all of them are in `avoid`.
        """
        return self._executor.submit(call, data, "")

    def cancel(self, future: Future[bytes]) -> None:
        """Cancel a call, as far as the executor can."""
        future.cancel()

    def call_everywhere(self, call: Callable[..., None], *args: object) -> None:
        """Have each present worker call `call(*args, name)`, where the engine can tell them; nothing waits for it."""

    def has_workers(self, future: Future[bytes] | None = None) -> bool:  # noqa: ARG002  it does not say who is there
        """Return whether there are workers now; given a pending call, whether there are any that it may go to."""
        return True

    def close(self) -> None:
        """Cancel queued calls and shut the executor down, without waiting."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def open_engine(url: str) -> Engine:
    """Return the executor that a URL names.

    Raises:
        ConfigError: There is none of that name, its library is not installed, or what its entry point returns is not
            an executor.
        ExecutorError: It does not answer.
    """
    name, rest = url.partition(":")[0], url.partition(":")[2]
    if name in _OURS:
        return _OURS[name](rest)
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name in found:
        return Engine(_opened(name, url, found[name].load))
    known = ", ".join((*_OURS, *sorted(found)))
    raise ConfigError(
        f"There is no executor {name!r}; there are {known}. Install the distribution that brings it (entry-point "
        f"group {GROUP}).",
        path="executor",
        actual=url,
    )


def _opened(name: str, url: str, load: Callable[[], Any]) -> Executor:
    try:
        executor = load()(url)
    except Exception as error:  # the code of another distribution raises what it likes
        raise ConfigError(
            f"The executor {name!r} cannot be made: {type(error).__name__}: {error}. Mend or remove the distribution "
            "that brings it.",
            path="executor",
            actual=str(error),
        ) from error
    if not isinstance(executor, Executor):
        raise ConfigError(
            f"The executor {name!r} is to be a concurrent.futures.Executor, and what brings it gives a "
            f"{type(executor).__name__}. Mend or remove it.",
            path="executor",
            actual=repr(executor),
        )
    return executor


def _missing(name: str, library: str, error: ImportError) -> ConfigError:
    extra = f"pip install 'cgtool[{name}]'" if name in ("dask", "ray") else f"pip install {library}"
    return ConfigError(
        f"The executor {name!r} needs {library}, which cannot be imported ({error}). Install it: {extra}.",
        path="executor",
        actual=str(error),
    )


def _on_worker(name_of: Callable[[], str]) -> Callable[..., bytes]:
    """Return what a worker is given: a function that calls another one by its name.

    Being nested, it is sent whole: Dask's scheduler reads it too, and may have no cgtool. A worker that has no such
    function refuses the call in the words of `cgtool.executors.worker.Returned`.
    """

    def run(called: str, *args: object) -> bytes:
        import json
        import pkgutil

        worker = name_of()
        try:
            call = pkgutil.resolve_name(called)
        except (ImportError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            return json.dumps({"worker": worker, "status": "refused", "reason": reason}).encode() + b"\n"
        return call(*args, worker)  # type: ignore[no-any-return]  # what the call returns is its own

    return run


def _name_of(call: Callable[..., object]) -> str:
    return f"{call.__module__}:{call.__qualname__}"


# Dask: dask://HOST:PORT of a scheduler


class _Dask(Engine):
    """A Dask cluster. Dask gives a call to another worker when one dies, which a variable of the scheduler counts."""

    can_avoid = True

    def __init__(self, distributed: Any, address: str) -> None:
        self._client = distributed.Client(address, timeout=_CONNECT_SECS, set_as_default=False)
        self.lost = (*Engine.lost, OSError)
        self.died = (distributed.scheduler.KilledWorker,)
        self._new_variable = functools.partial(distributed.Variable, client=self._client)
        self._with: dict[bytes, Any] = {}
        self._executors: list[Any] = []
        self._asides: list[Any] = []  # Dask forgets a call whose future nobody holds
        self._sent: dict[Future[bytes], tuple[bytes, list[str] | None]] = {}

        def address_here() -> str:
            import distributed

            return str(distributed.get_worker().address)

        self._run = _on_worker(address_here)

    def submit(self, avoid: frozenset[str], call: Call, data: bytes) -> Future[bytes]:
        there = self._client.nthreads()
        workers = [address for address in there if address not in avoid] if avoid and there else None
        if workers == []:
            raise NoWorkerError
        if data not in self._with:
            self._with[data] = self._new_variable()
            self._with[data].set([])
        executor = self._client.get_executor(pure=False, workers=workers)
        self._executors.append(executor)
        args = (_name_of(call), data, self._with[data].name)
        future: Future[bytes] = executor.submit(self._run, _name_of(_call_on_dask), *args)
        self._sent[future] = data, workers
        # a result that is wanted still is computed again where the worker that keeps it dies
        future.add_done_callback(lambda done: self._sent.pop(done, None))
        return future

    def call_everywhere(self, call: Callable[..., None], *args: object) -> None:
        for address in self._client.nthreads():
            executor = self._client.get_executor(pure=False, workers=[address])
            self._executors.append(executor)
            self._asides.append(executor.submit(self._run, _name_of(call), *args))

    def has_workers(self, future: Future[bytes] | None = None) -> bool:
        there = self._client.nthreads()
        sent = None if future is None else self._sent.get(future)
        if sent is None:  # of none, or of one that is done
            return future is not None or bool(there)
        data, wanted = sent
        found = any(address in there for address in wanted or there)
        if not found:
            _check_deaths(self._with[data].get())
        return found

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the scheduler is gone
            for executor in self._executors:
                executor.shutdown(wait=False)
            for variable in self._with.values():
                variable.delete()
        self._client.close(timeout=_CONNECT_SECS)


def _call_on_dask(call: str, data: bytes, variable_name: str, me: str) -> bytes:
    """Make a call, with this worker's name in the variable meanwhile: names that the next worker finds there died."""
    import distributed

    variable = distributed.Variable(variable_name, client=distributed.get_client())
    died = variable.get()
    _check_deaths(died)
    variable.set([*died, me])
    answer: bytes = pkgutil.resolve_name(call)(data, me)
    variable.set(died)
    return answer


def _check_deaths(workers: list[str]) -> None:
    if len(workers) >= MOST_DEATHS:
        raise WorkersDiedError(tuple(workers), "it died with this unit")


def _dask(rest: str) -> Engine:
    try:
        import distributed
    except ImportError as error:
        raise _missing("dask", "distributed", error) from error
    try:
        return _Dask(distributed, "tcp:" + rest if rest.startswith("//") else rest)
    except (OSError, ValueError) as error:
        raise _unreachable("Dask scheduler", rest.removeprefix("//"), error) from error


# Ray: ray://HOST:PORT of a Ray Client server, or ray:HOST:PORT and ray:auto on a machine of the cluster


class _Ray(Engine):
    """A Ray cluster, whose nodes are the workers by name. A call whose worker died is not tried again by Ray."""

    can_avoid = True

    def __init__(self, ray: Any, address: str) -> None:
        self._ray = ray
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            ray.init(address, **({} if address.startswith("ray://") else {"log_to_driver": False}))
        self.lost = (*Engine.lost, OSError, ray.exceptions.TaskCancelledError, ray.exceptions.RaySystemError)
        self.died = (
            *(ray.exceptions.WorkerCrashedError, ray.exceptions.LocalRayletDiedError),
            *(ray.exceptions.NodeDiedError, ray.exceptions.OutOfMemoryError),
        )

        def node_here() -> str:
            import ray

            return str(ray.get_runtime_context().get_node_id())

        self._run = ray.remote(_on_worker(node_here))
        self._sent: dict[Future[bytes], tuple[Any, frozenset[str]]] = {}

    def submit(self, avoid: frozenset[str], call: Call, data: bytes) -> Future[bytes]:
        nodes = self._nodes() if avoid else set()
        avoid = avoid & nodes  # a node that is gone needs no word
        if avoid and avoid == nodes:
            raise NoWorkerError
        where = {"ray.io/node-id": f"!in({','.join(sorted(avoid))})"} if avoid else None
        ref = self._run.options(num_cpus=1, max_retries=0, label_selector=where).remote(_name_of(call), data)
        future: Future[bytes] = ref.future()
        self._sent[future] = ref, avoid
        future.add_done_callback(lambda done: self._sent.pop(done, None))  # and Ray keeps its result no longer
        return future

    def cancel(self, future: Future[bytes]) -> None:
        ref, _ = self._sent.get(future, (None, None))
        if ref is not None:
            self._ray.cancel(ref, force=True)

    def has_workers(self, future: Future[bytes] | None = None) -> bool:
        _, avoided = (None, frozenset()) if future is None else self._sent.get(future, (None, frozenset()))
        return bool(self._nodes() - avoided)

    def close(self) -> None:
        with contextlib.suppress(*self.lost):  # the cluster is gone
            for future in list(self._sent):
                self.cancel(future)
        if self._is_ours:
            self._ray.shutdown()

    def _nodes(self) -> set[str]:
        return {node["NodeID"] for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU")}


def _ray(rest: str) -> Engine:
    try:
        import ray
    except ImportError as error:
        raise _missing("ray", "ray[client]", error) from error
    try:
        return _Ray(ray, "ray:" + rest if rest.startswith("//") else rest)
    except (OSError, ValueError, RuntimeError) as error:
        raise _unreachable("Ray cluster", rest.removeprefix("//"), error) from error


# Slurm: slurm:NAME=VALUE,...; each call is a job, and NAME=VALUE are submitit's parameters


class _Jobs(ThreadPoolExecutor):
    """Jobs of submitit: a thread waits for each. `cluster=local` runs them on this machine."""

    def __init__(self, submitit: Any, rest: str) -> None:
        super().__init__(max_workers=256, thread_name_prefix="cgtool-slurm")
        given = dict(pair.split("=", 1) for pair in rest.split(",") if pair)
        folder, cluster = given.pop("folder", "cgtool-slurm"), given.pop("cluster", None)
        self._jobs = submitit.AutoExecutor(folder, cluster=cluster)
        self._jobs.update_parameters(**{name: int(text) if text.isdigit() else text for name, text in given.items()})
        self._running: set[Any] = set()

    def submit(self, call: Any, *args: Any) -> Future[Any]:  # type: ignore[override]  # calls of ours alone
        return super().submit(self._run, call, *args)

    def _run(self, call: Any, *args: Any) -> Any:
        job = self._jobs.submit(call, *args)
        self._running.add(job)
        try:
            return job.result()
        finally:
            self._running.discard(job)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=cancel_futures)
        for job in list(self._running) if cancel_futures else ():
            job.cancel(check=False)
        super().shutdown(wait=wait)


def _slurm(rest: str) -> Engine:
    try:
        import submitit
    except ImportError as error:
        raise _missing("slurm", "submitit", error) from error
    try:
        return Engine(_Jobs(submitit, rest), died=(submitit.core.utils.UncompletedJobError,))
    except (TypeError, ValueError, RuntimeError, NameError) as error:
        raise ConfigError(
            f"The executor 'slurm' does not take {rest!r}: {error}. Give submitit's parameters, such as "
            "slurm:slurm_partition=compile,timeout_min=60,cpus_per_task=2.",
            path="executor",
            actual=rest,
        ) from error


def _mpi(rest: str) -> Engine:  # noqa: ARG001  there is nothing to say
    try:
        from mpi4py import futures
    except ImportError as error:
        raise _missing("mpi", "mpi4py", error) from error
    return Engine(futures.MPIPoolExecutor())


def _unreachable(what: str, where: str, error: Exception) -> ExecutorError:
    return ExecutorError(
        f"The {what} at {where} does not answer ({str(error) or type(error).__name__}). Start it, or mend the address.",
        path="executor",
        actual=str(error),
    )


_OURS: Mapping[str, Callable[[str], Engine]] = {"dask": _dask, "ray": _ray, "slurm": _slurm, "mpi": _mpi}
