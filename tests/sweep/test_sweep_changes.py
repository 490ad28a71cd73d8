"""Never a wrong hit: another configuration, machine or state of torch is a miss, or a call that is refused by name.

Of the miss, `load`, `warm --check`, `why` and `diff` name what changed first.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

import sweep_subject as subject
import torch

import cgtool
from cgtool import host
from cgtool.compiler.pipeline import warm
from cgtool.config import CompilationConfig
from cgtool.errors import CacheMissError, GuardError
from cgtool.runtime import factors
from cgtool.runtime.factors import Live
from cgtool.store import key as cache_key
from cgtool.store.layout import CacheLayout
from cgtool.store.pruned import PrunedEntry, note_pruned
from cgtool.toolkit.diff.entries import EntrySide, compare_entries
from cgtool.toolkit.why import why_spec

pytestmark = pytest.mark.torch

EAGER = CompilationConfig(adaptor="eager")


def first_reason(root: Path, config: CompilationConfig = EAGER) -> str:
    """Return the first reason of a load that misses, of `warm --check` and of `why`."""
    spec = subject.build()
    with pytest.raises(CacheMissError) as loaded:
        cgtool.load(spec.module, cache_dir=root, config=config)
    with pytest.raises(CacheMissError) as checked:
        warm(spec, config=config, cache_dir=root, check=True)
    with torch.no_grad():
        told = why_spec(spec, config=config, cache_dir=root)
    reason = told.reasons[0].sentence
    assert [str(error.value.reasons[0]) for error in (loaded, checked)] == [reason, reason]
    return reason


def first_difference(root: Path, other: Path, config: CompilationConfig = EAGER) -> str:
    """Return what `diff` names first between the entry of `root` and that of a warm of now."""
    with torch.no_grad():
        warm(subject.build(), config=config, cache_dir=other)
    one, two = (CacheLayout(root=folder) for folder in (root, other))
    return compare_entries(*(EntrySide(layout, *layout.hashes()) for layout in (one, two)))[0].sentence


CONFIGS = {
    "level": ({"level": 2}, r"config\.(level|splitting_ops)"),
    "splitting_ops": ({"splitting_ops": ("cgtool_sweep::inside",)}, r"config\.splitting_ops"),
    "adaptor": ({"adaptor": "inductor_standalone"}, r"config\.adaptor"),
    "use_inductor": ({"adaptor": "", "use_inductor": True}, r"config\.adaptor"),  # what it says is said by the adaptor
    "inductor_compile_config": (
        {"inductor_compile_config": {"epilogue_fusion": False}},
        r"config\.inductor_compile_config",
    ),
}


def test_every_key_field_is_swept():
    from cgtool.config import FIELD_KINDS

    assert set(CONFIGS) == {name for name, kind in FIELD_KINDS.items() if kind == "key"}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_key_field_of_the_configuration_is_a_miss(name, warm_root):
    fields, words = CONFIGS[name]
    assert re.search(words, first_reason(warm_root, CompilationConfig(**{"adaptor": "eager", **fields})))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "splitting_ops" else pytest.mark.slow) for name in CONFIGS]
)
def test_a_key_field_of_the_configuration_is_the_first_difference(name, warm_root, tmp_path):
    fields, words = CONFIGS[name]
    config = CompilationConfig(**{"adaptor": "eager", **fields})
    assert re.search(words, first_difference(warm_root, tmp_path, config))


#: What is asked, what it says, and how that is told.
MACHINES = [
    (
        (factors, "_torch_build"),
        {"version": "9.9.9", "version_git": "0", "with_cuda": None, "with_hip": None},
        r"torch\.version .*9\.9\.9",
    ),
    ((host, "triton_version"), "9.9.9", r"triton.*9\.9\.9"),
    ((host, "compiler_version"), "g++ 99.1", r"compiler.*99\.1"),
    ((factors, "_cpu"), {"machine": "riscv", "capability": "DEFAULT", "instructions": None}, r"target\.cpu"),
    ((factors, "_accelerators"), ["sm_90 x132"], r"target\.accelerators"),
]


@pytest.mark.parametrize(("asked", "value", "words"), MACHINES)
def test_another_environment_is_a_miss(asked, value, words, warm_root, monkeypatch):
    monkeypatch.setattr(*asked, lambda: value)
    assert re.search(words, first_reason(warm_root))


@pytest.mark.slow
@pytest.mark.parametrize("change", MACHINES)
def test_another_environment_is_the_first_difference(change, warm_root, tmp_path, monkeypatch):
    asked, value, words = change
    monkeypatch.setattr(*asked, lambda: value)
    assert re.search(words, first_difference(warm_root, tmp_path))


@pytest.mark.slow
def test_a_variable_of_the_environment_is_a_miss_and_the_first_difference(warm_root, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    assert "TORCHINDUCTOR_MAX_AUTOTUNE" in first_reason(warm_root)
    difference = first_difference(warm_root, tmp_path)
    assert difference == ('the environment variable TORCHINDUCTOR_MAX_AUTOTUNE was unset and is "1" now')


def test_another_python_is_a_miss(warm_root, monkeypatch):
    # every digest of code differs too; the version is what a person understands
    monkeypatch.setattr("sys.version_info", (3, 99, 0, "final", 0))
    monkeypatch.setattr(host, "python_name", lambda: "cpython 3.99")
    assert re.search(r"python.*3\.99", first_reason(warm_root))


def test_an_inductor_setting_is_a_miss(warm_root):
    import torch._inductor.config as inductor

    with inductor.patch(epilogue_fusion=not inductor.epilogue_fusion):
        assert re.search("inductor.*epilogue_fusion", first_reason(warm_root))


@pytest.fixture
def restored_state() -> Iterator[None]:
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(False)


STATES = {
    "float32 matmul precision": (lambda: torch.set_float32_matmul_precision("medium"), r"precision.*medium"),
    "deterministic": (lambda: torch.use_deterministic_algorithms(True), "determinis"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_global_setting_is_a_miss_and_a_refused_call(name, warm_root, restored_state):
    change, words = STATES[name]
    module = subject.build().module
    loaded = cgtool.load(module, cache_dir=warm_root)
    change()
    assert re.search(words, first_reason(warm_root))
    with torch.no_grad(), pytest.raises(GuardError, match=words.split(".*")[0]):
        loaded(subject.example())


def test_the_order_of_reasons_covers_every_factor():
    assert set(factors.environment_factors()) <= set(cache_key.FACTOR_ORDER) | {"precision", "inductor_environment"}


def test_the_same_model_hits_and_its_entry_equals_itself(warm_root, tmp_path):
    with torch.no_grad():
        report = why_spec(subject.build(), config=EAGER, cache_dir=warm_root)
    assert report.hit
    assert report.entry is not None
    assert ([report.entry.hash], report.entry.model) == (CacheLayout(root=warm_root).hashes(), "Subject")
    assert (report.nearest, report.reasons, report.run) == (None, (), "")
    shutil.copytree(warm_root, tmp_path / "copy")
    sides = (EntrySide(CacheLayout(root=root), report.entry.hash) for root in (warm_root, tmp_path / "copy"))
    assert compare_entries(*sides) == []


def test_a_model_whose_entry_was_pruned_misses_with_the_record_of_it(warm_root, tmp_path):
    layout = CacheLayout(root=tmp_path / "copy")
    shutil.copytree(warm_root, layout.root)
    spec = subject.build()
    (hash_,) = layout.hashes()
    entry = PrunedEntry(hash=hash_, model="Subject", when="2026-01-31T12:00:00Z", why="not used for 31 days")
    note_pruned(layout, {Live.of(spec.module).lookup: [entry]})
    assert why_spec(spec, config=EAGER, cache_dir=layout.root).pruned is None  # it is there
    shutil.rmtree(layout.entry_dir(hash_))
    report = why_spec(spec, config=EAGER, cache_dir=layout.root)
    assert (report.hit, report.nearest) == (False, None)
    assert report.pruned is not None
    assert report.pruned.entries == (entry,)
