"""`inspect cache` on caches of other systems, run as a user runs it, on the samples of fixtures/caches."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from cli_harness import REPO, lay_entry, run, run_many

KEYS = [
    "schema",
    "system",
    "version",
    "root",
    "entries",
    "size_bytes",
    "warnings",
    "deletion",
    "num_entries",
    "matching",
    "num_problems",
]
SCALE = "GH3I6RWKZUZXIUPED6PSHIIXCCFXMBSHBB577KUBWIVR7HYUXOYQ"


def _unpack(name: str, folder: Path) -> Path:
    with tarfile.open(REPO / "fixtures" / "caches" / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    names = ("vllm", "atom", "torch_inductor", "triton", "mega_cache", "compiled_artifact")
    return {name: _unpack(name, folder) for name in names}


def _inspect(samples, *asked):
    """Run `inspect cache` for each (sample, more arguments...)."""
    folder = next(iter(samples.values())).parent
    return run_many(
        [(folder, {"COLUMNS": "120"}, ["inspect", "cache", str(samples[name]), *rest]) for name, *rest in asked]
    )


def test_each_sample_is_one_table_and_one_json_document(samples):
    tables = _inspect(samples, *((name,) for name in samples))
    assert [ran.code for ran in tables] == [0] * 6
    rows = {name: ran.out.splitlines() for name, ran in zip(samples, tables, strict=True)}
    heading = [
        "entry",
        "kind",
        "ranks",
        "holds",
        "shapes",
        "artifacts",
        "size",
        "created",
        "read",
        "deletable",
        "problems",
    ]
    assert all(lines[0].split() == heading for lines in rows.values())
    assert rows["vllm"][1].split()[:8] == [
        "1572951577",
        "model",
        "0_0",
        "backbone",
        "num_tokens=1-2048,",
        "num_tokens=8",
        "6",
        "1.1",
    ]
    root = samples["vllm"] / "torch_compile_cache"
    total, deletion = rows["vllm"][-2:]
    assert total == f"vLLM's cache (ranges): 3 entries in {root}, 1.6 MiB on the disk; 1 problem"
    assert deletion.startswith("A hash folder may be removed whole: vLLM compiles it again. It takes no locks")
    assert rows["atom"][2].split()[:5] == ["9b41aa03d5", "model", "0", "1", "backbone"]
    assert rows["torch_inductor"][-2].endswith(", 370.4 KiB on the disk")
    assert rows["triton"][1].split()[:5] == ["GH3I6RWKZUZXIUPED6PSHII…", "kernel", "-", "scale", "cuda:90"]
    assert rows["mega_cache"][2].split()[:2] == ["artifact", "what"]
    assert "1572951577: rank_0_0/backbone/vllm_compile_cache.py names files under" in tables[0].err.replace("\n", " ")

    documents = [ran.report for ran in _inspect(samples, *((name, "--json") for name in samples))]
    assert all(list(document) == KEYS for document in documents)
    assert [(document["schema"], document["system"], document["num_entries"]) for document in documents] == [
        (2, "vllm", 3),
        (2, "atom", 2),
        (2, "torch_inductor", 4),
        (2, "triton", 3),
        (2, "mega_cache", 1),
        (2, "compiled_artifact", 1),
    ]
    assert [document["num_problems"] for document in documents] == [1, 2, 0, 3, 0, 0]
    assert documents[0]["entries"][0]["artifacts"][0]["shape"] == {"num_tokens": [1, 2048]}


def test_entries_are_filtered_sorted_and_limited(samples):
    home = str(samples["triton"].parent)
    (tilde,) = run_many([(Path("/"), {"HOME": home}, ["inspect", "cache", "~/triton", "--json"])])
    assert tilde.report["root"] == str(samples["triton"])
    small, largest, wrong, strange = _inspect(
        samples,
        ("triton", "--json", "--filter", "size<21KB"),
        ("triton", "--json", "--sort", "size", "--limit", "1"),
        ("triton", "--filter", "model~x"),
        ("triton", "--sort", "hits"),
    )
    assert [entry["name"][:4] for entry in small.report["entries"]] == ["LFHN"]
    assert (small.report["matching"], small.report["num_entries"], small.report["num_problems"]) == (1, 3, 1)
    assert [entry["name"][:4] for entry in largest.report["entries"]] == ["YF6K"]
    assert (largest.report["matching"], largest.report["size_bytes"]) == (3, 69_191)
    assert (wrong.code, strange.code) == (2, 2)
    assert "names no field that entries of other systems have" in wrong.err.replace("\n", " ")


def test_what_a_stranger_wrote_does_no_harm_on_a_terminal_or_in_json(tmp_path):
    path = _unpack("triton", tmp_path)
    harm = "\x1b[2J\u202e" + "x" * 10_000
    (path / SCALE / "__grp__scale.json").write_text('{"child_paths": {"\\u001b[2J\\u202e%s": "/x"}}' % ("x" * 10_000))
    (path / SCALE / "scale.json").write_text('{"name": "\\u001b[2J\\u202e[bold]%s"}' % ("x" * 10_000))
    (path / "a\x1b[2Jb").write_text("1")
    (path / SCALE / "x\nError: y.so").touch()
    table, document = run_many(
        [(tmp_path, {"COLUMNS": "120"}, ["inspect", "cache", str(path), *rest]) for rest in ([], ["--json"])]
    )
    assert (table.code, document.code) == (0, 0)
    for said in (table.out, table.err, document.out, document.err):
        assert "\x1b[2J" not in said
        assert "\u202e" not in said
    assert "Error:" in table.err
    assert not any(line.startswith("Error:") for line in table.err.splitlines())
    assert max(map(len, table.out.splitlines())) < 400
    assert len(table.err) < 5_000
    assert r"\x1b[2J\u202e[bold]xxx" in table.out
    entry = next(entry for entry in document.report["entries"] if entry["name"] == SCALE)
    assert entry["factors"]["name"] == f"{harm[:5]}[bold]{'x' * 10_000}"


def test_cgtools_own_cache_and_what_no_one_knows_go_the_usual_way(tmp_path):
    hash_ = lay_entry(tmp_path / "own")
    (tmp_path / "file").write_bytes(b"hello")
    own, file, missing = run_many(
        [(tmp_path, {}, ["inspect", "cache", name, "--json"]) for name in ("own", "file", "missing")]
    )
    assert [entry["hash"] for entry in own.report["entries"]] == [hash_]
    assert "system" not in own.report
    assert (file.code, missing.code) == (1, 1)
    assert "is a file and not a cache folder" in file.report["error"]["message"]
    assert "does not exist" in missing.report["error"]["message"]


def test_verify_says_of_another_systems_cache_that_it_is_one(samples):
    (ran,) = run_many([(Path("/"), {"COLUMNS": "400"}, ["verify", str(samples["vllm"] / "torch_compile_cache")])])
    root = samples["vllm"]
    said = f"Error: {root} holds a cache of another system (vllm). Look into it with: cgtool inspect cache {root}\n"
    assert (ran.code, ran.out, ran.err) == (1, "", said)


def test_a_folder_of_other_things_is_no_cache_and_an_empty_one_is_an_empty_cache(tmp_path):
    home, empty, begun = (tmp_path / name for name in ("home\x1b[2J", "empty", "begun"))
    (home / "Documents").mkdir(parents=True)
    (home / ".profile").write_text("export A=1\n")
    empty.mkdir()
    (begun / "torch_compile_cache").mkdir(parents=True)
    asked = [["inspect", "cache", str(path), "--json"] for path in (home, empty, begun)]
    by_variable = {"CGTOOL_CACHE_DIR": str(home)}
    runs = [*((tmp_path, {}, arguments) for arguments in [*asked, ["inspect", "cache", str(home)]])]
    runs += [(tmp_path, by_variable, ["inspect", "cache"]), (tmp_path, {}, ["verify", str(home)])]
    document, of_empty, of_begun, *plain = run_many(runs)
    said = (
        f"{tmp_path}/home\\x1b[2J is no cache that cgtool knows: none of its own, of vLLM, ATOM, torch's Inductor or "
        "Triton, and no mega-cache file. Name the cache's folder or file."
    )
    assert (document.code, document.report["error"]["message"]) == (1, said)
    assert [(ran.code, ran.out, ran.err) for ran in plain] == [(1, "", f"Error: {said}\n")] * 3
    assert [(ran.code, ran.report["entries"]) for ran in (of_empty, of_begun)] == [(0, []), (0, [])]


def test_the_help_names_the_systems():
    ran = run("inspect", "cache", "--help")
    assert ran.code == 0
    assert "vLLM, ATOM, torch" in " ".join(ran.out.split())
