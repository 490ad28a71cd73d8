"""`cgtool warm` on a small model, with the adaptor that needs no compiler."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from cache_samples import resealed
from cli_harness import environment, run
from test_cli_inspect import ARTIFACT_KEYS, ENTRY_KEYS

pytestmark = pytest.mark.torch

SAMPLE = Path(__file__).with_name("cli_sample_model.py")
EXTRA_KEYS = "hit compiled reused trace_secs compile_secs reasons notes variants_proved ranks start"


def warm(factory, root, *arguments, **options):
    return run("warm", f"{SAMPLE}:{factory}", "--adaptor", "eager", "--cache-dir", root, *arguments, **options)


def tree(root):
    """Return every file under a folder with its modification time, except the stamps of use."""
    return sorted((str(p), p.stat().st_mtime_ns) for p in root.rglob("*") if p.is_file() and "state" not in p.parts)


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    """Warm a cache once, in its own folder; return the cache, the run and the folder."""
    folder = tmp_path_factory.mktemp("warmed")
    dump = json.dumps({"debug_dump_path": str(folder / "dump")})
    return folder / "cache", warm("build", folder / "cache", "--compilation-config", dump, cwd=folder), folder


def test_the_first_warm_prints_a_table_and_the_commands_that_load_it(warmed):
    root, ran, folder = warmed
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0].startswith(f"Warmed {SAMPLE}:build: 4 compiled in ")
    assert "3 pieces, 1 splitting, 2 unique" in lines[1]
    assert lines[2].split() == ["pieces", "shape", "shared", "by", "artifact", "seconds", "size"]
    assert [line.split()[:2] for line in lines[3:7]] == [
        ["0", "general"],
        ["2", "general"],
        ["0", "num_tokens=1"],
        ["2", "num_tokens=1"],
    ]
    assert lines[7:9] == [
        "Load it in Python:",
        f"  import cgtool; model = cgtool.load(module, cache_dir='{root}')",
    ]
    started = subprocess.run(
        ["bash", "-c", lines[-1]],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(),
        check=False,
        timeout=120,
    )
    assert started.returncode == 0, started.stderr
    assert started.stdout.startswith("tensor(")


def test_progress_of_every_phase_is_plain_lines_on_stderr(warmed):
    _, ran, _ = warmed
    lines = ran.err.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "model",
        "trace 1/2",
        "trace 2/2",
        "split",
        "compile 1/4",
        "compile 2/4",
        "compile 3/4",
        "compile 4/4",
        "prove",
        "Compiled because",
    ]
    assert lines[3] == "split: 3 pieces, split at torch.nn.functional.scaled_dot_product_attention"
    named = [line.split(": ", 1)[1].rpartition(" (")[0] for line in lines[4:8]]
    assert sorted(named) == [
        "piece 0 (general)",
        "piece 0 (num_tokens=1)",
        "piece 2 (general)",
        "piece 2 (num_tokens=1)",
    ]
    assert lines[8].startswith("prove: the whole call (")
    assert lines[9] == "Compiled because: nothing has been warmed for this model"
    assert "\x1b" not in ran.err


def test_the_graph_and_the_program_are_dumped_by_entry_and_rank_even_on_a_hit(warmed):
    root, _, folder = warmed
    (entry,) = (root / "torch_compile_cache").glob("*/rank_0/backbone")
    assert warm("build", root, "--dump", "again", "--json", cwd=folder).report["hit"]
    for dump in (folder / "dump", folder / "again"):
        place = dump / entry.relative_to(root / "torch_compile_cache")
        assert [path for path in dump.rglob("*") if path.is_file() and path.parent != place] == []
        assert {path.name: path.read_bytes() for path in place.iterdir()} == {
            name: (entry / name).read_bytes() for name in ("computation_graph.py", "transformed_code.py")
        }


def test_a_second_warm_traces_and_compiles_nothing_and_reports_the_same_entry_as_inspect(warmed):
    root, _, _ = warmed
    before = tree(root)
    ran = warm("build", root, "--json")
    assert ran.code == 0
    report = ran.report
    assert (report["hit"], report["compiled"], report["reused"], report["trace_secs"]) == (True, 0, 4, 0.0)
    model_line, hit_line = ran.err.splitlines()
    assert model_line.startswith("model: ")
    assert hit_line == f"hit: {report['hash'][:10]}"
    assert tree(root) == before
    (entry,) = run("inspect", "cache", root, "--json").report["entries"]
    assert " ".join(report) == f"schema root {ENTRY_KEYS} {EXTRA_KEYS}"
    assert {key: report[key] for key in entry if key != "last_used"} == {
        key: entry[key] for key in entry if key != "last_used"
    }
    assert all(" ".join(artifact) == ARTIFACT_KEYS for artifact in entry["artifacts"])


def test_inspect_graph_shows_the_warmed_pieces(warmed):
    root, _, _ = warmed
    report = run("inspect", "graph", "--cache-dir", root, "--json").report
    assert [piece["splitting"] for piece in report["pieces"]] == [False, True, False]
    assert [piece["shapes"] for piece in report["pieces"]] == [[{}], [], [{}]]
    assert Path(report["computation_graph"]).is_file()


def test_check_of_a_warm_model_is_0_and_writes_nothing(warmed):
    root, _, _ = warmed
    before = tree(root)
    ran = warm("build", root, "--check")
    assert ran.code == 0
    assert ran.out == f"{SAMPLE}:build is warm: the cache at {root} has a matching entry.\n"
    assert tree(root) == before


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        pytest.param(
            ["--compile-sizes", "16"], "2 artifacts are missing, for the shape num_tokens=16", id="incomplete"
        ),
        pytest.param(["--arg", "width=16"], "first.weight", id="stale"),
    ],
)
def test_check_of_an_incomplete_or_stale_entry_gives_reasons_and_compiles_nothing(warmed, arguments, reason):
    root, _, _ = warmed
    before = tree(root)
    ran = warm("build", root, "--check", "--json", *arguments)
    assert ran.code == 3
    report = ran.report
    assert (report["schema"], report["hit"], report["compiled"]) == (2, False, 0)
    assert any(reason in sentence for sentence in report["reasons"])
    assert tree(root) == before


def test_check_of_a_missing_cache_is_3_and_creates_no_folder(tmp_path):
    ran = warm("build", tmp_path / "none", "--check", "--quiet")
    assert ran.code == 3
    assert ran.err == ""
    assert ran.out == (
        f"{SAMPLE}:build is not warm. Run the same command without --check to warm it. Reasons:\n"
        "  - nothing has been warmed for this model\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_warnings_of_libraries_are_hidden_by_default(tmp_path):
    ran = warm("chatty", tmp_path / "none", "--check")
    assert ran.code == 3
    assert "a library warns" not in ran.err


def test_quiet_leaves_stderr_empty(warmed):
    root, _, _ = warmed
    ran = warm("build", root, "--quiet")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith(f"{SAMPLE}:build was warm already: 4 artifacts in place, nothing traced or compiled.\n")


def test_output_of_the_models_code_and_of_libraries_goes_to_stderr_with_verbose(warmed):
    root, _, _ = warmed
    ran = warm("chatty", root, "--check", "--json", "--verbose")
    assert ran.report["schema"] == 2
    assert "a library warns" in ran.err
    assert "a model speaks" in ran.err


MODELS = {
    "no such file": ("missing.py:build", 1, "missing.py does not exist."),
    "no factory": (f"{SAMPLE}:nope", 1, f"{SAMPLE} has no factory nope."),
    "no factory named": (str(SAMPLE), 2, "Name its factory too"),
    "factory raises": (f"{SAMPLE}:raising", 1, "return undefined_name"),
    "factory ends the process": (f"{SAMPLE}:ending", 1, "sys.exit(0)"),
    "factory returns something else": (f"{SAMPLE}:number", 1, "returned int"),
    "no module": ("no_such_module_anywhere:build", 1, "There is no module no_such_module_anywhere."),
}


@pytest.mark.parametrize(("model", "code", "sentence"), MODELS.values(), ids=MODELS)
def test_a_model_that_cannot_be_built_is_an_error_and_writes_nothing(tmp_path, model, code, sentence):
    ran = run("warm", model, "--cache-dir", "cache", "--json", cwd=tmp_path)
    assert ran.code == code
    error = ran.report["error"]
    assert sentence in error["message"]
    assert error["exit_code"] == code
    assert ran.err.startswith("Error: ")
    assert "Traceback" not in ran.err
    assert list(tmp_path.iterdir()) == []


def test_a_splitting_op_that_is_not_in_the_graph_lists_the_graphs_ops(tmp_path):
    ran = warm("build", tmp_path / "cache", "--splitting-ops", "nope::attention", "--json")
    assert ran.code == 2
    error = ran.report["error"]
    assert error["type"] == "UnmatchedSplittingOpError"
    assert "does not contain the splitting op 'nope::attention'" in error["message"]
    assert "torch.nn.functional.scaled_dot_product_attention" in error["message"]
    assert list(tmp_path.rglob("manifest.json")) == []


def test_a_plain_size_is_ambiguous_with_two_dynamic_dimensions(tmp_path):
    ran = warm("two_dims", tmp_path / "cache", "--compile-sizes", "8")
    assert ran.code == 2
    assert "2 dynamic dimensions (batch, seq)" in ran.err


def test_without_a_cpp_compiler_the_default_adaptor_fails_early_and_eager_works(tmp_path):
    """One error, and no entry in which every piece falls back to eager."""
    root, env = tmp_path / "cache", {"PATH": str(tmp_path)}
    ran = run("warm", f"{SAMPLE}:plain", "--cache-dir", root, env=env)
    assert (ran.code, ran.out) == (2, "")
    (message,) = [line for line in ran.err.splitlines() if line.startswith("Error: ")]
    assert message == ran.err.splitlines()[-1]
    # this is the message of the check before the trace: torch fails only seconds later, with its own message
    assert "'aot_inductor' needs a C++ compiler, and none works here (there is no g++)" in message
    assert "Install one" in message
    assert "--adaptor eager" in message
    assert list(root.rglob("manifest.json")) == []
    assert warm("plain", root, env=env).code == 0


def test_a_cache_folder_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "file").write_text("no folder")
    ran = warm("build", tmp_path / "file" / "cache", "--json")
    assert ran.code == 1
    error = ran.report["error"]
    assert error["type"] == "CacheError"
    assert str(tmp_path / "file") in error["path"]
    assert "Traceback" not in ran.err
    assert (tmp_path / "file").read_text() == "no folder"


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_a_cache_folder_without_permission_is_an_error(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o555)
    ran = warm("build", folder)
    assert ran.code == 1
    assert "permission denied" in ran.err


def test_an_invalid_manifest_is_replaced_with_a_warning_only_for_its_rank_and_prefix(tmp_path):
    root = tmp_path / "cache"
    place = ("--rank", "2", "--prefix", "head")
    report = warm("plain", root, *place, "--json").report
    assert (report["rank"], report["prefix"]) == (2, "head")
    assert "rank=2, prefix='head')" in report["start"]
    manifest = root / "torch_compile_cache" / report["hash"] / "rank_2" / "head" / "manifest.json"
    sound = manifest.read_bytes()
    manifest.chmod(0o644)
    manifest.write_bytes(resealed(sound, {"schema": 99}))
    ran = warm("plain", root, *place, "--json")
    assert (ran.code, ran.report["hit"]) == (0, False)
    assert "unknown field `schema`. Warm the model again to replace it" in ran.err
    assert list(json.loads(manifest.read_bytes())) == list(json.loads(sound))
