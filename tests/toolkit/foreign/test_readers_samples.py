"""Every figure that the readers report of sample caches, which the systems themselves wrote."""

from __future__ import annotations

import json
import os

import pytest
from foreign_samples import (
    AOT,
    AOT_KEY,
    FX_KEY,
    HASH,
    RANK,
    SAMPLES,
    SCALE,
    TORCH_KEY,
    WRITTEN,
    artifact_of,
    entry_of,
    unpack,
)

from cgtool.plan.shapes import shape_text
from cgtool.toolkit.foreign.detect import SYSTEMS, detect, read_foreign
from cgtool.toolkit.foreign.records import ForeignCache, foreign_json

CACHE_KEYS = "system version root entries size_bytes warnings deletion"
ENTRY_KEYS = (
    "name kind path artifacts size_bytes num_files created last_used ranks prefixes factors problems deletable why_not"
)
ARTIFACT_KEYS = "path what size_bytes rank prefix shape piece_index holds_pickle target members problems"


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    return {name: unpack(name, folder) for name in SAMPLES}


@pytest.fixture(scope="module")
def caches(samples):
    return {name: read_foreign(path) for name, path in samples.items()}


@pytest.mark.parametrize(("name", "system"), SAMPLES.items())
def test_each_sample_is_detected_and_has_the_documented_json(samples, caches, name, system):
    assert detect(samples[name]) == system
    assert system in SYSTEMS
    cache: ForeignCache = caches[name]
    assert (cache.system, cache.warnings) == (system, ())
    report = json.loads(json.dumps(foreign_json(cache), allow_nan=False))
    assert " ".join(report) == CACHE_KEYS
    for entry in report["entries"]:
        assert " ".join(entry) == ENTRY_KEYS
        assert entry["created"] == WRITTEN
        assert entry["last_used"] is None
        assert bool(entry["why_not"]) is not entry["deletable"]
        for artifact in entry["artifacts"]:
            assert " ".join(artifact) == ARTIFACT_KEYS


def test_vllms_index_of_ranges_gives_shapes_pieces_and_keys(samples, caches):
    cache = caches["vllm"]
    assert (cache.version, cache.root) == ("ranges", samples["vllm"] / "torch_compile_cache")
    assert cache.size_bytes == 1_639_373
    names = ["1572951577", "2e78731c30", f"torch_aot_compile/{AOT}"]
    assert [entry.name for entry in cache.entries] == names
    entry = cache.entries[0]
    assert (entry.kind, entry.ranks, entry.prefixes) == ("model", ("0_0",), ("backbone",))
    assert (entry.size_bytes, entry.num_files, entry.deletable) == (1_126_000, 9, True)
    assert entry.factors == {
        "code_hash": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "compiler_hash": "c921eff703",
        "config_hash": "cfg",
        "env": {},
    }
    rows = [(shape_text(artifact.shape), artifact.piece_index, artifact.size_bytes) for artifact in entry.artifacts]
    assert rows == [
        ("num_tokens=1-2048", 4, 177444),
        ("num_tokens=8", 0, 175866),
        ("num_tokens=8", 1, 194580),
        ("num_tokens=8", 4, 176999),
        ("num_tokens=1-2048", 0, 176603),
        ("num_tokens=1-2048", 1, 195340),
    ]
    assert {(artifact.what, artifact.holds_pickle) for artifact in entry.artifacts} == {("compiled_artifact", True)}
    first = entry.artifacts[0]
    assert first.path == "rank_0_0/backbone/artifact_compile_range_1_2048_subgraph_4"
    assert first.members == (
        "inductor frtegqejvikrc4kahxm7pv62qqtiwehow5hrveholctdarf5lygl (96059 bytes, pickle protocol 4)",
        "aot_autograd ao7ntiis26nriyofzmrvaja5sfvflbacvapbkrey4poqvkae72zv (80976 bytes, pickle protocol 4)",
    )
    (problem,) = entry.all_problems()
    assert problem == (
        "rank_0_0/backbone/vllm_compile_cache.py was moved and still names files under "
        "/home/user/.cache/vllm/torch_compile_cache/1572951577/rank_0_0/backbone: a process that opens them misses"
    )


def test_vllms_aot_model_is_described_and_not_unpickled(caches):
    entry = entry_of(caches["vllm"], f"torch_aot_compile/{AOT}")
    assert (entry.kind, entry.size_bytes, entry.num_files, entry.deletable) == ("aot_model", 486_526, 1, True)
    (model,) = entry.artifacts
    assert (model.path, model.what, model.rank) == ("rank_0_0/model", "aot_model", "0_0")
    assert (model.holds_pickle, model.members, model.problems) == (True, ("pickle protocol 4",), ())


