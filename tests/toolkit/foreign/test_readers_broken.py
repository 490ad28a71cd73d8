"""Broken caches of torch, Triton and ATOM, and broken single files: faults are reported, nothing is executed."""

from __future__ import annotations

import json
import random
import shutil

import pytest
from foreign_samples import (
    BOMB,
    FX_KEY,
    KEY,
    KIND,
    SAMPLES,
    SCALE,
    artifact_of,
    entry_of,
    field,
    number,
    sealed,
    unpack,
)

from cgtool.toolkit.foreign import formats
from cgtool.toolkit.foreign.detect import detect, read_foreign
from cgtool.toolkit.foreign.records import foreign_json


def test_missing_code_and_graphs_of_an_older_index_are_reported(tmp_path):
    path = unpack("vllm-old", tmp_path)
    cache = path / "torch_compile_cache" / "1517964802" / "rank_0_0" / "inductor_cache"
    shutil.rmtree(cache / "fxgraph")
    (cache / "5l" / "c5lx63dblzpjkzwsomda37ybbrxoiqdowok7da245wuy3huk2yvw.py").unlink()
    rows = entry_of(read_foreign(path), "1517964802").artifacts
    assert {row.problems for row in rows} == {
        (
            "its generated code is missing",
            f"its compiled graph {FX_KEY} is missing",
        )
    }


def test_missing_graphs_of_an_unpacked_artifact_are_reported(tmp_path):
    path = unpack("atom", tmp_path)
    folder = path / "torch_compile_cache" / "9b41aa03d5" / "rank_0" / "backbone" / "artifact_shape_8_subgraph_0"
    shutil.rmtree(folder / "aotautograd")
    next((folder / "fxgraph").rglob("r*")).write_bytes(b"")
    row = artifact_of(entry_of(read_foreign(path), "9b41aa03d5"), "rank_0/backbone/artifact_shape_8_subgraph_0")
    graph = "fxgraph/sy/fsy7i4gjlgxcswlf5eg2djs2i4kxfmvvy5xj7noglgwpypcgzuwy/"
    assert row.problems[0].removeprefix(graph) == "rlqy3nrbsztobcjb2kcmsknud4cn3dogz6yhe3mjach46do6jx4 is empty"
    assert row.problems[1:] == ("it does not hold an AOTAutograd graph, so it cannot be loaded",)
    assert (row.holds_pickle, row.members) == (False, ("2 files, 0 of them pickles",))


def test_a_malicious_pickle_is_described_and_not_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = unpack("torch_inductor", tmp_path)
    (path / "fxgraph" / FX_KEY[1:3] / FX_KEY / "bomb").write_bytes(BOMB)
    (path / "24" / "cbomb.so").write_bytes(BOMB)
    cache = read_foreign(path)
    bomb = artifact_of(entry_of(cache, FX_KEY), "bomb")
    assert (bomb.holds_pickle, bomb.members, bomb.problems) == (True, ("pickle protocol 4",), ())
    native = artifact_of(entry_of(cache, "generated code"), "24/cbomb.so")
    assert (native.holds_pickle, native.problems) == (True, ("it does not start like native code",))
    assert not (tmp_path / "HARM").exists()


def test_graphs_that_are_empty_or_not_pickles_are_reported(tmp_path):
    path = unpack("torch_inductor", tmp_path)
    (path / "fxgraph" / FX_KEY[1:3] / FX_KEY / "empty").write_bytes(b"")
    (path / "fxgraph" / FX_KEY[1:3] / FX_KEY / "text").write_bytes(b"import os")
    (path / "aotautograd" / "anothing").mkdir()
    cache = read_foreign(path)
    entry = entry_of(cache, FX_KEY)
    assert artifact_of(entry, "empty").problems == ("it is empty",)
    assert artifact_of(entry, "text").problems == ("it does not start like a pickle",)
    assert entry_of(cache, "anothing").problems == ("it does not hold a graph",)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        pytest.param(
            "scale.json", '{"name": ', "scale.json could not be read: it is not valid JSON", id="torn metadata"
        ),
        pytest.param(
            "scale.json", "[" * 40 + "]" * 40, "scale.json could not be read: it is nested", id="deep metadata"
        ),
        pytest.param("scale.json", "[]", "scale.json is not the metadata of a kernel", id="other metadata"),
        pytest.param("__grp__scale.json", "{", "__grp__scale.json could not be read: it is not", id="torn group"),
        pytest.param("__grp__scale.json", '{"child_paths": [1]}', "is not a group of files", id="another group"),
        pytest.param(
            "__grp__scale.json",
            '{"child_paths": {"a\\nb": "/x/a"}}',
            r"names a\nb, which is missing",
            id="a missing file",
        ),
    ],
)
def test_a_broken_json_file_of_triton_is_reported(tmp_path, name, text, message):
    path = unpack("triton", tmp_path)
    (path / SCALE / name).write_text(text)
    entry = entry_of(read_foreign(path), SCALE)
    assert any(message in problem for problem in entry.all_problems())
    assert all(problem.isprintable() for problem in entry.all_problems())
    assert (entry.kind, entry.deletable) == ("kernel", True)


