"""Starts a model in a fresh process and prints its times as JSON. Run by test_e2e_ready.py, or by hand.

python tests/e2e/ready_start.py eager 16
python tests/e2e/ready_start.py warm 16 FOLDER
python tests/e2e/ready_start.py load 16 FOLDER
"""

from __future__ import annotations

import gc
import json
import sys
import time

import torch

from fixtures.tiny_llama import build


def model(num_layers):
    spec = build(num_layers, width=256, intermediate=512, vocab=1000)
    return spec, spec.module, spec.calls[0].args


def eager(module, args):
    start = time.perf_counter()
    module(*args)
    return {"ready": time.perf_counter() - start}


def load(module, args, folder):
    collections = gc.get_stats()[2]["collections"]
    start = time.perf_counter()
    import cgtool  # the import is measured, too

    loaded = cgtool.load(module, cache_dir=folder)
    opened = time.perf_counter()
    loaded(*args)
    ready = time.perf_counter()
    collections = gc.get_stats()[2]["collections"] - collections
    return {
        "ready": ready - start,
        "load": opened - start,
        "full_collections": collections,
        "model_guards": best(lambda: model_guards(loaded)),
        "call_guards": best(lambda: loaded._variants[0].accept(*loaded._bind(*args)), times=200),
    }


def model_guards(loaded):
    from cgtool.guards.sources import Roots
    from cgtool.guards.table import failures_of

    guards = [variant.model_guards for variant in loaded.plan.variants]
    if failures_of(guards, Roots(loaded.module, loaded.module.forward)):
        sys.exit("a guard fails")


def best(function, times=5):
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return min(taken)


def warm(spec, folder):
    from cgtool.compiler.pipeline import warm as warm_up
    from cgtool.config import CompilationConfig

    warm_up(spec, config=CompilationConfig(adaptor="eager"), cache_dir=folder)
    return {}


def main():
    way, num_layers, *folder = sys.argv[1:]
    spec, module, args = model(int(num_layers))
    torch.set_grad_enabled(False)
    if way == "warm":
        found = warm(spec, *folder)
    else:
        found = eager(module, args) if way == "eager" else load(module, args, *folder)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
