"""What a bench compares, and what its processes are asked and answer. Must not import torch.

Grammar of what `--ways` and `--starts` take::

    ways   = name ("," name)*                  a name of the table, or a group: torch, cgtool, all
    starts = item ("," item)*
    item   = number | name "=" number          a bare number is for all that no item names
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

#: What every other way is compared with.
BASE = "eager"


class Way(Record, frozen=True, kw_only=True):
    """One way to start."""

    #: How users name it: "compile-warm", "cgtool/aot_inductor".
    name: str
    label: str
    kind: Literal["eager", "compile", "mega", "precompile", "cgtool"]
    #: The preparation that it starts from, "" where it needs none. Ways with one source share its folder.
    source: str = ""
    adaptor: str | None = None
    #: Start with torch's own cache folders as the preparation left them; else with empty ones.
    torch_caches: bool = False

    @property
    def is_cold(self) -> bool:
        """Whether a start compiles everything: too slow to be repeated as often as the others."""
        return self.kind == "compile" and not self.torch_caches


def _of_cgtool(adaptor: str) -> Way:
    return Way(
        name=f"cgtool/{adaptor}",
        label=f"cgtool, {adaptor}",
        kind="cgtool",
        source=f"cgtool-{adaptor}",
        adaptor=adaptor,
        # What Inductor's own artifacts load from; a package and a piece graph hold all that they need.
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
    *map(_of_cgtool, sorted(ADAPTORS, key=lambda adaptor: (adaptor == EAGER, adaptor))),
)
WAYS: Mapping[str, Way] = {way.name: way for way in _TABLE}
GROUPS: Mapping[str, tuple[str, ...]] = {
    "all": tuple(WAYS),
    "torch": tuple(name for name, way in WAYS.items() if way.source and way.adaptor is None),
    "cgtool": tuple(name for name, way in WAYS.items() if way.kind == "cgtool"),
}


def parse_ways(text: str) -> tuple[Way, ...]:
    """Return the ways that `--ways` names, in the table's order; the base is always among them."""
    names = {BASE, *(name for word in _words(text) for name in _named(word, "--ways"))}
    return tuple(way for way in WAYS.values() if way.name in names)


def parse_starts(text: str, default: int) -> dict[str, int]:
    """Return how often each way starts, as `--starts` says; what it does not say is `default`."""
    counts: dict[str, int] = {}
    for word in _words(text):
        name, equals, number = word.rpartition("=")
        if not number.strip().isdecimal():
            message = f"--starts: {word!r} is neither a number nor way=number. Write 15 or 15,compile-warm=3."
            raise UsageError(message, path="--starts", actual=word)
        if equals:
            counts.update(dict.fromkeys(_named(name.strip(), "--starts"), int(number)))
        else:
            default = int(number)
    return {name: counts.get(name, default) for name in WAYS}


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _named(word: str, option: str) -> tuple[str, ...]:
    known = {**{name: (name,) for name in WAYS}, **GROUPS}
    if word not in known:
        message = f"{option}: there is no way {word!r}; the nearest is {nearest(word, known)!r}."
        raise UsageError(f"{message} Choose of {', '.join(known)}.", path=option, expected=[*known], actual=word)
    return known[word]


class Settings(Record, frozen=True, kw_only=True):
    """What a bench does."""

    #: The model, with how it is built to be warmed; starts always build it for real.
    model: ModelChoice
    #: cgtool's configuration as JSON, for every adaptor; its own adaptor and cache are replaced.
    config: dict[str, Any]
    ways: tuple[Way, ...]
    #: How often each way starts, by name.
    starts: dict[str, int]
    #: Starts of each way before those that count.
    warm_ups: int = 1
    #: How often everything is compiled with nothing cached.
    cold_starts: int = 1
    #: Sizes of the dynamic dimension whose steps are timed.
    tokens: tuple[Count, ...] = ()
    #: Which dynamic dimension; None takes the only or the last one.
    dimension: str | None = None
    #: Steps of each size in each start.
    repeats: Count = 30
    #: Of the weights, of the order of starts and of the bounds.
    seed: int = 0
    #: How long one process may take.
    limit_secs: float = 1800.0


