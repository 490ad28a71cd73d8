"""`cgtool inspect` on caches of other systems, the samples of fixtures/caches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cache_maker import lay_decoder as lay_entry
from cli_harness import run
from foreign_samples import PIECES, SAMPLES, SCALE, unpack

from cgtool.errors import UsageError
from cgtool.toolkit.foreign.records import foreign_json
from cgtool.toolkit.inspect.artifact import inspect_artifact
from cgtool.toolkit.inspect.entry import inspect_entry, inspect_key

KEYS = [
    *("schema", "system", "version", "root", "entries", "size_bytes", "warnings", "deletion", "num_entries"),
    *("matching", "num_problems"),
]
EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("samples")
    return {name: unpack(name, folder) for name in SAMPLES}


def _inspect(samples, *runs):
    """Run `inspect cache` for each (sample, more arguments...)."""
    return [run("inspect", "cache", samples[name], *rest) for name, *rest in runs]


def test_each_sample_is_one_table_and_one_json_document(samples):
    names = [name for name in samples if name != "vllm-old"]
    tables = _inspect(samples, *((name,) for name in names))
    assert [ran.code for ran in tables] == [0] * 6
    rows = {name: ran.out.splitlines() for name, ran in zip(names, tables, strict=True)}
    heading = "entry kind ranks holds shapes artifacts size created read deletable problems"
    assert all(lines[0].split() == heading.split() for lines in rows.values())
    found = "1572951577 model 0_0 backbone num_tokens=1-2048, num_tokens=8 6 1.1"
    assert rows["vllm"][1].split()[:8] == found.split()
    root = samples["vllm"] / "torch_compile_cache"
    total, deletion = rows["vllm"][-2:]
    assert total == f"vLLM's cache (ranges): 3 entries in {root}, 1.6 MiB on disk; 1 problem"
    assert deletion.startswith("A hash folder may be removed whole: vLLM compiles it again. It takes no locks")
    assert rows["atom"][2].split()[:5] == ["9b41aa03d5", "model", "0", "1", "backbone"]
    assert rows["torch_inductor"][-2].endswith(", 370.4 KiB on disk")
    assert rows["triton"][1].split()[:5] == ["GH3I6RWKZUZXIUPED6PSHII…", "kernel", "-", "scale", "cuda:90"]
    assert rows["mega_cache"][2].split()[:2] == ["artifact", "what"]
    assert "1572951577: rank_0_0/backbone/vllm_compile_cache.py was moved and still names files under" in tables[
        0
    ].err.replace("\n", " ")

    documents = [ran.report for ran in _inspect(samples, *((name, "--json") for name in names))]
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
    tilde = run("inspect", "cache", "~/triton", "--json", env={"HOME": home})
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
    assert "does not name a field of another system's entries" in wrong.err.replace("\n", " ")


def test_untrusted_names_are_escaped_in_a_listing(tmp_path):
    path = unpack("triton", tmp_path)
    harm = "\x1b[2J\u202e" + "x" * 10_000
    (path / SCALE / "__grp__scale.json").write_text('{"child_paths": {"\\u001b[2J\\u202e%s": "/x"}}' % ("x" * 10_000))
    (path / SCALE / "scale.json").write_text('{"name": "\\u001b[2J\\u202e[bold]%s"}' % ("x" * 10_000))
    (path / "a\x1b[2Jb").write_text("1")
    (path / SCALE / "x\nError: y.so").touch()
    table, document = (run("inspect", "cache", path, *rest) for rest in ([], ["--json"]))
    assert (table.code, document.code) == (0, 0)
    for text in (table.out, table.err, document.out, document.err):
        assert "\x1b[2J" not in text
        assert "\u202e" not in text
    assert "Error:" in table.err
    assert not any(line.startswith("Error:") for line in table.err.splitlines())
    assert max(map(len, table.out.splitlines())) < 400
    assert len(table.err) < 5_000
    assert r"\x1b[2J\u202e[bold]xxx" in table.out
    entry = next(entry for entry in document.report["entries"] if entry["name"] == SCALE)
    assert entry["factors"]["name"] == f"{harm[:5]}[bold]{'x' * 10_000}"


def test_cgtools_own_cache_is_listed_and_unknown_files_are_errors(tmp_path):
    hash_ = lay_entry(tmp_path / "own")
    (tmp_path / "file").write_bytes(b"hello")
    own, file, missing = (run("inspect", "cache", tmp_path / name, "--json") for name in ("own", "file", "missing"))
    assert [entry["hash"] for entry in own.report["entries"]] == [hash_]
    assert "system" not in own.report
    assert (file.code, missing.code) == (1, 1)
    assert "is a file and not a cache folder" in file.report["error"]["message"]
    assert "does not exist" in missing.report["error"]["message"]


def test_an_empty_folder_is_an_empty_cache_and_a_folder_with_other_files_is_not(tmp_path):
    home, empty, begun = (tmp_path / name for name in ("home\x1b[2J", "empty", "begun"))
    (home / "Documents").mkdir(parents=True)
    (home / ".profile").write_text("export A=1\n")
    empty.mkdir()
    (begun / "torch_compile_cache").mkdir(parents=True)
    document, of_empty, of_begun = (run("inspect", "cache", path, "--json") for path in (home, empty, begun))
    by_variable = run("inspect", "cache", env={"CGTOOL_CACHE_DIR": str(home)})
    plain = [run("inspect", "cache", home), by_variable, run("verify", home)]
    message = (
        f"{tmp_path}/home\\x1b[2J is not a cache of cgtool, vLLM, ATOM, torch's Inductor or Triton, and not a "
        "mega-cache file. Name the cache's folder or file."
    )
    assert (document.code, document.report["error"]["message"]) == (1, message)
    assert [(ran.code, ran.out, ran.err) for ran in plain] == [(1, "", f"Error: {message}\n")] * 3
    assert [(ran.code, ran.report["entries"]) for ran in (of_empty, of_begun)] == [(0, []), (0, [])]


def test_the_help_names_the_systems():
    ran = run("inspect", "cache", "--help")
    assert ran.code == 0
    assert "vLLM, ATOM, torch" in " ".join(ran.out.split())


def inspected(*runs: tuple[object, ...]):
    return [run("inspect", *arguments) for arguments in runs]


def artifact(cache: Path, name: str, **rest):
    return inspect_artifact(name, cache_dir=cache, **rest)


def test_an_entry_of_vllm_shows_its_coverage_and_what_is_not_recorded(samples):
    text, document, key = inspected(
        ("entry", "1572", "--cache-dir", samples["vllm"]),
        ("entry", "1572", "--cache-dir", samples["vllm"], "--json"),
        ("key", "1572", "--cache-dir", samples["vllm"], "--json"),
    )
    lines = text.out.splitlines()
    assert (text.code, lines[0]) == (0, "1572951577")
    assert lines[1] == "model, 6 artifacts, 1.1 MiB, rank 0_0, 1 part: backbone"
    assert lines[2:4] == ["Compiled:", "  rank 0_0 backbone, pieces 0, 1, 4 for num_tokens=1-2048, num_tokens=8"]
    assert lines[5].split() == ["artifact", "what", "rank", "shape", "piece", "target", "size", "pickle"]
    assert lines[-1].startswith("vLLM does not record guards, compile times and uses")
    report = document.report
    assert list(report) == ["schema", "system", "version", "root", "entry", "shapes", "holes", "not_recorded"]
    assert (report["schema"], report["system"], report["version"]) == (2, "vllm", "ranges")
    assert (report["shapes"], report["holes"]) == ([{"num_tokens": [1, 2048]}, {"num_tokens": [8, 8]}], [])
    assert (report["entry"]["name"], len(report["entry"]["artifacts"])) == ("1572951577", 6)
    assert list(key.report) == ["schema", "system", "root", "entry", "factors", "not_recorded"]
    assert [(factor["name"], factor["value"]) for factor in key.report["factors"]] == [
        ("code_hash", EMPTY_SHA256),
        ("compiler_hash", "c921eff703"),
        ("config_hash", "cfg"),
        ("env", {}),
    ]
    assert "the traced files (code_hash)" in key.report["not_recorded"]


def test_a_shape_that_one_piece_lacks_is_a_hole(tmp_path):
    root = unpack("vllm", tmp_path)
    (root / PIECES / "artifact_compile_range_8_8_subgraph_1").unlink()
    report = inspect_entry("1572", cache_dir=root)
    assert json.loads(json.dumps(foreign_json(report)["holes"])) == [
        {"rank": "0_0", "prefix": "backbone", "piece_index": 1, "shape": {"num_tokens": [8, 8]}}
    ]
    (text,) = inspected(("entry", "1572", "--cache-dir", root))
    assert "Holes:\n  rank 0_0 backbone, piece 1 for num_tokens=8\n" in text.out


def test_an_ambiguous_or_unknown_entry_lists_the_entries(samples):
    for entry, what in ((None, "Several entries match"), ("x", "No entry matches")):
        with pytest.raises(UsageError, match=what) as error:
            inspect_entry(entry, cache_dir=samples["vllm"])
        assert str(error.value).splitlines()[1:3] == ["  1572951577", "  2e78731c30"]
    assert inspect_entry("723f", cache_dir=samples["vllm"]).entry.kind == "aot_model"
    assert inspect_entry("gh3i", cache_dir=samples["triton"]).entry.name == SCALE


@pytest.mark.parametrize(
    ("sample", "entry", "factors"),
    [
        ("vllm-old", None, 0),
        ("atom", "9b41", 0),
        ("torch_inductor", "f3q", 0),
        ("triton", "GH3I", 38),
        ("mega_cache", None, 0),
        ("compiled_artifact", None, 1),
    ],
)
def test_the_key_of_every_system_shows_its_factors_and_what_is_not_recorded(samples, sample, entry, factors):
    report = inspect_key(entry, cache_dir=samples[sample])
    assert len(report.factors) == factors
    assert report.not_recorded.endswith(".")
    assert inspect_entry(entry, cache_dir=samples[sample]).not_recorded.endswith(".")


def test_a_triton_kernel_shows_its_launch_parameters_and_resources(samples):
    text, document = inspected(
        ("artifact", "scale.cubin", "--cache-dir", samples["triton"]),
        ("artifact", f"{SCALE}/scale.cubin", "--cache-dir", samples["triton"], "--json"),
    )
    lines = text.out.splitlines()
    assert lines[:2] == [f"{SCALE}/scale.cubin", "kernel_binary, 5.7 KiB, for cuda:90"]
    assert {"  num_warps: 4", "  shared: 0", "  triton_version: 3.9.0"} <= set(lines)
    assert lines[-1].split() == ["scale", "6", "0", "560"]
    report = document.report
    assert list(report) == [
        *("schema", "system", "root", "entry", "artifact", "kernels", "facts", "compiler", "members", "sources"),
        "warnings",
    ]
    assert report["kernels"] == [{"name": "scale", "registers": 6, "shared_bytes": 0, "constant_bytes": 560}]
    assert (report["facts"]["num_warps"], report["facts"]["architectures"]) == (4, ["sm_90"])
    assert (report["entry"], report["artifact"]["path"], report["sources"]) == (SCALE, "scale.cubin", [])


def test_the_name_of_a_kernel_is_taken_from_its_metadata_if_the_code_has_none(samples):
    report = artifact(samples["triton"], "add_one.hsaco")
    assert report.to_json()["kernels"] == [
        {"name": "add_one", "registers": None, "shared_bytes": None, "constant_bytes": None}
    ]
    assert report.contents.compiler.startswith("Linker: LLD")
    (source,) = artifact(samples["triton"], f"{SCALE}/scale.ptx").contents.sources
    assert (source.language, ".visible .entry scale(" in source.text) == ("text", True)


@pytest.mark.parametrize(
    ("sample", "name", "kernels"),
    [
        ("vllm", "1572/rank_0_0/backbone/artifact_compile_range_1_2048_subgraph_0", "cpp_fused_clone_split_1"),
        ("vllm", "model", "cpp_fused_mul_silu_split_1"),
        ("atom", "rank_0/backbone/artifact_shape_8", "cpp_fused_mul_silu_0"),
        ("torch_inductor", "fr6li6", "cpp_fused_silu_1"),
        ("torch_inductor", "5l/", "cpp_fused_silu_1"),
        ("mega_cache", "inductor/", "cpp_fused_silu_1"),
        ("compiled_artifact", "compiled_artifact", "cpp_fused_mul_silu_0"),
    ],
)
def test_code_that_inductor_generated_is_shown_for_every_system(samples, sample, name, kernels):
    report = artifact(samples[sample], name.replace("1572/", "1572951577/"))
    assert kernels in [kernel.name for kernel in report.kernels]
    assert all("import torch" in source.text for source in report.contents.sources)
    assert report.contents.sources
    assert report.contents.warnings == ()


def test_a_piece_of_vllm_is_named_like_one_of_cgtool(samples):
    assert artifact(samples["vllm"], "1572/4", shape="8", rank=0).artifact.path.endswith("range_8_8_subgraph_4")
    assert artifact(samples["vllm-old"], "1517/2").artifact.shape == {}
    for options, what in (
        ({}, "Several artifacts match"),
        ({"shape": "9"}, "No artifact matches"),
        ({"shape": "8", "rank": 1}, "No artifact matches"),
        ({"variant": 0}, "have no variants"),
    ):
        with pytest.raises(UsageError, match=what):
            artifact(samples["vllm"], "1572/4", **options)


def test_other_commands_refuse_caches_of_other_systems(samples):
    vllm, file = samples["vllm"], samples["mega_cache"]
    rans = inspected(("graph", "1572", "--cache-dir", vllm), ("graph", "--cache-dir", file))
    rans += [run("diff", vllm, vllm), run("verify", vllm / "torch_compile_cache")]
    rans.append(run("prune", vllm, "--yes"))
    for ran, system in zip(rans, ("vllm", "mega_cache", *["vllm"] * 3), strict=True):
        assert (ran.code, ran.out) == (1, "")
        assert f"is a cache of another system ({system}), which cgtool can only inspect" in ran.err


def test_untrusted_text_is_escaped_in_entries_keys_and_artifacts(tmp_path):
    root = unpack("triton", tmp_path)
    harm = "\x1b[2J\u202e[bold]" + "x" * 10_000
    metadata = json.loads((root / SCALE / "scale.json").read_text())
    (root / SCALE / "scale.json").write_text(json.dumps({**metadata, "name": harm, "\x1b\n": "\u202e", "shared": harm}))
    (root / SCALE / "scale.ptx").write_text(harm + "\n\x1b]0;owned\x07")
    (root / SCALE / "x\nError: y.ptx").write_text("1")
    (root / SCALE / "z.cubin").symlink_to("/etc/passwd")
    ran = inspected(
        *(("entry", "GH3I", "--cache-dir", root, *json_) for json_ in ((), ("--json",))),
        *(("key", "GH3I", "--cache-dir", root, *json_) for json_ in ((), ("--json",))),
        *(("artifact", "scale.ptx", "--cache-dir", root, *json_) for json_ in ((), ("--json",))),
        ("artifact", "x", "--cache-dir", root),
        ("artifact", f"{SCALE}/", "--cache-dir", root),
        ("artifact", "z.cubin", "--cache-dir", root),
    )
    assert [one.code for one in ran] == [0] * 7 + [2, 2]
    for one in ran:
        assert not {"\x1b", "\u202e", "\x07"} & set(one.out + one.err)
        assert not any(line.startswith("Error: y") for line in (one.out + one.err).splitlines())
    assert max(len(line) for one in ran[:4:2] for line in one.out.splitlines()) < 400
    assert ran[5].report["sources"][0]["text"].startswith(harm[:9])
