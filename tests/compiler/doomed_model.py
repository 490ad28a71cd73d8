"""A model whose compiler never ends, for tests of signals. Importing it registers that compiler as `worded`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from cgtool import ExampleCall, ModelSpec, adaptor_registry
from cgtool.compiler.adaptors.eager import EagerAdaptor
from cgtool.plan.grammar import digest_of

NAME = "worded"


class Endless(EagerAdaptor):
    """Starts a child, as a compiler does, records its process id, and waits for it."""

    name = NAME
    compiles = True

    def compute_hash(self, options, *, max_autotune=False):
        return digest_of({"adaptor": "endless"})

    def compile(self, graph, *, options, max_autotune=False):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", options["mark"]])
        with (Path(options["mark"]) / "pids").open("a") as file:
            file.write(f"{child.pid}\n")
        child.wait()
        return super().compile(graph, options=options)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x).unsqueeze(0)
        y = nn.functional.scaled_dot_product_attention(y, y, y)
        return torch.sin(y.squeeze(0))


def build():
    return ModelSpec(module=Model().eval(), calls=[ExampleCall(args=(torch.rand(3, 4),))], dynamic={})


adaptor_registry._registered[NAME] = Endless
