"""The verdict on an entry: what rules a machine out, what is only a caveat, and what does not matter."""

from __future__ import annotations

import re
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cache_samples import MACHINE

from cgtool.store.artifacts import Package, pack
from cgtool.store.machine import Driver, Machine, version_pair
from cgtool.store.records import Factor, Key
from cgtool.toolkit.verify.verdict import Verdict, glibc_needed, glibc_of_entry, verdict

LIBRARIES = sorted(Path(sysconfig.get_config_var("DESTSHARED") or "/nowhere").glob("*.so"))[:8]
PRECISION = {
    "float32_matmul": "highest",
    "fp16_reduced": True,
    "bf16_reduced": True,
    "fp16_accumulated": False,
    "deterministic": False,
}


def key_of(machine: Machine = MACHINE, **more: Any) -> Key:
    model = {"model": {"class": "m:M"}, "sources": {"m": "cd" * 32}, "precision": PRECISION, "inductor": {}}
    return Key.of(Factor(name=name, value=value) for name, value in {**machine.factors, **model, **more}.items())


def test_an_entry_of_this_machine_is_optimal() -> None:
    assert verdict(key_of(), MACHINE) == Verdict(level="optimal")


def cpu(**changes: Any) -> dict[str, Any]:
    target = MACHINE.factors["target"]
    return {**target, "cpu": {**target["cpu"], **changes}}


@pytest.mark.parametrize(
    ("factors", "reason"),
    [
        pytest.param(
            {"torch": {**MACHINE.factors["torch"], "version": "2.12.1+cu130"}},
            'torch.version was "2.12.1+cu130" and is "2.13.0+cu130" now',
            id="torch",
        ),
        pytest.param({"triton": None}, 'triton was null and is "3.7.0" now', id="triton"),
        pytest.param(
            {"python": "cpython 3.11"}, 'python was "cpython 3.11" and is "cpython 3.12" now', id="python minor"
        ),
        pytest.param(
            {"compiler": "clang 19"}, 'compiler was "clang 19" and is "(Debian 12.2.0) 12.2.0" now', id="compiler"
        ),
        pytest.param({"compiler": None}, 'compiler was null and is "(Debian 12.2.0) 12.2.0" now', id="compiler added"),
        pytest.param(
            {"target": {**MACHINE.factors["target"], "accelerators": ["sm_80 x108"]}},
            'target.accelerators[0] was "sm_80 x108" and is "sm_90 x132" now',
            id="accelerator",
        ),
        pytest.param(
            {"target": cpu(instructions="ef" * 32)},
            "The processor's instruction sets differ from those the entry was compiled for",
            id="instructions",
        ),
        pytest.param(
            {"target": cpu(machine="aarch64")}, 'target.cpu.machine was "aarch64" and is "x86_64" now', id="processor"
        ),
        pytest.param(
            {"target": cpu(capability="AVX2")}, 'target.cpu.capability was "AVX2" and is "AVX512" now', id="capability"
        ),
        pytest.param(
            {"inductor_environment": {"TORCHINDUCTOR_FREEZING": "1"}},
            'the environment variable TORCHINDUCTOR_FREEZING was "1" and is unset now',
            id="variable",
        ),
        pytest.param(
            {"kernel": "7.0"},
            "Its key has the factor kernel, which this version of cgtool does not know",
            id="unknown factor",
        ),
    ],
)
def test_a_factor_that_makes_load_miss_is_unsupported(factors: dict[str, Any], reason: str) -> None:
    assert verdict(key_of(**factors), MACHINE) == Verdict(level="unsupported", reasons=(reason,))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"python_version": "3.12.9"}, id="python patch"),
        pytest.param({"glibc": "2.41"}, id="newer glibc"),
        pytest.param({"compiler": None}, id="no compiler"),
        pytest.param({"driver": Driver(cuda="13.2", version="600.1", devices=("sm_90 x132",))}, id="newer driver"),
        pytest.param({"capability": None}, id="only torch knows"),
    ],
)
def test_differences_that_load_ignores_are_optimal(changes: dict[str, Any]) -> None:
    assert verdict(key_of(), replace(MACHINE, **changes), glibc_needed="2.36") == Verdict(level="optimal")


