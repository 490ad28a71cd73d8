"""`cgtool inspect cache` and `cgtool inspect graph`, on a cache that is created without a compiler."""

from __future__ import annotations

import pytest
from cache_maker import lay_decoder as lay_entry
from cache_samples import resealed
from cli_harness import run

from cgtool.store.layout import CacheLayout, RankName
from cgtool.store.lookup import StateStore

ENTRY_KEYS = (
    "hash rank prefix model level adaptor variants pieces splitting_pieces unique_pieces artifacts fallbacks "
    "size_bytes created last_used shapes unshared_bytes artifact_secs saved_secs hits"
)
CACHE_KEYS = "schema root entries size_bytes warnings num_entries matching matching_bytes unshared_bytes saved_secs"
ARTIFACT_KEYS = "piece_index shape adaptor tuned digest kind size_bytes compile_secs kernels guards proved proof_gap"


def test_the_json_of_a_cache_has_the_documented_fields(tmp_path):
    hash_ = lay_entry(tmp_path)
    layout, name = CacheLayout(root=tmp_path), RankName(hash=hash_, rank=0, prefix="backbone")
    StateStore(layout).record_hit(name)
    ran = run("inspect", "cache", tmp_path, "--json")
    assert (ran.code, ran.err) == (0, "")
    report = ran.report
    assert " ".join(report) == CACHE_KEYS
    assert report["schema"] == 2
    assert report["root"] == str(tmp_path)
    (entry,) = report["entries"]
    assert " ".join(entry) == ENTRY_KEYS
    assert (entry["hash"], entry["rank"], entry["prefix"]) == (hash_, 0, "backbone")
    assert (entry["pieces"], entry["splitting_pieces"], entry["unique_pieces"]) == (5, 2, 3)
    assert [artifact["piece_index"] for artifact in entry["artifacts"]] == [[0], [2], [4]]
    assert (entry["hits"], entry["artifact_secs"], entry["saved_secs"], entry["shapes"]) == (1, 3.75, 3.75, [{}])
    assert entry["created"] <= entry["last_used"]
    held = [*layout.rank_dir(name).iterdir(), *(layout.entry_dir(hash_) / "artifacts").iterdir()]
    assert entry["size_bytes"] == entry["unshared_bytes"] == sum(path.stat().st_size for path in held)
    assert all(" ".join(artifact) == ARTIFACT_KEYS for artifact in entry["artifacts"])


def test_a_cache_in_a_pipe_is_one_line_for_each_entry(tmp_path):
    hashes = [lay_entry(tmp_path, seed=seed) for seed in range(2)]
    ran = run("inspect", "cache", tmp_path)
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert len(lines) == 4  # heading, two entries, total
    assert sorted(line[:10] for line in lines[1:3]) == sorted(hash_[:10] for hash_ in hashes)
    assert lines[-1].startswith(f"2 entries in {tmp_path}, ")


def test_the_folder_below_the_root_is_accepted_as_the_root(tmp_path):
    lay_entry(tmp_path)
    ran = run("inspect", "cache", tmp_path / "torch_compile_cache", "--json")
    assert ran.report["root"] == str(tmp_path)


def test_a_missing_path_fails(tmp_path):
    ran = run("inspect", "cache", tmp_path / "nowhere")
    assert ran.code == 1
    assert ran.out == ""
    assert ran.err == (
        f"Error: {tmp_path}/nowhere does not exist. Name the folder of a cache, or warm a model to make one.\n"
    )


def test_path_and_cache_dir_are_mutually_exclusive(tmp_path):
    ran = run("inspect", "cache", tmp_path, "--cache-dir", tmp_path)
    assert ran.code == 2
    assert "PATH and --cache-dir both name the cache. Give one of them." in ran.err


def test_the_default_cache_is_empty_before_the_first_warm(tmp_path):
    ran = run("inspect", "cache", cwd=tmp_path)
    assert ran.code == 0
    assert ran.out.endswith("is empty. Fill it with: cgtool warm MODEL\n")
    assert run("inspect", "cache", "--json", cwd=tmp_path).report["entries"] == []


def test_the_cache_is_taken_from_the_variable_or_the_configuration_file(tmp_path):
    lay_entry(tmp_path / "by_variable")
    lay_entry(tmp_path / "by_file", seed=1)
    (tmp_path / "cgtool.toml").write_text('cache_dir = "by_file"\n')
    by_file = run("inspect", "cache", "--json", cwd=tmp_path)
    assert by_file.report["root"] == str(tmp_path / "by_file")
    env = {"CGTOOL_CACHE_DIR": str(tmp_path / "by_variable")}
    by_variable = run("inspect", "cache", "--json", cwd=tmp_path, env=env)
    assert by_variable.report["root"] == str(tmp_path / "by_variable")


@pytest.mark.parametrize(
    "arguments", [("inspect", "cache"), ("inspect", "graph", "--cache-dir")], ids=["cache", "graph"]
)
def test_untrusted_names_are_escaped(tmp_path, arguments):
    lay_entry(tmp_path, model="[bold red]Evil\x1b[2J\u202e[/]")
    ran = run(*arguments, tmp_path)
    assert ran.code == 0
    assert "\x1b" not in ran.out
    assert "\u202e" not in ran.out
    assert "[bold red]Evil\\x1b[2J\\u202e[/]" in ran.out


