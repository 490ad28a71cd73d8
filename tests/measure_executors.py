"""Measures a warm on a Dask cluster of this machine against `--jobs 2`; prints a table.

    python tests/measure_executors.py FOLDER [ROUNDS [SIZES]]

24 units: fixtures/tiny_llama.py for the general shape and the sizes 2,3,4,5,6,7 with `aot_inductor`. In each round:
`--jobs 2`; the same on Dask, two workers of one thread, each bound to a core; and on Dask with one worker killed once
half of the units are stored. All share torch's own caches, which a first warm fills; each begins with an empty cache of
cgtool's. Ratios are those of a round.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
#: Three unique pieces for the general shape, three for one token, and three for each of these.
SIZES = (sys.argv[3:] or ["2,3,4,5,6,7"])[0]
_UNITS = 6 + 3 * len(SIZES.split(","))


def warm(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start a warm into an empty cache."""
    root = folder / "cache"
    shutil.rmtree(root, ignore_errors=True)
    command = [sys.executable, "-m", "cgtool", "warm", str(REPO / "fixtures/tiny_llama.py") + ":build", "--json"]
    command += ["--compile-sizes", SIZES, "--cache-dir", str(root), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment(folder))


def environment(folder: Path) -> dict[str, str]:
    """Return what all processes run in."""
    return {**os.environ, "PYTHONPATH": str(REPO), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}


def stored(folder: Path) -> int:
    """Return how many units are stored whole."""
    return len(list((folder / "cache").glob("torch_compile_cache/units/*/*/unit.json")))


def took(process: subprocess.Popen[bytes], begin: float) -> float:
    """Return the seconds of a warm once it is over, and check what it made."""
    out = process.communicate()[0]
    secs = time.perf_counter() - begin
    compiled = json.loads(out)["compiled"] if process.returncode == 0 else None
    if compiled != _UNITS:
        sys.exit(f"A warm compiled {compiled} units, and not {_UNITS}: {out.decode()[-500:]}")
    return secs


@contextlib.contextmanager
def dask(folder: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """Give the URL of a scheduler, and its two workers."""
    file = folder / "scheduler.json"
    file.unlink(missing_ok=True)
    module = [sys.executable, "-m", "distributed.cli.dask_"]
    env, null = environment(folder), subprocess.DEVNULL

    def start(kind: str, *words: str, cores: set[int]) -> subprocess.Popen[bytes]:
        command = ["taskset", "-c", ",".join(map(str, cores)), *module[:2], module[2] + kind, *words]
        return subprocess.Popen(command, env=env, stdout=null, stderr=null)

    cores = sorted(os.sched_getaffinity(0))
    options = ("--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file))
    started = [start("scheduler", *options, cores=set(cores))]
    try:
        while not file.exists() or not file.read_text().strip():
            time.sleep(0.05)
        address = json.loads(file.read_text())["address"]
        for core in cores[:2]:
            words = (address, "--nthreads", "1", "--no-nanny", "--no-dashboard")
            started.append(start("worker", *words, cores={core}))
        wait_for_workers(address)
        yield "dask:" + address.removeprefix("tcp:"), started[1:]
    finally:
        for process in started:
            process.kill()
            process.wait()


def wait_for_workers(address: str) -> None:
    """Return once both workers are there."""
    import distributed

    with distributed.Client(address, set_as_default=False) as client:
        client.wait_for_workers(2, timeout=120)


def run_here(folder: Path) -> float:
    """Return the seconds of a warm with `--jobs 2`."""
    begin = time.perf_counter()
    return took(warm(folder, "--jobs", "2"), begin)


def run_on_dask(folder: Path, *, kill: bool) -> float:
    """Return the seconds of a warm on Dask, where one worker may be killed half way."""
    with dask(folder) as (url, workers):
        begin = time.perf_counter()
        process = warm(folder, "--executor", url)
        while kill and process.poll() is None:
            if stored(folder) >= _UNITS // 2:
                workers[0].kill()
                break
            time.sleep(0.05)
        return took(process, begin)


def main() -> None:
    """Print the table."""
    folder, rounds = Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else 3
    folder.mkdir(parents=True, exist_ok=True)
    run_here(folder)  # fills torch's own caches
    times: dict[str, list[float]] = {"--jobs 2": [], "Dask": [], "Dask, one worker killed": []}
    for _ in range(rounds):
        times["--jobs 2"].append(run_here(folder))
        times["Dask"].append(run_on_dask(folder, kill=False))
        times["Dask, one worker killed"].append(run_on_dask(folder, kill=True))
    sys.stdout.write(f"| warm of {_UNITS} units | s | over --jobs 2 |\n|---|---|---|\n")
    for name, found in times.items():
        ratios = [one / other for one, other in zip(found, times["--jobs 2"], strict=True)]
        spread = f"{statistics.median(found):.1f} ({min(found):.1f}-{max(found):.1f})"
        sys.stdout.write(
            f"| {name} | {spread} | {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) |\n"
        )


if __name__ == "__main__":
    main()