def test_unknown_instruction_sets_do_not_match_known_ones() -> None:
    assert verdict(key_of(), replace(MACHINE, instructions=None)).level == "unsupported"


def test_a_python_without_torch_supports_nothing() -> None:
    said = verdict(key_of(), replace(MACHINE, torch=None))
    assert said == Verdict(level="unsupported", reasons=("torch is not installed for this Python",))


def test_an_older_glibc_than_the_native_code_needs_is_unsupported() -> None:
    said = verdict(key_of(), replace(MACHINE, glibc="2.31"), glibc_needed="2.34")
    assert said.level == "unsupported"
    assert said.reasons[0].startswith("Its native code needs glibc 2.34, and this machine has 2.31")


def test_an_older_driver_of_the_same_cuda_loads() -> None:
    built = {**MACHINE.factors["torch"], "with_cuda": "13.1"}
    machine = replace(MACHINE, torch=built)
    said = verdict(key_of(machine), machine)
    assert said.level == "loads"
    assert said.reasons[0].startswith("The driver supports CUDA 13.0 and torch was built with 13.1")


def test_changed_settings_of_the_compiling_process_are_named() -> None:
    said = verdict(key_of(precision={**PRECISION, "float32_matmul": "high"}, inductor={"cpp.simdlen": 8}), MACHINE)
    assert said.level == "loads"
    assert "precision.float32_matmul, inductor.cpp.simdlen" in said.reasons[0]


def test_accelerators_that_only_torch_can_see_are_not_promised() -> None:
    said = verdict(key_of(), replace(MACHINE, accelerators=None))
    assert said.level == "loads"
    assert "--load" in said.reasons[0]


@pytest.mark.parametrize(
    ("ranks", "world_size", "level"),
    [
        ({0, 1}, 2, "optimal"),
        ({0, 1}, None, "optimal"),
        ({0}, 2, "unsupported"),
        ({0, 1, 2, 3}, 2, "loads"),
        ({1, 5}, 2, "unsupported"),
    ],
)
def test_ranks_are_judged_by_the_world_size(ranks: set[int], world_size: int | None, level: str) -> None:
    assert verdict(key_of(), MACHINE, ranks=ranks, world_size=world_size).level == level


def newest_glibc(data: bytes) -> str | None:
    """The newest of all version names in a file's bytes."""
    return max((found.decode() for found in re.findall(rb"\0GLIBC_(\d+\.\d+)", data)), key=version_pair, default=None)


@pytest.mark.skipif(not LIBRARIES, reason="this Python ships no shared libraries")
def test_the_glibc_a_package_needs_is_read_from_its_library(tmp_path: Path) -> None:
    for library in LIBRARIES:
        path = tmp_path / f"{library.name}.pt2"
        path.write_bytes(pack(Package(native=library.read_bytes(), metadata={})))
        assert glibc_needed(path) == newest_glibc(library.read_bytes()) == glibc_needed(library)
    assert glibc_of_entry(map(str, tmp_path.iterdir())) == newest_glibc(
        b"".join(path.read_bytes() for path in LIBRARIES)
    )


@pytest.mark.skipif(not LIBRARIES, reason="this Python ships no shared libraries")
def test_a_truncated_library_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    whole = LIBRARIES[0].read_bytes()
    path = tmp_path / "torn.pt2"
    for kept in range(0, len(whole), len(whole) // 50):
        path.write_bytes(whole[:kept])
        assert glibc_needed(path) == newest_glibc(whole[:kept])
    for at in range(64):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        glibc_needed(path)


def test_files_that_are_not_packages_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "a.eager").write_bytes(b"\x7fELF\x02\x01")
    (tmp_path / "b.pt2").write_bytes(b"")
    assert glibc_of_entry([*map(str, tmp_path.iterdir()), "gone.pt2"]) is None
