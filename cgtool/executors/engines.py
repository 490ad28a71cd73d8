"""Executors by URL: built-in ones, and those provided by other distributions.

    executor = name [":" rest]

The name is `dask`, `ray`, `slurm` or `mpi`, or that of an entry point in the group `cgtool.executors`: a function that
takes the whole URL and returns a `concurrent.futures.Executor`. Dask and Ray can exclude workers from a call; any other
executor may send a call to the same worker that refused it.

Must not import torch, and imports an engine's library only when it is used.
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

#: The entry-point group for executors of other distributions.
GROUP = "cgtool.executors"
#: The number of workers that may die while executing a call before it is given up.
MOST_DEATHS = 2
#: Timeout for connecting to a cluster, in seconds.
_CONNECT_SECS = 10.0

#: The function that an executor calls: takes bytes and the executor's name for the worker, and returns bytes.
Call = Callable[[bytes, str], bytes]


class NoWorkerError(Exception):
    """All available workers are excluded from a call."""


class WorkersDiedError(Exception):
    """The workers of a call died: their names, if known, and a sentence that describes how."""

    def __init__(self, workers: tuple[str, ...], reason: str) -> None:
        super().__init__(workers, reason)
        self.workers = workers
        self.reason = reason


class Engine:
    """Workers of an executor that neither identifies them nor can exclude any."""

    #: Exceptions raised by `submit` or a future if the executor is gone.
    lost: tuple[type[BaseException], ...] = (BrokenExecutor, CancelledError)
    #: Exceptions raised by a future if its worker died.
    died: tuple[type[BaseException], ...] = ()
    #: Whether workers have names and `submit` respects `avoid`.
    can_avoid = False

    def __init__(self, executor: Executor, died: tuple[type[BaseException], ...] = ()) -> None:
        self._executor = executor
        self.died = died

    def submit(self, avoid: frozenset[str], call: Call, data: bytes) -> Future[bytes]:  # noqa: ARG002  not supported
        """Submit `call(data, name)` to a worker whose name is not in `avoid`.

        Raises:
            NoWorkerError: All available workers are in `avoid`.
        """
        return self._executor.submit(call, data, "")

    def cancel(self, future: Future[bytes]) -> None:
        """Cancel a call, if the executor supports it."""
        future.cancel()

    def call_everywhere(self, call: Callable[..., None], *args: object) -> None:
        """Submit `call(*args, name)` to each current worker without waiting, if the engine can address them."""

    def has_workers(self, future: Future[bytes] | None = None) -> bool:  # noqa: ARG002  workers are unknown
        """Return whether there are workers, or workers that a pending call may run on."""
        return True

    def close(self) -> None:
        """Cancel queued calls and shut the executor down, without waiting."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def open_engine(url: str) -> Engine:
    """Return the engine for an executor URL.

    Raises:
        ConfigError: There is no executor of that name, its library is not installed, or its entry point does not return
            an executor.
        ExecutorError: The cluster does not respond.
    """
    name, _, rest = url.partition(":")
    if name in _BUILT_IN:
        return _BUILT_IN[name](rest)
    plugins = {point.name: point for point in entry_points(group=GROUP)}
    if name in plugins:
        return Engine(_open_plugin(name, url, plugins[name].load))
    known = ", ".join((*_BUILT_IN, *sorted(plugins)))
    raise ConfigError(
        f"There is no executor {name!r}; available are {known}. Install the distribution that provides it (entry-point "
        f"group {GROUP}).",
        path="executor",
        actual=url,
    )


def _open_plugin(name: str, url: str, load: Callable[[], Any]) -> Executor:
    try:
        executor = load()(url)
    except Exception as error:  # third-party code may raise anything
        raise ConfigError(
            f"The executor {name!r} cannot be created: {type(error).__name__}: {error}. Fix or remove the distribution "
            "that provides it.",
            path="executor",
            actual=str(error),
        ) from error
    if not isinstance(executor, Executor):
        raise ConfigError(
            f"The entry point of the executor {name!r} returned a {type(executor).__name__} instead of a "
            "concurrent.futures.Executor. Fix or remove the distribution that provides it.",
            path="executor",
            actual=repr(executor),
        )
    return executor


