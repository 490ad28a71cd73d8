"""Configurations of pydantic, attrs and the standard library: a hit in a fresh process, a miss if a field changes."""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import types
import typing
from pathlib import Path

import attrs
import pydantic
import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from trace_harness import EAGER

import cgtool
from cgtool.errors import CacheMissError

pytestmark = pytest.mark.torch


class Inner(pydantic.BaseModel):
    scale: float = 2.0


class Pydantic(pydantic.BaseModel):
    inner: Inner = Inner()
    kind: typing.Literal["a", "b"] = "a"
    names: dict[str, float] = pydantic.Field(default_factory=lambda: {"q": 1.0})

    @pydantic.field_validator("names")
    @classmethod
    def check_names(cls, names):
        return names

    @pydantic.computed_field
    @property
    def scale(self) -> float:
        return self.inner.scale


@attrs.define
class Attrs:
    scale: float = 2.0
    kind: str = "a"


@attrs.frozen
class Frozen:
    """attrs generates a `__hash__` for it, whose code has a number of this process."""

    scale: float = 2.0
    kind: str = "a"


@dataclasses.dataclass(slots=True)
class Slots:
    scale: float = 2.0
    kind: str = "a"


def namespace(**changed):
    return types.SimpleNamespace(**{"scale": 2.0, "kind": "a"} | changed)


def arguments(**changed):
    return argparse.Namespace(**{"scale": 2.0, "kind": "a"} | changed)


CONFIGS = {make.__name__: make for make in (Pydantic, Attrs, Frozen, Slots, namespace, arguments)}


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, x):
        return x * self.config.scale if self.config.kind == "a" else x


def load_all(root: Path) -> None:
    """Load and call a model of each configuration, as a fresh process does."""
    x = torch.ones(2)
    for name, make in CONFIGS.items():
        assert torch.equal(cgtool.load(Model(make()).eval(), cache_dir=root / name)(x), x * 2), name


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    root = tmp_path_factory.mktemp("configs")
    for name, make in CONFIGS.items():
        cgtool.compile(Model(make()).eval(), example_args=(torch.ones(2),), cache_dir=root / name, config=EAGER)
    return root


def test_a_fresh_process_loads_them(warmed):
    code = "import sys; from pathlib import Path; import test_trace_configs as m; m.load_all(Path(sys.argv[1]))"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "78"}
    subprocess.run([sys.executable, "-c", code, str(warmed)], env=environment, check=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_changed_field_is_a_miss(warmed, name):
    with pytest.raises(CacheMissError, match="kind"):
        cgtool.load(Model(CONFIGS[name](kind="b")).eval(), cache_dir=warmed / name)
