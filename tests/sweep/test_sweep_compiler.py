"""Another C++ compiler is a miss in a real process, whatever it is called; the same one under another name is a hit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from cli_harness import environment, forked, run

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
]

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"

LOAD = """
import sys, cgtool, tiny_llama
try:
    cgtool.load(tiny_llama.build(num_layers=2).module, cache_dir=sys.argv[1])
    print("hit")
except cgtool.CacheMissError as miss:
    print(miss.reasons[0])
"""


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("compiler") / "cache")
    model = f"{FIXTURES / 'tiny_llama.py'}:build"
    done = run("warm", model, "--arg", "num_layers=2", "--adaptor", "eager", "--cache-dir", folder)
    assert done.code == 0, done.err
    return folder


def load(cache: str, cxx: str | None) -> str:
    changes = {"PYTHONPATH": os.pathsep.join([str(FIXTURES), os.environ.get("PYTHONPATH", "")])}
    done = forked(LOAD, cache, env=environment(**changes, **({} if cxx is None else {"CXX": cxx})))
    assert done.code == 0, done.err
    return done.out.strip()


def test_a_compiler_of_another_version_is_a_miss_that_names_it(cache, tmp_path):
    other = script(tmp_path / "g++", 'echo "g++ (Other) 99.1.0"')
    reason = load(cache, other)
    assert reason.startswith("compiler")
    assert "99.1.0" in reason


def test_the_same_compiler_under_another_name_is_a_hit(cache, tmp_path):
    assert load(cache, None) == "hit"
    assert load(cache, script(tmp_path / "my-compiler", f'exec {shutil.which("g++")} "$@"')) == "hit"
