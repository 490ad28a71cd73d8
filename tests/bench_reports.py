"""Made-up bench reports, with figures that make the expected output easy to predict."""

from __future__ import annotations

from cgtool.toolkit.bench.report import SCHEMA, BenchReport, Measured, notes_on, report_way
from cgtool.toolkit.bench.ways import Difference, Settings, Start, Step, parse_ways
from cgtool.toolkit.model_choice import ModelChoice

MACHINE = {"cpu": "Some CPU", "cores": 4, "cores_available": 2, "gpu": None, "load_before": 0.1}
VERSIONS = {"python": "3.12.1", "torch": "2.13.0", "triton": None, "cuda": None, "cgtool": "0.1.0", "commit": "abc"}


def start(number, *, ready, steps=None, counted=True, problem=None, worst=0.0, **more):
    """The answer of a process, as the runner stores it."""
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


class Bench:
    """The measurements of a bench, initially empty."""

    def __init__(self, ways="eager,compile-warm,cgtool/eager", *, tokens=(8,)):
        starts = dict.fromkeys(ways, 7)
        model = ModelChoice(model="model.py:build")
        self.settings = Settings(model=model, config={}, ways=parse_ways(ways), starts=starts, tokens=tokens)
        self.ways = {way.name: Measured() for way in self.settings.ways}
        self.sources = {way.source: Measured() for way in self.settings.ways if way.source}

    def reports(self):
        return [report_way(way, self.settings, self.ways, self.sources) for way in self.settings.ways]


def filled():
    """Return a bench in which eager is ready in 1 s, a warm torch.compile in 6 s, and cgtool failed."""
    bench = Bench()
    for number in range(7):
        noise = 1 + number / 10
        bench.ways["eager"].starts.append(start(number, ready=1.0 * noise, steps={"8": 0.02}))
        bench.ways["compile-warm"].starts.append(start(number, ready=6.0 * noise, steps={"8": 0.01}))
    bench.ways["eager"].starts.append(start(None, ready=90.0, counted=False))
    bench.ways["compile-warm"].num_bytes = 5000
    failed = bench.ways["cgtool/eager"]
    failed.error, failed.log = "CacheMissError: <b>nothing</b> fits", ("line 1", "line 2")
    bench.sources["torch"].starts.append(start(0, ready=20.0, reused=False))
    bench.sources["cgtool-eager"].starts.append(
        Start(round=0, counted=True, import_secs=2.0, build_secs=0.5, work_secs=5.0, process_secs=9.0)
    )
    return bench


def made_report(bench=None, *, model="model.py:build", notes=()):
    """The report of a bench."""
    ways = (bench or filled()).reports()
    return BenchReport(
        schema=SCHEMA,
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
