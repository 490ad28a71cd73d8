"""Caches in folders that are full, read-only, missing or blocked by files; and loads that write nowhere else."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
from pathlib import Path

import pytest
from cli_harness import environment, forked, start
from e2e_harness import cgtool as command

pytest.importorskip("torch")

import e2e_models as models
import torch
from e2e_compare import difference

import cgtool
from cgtool import CompilationConfig, ExampleCall, ModelSpec
from cgtool.compiler.pipeline import warm
from cgtool.errors import CacheError, CacheMissError

pytestmark = pytest.mark.torch

HERE = Path(__file__).parent
MODEL = f"{HERE / 'e2e_models.py'}:attention_from_2"
EAGER = CompilationConfig(adaptor="eager")


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def run(root, spec=models.attention_from_2, **fields):
    return warm(spec(), config=EAGER.replace(**fields), cache_dir=root)


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders") / "cache"
    with torch.no_grad():
        run(root)
    return root


def agree(root):
    module = models.attention_from_2().module
    loaded = cgtool.load(module, cache_dir=root)
    for batch, seq in ((2, 2), (2, 5), (3, 4)):
        x = models.attention_x(batch, seq)
        difference(loaded(x), module(x))


def leftovers(root):
    return [p.name for p in root.rglob("*") if p.name == "manifest.json" or p.name.endswith((".tmp", ".next"))]


def test_a_full_disk_is_an_error_and_a_cache_with_room_works(small_disk):
    filler, root = small_disk / "filler", small_disk / "cache"
    failed, room = 0, 20 * 1024
    while True:
        filler.write_bytes(bytes(max(0, shutil.disk_usage(small_disk).free + filler_size(filler) - room)))
        message = error_of_run(root)
        if message is None:
            break
        failed += 1
        assert re.search(r"the disk is full.* bytes are free\. Free some space or choose another folder", message)
        assert leftovers(root) == []
        with pytest.raises(CacheMissError):
            cgtool.load(models.attention().module, cache_dir=root)
        room += 40 * 1024
    assert failed >= 2  # before the trace, and while files are written
    agree(root)
    filler.unlink()
    assert run(root, models.attention).hit


def error_of_run(root):
    try:
        run(root, models.attention)  # an entry of four variants
    except CacheError as error:
        return str(error)
    return None


def filler_size(filler):
    return filler.stat().st_size if filler.exists() else 0


def test_adding_a_size_to_a_full_disk_leaves_the_entry_unchanged(small_disk):
    filler, root = small_disk / "filler", small_disk / "cache"
    run(root)
    filler.write_bytes(bytes(shutil.disk_usage(small_disk).free))
    with pytest.raises(CacheError, match="the disk is full"):
        run(root, compile_sizes=[{"batch": 2, "seq": 8}])
    agree(root)
    assert run(root).hit
    filler.unlink()
    assert run(root, compile_sizes=[{"batch": 2, "seq": 8}]).trace_secs == 0
    agree(root)


def test_a_read_only_cache_serves_load_and_warm(read_only, warmed):
    root = read_only(warmed)
    agree(root)
    assert run(root).hit
    run_check = warm(models.attention_from_2(), config=EAGER, cache_dir=root, check=True)
    assert run_check.hit
    with pytest.raises(CacheError, match=r"read-only file system\. Make it writable or choose another folder"):
        run(root, level=2)
    with pytest.raises(CacheError, match="read-only file system"):
        run(root, compile_sizes=[{"batch": 2, "seq": 8}])
    done = command("warm", MODEL, "--cache-dir", root, "--compilation-config", '{"adaptor": "eager", "level": 2}')
    assert done.code == 1
    assert "read-only file system" in done.err
    assert "Traceback" not in done.err


def test_a_read_only_cache_without_a_lookup_serves_load(read_only, warmed, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(warmed, copy)
    shutil.rmtree(copy / "torch_compile_cache" / "lookup")
    shutil.rmtree(copy / "torch_compile_cache" / "state")
    agree(read_only(copy))


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_a_cache_without_permission_serves_load(warmed, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(warmed, copy)
    folders = [copy, *(path for path in copy.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        agree(copy)
        assert run(copy).hit
        with pytest.raises(CacheError, match="permission denied"):
            run(copy, level=2)
    finally:
        for folder in folders:
            folder.chmod(0o755)


@pytest.mark.parametrize("place", ["file", "file/below", "cache/torch_compile_cache"])
def test_a_file_in_place_of_the_cache_is_an_error(tmp_path, monkeypatch, place):
    (tmp_path / "cache").mkdir()
    path = tmp_path / place
    (tmp_path / "file").write_text("mine")
    if place.startswith("cache"):
        path.write_text("mine")
    monkeypatch.setenv("CGTOOL_CACHE_DIR", str(path.parent if place.startswith("cache") else path))
    module = models.attention_from_2().module
    with pytest.raises(CacheMissError):
        cgtool.load(module)
    with pytest.raises(CacheError, match=r"file.* (Remove it|--cache-dir)"):
        run(None)
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.rglob("*") if "CACHEDIR" not in p.name) == sorted(
        ["cache", "file", *(["torch_compile_cache"] if place.startswith("cache") else [])]
    )


LOAD = """
import json, sys
sys.path[:0] = [{here!r}]
import torch, cgtool, e2e_models as models
with torch.no_grad():
    module = models.attention_from_2().module
    loaded = cgtool.load(module{root})
    x = models.attention_x(3, 4)
    print(json.dumps(bool(torch.allclose(loaded(x), module(x), atol=1e-5))))
