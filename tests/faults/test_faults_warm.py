"""A warm that is killed at any system call, and a load in which one fails."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
import torch
from faults_harness import TOLD, told, wrong_in
from syscalls import ALL, calls_of, each_kill, failed_at

import cgtool as package
from cgtool.compiler.pipeline import warm
from cgtool.config import CompilationConfig
from cgtool.errors import CacheMissError
from cgtool.model import ExampleCall, ModelSpec

pytestmark = pytest.mark.torch

INPUT = torch.arange(8.0).reshape(2, 4)


class Doubler(torch.nn.Module):
    """A model of one piece."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1


def warmed(folder: Path) -> bool:
    spec = ModelSpec(module=Doubler().eval(), calls=(ExampleCall(args=(INPUT,)),))
    config = CompilationConfig(adaptor="eager", jobs=0)
    return warm(spec, config=config, cache_dir=folder / "cache").hit


def loads(folder: Path) -> None:
    model = package.load(Doubler().eval(), cache_dir=folder / "cache")
    if not torch.equal(model(INPUT), INPUT * 2 + 1):
        raise AssertionError(model(INPUT))


def serves(folder: Path) -> bool:
    try:
        loads(folder)
    except CacheMissError:
        return False
    return True


@pytest.mark.parametrize("stride", [16, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
def test_warm_killed_at_any_syscall_leaves_no_entry_or_a_complete_one(tmp_path: Path, stride: int) -> None:
    (tmp_path / "start").mkdir()
    work = tmp_path / "work"
    # Complete the imports, whose calls would be counted.
    warmed(work)
    loads(work)
    there = []
    for call in each_kill(tmp_path / "start", work, lambda: warmed(work), stride=stride):
        there.append(serves(work))
        assert wrong_in(work) == [], call
        assert warmed(work) is there[-1], call
        assert serves(work), call
        assert wrong_in(work) == [], call
    assert there == sorted(there)
    assert {*there} == {False, True}


@pytest.mark.parametrize("sample", [10, pytest.param(None, marks=pytest.mark.slow)], ids=["some", "all"])
def test_load_with_a_failing_syscall_succeeds_or_raises_but_never_misses(tmp_path: Path, sample: int) -> None:
    warmed(tmp_path)
    loads(tmp_path)
    action = partial(told, loads, tmp_path)
    calls = calls_of(action, names=ALL, under=tmp_path / "cache")
    for call in calls if sample is None else random.Random(0).sample(calls, sample):
        ended = failed_at(call, "EIO", action)
        assert ended.code in (0, TOLD), f"{call}: {ended.said}"
        if ended.code == TOLD:
            assert str(tmp_path) in ended.said, call
            assert "nothing has been warmed" not in ended.said.lower(), call
            assert "has no entry for this model" not in ended.said, call
        loads(tmp_path)