def _missing(name: str, library: str, error: ImportError) -> ConfigError:
    extra = f"pip install 'cgtool[{name}]'" if name in ("dask", "ray") else f"pip install {library}"
    return ConfigError(
        f"The executor {name!r} needs {library}, which cannot be imported ({error}). Install it with: {extra}",
        path="executor",
        actual=str(error),
    )


def _on_worker(name_of: Callable[[], str]) -> Callable[..., bytes]:
    """Return the function to send to workers, which calls another function by its name.

    It is a nested function so that it is pickled by value: Dask's scheduler unpickles it too, and may not have cgtool
    installed. A worker without the named function refuses the call with a `cgtool.executors.worker.Returned` message.
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
        return call(*args, worker)  # type: ignore[no-any-return]  # found by name

    return run


def _name_of(call: Callable[..., object]) -> str:
    return f"{call.__module__}:{call.__qualname__}"


# Dask: dask://HOST:PORT of a scheduler


class _Dask(Engine):
    """A Dask cluster. Dask moves a call to another worker if one dies; a scheduler variable lists the dead workers."""

    can_avoid = True

    def __init__(self, distributed: Any, address: str) -> None:
        self._client = distributed.Client(address, timeout=_CONNECT_SECS, set_as_default=False)
        self.lost = (*Engine.lost, OSError)
        self.died = (distributed.scheduler.KilledWorker,)
        self._new_variable = functools.partial(distributed.Variable, client=self._client)
        self._variables: dict[bytes, Any] = {}  # by the data of a call
        self._executors: list[Any] = []
        self._background: list[Any] = []  # Dask drops a call if its future is garbage-collected
        self._pending: dict[Future[bytes], tuple[bytes, list[str] | None]] = {}

        def worker_address() -> str:
            import distributed

            return str(distributed.get_worker().address)

        self._run = _on_worker(worker_address)

    def submit(self, avoid: frozenset[str], call: Call, data: bytes) -> Future[bytes]:
        present = self._client.nthreads()
        workers = [address for address in present if address not in avoid] if avoid and present else None
        if workers == []:
            raise NoWorkerError
        if data not in self._variables:
            self._variables[data] = self._new_variable()
            self._variables[data].set([])
        executor = self._client.get_executor(pure=False, workers=workers)
        self._executors.append(executor)
        args = (_name_of(call), data, self._variables[data].name)
        future: Future[bytes] = executor.submit(self._run, _name_of(_call_on_dask), *args)
        self._pending[future] = data, workers
        # Drop the reference: Dask recomputes a result that is still referenced if the worker that stores it dies.
        future.add_done_callback(lambda done: self._pending.pop(done, None))
        return future

    def call_everywhere(self, call: Callable[..., None], *args: object) -> None:
        for address in self._client.nthreads():
            executor = self._client.get_executor(pure=False, workers=[address])
            self._executors.append(executor)
            self._background.append(executor.submit(self._run, _name_of(call), *args))

    def has_workers(self, future: Future[bytes] | None = None) -> bool:
        present = self._client.nthreads()
        pending = None if future is None else self._pending.get(future)
        if pending is None:  # no call, or one that is done
            return future is not None or bool(present)
        data, allowed = pending
        is_any_present = any(address in present for address in allowed or present)
        if not is_any_present:
            _check_deaths(self._variables[data].get())
        return is_any_present

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the scheduler is gone
            for executor in self._executors:
                executor.shutdown(wait=False)
            for variable in self._variables.values():
                variable.delete()
        self._client.close(timeout=_CONNECT_SECS)


def _call_on_dask(call: str, data: bytes, variable_name: str, me: str) -> bytes:
    """Make a call with this worker's name in the variable; the next worker treats remaining names as dead workers."""
    import distributed

    variable = distributed.Variable(variable_name, client=distributed.get_client())
    dead = variable.get()
    _check_deaths(dead)
    variable.set([*dead, me])
    result: bytes = pkgutil.resolve_name(call)(data, me)
    variable.set(dead)
    return result


