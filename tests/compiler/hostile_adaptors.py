"""An adaptor that crashes, hangs or otherwise harms its process, as a piece tells it to.

A piece adds a number to its input: 0 compiles as eager does, and each of `DEEDS` has its own number. Importing this
module registers the adaptor; workers import it too.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from cgtool.adaptor_registry import register_adaptor
from cgtool.compiler.adaptors.eager import EagerAdaptor
from cgtool.compiler.adaptors.interface import CompiledPiece
from cgtool.compiler.wanted import Work
from cgtool.errors import CompileError
from cgtool.plan.grammar import digest_of
from cgtool.plan.pieces import Node, PieceGraph, SymbolRange, TensorMeta

NAME = "hostile"
#: An unusual argument, so that the child is found by its command line.
CHILD_SECS = "86399"


def segfault():
    ctypes.string_at(0)


def hang():
    child = subprocess.Popen(["sleep", CHILD_SECS])  # stands in for the host's compiler
    os.write(1, f"child {child.pid}\n".encode())
    child.wait()


def hang_deaf():
    """Hang like native code that holds the GIL and ignores SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.PyDLL(None).sleep(86399)


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def eat_memory():
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    bytearray(16 << 30)


def leave():
    sys.stderr.write("the compiler says goodbye\n")
    os._exit(3)


def refuse():
    raise CompileError("The compiler does not take the piece")


def break_compiler():
    error = "In file included from x.cpp: fatal error: Killed signal terminated program cc1plus"
    raise CompileError("Inductor could not compile the piece") from RuntimeError(error)


def kill_worker():
    """Kill the executor's worker, which is the parent of this child's keeper."""
    keeper = os.getppid()
    os.kill(int(Path(f"/proc/{keeper}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    signal.pause()


DEEDS = [None, segfault, hang, hang_deaf, be_killed, eat_memory, leave, refuse, break_compiler, kill_worker]
FILL = 100
TELL = 101
WAIT = 120


@register_adaptor(NAME)
class Hostile(EagerAdaptor):
    """Does the piece's deed, and then compiles it as eager does."""

    name = NAME
    compiles = True

    def compute_hash(self, options, *, max_autotune=False):
        return digest_of({"adaptor": self.name, "options": dict(options)})

    def compile(self, graph, *, options, max_autotune=False):
        if "log" in options:
            with Path(options["log"]).open("a") as log:
                log.write(f"{os.getpid()} {graph.identity()}\n")
        number = graph.nodes[0].args[1]
        os.write(2, f"compiling number {number}\n".encode())
        if number == TELL:
            return CompiledPiece(artifact=_settings())
        while number == WAIT and not Path(options["gate"]).exists():
            time.sleep(0.05)
        if number == FILL:
            with tempfile.TemporaryFile() as file:  # as a compiler does
                file.write(b"x" * (8 << 20))
        deed = DEEDS[number % 50] if number % 50 < len(DEEDS) else None
        if deed is not None:
            deed()
        return super().compile(graph, options=options)


def _settings():
    import torch._inductor.config as inductor_config

    found = [torch.get_float32_matmul_precision(), inductor_config.epilogue_fusion, str(torch.get_default_dtype())]
    return repr(found).encode()


def piece_of(number):
    """Return a piece of dynamic length that adds `number`."""
    meta = TensorMeta(dtype="float32", shape=("s0", 8), stride=(8, 1), device="cpu")
    return PieceGraph(
        symbols=(SymbolRange(name="s0", min=2, max=None),),
        facts=(),
        inputs=(meta,),
        aliases=(),
        nodes=(Node(kind="function", target="torch.add", args=("%0", number), kwargs={}),),
        outputs=("%1",),
        results=(meta,),
        ops={},
    )


def work_of(*numbers, adaptor=NAME):
    """Return the work for one variant with a piece for each number."""
    return [
        Work(
            variant=0,
            piece_index=index,
            shape={},
            piece=piece_of(number).identity(),
            graph=piece_of(number),
            adaptor=adaptor,
            tuned=False,
            is_base=True,
        )
        for index, number in enumerate(numbers)
    ]


def number_of(deed):
    return DEEDS.index(deed)