"""


def snapshot(*folders):
    return sorted((str(p), p.stat().st_mtime_ns) for folder in folders for p in folder.rglob("*"))


def test_load_writes_only_into_the_cache(tmp_path, warmed):
    root = tmp_path / "cache"
    shutil.copytree(warmed, root)
    places = [tmp_path / name for name in ("home", "work", "tmp", "xdg", "inductor")]
    for place in places:
        place.mkdir()
    home, work, tmp, xdg, inductor = places
    env = {
        "HOME": str(home),
        "TMPDIR": str(tmp),
        "XDG_CACHE_HOME": str(xdg),
        "TORCHINDUCTOR_CACHE_DIR": str(inductor),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    before = snapshot(*places)
    kept = {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and "state" not in path.parts}
    done = forked(LOAD.format(here=str(HERE), root=f", cache_dir={str(root)!r}"), env=environment(**env), cwd=work)
    assert done.report is True, done.err
    assert snapshot(*places) == before
    now = {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and "state" not in path.parts}
    assert now == kept


OWN_FILES = {
    "an artifact": "*/artifacts/*",
    "the entry's lease": "state/leases/*[0-9a-f]",
    "a rank's lease": "state/leases/*-rank_0-*",
    "a stamp of use": "state/used/*",
    "a lock": "state/locks/*",
}


def serves(root):
    """Return whether the entry is served, within a minute."""
    served = []

    def serve():
        with torch.no_grad(), contextlib.suppress(CacheError):
            agree(root)
            served.append(root)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return bool(served)


@pytest.mark.parametrize("place", OWN_FILES)
@pytest.mark.parametrize("kind", ["a pipe", "a link"])
def test_pipes_and_links_in_place_of_files_neither_block_nor_are_followed(tmp_path, warmed, place, kind):
    root, outside = tmp_path / "cache", tmp_path / "outside"
    shutil.copytree(warmed, root)
    assert serves(root)
    for path in list((root / "torch_compile_cache").glob(OWN_FILES[place])):
        path.unlink()
        os.mkfifo(path) if kind == "a pipe" else path.symlink_to(outside)
    assert serves(root) == (place != "an artifact")
    for words in (
        ("verify",),
        ("verify", "--repair"),
        ("export", tmp_path / "bundle.tar.zst"),
        ("prune", "--max-size", "1KB", "--yes"),
    ):
        done = start(*words, "--cache-dir", root).end(secs=60)
        assert "Traceback" not in done.err
        assert "Usage" not in done.err
    assert not outside.exists()


def test_a_missing_home_does_not_matter_if_the_cache_is_named(tmp_path, warmed):
    program = LOAD.format(here=str(HERE), root=f", cache_dir={str(warmed)!r}")
    missing = tmp_path / "no" / "home"
    assert forked(program, env=environment(HOME=str(missing)), cwd=tmp_path).report is True
    assert not missing.exists()
    done = command("inspect", "cache", warmed, "--json", env={"HOME": str(missing)}, cwd=tmp_path)
    assert len(done.report["entries"]) == 1
    assert not missing.exists()


def test_a_home_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    env = {"HOME": str(tmp_path / "file" / "home")}
    done = command("warm", MODEL, "--compilation-config", json.dumps({"adaptor": "eager"}), env=env)
    assert done.code == 1
    assert "Traceback" not in done.err
    assert "--cache-dir" in done.err
    program = LOAD.format(here=str(HERE), root="")
    done = forked(program, env=environment(**env), cwd=tmp_path)
    assert "has no entry for this model" in done.err


def test_an_invalid_prefix_writes_nothing(tmp_path):
    x = models.attention_x()
    for prefix in ("../../out", "a/b", "", ".", "..", "a" * 300, "é"):
        spec = ModelSpec(module=models.attention_from_2().module, calls=[ExampleCall(args=(x,))], prefix=prefix)
        with pytest.raises(CacheError, match="is not a valid prefix"):
            warm(spec, config=EAGER, cache_dir=tmp_path / "cache")
    assert not (tmp_path / "out").exists()
    assert list(tmp_path.rglob("manifest.json")) == []
