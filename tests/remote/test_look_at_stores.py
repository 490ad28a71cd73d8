"""`inspect cache`, `verify`, `diff` and `prune` on a store, without needless downloads of artifacts."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from cache_maker import lay_entry
from remote_cli import run
from remote_servers import PASSWORD, FaultyServer, faulty

from cgtool.toolkit.mirror import mirrored, remove_pruned


def push(url: str, cache: Path) -> None:
    ran = run("push", url, "--all", "--cache-dir", cache)
    assert ran.code == 0, ran.err


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    root = tmp_path / "cache"
    lay_entry(root, seed=1, model="Toy")
    lay_entry(root, seed=2, model="Toy too")
    return root


@pytest.fixture
def server(cache, tmp_path):
    push((tmp_path / "store").as_uri(), cache)
    with faulty(tmp_path / "store") as server:
        yield server


def test_store_is_listed_like_the_pushed_cache(cache, server: FaultyServer):
    there, here = (run("inspect", "cache", place, "--json").report for place in (server.url, cache))
    assert there["root"] == server.url
    fields = ("hash", "model", "rank", "size_bytes", "artifacts", "created")
    assert [{name: entry[name] for name in fields} for entry in there["entries"]] == [
        {name: entry[name] for name in fields} for entry in here["entries"]
    ]
    assert server.fetched("/artifacts/") == []
    assert server.url in run("inspect", "cache", server.url).out


def test_a_store_of_each_kind_is_listed_without_its_password(store_url, cache):
    push(store_url, cache)
    ran = run("inspect", "cache", store_url, "--json", "--filter", "model~too")
    assert ran.code == 0, ran.err
    assert [entry["model"] for entry in ran.report["entries"]] == ["Toy too"]
    assert PASSWORD not in ran.out + ran.err


def test_diff_of_store_and_pushed_cache_is_empty(cache, server: FaultyServer, tmp_path):
    assert run("diff", cache, server.url).code == 0
    other = tmp_path / "other"
    hash_ = lay_entry(other, seed=1, model="Toy", shapes=("general",))
    ran = run("diff", f"{other}:{hash_}", f"{server.url}/:{hash_}", "--json")
    assert (ran.code, ran.report["equal"]) == (3, False)
    assert server.fetched("/artifacts/") == []


def test_entry_pushed_by_two_machines_is_listed_once(cache, server: FaultyServer, tmp_path):
    hash_ = lay_entry(tmp_path / "more", seed=1, model="Toy", shapes=("n=64",))
    push((tmp_path / "store").as_uri(), tmp_path / "more")
    entries = run("inspect", "cache", server.url, "--json").report["entries"]
    shapes = {str(artifact["shape"]) for entry in entries if entry["hash"] == hash_ for artifact in entry["artifacts"]}
    assert len(shapes) == 3


def test_verify_finds_corrupt_and_missing_files_in_a_store(cache, server: FaultyServer, tmp_path):
    assert run("verify", server.url, "--json").report["units"]["problems"] == []
    first, second, *_ = sorted((tmp_path / "store/artifacts").iterdir())
    first.write_bytes(bytes(first.stat().st_size))
    second.unlink()
    ran = run("verify", server.url, "--json")
    assert (ran.code, ran.report["root"]) == (3, server.url)
    problems = [problem["path"] for entry in ran.report["entries"] for problem in entry["problems"]]
    assert {Path(path).name for path in problems} >= {first.name, second.name}
    assert run("verify", server.url, "--repair").code == 2


def test_prune_removes_entries_of_a_store_and_their_unshared_files(cache, tmp_path):
    store = tmp_path / "store"
    push(store.as_uri(), cache)
    [gone, *_] = [
        one["hash"] for one in run("inspect", "cache", cache, "--json", "--filter", "model=Toy").report["entries"]
    ]
    before = sorted(store.rglob("*"))
    dry = run("prune", store.as_uri(), "--entry", gone, "--dry-run", "--json")
    assert (dry.code, [entry["hash"] for entry in dry.report["entries"]]) == (0, [gone])
    assert sorted(store.rglob("*")) == before
    for artifact in (store / "artifacts").iterdir():
        os.utime(artifact, (time.time() - 2 * 86400,) * 2)
    assert run("prune", store.as_uri(), "--entry", gone, "--yes").code == 0
    left = run("inspect", "cache", store.as_uri(), "--json").report["entries"]
    assert [entry["model"] for entry in left] == ["Toy too"]
    assert {path.name for path in (store / "artifacts").iterdir()} == {
        f"{artifact['digest']}.{artifact['kind']}" for entry in left for artifact in entry["artifacts"]
    }
    assert not list((store / "lookup").rglob(gone))
    assert run("verify", store.as_uri(), "--json").report["units"]["problems"] == []


def test_prune_uses_the_clock_of_the_store(cache, tmp_path, monkeypatch):
    push((tmp_path / "store").as_uri(), cache)
    fresh = tmp_path / "store/artifacts" / ("ab" * 32 + ".pt2")
    fresh.write_bytes(b"x")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 2 * 86400)
    with mirrored((tmp_path / "store").as_uri()) as mirror:
        remove_pruned(mirror)
    assert fresh.exists()
    assert not list((tmp_path / "store/clock").iterdir())


def test_prune_keeps_files_of_a_recent_push(cache, tmp_path):
    store = tmp_path / "store"
    push(store.as_uri(), cache)
    fresh = store / "artifacts" / ("ab" * 32 + ".pt2")
    fresh.write_bytes(b"x")
    assert run("prune", store.as_uri(), "--orphans", "--yes").code == 0
    assert fresh.exists()
    os.utime(fresh, (time.time() - 2 * 86400,) * 2)
    assert run("prune", store.as_uri(), "--orphans", "--yes").code == 0
    assert not fresh.exists()
