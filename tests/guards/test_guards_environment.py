"""Factors of the environment: what changes them, what does not, and what reading them costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from cgtool.guards import environment

pytestmark = pytest.mark.torch

SOURCE = """
import json, sys
from cgtool.guards.environment import environment_factors
heavy = ("torch._inductor", "torch._dynamo", "sympy", "triton")
found = []
for step in json.loads(sys.argv[1]):
    exec(step)
    found.append(environment_factors())
    if step == "":
        found.append([name for name in heavy if name in sys.modules])
print(json.dumps(found))
"""
NAMES = ["torch", "triton", "python", "compiler", "target", "precision", "inductor_environment", "inductor"]


def factors_after(*steps, **changes):
    """Return the factors of a fresh process after each step; after the empty step also what heavy things it loaded."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent), **changes}
    done = subprocess.run(
        [sys.executable, "-c", SOURCE, json.dumps(steps)], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_inductor_changes_nothing_and_changing_it_does():
    plain, loaded, imported, patched, places, changed = factors_after(
        "",
        "import torch._inductor.config as c, torch._inductor.compile_fx",
        "with c.patch(max_fusion_size=3): pass",
        "c.compile_threads = 3; c.trace.debug_dir = '/x'",
        "c.max_fusion_size = 3",
    )
    assert loaded == []
    assert list(plain) == NAMES
    assert imported == patched == places == plain
    assert changed == {**plain, "inductor": {"max_fusion_size": 3}}


def test_where_things_are_changes_nothing_and_what_changes_code_is_named(tmp_path):
    [found, _] = factors_after(
        "",
        HOME=str(tmp_path),
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path),
        MASTER_PORT="29501",
        PYTHONHASHSEED="7",
        TORCHINDUCTOR_MAX_AUTOTUNE="1",
    )
    plain = environment.environment_factors()
    variables = {**plain["inductor_environment"], "TORCHINDUCTOR_MAX_AUTOTUNE": "1"}
    assert found == {**plain, "inductor_environment": variables}


def compiler_at(folder, line, name="g++"):
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f'#!/bin/sh\necho run >> "{folder}/runs"\necho "{line}"\necho more\n')
    path.chmod(0o755)
    return path


def test_a_compiler_is_its_version_and_not_its_path(tmp_path, monkeypatch):
    here = compiler_at(tmp_path / "a", "g++ (Debian 12.2.0) 12.2.0")
    there = compiler_at(tmp_path / "b", "c++ (Debian 12.2.0) 12.2.0", name="c++")
    newer = compiler_at(tmp_path / "c", "x86_64-linux-gnu-g++ (Debian 13.1.0) 13.1.0")
    found = []
    for path in (here, there, newer, tmp_path / "nowhere"):
        monkeypatch.setenv("CXX", str(path))
        found.append(environment.compiler_version())
    assert found == ["(Debian 12.2.0) 12.2.0", "(Debian 12.2.0) 12.2.0", "(Debian 13.1.0) 13.1.0", None]


def test_a_compiler_is_asked_once_until_it_changes(tmp_path, monkeypatch):
    path = compiler_at(tmp_path / "a", "clang version 14.0.6")
    monkeypatch.setenv("CXX", str(path))
    for _ in range(3):
        assert environment.compiler_version() == "clang version 14.0.6"
    assert (path.parent / "runs").read_text().count("run") == 1
    compiler_at(tmp_path / "a", "clang version 15.0.0.1")
    assert environment.compiler_version() == "clang version 15.0.0.1"


def test_threads_that_ask_a_compiler_at_once_get_one_answer_of_one_run(tmp_path, monkeypatch):
    path = compiler_at(tmp_path / "a", "clang version 14.0.6")
    path.write_text(path.read_text().replace("echo more", "sleep 0.2"))
    monkeypatch.setenv("CXX", str(path))

    def ask(_):
        environment.ask_compiler()
        return environment.compiler_version()

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(8))) == ["clang version 14.0.6"] * 8
    assert (path.parent / "runs").read_text().count("run") == 1


def test_precision_is_a_factor():
    before = environment.environment_factors()["precision"]
    torch.set_float32_matmul_precision("high")
    try:
        assert environment.environment_factors()["precision"] != before
    finally:
        torch.set_float32_matmul_precision("highest")
    assert environment.environment_factors()["precision"] == before


def test_flags_that_are_no_instructions_do_not_enter(tmp_path, monkeypatch):
    flags = ("ibpb", "avx512f", "hypervisor", "constant_tsc", "amx_tile", "md_clear", "vmx")
    assert [flag for flag in flags if flag.startswith(environment._INSTRUCTIONS)] == ["avx512f", "amx_tile"]


def test_a_compiler_that_fails_or_babbles_is_none(tmp_path, monkeypatch):
    for index, text in enumerate(("echo 'g++ (Debian 12.2.0) 12.2.0'; exit 1", "exit 0", "kill -9 $$")):
        path = tmp_path / f"g++{index}"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        assert environment.compiler_version() is None
    path.write_text("#!/bin/sh\nprintf 'g++ (\\377) 1'\n")
    assert environment.compiler_version() == "(\N{REPLACEMENT CHARACTER}) 1"


def test_a_blank_name_of_a_compiler_is_no_name(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    expected = environment.compiler_version()
    monkeypatch.setenv("CXX", " ")
    assert environment.compiler_version() == expected
