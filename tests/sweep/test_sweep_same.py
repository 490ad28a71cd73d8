"""Never a false miss: where things lie and how the process was started cause none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import msgspec
import sweep_subject as subject
import torch
from cli_harness import environment, forked, run
from torch import nn

import cgtool
from cgtool.compiler import stitch as stitch_module
from cgtool.compiler.pipeline import warm
from cgtool.config import CompilationConfig
from cgtool.store.layout import CacheLayout

pytestmark = pytest.mark.torch

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
LOAD = (
    "import sys, sweep_subject as s, torch, cgtool; m = s.build().module; "
    "l = cgtool.load(m, cache_dir=sys.argv[1]); torch.set_grad_enabled(False); x = s.example(); "
    "torch.testing.assert_close(l(x), m(x)); print('hit')"
)


def python(*arguments: str, cwd: Path, path: tuple[Path, ...] = (ROOT, HERE), **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_order_in_which_dynamo_names_its_guards_makes_no_other_entry(warm_root, tmp_path, monkeypatch):
    def turned(*arguments, **named):
        found = stitch_module.stitch_as_it_is(*arguments, **named)
        variants = [msgspec.structs.replace(v, model_guards=v.model_guards[::-1]) for v in found.plan.variants]
        assert any(len(variant.model_guards) > 1 for variant in variants)
        return replace(found, plan=msgspec.structs.replace(found.plan, variants=tuple(variants)))

    monkeypatch.setattr(stitch_module, "stitch_as_it_is", stitch_module.stitch, raising=False)
    monkeypatch.setattr(stitch_module, "stitch", turned)
    with torch.no_grad():
        result = warm(subject.build(), config=CompilationConfig(adaptor="eager"), cache_dir=tmp_path)
    assert CacheLayout(root=warm_root).hashes() == [result.hash]


PROCESSES = {
    "another home, folder, port, hash seed, number of threads, rank's devices, and torch's logs": (
        {
            "HOME": "{tmp}",
            "MASTER_PORT": "29501",
            "MASTER_ADDR": "10.0.0.1",
            "XDG_CACHE_HOME": "{tmp}/x",
            "WORLD_SIZE": "1",
            "PYTHONHASHSEED": "12345",
            "TORCH_LOGS": "+dynamo",
            "TORCHINDUCTOR_CACHE_DIR": "{tmp}/inductor",
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        LOAD,
    ),
    "cgtool imported before torch": ({}, "import cgtool; import cgtool.compiler.pipeline; " + LOAD),
}


@pytest.mark.parametrize("name", PROCESSES)
def test_another_process_hits(name, warm_root, tmp_path):
    environment, script = PROCESSES[name]
    environment = {key: value.format(tmp=tmp_path) for key, value in environment.items()}
    assert "hit" in python("-c", script, str(warm_root), cwd=tmp_path, **environment)


def test_a_process_that_has_imported_dynamo_and_inductor_hits(warm_root, tmp_path):
    path = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE)))}
    done = forked(
        f"import torch._inductor.config; {LOAD}", warm_root, cwd=tmp_path, env=environment(**path), compiles=True
    )
    assert done.out.strip() == "hit", done.err


def test_a_script_that_defines_its_model_hits_what_was_warmed_from_outside(tmp_path):
    shutil.copy(HERE / "sweep_subject.py", tmp_path / "serve.py")
    cache = str(tmp_path / "cache")
    done = run("warm", "serve.py:build", "--adaptor", "eager", "--cache-dir", cache, "--quiet", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "hit" in python("-m", "serve", cache, cwd=tmp_path, path=(ROOT,))
    # and it is one entry for another folder, too
    other = tmp_path / "other"
    other.mkdir()
    assert "hit" in python(str(tmp_path / "serve.py"), cache, cwd=other, path=(ROOT,))


def test_warming_again_is_a_hit_whatever_an_argument_is(tmp_path):
    class Thing:
        pass

    thing = Thing()

    class Takes(nn.Module):
        def forward(self, x, thing):
            return x + 1

    for _ in range(2):
        spec = cgtool.ModelSpec(
            module=Takes().eval(), calls=[cgtool.ExampleCall(args=(torch.ones(2), Thing()))], dynamic={}
        )
        with torch.no_grad():
            result = warm(spec, config=CompilationConfig(adaptor="eager"), cache_dir=tmp_path)
    assert result.hit, result.reasons
    del thing
