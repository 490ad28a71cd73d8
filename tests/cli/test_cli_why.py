"""`cgtool why`: a hit, misses with their reasons and the command that fixes them, and the JSON report."""

from __future__ import annotations

import io
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from cli_harness import environment, run

from cgtool.cli.output import Output
from cgtool.cli.why import show_why
from cgtool.store.layout import CacheLayout
from cgtool.store.pruned import Pruned, PrunedEntry, all_pruned
from cgtool.toolkit.why import EntryFacts, Reason, WhyReport, _reasons

SAMPLE = Path(__file__).with_name("cli_sample_model.py")
NO_DYNAMO = (
    "import sys; from cgtool.cli.main import main; code = main(sys.argv[1:]); "
    "sys.exit(99 if {'torch._dynamo', 'torch._inductor'} & set(sys.modules) else code)"
)


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    """Warm a model in its own folder; return the folder and the hash of the entry."""
    folder = tmp_path_factory.mktemp("why")
    (folder / "sample.py").write_text(SAMPLE.read_text())
    ran = run("warm", folder / "sample.py:build", "--adaptor", "eager", "--cache-dir", folder / "cache", "-q")
    assert ran.code == 0, ran.err
    (hash_,) = [path.name for path in (folder / "cache" / "torch_compile_cache").glob("?" * 64)]
    return folder, hash_


def files(folder):
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))


