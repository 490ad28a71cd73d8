"""Configured stores: what a process reads from them, adds to them, and does when they fail."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from pathlib import Path

import pytest
from cache_maker import LOOKUP, lay_entry
from cli_harness import Ran, environment, forked
from remote_cli import remote_server, run
from remote_servers import FaultyServer, answers, deaf_port, faulty, of_files, other_bytes, reset, truncated

from cgtool.errors import CacheMissError, CgtoolError, RemoteError
from cgtool.remote.remotes import Remotes
from cgtool.store.artifacts import split_origin
from cgtool.store.layout import CacheLayout, RankName
from cgtool.store.records import read_manifest
from cgtool.store.trust import TrustPolicy

FIXTURE = Path(__file__).parents[2] / "fixtures/tiny_llama.py"
#: Loads the model of the fixture and calls it; prints whether remote stores were used.
LOADING = """
import sys
sys.path.insert(0, {folder!r})
import cgtool, tiny_llama, torch
spec = tiny_llama.build(num_layers=1)
with torch.no_grad():
    print(tuple(cgtool.load(spec.module)(*spec.calls[0].args).shape), "cgtool.remote" in sys.modules)
"""
#: Compiles it with a read-only store, with a required store that is down, and with both stores optional.
COMPILING = """
import sys
from pathlib import Path
sys.path.insert(0, {folder!r})
import cgtool, tiny_llama, torch
from cgtool.errors import RemoteError
spec = tiny_llama.build(num_layers=1)
store, down, root = sys.argv[1:]
for more in ({{"remote_readonly": True}}, {{"remote": [down], "remote_required": True}}, {{}}):
    config = cgtool.CompilationConfig(**{{"adaptor": "eager", "remote": [store, down]}} | more)
    try:
        with torch.no_grad():
            found = cgtool.compile(spec.module, config=config, cache_dir=root + str(len(more)))(*spec.calls[0].args)
        print(tuple(found.shape), Path(store.removeprefix("file://")).exists())
    except RemoteError:
        print("RemoteError")
"""
#: Looks for an entry like a load, without torch.
ASKING = """
import sys
from pathlib import Path
from cgtool.errors import CacheMissError
from cgtool.remote.remotes import Remotes
from cgtool.store.artifacts import split_origin
from cgtool.store.layout import CacheLayout, RankName
from cgtool.store.records import read_manifest
from cgtool.store.trust import TrustPolicy
root, url, hash_, lookup = sys.argv[1:]
layout = CacheLayout(root=Path(root))
def find():
    if not layout.manifest_file(RankName(hash=hash_, rank=0, prefix="backbone")).exists():
        raise CacheMissError("a miss")
    return True
