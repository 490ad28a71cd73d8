"""What the tests of workers share: a warm of hand-made work, and who of a process group is alive."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import subprocess
import time
from pathlib import Path

from cli_harness import environment

from cgtool.compiler.cluster import Cluster
from cgtool.compiler.manager import CompilerManager
from cgtool.compiler.pool import WorkerPool
from cgtool.compiler.schedule import compile_work
from cgtool.config import CompilationConfig
from cgtool.store.entry import ObjectStore
from cgtool.store.layout import CacheLayout


@functools.cache
def shared_pool():
    """Return the two workers of this process, which start once for all tests."""
    pool = WorkerPool(jobs=2, inductor=False)
    atexit.register(pool.close)
    return pool


def compile_all(work, root, *, timeout_secs=None, options=None, events=None, own=0):
    """Compile `work` into a cache with workers, as a warm does: with so many of its own, or those of all tests."""
    layout = CacheLayout(root=root)
    config = CompilationConfig(inductor_compile_config=options or {})
    told = events if events is not None else []
    with WorkerPool(jobs=own, inductor=False) if own else contextlib.nullcontext(shared_pool()) as pool:
        pool._timeout_secs = timeout_secs
        manager = CompilerManager(layout, config, on_event=told.append, pool=pool)
        return compile_work(work, objects=ObjectStore(root / "entry"), manager=manager, pool=pool, on_event=told.append)


def compile_on(url, work, root, *, timeout_secs=None, prove=False, options=None, events=None, patience_secs=300.0):
    """Compile `work` into a cache with the workers of an executor, as a warm does."""
    layout = CacheLayout(root=root)
    config = CompilationConfig(inductor_compile_config=options or {})
    told = events if events is not None else []
    how = {"timeout_secs": timeout_secs, "prove": prove, "inductor": False, "patience_secs": patience_secs}
    with Cluster(url, on_event=told.append, **how) as cluster:
        manager = CompilerManager(layout, config, on_event=told.append, pool=cluster)
        objects = ObjectStore(root / "entry")
        return compile_work(work, objects=objects, manager=manager, pool=cluster, on_event=told.append)


def stored_units(root):
    return len(list(Path(root).glob("torch_compile_cache/units/*/*/unit.json")))


def interrupt(command, root, folder, *, num_begun, variables):
    """Give a warm with the adaptor `worded`, and interrupt it once so many units were begun and the first is stored.

    Returns:
        How it ended, what it said, and a function that lets the units go on and returns how many were begun.
    """
    log, gate = folder / "log", folder / "gate"
    options = ["--adaptor", "worded", "--cache-dir", str(root)]
    options += ["--inductor-config", json.dumps({"log": str(log), "gate": str(gate)})]
    warm = subprocess.Popen([*command, *options], env=environment(**variables), stderr=subprocess.PIPE, text=True)
    wait_until(lambda: log.exists() and len(log.read_text().split()) == num_begun, secs=180)
    wait_until(lambda: stored_units(root) == 1)
    warm.send_signal(signal.SIGINT)
    said = warm.communicate(timeout=60)[1]

    def let_go():
        gate.touch()
        return len(log.read_text().split())

    return warm.returncode, said, let_go


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def wait_until(check, *, secs=60.0):
    deadline = time.monotonic() + secs
    while time.monotonic() < deadline:
        found = check()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("it did not come about in time")


def processes_with(word):
    """Return the ids of the processes that have `word` in their command line, without this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if word.encode() in line and int(folder.name) != os.getpid() and is_alive(folder.name):
            found.append(int(folder.name))
    return found
