"""Another configuration, machine or state of torch is a miss; load, `warm --check` and `why` give the same reason."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

import msgspec
import torch
from small_model import EAGER, Model, spec

import cgtool
from cgtool import host
from cgtool.compiler import stitch as stitch_module
from cgtool.compiler.pipeline import warm
from cgtool.config import CompilationConfig
from cgtool.errors import CacheMissError
from cgtool.runtime import factors
from cgtool.store.layout import CacheLayout
from cgtool.toolkit.why import why_spec

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_grad")]


@pytest.fixture(scope="module")
def warm_root(tmp_path_factory) -> Path:
    """Return a cache with one entry, which tests must not change."""
    root = tmp_path_factory.mktemp("reasons") / "cache"
    with torch.no_grad():
        warm(spec(Model().eval()), config=EAGER, cache_dir=root)
    return root


def first_reason(root: Path, config: CompilationConfig = EAGER) -> str:
    """Return the first reason of a load that misses, of `warm --check` and of `why`."""
    target = spec(Model().eval())
    with pytest.raises(CacheMissError) as loaded:
        cgtool.load(target.module, cache_dir=root, config=config)
    with pytest.raises(CacheMissError) as checked:
        warm(target, config=config, cache_dir=root, check=True)
    report = why_spec(target, config=config, cache_dir=root)
    reason = report.reasons[0].sentence
    assert [str(error.value.reasons[0]) for error in (loaded, checked)] == [reason, reason]
    return reason


CONFIGS = {
    "level": ({"level": 2}, r"config\.(level|splitting_ops)"),
    "splitting_ops": ({"splitting_ops": ("aten::tanh",)}, r"config\.splitting_ops"),
    "adaptor": ({"adaptor": "inductor_standalone"}, r"config\.adaptor"),
    "use_inductor": ({"adaptor": "", "use_inductor": True}, r"config\.adaptor"),  # reported as the adaptor
    "inductor_compile_config": (
        {"inductor_compile_config": {"epilogue_fusion": False}},
        r"config\.inductor_compile_config",
    ),
}


def test_every_key_field_is_tested():
    from cgtool.config import FIELDS

    assert set(CONFIGS) == {name for name, spec in FIELDS.items() if spec.kind == "key"}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_key_field_of_the_configuration_is_a_miss(name, warm_root):
    fields, pattern = CONFIGS[name]
    assert re.search(pattern, first_reason(warm_root, CompilationConfig(**{"adaptor": "eager", **fields})))


#: The function that inspects the machine, its value, and the first reason.
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


@pytest.mark.parametrize(("target", "value", "pattern"), MACHINES)
def test_another_environment_is_a_miss(target, value, pattern, warm_root, monkeypatch):
    monkeypatch.setattr(*target, lambda: value)
    assert re.search(pattern, first_reason(warm_root))


def test_a_variable_of_the_environment_is_a_miss(warm_root, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    assert "variable TORCHINDUCTOR_MAX_AUTOTUNE was unset" in first_reason(warm_root)


def test_another_python_is_a_miss(warm_root, monkeypatch):
    # every code digest differs as well, but the version is the readable reason
    monkeypatch.setattr("sys.version_info", (3, 99, 0, "final", 0))
    monkeypatch.setattr(host, "python_name", lambda: "cpython 3.99")
    assert re.search(r"python.*3\.99", first_reason(warm_root))


def test_an_inductor_setting_is_a_miss(warm_root):
    import torch._inductor.config as inductor

    with inductor.patch(epilogue_fusion=not inductor.epilogue_fusion):
        assert re.search("inductor.*epilogue_fusion", first_reason(warm_root))


def test_the_order_of_guards_does_not_change_the_key(warm_root, tmp_path, monkeypatch):
    as_it_is = stitch_module.stitch

    def turned(*arguments, **named):
        found = as_it_is(*arguments, **named)
        variants = [msgspec.structs.replace(v, model_guards=v.model_guards[::-1]) for v in found.plan.variants]
        assert any(len(variant.model_guards) > 1 for variant in variants)
        return dataclasses.replace(found, plan=msgspec.structs.replace(found.plan, variants=tuple(variants)))

    monkeypatch.setattr(stitch_module, "stitch", turned)
    result = warm(spec(Model().eval()), config=EAGER, cache_dir=tmp_path)
    assert CacheLayout(root=warm_root).hashes() == [result.hash]
