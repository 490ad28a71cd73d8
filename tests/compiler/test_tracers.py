"""Tracing in children gives the same entry as in one process, and failing children do not stop a warm."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from concurrent.futures import Future
from pathlib import Path

import pytest
from worker_harness import stored_units, wait_until

pytest.importorskip("torch")

from cgtool.child import descendants
from cgtool.config import CompilationConfig
from cgtool.errors import GraphBreakError
from cgtool.host import counters
from cgtool.toolkit.model_choice import ModelChoice
from cgtool.toolkit.warm import warm

pytestmark = pytest.mark.torch

HERE = Path(__file__).parent
MODELS = HERE / "traced_model.py"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 64,
}


@pytest.fixture
def llama(tmp_path):
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama/config.json").write_text(json.dumps(LLAMA))
    return f"hf:{tmp_path}/llama"


@pytest.fixture
def patient(monkeypatch, forked_children):
    """Let this process wait for children instead of tracing variants that they have not started."""
    monkeypatch.setattr(Future, "cancel", lambda _: False)


def warmed(model, root, *, jobs=4, on_event=lambda _: None, **factory_args):
    """Warm a model with the adaptor `eager`; return the report and the number of traces in this process."""
    before = counters()["traces"]
    choice = ModelChoice(model=str(model), factory_args=factory_args)
    config = CompilationConfig(adaptor="eager", jobs=jobs, proof=False)
    report = warm(choice, config=config, cache_dir=root, on_event=on_event)
    return report, counters()["traces"] - before


def tracers():
    """Return the process ids of tracing children."""
    found = []
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            if b"trace_variants" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def entry_of(root):
    """Return {path: bytes} of a cache's only entry, with its manifest reduced to fields that do not depend on time."""
    files = {
        str(file.relative_to(root)): file.read_bytes()
        for file in (root / "torch_compile_cache").glob("[0-9a-f]*/**/*")
        if file.is_file()
    }
    for name, data in files.items():
        if name.endswith("manifest.json"):
            found = json.loads(data)
            rows = [{**row, "artifact": row["artifact"]["digest"]} for row in found["rows"]]
            files[name] = {**found, "rows": rows, "created": "", "sha256": ""}
    return files


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("model", "variants", "arguments"),
    [
        pytest.param("llama", 4, {}, id="hf", marks=pytest.mark.slow),
        pytest.param(HERE.parents[1] / "fixtures/tiny_llama.py:build", 2, {"num_layers": 1}, id="tiny_llama"),
    ],
)
def test_children_make_the_entry_that_one_process_makes(tmp_path, request, model, variants, arguments):
    model = request.getfixturevalue(model) if model == "llama" else model
    alone, traces = warmed(model, tmp_path / "alone", jobs=1, **arguments)
    assert traces == variants
    events = []
    report, traces = warmed(model, tmp_path / "beside", jobs=4, on_event=events.append, **arguments)
    assert 1 <= traces < variants
    traced = [event for event in events if event.phase == "trace" and event.secs is not None]
    assert [(event.done, event.total) for event in traced] == [(done + 1, variants) for done in range(variants)]
    assert report.notes == alone.notes
    assert entry_of(tmp_path / "beside") == entry_of(tmp_path / "alone")
    assert not tracers()


@pytest.mark.parametrize(("sizes", "first"), [([], "default"), ([8], "default"), ([8, 1], "default, num_tokens=1")])
def test_this_process_starts_with_the_variant_that_is_autotuned(tmp_path, patient, sizes, first):
    events = []
    choice = ModelChoice(model=str(HERE.parents[1] / "fixtures/tiny_llama.py:build"))
    config = CompilationConfig(adaptor="eager", jobs=4, compile_sizes=sizes)
    warm(choice, config=config, cache_dir=tmp_path, on_event=events.append)
    traced = [event for event in events if event.phase == "trace" and event.secs is not None]
    assert traced[0].message == first
    assert [(event.done, event.total) for event in traced] == [(1, 2), (2, 2)]


def test_children_leave_out_a_variant_that_the_model_cannot_run(tmp_path, patient):
    alone, _ = warmed(f"{MODELS}:convolved", tmp_path / "alone", jobs=1)
    beside, _ = warmed(f"{MODELS}:convolved", tmp_path / "beside", jobs=4)
    assert any("No variant serves length = 1" in note for note in alone.notes)
    assert beside.notes == alone.notes
    assert entry_of(tmp_path / "beside") == entry_of(tmp_path / "alone")


def test_a_fixed_dimension_is_static_for_all_variants(tmp_path, patient):
    alone, _ = warmed(f"{MODELS}:fixed", tmp_path / "alone", jobs=1)
    beside, _ = warmed(f"{MODELS}:fixed", tmp_path / "beside", jobs=4)
    assert "width serves only 4" in alone.notes[0]
    assert beside.notes == alone.notes
    assert entry_of(tmp_path / "beside") == entry_of(tmp_path / "alone")


def test_an_error_in_a_child_is_raised_by_the_warm(tmp_path, patient):
    with pytest.raises(GraphBreakError, match="graph_break"):
        warmed(f"{MODELS}:broken", tmp_path / "cache")


def test_the_variant_of_a_dead_child_is_traced_here(tmp_path, patient):
    report, traces = warmed(f"{MODELS}:dying", tmp_path / "cache", parent=os.getpid())
    assert traces == 2
    assert report.compiled


def test_the_warm_does_not_wait_for_a_child_that_has_not_built_the_model(tmp_path):
    _, traces = warmed(f"{MODELS}:hanging", tmp_path / "cache", parent=os.getpid())
    assert traces >= 2
    assert not tracers()


def test_children_end_when_the_warm_is_interrupted(tmp_path):
    def interrupt(event):
        if event.phase == "trace":
            wait_until(tracers)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warmed(f"{MODELS}:hanging", tmp_path / "cache", on_event=interrupt, parent=os.getpid())
    assert not tracers()


def test_children_build_the_model_early_if_the_cache_is_empty(tmp_path):
    def found_as_it_is_built(look, **factory_args):
        found = []

        def on_event(event):
            if event.phase == "model" and event.secs is None:
                found.append(look())

        warmed(f"{MODELS}:hanging", tmp_path / "cache", on_event=on_event, parent=os.getpid(), **factory_args)
        return found

    assert found_as_it_is_built(lambda: wait_until(lambda: len(tracers()) >= 2))  # of four jobs
    assert not any(found_as_it_is_built(tracers, width=8))


def test_this_process_traces_if_no_child_can_be_started(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("cgtool.processes.Child", refuse)
    report, traces = warmed(f"{MODELS}:activated", tmp_path / "cache")
    assert (report.compiled, traces) == (2, 2)


@pytest.mark.parametrize(("jobs", "before"), [(1, 1), (4, 0)], ids=["traced-here", "in-a-child"])
def test_traced_variants_compile_while_others_are_traced(tmp_path, worded_here, forked_children, jobs, before):
    root, stored = tmp_path / "cache", []

    def wait(event):
        if event.phase == "trace" and event.done == before and event.secs is None:
            stored.append(wait_until(lambda: stored_units(root), secs=300))

    config = CompilationConfig(adaptor="worded", jobs=jobs, proof=False)
    choice = ModelChoice(model=f"{MODELS}:activated")
    report = warm(choice, config=config, cache_dir=root, on_event=wait)
    assert len(stored) == 1  # of the other variant, too, where that is quick
    assert (report.compiled, report.reused) == (2, 0)
