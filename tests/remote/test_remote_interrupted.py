"""Interrupted pushes and pulls, and full disks: one error, nothing incomplete, and a retry succeeds."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from cache_maker import lay_entry
from cli_harness import Ran
from remote_cli import run, start
from remote_servers import LOOPBACK, PASSWORD, USER, FaultyServer, faulty

from cgtool.remote import http
from cgtool.remote.entries import indexes
from cgtool.remote.stores import open_store
from cgtool.store.layout import CacheLayout
from cgtool.toolkit.remote import pull

#: More than the socket buffers of a connection hold; all artifacts together exceed the small disk.
NATIVE_BYTES = 300_000


class Held:
    """A fault: the transfer of the first artifact stops half way until it is released."""

    def __init__(self) -> None:
        self.begun, self.released = threading.Event(), threading.Event()

    def __call__(self, handler: BaseHTTPRequestHandler, data: bytes) -> bool:
        if "/artifacts/" not in handler.path or handler.command == "HEAD" or self.begun.is_set():
            return False
        self.begun.set()
        if handler.command == "GET":
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data[: len(data) // 2])
        self.released.wait(60)
        handler.close_connection = True
        return True


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    lay_entry(tmp_path / "cache", seed=21, native_bytes=NATIVE_BYTES)
    return tmp_path / "cache"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FaultyServer]:
    (tmp_path / "store").mkdir()
    with faulty(tmp_path / "store") as server:
        yield server


def interrupted(server: FaultyServer, signum: int, *arguments: object) -> Ran:
    """Run a command to the middle of a body, and send it a signal."""
    server.fault = held = Held()
    running = start(*arguments)
    assert held.begun.wait(60)
    os.kill(running.pid, signum)
    ran = running.end(25)  # less than the limit for a silent server
    held.released.set()
    server.fault = lambda handler, data: False
    return ran


ENDS = {signal.SIGINT: (130, "Error: Interrupted."), signal.SIGTERM: (143, "Error: Terminated by SIGTERM.")}
signals = pytest.mark.parametrize("signum", ENDS)


def said_once(text: str) -> str:
    """Return the beginning of the only line of output."""
    [line] = text.strip().splitlines()
    return line.partition(" Finished work is kept")[0]


@signals
def test_interrupted_pull_leaves_nothing_and_can_be_repeated(cache, server, tmp_path, signum):
    assert run("push", (tmp_path / "store").as_uri(), "--cache-dir", cache).code == 0
    new = tmp_path / "new"
    ended = interrupted(server, signum, "pull", server.url, "--trust", "--any-machine", "--cache-dir", new)
    assert (ended.code, said_once(ended.err), ended.out) == (*ENDS[signum], "")
    assert [path for path in new.rglob("*") if path.is_file()] == []
    again = run("pull", server.url, "--trust", "--any-machine", "--cache-dir", new, "--json")
    assert [entry["outcome"] for entry in again.report["entries"]] == ["new"]


@signals
def test_interrupted_push_is_invisible_and_the_next_sends_the_rest(cache, server, tmp_path, signum):
    ended = interrupted(server, signum, "push", server.url, "--cache-dir", cache)
    assert (ended.code, said_once(ended.err), ended.out) == (*ENDS[signum], "")
    assert indexes(open_store(server.url)) == {}
    there = len(list((tmp_path / "store").rglob("*.pt2")))
    server.requests.clear()
    assert run("push", server.url, "--cache-dir", cache).code == 0
    assert sum(method == "PUT" and ".pt2" in path for method, path in server.requests) == 4 - there
    pulled = run("pull", server.url, "--trust", "--any-machine", "--cache-dir", tmp_path / "new", "--json")
    assert [entry["outcome"] for entry in pulled.report["entries"]] == ["new"]


def test_interrupted_pull_leaks_no_descriptor(cache, server, tmp_path):
    assert run("push", (tmp_path / "store").as_uri(), "--cache-dir", cache).code == 0
    before = descriptors()
    server.fault = held = Held()

    def interrupt() -> None:
        assert held.begun.wait(60)
        _thread.interrupt_main()

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        pull(server.url, trust=True, any_machine=True, cache_dir=tmp_path / "new")
    assert [path for path in (tmp_path / "new").rglob("*") if path.is_file()] == []
    held.released.set()
    waits(lambda: descriptors() <= before)


def descriptors() -> set[str]:
    """Return the files that this process has open, without connections, which a session keeps for later requests."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(str(link.readlink()))
    return {name for name in found if name.startswith("/")}


def waits(holds: Callable[[], bool]) -> None:
    """Wait until a condition is true."""
    for _ in range(600):
        if holds():
            return
        time.sleep(0.05)
    pytest.fail("the condition did not become true")


def test_full_disk_is_reported_and_nothing_is_installed(cache, server, small_disk, tmp_path):
    assert run("push", (tmp_path / "store").as_uri(), "--cache-dir", cache).code == 0
    ran = run("pull", server.url, "--trust", "--any-machine", "--cache-dir", small_disk / "new", "--json")
    assert (ran.code, "the disk is full" in ran.report["error"]["message"]) == (1, True), ran.err
    assert [path for path in small_disk.rglob("*") if path.is_file()] == []
    assert CacheLayout(root=small_disk / "new").hashes() == []


def test_slow_upload_does_not_time_out(server, monkeypatch):
    monkeypatch.setattr(http, "CONNECT_SECS", 0.1)

    def slow(handler: BaseHTTPRequestHandler, data: bytes) -> bool:
        time.sleep(0.5 if handler.command == "PUT" else 0)
        return False

    server.fault = slow
    body = bytes(16 * 2**20)  # more than the socket buffers hold
    store = open_store(server.url)
    store.put("one", body)
    assert (store.size("one"), [method for method, _ in server.requests]) == (len(body), ["PUT", "HEAD"])


@signals
def test_silent_bucket_can_be_interrupted(tmp_path, signum):
    pytest.importorskip("obstore", reason="obstore is not installed")
    with socket.create_server((LOOPBACK, 0)) as listening:
        listening.settimeout(60)
        endpoint = f"http://{LOOPBACK}:{listening.getsockname()[1]}"
        variables = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": USER,
            "AWS_SECRET_ACCESS_KEY": PASSWORD,
            "AWS_REGION": "us-east-1",
        }
        running = start("pull", "s3://models/cgtool", "--trust", "--cache-dir", tmp_path, env=variables)
        connection, _ = listening.accept()
        with connection:
            os.kill(running.pid, signum)
            ran = running.end(25)
    assert (ran.code, said_once(ran.err)) == ENDS[signum]
