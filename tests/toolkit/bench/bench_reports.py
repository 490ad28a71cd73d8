"""Reports of benches that never ran: figures chosen so that every width and word can be told beforehand."""

from __future__ import annotations

from cgtool.toolkit.bench.report import BenchReport, notes_on, report_ways
from cgtool.toolkit.bench.request import Difference, ModelText, Start, Step
from cgtool.toolkit.bench.runner import Runner, Settings
from cgtool.toolkit.bench.ways import parse_ways

MACHINE = {"cpu": "Some CPU", "cores": 4, "cores_available": 2, "gpu": None, "load_before": 0.1}
VERSIONS = {"python": "3.12.1", "torch": "2.13.0", "triton": None, "cuda": None, "cgtool": "0.1.0", "commit": "abc"}


def start(number, *, ready, steps=None, counted=True, problem=None, worst=0.0, **more):
    """One answer of a process, as the runner keeps it."""
    fields = {
        "round": number if counted else None,
        "counted": counted,
        "import_secs": 2.0,
        "build_secs": 0.5,
        "ready_secs": ready,
        "steps": {size: Step(median_secs=secs, first_secs=2 * secs) for size, secs in (steps or {}).items()},
        "rss_bytes": 300 * 2**20,
        "device_bytes": None,
        "outputs": {"example": Difference(worst=worst, tolerance=1e-4, problem=problem)},
        "weights": "w0",
        "process_secs": ready + 3,
    }
    return Start(**{**fields, **more})


def made_runner(ways="eager,compile-warm,cgtool/eager", *, tokens=(8,), model="model.py:build"):
    """A runner that has run nothing yet."""
    settings = Settings(
        model=ModelText(text=model), config={}, ways=parse_ways(ways), starts=dict.fromkeys(ways, 7), tokens=tokens
    )
    return Runner(settings, None, lambda _: None), settings


def filled():
    """A runner in which eager is ready in 1 s, a warm torch.compile in 6 s, and cgtool was refused."""
    runner, settings = made_runner()
    for number in range(7):
        noise = 1 + number / 10
        runner.ways["eager"].starts.append(start(number, ready=1.0 * noise, steps={"8": 0.02}))
        runner.ways["compile-warm"].starts.append(start(number, ready=6.0 * noise, steps={"8": 0.01}))
    runner.ways["eager"].starts.append(start(None, ready=90.0, counted=False))
    runner.ways["compile-warm"].num_bytes = 5000
    failed = runner.ways["cgtool/eager"]
    failed.error, failed.log = "CacheMissError: <b>nothing</b> fits", ("line 1", "line 2")
    runner.sources["torch"].starts.append(start(0, ready=20.0, reused=False))
    runner.sources["cgtool-eager"].starts.append(
        Start(round=0, counted=True, import_secs=2.0, build_secs=0.5, work_secs=5.0, process_secs=9.0)
    )
    return runner, settings


def made_report(runner=None, settings=None, *, model="model.py:build", notes=()):
    """The report of a runner."""
    if runner is None:
        runner, settings = filled()
    ways = report_ways(runner, settings)
    return BenchReport(
        model=model,
        about={},
        command=["cgtool", "bench", model],
        machine=MACHINE,
        versions=VERSIONS,
        dimension="num_tokens",
        ways=ways,
        notes=(*notes, *notes_on(ways, MACHINE)),
        began="2026-01-01T00:00:00+00:00",
        secs=12.0,
    )
