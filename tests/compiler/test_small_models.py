"""What people write, each as a small model: it goes through whole and computes what eager does."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import cgtool  # noqa: E402
from cgtool import CompilationConfig, ExampleCall, ModelSpec  # noqa: E402
from cgtool.compiler.pipeline import warm  # noqa: E402

pytestmark = pytest.mark.torch


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.layer = kind(4, 8, batch_first=True, **options)

    def forward(self, x):
        return self.layer(x)[0]


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def attend(self, x):
        q = self.layer(x)
        return nn.functional.scaled_dot_product_attention(q, q, q)

    def forward(self, x):
        return checkpoint(self.attend, x, use_reentrant=False) + x


@torch.compiler.nested_compile_region
def region(x, weight):
    return torch.relu(x @ weight)


class Regions(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4))

    def forward(self, x):
        return region(region(x, self.weight), self.weight)


#: name → (model, dynamic dimensions of its input of shape (batch, length, 4))
MODELS = {
    "lstm": (lambda: Recurrent(nn.LSTM), {0: "batch", 1: "length"}),
    "bidirectional lstm": (lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True), {1: "length"}),
    "gru": (lambda: Recurrent(nn.GRU), {0: "batch"}),
    "rnn": (lambda: Recurrent(nn.RNN), {0: "batch"}),
    "activation checkpointing": (Checkpointed, {0: "batch", 1: "length"}),
    "nested compile regions": (Regions, {0: "batch", 1: "length"}),
}


@pytest.mark.parametrize("name", MODELS)
def test_it_goes_through_and_equals_eager(cache_root, name):
    make, dynamic = MODELS[name]
    model = make().eval()
    spec = ModelSpec(module=model, calls=[ExampleCall(args=(torch.rand(3, 6, 4),))], dynamic={"x": dynamic})
    with torch.no_grad():
        result = warm(spec, config=CompilationConfig(adaptor="eager"), cache_dir=cache_root)
        assert result.notes == ()
        loaded = cgtool.load(model, cache_dir=cache_root)
        for batch, length in ((3, 6), (1, 9), (5, 2)):
            x = torch.rand(batch if 0 in dynamic else 3, length if 1 in dynamic else 6, 4)
            torch.testing.assert_close(loaded(x), model(x))
