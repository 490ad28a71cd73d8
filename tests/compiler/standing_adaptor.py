"""An adaptor that compiles nothing and says what it was asked for: whether it was tuned, and for which shape."""

from __future__ import annotations

import dataclasses

from cgtool.compiler.adaptors.eager import EagerAdaptor
from cgtool.plan.grammar import digest_of

#: What served the calls: the ranges of the graph's symbols, and whether the artifact was tuned.
SERVED = []


class Standing(EagerAdaptor):
    """Stands in for a compiler: its artifacts say whether they were tuned, and note each call that they serve."""

    name = "inductor_standalone"
    kind = "aot"
    compiles = True

    def compute_hash(self, options, *, max_autotune=False):
        return digest_of([super().compute_hash(options), max_autotune])

    def compile(self, graph, *, options, max_autotune=False):
        piece = super().compile(graph, options=options)
        return dataclasses.replace(piece, artifact=piece.artifact + b" " * max_autotune)

    def load(self, data, graph):
        function = super().load(data, graph)
        said = {"symbols": [(symbol.min, symbol.max) for symbol in graph.symbols], "tuned": data.endswith(b" ")}

        def run(args):
            SERVED.append(said)
            return function(args)

        return run
