"""An adaptor of another distribution: a compiler whose artifact is the piece itself, under a word of its own.

Its options: `log`, a file that gets a line for each compile; `secs`, how long each takes; `gate`, a file for which all
but the first wait.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from cgtool import CompiledPiece, CompilerInterface
from cgtool.plan.grammar import digest_of
from cgtool.runtime.op_by_op import piece_function

WORD = b"worded\n"


class Worded(CompilerInterface):
    name = "worded"

    def compute_hash(self, options, *, max_autotune=False):
        return digest_of({"adaptor": self.name, "options": options})

    def compile(self, graph, *, options, max_autotune=False):
        if "log" in options:
            with Path(options["log"]).open("a") as log:
                log.write(f"{sys.argv[0]}\n")
        if "gate" in options and len(Path(options["log"]).read_text().split()) > 1:
            while not Path(options["gate"]).exists():
                time.sleep(0.05)
        time.sleep(options.get("secs", 0))
        return CompiledPiece(artifact=WORD + graph.canonical(), kernels=1)

    def load(self, data, graph):
        if data != WORD + graph.canonical():
            raise ValueError("another piece")
        return piece_function(graph)
