"""Two hosts in separate network namespaces share entries, with the link up and down."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from cache_maker import lay_entry
from cli_harness import environment
from remote_servers import webdav

from cgtool.store.layout import CacheLayout

_numbers = itertools.count()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Names of two namespaces, joined by a cable between 10.231.77.1 and 10.231.77.2."""
    if shutil.which("ip") is None:
        pytest.skip("iproute2 is not installed")
    number = f"{os.getpid() % 100_000}{next(_numbers)}"
    names = f"cg{number}a", f"cg{number}b"
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(subprocess.run, ["ip", "netns", "delete", name], check=False, capture_output=True)
            ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this kernel makes no network namespaces here: {error.stderr.decode().strip()}")
        for end, name in enumerate(names, 1):
            ip("-n", name, "address", "add", f"10.231.77.{end}/24", "dev", name)
            for link in ("lo", name):
                ip("-n", name, "link", "set", link, "up")
        yield names


@pytest.fixture
def on() -> Callable[..., subprocess.CompletedProcess[str]]:
    def on(host: str, *words: object) -> subprocess.CompletedProcess[str]:
        command = ["ip", "netns", "exec", host, sys.executable, "-m", "cgtool", *map(str, words)]
        return subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)

    return on


def test_two_hosts_share_entries_while_the_link_is_up(hosts, on, tmp_path):
    first, second = hosts
    hash_ = lay_entry(tmp_path / "a", seed=21)
    with webdav(tmp_path / "store", within=first, address="10.231.77.1") as url:
        pushed = on(first, "push", url, "--cache-dir", tmp_path / "a")
        assert pushed.returncode == 0, pushed.stderr
        pull = ("pull", url, "--trust", "--any-machine", "--cache-dir", tmp_path / "b")
        ip("-n", second, "link", "set", second, "down")
        cut = on(second, *pull)
        assert (cut.returncode, "10.231.77.1" in cut.stderr) == (1, True), cut.stderr
        assert CacheLayout(root=tmp_path / "b").hashes() == []
        ip("-n", second, "link", "set", second, "up")
        pulled = on(second, *pull)
        assert pulled.returncode == 0, pulled.stderr
    assert CacheLayout(root=tmp_path / "b").hashes() == [hash_]