@pytest.mark.torch
def test_a_hit_names_the_entry_writes_nothing_and_does_not_import_dynamo(warmed):
    folder, hash_ = warmed
    before = files(folder / "cache")
    # torch's fake mode imports Dynamo's settings; real weights do not need it
    model = f"{folder}/sample.py:build"
    arguments = (model, "--adaptor", "eager", "--cache-dir", f"{folder}/cache", "--weights", "real")
    command = [sys.executable, "-c", NO_DYNAMO, "why", *arguments, "--quiet"]
    done = subprocess.run(command, env=environment(), check=False, timeout=300, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    entry = f"Sample {hash_[:10]} (rank 0 backbone, created 20"
    assert done.stdout.startswith(f"{model} hits in {folder}/cache: {entry}")
    assert done.stdout.endswith(", never used).\n")
    assert files(folder / "cache") == before


@pytest.mark.torch
@pytest.mark.parametrize("command", [("why",), ("warm", "--check")])
def test_queries_do_not_count_as_misses_of_a_pruned_entry(warmed, tmp_path, command):
    folder, _ = warmed
    arguments = (*command, f"{folder}/sample.py:build", "--adaptor", "eager", "--cache-dir", tmp_path)
    shutil.copytree(folder / "cache", tmp_path, dirs_exist_ok=True)
    assert run("prune", "--cache-dir", tmp_path, "--max-size", "0", "--yes").code == 0
    (record,) = all_pruned(CacheLayout(root=tmp_path))
    before = files(tmp_path)
    ran = run(*arguments)
    assert ran.code == 3
    assert f"ntry {record.entries[0].hash[:10]} " in ran.out
    assert "was pruned " in ran.out
    assert files(tmp_path) == before
    assert all_pruned(CacheLayout(root=tmp_path))[0].misses == 0


@pytest.mark.torch
def test_an_edited_line_is_shown_with_the_command_that_fixes_the_miss(warmed, tmp_path):
    folder, hash_ = warmed
    text = (folder / "sample.py").read_text()
    line = next(number for number, code in enumerate(text.splitlines(), start=1) if "unsqueeze(0)" in code)
    (tmp_path / "sample.py").write_text(text.replace("self.first(x).unsqueeze(0)", "self.first(x + 1).unsqueeze(0)"))
    arguments = (f"{tmp_path}/sample.py:build", "--adaptor", "eager", "--cache-dir", f"{folder}/cache")
    ran = run("why", *arguments, "--json")
    assert ran.code == 3
    report = ran.report
    assert list(report) == ["schema", "root", "hit", "entry", "nearest", "reasons", "run", "pruned"]
    assert (report["schema"], report["root"], report["hit"], report["entry"]) == (1, f"{folder}/cache", False, None)
    assert list(report["nearest"]) == ["hash", "rank", "prefix", "model", "created", "last_used", "hits"]
    assert (report["nearest"]["hash"], report["nearest"]["model"], report["nearest"]["hits"]) == (hash_, "Sample", 0)
    was, now = ("hidden = self.first(x).unsqueeze(0)", "hidden = self.first(x + 1).unsqueeze(0)")
    assert report["reasons"] == [
        {
            "sentence": f"sources.sample has changed: sample.py, line {line}, in forward: `{was}` is `{now}` now",
            "detail": [f"- sample.py:{line}, in forward: {was}", f"+ sample.py:{line}: {now}"],
        }
    ]
    assert report["pruned"] is None
    assert shlex.split(report["run"]) == ["cgtool", "warm", *arguments]


@pytest.mark.torch
def test_a_size_that_was_not_compiled_is_a_reason(warmed):
    folder, hash_ = warmed
    model = f"{folder}/sample.py:build"
    arguments = (model, "--adaptor", "eager", "--cache-dir", f"{folder}/cache", "--compile-sizes", "8")
    ran = run("why", *arguments, "--quiet")
    assert (ran.code, ran.err) == (3, "")
    lines = ran.out.splitlines()
    assert lines[0].startswith(f"{model} misses. The nearest entry, Sample {hash_[:10]} (rank 0 backbone, created 20")
    assert lines[0].endswith(", does not match because:")
    assert lines[1:] == [
        "  - 2 artifacts are missing, for the shape num_tokens=8",
        "To make it hit, run:",
        f"  cgtool warm {' '.join(arguments)}",
    ]


def test_a_disabled_cache_is_a_usage_error():
    ran = run("why", f"{SAMPLE}:build", env={"CGTOOL_DISABLE_CACHE": "1"})
    assert ran.code == 2
    assert "The cache is switched off" in ran.err


def test_redundant_reasons_are_dropped_and_similar_ones_are_grouped():
    sentences = (
        'config.adaptor was "eager" and is "aot_inductor" now',
        "config.use_inductor was false and is true now",
        "layers.0.eps was 1e-06 when this was compiled and is 1e-05 now.",
        "layers.1.eps was 1e-06 when this was compiled and is 1e-05 now.",
        "layers.2.eps was 0.5 when this was compiled and is 1e-05 now.",
    )
    assert _reasons(sentences, None) == (
        Reason(sentences[0]),
        Reason(f"{sentences[2]} (and 1 more like it)", (sentences[3],)),
        Reason(sentences[4]),
    )


def shown(report, monkeypatch, *, everything=False):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    show_why(Output(), report, model="m.py:build", everything=everything)
    return stream.getvalue().splitlines()


def test_a_model_that_was_never_warmed_has_no_nearest_entry(monkeypatch):
    reasons = (Reason(sentence="nothing has been warmed for this model"),)
    report = WhyReport(root="/cache", hit=False, reasons=reasons, run="cgtool warm m.py:build")
    assert shown(report, monkeypatch) == [
        "m.py:build misses in /cache: nothing has been warmed for this model.",
        "To make it hit, run:",
        "  cgtool warm m.py:build",
    ]


def test_a_pruned_entry_is_reported_with_its_misses(monkeypatch):
    entry = PrunedEntry(hash="b" * 64, model="M", when="2026-01-31T12:00:00Z", why="not used for 31 days\x1b")
    gone = Pruned(lookup="c" * 64, entries=(entry,), misses=2, last_missed=1.0)
    report = WhyReport(root="/cache", hit=False, reasons=(), run="cgtool warm m", pruned=gone)
    assert shown(report, monkeypatch)[1] == (
        "Entry bbbbbbbbbb of this model was pruned 2026-01-31T12:00:00Z (not used for 31 days\\x1b); it has been "
        "missed 2 times since."
    )
    printed = json.loads(msgspec.json.encode(report))["pruned"]
    assert list(printed) == ["lookup", "entries", "misses", "last_missed"]
    assert printed["entries"] == [{"hash": "b" * 64, "model": "M", "when": entry.when, "why": entry.why}]


def test_untrusted_text_is_escaped_and_truncated(monkeypatch):
    nearest = EntryFacts(
        hash="a" * 64, rank=0, prefix="backbone", model="E\x1b[2Jvil\n", created="2026\x07", last_used=None, hits=0
    )
    reasons = tuple(Reason(sentence="\x1b" * 5000, detail=("- \u202e",) * 20) for _ in range(20))
    report = WhyReport(root="/cache", hit=False, nearest=nearest, reasons=reasons)
    lines = shown(report, monkeypatch)
    assert lines[0].startswith(
        "m.py:build misses. The nearest entry, E\\x1b[2Jvil\\n aaaaaaaaaa (rank 0 backbone, created 2026\\x07"
    )
    assert all(line.isprintable() and len(line) < 500 for line in lines)
    assert len(lines) == 1 + 12 * (1 + 12 + 1) + 1
    assert lines[-1] == "  and 8 more (shown by --all and --json)"
    assert len(shown(report, monkeypatch, everything=True)) == 1 + 20 * 21
