"""`cgtool check`: a sound model, injected faults, and models that cannot be checked."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_harness import Ran, run

from cgtool.cli.main import main

pytestmark = pytest.mark.torch

MODEL = f"{Path(__file__).with_name('cli_served_model.py')}:build"
ROOT = Path(__file__).parents[2]
FIXTURE = f"{ROOT / 'fixtures' / 'tiny_llama.py'}:build"
PYTHONPATH = ("--pythonpath", str(ROOT / "fixtures"), "--pythonpath", str(ROOT / "tests" / "serving"))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "cache"
    assert run("warm", MODEL, *PYTHONPATH, "--adaptor", "eager", "--cache-dir", folder).code == 0
    return folder


@pytest.fixture
def check(capsys, monkeypatch):
    """Run the command in this process."""
    monkeypatch.setenv("COLUMNS", "80")

    def check(root, *arguments, model=MODEL):
        capsys.readouterr()
        sizes = () if model is not MODEL else ("--capture-sizes", "1,2,4", "--rounds", "2")
        code = main(["check", model, *PYTHONPATH, "--cache-dir", str(root), *sizes, *map(str, arguments)])
        shown = capsys.readouterr()
        return Ran(code=code, out=shown.out, err=shown.err)

    return check


#: Full graphs are captured at level 0: the double of CUDA graphs records ops in a mode that a loaded model's guards
#: refuse.
@pytest.mark.parametrize(("mode", "level"), [("PIECEWISE", 3), ("FULL_DECODE_ONLY", 0)])
def test_a_sound_model_can_be_served(check, root, mode, level):
    ran = check(root, "--cudagraph-mode", mode, "--level", level, "--json")
    assert ran.code == 0, ran.err
    report = ran.report
    assert (report["ok"], report["mode"], report["findings"]) == (True, mode, [])
    assert report["num_replays"] == 2 * report["num_keys"] == 2 * len(report["captured"]) == 6
    assert {size["mode"] for size in report["captured"]} == {mode.partition("_")[0]}
    assert {size["num_tokens"] for size in report["captured"]} == {1, 2, 4}


def test_the_output_is_a_table_of_properties_and_a_summary(check, root):
    ran = check(root, "--cudagraph-mode", "PIECEWISE")
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert lines[0].split() == ["property", "holds"]
    assert [line.split()[-1] for line in lines[1:6]] == ["yes"] * 5
    assert "can be served with PIECEWISE: 3 graphs captured in" in " ".join(lines[6:])


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("pads", "A real row holds NaN from pads"),
        ("overwritten", "A later replay overwrote an output"),
    ],
)
def test_a_fault_is_reported_with_its_graph_and_exit_code_3(check, root, fault, sentence):
    options = ("--arg", f"fault={fault}", "--cudagraph-mode", "FULL_DECODE_ONLY", "--level", "0")
    ran = check(root, *options, "--json")
    assert ran.code == 3, ran.err
    assert not ran.report["ok"]
    assert {finding["fault"] for finding in ran.report["findings"]} == {fault}
    assert all(finding["mode"] == "FULL" and sentence in finding["sentence"] for finding in ran.report["findings"])
    shown = check(root, *options)
    assert shown.code == 3
    assert "must not be served" in shown.out


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (
            ("--cudagraph-mode", "NONE"),
            2,
            "No CUDA graph would be captured, so there is nothing to check. The configuration captures none.",
        ),
        (("--arg", "fault=no graphs"), 2, "the device does not support CUDA graphs"),
        (("--arg", "embedding=embed"), 1, "'embed' is not an embedding of the model; its embeddings: embed_tokens"),
        (("--cudagraph-mode", "SOME"), 2, "cudagraph_mode"),
    ],
)
def test_a_model_that_cannot_be_checked_is_an_error(check, root, arguments, code, sentence):
    ran = check(root, *arguments)
    assert ran.code == code, ran.err
    assert sentence in " ".join(ran.err.split())


def test_a_model_that_was_not_warmed_or_has_no_serving_description_is_an_error(check, tmp_path):
    ran = check(tmp_path / "empty")
    assert ran.code == 3
    assert "Warm it first" in ran.err
    ran = check(tmp_path / "empty", model=FIXTURE)
    assert ran.code == 1
    assert "does not define how it is served" in ran.err
