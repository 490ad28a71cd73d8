"""A server's start: builds a fixture, loads it, calls it once; prints what came of it as JSON.

    python hold_child.py '["llama", CACHE]'

prints {"error": [class, sentence] or None, "worst": the greatest relative difference from eager or None, "heavy": which
modules of a compiler there are after the first call}.
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
    return [one for one in HEAVY if any(f"{name}.".startswith(f"{one}.") for name in sys.modules)]


def main() -> None:
    name, root = json.loads(sys.argv[1])
    sys.path.insert(0, str(Path(__file__).parent))
    spec = getattr(importlib.import_module("served"), name)()
    (call,) = spec.calls
    report = {"error": None, "worst": None}
    with torch.no_grad():
        try:
            found = cgtool.load(spec.module, cache_dir=root)(*call.args, **call.kwargs)
        except cgtool.CgtoolError as error:
            found = None
            report["error"] = [type(error).__name__, str(error)]
        report["heavy"] = heavy()
        if found is not None:
            from e2e_compare import difference  # after the modules were counted: it imports more of cgtool

            report["worst"] = difference(found, spec.module(*call.args, **call.kwargs))
    print(json.dumps(report))  # noqa: T201


if __name__ == "__main__":
    main()
