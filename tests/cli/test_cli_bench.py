"""`cgtool bench`: a few starts of small models, most of them in forked processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cli_harness import COMMAND, REPO, environment, run

from cgtool.toolkit.bench.ways import WAYS

pytestmark = pytest.mark.torch

LLAMA = f"{REPO / 'fixtures' / 'tiny_llama.py'}:build"
SAMPLE = Path(__file__).with_name("cli_sample_model.py")
MODELS = Path(__file__).with_name("cli_bench_models.py")

REPORT_KEYS = [
    *("schema", "model", "about", "command", "machine", "versions", "dimension", "ways", "notes", "began", "secs"),
]
WAY_KEYS = [
    *("way", "label", "adaptor", "error", "log", "bytes", "summary", "steps", "ratios", "outputs", "prepare", "starts"),
]
START_KEYS = (
    *("import_secs", "build_secs", "ready_secs", "ready_imported", "dimension", "steps", "rss_bytes", "device_bytes"),
    *("weights", "outputs", "torch", "process_secs", "round", "counted"),
)


#: Arguments of a bench of the fixture, which ends with the folder to keep.
KEPT = (LLAMA, "--ways", "cgtool/eager", "--json", "--arg", "num_layers=1", "--tokens", "1,8", "--keep")


def bench(model, *arguments, tmp, forks=True, **options):
    """Run a bench with its temporary folders below `tmp`, and check that it leaves nothing there."""
    tmp.mkdir(exist_ok=True)
    env = {"TMPDIR": str(tmp), **options.pop("env", {})}
    ran = run("bench", model, *arguments, env=env, forks=forks, **options)
    assert list(tmp.iterdir()) == []
    return ran


def by_name(report):
    return {way["way"]: way for way in report["ways"]}


@pytest.fixture(scope="module")
def benched(tmp_path_factory):
    """Bench the fixture with the adaptor that needs no compiler; return the run and the folder with its files."""
    folder = tmp_path_factory.mktemp("benched")
    few = ["--starts", "2", "--repeats", "3"]
    ran = bench(*KEPT, folder / "keep", *few, "--html", folder / "bench.html", tmp=folder / "tmp", cwd=folder)
    return ran, folder


def test_the_report_has_its_schema(benched):
    ran, _ = benched
    assert ran.code == 0, ran.err
    report = ran.report
    assert list(report) == REPORT_KEYS
    assert (report["schema"], report["model"], report["dimension"]) == (1, LLAMA, "num_tokens")
    assert report["versions"]["torch"] == __import__("torch").__version__
    assert report["command"][:3] == ["cgtool", "bench", LLAMA]
    assert report["machine"]["cores"] == os.cpu_count()
    for way in report["ways"]:
        assert list(way) == WAY_KEYS
        assert way["error"] is None
        assert all(start.keys() >= {*START_KEYS} for start in way["starts"])


def test_each_way_has_a_warm_up_and_the_given_number_of_starts(benched):
    ways = by_name(benched[0].report)
    assert list(ways) == ["eager", "cgtool/eager"]
    # the first start of eager produces the outputs that all others are compared with
    assert [start["counted"] for start in ways["eager"]["starts"]] == [False, False, True, True]
    assert [start["round"] for start in ways["cgtool/eager"]["starts"]] == [None, 0, 1]


def test_summaries_are_medians_of_the_counted_starts(benched):
    for way in benched[0].report["ways"]:
        counted = [start for start in way["starts"] if start["counted"]]
        for phase in ("import_secs", "build_secs", "ready_secs"):
            values = [start[phase] for start in counted]
            assert way["summary"][phase]["median"] == pytest.approx(sum(values) / 2)
            assert min(values) > 0
        assert (
            sum(counted[0][phase] for phase in ("import_secs", "build_secs", "ready_secs")) < counted[0]["process_secs"]
        )
        assert set(way["steps"]) == {"1", "8"}
        assert all(step["median"] > 0 for step in way["steps"].values())
        assert 50 * 2**20 < way["summary"]["rss_bytes"]["median"] < 8 * 2**30


def test_outputs_are_compared_with_eager_for_the_example_and_each_size(benched):
    ways = by_name(benched[0].report)
    for way in ways.values():
        assert way["outputs"]["equal"] is True
        assert all(set(start["outputs"]) == {"example", "1", "8"} for start in way["starts"])
    assert len({start["weights"] for way in ways.values() for start in way["starts"]}) == 1


def test_cgtools_way_reports_its_bytes_its_preparation_and_its_ratio(benched):
    way = by_name(benched[0].report)["cgtool/eager"]
    assert way["adaptor"] == "eager"
    assert way["bytes"] > 1000
    assert way["prepare"]["work_secs"]["median"] > 0
    assert way["ratios"]["eager"]["ready_secs"]["pairs"] == 2
    assert way["ratios"]["eager"]["ready_secs"]["low"] is None


def test_progress_is_a_plain_line_for_each_completed_process(benched):
    lines = [line for line in benched[0].err.splitlines() if not line.startswith("Note: ")]
    assert lines[0].startswith("start: eager, the reference for the outputs (")
    assert lines[1].startswith("prepare: cgtool, eager (")
    assert [line.split(":")[0] for line in lines[2:]] == ["start 0/4"] * 2 + [f"start {n}/4" for n in (1, 2, 3, 4)]


def test_the_page_shows_this_bench(benched):
    text = (benched[1] / "bench.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "cgtool, eager" in text
    assert text.count('<i class="ready"') == 4


def test_the_text_output_has_tables(tmp_path):
    few = ["--ways", "eager", "--starts", "1", "--warm-ups", "0", "--tokens", "4"]
    ran = bench(f"{SAMPLE}:build", *few, tmp=tmp_path / "tmp")
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert lines[0] == f"Ways to start {SAMPLE}:build: medians (quartiles), ratios [95 % bound]"
    assert lines[1].split()[:4] == ["way", "import", "build", "ready"]
    assert lines[2].split()[0] == "eager"
    assert lines[4] == "Time per step, by num_tokens"
    assert "torch" in lines[-1]


def test_a_way_that_fails_is_reported_and_the_others_continue(tmp_path):
    arguments = ["--ways", "cgtool/eager", "--starts", "1", "--warm-ups", "0", "--tokens", "", "--json"]
    ran = bench(f"{MODELS}:breaks", *arguments, tmp=tmp_path / "tmp")
    assert ran.code == 0, ran.err
    ways = by_name(ran.report)
    assert (ways["eager"]["error"], len(ways["eager"]["starts"])) == (None, 2)
    failed = ways["cgtool/eager"]
    assert failed["starts"] == []
    assert any("print" in line or "break" in line.lower() for line in failed["log"])
    assert failed["error"].startswith("GraphBreakError: ")


@pytest.mark.slow
def test_weights_that_do_not_depend_on_the_seed_are_detected(tmp_path):
    arguments = ["--ways", "eager", "--starts", "1", "--warm-ups", "0", "--tokens", "", "--json"]
    report = bench(f"{MODELS}:unseeded", *arguments, tmp=tmp_path / "tmp", forks=False).report
    assert by_name(report)["eager"]["outputs"]["equal"] is False
    assert [note.split(":")[0] for note in report["notes"] if "busy" not in note] == [
        "The weights differ from start to start, so the outputs cannot be compared",
        "eager",
    ]
    seeded = bench(f"{MODELS}:seeded", *arguments, tmp=tmp_path / "tmp", forks=False).report
    assert by_name(seeded)["eager"]["outputs"] == {"equal": True, "worst": 0.0, "tolerance": 1e-4, "problem": None}


def test_a_model_that_crashes_eagerly_ends_the_bench_with_the_signal(tmp_path):
    ran = bench(f"{MODELS}:crashes", "--ways", "eager", "--json", tmp=tmp_path / "tmp")
    assert ran.code == 1
    assert ran.report["error"]["type"] == "ModelError"
    assert "The model does not run eagerly: it crashed with SIGSEGV" in ran.err


def test_a_missing_model_is_the_same_error_as_in_warm(tmp_path):
    model = f"{tmp_path}/nothing.py:build"
    ran = bench(model, "--ways", "eager", tmp=tmp_path / "tmp")
    assert ran.code == run("warm", model, "--cache-dir", tmp_path / "cache").code
    assert "Traceback" not in ran.err
    (message,) = (line for line in ran.err.splitlines() if line.startswith("Error: "))
    advice = "MODEL is path/to/file.py:factory: name the file that defines the factory."
    assert message == f"Error: {tmp_path}/nothing.py does not exist. {advice}"


def test_a_kept_folder_is_reused_by_fresh_processes_which_import_nothing_to_load(benched, tmp_path):
    first = by_name(benched[0].report)["cgtool/eager"]
    assert first["prepare"]["reused"] is False
    few = ("--starts", "1", "--warm-ups", "0")
    ran = bench(*KEPT, benched[1] / "keep", *few, tmp=tmp_path / "tmp", forks=False)
    way = by_name(ran.report)["cgtool/eager"]
    assert way["prepare"]["reused"] is True
    assert way["prepare"]["work_secs"] == first["prepare"]["work_secs"]
    assert len(way["starts"]) == 1
    assert way["starts"][0]["ready_imported"] == []
    assert "prepare" not in ran.err


def test_a_kept_folder_serves_only_the_same_model(benched, tmp_path):
    keep = benched[1] / "keep"
    other = bench(*KEPT, keep, "--arg", "draw_on_device=true", tmp=tmp_path / "tmp")
    assert other.code == 2
    assert f"{keep} was prepared with a different model. Give --keep another folder." in other.err
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "letter.txt").write_text("mine")
    refused = bench(f"{SAMPLE}:build", "--keep", strange, tmp=tmp_path / "tmp")
    assert (refused.code, [path.name for path in strange.iterdir()]) == (2, ["letter.txt"])


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, id="Ctrl-C"),
        pytest.param(signal.SIGTERM, 143, id="SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_a_signal_leaves_no_process_and_no_folder(tmp_path, number, code):
    pids, tmp = tmp_path / "pids", tmp_path / "tmp"
    tmp.mkdir()
    process = subprocess.Popen(
        [*COMMAND, "bench", f"{MODELS}:slow", "--arg", f"pids={pids}", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(TMPDIR=str(tmp)),
    )
    started = _wait_for_pids(pids, 2)
    assert [folder.name.startswith("cgtool-bench-") for folder in tmp.iterdir()] == [True]
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, json.loads(out)["error"]["exit_code"]) == (code, code)
    assert "Traceback" not in err
    assert list(tmp.iterdir()) == []
    assert [pid for pid in started if _runs(pid)] == []


def test_a_process_that_exceeds_the_timeout_is_killed_with_its_children(tmp_path):
    pids = tmp_path / "pids"
    for secs in (1, 4, 16, 64):  # until it is enough for the model to start its child
        ran = bench(f"{MODELS}:slow", "--arg", f"pids={pids}", "--timeout", secs, tmp=tmp_path / "tmp")
        assert ran.code == 1
        assert f"it took longer than {secs} s and was ended (allow more with --timeout)" in ran.err
        if pids.is_file() and len(pids.read_text().split()) == 2:
            break
    assert [pid for pid in _wait_for_pids(pids, 2) if _runs(pid)] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ways", "eagre"], "no way 'eagre'; the nearest is 'eager'"),
        (["--tokens", "1,x"], "'x' is not a size"),
        (["--starts", "torch=many"], "--starts"),
        (["--size-dim", "batch", "--ways", "eager"], "no dynamic dimension 'batch'"),
    ],
)
def test_usage_errors(tmp_path, arguments, message):
    ran = bench(f"{SAMPLE}:build", *arguments, tmp=tmp_path / "tmp")
    assert ran.code in {1, 2}
    assert message in " ".join(ran.err.split())


@pytest.mark.slow
def test_every_way_runs_the_fixture_and_equals_eager(tmp_path):
    arguments = ["--arg", "num_layers=2", "--starts", "1", "--warm-ups", "0", "--tokens", "1,8", "--json"]
    report = bench(LLAMA, *arguments, tmp=tmp_path / "tmp", forks=False).report
    ways = by_name(report)
    assert list(ways) == list(WAYS)
    assert {name: way["error"] for name, way in ways.items() if way["error"]} == {}
    assert all(way["outputs"]["equal"] for way in ways.values())
    # torch's precompiled function is compiled for the general shape and refuses a single token
    assert [name for name, way in ways.items() if "error" in way["steps"]["1"]] == ["aot-precompile"]
    assert ways["compile-cold"]["starts"][0]["ready_secs"] > ways["compile-warm"]["starts"][0]["ready_secs"]


@pytest.mark.gpu
@pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="needs a CUDA device")
def test_the_report_has_the_name_and_the_memory_of_a_gpu(tmp_path):
    arguments = ["--device", "cuda", "--ways", "cgtool/eager", "--starts", "1", "--tokens", "8", "--json"]
    large = ["--arg", "draw_on_device=true", "--dtype", "bfloat16"]
    report = bench(LLAMA, *arguments, *large, tmp=tmp_path / "tmp", forks=False).report
    assert report["machine"]["gpu"]
    for way in report["ways"]:
        assert way["error"] is None
        assert way["outputs"]["equal"]
        assert way["summary"]["device_bytes"]["median"] > 2**16


def _wait_for_pids(path, count):
    """Return the process ids in a file once it has `count` of them."""
    until = time.monotonic() + 90
    while time.monotonic() < until:
        pids = path.read_text().split() if path.is_file() else []
        if len(pids) >= count:
            return [int(pid) for pid in pids]
        time.sleep(0.1)
    return pytest.fail("the model was never built")


def _runs(pid):
    """Return whether a process is running; a zombie is not."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except FileNotFoundError:
        return False
