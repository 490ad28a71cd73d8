"""Detecting the system that wrote a folder."""

from __future__ import annotations

import shutil

import pytest
from cache_samples import files_of, manifest_of, publish, put_row, writer
from foreign_samples import HASH, SCALE, entry_of, unpack

from cgtool.errors import CacheError
from cgtool.store.files import ensure_root
from cgtool.toolkit.foreign.detect import check_known, detect, read_foreign
from cgtool.toolkit.foreign.formats import parse_json


def test_a_missing_empty_or_unrelated_folder_is_not_detected(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "strange" / "ab").mkdir(parents=True)
    (tmp_path / "strange" / "ab" / "note.txt").write_text("hello")
    for path in (tmp_path / "missing", tmp_path / "empty", tmp_path / "strange", tmp_path / ("x" * 300)):
        assert detect(path) is None
        assert read_foreign(path) is None
    with pytest.raises(CacheError, match="is not a cache of cgtool, vLLM, ATOM, torch's Inductor or Triton") as caught:
        check_known(tmp_path / "strange")
    assert caught.value.path == tmp_path / "strange"


@pytest.mark.parametrize("inner", ["", "torch_compile_cache"])
def test_cgtools_cache_is_detected_by_its_keys_or_its_tag(cache_root, inner):
    ensure_root(cache_root)
    assert detect(cache_root) == "cgtool"
    to = writer(cache_root)
    to.publish(manifest_of(to, (put_row(to),)), files_of("one"))
    (cache_root / "CACHEDIR.TAG").unlink()
    path = cache_root / inner if inner else cache_root
    assert detect(path) == "cgtool"
    rank = cache_root / "torch_compile_cache" / to.name.hash / "rank_0"
    assert [detect(part) for part in (rank.parent, rank, rank / "backbone")] == [None] * 3
    assert read_foreign(path) is None


def test_a_copied_entry_is_detected_by_its_key(cache_root, tmp_path):
    name = publish(cache_root)
    shutil.copytree(cache_root / "torch_compile_cache" / name.hash, tmp_path / "torch_compile_cache" / name.hash)
    assert detect(tmp_path) == "cgtool"


def test_tritons_kernels_in_torchs_folder_are_entries(tmp_path):
    path = unpack("torch_inductor", tmp_path)
    shutil.copytree(unpack("triton", tmp_path), path / "triton" / "0")
    assert detect(path) == "torch_inductor"
    cache = read_foreign(path)
    assert cache.version == "triton 3.9.0"
    kernel = entry_of(cache, f"triton/0/{SCALE}")
    assert (kernel.kind, kernel.deletable, kernel.path) == ("kernel", True, path / "triton" / "0" / SCALE)
    assert cache.size_bytes == 379_262 + 69_191 == sum(entry.size_bytes for entry in cache.entries)


def test_folders_that_are_being_removed_are_not_entries(tmp_path):
    torch = unpack("torch_inductor", tmp_path)
    hidden = ".key.12.ab.cgtool-pruned"
    for folder in ("fxgraph/3q", "aotautograd"):
        (child,) = (torch / folder).iterdir()
        child.rename(child.with_name(hidden))
    cache = read_foreign(torch)
    assert [(entry.name, entry.size_bytes) for entry in cache.entries] == [
        ("generated code", 212_180),
        ("other files", 88_498 + 78_584),
    ]
    vllm = unpack("vllm", tmp_path)
    (vllm / HASH).rename((vllm / HASH).with_name(hidden))
    assert [(entry.name, entry.kind) for entry in read_foreign(vllm).entries][:2] == [
        (hidden, "other"),
        ("2e78731c30", "model"),
    ]


@pytest.mark.parametrize("kept", ["fxgraph", "aotautograd", "5l"])
def test_a_part_of_torchs_folder_is_detected(tmp_path, kept):
    path = unpack("torch_inductor", tmp_path)
    for child in path.iterdir():
        if child.name != kept:
            shutil.rmtree(child)
    assert detect(path) == "torch_inductor"
    assert len(read_foreign(path).entries) == 1


def test_tritons_cache_is_detected_from_its_parent_folder(tmp_path):
    path = unpack("triton", tmp_path)
    path.rename(tmp_path / "cache")
    assert detect(tmp_path) == "triton"
    assert read_foreign(tmp_path).root == tmp_path / "cache"


def test_a_triton_launcher_is_not_a_kernel(tmp_path):
    path = unpack("triton", tmp_path)
    launcher = path / ("A" * 52)
    launcher.mkdir()
    (launcher / "__triton_launcher.cpython-311-x86_64-linux-gnu.so").write_bytes(
        b"\x7fELF\x02\x01\x01" + bytes(11) + b"\xb7\0"
    )
    entry = entry_of(read_foreign(path), "A" * 52)
    (artifact,) = entry.artifacts
    assert (entry.kind, list(entry.all_problems())) == ("launcher", [])
    assert (artifact.what, artifact.target) == ("native_code", "aarch64")


def test_unrelated_files_beside_tritons_kernels_are_not_deletable(tmp_path):
    path = unpack("triton", tmp_path)
    (path / "note.txt").write_text("hello")
    (path / "other").mkdir()
    (path / "other" / "x").write_text("12")
    other = entry_of(read_foreign(path), "other files")
    assert (other.kind, other.size_bytes, other.deletable) == ("other", 7, False)


def test_atom_and_vllm_are_distinguished_by_the_spelling_of_ranks(tmp_path):
    path = unpack("atom", tmp_path) / "torch_compile_cache"
    assert detect(path) == "atom"
    for rank in path.glob("*/rank_*"):
        rank.rename(rank.with_name(f"{rank.name}_0"))
    assert detect(path) == "vllm"
    assert [entry.ranks for entry in read_foreign(path).entries] == [("0_0",), ("0_0", "1_0")]


@pytest.mark.parametrize(
    ("target", "shown"),
    [
        pytest.param('["cuda", 80, 32]', "cuda:80", id="older versions"),
        pytest.param('{"backend": "xpu", "arch": "pvc"}', "xpu:pvc", id="another backend"),
        pytest.param("[]", None, id="nothing"),
        pytest.param("80", None, id="a number"),
        pytest.param('{"backend": 1, "arch": true}', None, id="other types"),
    ],
)
def test_the_target_of_a_kernel_comes_from_its_metadata(tmp_path, target, shown):
    path = unpack("triton", tmp_path)
    (path / SCALE / "scale.json").write_text(f'{{"name": "scale", "target": {target}}}')
    entry = entry_of(read_foreign(path), SCALE)
    assert {row.target for row in entry.artifacts if row.what == "kernel_binary"} == {shown}


def test_the_metadata_of_a_kernel_is_unchanged(tmp_path):
    path = unpack("triton", tmp_path)
    entry = entry_of(read_foreign(path), SCALE)
    assert entry.factors == parse_json((path / SCALE / "scale.json").read_bytes())
