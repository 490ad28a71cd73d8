"""`cgtool diff` of two caches or entries of another system, on the samples of fixtures/caches."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cache_maker import lay_decoder as lay_entry
from cli_harness import run, run_many
from foreign_samples import PIECES, SAMPLES, SCALE, unpack

from cgtool.errors import UsageError
from cgtool.toolkit.diff.run import diff


def both(name: str, tmp_path: Path) -> tuple[Path, Path]:
    return unpack(name, tmp_path / "a"), unpack(name, tmp_path / "b")


def found(old: object, new: object, **rest) -> list[tuple[str, str, str]]:
    report = diff(str(old), str(new), **rest)
    return [(one.what, one.path, one.sentence) for one in report.differences]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_copy_of_a_cache_is_equal_to_it(tmp_path, name):
    assert found(*both(name, tmp_path)) == []


def test_mega_caches_that_are_torn_are_equal_only_if_their_bytes_are(tmp_path):
    files = [next(path for path in (side, *side.rglob("*")) if path.is_file()) for side in both("mega_cache", tmp_path)]
    whole = files[0].read_bytes()
    files[0].write_bytes(whole[:-100])
    what, _, said = found(*files)[0]
    assert (what, said.rsplit(": ", 1)[-1].split(" ", 2)[2]) == ("entry", "cannot be read in the first")
    files[1].write_bytes(whole[:-100])
    assert found(*files) == []
    files[1].write_bytes(whole[:-101])
    ((what, _, said),) = found(*files)
    assert said.endswith("cannot be read in either, and has other bytes")


def test_the_factor_and_the_artifacts_of_vllms_that_differ_are_named(tmp_path):
    old, new = both("vllm", tmp_path)
    factors = new / PIECES / "cache_key_factors.json"
    changed = {**json.loads(factors.read_text()), "config_hash": "other", "env": {"VLLM_X": 1}}
    factors.write_text(json.dumps(changed))
    flip(new / PIECES / "artifact_compile_range_8_8_subgraph_0")
    (new / PIECES / "artifact_compile_range_8_8_subgraph_1").unlink()
    piece = "rank_0_0/backbone/artifact_compile_range_8_8_subgraph"
    label = "entry 1572951577: "
    expected = [
        ("factor", "config_hash", 'config_hash was "cfg" and is "other" now'),
        ("factor", "env.VLLM_X", "env.VLLM_X is 1 now and was not there before"),
        (
            "artifact",
            f"{piece}_0",
            f"compiled_artifact {piece}_0 (piece 0 for num_tokens=8) has other bytes, 175866 as before",
        ),
        (
            "artifact",
            f"{piece}_1",
            f"compiled_artifact {piece}_1 (piece 1 for num_tokens=8) is missing or cannot be read in the second",
        ),
    ]
    assert found(old, new) == [(what, label + path, label + said) for what, path, said in expected]
    assert found(f"{old}:1572", f"{new}:1572") == expected
    assert found("1572", f"{new}:1572", cache_dir=old) == expected
    assert found(f"{old}:1572", new) == expected


def test_entries_that_only_one_side_has_are_named_and_one_of_a_kind_is_compared(tmp_path):
    old, new = both("triton", tmp_path)
    shutil.rmtree(old / SCALE)
    assert found(old, new) == [("entry", SCALE, f"entry {SCALE} is only in the second")]
    assert found(new, old) == [("entry", SCALE, f"entry {SCALE} is only in the first")]
    (new / SCALE).rename(new / f"{SCALE[:-1]}A")
    old = unpack("triton", tmp_path / "c")
    (moved,) = found(old, new)
    assert moved[2] == f"entry {SCALE} is only in the first, and {SCALE[:-1]}A only in the second"


def test_a_member_of_a_file_is_compared_whatever_the_file_is_called(tmp_path):
    old, new = both("compiled_artifact", tmp_path)
    assert found(old, new.rename(new.with_name("renamed"))) == []
    flip(new.with_name("renamed"))
    *_, (what, _, said) = found(old, new.with_name("renamed"))
    assert (what, said.endswith(" as before")) == ("artifact", True)


def test_sides_that_are_not_of_one_kind_are_wrong_usage(tmp_path):
    vllm, triton = unpack("vllm", tmp_path), unpack("triton", tmp_path)
    lay_entry(tmp_path / "own")
    for other in (triton, tmp_path / "own"):
        with pytest.raises(UsageError, match="is compared with what the same system wrote alone"):
            diff(str(vllm), str(other))
    with pytest.raises(UsageError, match="is compared with what the same system wrote alone"):
        diff(str(vllm), here=True)
    with pytest.raises(UsageError, match="Several entries fit"):
        diff(f"{vllm}:", f"{vllm}:1572")


def test_the_command_says_it_in_words_and_in_json_and_with_its_exit_code(tmp_path):
    old, new = both("triton", tmp_path)
    harm = "\x1b[2J\u202e" + "x" * 10_000
    metadata = json.loads((new / SCALE / "scale.json").read_text())
    (new / SCALE / "scale.json").write_text(json.dumps({**metadata, "arch": harm}))
    text, document = run_many([(tmp_path, {}, ["diff", str(old), str(new), *rest]) for rest in ([], ["--json"])])
    assert (text.code, document.code) == (3, 3)
    assert f'  factor  entry {SCALE}: arch was "sm90" and is ' in text.out
    assert not {"\x1b", "\u202e"} & set(text.out)
    assert max(map(len, text.out.splitlines())) < 600
    report = document.report
    assert list(report) == ["schema", "equal", "differences"]
    assert list(report["differences"][0]) == ["what", "path", "old", "new", "sentence", "detail"]
    assert [one["path"].rpartition(" ")[2] for one in report["differences"]] == ["arch", "scale.json"]
    assert (report["differences"][0]["old"], report["differences"][0]["new"]) == ("sm90", harm)
    assert run("diff", old, old).code == 0
