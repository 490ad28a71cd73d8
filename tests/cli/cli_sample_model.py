"""Small factories for the tests of the command line, each with one property."""

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
    """A small model with a ModelSpec."""
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
    """A model with two dynamic dimensions, for which a plain size is ambiguous."""
    call = cgtool.ExampleCall(args=(torch.ones(4, 6),))
    return cgtool.ModelSpec(module=TwoDims(), calls=[call], dynamic={"x": {0: "batch", 1: "seq"}})


def chatty():
    """Print to stdout, and log a warning of torch."""
    logging.getLogger("torch._inductor").warning("a library warns")
    print("a model speaks")  # noqa: T201  under test
    sys.stdout.flush()
    return build()


def raising():
    """Raise a NameError."""
    return undefined_name  # noqa: F821


def ending():
    """End the process."""
    sys.exit(0)


def number():
    """Return something that is not a model."""
    return 3


def slow():
    """Report that it has begun, and sleep."""
    print("begun", file=sys.stderr, flush=True)  # noqa: T201  the test waits for it
    time.sleep(120)
    return build()
