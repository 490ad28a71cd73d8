"""Handwritten models for serving tests: pieces with a closed-form output, and attention between them."""

from __future__ import annotations

import torch
from torch import nn

from cgtool.config_values import CUDAGraphMode
from cgtool.runtime.program import Piece
from cgtool.serving.forward_context import BatchDescriptor, ForwardContext, set_forward_context


class HandPieces(nn.Module):
    """x → w0·x + 1 → attend → w1·y → attend → w2·z - 1: three token-wise pieces around two eager ops.

    `attend` writes its doubled input into a tensor that the piece before it allocated. The output for input x is
    4·w0·w1·w2·x + 4·w1·w2 - 1.
    """

    def __init__(self, *, device="cpu"):
        super().__init__()
        self.w0 = nn.Parameter(torch.full((4,), 3.0, device=device), requires_grad=False)
        self.w1 = nn.Parameter(torch.full((4,), 5.0, device=device), requires_grad=False)
        self.w2 = nn.Parameter(torch.full((4,), 7.0, device=device), requires_grad=False)
        self.pieces = [self._first, self._second, self._third]
        self.described = [
            Piece(name=f"piece {2 * i}", dynamic_dims=("num_tokens",), returned_by_ops={}) for i in range(3)
        ]
        self.num_attends = 0
        self.held = None

    @property
    def module(self):
        return self

    def live_tensors(self):
        return dict(self.named_parameters())

    def open_all(self):
        """Do nothing: there are no artifacts."""

    def wrap_pieces(self, wrap):
        self.pieces = [wrap(piece, function) for piece, function in zip(self.described, self.pieces, strict=True)]

    def expected(self, x):
        return 4 * 3 * 5 * 7 * x + 4 * 5 * 7 - 1

    def attend(self, x, output):
        self.num_attends += 1
        return torch.mul(x, 2, out=output)

    def forward(self, x):
        y, output = self.pieces[0]([x, self.w0])
        output = self.attend(y, output)
        z, output = self.pieces[1]([output, self.w1])
        del y
        output = self.attend(z, output)
        del z
        (last,) = self.pieces[2]([output, self.w2])
        return last

    @staticmethod
    def _first(args):
        x, weight = args
        args.clear()
        y = x * weight + 1
        return [y, torch.empty_like(y)]

    @staticmethod
    def _second(args):
        x, weight = args
        args.clear()
        y = x * weight
        return [y, torch.empty_like(y)]

    @staticmethod
    def _third(args):
        x, weight = args
        args.clear()
        return [x * weight - 1]


class TokenPieces(HandPieces):
    """The same over token ids, which the first piece embeds."""

    def __init__(self, vocab, *, device="cpu"):
        super().__init__(device=device)
        self.embed_tokens = nn.Embedding(vocab, 4, device=device).requires_grad_(requires_grad=False)
        self.w0 = self.embed_tokens.weight

    def forward(self, input_ids, positions):
        return super().forward(input_ids)

    @staticmethod
    def _first(args):
        ids, weight = args
        args.clear()
        y = torch.nn.functional.embedding(ids, weight) + 1
        return [y, torch.empty_like(y)]


def step(mode, num_tokens, *, capturing=False, **more):
    """Set the context of a step; use it as a block."""
    return set_forward_context(
        ForwardContext(
            batch_descriptor=BatchDescriptor(num_tokens),
            cudagraph_runtime_mode=CUDAGraphMode[mode],
            capturing=capturing,
            **more,
        )
    )
