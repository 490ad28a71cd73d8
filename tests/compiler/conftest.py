"""Distributions that bring executors, and clusters of Dask on loopback."""

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
    """Return the environment of `worded_site`, where another distribution brings the executors of own_executors.py."""
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
    """Have children start as they do, where they inherit a limit or a folder from this process."""
    monkeypatch.setattr("cgtool.processes.subprocess", subprocess)


class Dask:
    """A scheduler, which has no cgtool, and its workers, each a process with its own log.

    Attributes:
        url: For `--executor`.
        workers: Their processes.
    """

    def __init__(self, folder: Path, **variables: str) -> None:
        self._folder = folder
        #: PYTHONPATH of a process that has no cgtool.
        self.without_cgtool = str(folder / "none")
        hidden = folder / "none" / "cgtool"
        hidden.mkdir(parents=True)
        (hidden / "__init__.py").write_text("raise ImportError('there is no cgtool here')\n")
        file = folder / "scheduler.json"
        self.scheduler = self._start("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard",
                                     "--scheduler-file", file, PYTHONPATH=self.without_cgtool, **variables)  # fmt: skip
        wait_until(lambda: file.exists() and file.read_text().strip())
        self.address = json.loads(file.read_text())["address"]
        self.url = "dask:" + self.address.removeprefix("tcp:")
        self.workers: list[subprocess.Popen[bytes]] = []

    def add_worker(self, **variables: str) -> subprocess.Popen[bytes]:
        """Start a worker of one thread in an environment with `variables`, and wait until it is there."""
        options = ("--nthreads", "1", "--no-nanny", "--no-dashboard", "--death-timeout", "60")
        worker = self._start("worker", self.address, *options, **variables)
        self.workers.append(worker)
        log = self._log(len(self.workers))
        wait_until(lambda: "Starting established connection" in log.read_text())
        return worker

    def close(self) -> None:
        for process in (*self.workers, self.scheduler):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()

    def _log(self, number: int) -> Path:
        return self._folder / f"log{number}"

    def _start(self, kind: str, *arguments: object, **variables: str) -> subprocess.Popen[bytes]:
        number = 0 if kind == "scheduler" else len(self.workers) + 1
        with self._log(number).open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "distributed.cli.dask_" + kind, *map(str, arguments)],
                env={**os.environ, "PYTHONPATH": f"{HERE.parents[1]}:{HERE}", **variables},
                cwd=self._folder,
                stdout=log,
                stderr=log,
            )


@pytest.fixture
def dask(tmp_path, request):
    """A scheduler without workers, in an environment with the variables of an indirect parameter."""
    pytest.importorskip("distributed")
    folder = tmp_path / "dask"
    folder.mkdir()
    cluster = Dask(folder, **getattr(request, "param", {}))
    yield cluster
    cluster.close()