def _check_deaths(workers: list[str]) -> None:
    if len(workers) >= MOST_DEATHS:
        raise WorkersDiedError(tuple(workers), "it died while compiling this unit")


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
    """A Ray cluster; workers are named by their nodes. Ray does not retry a call if its worker dies."""

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

        def node_id() -> str:
            import ray

            return str(ray.get_runtime_context().get_node_id())

        self._run = ray.remote(_on_worker(node_id))
        self._pending: dict[Future[bytes], tuple[Any, frozenset[str]]] = {}

    def submit(self, avoid: frozenset[str], call: Call, data: bytes) -> Future[bytes]:
        nodes = self._nodes() if avoid else set()
        avoid = avoid & nodes  # only existing nodes need to be excluded
        if avoid and avoid == nodes:
            raise NoWorkerError
        where = {"ray.io/node-id": f"!in({','.join(sorted(avoid))})"} if avoid else None
        ref = self._run.options(num_cpus=1, max_retries=0, label_selector=where).remote(_name_of(call), data)
        future: Future[bytes] = ref.future()
        self._pending[future] = ref, avoid
        future.add_done_callback(lambda done: self._pending.pop(done, None))  # lets Ray drop the result
        return future

    def cancel(self, future: Future[bytes]) -> None:
        ref, _ = self._pending.get(future, (None, None))
        if ref is not None:
            self._ray.cancel(ref, force=True)

    def has_workers(self, future: Future[bytes] | None = None) -> bool:
        _, avoided = (None, frozenset()) if future is None else self._pending.get(future, (None, frozenset()))
        return bool(self._nodes() - avoided)

    def close(self) -> None:
        with contextlib.suppress(*self.lost):  # the cluster is gone
            for future in list(self._pending):
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
    """Runs each call as a submitit job, with a thread that waits for it. `cluster=local` runs jobs on this machine."""

    def __init__(self, submitit: Any, rest: str) -> None:
        super().__init__(max_workers=256, thread_name_prefix="cgtool-slurm")
        parameters = dict(pair.split("=", 1) for pair in rest.split(",") if pair)
        folder, cluster = parameters.pop("folder", "cgtool-slurm"), parameters.pop("cluster", None)
        self._jobs = submitit.AutoExecutor(folder, cluster=cluster)
        self._jobs.update_parameters(
            **{name: int(text) if text.isdigit() else text for name, text in parameters.items()}
        )
        self._running: set[Any] = set()

    def submit(self, call: Any, *args: Any) -> Future[Any]:  # type: ignore[override]  # takes no keyword arguments
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
            f"The executor 'slurm' does not accept {rest!r}: {error}. Use submitit's parameters, such as "
            "slurm:slurm_partition=compile,timeout_min=60,cpus_per_task=2.",
            path="executor",
            actual=rest,
        ) from error


def _mpi(rest: str) -> Engine:  # noqa: ARG001  no parameters
    try:
        from mpi4py import futures
    except ImportError as error:
        raise _missing("mpi", "mpi4py", error) from error
    return Engine(futures.MPIPoolExecutor())


def _unreachable(what: str, address: str, error: Exception) -> ExecutorError:
    reason = str(error) or type(error).__name__
    return ExecutorError(
        f"The {what} at {address} does not respond ({reason}). Start it, or correct the address.",
        path="executor",
        actual=str(error),
    )


_BUILT_IN: Mapping[str, Callable[[str], Engine]] = {"dask": _dask, "ray": _ray, "slurm": _slurm, "mpi": _mpi}
