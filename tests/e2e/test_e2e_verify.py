"""`verify` and `load` agree: on what loads, on what a repair makes loadable, and on what opens."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_harness import SERVED, cgtool
from msgspec.structs import replace
from syscalls import each_kill

import cgtool as package
from cgtool.config import CompilationConfig
from cgtool.errors import CacheMissError
from cgtool.store.artifacts import Package, pack, split_origin, unpack, with_origin
from cgtool.store.entry import EntryWriter, read_entry
from cgtool.store.key import read_key
from cgtool.store.layout import RANK_FILES, CacheLayout, RankName
from cgtool.store.machine import this_machine
from cgtool.store.records import Factor, Key, Manifest
from cgtool.toolkit.verify.checks import check_entry
from cgtool.toolkit.verify.run import verify
from cgtool.toolkit.verify.verdict import verdict

pytestmark = pytest.mark.torch

EAGER = CompilationConfig(adaptor="eager", jobs=0)
INPUT = torch.arange(8.0).reshape(2, 4)


class Doubler(torch.nn.Module):
    """A model of one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + 1


def compiled(root: Path) -> torch.Tensor:
    with torch.no_grad():
        return package.compile(Doubler().eval(), example_args=(INPUT,), config=EAGER, cache_dir=root)(INPUT)


@pytest.fixture(scope="module")
def doubler_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("eager") / "cache"
    compiled(root)
    return root


@pytest.fixture
def root(doubler_cache: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(doubler_cache, tmp_path / "cache"))


def only_name(root: Path) -> RankName:
    layout = CacheLayout(root=root)
    (hash_,) = layout.hashes()
    (name,) = layout.rank_names(hash_)
    return name


def rekeyed(
    root: Path,
    target: Path,
    change: Callable[[dict[str, Any]], None],
    rows: Callable[[Manifest], Manifest] = lambda m: m,
) -> RankName:
    """Publish the entry of a cache in another one, with changed key factors."""
    layout, name = CacheLayout(root=root), only_name(root)
    key, entry = read_key(layout, name.hash), read_entry(layout, name, files=RANK_FILES)
    factors = dict(key.factors)
    change(factors)
    new = Key.of(Factor(name=factor, value=value) for factor, value in factors.items())
    writer = EntryWriter(CacheLayout(root=target), new, rank=0, prefix=name.prefix)
    for row in entry.manifest.rows:
        writer.objects.put(entry.artifact(row.artifact), row.artifact.kind)
    manifest = rows(replace(entry.manifest, hash=new.hash))
    writer.publish(manifest, entry.files)
    return writer.name


