"""Models with collectives in forward, which every rank of a group warms, loads and compares with eager.

The program: `collectives_model.py ROOT ADAPTOR JOBS NAME...` prints {name: result} as this rank's JSON.
"""

from __future__ import annotations

import ctypes
import datetime as dt
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.distributed.nn  # imported later, by Dynamo, it would keep the group and its threads alive until the end
from torch import nn

import cgtool

WIDTH = 8
GROUPS = {}


def all_reduce(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """Find the group by a name that torch does not know, as vLLM's op does."""
    total = x.clone()
    dist.all_reduce(total, group=GROUPS[group_name])
    return total


cgtool.direct_register_custom_op(
    "all_reduce", all_reduce, mutates_args=[], fake_impl=lambda x, _: torch.empty_like(x), namespace="collective_tests"
)


def hold(x: torch.Tensor) -> torch.Tensor:
    """Hold the GIL forever, as a collective that waits for it does."""
    ctypes.PyDLL(None).sleep(600)
    return x.clone()


cgtool.direct_register_custom_op(
    "hold", hold, mutates_args=[], fake_impl=torch.empty_like, namespace="collective_tests"
)


class Model(nn.Module):
    """Two layers with a collective between them."""

    dynamic = True

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.exchange(self.up(x).relu())).relu()


class InPlace(Model):
    def exchange(self, x):
        dist.all_reduce(x)
        return x


class AllReduce(Model):
    def exchange(self, x):
        return collectives.all_reduce(x, "sum", dist.group.WORLD)


class ByName(Model):
    def exchange(self, x):
        return collectives.all_reduce(x, "max", dist.group.WORLD.group_name)


class AllGather(Model):
    def exchange(self, x):
        return collectives.all_gather_tensor(x, 0, dist.group.WORLD)


class ReduceScatter(Model):
    def exchange(self, x):
        size = dist.get_world_size()
        return collectives.reduce_scatter_tensor(x.repeat(size, 1), "sum", 0, dist.group.WORLD)


class AllToAll(Model):
    dynamic = False  # a tensor of sizes is part of the op

    def exchange(self, x):
        sizes = [len(x) // dist.get_world_size()] * dist.get_world_size()
        return collectives.all_to_all_single(x, sizes, sizes, dist.group.WORLD)


class Subgroup(Model):
    def __init__(self):
        super().__init__()
        pairs = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)]
        self.group = pairs[dist.get_rank() // 2]

    def exchange(self, x):
        return collectives.all_reduce(x, "sum", self.group)


class TwoGroups(Subgroup):
    def exchange(self, x):
        return collectives.all_reduce(super().exchange(x) * 0.5, "sum", dist.group.WORLD)


class CustomOp(Model):
    def exchange(self, x):
        return torch.ops.collective_tests.all_reduce(x, "tp")


class WrongOnOne(AllReduce):
    def exchange(self, x):
        wrong = torch.compiler.is_compiling() and dist.get_rank() == 1
        return super().exchange(x) * (2 if wrong else 1)


class WrongAtItsOnlySize(WrongOnOne):
    dynamic = False


class Holding(Model):
    def exchange(self, x):
        return torch.ops.collective_tests.hold(x)


class Mesh(Model):
    def __init__(self):
        super().__init__()
        self.mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))

    def exchange(self, x):
        from torch.distributed.tensor import DTensor, Partial, Replicate

        return DTensor.from_local(x, self.mesh, [Partial()]).redistribute(self.mesh, [Replicate()]).to_local()


def drawn(rows):
    rank = dist.get_rank()
    return torch.randn(rows * dist.get_world_size(), WIDTH, generator=torch.Generator().manual_seed(10 * rows + rank))


def result_of(name, root, config):
    """Return whether the loaded model equals eager at several sizes, or the error."""
    try:
        model = globals()[name]().eval()
        dynamic = {"x": {0: ("rows", 2, 64)}} if model.dynamic else {}
        cgtool.compile(model, example_args=(drawn(2),), dynamic=dynamic, config=config, cache_dir=root)
        loaded = cgtool.load(model, cache_dir=root, config=config)
    except cgtool.CgtoolError as error:
        return str(error)
    inputs = [drawn(rows) for rows in ((1, 2, 5) if model.dynamic else (2,))]
    return [torch.allclose(loaded(x), model(x), atol=1e-5) for x in inputs]


def build(name="TwoGroups"):
    """Return a model for `cgtool warm`, which created the process group."""
    dynamic = {"x": {0: ("rows", 2, 64)}}
    return cgtool.ModelSpec(
        module=globals()[name]().eval(), calls=[cgtool.ExampleCall(args=(drawn(2),))], dynamic=dynamic
    )


def build_alone(name):
    """Return a model for `cgtool warm` in a group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return build(name)


def build_together(name):
    """Return a model for `cgtool warm` by the ranks of a launcher."""
    dist.init_process_group("gloo")
    return build(name)


def loaded_equals(name, root):
    model = globals()[name]().eval()
    loaded = cgtool.load(model, cache_dir=root)
    return [torch.allclose(loaded(x), model(x), atol=1e-5) for x in map(drawn, (1, 2, 5))]


def main(root, adaptor, jobs, *names):
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=60))
    GROUPS["tp"] = dist.group.WORLD
    config = cgtool.CompilationConfig(adaptor=adaptor, jobs=int(jobs))
    with torch.no_grad():
        only_load = "ONLY_LOAD" in os.environ
        results = {name: loaded_equals(name, root) if only_load else result_of(name, root, config) for name in names}
    dist.destroy_process_group()
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