def test_a_kernel_without_a_binary_is_incomplete(tmp_path):
    path = unpack("triton", tmp_path)
    (path / SCALE / "scale.cubin").unlink()
    (path / SCALE / "tmp.pid_1_x").mkdir()
    problems = list(entry_of(read_foreign(path), SCALE).all_problems())
    assert problems[0] == "it is incomplete: the kernel has no binary"
    assert problems[1] == "__grp__scale.json names scale.cubin, which is missing"
    assert problems[-1] == "it holds a folder that a process did not finish writing"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(sealed(number(1), KIND, number(1 << 63)), "truncated: a field needs 8 bytes", id="a giant count"),
        pytest.param(sealed(number(1), KIND, number(1), KEY, number(1 << 62)), "is truncated", id="a giant member"),
        pytest.param(sealed(number(1), KIND, number(1), KEY, field(b"12"), b"x"), "is truncated", id="a tail"),
        pytest.param(sealed(number(1), KIND, number(1), field(b"*" * 8)), "is not base64", id="a key of no base64"),
        pytest.param(sealed(number(1), KIND, number(1), field(b"a" * 5000)), "the limit of 4096", id="a giant key"),
        pytest.param(b"\0\0\0\0" + number(1) + KIND + number(0), "checksum does not match", id="a wrong checksum"),
    ],
)
def test_a_malformed_mega_cache_is_a_problem(tmp_path, data, message):
    path = tmp_path / "mega"
    path.write_bytes(data)
    cache = read_foreign(path)
    (entry,) = cache.entries
    assert (cache.system, entry.artifacts, entry.size_bytes) == ("mega_cache", (), len(data))
    (problem,) = entry.problems
    assert message in problem


def test_a_mega_cache_with_too_many_members_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "_MAX_MEMBERS", 3)
    path = tmp_path / "mega"
    path.write_bytes(sealed(number(1), KIND, number(4), (KEY + field(b"")) * 4))
    (entry,) = read_foreign(path).entries
    assert entry.problems == ("it holds more than 3 members",)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x80\x04N.", id="a pickle"),
        pytest.param(sealed(number(2), KIND), id="another version"),
        pytest.param(sealed(number(1), field(b"!!!!")), id="a kind of no base64"),
        pytest.param(sealed(number(1), number(1 << 60)), id="a kind without end"),
        pytest.param(b"PK\x03\x04" + bytes(100), id="an archive"),
    ],
)
def test_other_files_are_not_detected(tmp_path, data):
    path = tmp_path / "file"
    path.write_bytes(data)
    assert detect(path) is None


@pytest.mark.parametrize("name", SAMPLES)
def test_a_mutated_file_is_not_an_error(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = unpack(name, tmp_path)
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    seeded = random.Random(name)
    texts = (b"", b"{", b"\xff" * 9, b"[" * 5000, b"None", BOMB, b"{'a': open('HARM', 'w')}")
    for _ in range(25):
        file = seeded.choice(files)
        data = file.read_bytes()
        place = seeded.randrange(len(data) + 1)
        changed = seeded.choice(
            [data[:place], data[:place] + bytes([seeded.randrange(256)]) + data[place + 1 :], seeded.choice(texts)]
        )
        file.write_bytes(changed)
        if detect(path) is not None:
            cache = read_foreign(path)
            json.dumps(foreign_json(cache), allow_nan=False)
            assert cache.size_bytes >= len(changed)
        file.write_bytes(data)
    assert not (tmp_path / "HARM").exists()
    assert read_foreign(path).warnings == ()