remotes = Remotes(layout, [url], trust=TrustPolicy())
assert remotes.find(find, lookup, lambda key: True, rank=0, prefix="backbone")
"""


@pytest.fixture
def entry(tmp_path):
    """Return the hash of an entry in the store `tmp_path / "store"`."""
    hash_ = lay_entry(tmp_path / "cache", seed=7)
    assert run("push", (tmp_path / "store").as_uri(), "--cache-dir", tmp_path / "cache").code == 0
    return hash_


@pytest.fixture
def server(entry, tmp_path):
    with faulty(tmp_path / "store") as server:
        yield server


def find(layout: CacheLayout, url: str, hash_: str, *, required: bool = False) -> bool | None:
    """Look for an entry like a load that missed."""

    def look() -> bool:
        if not layout.manifest_file(RankName(hash=hash_, rank=0, prefix="backbone")).exists():
            raise CacheMissError("a miss")
        return True

    remotes = Remotes(layout, [url], trust=TrustPolicy(), required=required)
    return remotes.find(look, LOOKUP, lambda key: True, rank=0, prefix="backbone")


def test_entry_that_does_not_fit_is_not_pulled(entry, server, tmp_path):
    remotes = Remotes(CacheLayout(root=tmp_path / "new"), [server.url], trust=TrustPolicy())

    def look() -> None:
        raise CacheMissError("a miss")

    assert remotes.find(look, LOOKUP, lambda key: False, rank=0, prefix="backbone") is None
    assert remotes.find(look, LOOKUP, lambda key: True, rank=1, prefix="backbone") is None
    assert remotes.find(look, "ab" * 32, lambda key: True, rank=0, prefix="backbone") is None
    assert server.fetched("/artifacts/") == []


def test_concurrent_processes_download_an_entry_once(entry, server: FaultyServer, tmp_path):
    (tmp_path / "asking.py").write_text(ASKING)
    command = [str(tmp_path / "asking.py"), tmp_path, environment(), [str(tmp_path / "new"), server.url, entry, LOOKUP]]
    children = [remote_server().start(*command) for _ in range(10)]
    assert [child.end(120).code for child in children] == [0] * 10
    fetched = server.fetched("/artifacts/")
    assert len(fetched) == len(set(fetched)) == len(list((tmp_path / "store/artifacts").iterdir()))


FAULTS = [
    pytest.param(reset, id="reset in a body"),
    pytest.param(answers(403), id="403"),
    pytest.param(answers(404), id="404"),
    pytest.param(answers(429), id="429"),
    pytest.param(answers(500), id="500"),
    pytest.param(truncated, id="truncated"),
    pytest.param(other_bytes, id="other bytes"),
]


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("cgtool")]


@pytest.mark.parametrize("fault", FAULTS)
def test_failing_store_fails_a_load_only_if_it_is_required(entry, server, tmp_path, caplog, fault):
    server.fault = of_files(["/artifacts/"], fault)
    layout = CacheLayout(root=tmp_path / "new")
    with caplog.at_level(logging.WARNING, logger="cgtool"):
        assert find(layout, server.url, entry) is None
        with pytest.raises(CgtoolError):
            find(layout, server.url, entry, required=True)
    assert len(warnings_of(caplog)) == 1
    assert layout.hashes() == []
    server.fault = lambda handler, data: False
    assert find(CacheLayout(root=tmp_path / "other"), server.url, entry)


@pytest.mark.parametrize("fault", FAULTS)
def test_warm_compiles_units_that_a_store_does_not_deliver(tmp_path, caplog, fault):
    hash_, key = lay_entry(tmp_path / "cache", seed=8), "ab" * 32
    layout = CacheLayout(root=tmp_path / "cache")
    artifact = read_manifest(layout, RankName(hash=hash_, rank=0, prefix="backbone")).rows[0].artifact
    data = (layout.entry_dir(hash_) / "artifacts" / artifact.file).read_bytes()
    origin = split_origin(data, artifact.kind)[0]
    (tmp_path / "store").mkdir()
    with faulty(tmp_path / "store") as server:

        def remotes(name: str) -> Remotes:
            return Remotes(CacheLayout(root=tmp_path / name), [server.url], trust=TrustPolicy())

        remotes("a").put_unit(key, data, artifact)
        server.fault = of_files(["/artifacts/"], fault)
        with caplog.at_level(logging.WARNING, logger="cgtool"):
            assert remotes("b").unit(key, origin) is None
        assert len(warnings_of(caplog)) == 1
        server.fault = of_files(["/artifacts/"], fault, times=0)
        assert remotes("c").unit(key, origin) == (data, artifact)


def test_unreachable_store_causes_one_warning_and_is_suspended(entry, tmp_path, caplog):
    layout = CacheLayout(root=tmp_path / "new")
    with deaf_port() as port, caplog.at_level(logging.WARNING, logger="cgtool"):
        url = f"http://ann:s3cret@127.0.0.1:{port}"
        for _ in range(3):
            try:
                (tmp_path / "nowhere").read_bytes()
            except FileNotFoundError:  # a program may load a model while it handles an unrelated error
                assert find(layout, url, entry) is None
        with pytest.raises(RemoteError, match="Connection refused"):
            find(layout, url, entry, required=True)
    [warning] = warnings_of(caplog)
    assert "Connection refused" in warning
    assert "s3cret" not in caplog.text


def test_store_is_used_again_after_its_suspension(entry, tmp_path):
    layout, url = CacheLayout(root=tmp_path / "new"), (tmp_path / "store").as_uri()
    mark = Remotes(layout, [url], trust=TrustPolicy())._mark(url)
    mark.parent.mkdir(parents=True)
    mark.touch()
    assert find(layout, url, entry) is None
    os.utime(mark, (time.time() - 61,) * 2)
    assert find(layout, url, entry)


@pytest.mark.torch
def test_model_warmed_on_one_machine_loads_on_the_next(tmp_path):
    store = (tmp_path / "store").as_uri()
    asked = ["warm", f"{FIXTURE}:build", "--arg", "num_layers=1", "--adaptor", "eager", "--remote", store, "--json"]
    warmed = run(*asked, "--cache-dir", tmp_path / "a")
    assert warmed.code == 0, warmed.err
    runs = [python(LOADING, CGTOOL_CACHE_DIR=str(tmp_path / "b"), CGTOOL_REMOTE=store) for _ in range(2)]
    assert [done.out.split()[-1] for done in runs] == ["True", "False"]  # the second load hits locally
    again = run(*asked, "--cache-dir", tmp_path / "c").report
    assert (again["hit"], again["hash"]) == (True, warmed.report["hash"])


def python(program: str, *words: object, **told: str) -> Ran:
    done = forked(program.format(folder=str(FIXTURE.parent)), *words, env=environment(**told))
    assert done.code == 0, done.err
    return done


@pytest.mark.torch
def test_model_compiled_by_one_process_loads_on_the_next_machine(tmp_path):
    store = (tmp_path / "store").as_uri()
    with deaf_port() as port:
        compiled = python(COMPILING, store, f"http://ann:s3cret@127.0.0.1:{port}", tmp_path / "cache")
    first, required, last = compiled.out.splitlines()
    assert (first.split()[-1], required) == ("False", "RemoteError")
    assert compiled.err.count("Connection refused") == 2, compiled.err  # once for each cache
    assert "s3cret" not in compiled.err
    loaded = python(LOADING, CGTOOL_CACHE_DIR=str(tmp_path / "new"), CGTOOL_REMOTE=store)
    assert loaded.out.rpartition(" ")[0] == last.rpartition(" ")[0]


@pytest.mark.torch
@pytest.mark.slow
def test_units_compiled_on_one_machine_are_reused_on_the_next(tmp_path):
    store = tmp_path / "store"
    asked = ["warm", f"{FIXTURE}:build", "--arg", "num_layers=1", "--remote", store.as_uri(), "--json", "--cache-dir"]
    first = run(*asked, tmp_path / "a").report
    shutil.rmtree(store / "entries")
    second = run(*asked, tmp_path / "b", "--remote-readonly").report
    assert (first["compiled"] > 0, second["compiled"], second["hash"]) == (True, 0, first["hash"])
    assert not (store / "entries").exists()
    unit = next((store / "units").iterdir())
    artifact = store / "artifacts" / "{digest}.{kind}".format(**json.loads(unit.read_bytes())["artifact"])
    artifact.write_bytes(b"x" * artifact.stat().st_size)
    third = run(*asked, tmp_path / "c", "--remote-readonly")
    assert (third.report["compiled"], "does not match its digest" in third.err) == (1, True)
