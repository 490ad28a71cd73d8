"""Factories that the command line's tests name as MODEL: small, and each with one peculiarity."""

from __future__ import annotations

import logging
import sys
import time

import torch

import cgtool


class Sample(torch.nn.Module):
    """Two layers around an attention op."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(width, width)
        self.last = torch.nn.Linear(width, width)

    def forward(self, x):
        hidden = self.first(x).unsqueeze(0)
        hidden = torch.nn.functional.scaled_dot_product_attention(hidden, hidden, hidden)
        return self.last(hidden.squeeze(0))


def build(width: int = 8):
    """A model that warms in a moment."""
    call = cgtool.ExampleCall(args=(torch.ones(4, width),))
    return cgtool.ModelSpec(module=Sample(width), calls=[call], dynamic={"x": {0: "num_tokens"}})


def plain():
    """The same without a ModelSpec."""
    return Sample(8), (torch.ones(4, 8),)


class TwoDims(torch.nn.Module):
    """Adds one, whatever the sizes."""

    def forward(self, x):
        return x.relu() + 1


def two_dims():
    """Two dynamic dimensions: a plain size does not say of which it speaks."""
    call = cgtool.ExampleCall(args=(torch.ones(4, 6),))
    return cgtool.ModelSpec(module=TwoDims(), calls=[call], dynamic={"x": {0: "batch", 1: "seq"}})


def chatty():
    """Speaks where a report is expected, and lets torch warn."""
    logging.getLogger("torch._inductor").warning("a library warns")
    print("a model speaks")  # noqa: T201  what is tested
    sys.stdout.flush()
    return build()


def raising():
    """Fails on a line of its own."""
    return undefined_name  # noqa: F821


def ending():
    """Ends the process that asks."""
    sys.exit(0)


def number():
    """Returns something else than a model."""
    return 3


def slow():
    """Takes its time, and says when it has begun."""
    print("begun", file=sys.stderr, flush=True)  # noqa: T201  what the test waits for
    time.sleep(120)
    return build()
