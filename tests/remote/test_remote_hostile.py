"""Misbehaving servers: errors are reported in bounded time and memory."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
from cache_maker import lay_entry
from remote_cli import run
from remote_servers import FaultyServer, answering, for_s3, served

pytest.importorskip("requests", reason="requests is not installed")

from cgtool.errors import RemoteError
from cgtool.plan.grammar import sha256_hex
from cgtool.remote import http, pace
from cgtool.remote.remotes import Remotes
from cgtool.remote.stores import open_store, read
from cgtool.store.artifacts import Origin
from cgtool.store.bundle_index import Index, Limits, parse_index
from cgtool.store.files import seal
from cgtool.store.layout import CacheLayout
from cgtool.store.records import Artifact, Unit
from cgtool.store.trust import TrustPolicy

HASH = "5" * 64
NINES, NO_HOST = "9" * 5000, f"http://{'a' * 300}/"
#: The size of an "endless" response, unless the client closes the connection.
ENDLESS_BYTES = 2**30
CHUNK = bytes(2**20)


class Answer(NamedTuple):
    """A server's response to a method: status, body (None for an endless one) and headers."""

    status: int
    body: bytes | None
    headers: Mapping[str, str] = MappingProxyType({})


@contextlib.contextmanager
def saying(**answers: Answer) -> Iterator[tuple[str, list[int]]]:
    """Run a server with a response for each method; yield its URL and a list of the sizes of sent chunks."""
    sent: list[int] = []

    def answer(handler) -> None:
        said = answers.get(handler.command, Answer(405, b""))
        handler.sent()
        handler.send_response(said.status)
        for name, value in said.headers.items():
            handler.send_header(name, value)
        if said.body is not None:
            handler.send_header("Content-Length", str(len(said.body)))
            handler.end_headers()
            handler.wfile.write(said.body)
            return
        handler.send_header("Connection", "close")
        handler.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(ENDLESS_BYTES // len(CHUNK)):
                handler.wfile.write(CHUNK)
                sent.append(len(CHUNK))

    with served(FaultyServer(Path(), answering(answer))) as server:
        yield server.url, sent


@pytest.fixture
def impatient(monkeypatch):
    """Shorten time limits; the limit of silence is longer than the window of the transfer rate."""
    monkeypatch.setattr(pace, "WINDOW_SECS", 0.1)
    monkeypatch.setattr(pace, "HEAD_SECS", 0.1)
    monkeypatch.setattr(http, "SILENCE_SECS", 0.5)


def drip(start: bytes, each: bytes) -> type:
    """A server that keeps sending a few bytes at a time."""

    def answer(handler) -> None:
        handler.sent()
        handler.wfile.write(start)
        with contextlib.suppress(OSError):
            for _ in range(1000):
                handler.wfile.write(each)
                handler.wfile.flush()
                time.sleep(0.02)

    return answering(answer)


OK = b"HTTP/1.1 200 OK\r\n"
OF_A_BUCKET = OK + b'Last-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\nETag: "x"\r\n'


@pytest.mark.parametrize(
    ("start", "each", "said"),
    [
        pytest.param(OK + b"Content-Length: 999\r\n\r\n", b"x", "too slow: received [0-9]+ bytes", id="a body"),
        pytest.param(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n", "too slow: ", id="chunks"),
        pytest.param(b"", b"H", "too slow: headers", id="a status"),
        pytest.param(OK, b"A: b\r\n", "too slow: headers", id="headers"),
        pytest.param(b"", b"HTTP/1.1 100 Continue\r\n\r\n", "too slow: headers", id="nothing yet"),
    ],
)
@pytest.mark.usefixtures("impatient")
def test_too_slow_server_times_out(start, each, said):
    with served(FaultyServer(Path(), drip(start, each))) as server, pytest.raises(RemoteError, match=said):
        read(open_store(server.url), "one", most=1000)


@pytest.mark.parametrize(
    ("start", "each", "silence_secs", "said"),
    [
        # The silence limit must not trigger, however busy the machine is.
        pytest.param(
            OF_A_BUCKET + b"Content-Length: 999\r\n\r\n", b"x", 60, "too slow: received [0-9]+ bytes", id="a body"
        ),
        pytest.param(OF_A_BUCKET + b"Content-Length: 999\r\n\r\nx", b"", 0.1, "no answer in time", id="and no more"),
        pytest.param(b"", b"", 0.1, "no answer in time", id="nothing"),
    ],
)
@pytest.mark.usefixtures("impatient")
def test_too_slow_or_silent_bucket_times_out(monkeypatch, start, each, silence_secs, said):
    buckets = pytest.importorskip("cgtool.remote.buckets", reason="obstore is not installed")
    monkeypatch.setattr(buckets, "SILENCE_SECS", silence_secs)
    with served(FaultyServer(Path(), drip(start, each))) as server:
        for_s3(monkeypatch, server.url)
        with pytest.raises(RemoteError, match=said):
            read(open_store("s3://models/cgtool"), "one", most=1000)


@pytest.mark.usefixtures("impatient")
def test_slow_reader_does_not_time_out():
    with saying(GET=Answer(200, bytes(4 * 2**20))) as (url, _):
        chunks = open_store(url).get("one")
        num_bytes = 0
        for chunk in chunks:
            num_bytes += len(chunk)
            time.sleep(0.15)
    assert num_bytes == 4 * 2**20


@pytest.mark.parametrize("said", ["soon", "-5", NINES, "Thu, 01 Jan 99999999999999 00:00:00 GMT", "Fri, 99 Foo"])
def test_invalid_retry_after_is_ignored(said):
    def answer(handler) -> None:
        handler.answer(*((b"it", 200) if seen else (b"", 503)), Retry_After=said)
        seen.append(said)

    seen: list[str] = []
    with served(FaultyServer(Path(), answering(answer))) as server:
        assert read(open_store(server.url), "one", most=2) == b"it"


def test_bundle_larger_than_the_limit_is_cut_off(tmp_path):
    pretends = Answer(200, b"", {"Content-Length": "9" * 18})
    with saying(HEAD=pretends, GET=Answer(200, None)) as (url, sent):
        ran = run("import", f"{url}/x.tar.zst", "--trust", "--max-size", "0.01", "--cache-dir", tmp_path, "--json")
    assert (ran.code, ran.report["error"]["reason"]) == (3, "too_large"), ran.err
    assert sum(sent) < ENDLESS_BYTES / 2


def test_signed_url_is_used_unchanged_and_its_query_is_never_shown(tmp_path):
    """S3 signs URLs for one method and one object, in the query."""
    query, stored = "X-Amz-Credential=a/b%2Fc&X-Amz-Signature=s3cret", {}

    def answer(handler) -> None:
        body, (place, _, asked) = handler.sent(), handler.path.partition("?")
        if handler.command not in ("GET", "PUT") or asked != query:
            handler.answer(b"", 403)
        elif handler.command == "PUT":
            stored[place] = body
            handler.answer(b"", 200)
        else:
            handler.answer(*((stored[place], 200) if place in stored else (b"", 404)))

    hash_ = lay_entry(tmp_path / "cache", seed=31)
    with served(FaultyServer(Path(), answering(answer))) as server:
        url = f"{server.url}/models/my%20model.tar.zst?{query}"
        made = run("export", url, "--cache-dir", tmp_path / "cache", "-v")
        taken = run("import", url, "--trust", "--any-machine", "--cache-dir", tmp_path / "to", "-v")
        other = run("import", url.replace("my", "no"), "--trust", "--cache-dir", tmp_path / "to", "-v")
    down = run("import", url, "--trust", "--cache-dir", tmp_path / "to", "-v")
    assert (made.code, taken.code, other.code, down.code) == (0, 0, 1, 1), (made.err, taken.err, other.err)
    assert (list(stored), CacheLayout(root=tmp_path / "to").hashes()) == (["/models/my%20model.tar.zst"], [hash_])
    assert not any("s3cret" in ran.out + ran.err for ran in (made, taken, other, down))


def listing(href: str, more: str = "", encoding: str = "utf-8") -> bytes:
    properties = f"<propstat><prop><resourcetype/>{more}</prop></propstat>"
    return (
        f'<?xml version="1.0" encoding="{encoding}"?><multistatus xmlns="DAV:"><response><href>{href}</href>'
        f"{properties}</response></multistatus>"
    ).encode()


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param({"PROPFIND": Answer(207, None)}, id="a listing"),
        pytest.param({"PROPFIND": Answer(403, None)}, id="a refusal"),
        pytest.param({"PROPFIND": Answer(503, None, {"Retry-After": "0"})}, id="an error that may pass"),
        pytest.param({"GET": Answer(200, None, {"Content-Type": "text/html"})}, id="a page of links"),
        pytest.param({"GET": Answer(302, None, {"Location": "/elsewhere"})}, id="a redirection"),
    ],
)
def test_endless_response_is_not_held_in_memory(answers, tmp_path):
    with saying(**answers) as (url, sent):
        try:
            (tmp_path / "nowhere").read_bytes()
        except FileNotFoundError:  # handled by the caller, and not the cause of the store's error
            with pytest.raises(RemoteError, match=r"more than 67108864 bytes|TooManyRedirects"):
                list(open_store(url).list("entries"))
        assert sum(sent) < ENDLESS_BYTES / 2


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        pytest.param({"PROPFIND": Answer(207, listing("http://[x/entries/a"))}, "holds no entry", id="no URL"),
        pytest.param({"PROPFIND": Answer(207, listing("x", encoding="utf-7"))}, "is not XML", id="another encoding"),
        pytest.param({"PROPFIND": Answer(207, listing("x", encoding="hex"))}, "is not XML", id="no encoding"),
        pytest.param(
            {"PROPFIND": Answer(207, listing(f"/entries/{HASH}", "<getcontentlength>\u00b2</getcontentlength>"))},
            "holds no entry",
            id="a digit that is no number",
        ),
        pytest.param(
            {"PROPFIND": Answer(207, listing(f"/entries/{HASH}", f"<getcontentlength>{NINES}</getcontentlength>"))},
            "holds no entry",
            id="a number of 5000 digits",
        ),
        pytest.param(
            {"GET": Answer(200, b'<a href="http://[x">', {"Content-Type": "text/html"})},
            "holds no entry",
            id="a link that is no URL",
        ),
        pytest.param(
            {"GET": Answer(200, b'<a href="\xff">', {"Content-Type": "text/html; charset=idna"})},
            "holds no entry",
            id="a page in no encoding",
        ),
        pytest.param(
            {"GET": Answer(200, b"<a " * 300_000, {"Content-Type": "text/html"})},
            "holds no entry",
            id="a page of links that begin only",
        ),
        pytest.param({"GET": Answer(302, b"", {"Location": "http://[x"})}, "could not answer", id="to no URL"),
        pytest.param({"GET": Answer(302, b"", {"Location": NO_HOST})}, "could not answer", id="to no host"),
    ],
)
def test_malformed_response_is_reported(tmp_path, answers, said):
    with saying(**answers) as (url, _):
        ran = run("pull", url, "--trust", "--cache-dir", tmp_path)
    assert (ran.code, re.search(said, ran.err) is not None) == (1, True), ran.err


