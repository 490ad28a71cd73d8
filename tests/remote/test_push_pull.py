"""Push and pull with every kind of store."""

from __future__ import annotations

from pathlib import Path

import pytest
from cache_maker import lay_entry
from remote_cli import run
from remote_servers import PASSWORD

from cgtool.remote.entries import index_path, indexes
from cgtool.remote.stores import open_store
from cgtool.store.layout import CacheLayout, short


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def push(url: str, cache: Path, *more: object) -> dict:
    ran = run("push", url, "--cache-dir", cache, "--json", *more)
    assert ran.code == 0, ran.err
    assert PASSWORD not in ran.out + ran.err
    return ran.report


def pull(url: str, cache: Path, *more: object) -> dict:
    ran = run("pull", url, "--cache-dir", cache, "--json", "--trust", "--any-machine", *more)
    assert ran.code == 0, ran.err
    assert PASSWORD not in ran.out + ran.err
    return ran.report


def files_of(cache: Path, hash_: str) -> dict[str, bytes]:
    folder = CacheLayout(root=cache).entry_dir(hash_)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_pushed_entry_is_pulled_unchanged(store_url, cache, tmp_path):
    hash_ = lay_entry(cache, seed=1)
    pushed = push(store_url, cache)
    assert [(entry["hash"], entry["outcome"]) for entry in pushed["entries"]] == [(hash_, "pushed")]
    pulled = pull(store_url, tmp_path / "other", hash_[:12])
    assert [(entry["hash"], entry["outcome"]) for entry in pulled["entries"]] == [(hash_, "new")]
    assert files_of(tmp_path / "other", hash_) == files_of(cache, hash_)


def test_existing_files_are_not_transferred_again(store_url, cache, tmp_path):
    hash_ = lay_entry(cache, seed=2, shapes=("general", "n=8"))
    push(store_url, cache)
    again = push(store_url, cache)["entries"][0]
    assert (again["outcome"], again["files"], again["size_bytes"]) == ("same", 0, 0)
    pull(store_url, tmp_path / "other", hash_)
    assert pull(store_url, tmp_path / "other", hash_)["entries"][0]["outcome"] == "same"


def test_ranks_pushed_by_two_machines_are_merged(store_url, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    hash_ = lay_entry(first, seed=3, rank=0)
    assert lay_entry(second, seed=3, rank=1) == hash_
    push(store_url, first)
    sent = push(store_url, second)["entries"][0]
    assert 0 < sent["files"] < len(files_of(second, hash_)) + 2
    entry = pull(store_url, tmp_path / "other", hash_)["entries"][0]
    assert [rank["rank"] for rank in entry["ranks"]] == [0, 1]
    assert files_of(tmp_path / "other", hash_) == files_of(first, hash_) | files_of(second, hash_)


def test_entry_is_invisible_until_its_index_is_complete(store_url, cache, tmp_path):
    hash_ = lay_entry(cache, seed=4)
    push(store_url, cache)
    store = open_store(store_url)
    [digest] = indexes(store, hash_)[hash_]
    place = index_path(hash_, digest)
    whole = b"".join(store.get(place) or ())
    store.put(place, whole[: len(whole) // 2])
    torn = run("pull", store_url, hash_, "--cache-dir", tmp_path / "other", "--trust")
    assert (torn.code, "is incomplete" in torn.err) == (1, True)
    assert CacheLayout(root=tmp_path / "other").hashes() == []
    push(store_url, cache)
    assert pull(store_url, tmp_path / "other", hash_)["entries"][0]["outcome"] == "new"


def test_pull_of_an_unsigned_entry_requires_trust(store_url, cache, tmp_path):
    hash_ = lay_entry(cache, seed=5)
    push(store_url, cache)
    ran = run("pull", store_url, hash_, "--cache-dir", tmp_path / "other", "--json")
    assert ran.code == 3
    assert ran.report["error"]["reason"] == "not_trusted"
    said = f"The entry {short(hash_)} of {open_store(store_url).url} holds native code"
    assert ran.report["error"]["message"].startswith(said)
    assert CacheLayout(root=tmp_path / "other").hashes() == []


def test_bundle_is_exported_to_a_store_and_imported_from_it(store_url, cache, tmp_path):
    if store_url.startswith("oci://"):
        pytest.skip("a registry takes entries and no bundle")
    hash_ = lay_entry(cache, seed=6)
    place = f"{store_url.rstrip('/')}/bundles/model.tar.zst"
    out = run("export", place, "--cache-dir", cache, "--json")
    assert (out.code, PASSWORD in out.out + out.err) == (0, False), out.err
    taken = run("import", place, "--trust", "--any-machine", "--cache-dir", tmp_path / "other", "--json")
    assert taken.code == 0, taken.err
    assert taken.report["source"] == out.report["dest"]
    assert files_of(tmp_path / "other", hash_) == files_of(cache, hash_)
    missing = run("import", f"{store_url.rstrip('/')}/none.tar.zst", "--trust", "--cache-dir", tmp_path / "other")
    assert (missing.code, "There is no" in missing.err) == (1, True)
