"""Ctrl-C and SIGTERM during a warm: exit codes, and a cache that stays consistent."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from cli_harness import run, start

pytestmark = pytest.mark.torch

SAMPLE = Path(__file__).with_name("cli_sample_model.py")
SIGNALS = {"Ctrl-C": (signal.SIGINT, 130, "Interrupted"), "SIGTERM": (signal.SIGTERM, 143, "Terminated")}


def _signal_at(line_begins: str, number: int, *arguments: object, **env: str) -> tuple[int, str, str]:
    """Start a warm, send it a signal once a line of its stderr begins like this, and wait for its end."""
    running = start("warm", *arguments, env=env)
    running.says(line_begins)
    os.kill(running.pid, number)
    ran = running.end(secs=100)  # the model's own sleep is longer; other work may keep the machine busy
    return ran.code, ran.out, ran.err


@pytest.mark.parametrize(("number", "code", "kind"), SIGNALS.values(), ids=SIGNALS)
def test_while_the_model_is_built(tmp_path, number, code, kind):
    returned, out, err = _signal_at("begun", number, f"{SAMPLE}:slow", "--cache-dir", tmp_path / "cache")
    assert returned == code
    assert out == ""
    assert "Traceback" not in err
    assert "Finished work is kept and nothing is left half-written: run the same command again to continue." in err
    assert list(tmp_path.iterdir()) == []


#: A compiler that takes half a second for each piece, and one that takes twenty.
WORDED = ("--adaptor", "worded", "--no-proof", "--inductor-config", '{"secs": 0.5}')
INDUCTOR = ("--adaptor", "inductor_standalone")


@pytest.mark.parametrize(
    ("compiler", "sent"),
    [
        pytest.param(WORDED, "SIGTERM", id="SIGTERM"),
        pytest.param(INDUCTOR, "SIGTERM", id="SIGTERM to Inductor", marks=pytest.mark.slow),
        pytest.param(INDUCTOR, "Ctrl-C", id="Ctrl-C to Inductor", marks=pytest.mark.slow),
    ],
)
def test_while_pieces_are_compiled(tmp_path, worded_site, compiler, sent):
    number, code, kind = SIGNALS[sent]
    root = tmp_path / "cache"
    arguments = (f"{SAMPLE}:build", *compiler, "--cache-dir", root, "--json")
    returned, out, err = _signal_at("compile 1/4", number, *arguments, "--jobs", 1, **worded_site)
    assert returned == code
    assert f'"type": "{kind}"' in out
    assert "Traceback" not in err
    listing = run("inspect", "cache", root, "--json")
    assert (listing.code, listing.report["entries"], listing.report["warnings"]) == (0, [], [])
    again = run("warm", *arguments, "--jobs", 0, env=worded_site)
    assert again.code == 0
    assert again.report["compiled"] < 4
    assert again.report["compiled"] + again.report["reused"] == 4