STRANGE = {"dev.cgtool.name": "x", "org.opencontainers.image.title": "no folder", "dev.cgtool.targets": "{"}
CONFIG = {"mediaType": "application/vnd.oci.empty.v1+json", "digest": f"sha256:{HASH}", "size": 2}
LAYER = {"mediaType": "x", "digest": f"sha256:{HASH}", "size": 1, "annotations": STRANGE}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        pytest.param(Answer(200, b'{"zz":' + b"[" * 100_000), "was not pushed by cgtool", id="nested without end"),
        pytest.param(Answer(200, b'{"\xff": 1}'), "was not pushed by cgtool", id="no text"),
        pytest.param(Answer(401, b"", {"Www-Authenticate": "Bearer realm"}), "other credentials", id="no realm"),
    ],
)
def test_malformed_registry_response_is_reported(tmp_path, answer, said):
    pytest.importorskip("oras", reason="oras is not installed")
    with saying(GET=answer, HEAD=answer) as (url, _):
        ran = run("pull", url.replace("http:", "oci:") + "/team/models:v1", "--trust", "--cache-dir", tmp_path)
    assert (ran.code, said in ran.err) == (1, True), ran.err


def test_push_to_a_tag_with_malformed_annotations_succeeds(tmp_path):
    pytest.importorskip("oras", reason="oras is not installed")
    lay_entry(tmp_path, seed=18)
    tag = Answer(200, json.dumps({"config": CONFIG, "layers": [LAYER]}).encode())
    with saying(GET=tag, HEAD=Answer(200, b""), PUT=Answer(201, b"")) as (url, _):
        ran = run("push", url.replace("http:", "oci:") + "/team/models:v1", "--cache-dir", tmp_path)
    assert ran.code == 0, ran.err


