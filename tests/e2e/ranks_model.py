"""An MLP over two ranks: each holds half of the hidden width, and an op that is split at adds the halves up."""

from __future__ import annotations

import json
import sys

import torch
from torch import nn

import cgtool

WIDTH, HIDDEN = 16, 32


def add_up(x: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks; what a rank alone has, where there is no group."""
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


def build(world_size=2):
    module = Blocks(0, world_size).eval()  # which half a rank holds is a matter of values
    return cgtool.ModelSpec(
        module=module, calls=[cgtool.ExampleCall(args=(numbers(4, WIDTH),))], dynamic={"x": {0: ("rows", 2, 64)}}
    )


def main(root: str) -> None:
    """Load this rank's part from its own folder, run it with the others, and compare with the whole."""
    torch.distributed.init_process_group("gloo")
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    with torch.no_grad():
        model = cgtool.load(Blocks(rank, world_size).eval(), cache_dir=root)
        outputs = [model(numbers(rows, WIDTH)) for rows in (2, 3, 17)]
        torch.distributed.destroy_process_group()
        whole = Blocks(0, 1)
        equal = [torch.allclose(output, whole(numbers(len(output), WIDTH)), atol=1e-5) for output in outputs]
    sys.stdout.write(json.dumps({"rank": rank, "equal": equal}))


if __name__ == "__main__":
    main(sys.argv[1])