def setter(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(factors: dict[str, Any]) -> None:
        inner = factors
        for part in path[:-1]:
            inner = inner[part]
        inner[path[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda _: None, id="nothing"),
        pytest.param(setter("torch", "version", value="2.0.0"), id="torch"),
        pytest.param(setter("torch", "version_git", value="00"), id="torch revision"),
        pytest.param(setter("torch", "with_cuda", value="11.0"), id="cuda"),
        pytest.param(setter("triton", value="1.0"), id="triton"),
        pytest.param(setter("python", value="cpython 2.7"), id="python"),
        pytest.param(setter("compiler", value="tcc"), id="compiler"),
        pytest.param(setter("compiler", value=None), id="no compiler"),
        pytest.param(setter("target", "cpu", "machine", value="vax"), id="processor"),
        pytest.param(setter("target", "cpu", "capability", value="MMX"), id="capability"),
        pytest.param(setter("target", "cpu", "instructions", value="0" * 64), id="instructions"),
        pytest.param(setter("target", "accelerators", value=["sm_10 x1"]), id="accelerators"),
        pytest.param(setter("inductor_environment", value={"TORCHINDUCTOR_X": "1"}), id="variable"),
        pytest.param(setter("moon", value="full"), id="an unknown factor"),
    ],
)
def test_the_verdict_is_optimal_exactly_if_load_hits(
    doubler_cache: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    name = rekeyed(doubler_cache, tmp_path, change)
    found = verdict(read_key(CacheLayout(root=tmp_path), name.hash), this_machine())
    try:
        package.load(Doubler().eval(), cache_dir=tmp_path)
        hit = True
    except CacheMissError:
        hit = False
    assert (found.level == "optimal") is hit
    assert (found.level == "unsupported") is not hit


def test_without_a_compiler_the_verdict_and_load_agree(doubler_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    key = read_key(CacheLayout(root=doubler_cache), only_name(doubler_cache).hash)
    assert verdict(key, this_machine()).level == "optimal"
    package.load(Doubler().eval(), cache_dir=doubler_cache)


def test_an_entry_for_another_precision_loads_only_after_the_process_sets_it(
    doubler_cache: Path, tmp_path: Path
) -> None:
    name = rekeyed(doubler_cache, tmp_path, setter("precision", "float32_matmul", value="high"))
    found = verdict(read_key(CacheLayout(root=tmp_path), name.hash), this_machine())
    assert found.level == "loads"
    assert verify(cache_dir=tmp_path).ok
    assert not verify(cache_dir=tmp_path, strict=True).ok
    with pytest.raises(CacheMissError, match="float32_matmul"):
        package.load(Doubler().eval(), cache_dir=tmp_path)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # which also sets the backends, unlike the entry
    try:
        with pytest.raises(CacheMissError, match="fp32_precision_matmul") as missed:
            package.load(Doubler().eval(), cache_dir=tmp_path)
    finally:
        torch.set_float32_matmul_precision(before)
    assert not any("float32_matmul was" in reason for reason in missed.value.reasons)


def flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    at = draw.randrange(len(data))
    data[at] ^= 1 << draw.randrange(8)
    path.unlink()
    path.write_bytes(data)


def loaded_files(root: Path) -> list[Path]:
    """The files that a load reads."""
    layout, name = CacheLayout(root=root), only_name(root)
    folder = layout.rank_dir(name)
    artifacts = sorted((layout.entry_dir(name.hash) / "artifacts").iterdir())
    return [layout.key_file(name.hash), folder / "manifest.json", folder / "plan.json", artifacts[0]]


@pytest.mark.parametrize("name", ["computation_graph.py", "transformed_code.py"])
def test_compile_repairs_files_that_only_people_read(root: Path, name: str) -> None:
    """Nothing runs from these files, so load serves the entry; compile generates them again."""
    flip(CacheLayout(root=root).rank_dir(only_name(root)) / name, random.Random(7))
    package.load(Doubler().eval(), cache_dir=root)
    with torch.no_grad():
        assert torch.equal(compiled(root), Doubler()(INPUT))
    assert check_entry(CacheLayout(root=root), only_name(root).hash).problems == []


def test_a_repair_killed_at_any_syscall_leaves_the_cache_unchanged_or_repaired(root: Path, tmp_path: Path) -> None:
    path = loaded_files(root)[3]
    path.unlink()
    for unit in (root / "torch_compile_cache" / "units").rglob(path.name):
        unit.unlink()
    copy = tmp_path / "killed"
    repair = partial(verify, cache_dir=copy, repair=True)
    found, entry = [], only_name(root).hash
    for _ in each_kill(root, copy, repair):
        found.append([Path(problem.path).name for problem in check_entry(CacheLayout(root=copy), entry).problems])
        assert repair().ok
    assert [wrong for wrong in found if wrong not in ([path.name], [])] == []
    assert {len(wrong) for wrong in found} == {0, 1}
    assert len(found) > 10


def test_a_missing_artifact_is_found_and_compiled(doubler_cache: Path, tmp_path: Path) -> None:
    rekeyed(doubler_cache, tmp_path, lambda _: None, rows=lambda manifest: replace(manifest, rows=()))
    report = verify(cache_dir=tmp_path)
    assert [(hole.piece_index, hole.shape) for hole in report.entries[0].holes] == [(0, {})]
    assert not report.ok
    assert verify(cache_dir=tmp_path, repair=True).ok
    package.load(Doubler().eval(), cache_dir=tmp_path)


def test_repair_does_not_compile_for_another_machine(doubler_cache: Path, tmp_path: Path) -> None:
    name = rekeyed(doubler_cache, tmp_path, setter("torch", "version", value="2.0.0"))
    artifact = next((CacheLayout(root=tmp_path).entry_dir(name.hash) / "artifacts").iterdir())
    artifact.unlink()
    report = verify(cache_dir=tmp_path, repair=True)
    assert not report.ok
    assert [repair.action for repair in report.entries[0].repairs] == ["not_repaired"]
    assert not artifact.exists()


def test_verify_load_opens_every_artifact_and_calls_the_model_without_compiling(native_llama: Any) -> None:
    ran = cgtool("verify", "--cache-dir", native_llama.root, "--load", "--model", f"{SERVED}:llama", "--json")
    load = ran.report["load"]
    (entry,) = load["entries"]
    assert entry["opened"] == len({artifact["digest"] for artifact in native_llama.report["artifacts"]})
    assert entry["problems"] == []
    assert load["model"] == {"hash": native_llama.report["hash"], "called": True, "sentence": ""}
    assert load["compiled"] == []


CRASHES = """
#include <signal.h>
__attribute__((constructor)) static void crash() { raise(SIGSEGV); }
"""


def test_an_artifact_that_crashes_its_process_is_reported(native_llama: Any, tmp_path: Path) -> None:
    root = native_llama.root
    (tmp_path / "crash.cpp").write_text(CRASHES)
    library = tmp_path / "crash.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, tmp_path / "crash.cpp"], check=True)
    entry = read_entry(CacheLayout(root=root), only_name(root))
    row = entry.manifest.rows[-1]
    metadata = unpack(entry.artifact(row.artifact)).metadata
    origin, _ = split_origin(entry.artifact(row.artifact), "pt2")
    data = with_origin(pack(Package(native=library.read_bytes(), metadata=metadata)), "pt2", origin)

    def with_crash(manifest: Manifest) -> Manifest:
        digest = EntryWriter(CacheLayout(root=tmp_path / "cache"), key, rank=0, prefix="backbone").objects.put(
            data, "pt2"
        )
        crashing = replace(row, artifact=replace(row.artifact, digest=digest, size_bytes=len(data)))
        return replace(manifest, rows=(*manifest.rows[:-1], crashing))

    key = read_key(CacheLayout(root=root), only_name(root).hash)
    rekeyed(root, tmp_path / "cache", lambda _: None, rows=with_crash)
    ran = cgtool("verify", "--cache-dir", tmp_path / "cache", "--load")
    assert ran.code == 3
    assert "crashed with SIGSEGV. Warm the model again on this machine." in ran.out


CALLS_A_COMPILER = """
import subprocess

import torch


class Adder(torch.nn.Module):
    def forward(self, x):
        return x + 1


def build():
    subprocess.run(["g++", "nothing.cpp"], check=False, capture_output=True)
    return Adder().eval(), (torch.zeros(4),)
"""


def test_verify_load_reports_an_attempt_to_compile(tmp_path: Path) -> None:
    model = tmp_path / "compiling.py"
    model.write_text(CALLS_A_COMPILER)
    root = tmp_path / "cache"
    assert cgtool("warm", f"{model}:build", "--adaptor", "eager", "--cache-dir", root).code == 0
    ran = cgtool("verify", "--cache-dir", root, "--load", "--model", f"{model}:build")
    assert ran.code == 3
    assert "the model was loaded and called once in a process that cannot compile" in ran.out
    assert "Loading tried to compile:\n  - g++ nothing.cpp" in ran.out
    assert ran.out.splitlines()[-1].startswith("Verification failed: loading")
