"""Warm: from a model to an entry of the cache.

hit  ──▶ the rows that are missing ──▶ compile ──▶ add rows
miss ──▶ trace and split, compiling each variant once it is traced ──▶ prove ──▶ publish
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from cgtool.compiler.cluster import Cluster
from cgtool.compiler.entry_state import (
    broken_work,
    counts_of,
    damaged_texts,
    incomplete,
    notes_of,
    traced_factors,
    uncalled_notes,
    uncovered_calls,
    unproved_notes,
)
from cgtool.compiler.generated import dump_entry, dump_traced, keep_generated
from cgtool.compiler.manager import CompilerManager, pool_of, prover_of, takes_compiler
from cgtool.compiler.pool import WorkerPool
from cgtool.compiler.ranks import Ranks
from cgtool.compiler.schedule import Compiled, SplitAgainError, compile_work, unique
from cgtool.compiler.wanted import Work, leveled, wanted
from cgtool.config import CompilationConfig, resolve_compile_sizes
from cgtool.errors import CacheMissError, ModelError, UsageError
from cgtool.events import Event, OnEvent, ignore
from cgtool.guards import _torch as private
from cgtool.machine import early_jobs
from cgtool.model import ModelSpec
from cgtool.plan.records import Plan, parse_plan
from cgtool.plan.rendering import plan_text
from cgtool.plan.writing import encode_plan
from cgtool.remote.remotes import Remotes
from cgtool.runtime.factors import Live, key_of
from cgtool.runtime.find import Finder, MatchedEntry, rank_here
from cgtool.runtime.weights import first_index
from cgtool.store.entry import Entry, EntryWriter, ObjectStore
from cgtool.store.files import check_writable
from cgtool.store.layout import CODE_FILE, GRAPH_FILE, PLAN_FILE, CacheLayout, RankName, short
from cgtool.store.records import Fallback, Key, Manifest, VariantCounts
from cgtool.store.trust import TrustPolicy

if TYPE_CHECKING:
    from cgtool.compiler.proof.beside import CallProof
    from cgtool.compiler.proof.calls import CallsAhead
    from cgtool.compiler.stitch import Stitched
    from cgtool.processes import Children

#: How often ops that fail to compile are split out; pieces that fail after that fall back.
_MOST_SPLITS = 4


@dataclass(frozen=True, kw_only=True)
class WarmResult:
    """The result of a warm.

    Args:
        manifest: The rank's current manifest.
        root: The cache's root.
        hit: Whether the entry existed and was complete.
        compiled: The number of artifacts that this process compiled.
        reused: The number of distinct artifacts of the entry that existed already.
        trace_secs: Seconds spent on tracing and splitting; 0 on a hit.
        compile_secs: Seconds spent on compiling.
        reasons: Why it was a miss, the most significant reason first.
        notes: Advice for the user.
    """

    manifest: Manifest
    root: Path
    hit: bool = False
    compiled: int = 0
    reused: int
    trace_secs: float = 0.0
    compile_secs: float = 0.0
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def hash(self) -> str:
        """The entry's hash."""
        return self.manifest.hash


