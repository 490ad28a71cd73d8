"""Measures collectives between pieces against collectives within them, on two GPUs; rank 0 prints a table.

    torchrun --nproc-per-node 2 tests/measure_ranks.py FOLDER

The model is a tensor-parallel stack of layers of 8B Llama's sizes without its attention: two all-reduces a layer. Each
way is warmed by both ranks and loaded; then the ways take turns, with steps of one row and of 256, without CUDA graphs
and in FULL ones. Times are a rank's from launch to a sync, in ms: the median of the rounds, and the least and the most.
`--device cpu` takes gloo and a small model, to try the script.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.distributed.nn  # imported later, as by Dynamo, it would hold the group
from torch import nn

import cgtool
from cgtool.serving.forward_context import BatchDescriptor, ForwardContext, set_forward_context

ROWS = (1, 256)
ROUNDS, STEPS = 7, 20


class Layer(nn.Module):
    """What a rank has of a layer; both halves end with a sum over all ranks."""

    def __init__(self, hidden: int, inner: int, ranks: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.values = nn.Linear(hidden, hidden // ranks, bias=False)
        self.out = nn.Linear(hidden // ranks, hidden, bias=False)
        self.gate = nn.Linear(hidden, inner // ranks, bias=False)
        self.up = nn.Linear(hidden, inner // ranks, bias=False)
        self.down = nn.Linear(inner // ranks, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + summed(self.out(self.values(self.norms[0](x))))
        y = self.norms[1](x)
        return x + summed(self.down(nn.functional.silu(self.gate(y)) * self.up(y)))


class Layers(nn.Module):
    def __init__(self, count: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(hidden, inner, dist.get_world_size()) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def summed(x: torch.Tensor) -> torch.Tensor:
    return collectives.all_reduce(x, "sum", dist.group.WORLD)


def say(*cells: object) -> None:
    if dist.get_rank() == 0:
        sys.stdout.write(f"| {' | '.join(map(str, cells))} |\n")
        sys.stdout.flush()


def in_full_graphs(model: Any, inputs: list[torch.Tensor], device: torch.device) -> Any:
    """Capture a graph of each input; return what replays them."""
    from cgtool.serving.graphs import CudaGraphs

    graphed = cgtool.GraphedModel(model, backend=CudaGraphs(device), piecewise=False, copy_inputs=True)

    def call(x: torch.Tensor, *, capturing: bool = False) -> torch.Tensor:
        step = ForwardContext(
            batch_descriptor=BatchDescriptor(len(x)),
            cudagraph_runtime_mode=cgtool.CUDAGraphMode.FULL,
            capturing=capturing,
        )
        with set_forward_context(step):
            return graphed(x)

    for x in inputs:
        call(x, capturing=True)
    return call


def timed(ways: dict[str, Any], x: torch.Tensor, sync: Any) -> dict[str, str]:
    """Return what a step takes of each way, in ms."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for name, way in ways.items():
            dist.barrier()
            sync()
            began = time.perf_counter()
            for _ in range(STEPS):
                way(x)
            sync()
            if number:  # the first is for warming up
                taken[name].append((time.perf_counter() - began) / STEPS * 1e3)
    return {name: f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for name, each in taken.items()}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    choice = parser.parse_args()
    on_gpu = choice.device == "cuda"
    device = torch.device(choice.device, int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(dist.get_rank())
    with device:
        model = (Layers(32, 4096, 14336) if on_gpu else Layers(2, 64, 128)).eval().to(torch.bfloat16)
        inputs = [torch.rand(rows, 4096 if on_gpu else 64, dtype=torch.bfloat16) for rows in ROWS]
    sync = torch.cuda.synchronize if on_gpu else lambda: None
    ways: dict[str, Any] = {"eager": model, "torch.compile": torch.compile(model, dynamic=True)}
    for place, splitting_ops in (("between pieces", None), ("within pieces", [])):
        began = time.perf_counter()
        cgtool.compile(
            model,
            example_args=(inputs[1],),
            dynamic={"x": {0: ("rows", 1, 512)}},
            config=cgtool.CompilationConfig(splitting_ops=splitting_ops),
            cache_dir=choice.folder / place,
        )
        ways[place] = serve = cgtool.load(model, cache_dir=choice.folder / place)
        worst = max((serve(x).float() - model(x).float()).abs().max().item() for x in inputs)
        say(place, f"warm {time.perf_counter() - began:.0f} s", f"farthest from eager {worst:.3g}")
    if on_gpu:
        compiled = {name: way for name, way in ways.items() if "pieces" in name}
        ways |= {f"{name}, FULL": in_full_graphs(way, inputs, device) for name, way in compiled.items()}
    for x in inputs:
        say(f"{len(x)} rows", "ms")
        for name, text in timed(ways, x, sync).items():
            say(name, text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
