"""Shared fixtures: an installed distribution with executors, children that are not forked, and Dask clusters."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_harness import forking
from worker_harness import wait_until

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def site(worded_site):
    """Return the environment of `worded_site` with a second distribution, which provides own_executors.py."""
    folder = Path(worded_site["PYTHONPATH"].partition(os.pathsep)[0])
    metadata = folder / "own-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    lines = "".join(f"{name} = own_executors:{name}\n" for name in ("threads", "processes", "liars", "nothing"))
    (metadata / "entry_points.txt").write_text(f"[cgtool.executors]\n{lines}")
    shutil.copy(HERE / "own_executors.py", folder)
    return worded_site


@pytest.fixture
def forked_children():
    with forking():
        yield


@pytest.fixture
def fresh_children(monkeypatch, forked_children):
    """Start children as usual, for tests in which they inherit a limit or a folder from this process."""
    monkeypatch.setattr("cgtool.processes.subprocess", subprocess)


class Dask:
    """A Dask scheduler without cgtool, and workers, each a process with its own log.

    Attributes:
        address: The scheduler's address.
        url: The value for `--executor`.
    """

    def __init__(self, folder: Path, **variables: str) -> None:
        self._folder = folder
        #: A PYTHONPATH without cgtool.
        self.without_cgtool = str(folder / "none")
        hidden = folder / "none" / "cgtool"
        hidden.mkdir(parents=True)
        (hidden / "__init__.py").write_text("raise ImportError('there is no cgtool here')\n")
        self._num_started = 0
        self._workers: list[subprocess.Popen[bytes]] = []
        file = folder / "scheduler.json"
        self.scheduler, self._log = self._start("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard",
                                                "--scheduler-file", file,
                                                PYTHONPATH=self.without_cgtool, **variables)  # fmt: skip
        wait_until(lambda: file.exists() and file.read_text().strip())
        self.address = json.loads(file.read_text())["address"]
        self.url = "dask:" + self.address.removeprefix("tcp:")

    def add_workers(self, *environments: dict[str, str]) -> list[subprocess.Popen[bytes]]:
        """Start a worker with one thread in each environment, and wait until all are connected."""
        options = ("--nthreads", "1", "--no-nanny", "--no-dashboard", "--death-timeout", "60")
        started = [self._start("worker", self.address, *options, **variables) for variables in environments]
        for _, log in started:
            wait_until(lambda log=log: "Starting established connection" in log.read_text())
        self._workers += [worker for worker, _ in started]
        return [worker for worker, _ in started]

    def add_worker(self, **variables: str) -> subprocess.Popen[bytes]:
        return self.add_workers(variables)[0]

    def remove_workers(self) -> None:
        """End all workers, and wait until the scheduler knows."""
        for worker in self._workers:
            _kill(worker)
        wait_until(lambda: self._log.read_text().count("Remove worker") == self._num_started - 1)
        self._workers.clear()

    def close(self) -> None:
        for process in (*self._workers, self.scheduler):
            _kill(process)

    def _start(self, kind: str, *arguments: object, **variables: str) -> tuple[subprocess.Popen[bytes], Path]:
        log = self._folder / f"log{self._num_started}"
        self._num_started += 1
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "distributed.cli.dask_" + kind, *map(str, arguments)],
                env={**os.environ, "PYTHONPATH": f"{HERE.parents[1]}:{HERE}", **variables},
                cwd=self._folder,
                stdout=out,
                stderr=out,
            )
        return process, log


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.kill()
    process.wait()


@pytest.fixture(scope="module")
def shared_dask(tmp_path_factory):
    pytest.importorskip("distributed")
    cluster = Dask(tmp_path_factory.mktemp("dask"))
    yield cluster
    cluster.close()


@pytest.fixture
def dask(shared_dask):
    """A scheduler without workers, which the tests of a module share."""
    yield shared_dask
    shared_dask.remove_workers()


@pytest.fixture
def own_dask(tmp_path, request):
    """A scheduler without workers, with the environment variables of an indirect parameter."""
    pytest.importorskip("distributed")
    folder = tmp_path / "dask"
    folder.mkdir()
    cluster = Dask(folder, **getattr(request, "param", {}))
    yield cluster
    cluster.close()
