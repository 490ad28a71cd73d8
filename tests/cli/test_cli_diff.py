"""`cgtool diff`: exit codes, the text and JSON output, and untrusted input."""

from __future__ import annotations

import json
import shutil

import pytest
from cache_maker import lay_decoder as lay_entry
from cache_samples import sealed
from cli_harness import run

KEYS = ["what", "path", "old", "new", "sentence", "detail"]


@pytest.fixture
def two(tmp_path):
    """A cache with two entries that differ in their model."""
    return tmp_path, lay_entry(tmp_path), lay_entry(tmp_path, seed=1)


def test_an_entry_equals_itself(two):
    root, one, _ = two
    ran = run("diff", one[:8], root / "torch_compile_cache" / one, "--cache-dir", root)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == f"{one[:10]} and {one[:10]} of {root}/torch_compile_cache/{one} are equal.\n"
    assert run("diff", one, one, "--cache-dir", root, "--json").report == {
        "schema": 1,
        "equal": True,
        "differences": [],
    }


def test_the_factor_comes_first_and_the_exit_code_is_3(two):
    root, one, other = two
    ran = run("diff", one, other, "--cache-dir", root)
    assert (ran.code, ran.err) == (3, "")
    lines = ran.out.splitlines()
    assert lines[0].startswith(f"{one[:10]} → {other[:10]}: ")
    assert lines[0].endswith(" differences, the most significant first.")
    assert lines[1] == "  factor  model was 0 and is 1 now"
    assert "          - input %0: float32[s0, 64] strides [64, 1] cpu" in lines
    assert "          + input %0: float32[s0, 65] strides [65, 1] cpu" in lines


def test_all_shows_every_difference(tmp_path):
    for seed in range(14):
        lay_entry(tmp_path / ("old" if seed < 7 else "new"), seed=seed)
    short = run("diff", tmp_path / "old", tmp_path / "new").out.splitlines()
    assert len(short) == 14
    assert short[0] == f"{tmp_path}/old → {tmp_path}/new: 14 differences, the most significant first."
    assert short[-1] == "and 2 more (shown by --all and --json)"
    whole = run("diff", tmp_path / "old", tmp_path / "new", "--all").out.splitlines()
    assert [line[:15] for line in whole[1:]] == ["   entry  entry"] * 14


def test_the_json_of_a_difference_has_the_documented_fields(two):
    root, one, other = two
    ran = run("diff", f"{root}:{one[:6]}", f"{root}:{other[:6]}", "--json")
    assert (ran.code, ran.err) == (3, "")
    report = ran.report
    assert list(report) == ["schema", "equal", "differences"]
    assert (report["schema"], report["equal"]) == (1, False)
    assert all(list(difference) == KEYS for difference in report["differences"])
    assert report["differences"][0] == {
        "what": "factor",
        "path": "model",
        "old": 0,
        "new": 1,
        "sentence": "model was 0 and is 1 now",
        "detail": [],
    }
    kinds = [difference["what"] for difference in report["differences"]]
    assert kinds == sorted(kinds, key=["factor", "piece", "artifact"].index)


def test_caches_can_be_compared_with_caches_and_entries(two, tmp_path):
    root, one, other = two
    shutil.copytree(root / "torch_compile_cache" / one, tmp_path / "less" / "torch_compile_cache" / one)
    ran = run("diff", root, tmp_path / "less")
    assert ran.code == 3
    assert ran.out.splitlines()[1:] == [f"   entry  entry {other[:10]} (TinyModel) is only in the first"]
    assert run("diff", one, tmp_path / "less", "--cache-dir", root).code == 0


def test_an_entry_is_compared_with_this_machine(two):
    root, one, _ = two
    ran = run("diff", one, "--here", "--cache-dir", root)
    assert ran.code == 0  # no factor of this key depends on the machine
    assert ran.out == f"{one[:10]} and this machine are equal.\n"


def test_untrusted_names_are_escaped_and_truncated(tmp_path):
    evil = "[bold red]\x1b[2J\u202e\n" + "x" * 10_000
    lay_entry(tmp_path / "old", model=evil)
    lay_entry(tmp_path / "new", model=evil, seed=1)
    ran = run("diff", tmp_path / "old", tmp_path / "new")
    assert ran.code == 3
    assert not set(ran.out) & {"\x1b", "\u202e"}
    assert "[bold red]\\x1b[2J\\u202e\\nxxx" in ran.out
    assert max(map(len, ran.out.splitlines())) < 500
    report = run("diff", tmp_path / "old", tmp_path / "new", "--json")
    assert report.out.isascii()
    assert evil in report.report["differences"][0]["sentence"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        pytest.param(("nowhere", "nothing"), 2, "There is no 'nowhere'", id="missing paths"),
        pytest.param(("{one}",), 2, "Name two sides, A and B, or one entry and --here.", id="one side"),
        pytest.param(("{one}", "{one}", "--here"), 2, "Name two sides", id="two sides and here"),
        pytest.param(("{root}", "--here"), 2, "holds 2 entries to compare with", id="a cache and here"),
        pytest.param(("", "{one}"), 2, "There is no ''", id="an empty name"),
        pytest.param(("0", "{empty}"), 1, "does not hold a cgtool cache", id="a folder of something else"),
        pytest.param(("{one}", "{file}"), 3, "", id="a file that is no bundle"),
    ],
)
def test_sides_that_cannot_be_compared_are_errors(two, arguments, code, message, tmp_path):
    root, one, _ = two
    names = {"root": root, "one": one, "empty": tmp_path / "empty", "file": tmp_path / "file"}
    names["empty"].mkdir()
    names["file"].write_text("no bundle")
    sides = [argument.format(**names) if argument != "0" else one for argument in arguments]
    ran = run("diff", *sides, "--cache-dir", root)
    assert (ran.code, ran.out) == (code, "")
    assert ran.err.startswith("Error: ")
    assert message in ran.err


def test_torn_files_and_newer_schemas_are_reported_with_their_path(two):
    root, one, other = two
    manifest = root / "torch_compile_cache" / other / "rank_0" / "backbone" / "manifest.json"
    whole = manifest.read_text()
    newer = sealed({**json.loads(whole), "record": "manifest-99"}).decode()
    for text, kind in ((whole[:-9], "CacheCorruptError"), (newer, "CacheSchemaError")):
        manifest.write_text(text)
        error = run("diff", one, other, "--cache-dir", root, "--json").report["error"]
        assert error["type"] == kind
        assert error["path"] == str(manifest)
