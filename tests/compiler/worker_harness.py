"""Helpers for tests of workers: warms of hand-made work, and checks for living processes."""

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
    """Return a pool of two workers, which all tests of this process share."""
    pool = WorkerPool(jobs=2, inductor=False)
    atexit.register(pool.close)
    return pool


def compile_all(work, root, *, timeout_secs=None, options=None, events=None, own=0):
    """Compile `work` into a cache as a warm does: with `own` new workers, or with the shared ones."""
    layout = CacheLayout(root=root)
    config = CompilationConfig(inductor_compile_config=options or {})
    on_event = ([] if events is None else events).append
    with WorkerPool(jobs=own, inductor=False) if own else contextlib.nullcontext(shared_pool()) as pool:
        pool._timeout_secs = timeout_secs
        manager = CompilerManager(layout, config, on_event=on_event, pool=pool)
        return compile_work(work, objects=ObjectStore(root / "entry"), manager=manager, pool=pool, on_event=on_event)


def compile_on(url, work, root, *, timeout_secs=None, prove=False, options=None, events=None, patience_secs=300.0):
    """Compile `work` into a cache with the workers of an executor, as a warm does."""
    layout = CacheLayout(root=root)
    config = CompilationConfig(inductor_compile_config=options or {})
    on_event = ([] if events is None else events).append
    how = {"timeout_secs": timeout_secs, "prove": prove, "inductor": False, "patience_secs": patience_secs}
    with Cluster(url, on_event=on_event, **how) as cluster:
        manager = CompilerManager(layout, config, on_event=on_event, pool=cluster)
        objects = ObjectStore(root / "entry")
        return compile_work(work, objects=objects, manager=manager, pool=cluster, on_event=on_event)


def stored_units(root):
    return len(list(Path(root).glob("torch_compile_cache/units/*/*/unit.json")))


def interrupt(command, root, folder, *, num_begun, variables):
    """Start a warm with the adaptor `worded`; interrupt it once `num_begun` units have started and one is stored.

    Returns:
        Its exit code, its output, and a function that lets the units continue and returns how many have started.
    """
    log, gate = folder / "log", folder / "gate"
    options = ["--adaptor", "worded", "--cache-dir", str(root)]
    options += ["--inductor-config", json.dumps({"log": str(log), "gate": str(gate)})]
    warm = subprocess.Popen([*command, *options], env=environment(**variables), stderr=subprocess.PIPE, text=True)
    wait_until(lambda: log.exists() and len(log.read_text().split()) == num_begun, secs=180)
    wait_until(lambda: stored_units(root) == 1)
    warm.send_signal(signal.SIGINT)
    output = warm.communicate(timeout=60)[1]

    def let_go():
        gate.touch()
        return len(log.read_text().split())

    return warm.returncode, output, let_go


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
    raise AssertionError("the condition was not met in time")


def processes_with(word):
    """Return the ids of other processes with `word` in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if word.encode() in line and int(folder.name) != os.getpid() and is_alive(folder.name):
            found.append(int(folder.name))
    return found
