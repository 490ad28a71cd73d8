"""Measures a pull and a push beside plain tools: an entry of 20 artifacts, in and out of nginx with DAV on loopback.

    python tests/measure_remote.py [MIB]
    python tests/measure_remote.py load

Prints the least seconds of three runs each. Needs nginx and curl. The second prints what a load that finds its entry in
the cache takes with a store configured and without, in turn: quartiles, and the median of the differences.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "remote"), str(Path(__file__).parents[1])]
sys.path.append(str(Path(__file__).parents[1] / "fixtures"))
from cache_maker import lay_entry  # noqa: E402 - where the tests keep it
from remote_servers import nginx  # noqa: E402 - as above

from cgtool.toolkit.bundle.choose import Choice  # noqa: E402 - as above
from cgtool.toolkit.remote import pull, push  # noqa: E402 - as above

#: Two artifacts each.
SHAPES = ("general", *(f"n={size}" for size in range(2, 11)))
RUNS = 3


def measure(root: Path, mib: int) -> None:
    """Print what a transfer of an entry of so many MiB takes."""
    found: dict[str, float] = {}

    def timed(name: str, run: Callable[[], object]) -> None:
        began = time.perf_counter()
        run()
        found[name] = min(found.get(name, 1e9), time.perf_counter() - began)

    whole, most, rest = root / "whole", root / "most", root / "rest"
    native_bytes = mib * 2**20 // 20
    lay_entry(whole, native_bytes=native_bytes, shapes=SHAPES)
    lay_entry(most, native_bytes=native_bytes, shapes=SHAPES[:-1])
    lay_entry(rest, native_bytes=native_bytes, shapes=SHAPES[:1], seed=1)
    with nginx(root / "nginx") as url:
        store = root / "nginx/files"

        def curl() -> None:
            names = [f"{url}/artifacts/{path.name}" for path in (store / "artifacts").iterdir()]
            (root / "curl").mkdir()
            subprocess.run(["curl", "-s", "--remote-name-all", *names], cwd=root / "curl", check=True)
            subprocess.run("sha256sum * > /dev/null", shell=True, cwd=root / "curl", check=True)

        for _ in range(RUNS):
            timed("push, into an empty store", lambda: push(url, choice=Choice(), cache_dir=whole))
            timed("curl and sha256sum", curl)
            timed("pull", lambda: pull(url, trust=True, any_machine=True, cache_dir=root / "pulled"))
            shutil.rmtree(store)
            store.mkdir()
            push(url, choice=Choice(), cache_dir=most)
            timed("push, 18 of 20 there", lambda: push(url, choice=Choice(), cache_dir=whole))
            shutil.rmtree(store / "entries")
            for path in sorted((store / "artifacts").iterdir(), key=lambda path: path.stat().st_mtime)[-2:]:
                path.unlink()
            timed("push, 18 of 20 there as units", lambda: push(url, choice=Choice(), cache_dir=whole))
            timed("push, all there", lambda: push(url, choice=Choice(), cache_dir=whole))
            shutil.rmtree(store)
            store.mkdir()
            timed("push of 2 artifacts alone", lambda: push(url, choice=Choice(), cache_dir=rest))
            for folder in (root / "curl", root / "pulled", *store.iterdir()):
                shutil.rmtree(folder)
    sys.stdout.writelines(f"{name:30} {secs:6.2f}\n" for name, secs in found.items())


def measure_loads(root: Path) -> None:
    """Print what a load takes that needs no store."""
    import tiny_llama

    import cgtool
    from cgtool.compiler.pipeline import warm

    warm(tiny_llama.build(), config=cgtool.CompilationConfig(), cache_dir=root)
    module = tiny_llama.build().module
    millis: dict[str, list[float]] = {"file:///nowhere": [], "": []}
    for _ in range(300):
        for store, found in millis.items():
            os.environ["CGTOOL_REMOTE"] = store
            began = time.perf_counter()
            cgtool.load(module, cache_dir=root)
            found.append(1000 * (time.perf_counter() - began))
    for store, found in millis.items():
        low, median, high = statistics.quantiles(found, n=4)
        sys.stdout.write(f"{'a store' if store else 'no store':28} {median:6.2f} ({low:.2f}-{high:.2f}) ms\n")
    difference = statistics.median(one - other for one, other in zip(*millis.values(), strict=True))
    sys.stdout.write(f"{'difference':28} {difference:6.2f} ms\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="cgtool-measure-") as made:
        if sys.argv[1:] == ["load"]:
            measure_loads(Path(made))
        else:
            measure(Path(made), int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
