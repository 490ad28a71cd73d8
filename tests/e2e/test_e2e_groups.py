"""Process groups in forward: stored as data and found again in the next process; another group is a miss."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import nn

import cgtool
from cgtool import CacheMissError, CompilationConfig
from cgtool.guards._torch import join_fake_group
from cgtool.guards.code import code_digest

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed"),
]


@pytest.fixture(autouse=True)
def one_process(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    with torch.no_grad():
        yield
    dist.destroy_process_group()


class OfTheWorld(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return collectives.all_reduce(self.layer(x), "sum", dist.group.WORLD).relu()


class InPlace(OfTheWorld):
    def forward(self, x):
        y = self.layer(x)
        dist.all_reduce(y)
        return y.relu()


class Held(OfTheWorld):
    def __init__(self):
        super().__init__()
        self.group = dist.new_group([0])

    def forward(self, x):
        return collectives.all_reduce(self.layer(x), "sum", self.group) * self.group.size()


def all_reduced(x: torch.Tensor) -> torch.Tensor:
    total = x.clone()
    dist.all_reduce(total)
    return total


cgtool.direct_register_custom_op(
    "all_reduced", all_reduced, mutates_args=[], fake_impl=torch.empty_like, namespace="group_tests"
)


class WithinAnOp(OfTheWorld):
    def forward(self, x):
        return torch.ops.group_tests.all_reduced(self.layer(x)).relu()


@pytest.mark.parametrize("kind", [OfTheWorld, InPlace, Held, WithinAnOp])
def test_a_group_in_forward_is_stored_as_data(tmp_path, kind):
    model = kind().eval()
    config, example = CompilationConfig(adaptor="eager"), torch.randn(3, 8)
    served = cgtool.compile(
        model, example_args=(example,), dynamic={"x": {0: "n"}}, config=config, cache_dir=tmp_path / "cache"
    )
    (manifest,) = (tmp_path / "cache").rglob("manifest.json")
    assert '"proved_at"' in manifest.read_text()
    loaded = cgtool.load(model, cache_dir=tmp_path / "cache")
    for x in (example, torch.randn(1, 8), torch.randn(7, 8)):
        assert torch.equal(served(x), model(x))
        assert torch.equal(loaded(x), model(x))


def reduced_across(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor with other strides than the fake implementation's."""
    return all_reduced(x).t().contiguous().t()


cgtool.direct_register_custom_op(
    "reduced_across",
    reduced_across,
    mutates_args=[],
    fake_impl=torch.empty_like,
    namespace="group_tests",
    splitting=True,
)


class Across(OfTheWorld):
    def forward(self, x):
        return torch.ops.group_tests.reduced_across(self.layer(x)) + 1


def test_ranks_repeat_all_calls_if_eager_outputs_have_other_strides(tmp_path):
    model, x = Across().eval(), torch.randn(3, 8)
    config = CompilationConfig(adaptor="eager", jobs=0)
    served = cgtool.compile(model, example_args=(x,), config=config, cache_dir=tmp_path)
    assert served(x).stride() == model(x).stride() == (1, 3)
    (manifest,) = tmp_path.rglob("manifest.json")
    assert '"proved_at"' in manifest.read_text()


class Cut(OfTheWorld):
    """A model whose collective fails if CUT is set, as it does if another rank is gone."""

    def forward(self, x):
        return torch.ops.group_tests.cut(self.layer(x)).relu()


def cut(x: torch.Tensor) -> torch.Tensor:
    total = x.clone()
    dist.broadcast(total, src=len(os.environ.get("CUT", "")))
    return total


cgtool.direct_register_custom_op("cut", cut, mutates_args=[], fake_impl=torch.empty_like, namespace="group_tests")


def test_a_later_warm_proves_a_call_whose_collective_failed(tmp_path, monkeypatch):
    model = Cut().eval()
    for is_cut in (True, False):
        monkeypatch.setenv("CUT", "!" if is_cut else "")
        config = CompilationConfig(adaptor="eager", jobs=0)
        cgtool.compile(model, example_args=(torch.randn(3, 8),), config=config, cache_dir=tmp_path / "cache")
        (manifest,) = (tmp_path / "cache").rglob("manifest.json")
        assert ('"proved_at"' in manifest.read_text()) is not is_cut
        assert '"proof_gap"' not in manifest.read_text()


def test_the_digest_of_a_function_does_not_depend_on_the_default_group_as_a_default():
    def taking(default):
        def reduced(x, group=default):
            return x, group

        return reduced

    assert code_digest(taking(dist.group.WORLD)) == code_digest(taking(None)) != code_digest(taking(3))


def test_a_group_of_the_same_ranks_hits_under_any_name(tmp_path):
    model, x = Held().eval(), torch.randn(3, 8)
    config = CompilationConfig(adaptor="eager", jobs=0)
    cgtool.compile(model, example_args=(x,), config=config, cache_dir=tmp_path)
    first, model.group = model.group.group_name, dist.new_group([0])
    assert model.group.group_name != first
    assert torch.equal(cgtool.load(model, cache_dir=tmp_path)(x), model(x))


class Named(OfTheWorld):
    def __init__(self):
        super().__init__()
        self.name = dist.new_group([0]).group_name

    def forward(self, x):
        return collectives.all_reduce(self.layer(x), "sum", self.name)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        pytest.param(Held, r"group was process group \[0\] \(rank 0 of 1\)", id="held"),
        pytest.param(Named, r"group that torch names '\d+' was process group \[0\] \(rank 0 of 1\)", id="named"),
    ],
)
def test_a_group_of_other_ranks_is_a_miss_that_names_it(tmp_path, make, what):
    model = make().eval()
    config, example = CompilationConfig(adaptor="eager", proof=False), torch.randn(3, 8)
    cgtool.compile(model, example_args=(example,), config=config, cache_dir=tmp_path)
    dist.destroy_process_group()
    join_fake_group(0, 2)
    model.group = dist.new_group([0, 1])
    assert model.group.group_name == getattr(model, "name", model.group.group_name)
    with pytest.raises(CacheMissError, match=what + r" .* is process group \[0, 1\] \(rank 0 of 2\) now"):
        cgtool.load(model, cache_dir=tmp_path)
