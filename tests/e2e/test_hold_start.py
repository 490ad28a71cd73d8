"""A server that has nothing but a read-only cache, without compiler, home or room for temporary files: it starts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from hold_harness import CHILD, NAMES, Bare, warm_model

from cgtool.host import compiler_version

pytestmark = pytest.mark.torch

#: What a start that went well reports, beside how near it came to eager.
WELL = {"error": None, "heavy": []}
NEAR = 2e-5


def well(report):
    near = report["worst"] is not None and report["worst"] < NEAR
    return near and {**report, "worst": None} == {**WELL, "worst": None}


@pytest.fixture
def bare(tmp_path):
    return Bare(tmp_path / "bare")


@pytest.fixture(scope="module")
def moved(aot_cache, tmp_path_factory):
    """A copy of a copy of the cache, on a read-only disk where that can be had; the first copy is gone."""
    folder = tmp_path_factory.mktemp("moved")
    first, second = folder / "first" / "cache", folder / "second" / "of another" / "name"
    shutil.copytree(aot_cache(*NAMES), first)
    shutil.copytree(first, second)
    shutil.rmtree(first)
    return second


@pytest.mark.parametrize("name", NAMES)
def test_a_fixture_starts_where_there_is_nothing_but_a_read_only_copy_of_a_cache(moved, read_only, bare, name):
    report = bare.start_from_nothing(name, read_only(moved))
    assert well(report), report
    assert bare.written() == []
    # It may be asked which one it is, and is asked for nothing else.
    assert set(bare.tried()) <= {"g++ --version"}


def test_a_path_without_any_program_and_no_home_serve(moved, bare):
    report = bare.start("llama", moved, env={"PATH": "", "HOME": None})
    assert well(report), report


def test_a_miss_on_a_machine_without_a_compiler_does_not_speak_of_compilers(moved, bare):
    report = bare.start("llama", moved, env={"TORCHINDUCTOR_MAX_AUTOTUNE": "1"})
    name, sentence = report["error"]
    assert name == "CacheMissError"
    assert "TORCHINDUCTOR_MAX_AUTOTUNE" in sentence
    assert "compiler" not in sentence


@pytest.mark.skipif(compiler_version() is None, reason="the entry is keyed on the compiler that there is")
def test_another_compiler_is_a_miss_that_names_it(moved, bare):
    (bare.tools / "g++").write_text('#!/bin/sh\necho "g++ (Other) 99.1.0"\n')
    report = bare.start("llama", moved)
    name, sentence = report["error"]
    assert name == "CacheMissError"
    assert f'compiler was "{compiler_version()}" and is "(Other) 99.1.0" now' in sentence


#: Every folder that a temporary file may go to is made read-only, in a mount namespace of its own.
NOWHERE = """
for folder in /tmp /var/tmp /dev/shm; do
    mount --bind "$folder" "$folder" && mount -o remount,bind,ro "$folder" || exit 77
done
exec "$@"
"""


def test_no_temporary_folder_at_all_is_a_sentence(moved, bare):
    """Not even one for a few hundred bytes: what is missing is named, and what to do."""
    unshare = shutil.which("unshare")
    probe = unshare and subprocess.run([unshare, "-m", "true"], check=False, capture_output=True)
    if not probe or probe.returncode:
        pytest.skip("a mount namespace needs rights that this process has not")
    ran = bare.run(
        [
            unshare,
            "-m",
            "/bin/sh",
            "-c",
            NOWHERE,
            "sh",
            sys.executable,
            str(CHILD),
            json.dumps(["llama", str(moved)]),
        ],
        env={"TMPDIR": None, "PATH": os.defpath, "CXX": str(bare.tools / "g++")},
        cwd="/proc",
    )
    if ran.code == 77:
        pytest.skip("the system's folders cannot be mounted anew here")
    report = ran.report
    assert report["error"][0] == "NoRoomError", report
    assert "Set TMPDIR to a writable folder." in report["error"][1]


INDUCTOR = """
import sys
sys.path.insert(0, sys.argv[2])
import hold_models, torch, cgtool
try:
    with torch.no_grad():
        cgtool.load(hold_models.tied().module, cache_dir=sys.argv[1])
except cgtool.CgtoolError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_inductors_own_artifacts_say_that_they_need_a_compiler(bare, tmp_path):
    """On the CPU torch builds their kernels as it opens them, where its own cache does not have them."""
    warm_model(f"{CHILD.parent / 'hold_models.py'}:tied", tmp_path / "cache", adaptor="inductor_standalone")
    ran = bare.run([sys.executable, "-c", INDUCTOR, str(tmp_path / "cache"), str(CHILD.parent)])
    assert ran.out.startswith(
        "ArtifactError Torch builds the C++ code of this artifact when it opens it, and no C++"
    ), ran
    assert "aot_inductor" in ran.out
