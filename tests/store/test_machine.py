"""The properties of this machine, compared with torch's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cli_harness import forked

from cgtool.store.machine import Driver, _accelerators, _capability, parse_build, this_machine, version_pair

REPO = Path(__file__).parents[2]


@pytest.mark.torch
def test_machine_factors_have_the_form_of_the_key() -> None:
    from cgtool.host import cgtool_build
    from cgtool.runtime.factors import environment_factors

    wanted = environment_factors()
    found = this_machine().factors
    assert found == {"cgtool": cgtool_build(), **{name: wanted[name] for name in found if name in wanted}}
    assert set(wanted) - set(found) == {"precision", "inductor"}


@pytest.mark.torch
@pytest.mark.parametrize("forced", ["default", "avx2"])
def test_forced_cpu_capability_matches_torch(monkeypatch: pytest.MonkeyPatch, forced: str) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", forced)
    torchs = forked("import torch; print(torch.backends.cpu.get_cpu_capability())").out.strip()
    assert torchs.lower() == forced or this_machine().machine != "x86_64"
    assert this_machine().capability in (torchs, None)
    assert this_machine().code_variables == {"ATEN_CPU_CAPABILITY": forced}


def test_this_machine_imports_no_torch() -> None:
    code = (
        "import sys; from cgtool.store.machine import this_machine; this_machine(); "
        "raise SystemExit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPO)


def test_a_machine_without_a_compiler_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    assert this_machine().compiler is None


def test_torch_version_file_is_parsed() -> None:
    text = (
        "__version__ = '2.11.0+cu128'\ncuda: Optional[str] = '12.8'\ngit_version = \"ab\"\nhip: Optional[str] = None\n"
    )
    assert parse_build(text) == {"version": "2.11.0+cu128", "version_git": "ab", "with_cuda": "12.8", "with_hip": None}


def test_driver_older_than_torchs_cuda_has_no_devices() -> None:
    build = {"version": "2.13.0", "version_git": "ab", "with_cuda": "13.0", "with_hip": None}
    older = Driver(cuda="12.8", version="570.86", devices=("sm_90 x132",))
    newer = Driver(cuda="13.1", version="590.44", devices=("sm_90 x132",))
    assert _accelerators(build, older) == ()
    assert _accelerators(build, newer) == ("sm_90 x132",)
    assert _accelerators(build, None) == ()
    assert _accelerators({**build, "with_hip": "6.4"}, None) is None
    assert _accelerators(None, None) is None


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["avx2", "fma"], "AVX2"),
        (["avx2"], "DEFAULT"),
        (["avx2", "avx512bw", "avx512dq", "avx512vl", "fma"], "AVX512"),
        (["avx2", "avx512bw", "avx512vl", "fma"], "AVX2"),
        ([], None),
    ],
)
@pytest.mark.skipif(this_machine().machine != "x86_64", reason="levels of x86")
def test_cpu_capability_follows_the_processor_flags(flags: list[str], wanted: str | None) -> None:
    assert _capability(flags, None) == wanted


@pytest.mark.parametrize(("text", "pair"), [("12.8", (12, 8)), ("13", (13, 0)), ("2.36-9", (2, 36)), ("", (0, 0))])
def test_versions_compare_as_numbers(text: str, pair: tuple[int, int]) -> None:
    assert version_pair(text) == pair
