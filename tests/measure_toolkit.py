"""Measures the commands that look through a cache against the plain tools that do the same work; prints a table.

    python tests/measure_toolkit.py FOLDER [ROUNDS [NAME]]

Makes three caches in FOLDER, if they are not there: "many", 100,000 artifacts of 512 bytes in 2,000 entries; "small",
as many of 16 KiB; and "large", 1 GiB in 32 entries, 2,048 packages with 512 KiB of torch's own native code each (those
of the fixtures have 380 KiB). In each round every command runs once, a pair one after the other, and what is compared
is the pair of a round. What import and export write is removed; before all else a command runs once more, so that what
it reads is in the page cache: a system may take back what was not read for minutes. With NAME only measures whose names
hold it are taken.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from cache_maker import make_cache  # noqa: E402 - where the tests keep it

_CGTOOL = (sys.executable, "-m", "cgtool")
_LEVEL = "3"


@dataclass(frozen=True)
class Measure:
    """A command, and what it is compared with.

    Args:
        name: For the table.
        command: What is measured.
        other: What it is compared with, a text for the shell; None for nothing.
        makes: What the command makes, and what the other makes; removed before either runs.
    """

    name: str
    command: tuple[str, ...]
    other: tuple[str, ...] | str | None = None
    makes: tuple[Path, Path] | None = None


def measures(folder: Path) -> list[Measure]:
    """Return everything that is measured."""
    many, small, large = folder / "many", folder / "small", folder / "large"
    bundle, target, archive, unpacked = (folder / name for name in ("b.tar.zst", "imported", "a.tar.zst", "unpacked"))
    sums = "find {} -type f -print0 | xargs -0 -P 2 -n 512 sha256sum > /dev/null"
    export = (*_CGTOOL, "export", str(bundle), "--cache-dir", str(large), "--all", "--level", _LEVEL, "--quiet")
    importing = (*_CGTOOL, "import", str(bundle), "--cache-dir", str(target), "--trust", "--any-machine", "--quiet")
    packed = f"tar -C {large}/torch_compile_cache -c . | zstd -q -f -T0 -{_LEVEL} -o {archive}"
    unpack = f"mkdir -p {unpacked} && zstd -q -d -c {archive} | tar -C {unpacked} -x && {sums.format(unpacked)}"
    return [
        Measure("--help", (*_CGTOOL, "--help"), (sys.executable, "-c", "import click")),
        Measure("inspect cache, many", (*_CGTOOL, "inspect", "cache", str(many))),
        Measure("inspect cache --filter, many", (*_CGTOOL, "inspect", "cache", str(many), "--filter", "last_used>30d")),
        Measure("prune --dry-run, many", (*_CGTOOL, "prune", "--dry-run", "--cache-dir", str(many))),
        Measure(
            "prune --dry-run --older-than 30d, many",
            (*_CGTOOL, "prune", "--dry-run", "--older-than", "30d", "--cache-dir", str(many)),
        ),
        Measure("verify, many", (*_CGTOOL, "verify", "--cache-dir", str(many), "--quiet"), sums.format(many)),
        Measure("verify, small", (*_CGTOOL, "verify", "--cache-dir", str(small), "--quiet"), sums.format(small)),
        Measure("verify, large", (*_CGTOOL, "verify", "--cache-dir", str(large), "--quiet"), sums.format(large)),
        Measure("export, large", export, packed, makes=(bundle, archive)),
        Measure("import, large", importing, unpack, makes=(target, unpacked)),
    ]


def library() -> bytes:
    """Return native code that torch brings along: what packs as that of artifacts does."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        sys.exit("Install torch: its native code is what the artifacts are cut from.")
    return (Path(torch.origin).parent / "lib" / "libtorch_cpu.so").read_bytes()


def run(measure: Measure, side: int) -> float:
    """Run a command (0) or what it is compared with (1), and return its seconds."""
    prepare(measure, side)
    command = (measure.command, measure.other)[side]
    for _ in range(1 if measure.makes is not None else 2):
        begin = time.perf_counter()
        done = subprocess.run(
            command, shell=isinstance(command, str), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False
        )
        secs = time.perf_counter() - begin
    if done.returncode not in ((0, 3) if "verify" in command else (0,)):  # 3: entries of another machine
        sys.exit(f"{command}: {done.stderr.decode()}")
    return secs


def prepare(measure: Measure, side: int) -> None:
    """Remove what a run would make, and let the disk come to rest."""
    if measure.makes is not None:
        shutil.rmtree(measure.makes[side], ignore_errors=True)
        measure.makes[side].unlink(missing_ok=True)
    os.sync()


def row(measure: Measure, times: list[tuple[float, float | None]]) -> str:
    """Return a line of the table: medians with their extremes, and the ratio or difference of pairs."""
    ours = [one for one, _ in times]
    pairs = [(one, other) for one, other in times if other is not None]
    text = f"| {measure.name} | {_spread(ours)} | {peak(measure):.0f} |"
    if not pairs:
        return f"{text} | |"
    ratios = [one / other for one, other in pairs]
    more = statistics.median(one - other for one, other in pairs)
    return f"{text} {_spread([other for _, other in pairs])} | {_spread(ratios)} | {more * 1e3:+.0f} ms |"


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def peak(measure: Measure) -> float:
    """Return the most memory of a command, in MiB: run once more, in a child whose children are counted alone."""
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], stdout=-3, stderr=-3); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    prepare(measure, 0)
    done = subprocess.run([sys.executable, "-c", code, *measure.command], stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout) / 1024


def main() -> None:
    """Make the caches and print the table."""
    folder, rounds = Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else 5
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in (("many", 512), ("small", 16 * 1024)):
        if not (folder / name).exists():
            make_cache(folder / name, entries=2000, artifacts_per_entry=50, artifact_bytes=size)
    if not (folder / "large").exists():
        make_cache(folder / "large", entries=32, artifacts_per_entry=64, artifact_bytes=512 * 1024, library=library())
    todo = [measure for measure in measures(folder) if (sys.argv[3:] or [""])[0] in measure.name]
    found: dict[str, list[tuple[float, float | None]]] = {measure.name: [] for measure in todo}
    for number in range(rounds + 1):
        for measure in todo:
            times = (run(measure, 0), run(measure, 1) if measure.other is not None else None)
            if number:  # the first fills the page cache
                found[measure.name].append(times)
    lines = ["| command | s | MiB | compared with, s | ratio | more |", "|---|---|---|---|---|---|"]
    lines += [row(measure, found[measure.name]) for measure in todo]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