def test_endlessly_nested_folders_are_ignored():
    folder = b"<propstat><prop><resourcetype><collection/></resourcetype></prop></propstat>"

    def answer(handler) -> None:
        handler.sent()
        below = f"<href>{handler.path}a/</href>".encode()
        handler.answer(b'<multistatus xmlns="DAV:"><response>%s%s</response></multistatus>' % (below, folder), 207)

    with served(FaultyServer(Path(), answering(answer))) as server:
        assert list(open_store(server.url).list("entries")) == []


def test_size_that_is_not_a_number_is_zero():
    with saying(HEAD=Answer(200, b"", {"Content-Length": "many"})) as (url, _):
        assert open_store(url).size("one") == 0


def test_an_index_that_names_another_entry_is_refused(tmp_path):
    hashes = [lay_entry(tmp_path / "cache", seed=19 + number) for number in range(2)]
    store = tmp_path / "store"
    assert run("push", store.as_uri(), "--all", "--cache-dir", tmp_path / "cache").code == 0
    places = [next((store / "entries" / hash_).glob("*.bundle.json")) for hash_ in sorted(hashes)]
    members = [one for place in places for one in parse_index(place.read_bytes(), limits=Limits()).members]
    forged = seal(Index(members=tuple(sorted(members, key=lambda member: member.path))))
    places[0].unlink()
    (places[0].parent / f"{sha256_hex(forged)}.bundle.json").write_bytes(forged)
    ran = run("pull", store.as_uri(), min(hashes), "--trust", "--any-machine", "--cache-dir", tmp_path / "to", "--json")
    assert (ran.code, ran.report["error"]["reason"]) == (3, "bad_index"), ran.err
    assert CacheLayout(root=tmp_path / "to").hashes() == []


