"""An adaptor that produces wrong results on purpose; the proving child imports this file too."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from types import MappingProxyType

import torch

from cgtool import adaptor_registry
from cgtool.compiler.adaptors.interface import CompiledPiece, CompilerInterface
from cgtool.compiler.request import Provider
from cgtool.plan.grammar import decode
from cgtool.plan.pieces import PieceGraph
from cgtool.runtime.op_by_op import piece_function

IMPORTS = (Provider(module="proof_doubles", file=__file__),)


def _first_scaled(outputs, inputs, number=0):
    outputs[number] = outputs[number] * 1.01


def _other_strides(outputs, inputs):
    outputs[0] = torch.empty_strided(outputs[0].shape, outputs[0].stride()[::-1]).copy_(outputs[0])
    if outputs[0].dim() > 1:
        outputs[0] = outputs[0].as_strided(outputs[0].shape, (1, outputs[0].shape[0]))


def _other_dtype(outputs, inputs):
    outputs[0] = outputs[0].double()


def _one_element(outputs, inputs):
    outputs[0] = outputs[0].clone()
    outputs[0].reshape(-1)[-1] += 0.5 if outputs[0].is_floating_point() else 1


def _one_row(outputs, inputs):
    """Zero the last row, as if a loop stopped early."""
    outputs[0] = outputs[0].clone()
    outputs[0][-1] = 0


def _otherwise_rounded(outputs, inputs):
    """Round differently, like code that rounds in other places."""
    signs = torch.arange(outputs[0].numel()).mul(7919).remainder(2).mul(2).sub(1).view(outputs[0].shape)
    outputs[0] = (outputs[0].double() * (1 + 1.5 * torch.finfo(outputs[0].dtype).eps * signs)).to(outputs[0].dtype)


def _swapped(outputs, inputs):
    outputs.reverse()


def _missing(outputs, inputs):
    outputs.pop()


def _transposed(outputs, inputs):
    rows, columns = outputs[0].shape
    outputs[0] = torch.empty(columns, rows, dtype=outputs[0].dtype).copy_(outputs[0].t()).t()


def _nan(outputs, inputs):
    outputs[0] = outputs[0].clone()
    outputs[0].view(-1)[0] = float("nan")


def _an_input_written(outputs, inputs):
    inputs[0].add_(1)


def _in_the_memory_of_an_input(outputs, inputs):
    inputs[0].copy_(outputs[0])
    outputs[0] = inputs[0]


def _raise(outputs, inputs):
    raise RuntimeError("expected 8 and got 9")


def _none(outputs, inputs):
    outputs[0] = None


def _as_promised(outputs, inputs):
    outputs[0] = outputs[0].contiguous(memory_format=torch.channels_last)


def _promised_and_wrong(outputs, inputs):
    _as_promised(outputs, inputs)
    outputs[0][-1] = 0


#: Name → the change to the outputs and inputs of a right run.
SPOILED = {
    "a factor of 1.01": _first_scaled,
    "other strides": _transposed,
    "another dtype": _other_dtype,
    "one element": _one_element,
    "otherwise rounded": _otherwise_rounded,
    "one row": _one_row,
    "swapped": _swapped,
    "a missing output": _missing,
    "a NaN": _nan,
    "an input written": _an_input_written,
    "no tensor": _none,
    "an error": _raise,
    "as promised": _as_promised,
    "promised and wrong": _promised_and_wrong,
}


class Double(CompilerInterface):
    """Runs the piece eagerly, and spoils the results as the artifact says."""

    name = "double"
    rounding = MappingProxyType({"rounds": True})

    def compute_hash(self, options, *, max_autotune=False):
        return "0" * 64

    def compile(self, graph, *, options, max_autotune=False):
        word = "right" if options.get("rounds") else "a factor of 1.01"
        return CompiledPiece(artifact=json.dumps(word).encode(), kernels=0, guards=())

    def load(self, data, graph):
        word = json.loads(data)
        if word in CRASHES:
            CRASHES[word]()
        run = piece_function(graph)
        if word == "in float32":
            return in_float32(graph)

        def call(inputs):
            kept = list(inputs)
            before = [tensor.clone() for tensor in kept]
            outputs = list(run(inputs))
            if word == "an input not written":
                for tensor, old in zip(kept, before, strict=True):
                    tensor.copy_(old)
            elif word.startswith("late "):
                CRASHES[word.removeprefix("late ")]()
            elif word != "right":
                SPOILED[word](outputs, kept)
            return outputs

        return call


def in_float32(graph):
    """Return a piece in half precision as good compilers compile it: rounded only where it stores."""
    text = graph.canonical().decode()
    for narrow in ("bfloat16", "float16"):
        text = text.replace(f'"{narrow}"', '"float32"')
    wide = piece_function(decode(text.encode(), PieceGraph))

    eager = piece_function(graph)

    def call(inputs):
        kept = list(inputs)
        inputs.clear()
        makes = eager([tensor.clone() for tensor in kept])
        found = wide([tensor.float() if tensor.is_floating_point() else tensor for tensor in kept])
        return [
            torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(tensor)
            for tensor, like in zip(found, makes, strict=True)
        ]

    return call


def _sleep():
    time.sleep(600)


def _exit():
    sys.stderr.write("some last words\n")
    os._exit(7)


CRASHES = {
    "SIGSEGV": lambda: ctypes.string_at(0),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGABRT": os.abort,
    "sleep": _sleep,
    "exit": _exit,
}

adaptor_registry._registered["double"] = Double
