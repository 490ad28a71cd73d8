"""Never a false miss: where things lie, what the process is called, and what forward does not look at cause none."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import sweep_subject as subject
import torch
from torch import nn

import cgtool
from cgtool.build import stitch as stitch_module
from cgtool.build.pipeline import warm
from cgtool.cache.layout import CacheLayout
from cgtool.config import CompilationConfig

pytestmark = pytest.mark.torch

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
LOAD = (
    "import sys, sweep_subject as s, torch, cgtool; m = s.build().module; "
    "l = cgtool.load(m, cache_dir=sys.argv[1]); torch.set_grad_enabled(False); x = s.example(); "
    "torch.testing.assert_close(l(x), m(x)); print('hit')"
)


@pytest.fixture(scope="session")
def same_root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("same") / "cache"
    with torch.no_grad():
        warm(subject.build(), config=CompilationConfig(adaptor="eager"), cache_dir=root)
    return root


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


def test_the_order_in_which_dynamo_names_its_guards_makes_no_other_entry(same_root, tmp_path, monkeypatch):
    def turned(*arguments):
        found = stitch_module.stitch_as_it_is(*arguments)
        variants = [replace(v, model_guards=v.model_guards[::-1]) for v in found.plan.variants]
        assert any(len(variant.model_guards) > 1 for variant in variants)
        return replace(found, plan=replace(found.plan, variants=tuple(variants)))

    monkeypatch.setattr(stitch_module, "stitch_as_it_is", stitch_module.stitch, raising=False)
    monkeypatch.setattr(stitch_module, "stitch", turned)
    with torch.no_grad():
        result = warm(subject.build(), config=CompilationConfig(adaptor="eager"), cache_dir=tmp_path)
    assert CacheLayout(root=same_root).hashes() == [result.hash]


PROCESSES = {
    "another home, folder, port and rank of the port's group": (
        {
            "HOME": "{tmp}",
            "MASTER_PORT": "29501",
            "MASTER_ADDR": "10.0.0.1",
            "XDG_CACHE_HOME": "{tmp}/x",
            "WORLD_SIZE": "1",
        },
        LOAD,
    ),
    "another hash seed": ({"PYTHONHASHSEED": "12345"}, LOAD),
    "Inductor and Dynamo imported first": ({}, "import torch._inductor.config, torch._dynamo; " + LOAD),
    "cgtool imported before torch": ({}, "import cgtool; import cgtool.build.pipeline; " + LOAD),
    "torch's logs": ({"TORCH_LOGS": "+dynamo", "TORCHINDUCTOR_CACHE_DIR": "{tmp}/inductor"}, LOAD),
    "other numbers of threads": ({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}, LOAD),
    "another rank's devices": ({"CUDA_VISIBLE_DEVICES": ""}, LOAD),
}


@pytest.mark.parametrize("name", PROCESSES)
def test_another_process_hits(name, same_root, tmp_path):
    environment, script = PROCESSES[name]
    environment = {key: value.format(tmp=tmp_path) for key, value in environment.items()}
    assert "hit" in python("-c", script, str(same_root), cwd=tmp_path, **environment)


def test_another_install_path_of_cgtool_and_of_the_model_hits(same_root, tmp_path):
    shutil.copytree(ROOT / "cgtool", tmp_path / "site" / "cgtool", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "models").mkdir()
    shutil.copy(HERE / "sweep_subject.py", tmp_path / "models")
    moved = tmp_path / "moved"
    shutil.copytree(same_root, moved)
    assert "hit" in python("-c", LOAD, str(moved), cwd=tmp_path, path=(tmp_path / "site", tmp_path / "models"))


def test_a_character_in_a_traced_file_is_a_miss(same_root, tmp_path):
    text = (HERE / "sweep_subject.py").read_text()
    for number, edited in enumerate((text + "# a comment\n", text.replace("x * 1.0625", "x * 1.0626"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "sweep_subject.py").write_text(edited)
        script = LOAD.replace("l = cgtool", "\ntry: cgtool").split("; torch.set_grad")[0]
        script += "\nexcept cgtool.CacheMissError as e: print(e.reasons[0])"
        assert "sources.sweep_subject has changed" in python(
            "-c", script, str(same_root), cwd=tmp_path, path=(ROOT, folder)
        )


@pytest.mark.parametrize("module", [False, True])
def test_a_script_that_defines_its_model_hits_what_was_warmed_from_outside(module, tmp_path):
    shutil.copy(HERE / "sweep_subject.py", tmp_path / "serve.py")
    cache = str(tmp_path / "cache")
    arguments = ["-m", "cgtool", "warm", "serve.py:build", "--adaptor", "eager", "--cache-dir", cache, "--quiet"]
    python(*arguments, cwd=tmp_path, path=(ROOT,))
    script = ("-m", "serve") if module else ("serve.py",)
    assert "hit" in python(*script, cache, cwd=tmp_path, path=(ROOT,))
    # and it is one entry for another folder, too
    other = tmp_path / "other"
    other.mkdir()
    assert "hit" in python(str(tmp_path / "serve.py"), cache, cwd=other, path=(ROOT,))


def count(module):
    module.layers[0].calls = 17
    module.layers[1].unused = {"b": 2}
    module.seen = "today"
    module.more = {"a": object()}


def load_weights(module):
    other = subject.build().module
    with torch.no_grad():
        for tensor in other.parameters():
            tensor.mul_(1.5)
    module.load_state_dict(other.state_dict())


def assign_weights(module):
    module.layers[0].linear.weight = nn.Parameter(torch.randn(8, 8))
    module.load_state_dict({name: torch.randn_like(t) for name, t in module.state_dict().items()}, assign=True)
    module.last.weight = module.first.weight


UNRELATED: dict[str, Callable[[nn.Module], object]] = {
    "attributes that forward does not read": count,
    "weights of other values": load_weights,
    "weights that are other tensors": assign_weights,
    "frozen weights": lambda m: m.requires_grad_(False),
    "training and back": lambda m: m.train().eval(),
    "a hook that came and went": lambda m: m.layers[0].register_forward_hook(lambda *a: None).remove(),
    "a new equal closure": lambda m: setattr(m, "closure", subject.make_closure(0.75)),
    "equal settings": lambda m: setattr(m, "settings", subject.Settings()),
    "a state dict": lambda m: m.state_dict(),
    "moved to its own device": lambda m: m.to("cpu"),
}


@pytest.mark.parametrize("name", UNRELATED)
def test_what_forward_does_not_look_at_is_no_miss(name, same_root):
    module = subject.build().module
    UNRELATED[name](module)
    loaded = cgtool.load(module, cache_dir=same_root)
    with torch.no_grad():
        torch.testing.assert_close(loaded(subject.example()), module(subject.example()))
        UNRELATED[name](module)
        loaded.recheck()
        torch.testing.assert_close(loaded(subject.example()), module(subject.example()))


def test_a_call_before_load_is_no_miss(same_root):
    module = subject.build().module
    with torch.no_grad():
        module(subject.example())
        torch.compile(module, backend="eager")(subject.example())
    cgtool.load(module, cache_dir=same_root)


def test_unrelated_names_of_the_module_are_no_miss(same_root, monkeypatch):
    monkeypatch.setattr(subject, "UNRELATED", object(), raising=False)
    monkeypatch.setattr(subject, "other_helper", lambda x: x)
    monkeypatch.setitem(subject.TABLE, "comment", "added")
    cgtool.load(subject.build().module, cache_dir=same_root)


def test_logging_that_the_user_set_up_is_no_miss(same_root):
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    logger.setLevel(logging.DEBUG)
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)
    try:
        cgtool.load(subject.build().module, cache_dir=same_root)
    finally:
        logging.getLogger().removeHandler(handler)
        logger.setLevel(level)


def test_a_model_that_was_warmed_fake_serves_real_weights(tmp_path):
    from cgtool.models import resolve_model

    spec = resolve_model(f"{HERE / 'sweep_subject.py'}:build")
    with torch.no_grad():
        warm(spec, config=CompilationConfig(adaptor="eager"), cache_dir=tmp_path)
    module = subject.build().module
    loaded = cgtool.load(module, cache_dir=tmp_path)
    for rows in (1, 2, 9):
        x = subject.example()[:1].repeat(rows, 1)
        with torch.no_grad():
            torch.testing.assert_close(loaded(x), module(x))


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