def test_incomplete_entry_is_skipped_by_name(tmp_path):
    hashes = [lay_entry(tmp_path / "cache", seed=21 + number) for number in range(2)]
    store = tmp_path / "store"
    assert run("push", store.as_uri(), "--all", "--cache-dir", tmp_path / "cache").code == 0
    next((store / "entries" / hashes[0]).glob("*.bundle.json")).write_bytes(b"torn")
    ran = run("pull", store.as_uri(), "--trust", "--any-machine", "--cache-dir", tmp_path / "to", "--json")
    assert [entry["hash"] for entry in ran.report["entries"]] == [hashes[1]]
    assert hashes[0][:10] in ran.report["skipped"][0]


def test_fifo_in_a_folder_store_is_ignored(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert open_store(tmp_path.as_uri()).get("pipe") is None


def test_disk_error_of_a_folder_store_is_a_remote_error(tmp_path):
    with pytest.raises(RemoteError, match="too long"):
        open_store(tmp_path.as_uri()).get("a" * 300)


def test_too_large_unit_is_compiled_locally(tmp_path, caplog):
    store, key = tmp_path / "store", "a" * 64
    remotes = Remotes(CacheLayout(root=tmp_path / "cache"), [store.as_uri()], trust=TrustPolicy())
    origin = Origin(piece="", shape={})
    for folder in ("units", "artifacts"):
        (store / folder).mkdir(parents=True)
    artifact = Artifact(digest="b" * 64, kind="pt2", size_bytes=2**40, compile_secs=1.0, kernels=1)
    (store / "units" / key).write_bytes(seal(Unit(key=key, artifact=artifact)))
    with (store / "artifacts" / artifact.file).open("wb") as file:
        file.truncate(artifact.size_bytes)  # sparse
    assert remotes.unit(key, origin) is None
    assert "is listed with 1099511627776 bytes" in caplog.text
