"""Failing stores: errors are reported, nothing is left incomplete, and transient errors are retried."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import NamedTuple

import pytest
from bundle_maker import make_keys
from cache_maker import lay_entry
from remote_cli import run
from remote_servers import (
    FaultyServer,
    answers,
    cut,
    deaf_port,
    faulty,
    longer,
    of_files,
    other_bytes,
    registry,
    reset,
    truncated,
    webdav,
)

from cgtool.remote.entries import RemoteBundle, indexes, open_bundle
from cgtool.remote.stores import open_store, stream
from cgtool.store.bundle_index import Limits, parse_index
from cgtool.store.layout import CacheLayout

#: More than the socket buffers of a connection hold.
NATIVE_BYTES = 300_000
MANIFEST = "v2/team/models/manifests/v1"


class Pushed(NamedTuple):
    """A folder to be served as a store, and the hash of its only entry."""

    folder: Path
    hash: str
    is_registry: bool = False

    def urls(self, part: str) -> list[str]:
        """Return parts of the URLs of files whose names contain `part`."""
        if not self.is_registry or part.startswith("/v2/"):
            return [part]
        layers = json.loads((self.folder / MANIFEST).read_bytes())["layers"]
        return [one["digest"] for one in layers if part in f"/{one['annotations']['dev.cgtool.name']}"]

    def url(self, server: FaultyServer) -> str:
        return server.url.replace("http:", "oci:") + "/team/models:v1" if self.is_registry else server.url


@pytest.fixture(scope="module", params=["plain", "oci"])
def pushed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pushed:
    folder = tmp_path_factory.mktemp("pushed")
    hash_ = lay_entry(folder / "cache", seed=11, native_bytes=NATIVE_BYTES)
    if request.param == "plain":
        assert run("push", (folder / "store").as_uri(), "--cache-dir", folder / "cache").code == 0
        return Pushed(folder / "store", hash_)
    with registry(folder) as url:
        assert run("push", url, "--cache-dir", folder / "cache").code == 0
    for data in (folder / "data").rglob("blobs/sha256/*/*/data"):
        # A registry keeps manifests with the blobs.
        is_manifest = b'"config":' in data.read_bytes() and b'"layers":' in data.read_bytes()
        place = folder / "store" / (MANIFEST if is_manifest else f"v2/team/models/blobs/sha256:{data.parent.name}")
        place.parent.mkdir(parents=True, exist_ok=True)
        data.rename(place)
    return Pushed(folder / "store", hash_, is_registry=True)


@pytest.fixture
def server(pushed) -> Iterator[FaultyServer]:
    with faulty(pushed.folder) as server:
        yield server


def pull(pushed: Pushed, server: FaultyServer, cache: Path):
    return run("pull", pushed.url(server), pushed.hash, "--trust", "--any-machine", "--cache-dir", cache, "--json")


@pytest.mark.parametrize("part", ["/artifacts/", "bundle.json"])
@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        pytest.param(reset, 1, "Connection reset|IncompleteRead", id="reset in a body"),
        pytest.param(answers(403), 1, "returned 403 .*user and password|other credentials.*docker login", id="403"),
        pytest.param(answers(404), 1, "is missing|is incomplete", id="404"),
        pytest.param(answers(429), 1, "returned 429 ", id="429"),
        pytest.param(answers(500), 1, "returned 500 ", id="500"),
        pytest.param(truncated, 1, "ends after|is incomplete", id="truncated"),
        pytest.param(other_bytes, 3, "digest|is incomplete", id="other bytes"),
        pytest.param(longer, 3, "more bytes|is incomplete", id="too long"),
    ],
)
def test_persistent_fault_is_reported_and_nothing_is_installed(pushed, server, tmp_path, *, part, fault, code, said):
    server.fault = of_files(pushed.urls(part), fault)
    ran = pull(pushed, server, tmp_path / "cache")
    if "is incomplete" in ran.err:
        code = 1
    assert ran.code == code, ran.err
    assert re.search(said, ran.report["error"]["message"]), ran.err
    assert CacheLayout(root=tmp_path / "cache").hashes() == []
    assert list((tmp_path / "cache").rglob("*.import.*")) == []


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(reset, id="reset in a body"),
        pytest.param(answers(429), id="429"),
        pytest.param(answers(500), id="500"),
        pytest.param(answers(503), id="503"),
        pytest.param(truncated, id="truncated"),
    ],
)
def test_transient_fault_is_retried(pushed, server, tmp_path, fault):
    server.fault = of_files(pushed.urls("/artifacts/"), fault, times=2)
    ran = pull(pushed, server, tmp_path / "cache")
    assert ran.code == 0, ran.err
    assert ran.report["entries"][0]["outcome"] == "new"


@pytest.mark.parametrize("part", ["/artifacts/", "bundle.json"])
@pytest.mark.parametrize(
    ("fault", "said", "passes"),
    [
        pytest.param(cut, "Connection reset|Broken pipe", True, id="reset in a body"),
        pytest.param(answers(403), "returned 403 ", False, id="403"),
        pytest.param(answers(404), "returned 404 ", False, id="404"),
        pytest.param(answers(429), "returned 429 ", True, id="429"),
        pytest.param(answers(500), "returned 500 ", True, id="500"),
    ],
)
def test_failed_push_is_reported_and_leaves_no_partial_entry(tmp_path, *, part, fault, said, passes):
    hash_ = lay_entry(tmp_path / "cache", seed=16, native_bytes=NATIVE_BYTES)
    (tmp_path / "store").mkdir()
    with faulty(tmp_path / "store") as server:
        push, store = ("push", server.url, "--cache-dir", tmp_path / "cache"), open_store(server.url)
        server.fault = of_files([part], fault, method="PUT")
        ran = run(*push)
        assert (ran.code, _whole(store, hash_)) == (1, []), ran.err
        assert re.search(said, ran.err), ran.err
        server.fault = of_files([part], fault, method="PUT", times=1 if passes else 0)
        assert (run(*push).code, len(_whole(store, hash_))) == (0, 1)


def test_download_resumes_after_a_broken_connection(tmp_path):
    data, asked = bytes(3 * 2**20), []
    (tmp_path / "one").write_bytes(data)

    def half(handler: BaseHTTPRequestHandler, data: bytes) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[: len(data) // 2])
        handler.close_connection = True

    def fault(handler: BaseHTTPRequestHandler, data: bytes) -> bool:
        asked.append(handler.headers.get("Range", ""))
        if len(asked) == 1:
            half(handler, data)
        return len(asked) == 1

    with faulty(tmp_path) as server:
        server.fault = fault
        assert b"".join(stream(open_store(server.url), "one", len(data))) == data
    assert asked == ["", f"bytes={2**20}-"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        pytest.param(reset, "Connection reset|IncompleteRead", id="reset in a body"),
        pytest.param(answers(403), "docker login", id="403"),
        pytest.param(answers(404), "No entry begins", id="404"),
        pytest.param(answers(429), "returned 429 ", id="429"),
        pytest.param(answers(500), "returned 500 ", id="500"),
        pytest.param(truncated, "was not pushed by cgtool", id="truncated"),
        pytest.param(other_bytes, "was not pushed by cgtool", id="other bytes"),
    ],
)
@pytest.mark.parametrize("pushed", ["oci"], indirect=True)
def test_unreadable_tag_is_reported(pushed, server, tmp_path, fault, said):
    server.fault = of_files([MANIFEST], fault)
    ran = pull(pushed, server, tmp_path / "cache")
    assert re.search(said, ran.report["error"]["message"]), ran.err
    assert CacheLayout(root=tmp_path / "cache").hashes() == []
    if fault is reset:
        server.fault = of_files([MANIFEST], fault, times=2)
        assert pull(pushed, server, tmp_path / "cache").code == 0


@pytest.mark.parametrize("pushed", ["plain"], indirect=True)
def test_store_with_stale_listings_stays_consistent(pushed, server, tmp_path):
    hidden = server.hidden = {pushed.hash}
    late = run("pull", server.url, "--trust", "--any-machine", "--cache-dir", tmp_path / "cache")
    assert (late.code, "holds no entry" in late.err) == (1, True)
    hidden.clear()
    assert pull(pushed, server, tmp_path / "cache").code == 0


def test_refused_connection_is_reported(tmp_path):
    with deaf_port() as port:
        ran = run("pull", f"http://ann:s3cret@127.0.0.1:{port}/x", "--trust", "--cache-dir", tmp_path)
    assert (ran.code, "Connection refused" in ran.err, "s3cret" in ran.err) == (1, True, False)


def test_a_signed_entry_stays_signed_and_a_changed_one_is_refused(tmp_path):
    make_keys(tmp_path, "release")
    private, public = tmp_path / "release.pem", tmp_path / "release.pub"
    hash_ = lay_entry(tmp_path / "cache", seed=12)
    store = tmp_path / "store"
    assert run("push", store.as_uri(), "--cache-dir", tmp_path / "cache", "--sign", private).code == 0
    asked = ("pull", store.as_uri(), "--any-machine", "--require-signature", public, "--json", "--cache-dir")
    assert run(*asked, tmp_path / "b").report["entries"][0]["outcome"] == "new"
    # A push of a signed import keeps its signature.
    assert run("push", (tmp_path / "next").as_uri(), "--cache-dir", tmp_path / "b").code == 0
    assert len(list((tmp_path / "next").rglob("*.bundle.sig"))) == 1
    [signature] = (store / "entries" / hash_).glob("*.bundle.sig")
    signature.unlink()
    refused = run(*asked, tmp_path / "c")
    assert (refused.code, refused.report["error"]["reason"]) == (3, "unsigned")


def test_last_push_to_a_tag_wins_and_readers_see_complete_entries(tmp_path):
    machines = [tmp_path / "first", tmp_path / "second"]
    hashes = [lay_entry(one, seed=14 + seed, native_bytes=NATIVE_BYTES) for seed, one in enumerate(machines)]
    with registry(tmp_path / "registry") as url:
        pushers = [threading.Thread(target=run, args=("push", url, "--cache-dir", one)) for one in machines]
        seen: list[int] = []
        for pusher in pushers:
            pusher.start()
        while any(pusher.is_alive() for pusher in pushers) or not seen:
            seen.append(sum(len(_whole(open_store(url), hash_)) for hash_ in hashes))
        assert sum(len(_whole(open_store(url), hash_)) for hash_ in hashes) >= 1
        again = [run("push", url, "--cache-dir", one, "--json") for one in machines]
        assert [ran.code for ran in again] == [0, 0]
        for ran in again:  # only a push that changes something warns, once
            [entry] = ran.report["entries"]
            assert len(ran.report["warnings"]) == (entry["outcome"] == "pushed")
        assert [len(_whole(open_store(url), hash_)) for hash_ in hashes] == [1, 1]
        told = run("push", f"{url}-new", "--cache-dir", machines[0])
        assert told.err.count("the last one wins") == 1


def test_reader_sees_no_entry_or_a_complete_one_during_concurrent_pushes(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    hash_ = lay_entry(first, seed=13, native_bytes=NATIVE_BYTES)
    assert lay_entry(second, seed=13, native_bytes=NATIVE_BYTES, shapes=("general", "n=16")) == hash_
    with webdav(tmp_path / "store") as url:
        pushers = [threading.Thread(target=run, args=("push", url, "--cache-dir", one)) for one in (first, second)]
        store, seen = open_store(url), []
        for pusher in pushers:
            pusher.start()
        while any(pusher.is_alive() for pusher in pushers):
            seen.append(len(_whole(store, hash_)))
        seen.append(len(_whole(store, hash_)))
        assert seen == sorted(seen)
        assert seen[-1] == 2
        merged = run("pull", url, "--trust", "--any-machine", "--cache-dir", tmp_path / "reader", "--json").report
        assert merged["entries"][0]["artifacts"] >= 2


def _whole(store, hash_: str) -> list[RemoteBundle]:
    """Return the bundles of an entry that a reader sees, after checking that all members are present."""
    found = [open_bundle(store, hash_, digest) for digest in indexes(store, hash_).get(hash_, ())]
    bundles = [bundle for bundle in found if bundle is not None]
    for bundle in bundles:
        for member, chunks in bundle.members(parse_index(bundle.index_bytes, limits=Limits())):
            assert sum(map(len, chunks)) == member.size_bytes
    return bundles
