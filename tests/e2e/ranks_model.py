"""An MLP over two ranks: each has half of the hidden width, and a splitting op adds the halves."""

from __future__ import annotations

import json
import os
import signal
import sys

import torch
import torch.distributed.nn  # imported later, by Dynamo, it would keep the group and its threads alive until the end
from torch import nn

import cgtool
from cgtool.serving.forward_context import BatchDescriptor, ForwardContext, set_forward_context
from cgtool.serving.graphs import CudaGraphs

WIDTH, HIDDEN = 16, 32


def add_up(x: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks, or a copy if there is no group."""
    total = x.clone()
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(total)
    return total


cgtool.direct_register_custom_op(
    "add_up", add_up, mutates_args=[], fake_impl=torch.empty_like, namespace="rank_tests", splitting=True
)


def numbers(*shape):
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32) * 0.37).sin().view(shape) / shape[-1] ** 0.5


class Block(nn.Module):
    def __init__(self, rank, world_size):
        super().__init__()
        part = slice(rank * HIDDEN // world_size, (rank + 1) * HIDDEN // world_size)
        self.up = nn.Parameter(numbers(HIDDEN, WIDTH)[part].clone(), requires_grad=False)
        self.down = nn.Parameter(numbers(WIDTH, HIDDEN)[:, part].clone(), requires_grad=False)

    def forward(self, x):
        return x + torch.ops.rank_tests.add_up(torch.relu(x @ self.up.t()) @ self.down.t())


class Blocks(nn.Module):
    def __init__(self, rank, world_size):
        super().__init__()
        self.blocks = nn.ModuleList(Block(rank, world_size) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def build(world_size=2, device="cpu"):
    module = Blocks(0, world_size).eval().to(device)  # the halves differ only in values
    example = cgtool.ExampleCall(args=(numbers(4, WIDTH).to(device),))
    return cgtool.ModelSpec(module=module, calls=[example], dynamic={"x": {0: ("rows", 2, 64)}})


class Uneven(Blocks):
    """Blocks with a head that is larger on the last rank."""

    def __init__(self, rank, world_size):
        super().__init__(rank, world_size)
        self.head = nn.Linear(WIDTH, 4 + rank)

    def forward(self, x):
        return self.head(super().forward(x))


def build_uneven():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    example = cgtool.ExampleCall(args=(numbers(4, WIDTH),))
    return cgtool.ModelSpec(
        module=Uneven(rank, world_size).eval(), calls=[example], dynamic={"x": {0: ("rows", 2, 64)}}
    )


def build_where_one_fails(which=1):
    if os.environ["RANK"] == str(which):
        msg = f"the weights of rank {which} are not there"
        raise ValueError(msg)
    return build()


def build_where_one_dies():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return build()


def main(root: str, kind: str = "cpu") -> None:
    """Load this rank's part, run it together with the other ranks, and compare it with the whole model."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    with torch.no_grad():
        model = cgtool.load(Blocks(rank, world_size).eval().to(device), cache_dir=root)
        inputs = [numbers(rows, WIDTH).to(device) for rows in (2, 3, 17)]
        outputs = [model(x) for x in inputs]
        if device.type == "cuda":
            inputs, outputs = [*inputs, *inputs], [*outputs, *from_graphs(model, inputs, device)]
        torch.distributed.destroy_process_group()
        whole = Blocks(0, 1).to(device)
        equal = [torch.allclose(output, whole(x), atol=1e-5) for x, output in zip(inputs, outputs, strict=True)]
    sys.stdout.write(json.dumps({"rank": rank, "equal": equal}))


def from_graphs(model, inputs, device):
    """Capture a FULL graph for each input, including collectives; return the outputs of their replays."""
    graphed = cgtool.GraphedModel(model, backend=CudaGraphs(device), piecewise=False, copy_inputs=True)
    outputs = []
    for capturing in (True, False):
        outputs.clear()
        for x in inputs:
            step = ForwardContext(
                batch_descriptor=BatchDescriptor(len(x)),
                cudagraph_runtime_mode=cgtool.CUDAGraphMode.FULL,
                capturing=capturing,
            )
            with set_forward_context(step):
                outputs.append(graphed(x))
    return outputs


if __name__ == "__main__":
    main(*sys.argv[1:])
