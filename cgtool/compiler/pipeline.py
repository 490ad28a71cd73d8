"""Warm: the whole way of the data, from a model to an entry of the cache.

hit  ──▶ rows that the entry lacks ──▶ compile ──▶ add rows
miss ──▶ stitch ──▶ every row ──▶ compile ──▶ publish
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from cgtool.compiler.adaptors import get_adaptor
from cgtool.compiler.compile_work import Compiled, compile_work, row_name, unique
from cgtool.compiler.damage import broken_rows, damaged_texts, incomplete
from cgtool.compiler.generated import dump_entry, dump_traced, keep_generated
from cgtool.compiler.managers import Managers
from cgtool.compiler.proof import Prover
from cgtool.compiler.records import calls_of, counts_of, fallbacks_of, notes_of, same_calls, unproved_notes
from cgtool.compiler.wanted import Work, wanted
from cgtool.compiler.workers.pool import WorkerPool, default_jobs, early_jobs
from cgtool.config import AOT_INDUCTOR, EAGER, CompilationConfig, CompilationLevel
from cgtool.errors import CacheMissError, ModelError, UsageError
from cgtool.events import Event, OnEvent, ignore
from cgtool.host import environment, variables_now
from cgtool.model import ModelSpec
from cgtool.plan.grammar import canonical_json, digest_of
from cgtool.plan.records import Plan, encode_plan
from cgtool.plan.rendering import plan_text
from cgtool.runtime.call import first_index
from cgtool.runtime.factors import Live, key_of
from cgtool.runtime.find import Finder, Found
from cgtool.store.entry import EntryWriter, ObjectStore
from cgtool.store.files import check_writable
from cgtool.store.key import Key
from cgtool.store.layout import CODE_FILE, GRAPH_FILE, PLAN_FILE, CacheLayout, RankName, resolve_root, short
from cgtool.store.records import Fallback, Manifest
from cgtool.store.trust import TrustPolicy

if TYPE_CHECKING:
    from cgtool.compiler.stitch import Stitched


@dataclass(frozen=True, kw_only=True)
class WarmResult:
    """What a warm did.

    Args:
        hash: The entry's hash.
        rank: Which process of a model-parallel group.
        prefix: Which compiled part of the model.
        root: The cache's root.
        hit: Whether the entry was there and complete.
        compiled: How many artifacts this process compiled.
        reused: How many different artifacts of the entry were there already.
        trace_secs: Seconds that tracing and splitting took; 0 on a hit.
        compile_secs: Seconds that compiling took.
        reasons: Why it was no hit, the most telling first.
        notes: Advice for the user.
        fallbacks: The pieces that another adaptor serves than the configured one, and why.
    """

    hash: str
    rank: int
    prefix: str
    root: Path
    hit: bool
    compiled: int
    reused: int
    trace_secs: float
    compile_secs: float
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    fallbacks: tuple[Fallback, ...] = ()


def warm(
    spec: ModelSpec,
    *,
    config: CompilationConfig,
    cache_dir: Path | str | None = None,
    rank: int | None = None,
    check: bool = False,
    without: Collection[str] = (),
    on_event: OnEvent = ignore,
) -> WarmResult:
    """Make sure that the cache serves a model under a configuration.

    Args:
        spec: The model and its example calls; its weights may be fake.
        config: What to compile and how.
        cache_dir: The cache's root; None takes the configuration's, the environment's or the user's own.
        rank: Which process of a model-parallel group; None takes the environment's word.
        check: Compile and write nothing; raise when something is missing.
        without: Hashes of entries that fit and do not serve: their guards refuse these very examples.
        on_event: Told of each phase as it goes.

    Returns:
        What was done.

    Raises:
        CacheMissError: With `check`: the entry is missing, stale or incomplete; its reasons say why.
        ModelError: The model has no such method, or an example call does not fit it.
        UsageError: The level leaves nothing to compile, or a size fits no variant.
        TraceError: The model cannot be traced, or not be kept as data.
        SplitError: The graph cannot be split.
        CompileError: A piece cannot be compiled.
        CacheError: The cache cannot be read or written.
    """
    # Inference tensors count no writes, and tracing rests on the count; entries serve that mode all the same.
    with torch.inference_mode(mode=False):
        return _Warm(spec, config, cache_dir, rank, on_event).run(check=check, without=without)


class _Warm:
    """One run of `warm`; holds what all its steps share."""

    def __init__(
        self,
        spec: ModelSpec,
        config: CompilationConfig,
        cache_dir: Path | str | None,
        rank: int | None,
        on_event: OnEvent,
    ) -> None:
        if not callable(getattr(spec.module, spec.method, None)):
            msg = f"The model, a {type(spec.module).__name__}, has no method {spec.method!r}. Name one that it has."
            raise ModelError(msg, path=spec.method)
        self._spec = spec
        self._config = _leveled(config, spec)
        self._layout = CacheLayout(root=resolve_root(cache_dir if cache_dir is not None else config.cache_dir or None))
        self._rank = environment().rank if rank is None else rank
        self._on_event = on_event
        self._trust = TrustPolicy.of(self._config)
        self._live = Live.of(spec.module, config=self._config.key_fields(), exact_config=True)

    def run(self, *, check: bool, without: Collection[str]) -> WarmResult:
        try:
            found = self._finder(only_asks=check).find(functools.partial(self._refusal, without))
        except CacheMissError as miss:
            if check:
                raise
            return self._fresh(miss.reasons)
        if not check and (damaged := damaged_texts(self._layout, found)):
            return self._fresh(damaged)  # its units are there: only the trace is made again
        work = _wanted_of(found, found.entry.manifest, self._config)
        rows = [(w, found.entry.manifest.row(**row_name(w))) for w in work]
        missing = [w for w, row in rows if row is None]
        broken = broken_rows(found, work)
        unproved = [
            w for w, row in rows if row is not None and row.artifact.needs_proof and self._config.proof and not check
        ]
        if check and (missing or broken):
            raise incomplete(missing, broken, self._layout, nearest=found.entry.name.hash)
        if not missing and not broken and not unproved:
            if not check:
                self._dump(found.entry.manifest)
            return self._hit(found, work)
        return self._complete(found, missing, broken, unproved)

    def _finder(self, *, only_asks: bool) -> Finder:
        return Finder(
            self._layout,
            self._spec.module,
            self._live,
            rank=self._rank,
            prefix=self._spec.prefix,
            trust=self._trust,
            only_asks=only_asks,
        )

    def _refusal(self, without: Collection[str], found: Found) -> tuple[str, ...]:
        """Say whether an entry was made of other example calls than this model's, or does not serve them."""
        if found.entry.name.hash in without:
            return ("no variant serves the example",)
        if not same_calls(found.key.value("calls"), calls_of(self._spec)):
            return ("the example calls or their dynamic dimensions are not those of the entry",)
        return ()

    def _hit(self, found: Found, work: Iterable[Work]) -> WarmResult:
        rows = [found.entry.manifest.row(**row_name(w)) for w in work]
        reused = len({row.artifact.digest for row in rows if row is not None})
        self._on_event(Event(phase="hit", message=short(found.entry.name.hash)))
        return self._result(found.entry.manifest, hit=True, reused=reused)

    def _fresh(self, reasons: tuple[str, ...]) -> WarmResult:
        """Trace, split, compile and publish."""
        # Import Dynamo and Inductor: seconds, which a hit must not pay.
        from cgtool.compiler.compiler_hash import check_compiler
        from cgtool.compiler.stitch import stitch

        check_writable(self._layout.root)
        if self._takes_compiler:
            check_compiler(self._config.adaptor)
        with self._pool() as pool:
            if pool is not None:
                pool.start(early_jobs(pool.jobs))  # they import torch while this process traces
            stitched = stitch(self._spec, self._config.splitting_ops, self._on_event)
            return self._built(stitched, reasons, pool)

    def _built(self, stitched: Stitched, reasons: tuple[str, ...], pool: WorkerPool | None) -> WarmResult:
        """Compile a plan and publish it."""
        files = {
            PLAN_FILE: encode_plan(stitched.plan),
            GRAPH_FILE: stitched.computation_graph.encode(),
            CODE_FILE: plan_text(stitched.plan).encode(),
        }
        key = self._key(stitched)
        self._trust.check_place(self._layout, RankName(hash=key.hash, rank=self._rank, prefix=self._spec.prefix))
        writer = EntryWriter(self._layout, key, rank=self._rank, prefix=self._spec.prefix)
        if self._config.debug_dump_path:
            # before anything compiles: whoever asks for it may be looking for what ails the compile
            dump_traced(self._layout, writer.name, files, self._config.debug_dump_path)
        self._on_event(Event(phase="split", message=_split_words(stitched)))
        eager = {index: frozenset(found) for index, found in stitched.eager_pieces.items()}
        work = wanted(stitched.plan, self._config, eager_pieces=eager)
        done = self._compile(work, writer.objects, stitched.plan, pool)
        manifest = self._manifest(key, stitched, done)
        self._on_event(Event(phase="store", message=short(key.hash)))
        manifest = writer.publish(manifest, files)
        keep_generated(self._layout, manifest, done.generated)
        self._dump(manifest)
        return self._result(
            manifest,
            compiled=done.compiled,
            reused=len({row.artifact.digest for row in done.rows}) - done.compiled,
            trace_secs=stitched.trace_secs,
            compile_secs=done.secs,
            reasons=reasons,
            notes=(*notes_of(stitched, manifest.fallbacks), *unproved_notes(done.unproved)),
        )

    def _complete(self, found: Found, missing: list[Work], broken: list[Work], unproved: list[Work]) -> WarmResult:
        """Compile what an entry lacks; its plan says all that is needed, so nothing is traced."""
        writer = EntryWriter(self._layout, found.key, rank=self._rank, prefix=self._spec.prefix)
        with self._pool() as pool:
            done = self._compile((*missing, *broken, *unproved), writer.objects, found.plan, pool)
        self._on_event(Event(phase="store", message=short(found.key.hash)))
        manifest = writer.add_rows(done.rows, done.fallbacks)
        keep_generated(self._layout, manifest, done.generated)
        self._dump(manifest)
        work = _wanted_of(found, manifest, self._config)
        everything = {row.artifact.digest for w in work if (row := manifest.row(**row_name(w))) is not None}
        return self._result(
            manifest,
            compiled=done.compiled,
            reused=max(0, len(everything) - done.compiled),
            compile_secs=done.secs,
            reasons=incomplete(missing, broken, self._layout, unproved=len(list(unique(unproved)))).reasons,
            notes=unproved_notes(done.unproved),
        )

    def _dump(self, manifest: Manifest) -> None:
        if self._config.debug_dump_path:
            dump_entry(self._layout, manifest, self._config.debug_dump_path)

    def _pool(self) -> AbstractContextManager[WorkerPool | None]:
        """Return the workers of this warm; None where everything is compiled in this process."""
        jobs = default_jobs() if self._config.jobs is None else self._config.jobs
        if jobs == 0 or not get_adaptor(self._config.adaptor).compiles:
            return nullcontext()
        return WorkerPool(jobs=jobs, timeout_secs=self._config.compile_timeout, native=self._takes_compiler)

    @property
    def _takes_compiler(self) -> bool:
        """Whether compiling here runs the host's C++ compiler."""
        if not get_adaptor(self._config.adaptor).compiles:
            return False
        on_cpu = all(tensor.device.type in ("cpu", "meta") for tensor in self._spec.module.parameters())
        return on_cpu or self._config.adaptor == AOT_INDUCTOR

    def _compile(self, work: Iterable[Work], objects: ObjectStore, plan: Plan, pool: WorkerPool | None) -> Compiled:
        with self._prover(plan) as prover:
            managers = Managers(self._layout, self._config, on_event=self._on_event, pool=pool, prover=prover)
            return compile_work(work, objects=objects, managers=managers, pool=pool, on_event=self._on_event)

    def _prover(self, plan: Plan) -> AbstractContextManager[Prover | None]:
        """Return what proves the artifacts of this warm; None where nothing is proved."""
        if not self._config.proof or not get_adaptor(self._config.adaptor).compiles:
            return nullcontext()
        return Prover(timeout_secs=self._config.compile_timeout, device_index=first_index(self._spec.module, plan))

    def _key(self, stitched: Stitched) -> Key:
        # in one order: Dynamo's depends on what was traced before in this process
        guards = [
            sorted(msgspec.to_builtins(tuple(variant.model_guards)), key=canonical_json)
            for variant in stitched.plan.variants
        ]
        traced = {
            "sources": dict(stitched.code.sources),
            "distributions": dict(stitched.code.distributions),
            "variables": variables_now(stitched.code.variables),
            "ops": dict(stitched.ops),
            "guards": digest_of(guards),
            "calls": calls_of(self._spec),
        }
        return key_of(self._live, traced)

    def _manifest(self, key: Key, stitched: Stitched, done: Compiled) -> Manifest:
        return Manifest(
            hash=key.hash,
            rank=self._rank,
            prefix=self._spec.prefix,
            model=self._spec.name or type(self._spec.module).__name__,
            level=int(self._config.level),
            adaptor=self._config.adaptor,
            splitting_ops=stitched.splitting_ops,
            variants=tuple(counts_of(stitched.plan, index) for index in range(len(stitched.plan.variants))),
            rows=(),
            lookup=(self._live.lookup,),
        ).with_rows(done.rows, (*fallbacks_of(stitched), *done.fallbacks))

    def _result(
        self,
        manifest: Manifest,
        *,
        hit: bool = False,
        compiled: int = 0,
        reused: int = 0,
        trace_secs: float = 0.0,
        compile_secs: float = 0.0,
        reasons: tuple[str, ...] = (),
        notes: tuple[str, ...] = (),
    ) -> WarmResult:
        return WarmResult(
            hash=manifest.hash,
            rank=self._rank,
            prefix=self._spec.prefix,
            root=self._layout.root,
            hit=hit,
            compiled=compiled,
            reused=reused,
            trace_secs=round(trace_secs, 3),
            compile_secs=round(compile_secs, 3),
            reasons=reasons,
            notes=(*notes, *unproved_notes((row.piece_index, row.artifact.proof_gap) for row in manifest.rows)),
            fallbacks=manifest.fallbacks,
        )


