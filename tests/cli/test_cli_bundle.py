"""`cgtool export` and `cgtool import`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest
from bundle_maker import Forge, make_keys
from cache_maker import lay_entry, tree
from cli_harness import COMMAND, environment, run


def test_an_exported_bundle_can_be_imported(tmp_path):
    hash_ = lay_entry(tmp_path / "a")
    dest = tmp_path / "toy.tar.zst"
    out = run("export", dest, "--cache-dir", tmp_path / "a")
    assert out.code == 0
    assert out.out.splitlines()[1].split() == [hash_[:10], "Toy", "0", "backbone", "4"]
    assert out.out.splitlines()[-1].startswith("Exported 1 entry (")
    assert out.err.startswith("The bundle is unsigned: importing it needs --trust.")
    back = run("import", dest, "--cache-dir", tmp_path / "b", "--trust")
    assert back.code == 0
    assert back.out.splitlines()[1].split()[:5] == [hash_[:10], "Toy", "0", "backbone", "new"]
    assert back.out.splitlines()[-1].endswith(f"into {tmp_path / 'b'}")
    assert Forge.of(tmp_path / "b", hash_).files == Forge.of(tmp_path / "a", hash_).files


def test_a_bundle_can_be_piped(tmp_path):
    hash_ = lay_entry(tmp_path / "a")
    command = " ".join(COMMAND)
    line = f"{command} export - --cache-dir a | {command} import - --cache-dir b --trust --json"
    done = subprocess.run(
        ["sh", "-c", line], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False, timeout=60
    )
    report = json.loads(done.stdout)
    assert report["source"] == "-"
    assert report["entries"][0]["hash"] == hash_
    assert "Exported 1 entry (" in done.stderr


def test_the_json_reports_of_export_and_import(tmp_path):
    hash_ = lay_entry(tmp_path / "a")
    make_keys(tmp_path / "keys", "k")
    keys = tmp_path / "keys"
    out = run(
        "export", tmp_path / "layer", "--folder", "--sign", keys / "k.pem", "--cache-dir", tmp_path / "a", "--json"
    )
    report = out.report
    assert list(report) == [
        *("schema", "root", "dest", "form", "size_bytes", "written_bytes", "members", "sha256_of_index", "signed_by"),
        "entries",
    ]
    assert (report["schema"], report["form"], report["members"]) == (1, "folder", 9)
    one = {"hash": hash_, "rank": 0, "prefix": "backbone", "model": "Toy"}
    assert report["entries"] == [{**one, "rows": 4}]
    back = run(
        *("import", tmp_path / "layer", "--require-signature", keys / "k.pub", "--cache-dir", tmp_path / "b", "--json")
    ).report
    assert list(back) == ["schema", "source", "root", "signed_by", "size_bytes", "entries", "warnings"]
    assert list(back["entries"][0]) == [
        *("hash", "outcome", "rows_added", "artifacts", "size_bytes", "verdict", "ranks")
    ]
    assert (back["signed_by"], back["size_bytes"]) == (report["signed_by"][0], report["size_bytes"])
    (entry,) = back["entries"]
    assert (entry["outcome"], entry["rows_added"], entry["artifacts"]) == ("new", 4, 4)
    assert {"hash": entry["hash"], **entry["ranks"][0]} == one


def test_a_refusal_exits_with_3_and_a_stable_reason(tmp_path):
    forge = Forge.of(tmp_path / "a", lay_entry(tmp_path / "a"))
    bundle = tmp_path / "evil.tar.zst"
    bundle.write_bytes(forge.with_file("torch_compile_cache/../../evil\x1b[2J", b"x").bytes())
    untrusted = run("import", bundle, "--cache-dir", tmp_path / "b", "--json")
    assert (untrusted.code, untrusted.report["error"]["reason"]) == (3, "not_trusted")
    refused = run("import", bundle, "--cache-dir", tmp_path / "b", "--trust", "--json")
    assert refused.code == 3
    error = refused.report["error"]
    assert (error["type"], error["reason"]) == ("RefusedError", "parent_path")
    assert error["path"] == "torch_compile_cache/../../evil\x1b[2J"
    assert "\x1b" not in refused.err
    assert not (tmp_path / "b").exists()


def test_control_characters_in_a_model_name_are_escaped(tmp_path):
    lay_entry(tmp_path / "a", model="[bold]\x1b[2J\u202e\nEvil" + "x" * 10_000)
    dest = tmp_path / "toy.tar.zst"
    out = run("export", dest, "--cache-dir", tmp_path / "a")
    back = run("import", dest, "--cache-dir", tmp_path / "b", "--trust")
    for ran in (out, back):
        assert ran.code == 0
        assert len(ran.out) < 1000
        assert "\x1b" not in ran.out
        assert "[bold]\\x1b[2J\\u202e\\nEvil" in ran.out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("export", "-", "--json"), "Standard output cannot take both the bundle and the report."),
        (("export", "-", "--folder"), "A directory cannot be written to standard output."),
        (("export", "x", "ab", "--all"), "HASH cannot be combined with --all or --filter."),
        (
            ("export", "x", "--shape", "cudagraph_capture_sizes"),
            "is not a shape. Give general, a size (8), a range (2-64)",
        ),
        (("export", "x", "--shape", "9-2"), "is not a shape."),
        (("export", "x", "--level", "20"), "20 is not in the range 1<=x<=19."),
        (("import", "x", "--max-size", "0"), "0.0 is not in the range x>0."),
        (("import", "x", "--max-size", "inf"), "inf is not a usable limit."),
        (("import", "x", "--max-size", "nan"), "nan is not a usable limit."),
        (("import", "x", "--max-ratio", "nan"), "nan is not a usable limit."),
    ],
)
def test_invalid_options_are_usage_errors_and_write_nothing(tmp_path, arguments, sentence):
    ran = run(*arguments, cwd=tmp_path)
    assert ran.code == 2
    assert sentence in " ".join(ran.err.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "rows"), [("general", 2), ("8", 2), ("2-64", 2), ("batch=4:seq=128", 2), ("0", 0)], ids=str
)
def test_shapes_are_spelled_as_inspect_shows_them(tmp_path, text, rows):
    lay_entry(tmp_path / "a", shapes=("general", "n=8", "n=2-64", "batch=4:seq=128"))
    ran = run("export", tmp_path / "x.tar.zst", "--shape", text, "--cache-dir", tmp_path / "a", "--json")
    if rows:
        assert ran.report["entries"][0]["rows"] == rows
    else:
        assert (ran.code, "has no artifact for 0." in ran.err) == (2, True)


def test_a_missing_source_and_an_empty_cache_are_errors(tmp_path):
    absent = run("import", tmp_path / "absent", "--trust", "--cache-dir", tmp_path / "b")
    assert (absent.code, absent.out) == (1, "")
    assert "no such file or folder" in absent.err
    empty = run("export", tmp_path / "x", "--cache-dir", tmp_path / "b")
    assert (empty.code, empty.out) == (1, "")
    assert "holds no entry" in empty.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_import_leaves_the_cache_unchanged(tmp_path, number):
    lay_entry(tmp_path / "a")
    lay_entry(tmp_path / "b", seed=9)
    run("export", tmp_path / "x.tar.zst", "--cache-dir", tmp_path / "a")
    before = tree(tmp_path / "b")
    with subprocess.Popen(
        [*COMMAND, "import", "-", "--trust", "--cache-dir", tmp_path / "b"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as process:
        data = (tmp_path / "x.tar.zst").read_bytes()
        process.stdin.write(data[: len(data) // 2])
        process.stdin.flush()
        deadline = time.monotonic() + 60
        while not list((tmp_path / "b/torch_compile_cache").glob(".import.*")) and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.1)
        os.kill(process.pid, number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert tree(tmp_path / "b") == before
