"""Executors by URL: those that cgtool wraps, and those that other distributions bring.

    executor = name [":" rest]

The name is one of `dask`, `ray`, `slurm` and `mpi`, or that of an entry point of the group `cgtool.executors`: a
function that is given the whole text and returns a `concurrent.futures.Executor`. An `Engine` can be told which workers
a call is not for; any other executor may give a call that a worker refused to that worker again.

Must not import torch, and imports an engine's own library only where it is asked for.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ThreadPoolExecutor
from concurrent.futures import wait as futures_wait
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
    """Nobody is left whom a call may go to."""


class WorkersDiedError(Exception):
    """What a future raises whose workers died.

    Args:
        workers: Their names, as far as they are known.
        reason: How, as a sentence.
    """

    def __init__(self, workers: tuple[str, ...], reason: str) -> None:
        super().__init__(workers, reason)
        self.workers = workers
        self.reason = reason


class Engine(Executor):
    """An executor that knows its workers by name.

    Attributes:
        lost: What a future raises where there is no executor any more.
    """

    lost: tuple[type[BaseException], ...] = (BrokenExecutor, CancelledError)

    def submit_avoiding(self, avoid: frozenset[str], call: Call, data: bytes) -> Future[bytes]:
        """Have a worker whose name is not in `avoid` call `call(data, name)`.

        Raises:
            NoWorkerError: There are workers, and all of them are in `avoid`.
        """
        raise NotImplementedError

    def call_everywhere(self, call: Callable[[], None]) -> None:
        """Have each worker that is there now call something, where an engine can; nobody waits for it."""

    def is_served(self, future: Future[bytes]) -> bool:  # noqa: ARG002  what an engine knows nothing of is served
        """Return whether there is a worker now that a call may go to."""
        return True


def open_executor(url: str) -> Executor:
    """Return the executor that a URL names.

    Raises:
        ConfigError: There is none of that name, its library is not installed, or what brings it gives something else.
        ExecutorError: It does not answer.
    """
    name, rest = url.partition(":")[0], url.partition(":")[2]
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name in _OURS:
        opened = _OURS[name](rest)
    elif name in found:
        opened = _opened(name, url, found[name].load)
    else:
        known = ", ".join((*_OURS, *sorted(found)))
        raise ConfigError(
            f"There is no executor {name!r}; there are {known}. Install the distribution that brings it (entry-point "
            f"group {GROUP}).",
            path="executor",
            actual=url,
        )
    return opened


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


# Dask: dask://HOST:PORT of a scheduler


class _Dask(Engine):
    """A Dask cluster. Dask gives a call to another worker when one dies, which a variable of the scheduler counts."""

    def __init__(self, address: str) -> None:
        try:
            import distributed
        except ImportError as error:
            raise _missing("dask", "distributed", error) from error
        self._client: Any = distributed.Client(address, timeout=_CONNECT_SECS, set_as_default=False)
        self.lost = (*Engine.lost, OSError)
        self._new_count = functools.partial(distributed.Variable, client=self._client)
        self._counts: list[Any] = []
        self._executors: list[Any] = []
        self._asides: list[Any] = []  # Dask forgets a call whose future nobody holds
        self._wanted: dict[Future[bytes], list[str] | None] = {}

    def submit_avoiding(self, avoid: frozenset[str], call: Call, data: bytes) -> Future[bytes]:
        workers = None
        if avoid:
            workers = [address for address in self._client.nthreads() if address not in avoid]
            if not workers:
                raise NoWorkerError
        count = self._new_count()
        count.set([])
        self._counts.append(count)
        executor = self._client.get_executor(pure=False, workers=workers)
        self._executors.append(executor)
        future: Future[bytes] = executor.submit(_call_on_dask, call, data, count.name)
        self._wanted[future] = workers
        return future

    def call_everywhere(self, call: Callable[[], None]) -> None:
        for address in self._client.nthreads():
            executor = self._client.get_executor(pure=False, workers=[address])
            self._executors.append(executor)
            self._asides.append(executor.submit(call))

    def is_served(self, future: Future[bytes]) -> bool:
        workers = self._client.nthreads()
        return any(address in workers for address in self._wanted.get(future) or workers)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with contextlib.suppress(OSError):  # the scheduler is gone
            for executor in self._executors:
                executor.shutdown(wait=wait and not cancel_futures)
            for count in self._counts:
                count.delete()
        self._client.close(timeout=_CONNECT_SECS)


def _call_on_dask(call: Call, data: bytes, count_name: str) -> bytes:
    import distributed

    me = distributed.get_worker().address
    count = distributed.Variable(count_name, client=distributed.get_client())
    workers = count.get()
    if len(workers) >= MOST_DEATHS:
        raise WorkersDiedError(tuple(workers), "it died with this unit")
    count.set([*workers, me])
    return call(data, me)


def _dask(rest: str) -> Executor:
    try:
        return _Dask("tcp:" + rest if rest.startswith("//") else rest)
    except (OSError, ValueError) as error:
        raise _unreachable("Dask scheduler", rest.removeprefix("//"), error) from error


# Ray: ray://HOST:PORT of a Ray Client server, or ray:HOST:PORT and ray:auto on a machine of the cluster


class _Ray(Engine):
    """A Ray cluster. Ray gives each call to one worker here: who submits it counts those that died."""

    def __init__(self, ray: Any, address: str) -> None:
        self._ray = ray
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            ray.init(address, log_to_driver=False)
        self.lost = (*Engine.lost, OSError, ray.exceptions.TaskCancelledError, ray.exceptions.RaySystemError)
        self._died = (
            *(ray.exceptions.WorkerCrashedError, ray.exceptions.LocalRayletDiedError),
            *(ray.exceptions.NodeDiedError, ray.exceptions.OutOfMemoryError),
        )
        self._call = ray.remote(_call_on_ray)
        self._refs: dict[Future[bytes], Any] = {}
        self._avoided: dict[Future[bytes], frozenset[str]] = {}

    def submit_avoiding(self, avoid: frozenset[str], call: Call, data: bytes) -> Future[bytes]:
        nodes = self._nodes() if avoid else set()
        avoid = avoid & nodes  # a node that is gone needs no word
        if avoid and avoid == nodes:
            raise NoWorkerError
        where = {"ray.io/node-id": f"!in({','.join(sorted(avoid))})"} if avoid else None
        ref = self._call.options(num_cpus=1, max_retries=0, label_selector=where).remote(call, data)
        future: Future[bytes] = Future()
        self._refs[future], self._avoided[future] = ref, avoid
        ref.future().add_done_callback(functools.partial(self._take, future))
        return future

    def is_served(self, future: Future[bytes]) -> bool:
        return bool(self._nodes() - self._avoided[future])

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            for future, ref in self._refs.items():
                if not future.done():
                    self._ray.cancel(ref, force=True)
        if wait:
            futures_wait(self._refs)
        if self._is_ours:
            self._ray.shutdown()

    def _nodes(self) -> set[str]:
        return {node["NodeID"] for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU")}

    def _take(self, future: Future[bytes], done: Future[bytes]) -> None:
        error = done.exception()
        if error is None:
            future.set_result(done.result())
        elif isinstance(error, self._died):
            future.set_exception(WorkersDiedError(("a worker of Ray",), str(error).partition("\n")[0]))
        else:
            future.set_exception(error)


def _call_on_ray(call: Call, data: bytes) -> bytes:
    import ray

    return call(data, ray.get_runtime_context().get_node_id())


def _ray(rest: str) -> Executor:
    try:
        import ray
    except ImportError as error:
        raise _missing("ray", "ray[client]", error) from error
    try:
        return _Ray(ray, "ray:" + rest if rest.startswith("//") else rest)
    except (OSError, ValueError, RuntimeError) as error:
        raise _unreachable("Ray cluster", rest.removeprefix("//"), error) from error


# Slurm: slurm:NAME=VALUE,...; each call is a job, and NAME=VALUE are submitit's parameters


class _Slurm(ThreadPoolExecutor):
    """Jobs of submitit: a thread waits for each. `cluster=local` runs them on this machine."""

    def __init__(self, rest: str) -> None:
        super().__init__(max_workers=256, thread_name_prefix="cgtool-slurm")
        try:
            import submitit
        except ImportError as error:
            raise _missing("slurm", "submitit", error) from error
        given = dict(pair.split("=", 1) for pair in rest.split(",") if pair)
        folder, cluster = given.pop("folder", "cgtool-slurm"), given.pop("cluster", None)
        self._jobs: Any = submitit.AutoExecutor(folder, cluster=cluster)
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


def _slurm(rest: str) -> Executor:
    try:
        return _Slurm(rest)
    except (TypeError, ValueError, RuntimeError, NameError) as error:
        raise ConfigError(
            f"The executor 'slurm' does not take {rest!r}: {error}. Give submitit's parameters, such as "
            "slurm:slurm_partition=compile,timeout_min=60,cpus_per_task=2.",
            path="executor",
            actual=rest,
        ) from error


def _mpi(rest: str) -> Executor:  # noqa: ARG001  there is nothing to say
    try:
        from mpi4py import futures
    except ImportError as error:
        raise _missing("mpi", "mpi4py", error) from error
    executor: Executor = futures.MPIPoolExecutor()
    return executor


def _unreachable(what: str, where: str, error: Exception) -> ExecutorError:
    return ExecutorError(
        f"The {what} at {where} does not answer ({str(error) or type(error).__name__}). Start it, or mend the address.",
        path="executor",
        actual=str(error),
    )


_OURS: Mapping[str, Callable[[str], Executor]] = {"dask": _dask, "ray": _ray, "slurm": _slurm, "mpi": _mpi}
