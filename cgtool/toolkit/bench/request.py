"""What a process of a bench is asked, what it answers, and what the bench keeps of that. Must not import torch."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType, field

from cgtool.plan.grammar import Count, Record


class ModelText(Record, frozen=True, kw_only=True):
    """The model, as the user named it.

    Args:
        text: MODEL of the command line.
        factory_args: Keyword arguments for the factory.
        device: Where it is built; None leaves it to the factory.
        dtype: Its default floating dtype; likewise.
        pythonpath: Folders put on `sys.path` first.
        warm_weights: How the model is built to be warmed. Starts always build it for real.
    """

    text: str
    factory_args: dict[str, Any] = field(default_factory=dict)
    device: str | None = None
    dtype: str | None = None
    pythonpath: tuple[str, ...] = ()
    warm_weights: str = "fake"


class Request(Record, frozen=True, kw_only=True):
    """What one process does.

    Args:
        action: "start" builds the model and starts it; "warm" fills cgtool's cache, "precompile" torch's AOT file.
        kind: Of a start: how (`ways.Kind`).
        model: The model.
        config: cgtool's configuration, as JSON.
        seed: Fixes the weights of a factory that draws them from torch's or Python's generator.
        tokens: Sizes of the dynamic dimension whose steps are timed.
        dimension: Which dynamic dimension they are sizes of; None takes the only or the last one.
        repeats: How many steps of each size are timed.
        cache: cgtool's cache.
        artifact: The file of the mega-cache or of the AOT precompile.
        save_artifacts: Write torch's cache artifacts into `artifact` at the end.
        reference: The folder with eager's outputs.
        write_reference: This process is eager and writes them.
        spawned: When the process was started, on `time.monotonic`'s clock.
    """

    action: Literal["start", "warm", "precompile"]
    kind: str
    model: ModelText
    config: dict[str, Any]
    seed: int
    tokens: tuple[Count, ...]
    dimension: str | None
    repeats: Count
    cache: str
    artifact: str
    save_artifacts: bool = False
    reference: str
    write_reference: bool = False
    spawned: float = 0.0


class Step(Record, frozen=True, kw_only=True):
    """A size's steps in one process: the first, and the median of the others; or why there are none."""

    first_secs: float | None = None
    median_secs: float | None = None
    min_secs: float | None = None
    max_secs: float | None = None
    count: Count | None = None
    error: str | None = None


class Difference(Record, frozen=True, kw_only=True):
    """How outputs differ from eager's.

    Args:
        worst: The greatest difference of a tensor, relative to its greatest value.
        tolerance: What rounding explains; the widest of the dtypes that are there.
        problem: What is wrong, in a sentence; None where nothing is.
    """

    worst: float
    tolerance: float
    problem: str | None


class Answer(Record, frozen=True, kw_only=True):
    """What one process measured, as far as it came. Times are seconds, sizes bytes.

    Args:
        error: Why it ended early; one line.
        sentence: The same, where it was made for people.
        failed_in: The phase that it was in.
        import_secs: From the process's start until torch and what builds models are imported.
        build_secs: The model's own modules and its factory.
        ready_secs: From the built model to its first output.
        ready_imported: Which compilers 'ready' imported.
        dimension: The dimension that sizes are of.
        steps: By size.
        rss_bytes: The process's greatest resident size.
        device_bytes: The greatest size of torch's memory on the device; None where there is none.
        save_secs: Writing torch's cache artifacts.
        weights: A digest of the weights.
        outputs: By "example" or size, against eager's; None where eager has none.
        work_secs: A preparation's work.
        trace_secs: cgtool's part of it that traced.
        compile_secs: cgtool's part of it that compiled.
        compiled: How many artifacts were compiled.
        notes: What a reader should know of a preparation.
        torch: Versions and device.
    """

    error: str | None = None
    sentence: str | None = None
    failed_in: str | None = None
    import_secs: float | None = None
    build_secs: float | None = None
    ready_secs: float | None = None
    ready_imported: tuple[str, ...] | None = None
    dimension: str | UnsetType | None = UNSET
    steps: dict[str, Step] | None = None
    rss_bytes: Count | None = None
    device_bytes: Count | UnsetType | None = UNSET
    save_secs: float | None = None
    weights: str | None = None
    outputs: dict[str, Difference | None] | None = None
    work_secs: float | None = None
    trace_secs: float | None = None
    compile_secs: float | None = None
    compiled: Count | None = None
    notes: tuple[str, ...] | None = None
    torch: dict[str, Any] | None = None


class Start(Answer, frozen=True, kw_only=True):
    """An answer as the bench keeps it.

    Args:
        round: In which round; None for those that do not count.
        counted: Whether its figures count.
        process_secs: How long the process took.
        log: The last lines that a failed process printed.
        reused: Of a preparation: whether another bench made it.
    """

    round: Count | None
    counted: bool
    process_secs: float
    log: tuple[str, ...] | None = None
    reused: bool | None = None

    @property
    def start_secs(self) -> float | None:
        """From the process's start to its first output; None where it did not come so far."""
        return _sum(self.import_secs, self.build_secs, self.ready_secs)

    @property
    def prepare_secs(self) -> float | None:
        """A preparation's work; of a cold torch.compile its 'ready' is the work."""
        return self.ready_secs if self.work_secs is None else self.work_secs

    @property
    def total_secs(self) -> float | None:
        """From a preparation's start to the end of its work."""
        return _sum(self.import_secs, self.build_secs, self.prepare_secs)


def _sum(*parts: float | None) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None
