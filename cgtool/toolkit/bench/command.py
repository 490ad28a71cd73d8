"""`bench`: start a model in every way there is, each in fresh processes, and report what each costs.

Owns what the user asked (`BenchOptions`). Prints nothing; imports no torch: every start has a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from cgtool.events import OnEvent, ignore
from cgtool.toolkit.bench.machine import load_average, machine_facts, now_text, version_facts
from cgtool.toolkit.bench.page import page
from cgtool.toolkit.bench.report import BenchReport, notes_on, report_ways
from cgtool.toolkit.bench.runner import Runner, Settings
from cgtool.toolkit.bench.workspace import opened


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What the user asked of `bench`.

    Args:
        settings: What is measured.
        keep: A folder for what is prepared, used again by the next bench of the same; None keeps nothing.
        html: Where the page goes; None writes none.
        command: The command line, for the report.
    """

    settings: Settings
    keep: Path | None = None
    html: Path | None = None
    command: Sequence[str] = ()


def bench(options: BenchOptions, on_event: OnEvent = ignore) -> BenchReport:
    """Measure every way, and write the page where one is asked for.

    Args:
        options: What the user asked.
        on_event: Told of each preparation and start as it goes.

    Returns:
        What was found; a way that failed is part of it.

    Raises:
        UsageError: The folder to keep holds something else.
        ModelError: The model does not even run eagerly.
        OSError: A folder or the page cannot be written.
    """
    settings = options.settings
    if options.html is not None:
        _check_writable(options.html)
    machine = {**machine_facts(), "load_before": load_average()}
    began, clock = now_text(), time.monotonic()
    versions = version_facts()
    with opened(options.keep, _about(settings, versions)) as workspace:
        runner = Runner(settings, workspace, on_event)
        runner.run()
    machine["load_after"] = load_average()
    torch: dict[str, Any] = _first(runner, "torch") or {}
    machine |= {"gpu": torch.get("gpu"), "threads": torch.get("threads")}
    versions |= {name: torch.get(name) for name in ("torch", "triton", "cuda")}
    ways = report_ways(runner, settings)
    report = BenchReport(
        model=settings.model.text,
        about={**_about(settings, versions), "starts": {way.name: settings.starts[way.name] for way in settings.ways}},
        command=options.command,
        machine=machine,
        versions=versions,
        dimension=_first(runner, "dimension"),
        ways=ways,
        notes=notes_on(ways, machine),
        began=began,
        secs=time.monotonic() - clock,
    )
    if options.html is not None:
        options.html.write_text(page(report), encoding="utf-8")
    return report


def _check_writable(file: Path) -> None:
    """Let a page that cannot be written be known before minutes are spent."""
    file.parent.mkdir(parents=True, exist_ok=True)
    existed = file.exists()
    file.open("a", encoding="utf-8").close()
    if not existed:
        file.unlink()


def _about(settings: Settings, versions: Mapping[str, Any]) -> dict[str, Any]:
    """What preparations depend on: a kept folder serves a bench of the same alone."""
    return {
        "model": to_builtins(settings.model),
        "configuration": dict(settings.config),
        "tokens": list(settings.tokens),
        "size-dim": settings.dimension,
        "seed": settings.seed,
        "Python": versions["python"],
    }


def _first(runner: Runner, name: str) -> Any:
    found = (getattr(start, name) for measured in runner.ways.values() for start in measured.starts)
    return next((value for value in found if value), None)