def warm(
    spec: ModelSpec,
    *,
    config: CompilationConfig,
    cache_dir: Path | str | None = None,
    rank: int | None = None,
    check: bool = False,
    without: Collection[str] = (),
    ranks: Ranks | None = None,
    tracers: Children | None = None,
    on_event: OnEvent = ignore,
) -> WarmResult:
    """Make sure that the cache serves a model under a configuration.

    Args:
        spec: The model and its example calls; its weights may be fake.
        config: What to compile and how.
        cache_dir: The cache's root; None takes the configured one, that of the environment, or the user's own.
        rank: The rank in a model-parallel group; None takes that of the environment.
        check: Compile and write nothing; raise if something is missing.
        without: Hashes of entries to skip: they match, but their guards reject these examples.
        ranks: The ranks that a launcher started to warm this model together; None takes the default process group.
        tracers: Children of `serve_traces`, which trace variants in parallel; closed once all variants are traced.
        on_event: Receives progress events.

    Returns:
        What was done.

    Raises:
        CacheMissError: With `check`: the entry is missing, stale or incomplete, for the given reasons.
        ModelError: The model has no such method, or an example call does not fit it.
        UsageError: The level leaves nothing to compile, or a size fits no variant.
        TraceError: The model cannot be traced, or the trace cannot be stored as data.
        SplitError: The graph cannot be split.
        CompileError: A piece cannot be compiled.
        ExecutorError: The configured executor does not respond, or disappeared.
        CacheError: The cache cannot be read or written.
    """
    if not callable(getattr(spec.module, spec.method, None)):
        kind = type(spec.module).__name__
        msg = f"The model, a {kind}, has no method {spec.method!r}. Name one that it has."
        raise ModelError(msg, path=spec.method)
    config = leveled(config, spec)
    layout = CacheLayout.at(cache_dir if cache_dir is not None else config.cache_dir or None)
    rank = rank_here() if rank is None else rank
    # Tracing needs version counters, which inference tensors lack; entries still serve calls in inference mode.
    with contextlib.ExitStack() as stack:
        if ranks is None and (ranks := Ranks.of_group()) is not None:
            stack.enter_context(ranks)
        stack.enter_context(torch.inference_mode(mode=False))
        # Ranks trace by themselves: children would have to join their process group.
        tracers = tracers if ranks is None else None
        one = _Warm(spec, config, layout, on_event, rank=rank, ranks=ranks, tracers=tracers)
        return one.run(check=check, without=without)


def add_to_entry(
    layout: CacheLayout,
    key: Key,
    name: RankName,
    plan: Plan,
    work: Iterable[Work],
    *,
    config: CompilationConfig,
    device_index: int | None = None,
    prove: Callable[[Compiled, ObjectStore], Sequence[VariantCounts]] | None = None,
    on_event: OnEvent = ignore,
) -> tuple[Manifest, Compiled]:
    """Compile the missing artifacts of an entry from its plan, without a trace, and add them.

    `prove` compares the compiled calls with the model and returns the records of the variants; None without a model.

    Raises:
        CompileError: A piece cannot be compiled.
        CallMismatchError: A compiled call does not match the model.
        CacheError: The cache cannot be read or written.
    """
    on_cpu = all(meta.device == "cpu" for graph in plan.graphs.values() for meta in graph.inputs)
    writer = EntryWriter(layout, key, rank=name.rank, prefix=name.prefix)
    with pool_of(config, on_event, on_cpu=on_cpu) as pool, prover_of(config, device_index) as prover:
        remotes = Remotes.of(layout, config, TrustPolicy.of(config))
        manager = CompilerManager(layout, config, on_event=on_event, pool=pool, prover=prover, remotes=remotes)
        done = compile_work(work, objects=writer.objects, manager=manager, pool=pool, on_event=on_event)
    variants = () if prove is None else prove(done, writer.objects)
    on_event(Event(phase="store", message=short(key.hash)))
    manifest = writer.add_rows(done.rows, done.fallbacks, variants)
    keep_generated(layout, manifest, done.generated)
    return manifest, done


