"""`warm`: compile a model into the cache before it is served, or say whether that is still to be done.

Owns what came of it (`WarmReport`). Prints nothing. Importable without torch: the pipeline, which needs it, is imported
as the command runs.
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
#: Dynamic batches and lengths make four variants.
_EARLY_TRACERS = 4


class RankSummary(Record, frozen=True, kw_only=True, omit_defaults=False):
    """What came of one rank of several."""

    rank: int
    hit: bool
    compiled: int
    reused: int
    notes: tuple[str, ...]

    @classmethod
    def of(cls, rank: int, report: WarmReport) -> RankSummary:
        """Return what a rank's report comes to."""
        return cls(rank=rank, hit=report.hit, compiled=report.compiled, reused=report.reused, notes=tuple(report.notes))


@dataclass(frozen=True, kw_only=True)
class WarmReport:
    """What came of a warm."""

    #: The entry as `inspect cache --json` prints it; None where a check found none.
    entry: Mapping[str, Any] | None = None
    root: str
    #: Whether the cache already held all of it.
    hit: bool = False
    compiled: int = 0
    reused: int = 0
    trace_secs: float = 0.0
    compile_secs: float = 0.0
    #: Why the cache does not serve the model, the most telling first; empty where it does.
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    #: For each variant the sizes at which a whole call gave what the model itself gives (`proved_at`), or why there are
    #: none (`proof_gap`).
    variants_proved: tuple[Mapping[str, Any], ...] = ()
    #: A summary of each rank, where several were warmed together.
    ranks: tuple[RankSummary, ...] = ()
    #: A shell line that loads the model from this entry and calls it once.
    start: str
    #: The Python expression that loads a module from this entry.
    load_call: str

    @property
    def is_warm(self) -> bool:
        """Whether the cache already held all of it, for every rank."""
        return self.hit and all(rank.hit for rank in self.ranks)

    def to_json(self) -> dict[str, Any]:
        """Return the document that `warm --json` prints: the entry and what this run did."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del own["entry"], own["load_call"]
        return {"schema": SCHEMA, "root": self.root, **(self.entry or {}), **own}


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
    """Compile what the cache lacks of a model, or only look whether it lacks anything.

    Args:
        choice: The model.
        config: What to compile and how.
        cache_dir: The cache's root; None means the configured or the user's own.
        rank: This process's place in a model-parallel group; None takes the environment's word.
        check: Only say what is missing; nothing is compiled or written.
        ranks: Those that a launcher started to warm this model together.
        in_children: Whether other processes can build this model too, and trace it.
        on_event: Told of each phase as it goes.

    Raises:
        UsageError: The cache is switched off.
        RemoteError: A store that is required fails.
        ModelError: MODEL could not be found or built.
        CgtoolError: Whatever the pipeline could not do.
    """
    require_cache(config)
    given = cache_dir if cache_dir is not None else config.cache_dir or None
    root = resolve_root(given)
    rank = environment().rank if rank is None else rank
    # What no cache and no store can hold is going to be traced.
    is_cold = not (check or config.remote or CacheLayout(root=root).hashes())
    with _tracers(choice, config, starts=is_cold) if in_children else contextlib.nullcontext() as tracers:
        spec = choice.build(on_event=on_event)
        # Imports Dynamo and Inductor: seconds that a MODEL which is not there need not wait for.
        from cgtool.compiler.pipeline import warm as run_pipeline

        # The environment's word needs no repeating: `cgtool.load` hears it too.
        is_named = given is not None and str(given) != environment().cache_dir
        place = {
            "cache_dir": str(given) if is_named else None,
            "rank": rank or None,
            "prefix": None if spec.prefix == DEFAULT_PREFIX else spec.prefix,
        }
        decodes = choice.model.startswith("hf:") and "cache" in choice.factory_args
        # What was built is the model's decode step, and a program has the model.
        for_model = {**place, "prefix": choice.prefix, "cache": choice.factory_args["cache"]} if decodes else place
        lines: dict[str, Any] = {"start": start_line(choice, place), "load_call": load_call("module", for_model)}
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
def _tracers(choice: ModelChoice, config: CompilationConfig, *, starts: bool) -> Iterator[Children | None]:
    """Yield children that build the model too, if the machine bears any; `starts` starts them before they are asked."""
    count = tracing_jobs(config.jobs)
    if count < 1 or choice.weights == "real":  # each would hold real weights once more
        yield None
        return
    with Children("cgtool.toolkit.warm:trace_variants", limit=count, setup=choice) as children:
        if starts:
            with contextlib.suppress(OSError):  # what cannot be started is found again, and told, where it is needed
                children.start(_EARLY_TRACERS)
        yield children


def trace_variants(channel: Channel) -> None:
    """Build the model and trace variants of it; the program of a child."""
    spec = channel.setup(ModelChoice).build()
    from cgtool.compiler.tracers import serve_traces  # Dynamo

    serve_traces(channel, spec)


def _push(name: RankName, config: CompilationConfig, root: Path, on_event: OnEvent) -> None:
    """Hand what was made on to the stores that were named."""
    if not config.remote or config.remote_readonly:
        return
    from cgtool.remote.remotes import Remotes  # what only a push needs
    from cgtool.threads import in_parallel
    from cgtool.toolkit.remote import sending_threads

    began = time.monotonic()
    on_event(Event("push", short(name.hash), done=0, total=1))
    with sending_threads() as pool:
        Remotes.of(CacheLayout(root=root), config, TrustPolicy.of(config)).push(name, each=partial(in_parallel, pool))
    on_event(Event("push", short(name.hash), done=1, total=1, secs=time.monotonic() - began))