def test_an_entry_without_artifacts_has_ranks_and_factors(caches):
    entry = entry_of(caches["vllm"], "2e78731c30")
    assert (entry.kind, entry.ranks, entry.prefixes, entry.artifacts) == ("model", ("0_0",), ("backbone",), ())
    assert entry.factors["compiler_hash"] == "7d445ae951"
    assert (entry.size_bytes, list(entry.all_problems())) == (26_847, [])


@pytest.mark.parametrize("part", ["torch_compile_cache", HASH])
def test_vllms_cache_is_read_from_its_folder_and_from_an_entrys_folder(samples, part):
    path = samples["vllm"] / part
    assert detect(path) == "vllm"
    entry = entry_of(read_foreign(path), "1572951577")
    artifact = artifact_of(entry, "rank_0_0/backbone/artifact_compile_range_8_8_subgraph_0")
    assert artifact.shape == {"num_tokens": (8, 8)}
    assert (entry.ranks, entry.prefixes, entry.deletable) == (("0_0",), ("backbone",), True)
    assert detect(samples["vllm"] / RANK) is None


def test_vllms_older_index_names_code_and_graphs_of_the_inductor_cache(caches):
    cache = caches["vllm-old"]
    assert cache.version == "shapes"
    (entry,) = cache.entries
    assert (entry.name, entry.ranks, entry.prefixes, entry.size_bytes) == ("1517964802", ("0_0",), (), 97_654)
    *rows, shared = entry.artifacts
    assert [(None if row.shape is None else shape_text(row.shape), row.piece_index) for row in rows] == [
        ("general", 0),
        ("general", 2),
        ("num_tokens=8", 0),
    ]
    code = "rank_0_0/inductor_cache/5l/c5lx63dblzpjkzwsomda37ybbrxoiqdowok7da245wuy3huk2yvw.py"
    assert {(row.path, row.what, row.size_bytes, row.holds_pickle) for row in rows} == {
        (code, "generated_code", 96_653, True)
    }
    assert {row.members for row in rows} == {(f"compiled graph {FX_KEY}",)}
    assert (shared.path, shared.what, shared.size_bytes) == ("rank_0_0/inductor_cache", "inductor_cache", 96_653)
    assert list(entry.all_problems()) == []


def test_atoms_unpacked_artifacts_are_read(caches):
    cache = caches["atom"]
    assert cache.system == "atom"
    old, unpacked = cache.entries
    assert (old.name, old.ranks, old.prefixes, old.size_bytes) == ("0c6f1d2b7e", ("0",), ("backbone",), 97_648)
    assert [(None if row.shape is None else shape_text(row.shape), row.piece_index) for row in old.artifacts] == [
        ("general", 0),
        ("general", 2),
        ("num_tokens=8", 0),
        (None, None),
    ]
    assert (unpacked.name, unpacked.ranks, unpacked.size_bytes) == ("9b41aa03d5", ("0", "1"), 320_398)
    folders = [
        (row.path, row.rank, shape_text(row.shape), row.piece_index, row.size_bytes) for row in unpacked.artifacts
    ]
    assert folders == [
        ("rank_0/backbone/artifact_shape_8_subgraph_0", "0", "num_tokens=8", 0, 159_941),
        ("rank_1/backbone/artifact_shape_8_subgraph_0", "1", "num_tokens=8", 0, 159_941),
    ]
    for row in unpacked.artifacts:
        assert (row.what, row.holds_pickle, row.members) == (
            "unpacked_artifact",
            True,
            ("3 files, 2 of them pickles",),
        )
        assert row.problems == ()
    assert all("/home/user/.cache/atom/" in problem and "moved" in problem for problem in unpacked.problems)
    assert len(unpacked.problems) == 2


def test_torchs_folder_has_an_entry_per_graph_and_one_for_shared_code(samples, caches):
    cache = caches["torch_inductor"]
    assert (cache.size_bytes, cache.version) == (379_262, None)
    kinds = [(entry.name, entry.kind, entry.size_bytes, entry.num_files, entry.deletable) for entry in cache.entries]
    assert kinds == [
        (FX_KEY, "graph", 88_498, 1, True),
        (AOT_KEY, "autograd_graph", 78_584, 1, True),
        ("generated code", "generated_code", 212_180, 13, False),
        ("other files", "other", 0, 6, False),
    ]
    assert entry_of(cache, FX_KEY).path == samples["torch_inductor"] / "fxgraph" / FX_KEY[1:3] / FX_KEY
    assert entry_of(cache, AOT_KEY).path == samples["torch_inductor"] / "aotautograd" / AOT_KEY
    (graph,) = entry_of(cache, FX_KEY).artifacts
    assert (graph.what, graph.holds_pickle, graph.members) == ("compiled_graph", True, ("pickle protocol 4",))
    code = entry_of(cache, "generated code").artifacts
    native = [(row.path[:2], row.size_bytes, row.target) for row in code if row.what == "native_code"]
    assert native == [
        ("24", 17_872, "x86_64"),
        ("73", 20_192, "x86_64"),
        ("bm", 59_608, "x86_64"),
        ("q6", 20_192, "x86_64"),
        ("th", 20_408, "x86_64"),
        ("wk", 53_344, "x86_64"),
    ]
    assert sum(row.what == "generated_code" for row in code) == 7
    assert not any(row.holds_pickle for row in code)
    assert [problem for entry in cache.entries for problem in entry.all_problems()] == []


