"""Ctrl-C and SIGTERM in the middle of a warm: real processes, exact codes, a cache that is as before or as after."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from cli_harness import COMMAND, environment, run

pytestmark = pytest.mark.torch

SAMPLE = Path(__file__).with_name("cli_sample_model.py")
SIGNALS = {"Ctrl-C": (signal.SIGINT, 130, "Interrupted"), "SIGTERM": (signal.SIGTERM, 143, "Terminated")}


def _signal_at(line_begins: str, number: int, *arguments: object) -> tuple[int, str, str]:
    """Start a warm, send it a signal once a line of its stderr begins so, and wait for its end."""
    process = subprocess.Popen(
        [*COMMAND, "warm", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(PYTHONUNBUFFERED="1"),
        start_new_session=True,
    )
    said = []
    for line in process.stderr:
        said.append(line)
        if line.startswith(line_begins):
            break
    else:
        pytest.fail(f"{line_begins!r} was never said: {''.join(said)}")
    process.send_signal(number)
    out, err = process.communicate(timeout=100)  # the model's own sleep is longer; other work may keep the machine busy
    return process.returncode, out, "".join(said) + err


@pytest.mark.parametrize(("number", "code", "kind"), SIGNALS.values(), ids=SIGNALS)
def test_while_the_model_is_built(tmp_path, number, code, kind):
    returned, out, err = _signal_at("begun", number, f"{SAMPLE}:slow", "--cache-dir", tmp_path / "cache")
    assert returned == code
    assert out == ""
    assert "Traceback" not in err
    assert "What was finished is kept and nothing is half done: run the same command again." in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "code", "kind"),
    [
        pytest.param(*SIGNALS["Ctrl-C"], id="Ctrl-C", marks=pytest.mark.slow),
        pytest.param(*SIGNALS["SIGTERM"], id="SIGTERM"),
    ],
)
def test_while_pieces_are_compiled(tmp_path, number, code, kind):
    root = tmp_path / "cache"
    arguments = (f"{SAMPLE}:build", "--adaptor", "inductor_standalone", "--cache-dir", root, "--json")
    returned, out, err = _signal_at("compile 1/4", number, *arguments)
    assert returned == code
    assert f'"type": "{kind}"' in out
    assert "Traceback" not in err
    listing = run("inspect", "cache", root, "--json")
    assert (listing.code, listing.report["entries"], listing.report["warnings"]) == (0, [], [])
    again = run("warm", *arguments)
    assert again.code == 0
    assert again.report["compiled"] < 4
    assert again.report["compiled"] + again.report["reused"] == 4
