"""Starts as a server does: builds a model, loads it, calls it once, and prints a JSON report.

    python hold_child.py '["llama", CACHE]'

prints {"error": [class, message] or None, "worst": the largest relative difference from eager or None, "heavy": modules
of the compiler that are imported after the first call}.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import torch

import cgtool

HEAVY = ("torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd", "sympy", "triton", "cgtool.compiler")


def heavy() -> list[str]:
    return [heavy for heavy in HEAVY if any(f"{name}.".startswith(f"{heavy}.") for name in sys.modules)]


def main() -> None:
    name, root = json.loads(sys.argv[1])
    sys.path.insert(0, str(Path(__file__).parent))
    spec = getattr(importlib.import_module("served"), name)()
    (call,) = spec.calls
    report = {"error": None, "worst": None}
    with torch.no_grad():
        try:
            output = cgtool.load(spec.module, cache_dir=root)(*call.args, **call.kwargs)
        except cgtool.CgtoolError as error:
            output = None
            report["error"] = [type(error).__name__, str(error)]
        report["heavy"] = heavy()
        if output is not None:
            from e2e_compare import difference  # imported after the modules were listed: it imports more of cgtool

            report["worst"] = difference(output, spec.module(*call.args, **call.kwargs))
    print(json.dumps(report))  # noqa: T201


if __name__ == "__main__":
    main()