def test_a_newer_schema_is_skipped_with_a_warning_by_cache_and_refused_by_graph(tmp_path):
    hash_ = lay_entry(tmp_path)
    manifest = CacheLayout(root=tmp_path).manifest_file(RankName(hash=hash_, rank=0, prefix="backbone"))
    manifest.write_bytes(resealed(manifest.read_bytes(), {"record": "manifest-99"}))
    listing = run("inspect", "cache", tmp_path)
    assert listing.code == 0
    assert f"Warning: {manifest} has schema 99" in listing.err
    graph = run("inspect", "graph", hash_, "--cache-dir", tmp_path, "--json")
    assert graph.code == 1
    error = graph.report["error"]
    assert error["type"] == "CacheSchemaError"
    assert error["path"] == str(manifest)
    assert (error["expected"], error["actual"]) == (3, 99)
    assert "Update cgtool" in error["message"]


def test_a_flipped_byte_of_the_plan_is_refused(tmp_path):
    hash_ = lay_entry(tmp_path)
    plan = CacheLayout(root=tmp_path).rank_dir(RankName(hash=hash_, rank=0, prefix="backbone")) / "plan.json"
    data = bytearray(plan.read_bytes())
    data[10] ^= 1
    plan.write_bytes(bytes(data))
    ran = run("inspect", "graph", "--cache-dir", tmp_path, "--json")
    assert ran.code == 1
    assert ran.report["error"]["type"] == "CacheCorruptError"


def test_graph_of_the_only_entry(tmp_path):
    hash_ = lay_entry(tmp_path)
    ran = run("inspect", "graph", "--cache-dir", tmp_path)
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0] == f"TinyModel {hash_[:10]} rank 0 backbone"
    assert lines[1] == "variant 0 of 2: prefill, num_tokens any"
    kinds = [line.split()[1] for line in lines[3:8]]
    assert kinds == ["compiled", "toy.attention", "compiled", "toy.attention", "compiled"]


def test_json_of_a_graph(tmp_path):
    hash_ = lay_entry(tmp_path)
    report = run("inspect", "graph", hash_[:4], "--cache-dir", tmp_path, "--json").report
    assert report["schema"] == 2
    assert (report["hash"], report["rank"], report["prefix"], report["variant"]) == (hash_, 0, "backbone", 0)
    assert [variant["name"] for variant in report["variants"]] == ["prefill", "decode"]
    pieces = report["pieces"]
    assert [piece["piece_index"] for piece in pieces] == [0, 1, 2, 3, 4]
    assert [piece["splitting"] for piece in pieces] == [False, True, False, True, False]
    assert len({piece["identity"] for piece in pieces}) == 4
    assert [len(piece["artifacts"]) for piece in pieces] == [1, 0, 1, 0, 1]
    assert pieces[0]["ops"] == {"torch.sin": 1}  # reading a size is not an op
    assert pieces[0]["inputs"] == [{"dtype": "float32", "shape": ["s0", 64], "stride": [64, 1], "device": "cpu"}]


@pytest.mark.parametrize(("variant", "number"), [("0", 0), ("1", 1), ("decode", 1), ("prefill", 0)])
def test_a_variant_can_be_chosen_by_number_or_name(tmp_path, variant, number):
    lay_entry(tmp_path)
    report = run("inspect", "graph", "--cache-dir", tmp_path, "--variant", variant, "--json").report
    assert report["variant"] == number


def test_an_unknown_variant_lists_the_known_ones(tmp_path):
    lay_entry(tmp_path)
    ran = run("inspect", "graph", "--cache-dir", tmp_path, "--variant", "2")
    assert ran.code == 2
    assert ran.err == (
        "Error: There is no variant '2'. Name one of them by its number:\n"
        "  0: prefill, num_tokens any\n"
        "  1: decode, num_tokens=1\n"
    )


def test_an_ambiguous_entry_lists_the_entries(tmp_path):
    hashes = sorted(lay_entry(tmp_path, seed=seed) for seed in range(2))
    ran = run("inspect", "graph", "--cache-dir", tmp_path)
    assert ran.code == 2
    assert ran.err == (
        "Error: Several entries match. Name one of these by its hash, and by --rank and --prefix where the hash is the "
        "same:\n" + "".join(f"  {hash_[:10]} --rank 0 --prefix backbone\n" for hash_ in hashes)
    )


def test_rank_and_prefix_choose_a_part_of_an_entry(tmp_path):
    hash_ = lay_entry(tmp_path)
    assert lay_entry(tmp_path, prefix="eagle_head") == hash_
    assert run("inspect", "graph", hash_, "--cache-dir", tmp_path).code == 2
    report = run("inspect", "graph", hash_, "--prefix", "eagle_head", "--cache-dir", tmp_path, "--json").report
    assert report["prefix"] == "eagle_head"


@pytest.mark.parametrize("entry", ["ffff", "../..", "no hash"])
def test_an_unknown_entry_lists_the_known_ones(tmp_path, entry):
    hash_ = lay_entry(tmp_path)
    ran = run("inspect", "graph", entry, "--cache-dir", tmp_path)
    assert ran.code == 2
    assert ran.err == (
        "Error: No entry matches. Name one of these by its hash, and by --rank and --prefix where the hash is the "
        "same:\n"
        f"  {hash_[:10]} --rank 0 --prefix backbone\n"
    )


def test_graph_of_an_empty_cache_fails(tmp_path):
    ran = run("inspect", "graph", "--cache-dir", tmp_path)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == f"Error: The cache at {tmp_path} holds no entry. Fill it with: cgtool warm MODEL\n"


def test_inspecting_writes_nothing(tmp_path):
    lay_entry(tmp_path)
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    run("inspect", "cache", tmp_path)
    run("inspect", "graph", "--cache-dir", tmp_path)
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before
