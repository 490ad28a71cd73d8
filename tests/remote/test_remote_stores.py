"""The interface of stores, for each kind: folder, WebDAV, plain HTTP, bucket and registry."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from remote_servers import PASSWORD, USER, for_s3, refusing, s3, webdav

from cgtool.errors import RemoteError, UsageError
from cgtool.remote.stores import Store, open_store, read, redacted, stream

BODY = os.urandom(3 * 2**20 + 7)


@pytest.fixture
def store(store_url: str) -> Store:
    return open_store(store_url)


def test_file_survives_a_round_trip(store, tmp_path):
    (tmp_path / "file").write_bytes(BODY)
    assert store.put("round/trip/bytes", BODY)
    assert store.put("round/trip/file", tmp_path / "file")
    assert store.put("round/empty", b"")
    for name in ("round/trip/bytes", "round/trip/file"):
        assert b"".join(stream(store, name, len(BODY))) == BODY
        assert b"".join(store.get(name, len(BODY) - 5) or ()) == BODY[-5:]
        assert store.size(name) == len(BODY)
    assert read(store, "round/empty", most=1) == b""


def test_missing_file_is_none(store):
    assert store.get("no/such/file") is None
    assert store.size("no/such/file") is None
    assert read(store, "no/such/file", most=1) is None
    assert list(store.list("no/such")) == []
    store.delete("no/such/file")


def test_listing_contains_exactly_the_files_below_a_folder(store):
    names = {"listed/one", "listed/deep/two", "listed/deep/er/three.json"}
    for name in (*names, "listedtoo/four"):
        store.put(name, b"x")
    assert {item.path for item in store.list("listed")} == names


def test_deleted_file_is_missing(store):
    store.put("gone/one", b"x")
    store.delete("gone/one")
    assert store.size("gone/one") is None
    assert list(store.list("gone")) == []


def test_if_absent_does_not_replace_a_file(store):
    assert store.put("once/one", b"first", if_absent=True)
    written = store.put("once/one", b"second", if_absent=True)
    # A server may know no preconditions; then it says that it wrote, and did.
    assert read(store, "once/one", most=10) == (b"second" if written else b"first")
    store.put("once/one", b"third")
    assert read(store, "once/one", most=10) == b"third"


def test_a_password_is_never_shown(store):
    assert "s3cret" not in store.url


@pytest.mark.parametrize(
    "url", ["", "models", "ftp://host/x", "s3://", "https:///x", "file://", "file://host/x", "https://ho[st"]
)
def test_invalid_store_url_is_a_usage_error(url):
    with pytest.raises(UsageError, match=r"s3://BUCKET|is not the URL"):
        open_store(url)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://ann:s3cret@host/x/", "https://host/x"),
        ("https://host/x?sig=s3cret", "https://host/x"),
        ("s3://bucket/x", "s3://bucket/x"),
    ],
)
def test_a_url_is_shown_without_credentials(url, said):
    assert redacted(url) == said


def test_wrong_password_is_reported_without_showing_it(tmp_path):
    with (
        webdav(tmp_path, password=True) as url,
        pytest.raises(RemoteError, match="Check the user and password") as told,
    ):
        open_store(url.replace("s3cret", "wr0ng")).put("one", b"x")
    assert "wr0ng" not in str(told.value)
    assert not told.value.is_passing


def test_missing_bucket_is_reported(monkeypatch):
    with s3(monkeypatch), pytest.raises(RemoteError, match=r"s3://other could not write one: .+\. Check the URL"):
        open_store("s3://other").put("one", b"x")


#: What S3 answers when a request was signed by a clock that differs from its own.
SKEWED = b"""<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>RequestTimeTooSkewed</Code><Message>The difference between the request time and the current time is too
large.</Message><ServerTime>2026-11-23T04:00:00Z</ServerTime></Error>"""


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda store: list(store.list("entries")), "list entries: RequestTimeTooSkewed: .*clock differs too much"),
        (lambda store: store.get("one"), "read one: RequestTimeTooSkewed: .*clock differs too much"),
        (lambda store: store.put("one", b"x"), "write one: RequestTimeTooSkewed: .*clock differs too much"),
        (lambda store: store.size("one"), "look for one: .*this machine's clock"),  # to HEAD it says no more than 403
    ],
    ids=["list", "get", "put", "size"],
)
def test_clock_skew_is_reported(monkeypatch, ask, said):
    pytest.importorskip("obstore", reason="obstore is not installed")
    with refusing(403, SKEWED) as endpoint:
        for_s3(monkeypatch, endpoint)
        with pytest.raises(RemoteError, match=said) as told:
            ask(open_store("s3://models/cgtool"))
    assert not told.value.is_passing


def test_bucket_is_opened_with_an_aws_profile(monkeypatch, tmp_path):
    pytest.importorskip("boto3", reason="boto3 is not installed")
    (tmp_path / "credentials").write_text(f"[team]\naws_access_key_id = {USER}\naws_secret_access_key = {PASSWORD}\n")
    with s3(monkeypatch) as url:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        monkeypatch.setenv("AWS_PROFILE", "team")
        store = open_store(url)
        store.put("one", b"x")
        assert [item.path for item in store.list("one")] == []
        assert store.size("one") == 1
        monkeypatch.setenv("AWS_PROFILE", "none")
        with pytest.raises(UsageError, match="Check AWS_PROFILE"):
            open_store(url)


def test_a_folder_store_is_read_and_written_by_its_url(tmp_path: Path):
    store = open_store(f"file://{tmp_path}/x%20y")
    store.put("one", b"x")
    assert (tmp_path / "x y/one").read_bytes() == b"x"
