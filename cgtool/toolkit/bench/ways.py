"""The ways that a bench compares, and the requests and answers of its processes. Must not import torch.

Grammar of `--ways` and `--starts`::

    ways   = name ("," name)*                  a way's name, or a group: torch, cgtool, all
    starts = item ("," item)*
    item   = number | name "=" number          a bare number applies to all ways without an item
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import field

from cgtool.adaptor_registry import ADAPTORS
from cgtool.config_values import nearest
from cgtool.errors import UsageError
from cgtool.plan.grammar import Count, Record
from cgtool.plan.pieces import EAGER
from cgtool.toolkit.model_choice import ModelChoice

#: The way with which every other is compared.
BASE = "eager"


class Way(Record, frozen=True, kw_only=True):
    """One way to start a model."""

    #: The name on the command line: "compile-warm", "cgtool/aot_inductor".
    name: str
    label: str
    kind: Literal["eager", "compile", "mega", "precompile", "cgtool"]
    #: The preparation that it starts from; "" if it needs none. Ways with the same source share a folder.
    source: str = ""
    adaptor: str | None = None
    #: Start with the torch cache folders of the preparation instead of empty ones.
    torch_caches: bool = False

    @property
    def is_cold(self) -> bool:
        """Whether a start compiles everything, which is too slow to repeat as often as the others."""
        return self.kind == "compile" and not self.torch_caches


def _cgtool_way(adaptor: str) -> Way:
    return Way(
        name=f"cgtool/{adaptor}",
        label=f"cgtool, {adaptor}",
        kind="cgtool",
        source=f"cgtool-{adaptor}",
        adaptor=adaptor,
        # Inductor's own artifacts load from torch's caches; packages and piece graphs are self-contained.
        torch_caches=adaptor.startswith("inductor"),
    )


_MEGA, _AOT = "mega-cache loaded into empty caches", "torch's AOT precompile"
_TABLE = (
    Way(name=BASE, label="eager", kind="eager"),
    Way(name="compile-cold", label="torch.compile, empty caches", kind="compile", source="torch"),
    Way(
        name="compile-warm",
        label="torch.compile, warm local caches",
        kind="compile",
        source="torch",
        torch_caches=True,
    ),
    Way(name="mega-cache", label=_MEGA, kind="mega", source="torch"),
    Way(name="aot-precompile", label=_AOT, kind="precompile", source="precompile", torch_caches=True),
    *map(_cgtool_way, sorted(ADAPTORS, key=lambda adaptor: (adaptor == EAGER, adaptor))),
)
WAYS: Mapping[str, Way] = {way.name: way for way in _TABLE}
GROUPS: Mapping[str, tuple[str, ...]] = {
    "all": tuple(WAYS),
    "torch": tuple(name for name, way in WAYS.items() if way.source and way.adaptor is None),
    "cgtool": tuple(name for name, way in WAYS.items() if way.kind == "cgtool"),
}


def parse_ways(text: str) -> tuple[Way, ...]:
    """Return the ways that `--ways` names, in the table's order; the base is always included."""
    names = {BASE, *(name for item in _items(text) for name in _resolve(item, "--ways"))}
    return tuple(way for way in WAYS.values() if way.name in names)


def parse_starts(text: str, default: int) -> dict[str, int]:
    """Return the number of starts of each way, as given by `--starts` or `default`."""
    counts: dict[str, int] = {}
    for item in _items(text):
        name, equals, number = item.rpartition("=")
        if not number.strip().isdecimal():
            message = f"--starts: {item!r} is neither a number nor way=number. Write 15 or 15,compile-warm=3."
            raise UsageError(message, path="--starts", actual=item)
        if equals:
            counts.update(dict.fromkeys(_resolve(name.strip(), "--starts"), int(number)))
        else:
            default = int(number)
    return {name: counts.get(name, default) for name in WAYS}


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _resolve(name: str, option: str) -> tuple[str, ...]:
    """Return the names of a way or a group."""
    known = {**{way: (way,) for way in WAYS}, **GROUPS}
    if name not in known:
        message = f"{option}: there is no way {name!r}; the nearest is {nearest(name, known)!r}."
        raise UsageError(f"{message} Choose from {', '.join(known)}.", path=option, expected=[*known], actual=name)
    return known[name]


