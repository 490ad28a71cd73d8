"""`warm`: compile a model into the cache before it is served, or check whether that has been done.

Prints nothing. Importable without torch: the pipeline, which needs it, is imported only when the command runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgtool.child import Channel
from cgtool.config import CompilationConfig
from cgtool.errors import CacheMissError
from cgtool.events import Event, OnEvent, ignore
from cgtool.host import environment
from cgtool.machine import tracing_jobs
from cgtool.plan.grammar import Record
from cgtool.processes import Children
from cgtool.store.layout import DEFAULT_PREFIX, CacheLayout, RankName, resolve_root, short
from cgtool.store.trust import TrustPolicy
from cgtool.toolkit.listing import list_entry
from cgtool.toolkit.model_choice import ModelChoice, load_call, require_cache, start_line

if TYPE_CHECKING:
    from cgtool.compiler.ranks import Ranks

SCHEMA = 2
#: A model with dynamic batch and length has four variants.
_EARLY_TRACERS = 4


class RankSummary(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The result of one of several ranks."""

    rank: int
    hit: bool
    compiled: int
    reused: int
    notes: tuple[str, ...]

    @classmethod
    def of(cls, rank: int, report: WarmReport) -> RankSummary:
        """Summarize the report of a rank."""
        return cls(rank=rank, hit=report.hit, compiled=report.compiled, reused=report.reused, notes=tuple(report.notes))


@dataclass(frozen=True, kw_only=True)
class WarmReport:
    """The result of a warm."""

    #: The entry as `inspect cache --json` prints it; None if a check found none.
    entry: Mapping[str, Any] | None = None
    root: str
    #: Whether the cache already held everything.
    hit: bool = False
    compiled: int = 0
    reused: int = 0
    trace_secs: float = 0.0
    compile_secs: float = 0.0
    #: Why the model misses, the most relevant first; empty for a hit.
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    #: For each variant, the sizes at which a whole call was proved equal to the model (`proved_at`), or why none was
    #: (`proof_gap`).
    variants_proved: tuple[Mapping[str, Any], ...] = ()
    #: A summary of each rank, if several were warmed together.
    ranks: tuple[RankSummary, ...] = ()
    #: A shell command that loads the model from this entry and calls it once.
    start: str
    #: The Python expression that loads a module from this entry.
    load_call: str

    @property
    def is_warm(self) -> bool:
        """Whether the cache already held everything, for every rank."""
        return self.hit and all(rank.hit for rank in self.ranks)

    def to_json(self) -> dict[str, Any]:
        """Return the document that `warm --json` prints: the entry and the result of this run."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del fields["entry"], fields["load_call"]
        return {"schema": SCHEMA, "root": self.root, **(self.entry or {}), **fields}


def warm(
    choice: ModelChoice,
    *,
    config: CompilationConfig,
    cache_dir: Path | None = None,
    rank: int | None = None,
    check: bool = False,
    ranks: Ranks | None = None,
    in_children: bool = True,
    on_event: OnEvent = ignore,
) -> WarmReport:
    """Compile the parts of a model that the cache does not hold, or only check whether there are any.

    Args:
        choice: The model.
        config: The compilation configuration.
        cache_dir: The cache's root; None means the configured or the user's own.
        rank: This process's rank in a model-parallel group; None takes it from the environment.
        check: Only report what is missing; nothing is compiled or written.
        ranks: The ranks that a launcher started to warm this model together.
        in_children: Whether child processes can build and trace this model.
        on_event: Called with progress events.

    Raises:
        UsageError: The cache is disabled.
        RemoteError: A required store failed.
        ModelError: MODEL cannot be found or built.
        CgtoolError: The pipeline failed.
    """
    require_cache(config)
    explicit = cache_dir if cache_dir is not None else config.cache_dir or None
    root = resolve_root(explicit)
    rank = environment().rank if rank is None else rank
    # An empty cache without a remote store cannot hit, so the model will be traced.
    is_cold = not (check or config.remote or CacheLayout(root=root).hashes())
    with _tracers(choice, config, start_early=is_cold) if in_children else contextlib.nullcontext() as tracers:
        spec = choice.build(on_event=on_event)
        # Imported late: Dynamo and Inductor take seconds to import, and errors in MODEL should be reported before.
        from cgtool.compiler.pipeline import warm as run_pipeline

        # `cgtool.load` reads the environment too, so its cache directory need not be repeated.
        is_named = explicit is not None and str(explicit) != environment().cache_dir
        location = {
            "cache_dir": str(explicit) if is_named else None,
            "rank": rank or None,
            "prefix": None if spec.prefix == DEFAULT_PREFIX else spec.prefix,
        }
        load_args = location
        if choice.model.startswith("hf:") and "cache" in choice.factory_args:
            # `spec` holds the model's decode step, but `cgtool.load` takes the model itself.
            load_args = {**location, "prefix": choice.prefix, "cache": choice.factory_args["cache"]}
        lines: dict[str, Any] = {"start": start_line(choice, location), "load_call": load_call("module", load_args)}
        try:
            result = run_pipeline(
                spec,
                config=config,
                cache_dir=root,
                rank=rank,
                check=check,
                ranks=ranks,
                tracers=tracers,
                on_event=on_event,
            )
        except CacheMissError as miss:
            return WarmReport(root=str(root), reasons=miss.reasons or (str(miss),), **lines)
    if result.compiled or not result.hit:
        _push(result.manifest.name, config, root, on_event)
    listing = list_entry(CacheLayout(root=root), result.manifest.name)
    return WarmReport(
        entry=None if listing is None else listing.to_json(),
        root=str(root),
        hit=result.hit,
        compiled=result.compiled,
        reused=result.reused,
        trace_secs=result.trace_secs,
        compile_secs=result.compile_secs,
        reasons=tuple(result.reasons),
        notes=(*spec.notes, *result.notes),
        variants_proved=tuple(
            {name: getattr(variant, name) for name in ("name", "fixed", "proved_at", "proof_gap")}
            for variant in result.manifest.variants
        ),
        **lines,
    )


@contextlib.contextmanager
def _tracers(choice: ModelChoice, config: CompilationConfig, *, start_early: bool) -> Iterator[Children | None]:
    """Yield child processes that build the model and trace it, if the machine has resources for any."""
    count = tracing_jobs(config.jobs)
    if count < 1 or choice.weights == "real":  # each child would hold a copy of the weights
        yield None
        return
    with Children("cgtool.toolkit.warm:trace_variants", limit=count, setup=choice) as children:
        if start_early:
            with contextlib.suppress(OSError):  # starting them when they are needed reports the error
                children.start(_EARLY_TRACERS)
        yield children


def trace_variants(channel: Channel) -> None:
    """Build the model and trace its variants; the main function of a child process."""
    spec = channel.setup(ModelChoice).build()
    from cgtool.compiler.tracers import serve_traces  # Dynamo

    serve_traces(channel, spec)


def _push(name: RankName, config: CompilationConfig, root: Path, on_event: OnEvent) -> None:
    """Push the entry to the configured remote stores."""
    if not config.remote or config.remote_readonly:
        return
    from cgtool.remote.remotes import Remotes  # only a push needs these
    from cgtool.threads import in_parallel
    from cgtool.toolkit.remote import sending_threads

    began = time.monotonic()
    on_event(Event("push", short(name.hash), done=0, total=1))
    with sending_threads() as pool:
        Remotes.of(CacheLayout(root=root), config, TrustPolicy.of(config)).push(name, each=partial(in_parallel, pool))
    on_event(Event("push", short(name.hash), done=1, total=1, secs=time.monotonic() - began))
