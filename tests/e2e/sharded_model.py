"""A small transformer that `parallelize_module` shards, and one of transformers that shards itself.

The program: `sharded_model.py FUNCTION ARGUMENT...` prints the result of a function as this rank's JSON.
"""

from __future__ import annotations

import datetime as dt
import json
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, by Dynamo, it would keep the group and its threads alive until the end
import torch.nn.functional as F  # noqa: N812 - what everyone calls it
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import cgtool

WIDTH, HEAD, WORDS = 8, 4, 16
EVEN = {"ids": {0: ("batch", 2, 8)}}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.between, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.before(x))
        return x + self.down(F.silu(self.up(self.between(x))))


class Whole(nn.Module):
    """The unsharded model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.words, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList([Block()])
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def whole():
    return Whole().eval()


def all_ranks(*order):
    order = order or range(dist.get_world_size())
    return dist.DeviceMesh("cpu", list(order), mesh_dim_names=("tp",))


def split(mesh=None, *, down=None, head=None, **others):
    """Return the model with its attention, feed-forward, embedding and head sharded."""
    model, mesh = whole(), mesh or all_ranks()
    ends = {
        "words": RowwiseParallel(input_layouts=Replicate()),
        "head": head or ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, {**ends, **others})
    for block in model.blocks:
        plan = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        plan |= {"attention.o": RowwiseParallel(), "up": ColwiseParallel(), "down": down or RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    return model


def split_in_the_sequence():
    """Return the model with the activations between its layers sharded, too, as in PyTorch's tutorial."""
    model, mesh, part = whole(), all_ranks(), Shard(1)
    ends = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=part),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=part, output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    for block in model.blocks:
        plan = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        plan |= {
            "before": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(Replicate(),)),
            "attention.o": RowwiseParallel(output_layouts=part),
            "between": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=part),
            "down": RowwiseParallel(output_layouts=part),
        }
        parallelize_module(block, mesh, plan)
    return model


def split_in_a_submesh():
    return split(dist.init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tp"))["tp"])


def split_without_gradients():
    return split().requires_grad_(requires_grad=False)


def with_ranks_in_another_order():
    return split(all_ranks(*reversed(range(dist.get_world_size()))))


def with_a_layer_whole():
    return split(down=RowwiseParallel(input_layouts=Replicate()), head=ColwiseParallel(output_layouts=Shard(0)))


def with_other_placements():
    mesh = all_ranks()
    model = split(mesh)
    parallelize_module(model.blocks[0], mesh, {"before": SequenceParallel()})
    return model


class InBfloat16(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = split()

    def forward(self, ids):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.model(ids).float()


def equals_eager(root, name):
    """Return whether a sharded model, compiled and loaded, equals itself in eager mode."""
    model, config = globals()[name]().eval(), cgtool.CompilationConfig(adaptor="eager", jobs=0)
    cgtool.compile(model, example_args=(ids(2),), dynamic=EVEN, config=config, cache_dir=root)
    served = cgtool.load(model, config=config, cache_dir=root)
    return [torch.allclose(served(ids(rows)), model(ids(rows)), atol=1e-2) for rows in (2, 4)]


def that_returns_a_shard():
    return split(head=ColwiseParallel(use_local_output=False))


class Given(nn.Module):
    def forward(self, x):
        return x.to_local() * 2


def ids(rows, columns=6):
    return torch.randint(WORDS, (rows, columns), generator=torch.Generator().manual_seed(rows))


def build():
    """Return the sharded model for `cgtool warm`."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return cgtool.ModelSpec(module=split(), calls=[cgtool.ExampleCall(args=(ids(2),))], dynamic=EVEN)


def equal_the_whole(loaded):
    return [torch.allclose(loaded(ids(rows)), whole()(ids(rows)), atol=1e-5) for rows in (2, 4, 6)]


def served(root, adaptor, *names):
    """Return whether each model, compiled and loaded, equals the unsharded one."""
    config = cgtool.CompilationConfig(adaptor=adaptor, jobs=0)
    results = {}
    for name in names:
        model = globals()[name]()
        cgtool.compile(model, example_args=(ids(2),), dynamic=EVEN, config=config, cache_dir=root)
        results[name] = equal_the_whole(cgtool.load(globals()[name](), config=config, cache_dir=root))
    return results


def loaded(root, *names):
    """Return whether each model, loaded, equals the unsharded one, or why it does not load."""
    results = {}
    for name in names:
        try:
            results[name] = equal_the_whole(cgtool.load(globals()[name](), cache_dir=root))
        except cgtool.CgtoolError as error:
            results[name] = str(error)
    return results


def refused(root):
    """Return the errors for DTensors as arguments and results of a call."""
    given = DTensor.from_local(torch.ones(2), all_ranks(), [Replicate()])
    results = {}
    for name, model, example in (("returned", that_returns_a_shard(), ids(2)), ("given", Given().eval(), given)):
        try:
            config = cgtool.CompilationConfig(adaptor="eager", jobs=0)
            cgtool.compile(model, example_args=(example,), config=config, cache_dir=root)
        except cgtool.CgtoolError as error:
            results[name] = str(error)
    return results


def llama(folder, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def build_llama(folder):
    """Return a Llama that transformers shards, for `cgtool warm`."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    call = cgtool.ExampleCall(kwargs={"input_ids": ids(2)})
    module = llama(folder, tp_plan="auto")
    return cgtool.ModelSpec(module=module, calls=[call], dynamic={"input_ids": {1: ("tokens", 2, 32)}})


def llama_equals_the_whole(folder, root):
    one, other = cgtool.load(llama(folder, tp_plan="auto"), cache_dir=root), llama(folder)
    calls = [ids(2, columns) for columns in (2, 6, 21)]
    return [torch.allclose(one(input_ids=x).logits, other(input_ids=x).logits, atol=1e-5) for x in calls]


def llama_generates_as_the_whole(folder, root):
    one, other = llama(folder, tp_plan="auto"), llama(folder)
    config = cgtool.CompilationConfig(adaptor="eager", jobs=0)
    cgtool.compile(one, cache="static", cache_length=32, config=config, cache_dir=root)
    one = cgtool.load(llama(folder, tp_plan="auto"), cache="static", cache_dir=root)
    first, second = (
        model.generate(ids(1), max_new_tokens=12, do_sample=False, use_cache=True) for model in (one, other)
    )
    return torch.equal(first, second)


def main(name, *arguments):
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=60))
    with torch.no_grad():
        result = globals()[name](*arguments)
    dist.destroy_process_group()
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