class _Warm:
    """One run of `warm`: the state that its steps share."""

    def __init__(
        self,
        spec: ModelSpec,
        config: CompilationConfig,
        layout: CacheLayout,
        on_event: OnEvent,
        *,
        rank: int,
        ranks: Ranks | None,
        tracers: Children | None,
    ) -> None:
        self._spec = spec
        self._config = config
        self._layout = layout
        self._rank = rank
        self._ranks = ranks
        self._tracers = tracers
        self._on_event = on_event
        self._trust = TrustPolicy.of(config)
        self._remotes = Remotes.of(layout, config, self._trust)
        #: Compiles the pieces, from the first variant on, and what to close after it.
        self._manager: CompilerManager | None = None
        self._stack = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._live = Live.of(spec.module, config=config.key_fields(), exact_config=True)
        #: Variant → why its call was not compared with the model this time, although a later warm may do so.
        self._uncalled: dict[int, str] = {}
        #: The whole-call proof of each variant.
        self._proofs: Sequence[CallProof] = ()

    def run(self, *, check: bool, without: Collection[str]) -> WarmResult:
        finder = Finder(
            self._layout,
            self._spec.module,
            self._live,
            rank=self._rank,
            prefix=self._spec.prefix,
            trust=self._trust,
            query_only=check,
        )
        find = functools.partial(finder.find, functools.partial(uncovered_calls, self._spec, without, check))
        try:
            found = find()
        except CacheMissError as miss:
            if check:
                raise
            pulled = self._remotes.find(find, finder.lookup, finder.fits, rank=self._rank, prefix=self._spec.prefix)
            if pulled is None:
                return self._fresh(miss.reasons)
            found = pulled
        if not check and (damaged := damaged_texts(self._layout, found)):
            return self._fresh(damaged)  # its units are intact, so this costs a trace only
        return self._found(found, check=check)

    def _found(self, found: MatchedEntry, *, check: bool) -> WarmResult:
        """Report that an entry is complete, or complete it."""
        manifest, compiled, done = found.entry.manifest, 0, None
        work = wanted(found.plan, self._config, manifest.fallbacks)
        missing = [w for w in work if w.row_in(manifest) is None]
        broken = broken_work(found, work)
        needs_proof = self._config.proof and not check
        unproved = [w for w in work if needs_proof and (row := w.row_in(manifest)) and row.artifact.needs_proof]
        uncalled = sum(variant.needs_proof for variant in manifest.variants) if needs_proof else 0
        lack = incomplete(
            missing,
            broken,
            len(list(unique(unproved))),
            uncalled,
            path=self._layout.root,
            nearest=found.entry.name.hash,
        )
        if check and lack is not None:
            raise lack
        if lack is None:
            self._on_event(Event(phase="hit", message=short(found.entry.name.hash)))
            if needs_proof and not self._is_whole_everywhere(here=True):
                self._prove(manifest, found.key, found.entry.files, found.entry.objects)  # with the ranks that need it
        else:
            self._is_whole_everywhere(here=False)
            manifest, done = add_to_entry(
                self._layout,
                found.key,
                found.entry.name,
                found.plan,
                (*missing, *broken, *unproved),
                config=self._config,
                device_index=first_index(self._spec.module, found.plan),
                prove=functools.partial(self._prove_again, found),
                on_event=self._on_event,
            )
            work, compiled = wanted(found.plan, self._config, manifest.fallbacks), done.compiled
        if not check:
            self._dump(manifest)
        digests = {row.artifact.digest for w in work if (row := w.row_in(manifest)) is not None}
        return WarmResult(
            manifest=manifest,
            root=self._layout.root,
            hit=lack is None,
            compiled=compiled,
            reused=max(0, len(digests) - compiled),
            compile_secs=0.0 if done is None else round(done.secs, 3),
            reasons=() if lack is None else lack.reasons,
            notes=(
                *unproved_notes(manifest, () if done is None else done.unproved),
                *uncalled_notes(manifest, self._uncalled),
            ),
        )

    def _is_whole_everywhere(self, *, here: bool) -> bool:
        """Return whether every rank has a complete entry: otherwise all ranks take part in the calls of the proof."""
        if self._ranks is None or not self._config.proof or not private.exchanges():
            return here
        return self._ranks.agree_launched("whether the cache holds all of it", yes=here)

    def _prove_again(self, found: MatchedEntry, done: Compiled, objects: ObjectStore) -> Sequence[VariantCounts]:
        manifest = found.entry.manifest.with_rows(done.rows, done.fallbacks)
        return self._prove(manifest, found.key, found.entry.files, objects).variants

    def _fresh(self, reasons: tuple[str, ...]) -> WarmResult:
        """Trace, split, compile and publish."""
        # Imports Dynamo and Inductor, which takes seconds that a hit must not pay.
        from cgtool.compiler.options import check_compiler
        from cgtool.compiler.stitch import stitch
        from cgtool.compiler.tracers import Tracers

        check_writable(self._layout.root)
        self._is_whole_everywhere(here=False)
        on_cpu = all(tensor.device.type in ("cpu", "meta") for tensor in self._spec.module.parameters())
        if takes_compiler(self._config, on_cpu=on_cpu):
            check_compiler(self._config.adaptor)
        with pool_of(self._config, self._on_event, on_cpu=on_cpu) as pool, self._stack:
            if pool is not None:
                pool.start(early_jobs(pool.jobs))  # workers import torch while this process traces
            with nullcontext() if self._tracers is None else Tracers(self._tracers) as tracers:
                stitched = stitch(
                    self._spec,
                    self._config.splitting_ops,
                    self._on_event,
                    adaptor=self._config.adaptor,
                    tracers=tracers,
                    compile_sizes=resolve_compile_sizes(self._config),
                    on_variant=functools.partial(self._begin, pool),
                )
            for _ in range(_MOST_SPLITS):
                with contextlib.suppress(SplitAgainError):
                    return self._built(stitched, reasons, pool, split_out=stitched.split_out)
                stitched = stitched.split_again()
            return self._built(stitched, reasons, pool)

    def _begin(self, pool: WorkerPool | Cluster | None, plan: Plan, fallbacks: Sequence[Fallback]) -> None:
        """Start compiling the pieces of a variant while others are traced; idempotent, and called from any thread."""
        if not isinstance(pool, WorkerPool):
            return  # a cluster gets all work at once
        manager = self._manager_for(plan, pool)
        with contextlib.suppress(UsageError):  # about a size that another variant may cover
            work = wanted(plan, self._config, fallbacks, is_whole=False)
            for item, *_ in sorted(unique(work), key=lambda group: not group[0].is_base):
                manager.begin(item)

    def _manager_for(self, plan: Plan, pool: WorkerPool | Cluster | None) -> CompilerManager:
        with self._lock:
            if self._manager is None:
                prover = self._stack.enter_context(prover_of(self._config, first_index(self._spec.module, plan)))
                self._manager = CompilerManager(
                    self._layout,
                    self._config,
                    on_event=self._on_event,
                    pool=pool,
                    prover=prover,
                    remotes=self._remotes,
                )
            return self._manager

    def _built(
        self,
        stitched: Stitched,
        reasons: tuple[str, ...],
        pool: WorkerPool | Cluster | None,
        split_out: Callable[[str, str], bool] = lambda *_: False,
    ) -> WarmResult:
        """Compile a plan and publish it; a SplitAgainError asks for another split."""
        plan = stitched.plan
        files = {
            PLAN_FILE: encode_plan(plan),
            GRAPH_FILE: stitched.computation_graph.encode(),
            CODE_FILE: plan_text(plan).encode(),
        }
        key = key_of(self._live, traced_factors(self._spec, stitched))
        self._trust.check_place(self._layout, RankName(hash=key.hash, rank=self._rank, prefix=self._spec.prefix))
        writer = EntryWriter(self._layout, key, rank=self._rank, prefix=self._spec.prefix)
        if self._config.debug_dump_path:
            # Before anything compiles: the dump may be needed to find out why a compile fails.
            dump_traced(self._layout, writer.name, files, self._config.debug_dump_path)
        pieces = sum(step.piece >= 0 for step in plan.variants[0].steps)
        said = "1 piece" if pieces == 1 else f"{pieces} pieces"
        split_at = ", ".join(stitched.splitting_ops) or "nothing"
        self._on_event(Event(phase="split", message=f"{said}, split at {split_at}"))
        work = wanted(plan, self._config, stitched.fallbacks)
        manifest = Manifest(
            hash=key.hash,
            rank=self._rank,
            prefix=self._spec.prefix,
            model=self._spec.name or type(self._spec.module).__name__,
            level=int(self._config.level),
            adaptor=self._config.adaptor,
            splitting_ops=stitched.splitting_ops,
            variants=tuple(map(counts_of, plan.variants)),
            rows=(),
            lookup=(self._live.lookup,),
        )
        ahead = self._calls_ahead(_published(manifest, key, files, writer.objects), pool)
        with nullcontext() if ahead is None else contextlib.closing(ahead):
            done = compile_work(
                work,
                objects=writer.objects,
                manager=self._manager_for(plan, pool),
                pool=pool,
                split_out=split_out,
                on_variant=None if ahead is None else ahead.offer,
                on_event=self._on_event,
            )
        self._stack.close()
        manifest = manifest.with_rows(done.rows, (*stitched.fallbacks, *done.fallbacks))
        manifest = self._prove(manifest, key, files, writer.objects, ahead)
        if any(proof.again for proof in self._proofs):
            from cgtool.compiler.proof.restride import with_restrides  # imports torch.fx, like the proof itself

            plan = with_restrides(plan, [proof.restrides for proof in self._proofs])
            files |= {PLAN_FILE: encode_plan(plan), CODE_FILE: plan_text(plan).encode()}
            manifest = self._prove(manifest, key, files, writer.objects)
        self._on_event(Event(phase="store", message=short(key.hash)))
        manifest = writer.publish(manifest, files)
        keep_generated(self._layout, manifest, done.generated)
        self._dump(manifest)
        return WarmResult(
            manifest=manifest,
            root=self._layout.root,
            compiled=done.compiled,
            reused=len({row.artifact.digest for row in done.rows}) - done.compiled,
            trace_secs=round(stitched.trace_secs, 3),
            compile_secs=round(done.secs, 3),
            reasons=reasons,
            notes=(
                *stitched.notes,
                *notes_of(manifest, stitched.slow_ops),
                *unproved_notes(manifest, done.unproved),
                *uncalled_notes(manifest, self._uncalled),
            ),
        )

    def _calls_ahead(self, found: MatchedEntry, pool: WorkerPool | Cluster | None) -> CallsAhead | None:
        """Return what proves variants while others compile; None if this process compiles, or proves at the end."""
        if pool is None or self._ranks is not None or not self._config.proof:
            return None
        from cgtool.compiler.proof.calls import CallsAhead  # imports Dynamo, which a hit does not need

        return CallsAhead.of(found, self._spec)

    def _prove(
        self,
        manifest: Manifest,
        key: Key,
        files: Mapping[str, bytes],
        objects: ObjectStore,
        ahead: CallsAhead | None = None,
    ) -> Manifest:
        """Compare the calls to be published with the model; return the manifest with the result.

        Raises:
            CallMismatchError: They do not match.
        """
        if not self._config.proof:
            return manifest
        # Imports Dynamo, which a hit does not need.
        from cgtool.compiler.proof.calls import prove_calls

        self._on_event(Event(phase="prove", message="the whole call, compared with the model"))
        begun = time.perf_counter()
        found = _published(manifest, key, files, objects)
        proofs = None if ahead is None else ahead.proofs(found)
        if proofs is None:
            proofs = prove_calls(found, self._spec, timeout_secs=self._config.compile_timeout, ranks=self._ranks)
        self._proofs = proofs
        self._on_event(Event(phase="prove", message="the whole call", secs=time.perf_counter() - begun))
        variants = tuple(
            msgspec.structs.replace(variant, proved_at=proof.proved_at, proof_gap="" if proof.later else proof.gap)
            for variant, proof in zip(manifest.variants, self._proofs, strict=True)
        )
        self._uncalled = {index: proof.gap for index, proof in enumerate(self._proofs) if proof.later}
        return msgspec.structs.replace(manifest, variants=variants)

    def _dump(self, manifest: Manifest) -> None:
        if self._config.debug_dump_path:
            dump_entry(self._layout, manifest, self._config.debug_dump_path)


def _published(manifest: Manifest, key: Key, files: Mapping[str, bytes], objects: ObjectStore) -> MatchedEntry:
    """Return an entry as `load` will find it once it is published."""
    plan = parse_plan(files[PLAN_FILE], path=Path(PLAN_FILE))
    return MatchedEntry(entry=Entry(manifest=manifest, files=files, objects=objects), key=key, plan=plan)