class Settings(Record, frozen=True, kw_only=True):
    """The settings of a bench."""

    #: The model, and how it is built to be warmed; starts always build it with real weights.
    model: ModelChoice
    #: cgtool's configuration as JSON; each way overrides its adaptor and cache.
    config: dict[str, Any]
    ways: tuple[Way, ...]
    #: Way → number of starts.
    starts: dict[str, int]
    #: Uncounted starts of each way before the counted ones.
    warm_ups: int = 1
    #: How often each preparation runs with empty caches.
    cold_starts: int = 1
    #: Sizes of the dynamic dimension whose steps are timed.
    tokens: tuple[Count, ...] = ()
    #: The dynamic dimension; None takes the last one.
    dimension: str | None = None
    #: Steps of each size in each start.
    repeats: Count = 30
    #: Determines the weights, the order of starts and the confidence intervals.
    seed: int = 0
    #: Time limit of one process.
    limit_secs: float = 1800.0


class Request(Record, frozen=True, kw_only=True):
    """The task of one process."""

    #: "start" builds the model and starts it; "warm" fills cgtool's cache; "precompile" writes torch's AOT file.
    action: Literal["start", "warm", "precompile"] = "start"
    settings: Settings
    way: Way
    cache: str
    #: The file of the mega-cache or the AOT precompile.
    artifact: str
    #: Write torch's cache artifacts to `artifact` at the end.
    save_artifacts: bool = False
    #: The file with eager's outputs.
    reference: str
    #: This process runs eagerly and writes `reference`.
    write_reference: bool = False
    #: When the process was started, on the clock of `time.monotonic`.
    spawned: float


class Step(Record, frozen=True, kw_only=True):
    """The steps of one size in one process: the first, and statistics of the others; or an error."""

    first_secs: float | None = None
    median_secs: float | None = None
    min_secs: float | None = None
    max_secs: float | None = None
    count: Count | None = None
    error: str | None = None


class Difference(Record, frozen=True, kw_only=True):
    """The difference of outputs from eager's."""

    #: The largest difference of a tensor, relative to its largest absolute value.
    worst: float
    #: The difference that rounding explains, for the least precise dtype.
    tolerance: float
    #: A sentence if the outputs differ by more; otherwise None.
    problem: str | None


class Start(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The measurements of one process, until it failed. Times are in seconds, sizes in bytes."""

    #: Why it ended early, in one line.
    error: str | None = None
    #: The full message, if the error is one of cgtool's.
    sentence: str | None = None
    #: The phase that failed.
    failed_in: str | None = None
    #: From the start of the process until torch and the model builders are imported.
    import_secs: float | None = None
    #: The model's own modules and its factory.
    build_secs: float | None = None
    #: From the built model to its first output.
    ready_secs: float | None = None
    #: The compiler modules that 'ready' imported.
    ready_imported: tuple[str, ...] = ()
    dimension: str | None = None
    #: By size.
    steps: dict[str, Step] = field(default_factory=dict)
    rss_bytes: Count | None = None
    #: Peak memory that torch allocated on the device; None without a device.
    device_bytes: Count | None = None
    #: Writing torch's cache artifacts.
    save_secs: float | None = None
    #: A digest of the weights.
    weights: str | None = None
    #: By "example" or size, compared with eager's; None if eager has no output of the size.
    outputs: dict[str, Difference | None] = field(default_factory=dict)
    #: The work of a preparation.
    work_secs: float | None = None
    trace_secs: float | None = None
    compile_secs: float | None = None
    compiled: Count | None = None
    notes: tuple[str, ...] = ()
    #: Versions and device.
    torch: dict[str, Any] = field(default_factory=dict)
    #: The round; None for uncounted starts. The bench sets this field and the following ones.
    round: Count | None = None
    #: Whether its figures enter the statistics.
    counted: bool = False
    process_secs: float | None = None
    #: The last lines that a failed process printed.
    log: tuple[str, ...] = ()
    #: A preparation that an earlier bench made.
    reused: bool = False

    @property
    def figures(self) -> dict[str, float]:
        """Metric → value; metrics that were not measured are left out.

        `start_secs` is the time from the start of the process to its first output. `total_secs` is the time from the
        start of a preparation to the end of its work; for a cold torch.compile the work is 'ready'. `step_8` is the
        median step of size 8, `first_8` the first one.
        """
        before = self.import_secs, self.build_secs
        work = self.ready_secs if self.work_secs is None else self.work_secs
        figures = {name: getattr(self, name) for name in ("import_secs", "build_secs", "ready_secs", "process_secs")}
        figures |= {"rss_bytes": self.rss_bytes, "device_bytes": self.device_bytes, "work_secs": work}
        figures |= {"start_secs": _sum(*before, self.ready_secs), "total_secs": _sum(*before, work)}
        for size, step in self.steps.items():
            figures |= {f"first_{size}": step.first_secs, f"step_{size}": step.median_secs}
        return {name: value for name, value in figures.items() if value is not None}


def _sum(*parts: float | None) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None
