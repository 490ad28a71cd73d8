"""`inspect entry`, `artifact`, `graph` and `key` on caches of other systems, on the samples of fixtures/caches."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from cli_harness import REPO, run_many

from cgtool.errors import UsageError
from cgtool.toolkit.inspect.artifact import ArtifactOptions, inspect_artifact
from cgtool.toolkit.inspect.entry import inspect_entry, inspect_key

SCALE = "GH3I6RWKZUZXIUPED6PSHIIXCCFXMBSHBB577KUBWIVR7HYUXOYQ"
BACKBONE = "torch_compile_cache/1572951577/rank_0_0/backbone"
EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def _unpack(name: str, folder: Path) -> Path:
    with tarfile.open(REPO / "fixtures" / "caches" / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("samples")
    names = ("vllm", "vllm-old", "atom", "torch_inductor", "triton", "mega_cache", "compiled_artifact")
    return {name: _unpack(name, folder) for name in names}


def inspected(*asked: tuple[object, ...]):
    return run_many([(Path("/"), {"COLUMNS": "160"}, ["inspect", *map(str, arguments)]) for arguments in asked])


def artifact(cache: Path, name: str, **rest):
    return inspect_artifact(ArtifactOptions(artifact=name, cache_dir=cache, **rest))


def test_an_entry_of_vllms_says_what_is_compiled_and_what_is_not_recorded(samples):
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
    assert lines[-1].startswith("vLLM records no guards, no compile times and no uses")
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
    assert "which files were traced (code_hash)" in key.report["not_recorded"]


def test_a_shape_that_one_piece_lacks_is_a_hole(tmp_path):
    root = _unpack("vllm", tmp_path)
    (root / BACKBONE / "artifact_compile_range_8_8_subgraph_1").unlink()
    report = inspect_entry("1572", cache_dir=root)
    assert json.loads(json.dumps(report.to_json()["holes"])) == [
        {"rank": "0_0", "prefix": "backbone", "piece_index": 1, "shape": {"num_tokens": [8, 8]}}
    ]
    (text,) = inspected(("entry", "1572", "--cache-dir", root))
    assert "Holes:\n  rank 0_0 backbone, piece 1 for num_tokens=8\n" in text.out


def test_an_entry_that_is_not_one_is_asked_for_again(samples):
    for entry, what in ((None, "Several entries fit"), ("x", "No entry fits")):
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
def test_every_system_says_what_it_wrote_of_a_key_and_what_it_did_not(samples, sample, entry, factors):
    report = inspect_key(entry, cache_dir=samples[sample])
    assert len(report.factors) == factors
    assert report.not_recorded.endswith(".")
    assert inspect_entry(entry, cache_dir=samples[sample]).not_recorded.endswith(".")


def test_a_kernel_of_tritons_says_how_it_is_launched_and_what_it_takes(samples):
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


def test_of_a_kernel_whose_code_does_not_say_it_the_name_is_the_metadatas(samples):
    report = artifact(samples["triton"], "add_one.hsaco")
    assert [kernel.to_json() for kernel in report.kernels] == [
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
def test_the_code_that_inductor_generated_is_shown_wherever_it_lies(samples, sample, name, kernels):
    report = artifact(samples[sample], name.replace("1572/", "1572951577/"))
    assert kernels in [kernel.name for kernel in report.kernels]
    assert all("import torch" in source.text for source in report.contents.sources)
    assert report.contents.sources
    assert report.contents.warnings == ()


def test_a_piece_of_vllms_is_named_as_one_of_cgtools_is(samples):
    assert artifact(samples["vllm"], "1572/4", shape="8", rank=0).artifact.path.endswith("range_8_8_subgraph_4")
    assert artifact(samples["vllm-old"], "1517/2").artifact.shape == {}
    for options, what in (
        ({}, "Several artifacts fit"),
        ({"shape": "9"}, "No artifact fits"),
        ({"shape": "8", "rank": 1}, "No artifact fits"),
        ({"variant": 0}, "have no variants"),
    ):
        with pytest.raises(UsageError, match=what):
            artifact(samples["vllm"], "1572/4", **options)


def test_the_graph_that_vllm_wrote_is_shown_and_others_have_none(samples):
    text, document, drawn, other = inspected(
        ("graph", "1572", "--cache-dir", samples["vllm"]),
        ("graph", "1572", "--cache-dir", samples["vllm"], "--json"),
        ("graph", "1572", "--cache-dir", samples["vllm"], "--svg", "x.svg"),
        ("graph", "GH3I", "--cache-dir", samples["triton"]),
    )
    written = (samples["vllm"] / BACKBONE / "computation_graph.py").read_text()
    assert (text.code, text.out.rstrip()) == (0, written.replace("\t", "    ").rstrip())
    assert list(document.report) == ["schema", "system", "root", "entry", "path", "text"]
    assert document.report["text"] == written
    assert drawn.code == 2
    assert "hold no pieces to draw" in drawn.err
    assert (other.code, other.out) == (1, "")
    assert "holds no graph: of other systems only vLLM and ATOM write one" in other.err


def test_what_a_stranger_wrote_does_no_harm(tmp_path):
    root = _unpack("triton", tmp_path)
    harm = "\x1b[2J\u202e[bold]" + "x" * 10_000
    metadata = json.loads((root / SCALE / "scale.json").read_text())
    (root / SCALE / "scale.json").write_text(
        json.dumps({**metadata, "name": harm, "\ud800\n": "\ud800", "shared": harm})
    )
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