def test_tritons_kernels_have_targets_and_report_that_they_were_moved(samples, caches):
    cache = caches["triton"]
    assert (cache.version, cache.size_bytes) == ("triton 3.9.0", 69_191)
    assert [(entry.kind, entry.size_bytes, entry.num_files, entry.deletable) for entry in cache.entries] == [
        ("kernel", 21_500, 8, True),
        ("kernel", 20_721, 8, True),
        ("kernel", 26_970, 8, True),
    ]
    entry = entry_of(cache, SCALE)
    facts = ("name", "num_warps", "num_stages", "shared", "target")
    assert [entry.factors[fact] for fact in facts] == [
        "scale",
        4,
        3,
        0,
        {"backend": "cuda", "arch": 90, "warp_size": 32},
    ]
    assert [(row.path, row.what, row.target) for row in entry.artifacts] == [
        ("__grp__scale.json", "metadata", None),
        ("scale.cubin", "kernel_binary", "cuda:90"),
        ("scale.json", "metadata", None),
        ("scale.llir", "kernel_code", "cuda:90"),
        ("scale.ptx", "kernel_code", "cuda:90"),
        ("scale.source", "kernel_code", "cuda:90"),
        ("scale.ttgir", "kernel_code", "cuda:90"),
        ("scale.ttir", "kernel_code", "cuda:90"),
    ]
    (problem,) = entry.all_problems()
    assert problem == (
        f"__grp__scale.json was moved and still names files under /tmp/sample/triton/{SCALE}: Triton opens those or "
        "compiles again"
    )
    amd = cache.entries[2]
    assert {row.target for row in amd.artifacts if row.what == "kernel_binary"} == {"hip:gfx942"}


def test_a_mega_cache_lists_its_members_without_opening_one(samples, caches):
    cache = caches["mega_cache"]
    (entry,) = cache.entries
    assert (entry.kind, entry.path, entry.size_bytes, entry.deletable) == (
        "mega_cache",
        samples["mega_cache"],
        167_330,
        True,
    )
    members = [(row.path, row.what, row.size_bytes, row.holds_pickle, row.members) for row in entry.artifacts]
    assert members == [
        (f"inductor/{FX_KEY}", "member", 88_498, True, ("pickle protocol 4",)),
        (f"aot_autograd/{AOT_KEY}", "member", 78_584, True, ("pickle protocol 4",)),
    ]
    assert list(entry.all_problems()) == []


def test_a_compiled_artifact_states_the_torch_that_wrote_it(caches):
    (entry,) = caches["compiled_artifact"].entries
    assert (entry.kind, entry.size_bytes, entry.factors) == ("artifact", 155_664, {"torch_key": TORCH_KEY})
    (artifact,) = entry.artifacts
    assert (artifact.what, artifact.holds_pickle, len(artifact.members)) == ("compiled_artifact", True, 2)


@pytest.mark.parametrize("name", SAMPLES)
def test_sizes_add_up_and_reading_keeps_access_times(samples, caches, name):
    cache = caches[name]
    assert sum(entry.size_bytes for entry in cache.entries) == cache.size_bytes
    path = samples[name]
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    assert cache.size_bytes == sum(file.stat().st_size for file in files)
    assert {file.stat().st_atime for file in files} == {files[0].stat().st_mtime}


def test_a_hard_linked_file_is_counted_once(samples, tmp_path):
    path = unpack("triton", tmp_path)
    folder = path / SCALE
    os.link(folder / "scale.cubin", folder / "again.cubin")
    entry = entry_of(read_foreign(path), SCALE)
    assert (entry.size_bytes, entry.num_files) == (21_500, 9)


def test_a_read_after_the_write_is_the_last_use(tmp_path):
    path = unpack("triton", tmp_path)
    os.utime(path / SCALE / "scale.cubin", (1_800_000_000, 1_700_000_000))
    entry = entry_of(read_foreign(path), SCALE)
    assert (entry.created, entry.last_used) == ("2023-11-14T22:13:20.000Z", "2027-01-15T08:00:00.000Z")


def test_samples_do_not_hold_paths_of_the_machine_that_made_them(samples):
    for path in samples.values():
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.is_file():
                assert b"/home/" not in file.read_bytes().replace(b"/home/user/", b""), file
