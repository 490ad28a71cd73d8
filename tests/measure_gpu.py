"""Runs every test that needs a GPU and prints what came of them, a table for README.

    python tests/measure_gpu.py [PYTEST-ARGUMENT...]

On one GPU those that need two are skipped, and counted so. The exit code is pytest's. Where a machine is lent for a
short time, arguments choose among the tests: files, `-k`, `--deselect`.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
OUTCOMES = ("passed", "skipped", "failed")


class Table:
    """A plugin of pytest: how many tests of each file had which outcome, and how long they took."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self.secs: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.location[0]
        self.secs[file] += report.duration
        if report.when == "call" or report.outcome != "passed":  # what is set up and taken down counts where it fails
            self.outcomes[file][report.outcome] += 1

    def text(self) -> str:
        lines = [f"| tests | {' | '.join(OUTCOMES)} | s |", "|---" * (len(OUTCOMES) + 2) + "|"]
        for file, counts in sorted(self.outcomes.items()):
            cells = (str(counts[outcome]) for outcome in OUTCOMES)
            lines.append(f"| {file} | {' | '.join(cells)} | {self.secs[file]:.0f} |")
        return "\n".join(lines)


def main() -> int:
    table = Table()
    chosen = [] if any(Path(argument).exists() for argument in sys.argv[1:]) else [str(TESTS)]
    code = pytest.main(["-m", "gpu", "-n0", "-q", *chosen, *sys.argv[1:]], plugins=[table])
    git = ["git", "-C", str(TESTS), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()  # a copy may have none
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    where = ", ".join([*(devices or ["no GPU"]), f"torch {torch.__version__}", f"commit {commit or 'unknown'}"])
    sys.stdout.write(f"\n{where}\n\n{table.text()}\n")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