def _leveled(config: CompilationConfig, spec: ModelSpec) -> CompilationConfig:
    """Return the configuration with what its level means spelled out, and the model's own splitting ops.

    Raises:
        UsageError: The level is 0: the model runs as it is, and there is nothing to compile.
    """
    if config.effective_level == CompilationLevel.NO_COMPILATION:
        msg = "Level 0 runs the model as it is, so there is nothing to compile. Choose level 1, 2 or 3."
        raise UsageError(msg, path="level", actual=0)
    config = config.leveled()
    if config.splitting_ops is None and spec.splitting_ops is not None:
        return config.replace(splitting_ops=tuple(spec.splitting_ops))
    return config


def _wanted_of(found: Found, manifest: Manifest, config: CompilationConfig) -> tuple[Work, ...]:
    """Return what an entry's plan needs, where its manifest knows which adaptors take which pieces."""
    fallbacks = manifest.fallbacks
    eager: dict[int, set[int]] = {}
    for fallback in fallbacks:
        if fallback.adaptor == EAGER:  # for a piece as a whole: a size alone never falls that far
            eager.setdefault(fallback.variant, set()).add(fallback.piece_index)
    return wanted(
        found.plan,
        config,
        eager_pieces={index: frozenset(pieces) for index, pieces in eager.items()},
        fallbacks={fallback.place: fallback.adaptor for fallback in fallbacks},
    )


def _split_words(stitched: Stitched) -> str:
    pieces = sum(step.piece >= 0 for step in stitched.plan.variants[0].steps)
    ops = ", ".join(stitched.splitting_ops) or "nothing"
    return f"{pieces} {'piece' if pieces == 1 else 'pieces'}, split at {ops}"
