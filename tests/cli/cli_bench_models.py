"""Factories for the tests of `cgtool bench`, each with one property that the report must show."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time

import torch

import cgtool


class Breaks(torch.nn.Module):
    """Runs eagerly but cannot be traced into one graph."""

    def forward(self, x):
        hidden = x * 2
        print(float(hidden.sum()))  # noqa: T201  breaks the graph
        return hidden


def breaks():
    """A model that only eager and a torch.compile with graph breaks can run."""
    call = cgtool.ExampleCall(args=(torch.ones(4, 6),))
    return cgtool.ModelSpec(module=Breaks(), calls=[call], dynamic={"x": {0: "num_tokens"}})


class Sums(torch.nn.Module):
    """Adds a weight."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((6,), value))

    def forward(self, x):
        return x + self.weight


def unseeded():
    """A model with different weights in each process."""
    call = cgtool.ExampleCall(args=(torch.ones(4, 6),))
    return cgtool.ModelSpec(module=Sums(random.SystemRandom().random()), calls=[call], dynamic={"x": {0: "num_tokens"}})


def seeded():
    """A model with weights from Python's generator, which the bench seeds."""
    return Sums(random.random()), (torch.ones(4, 6),)


class Crashes(torch.nn.Module):
    """Kills its process."""

    def forward(self, x):
        os.kill(os.getpid(), 11)
        return x


def crashes():
    """A model that crashes eagerly."""
    return Crashes(), (torch.ones(4, 6),)


def slow(pids: str):
    """Start a process, write both pids to a file, and sleep."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
    with open(pids, "a", encoding="utf-8") as file:  # noqa: PTH123  a file for the test
        file.write(f"{os.getpid()}\n{child.pid}\n")
    time.sleep(300)
