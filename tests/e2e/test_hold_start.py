"""Servers start from a read-only cache, without a compiler, a home or room for temporary files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from hold_harness import CHILD, Bare, warm_model

from cgtool.host import compiler_version

pytestmark = pytest.mark.torch


def succeeded(report):
    """Return whether a start imported no compiler and its output equals eager's."""
    is_close = report["worst"] is not None and report["worst"] < 2e-5
    return is_close and report == {"error": None, "heavy": [], "worst": report["worst"]}


@pytest.fixture
def bare(tmp_path):
    return Bare(tmp_path / "bare")


@pytest.fixture(scope="module")
def moved(native_llama, tmp_path_factory):
    """A copy of a copy of Llama's cache; the first copy is gone."""
    return moved_twice(native_llama.root, tmp_path_factory.mktemp("moved"))


def moved_twice(root, folder):
    first, second = folder / "first" / "cache", folder / "second" / "of another" / "name"
    shutil.copytree(root, first)
    shutil.copytree(first, second)
    shutil.rmtree(first)
    return second


@pytest.mark.parametrize("name", ["llama", "vision"])
def test_a_server_starts_with_only_a_read_only_copy_of_a_cache(request, read_only, bare, tmp_path, name):
    root = request.getfixturevalue(f"native_{name}").root
    report = bare.start_fresh(name, read_only(moved_twice(root, tmp_path)))
    assert succeeded(report), report
    assert bare.written() == []
    # The compiler may be asked for its version, and for nothing else.
    assert set(bare.tried()) <= {"g++ --version"}


def test_an_empty_path_and_no_home_do_not_prevent_serving(moved, bare):
    report = bare.start("llama", moved, env={"PATH": "", "HOME": None})
    assert succeeded(report), report


def test_a_miss_without_a_compiler_does_not_mention_compilers(moved, bare):
    report = bare.start("llama", moved, env={"TORCHINDUCTOR_MAX_AUTOTUNE": "1"})
    name, message = report["error"]
    assert name == "CacheMissError"
    assert "TORCHINDUCTOR_MAX_AUTOTUNE" in message
    assert "compiler" not in message


@pytest.mark.skipif(compiler_version() is None, reason="the key of the entry has no compiler")
def test_a_miss_because_of_another_compiler_names_it(moved, bare):
    (bare.tools / "g++").write_text('#!/bin/sh\necho "g++ (Other) 99.1.0"\n')
    report = bare.start("llama", moved)
    name, message = report["error"]
    assert name == "CacheMissError"
    assert f'compiler was "{compiler_version()}" and is "(Other) 99.1.0" now' in message


#: Makes every folder for temporary files read-only, in a mount namespace of its own.
NOWHERE = """
for folder in /tmp /var/tmp /dev/shm; do
    mount --bind "$folder" "$folder" && mount -o remount,bind,ro "$folder" || exit 77
done
exec "$@"
"""


def test_a_missing_temporary_folder_is_an_error_that_says_what_to_set(moved, bare):
    unshare = shutil.which("unshare")
    probe = unshare and subprocess.run([unshare, "-m", "true"], check=False, capture_output=True)
    if not probe or probe.returncode:
        pytest.skip("needs the right to create a mount namespace")
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
        pytest.skip("needs the right to remount the system's folders")
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
def test_inductor_artifacts_report_that_they_need_a_compiler(bare, tmp_path):
    """On the CPU, torch builds their kernels when it opens them, unless its own cache has them."""
    warm_model(f"{CHILD.parent / 'hold_models.py'}:tied", tmp_path / "cache", adaptor="inductor_standalone")
    ran = bare.run([sys.executable, "-c", INDUCTOR, str(tmp_path / "cache"), str(CHILD.parent)])
    assert ran.out.startswith(
        "ArtifactError Torch builds the C++ code of this artifact when it opens it, and no C++"
    ), ran
    assert "aot_inductor" in ran.out
