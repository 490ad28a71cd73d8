"""Small modules, each for one feature of PyTorch code: name → (module, calls of three shapes, dynamic dimensions)."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - what everyone calls it
from small_rows import ROWS_OF_EIGHT, fake_quantised
from torch import nn
from torch._higher_order_ops import map as map_rows
from torch._higher_order_ops import scan, while_loop
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

ROWS = {"x": {0: "rows"}}


def rows(*sizes, width=8):
    return [(_numbers(size, width),) for size in sizes]


def _numbers(*shape):
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32) * 0.37).sin().view(shape)


def module(function, **parts):
    """Return a module with these parts, whose forward is `function`."""
    made = type("Small", (nn.Module,), {"forward": function})()
    for name, part in parts.items():
        if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
            made.register_buffer(name, part)
        else:
            setattr(made, name, part)
    with torch.no_grad():
        for index, parameter in enumerate(made.parameters()):
            parameter.copy_(_numbers(*parameter.shape) / 3 + index / 100)
    return made.eval().requires_grad_(requires_grad=False)


def recurrent(self, x):
    return self.layer(x)[0]


def attended(self, x):
    def attend(y):
        q = self.layer(y)
        return F.scaled_dot_product_attention(q, q, q)

    return checkpoint(attend, x, use_reentrant=False) + x


@torch.compiler.nested_compile_region
def region(x, weight):
    return torch.relu(x @ weight)


def regions(self, x):
    return region(region(x, self.weight), self.weight)


def applied(self, x):
    return self.layer(x)


def number(self, x):
    return x * x.sum().item()


def buffer_written(self, x):
    self.count.add_(1)
    return x * self.count


def marked_rows(self, x, mark):
    y = x.clone()
    y[mark > 3, 2] = 5
    return y


def counted(self, x):
    self.calls += 1
    return x * 2


def buffer_replaced(self, x):
    self.count = self.count + 1
    return x * self.count


def argument_written(self, x):
    x.add_(1)
    return x, x[:, :2]


def interpolated(self, x):
    return F.interpolate(x.view(-1, 2, 2, 2), scale_factor=2.0, mode="bilinear")


def random_numbers(self, x):
    return x + torch.rand_like(x)


def arguments(self, *xs, **named):
    return sum(xs) * named["gain"]


def chosen(self, x):
    return torch.cond(x.sum() > 0, self.layer, lambda y: y * y.shape[0], (x,))


def chosen_under_autocast(self, x):
    def narrow(y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (y @ torch.eye(8)).float()  # rounds alike in any implementation

    return torch.cond(x.sum() > 0, narrow, lambda y: y.sin(), (x,))


def looped(self, x):
    start = torch.zeros((), dtype=torch.int64)
    return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, self.layer(y)), (start, x))


def scanned(self, x):
    return scan(lambda carry, row: (carry + row, (carry * row).clone()), torch.zeros(8), x)


def mapped(self, x):
    return map_rows(lambda row, weight: row @ weight, x, self.weight)


def gradient(self, x):
    return torch.func.grad_and_value(lambda y: (y.sin() @ self.weight).sum())(x)


def jacobian(self, x):
    return torch.func.jacrev(lambda y: (y * self.weight).sum(0))(x)


def per_row_gradient(self, x):
    return torch.vmap(torch.func.grad(lambda row: (row @ self.weight).sin().sum()))(x)


def flexed(self, x):
    q = self.layer(x)[:, None]
    return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + self.bias[h] * (i - j))


def flexed_by_blocks(self, x):
    q = self.layer(x)[:, None]
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, x.shape[1], x.shape[1], device="cpu")
    return flex_attention(q, q, q, block_mask=mask)


def flexed_with_sums(self, x):
    q = self.layer(x)[:, None]
    return flex_attention(q, q, q, return_lse=True)  # torch notes that it has warned of this argument


def selected(self, x):
    return x[x > 0].sum()


def attended_by_kernel(self, x):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(x[None], x[None], x[None])


def leaves_grad_mode(self, x):
    torch.set_grad_enabled(True)
    return x * 2


def _weight():
    return nn.Parameter(torch.zeros(8, 8))


def _images(*sizes):
    return [(_numbers(size, 3, 8, 8),) for size in sizes]


def _batches(*sizes):
    return [(_numbers(size, 6, 8),) for size in sizes]


def _sequences(*sizes):
    return [(_numbers(2, size, 8),) for size in sizes]


def _signals(*sizes):
    return [(_numbers(1, 4, size),) for size in sizes]


FROM_2 = {"x": {0: ("rows", 2, None)}}
SEQ, SEQ_FROM_2, LENGTH = {"x": {1: "seq"}}, {"x": {1: ("seq", 2, None)}}, {"x": {2: "length"}}

#: Equal to eager at every shape.
SERVED = {
    "lstm": lambda: (module(recurrent, layer=nn.LSTM(8, 8, batch_first=True)), _sequences(4, 2, 7), SEQ_FROM_2),
    "rnn": lambda: (module(recurrent, layer=nn.RNN(8, 8, batch_first=True)), _batches(3, 1, 5), ROWS),
    "activation checkpoint around attention": lambda: (
        module(attended, layer=nn.Linear(8, 8)),
        [(_numbers(*size, 8),) for size in ((3, 6), (1, 9), (5, 2))],
        {"x": {0: "rows", 1: "seq"}},
    ),
    "conv1d of a dynamic length": lambda: (module(applied, layer=nn.Conv1d(4, 4, 5)), _signals(16, 12, 9), LENGTH),
    "adaptive pool of a dynamic length": lambda: (
        module(applied, layer=nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.AdaptiveAvgPool1d(3))),
        _signals(16, 12, 9),
        LENGTH,
    ),
    "conv2d": lambda: (module(applied, layer=nn.Conv2d(3, 4, 3)), _images(4, 2, 1), ROWS),
    "transformer encoder": lambda: (
        module(applied, layer=nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)),
        _sequences(4, 2, 7),
        SEQ_FROM_2,
    ),
    "rows that another argument marks": lambda: (
        module(marked_rows),
        [(_numbers(size, 8), torch.arange(size) * 2) for size in (4, 2, 7)],
        {"x": {0: ("rows", 2, None)}, "mark": {0: ("rows", 2, None)}},
    ),
    "embedding bag": lambda: (
        module(applied, layer=nn.EmbeddingBag(10, 4)),
        [(torch.arange(size * 3).view(size, 3) % 10,) for size in (4, 2, 1)],
        ROWS,
    ),
    "a number out of a tensor": lambda: (module(number), rows(4, 2, 7), FROM_2),
    "a size that depends on data": lambda: (module(selected), rows(4, 1, 7), ROWS),
    "an argument written to and returned": lambda: (module(argument_written), rows(4, 2, 7), FROM_2),
    "random numbers": lambda: (module(random_numbers), rows(4, 2, 7), FROM_2),
    "cond": lambda: (module(chosen, layer=nn.Linear(8, 8)), [*rows(4, 1), (-_numbers(2, 8),)], ROWS),
    "cond with autocast in a branch": lambda: (
        module(chosen_under_autocast),
        [*rows(4, 1), (-_numbers(2, 8),)],
        ROWS,
    ),
    "while loop": lambda: (module(looped, layer=nn.Linear(8, 8)), rows(4, 2, 1), ROWS),
    "scan": lambda: (module(scanned), rows(4, 2, 1), ROWS),
    "map": lambda: (module(mapped, weight=_weight()), rows(4, 2, 1), ROWS),
    "jacobian": lambda: (module(jacobian, weight=_weight()), rows(8, 8), {}),
    "flex attention": lambda: (
        module(flexed, layer=nn.Linear(8, 8), bias=torch.ones(1)),
        _sequences(4, 2, 7),
        SEQ_FROM_2,
    ),
    "flex attention with its sums": lambda: (
        module(flexed_with_sums, layer=nn.Linear(8, 8)),
        _sequences(4, 2, 7),
        SEQ_FROM_2,
    ),
    "flex attention with a block mask": lambda: (module(flexed_by_blocks, layer=nn.Linear(8, 8)), _sequences(128), {}),
}

#: The notes of their warms.
NOTED = {
    "conv1d of a dynamic length": "No variant serves length = 1, at which the model itself does not run",
    "conv2d": "rows serves 1 to 15 because of",  # torch chooses another kernel from 16 on
    "a number out of a tensor": "so they run between pieces: item (small_modules.py:",
    "a size that depends on data": "so they run between pieces: getitem (small_modules.py:",
    "a position in a buffer": "rows serves 2 to 32 because of `self.table[position : position + x.shape[0]] = x`",
    "adaptive pool of a dynamic length": "so they run between pieces: adaptive_avg_pool1d (small_modules.py",
    "random numbers": "draw different random numbers from eager, so they run between pieces: rand_like (small_modules",
    "distances": "rows serves 2 to 25 because of",  # and another way from 26 on
}

#: Notes that only a warm with Inductor has.
NOTED_OF_NATIVE = {"flex attention with its sums": "`return_lse` is not supported yet"}


#: Like those of small_rows.py.
_ROWS_OF_EIGHT = ROWS_OF_EIGHT | {
    "nested compile regions": (regions, {"weight": _weight()}),
    "a buffer replaced": (buffer_replaced, {"count": torch.zeros(())}),
    "a buffer written to": (buffer_written, {"count": torch.zeros(())}),
    "interpolate": (interpolated, {}),
    "gradient": (gradient, {"weight": _weight()}),
    "gradient of each row": (per_row_gradient, {"weight": _weight()}),
}


class Together(nn.Module):
    """Calls several modules: a trace of all costs little more than a trace of one."""

    def __init__(self, names):
        super().__init__()
        self.parts = nn.ModuleDict({name: _of_rows(name) for name in names})

    def forward(self, x):
        return {name: part(x) for name, part in self.parts.items()}


def _of_rows(name):
    function, parts = _ROWS_OF_EIGHT[name]
    return module(function, **parts)


for _name in filter(NOTED.__contains__, _ROWS_OF_EIGHT):
    SERVED[_name] = lambda name=_name: (_of_rows(name), rows(4, 2, 7), FROM_2)
_SILENT = [name for name in _ROWS_OF_EIGHT if name not in NOTED]
for _start in range(0, len(_SILENT), 16):
    _names = _SILENT[_start : _start + 16]
    SERVED[f"{_names[0]} to {_names[-1]}"] = lambda names=_names: (Together(names).eval(), rows(4, 2, 7), FROM_2)

#: Refused, with the line of the user's code if there is one.
REFUSED = {
    "gru of a dynamic length": (
        lambda: (module(recurrent, layer=nn.GRU(8, 8, batch_first=True)), _sequences(4), SEQ),
        "dimension 1",
    ),
    "fake quantisation": (lambda: (module(fake_quantised), rows(4), ROWS), r"small_rows\.py:\d+, in fake_quantised"),
    "a call that is counted": (
        lambda: (module(counted, calls=0), rows(4), ROWS),
        r"changes calls while it runs.*\n.*small_modules\.py:\d+, in counted: self\.calls \+= 1",
    ),
    "a choice of attention's kernels": (
        lambda: (module(attended_by_kernel), rows(4), ROWS),
        r"small_modules\.py:\d+, in attended_by_kernel.*put `with sdpa_kernel\(\.\.\.\)` around the call of",
    ),
    "an argument of numpy": (
        lambda: (module(lambda self, x, shift: x + shift), [(_numbers(4, 8), np.arange(8.0))], ROWS),
        "shift is a NumPy array or number, .* Pass a tensor or a float",
    ),
    "an array of numpy": (
        lambda: (module(lambda self, x: x.numpy() * 2), rows(4), ROWS),
        r"of type numpy:ndarray.*\n.*small_modules\.py:\d+",
    ),
    "a function returned": (
        lambda: (module(lambda self, x: (x * 2, len)), rows(4), ROWS),
        r"of type builtins:builtin_function_or_method.*\n.*small_modules\.py:\d+",
    ),
    "a parameter as an argument": (
        lambda: (module(lambda self, x: x * 2), [(nn.Parameter(_numbers(4, 8)),)], ROWS),
        r"'x' is a torch\.nn\.Parameter, .* Pass x\.detach\(\)",
    ),
    "a part that TorchScript has traced": (
        lambda: (module(applied, layer=torch.jit.trace(nn.Linear(8, 8), torch.ones(2, 8))), rows(4), ROWS),
        r"small_modules\.py:\d+, in applied",
    ),
    "any number of arguments": (
        lambda: (module(arguments), [(_numbers(4, 8), _numbers(4, 8))], {"x": {0: "rows"}}),
        "'x'|gain",
    ),
    "grad mode that stays on": (
        lambda: (module(leaves_grad_mode), rows(4), ROWS),
        r"small_modules\.py:\d+, in leaves_grad_mode.*grad mode stays on after the call; write `with torch\.enable",
    ),
    "how often a tensor was written": (
        lambda: (module(lambda self, x: x * (x._version + 1)), rows(4), ROWS),
        r"small_modules\.py:\d+.*a piece cannot read the version counter of a tensor",
    ),
}