class Request(Record, frozen=True, kw_only=True):
    """What one process does."""

    #: "start" builds the model and starts it; "warm" fills cgtool's cache, "precompile" torch's AOT file.
    action: Literal["start", "warm", "precompile"] = "start"
    settings: Settings
    way: Way
    cache: str
    #: The file of the mega-cache or of the AOT precompile.
    artifact: str
    #: Write torch's cache artifacts into `artifact` at the end.
    save_artifacts: bool = False
    #: The file with eager's outputs.
    reference: str
    #: This process is eager and writes them.
    write_reference: bool = False
    #: When the process was started, on `time.monotonic`'s clock.
    spawned: float


class Step(Record, frozen=True, kw_only=True):
    """A size's steps in one process: the first, and the median of the others; or why there are none."""

    first_secs: float | None = None
    median_secs: float | None = None
    min_secs: float | None = None
    max_secs: float | None = None
    count: Count | None = None
    error: str | None = None


class Difference(Record, frozen=True, kw_only=True):
    """How outputs differ from eager's."""

    #: The greatest difference of a tensor, relative to its greatest value.
    worst: float
    #: What rounding explains; the widest of the dtypes that are there.
    tolerance: float
    #: What is wrong, in a sentence; None where nothing is.
    problem: str | None


class Start(Record, frozen=True, kw_only=True, omit_defaults=False):
    """What one process measured, as far as it came. Times are seconds, sizes bytes."""

    #: Why it ended early; one line.
    error: str | None = None
    #: The same, where it was made for people.
    sentence: str | None = None
    failed_in: str | None = None
    #: From the process's start until torch and what builds models are imported.
    import_secs: float | None = None
    #: The model's own modules and its factory.
    build_secs: float | None = None
    #: From the built model to its first output.
    ready_secs: float | None = None
    #: Which compilers 'ready' imported.
    ready_imported: tuple[str, ...] = ()
    dimension: str | None = None
    #: By size.
    steps: dict[str, Step] = field(default_factory=dict)
    rss_bytes: Count | None = None
    #: The greatest size of torch's memory on the device; None where there is none.
    device_bytes: Count | None = None
    #: Writing torch's cache artifacts.
    save_secs: float | None = None
    #: A digest of the weights.
    weights: str | None = None
    #: By "example" or size, against eager's; None where eager has none.
    outputs: dict[str, Difference | None] = field(default_factory=dict)
    #: A preparation's work.
    work_secs: float | None = None
    trace_secs: float | None = None
    compile_secs: float | None = None
    compiled: Count | None = None
    notes: tuple[str, ...] = ()
    #: Versions and device.
    torch: dict[str, Any] = field(default_factory=dict)
    #: In which round; None for those that do not count. The bench sets this and what follows.
    round: Count | None = None
    #: Whether its figures count.
    counted: bool = False
    process_secs: float | None = None
    #: The last lines that a failed process printed.
    log: tuple[str, ...] = ()
    #: Of a preparation: whether another bench made it.
    reused: bool = False

    @property
    def figures(self) -> dict[str, float]:
        """What is summed up of it, by name; what it did not come to is left out.

        `start_secs` is from the process's start to its first output; of a preparation `total_secs` is that to the end
        of its work, which is the 'ready' of a cold torch.compile. `step_8` is the median step of size 8, `first_8` the
        first one.
        """
        until = self.import_secs, self.build_secs
        work = self.ready_secs if self.work_secs is None else self.work_secs
        found = {name: getattr(self, name) for name in ("import_secs", "build_secs", "ready_secs", "process_secs")}
        found |= {"rss_bytes": self.rss_bytes, "device_bytes": self.device_bytes, "work_secs": work}
        found |= {"start_secs": _sum(*until, self.ready_secs), "total_secs": _sum(*until, work)}
        for size, step in self.steps.items():
            found |= {f"first_{size}": step.first_secs, f"step_{size}": step.median_secs}
        return {name: value for name, value in found.items() if value is not None}


def _sum(*parts: float | None) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None
