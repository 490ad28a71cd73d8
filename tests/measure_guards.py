"""Measures what a load looks at: the guards of an 80-layer model, and the files of 500 modules; prints a table.

    python tests/measure_guards.py [LAYERS [FILES]]

The figures are processor time, the least of many rounds, so that a busy machine changes little. A round of guards is
what `load` does: new roots, and every guard of every variant. A round of files finds each module as an import would,
reads it and compares its digest; a second thread takes half of them, and both threads' time counts.
"""

from __future__ import annotations

import gc
import importlib
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from cgtool.guards.files import source_digests
from cgtool.guards.sources import Roots, parse_source
from cgtool.guards.table import failures_of
from cgtool.plan.records import Plan, parse_plan

_ROUNDS = 30


def least_ms(action: Callable[[], object]) -> float:
    """Return the least processor time of an action, in milliseconds; the garbage collector waits meanwhile."""
    gc.collect()
    gc.disable()
    taken = []
    for _ in range(_ROUNDS):
        start = time.process_time()
        action()
        taken.append(time.process_time() - start)
    gc.enable()
    return 1000 * min(taken)


def guards_ms(num_layers: int, folder: Path) -> tuple[int, float, float]:
    """Return how many guards a model has, and what they cost at the first load and at a later `recheck()`."""
    from cgtool import CompilationConfig
    from cgtool.compiler.pipeline import warm
    from fixtures import tiny_llama

    spec = tiny_llama.build(num_layers, width=64, intermediate=128, vocab=100)
    with torch.no_grad():
        warm(spec, config=CompilationConfig(adaptor="eager", jobs=0, proof=False), cache_dir=folder)
    [path] = folder.rglob("plan.json")
    data, method = path.read_bytes(), getattr(spec.module, spec.method)

    def check(plan: Plan) -> None:
        failures = failures_of((v.model_guards for v in plan.variants), Roots(spec.module, method))
        if failures:
            raise SystemExit(failures[0].sentence)

    plan = parse_plan(data, path=path)
    count = sum(len(variant.model_guards) for variant in plan.variants)
    parse_source.cache_clear()
    start = time.process_time()
    check(plan)
    first = 1000 * (time.process_time() - start)
    return count, first, least_ms(lambda: check(plan))


def files_ms(num_files: int, folder: Path) -> tuple[float, float]:
    """Return what it costs to look at the files of as many modules, in packages of 50, of 8 KiB each.

    Returns:
        For modules that are still to be found, and for those that were imported, as a model's mostly are at its load.
    """
    names = []
    for number in range(num_files):
        package = folder / f"measured_{number // 50}"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").touch()
        (package / f"module_{number}.py").write_text(f"VALUE = {number}\n" + "# a line\n" * 900)
        names.append(f"{package.name}.module_{number}")
    sys.path.insert(0, str(folder))
    source_digests(names)
    to_find = least_ms(lambda: source_digests(names))
    for name in names:
        importlib.import_module(name)
    return to_find, least_ms(lambda: source_digests(names))


def main(num_layers: int = 80, num_files: int = 500) -> None:
    """Print both figures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        count, first, later = guards_ms(num_layers, folder / "cache")
        sys.stdout.write(f"{num_layers} layers, {count} guards: {first:.1f} ms, {later:.1f} ms once known\n")
        to_find, imported = files_ms(num_files, folder)
        sys.stdout.write(f"{num_files} files: {imported:.1f} ms of imported modules, {to_find:.1f} ms of others\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
