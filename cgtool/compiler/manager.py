"""Compiles each unique piece once, and shares it between pieces, sizes, ranges and processes.

A unit's key is the digest of the piece's identity, the shape, the options, the adaptor's digest of compiler and target,
and `BUILD_VERSION`. It depends on nothing else: no path, no name of a model or a layer, no index of a piece.

Must not import Dynamo or Inductor: if every unit is stored already, only the adaptor's digest needs them.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace

from cgtool.adaptor_registry import ADAPTORS
from cgtool.compiler.adaptors.interface import CompilerInterface, get_adaptor
from cgtool.compiler.cluster import Cluster
from cgtool.compiler.generated import Texts, compile_piece
from cgtool.compiler.pool import WorkerPool
from cgtool.compiler.proof.prover import Prover
from cgtool.compiler.proof.reference import eps_of, lowest_dtype
from cgtool.compiler.request import (
    NEEDS_RANKS,
    CompileRequest,
    StaysHereError,
    changed_settings,
    groups_of,
    imports_for,
)
from cgtool.compiler.wanted import Work
from cgtool.config import CompilationConfig
from cgtool.errors import CacheCorruptError, ProofMismatchError
from cgtool.events import Event, OnEvent, ignore
from cgtool.host import count
from cgtool.machine import default_jobs
from cgtool.plan.grammar import digest_of
from cgtool.plan.pieces import AOT_INDUCTOR, EAGER, Json
from cgtool.plan.shapes import shape_text
from cgtool.remote.remotes import Remotes
from cgtool.store.artifacts import split_origin
from cgtool.store.entry import ObjectStore
from cgtool.store.layout import CacheLayout
from cgtool.store.records import Artifact
from cgtool.store.units import UnitStore

_log = logging.getLogger(__name__)

#: Raise this when the way from a piece to an artifact changes, so that units of older versions are compiled again.
BUILD_VERSION = 10
#: How many units may be compiled ahead; each has a waiting thread.
_MAX_AHEAD = 64
#: The adaptor that a piece falls back to; `eager` for adaptors that are not listed.
_NEXT = {"aot_inductor": "inductor_standalone"}


def next_adaptor(adaptor: str) -> str | None:
    """Return the adaptor that a piece falls back to if `adaptor` rejects it; None if there is no other."""
    return None if adaptor == EAGER else _NEXT.get(adaptor, EAGER)


@dataclass(frozen=True, kw_only=True)
class Built:
    """A stored unit."""

    artifact: Artifact
    #: Whether it had been compiled before: for another piece or size, or by another rank, process or warm.
    reused: bool
    #: Why it was not proved this time, if a later warm may succeed; else "".
    unproved: str = ""
    generated: Texts = field(default_factory=dict)


class CompilerManager:
    """Compiles unique pieces once and links them into an entry; any thread may call it.

    Args:
        layout: The cache.
        config: The options and the trust policy.
        on_event: Receives progress events.
        pool: Compiles pieces; None compiles in this process.
        prover: Proves artifacts; None stores them unproved.
        remotes: Remote stores to take units from and to push them to; None uses the local cache alone.
    """

    def __init__(
        self,
        layout: CacheLayout,
        config: CompilationConfig,
        *,
        on_event: OnEvent = ignore,
        pool: WorkerPool | Cluster | None = None,
        prover: Prover | None = None,
        remotes: Remotes | None = None,
    ) -> None:
        self._layout = layout
        self._units = UnitStore(layout, allow_shared=config.allow_shared_cache or None)
        self._options = dict(config.inductor_compile_config)
        self._on_event = on_event
        self._pool = pool
        self._prover = prover
        self._remotes = remotes
        self._adaptors: dict[str, CompilerInterface] = {}
        self._hashes: dict[tuple[object, ...], str] = {}
        self._ahead: dict[str, Future[Built]] = {}
        self._lock = threading.RLock()

    def uses_workers(self, adaptor: str) -> bool:
        """Return whether an adaptor's pieces may be compiled outside this process."""
        return self._pool is not None and self._adaptor(adaptor).compiles

    def key(self, work: Work) -> str:
        """Return the key of the unit that serves `work`.

        Raises:
            ConfigError: There is no such adaptor, or the compiler has no such option.
        """
        groups = groups_of(work.graph)
        return digest_of(
            {
                **({"groups": groups} if groups else {}),
                "piece": work.piece,
                "shape": shape_text(work.shape),
                "graph": work.graph.identity(),
                "adaptor": work.adaptor,
                "compiler": self._compiler(work, self._options),
                "build": BUILD_VERSION,
            }
        )

    def begin(self, work: Work) -> None:
        """Start compiling a unit in a worker; its `ensure` then waits for the result, or raises the error.

        Raises:
            ConfigError: There is no such adaptor, or the compiler has no such option.
        """
        key = self.key(work)
        if self._pool is None or not self.uses_workers(work.adaptor):
            return
        future: Future[Built] = Future()
        with self._lock:
            is_new = key not in self._ahead and len(self._ahead) < _MAX_AHEAD
            if is_new:
                self._ahead[key] = future
        if is_new:
            # torch keeps settings in context variables: run the thread in a copy of this context
            run, arguments = contextvars.copy_context().run, (self._settle, future, key, work)
            threading.Thread(target=run, args=arguments, name="cgtool-ahead", daemon=True).start()

    def ensure(self, work: Work, *, objects: ObjectStore, in_worker: bool = False) -> Built:
        """Return the unit that serves `work`, compiled if it is not stored yet, and link its artifact into an entry.

        If two processes need the same unit at the same time, one compiles it while the other waits and reuses it. If
        interrupted at any point, the unit is either absent or complete. With `in_worker`, a worker of the pool compiles
        the unit while the calling thread waits.

        Raises:
            StaysHereError: With `in_worker`: only this process can compile the piece.
            WorkerError: With `in_worker`: the worker crashed, hung, or ran out of memory or disk space.
            CompileError: The compiler cannot compile the piece, or cannot save the result. Nothing is stored.
            ProofCrashError: The process that proves the artifact died.
            ConfigError: The compiler has no such option.
            CacheError: The cache cannot be written.
        """
        key = self.key(work)
        ahead = self._ahead.pop(key, None)
        built = self._find_or_compile(key, work, in_worker=in_worker) if ahead is None else ahead.result()
        try:
            self._units.link_into(objects, key, built.artifact)
        except CacheCorruptError:  # it was damaged since it was found: treat it as absent
            built = self._compile(key, work, in_worker=in_worker)
            self._units.link_into(objects, key, built.artifact)
        return built

    def _settle(self, future: Future[Built], key: str, work: Work) -> None:
        try:
            future.set_result(self._find_or_compile(key, work, in_worker=True))
        except BaseException as error:  # noqa: BLE001  `ensure` raises it
            future.set_exception(error)

    def _find_or_compile(self, key: str, work: Work, *, in_worker: bool) -> Built:
        found = self._usable(key, work)
        return self._compile(key, work, in_worker=in_worker) if found is None else Built(artifact=found, reused=True)

    def _usable(self, key: str, work: Work) -> Artifact | None:
        """Return the artifact of a stored unit, unless it must be proved first."""
        found = self._units.find(key)
        return None if found is not None and found.needs_proof and self._prover_of(work) is not None else found

    def _compile(self, key: str, work: Work, *, in_worker: bool) -> Built:
        """Compile and prove a unit under its lock, unless another process stored it in the meantime."""
        with self._units.lock(key, on_wait=self._report_waiting):
            found = self._usable(key, work) or self._pull(key, work)
            if found is not None:
                return Built(artifact=found, reused=True)
            unproved = self._units.find(key)
            data = None if unproved is None else self._units.data(key, unproved)
            is_stored = unproved is not None and data is not None
            try:
                if unproved is None or data is None:
                    data, artifact, texts = self._compile_piece(work, self._options, in_worker=in_worker)
                else:
                    artifact, texts = unproved, {}
                artifact, why_not = self._prove(work, data, artifact)
            except ProofMismatchError as error:
                self._units.remove(key)  # a stored unproved unit would still be used under --no-proof
                options = self._options_that_round(work)
                if options == self._options:
                    raise
                _log.info("Piece %s is compiled again with eager's rounding: %s", work.piece_index, error)
                data, artifact, texts = self._compile_piece(work, options, in_worker=in_worker)
                artifact, why_not = self._prove(work, data, artifact)
                is_stored = False
            self._units.put(key, data, artifact)
        if self._remotes is not None and not artifact.needs_proof and self._adaptor(work.adaptor).compiles:
            self._remotes.put_unit(key, data, artifact)
        return Built(artifact=artifact, reused=is_stored, unproved=why_not, generated=texts)

    def _pull(self, key: str, work: Work) -> Artifact | None:
        """Fetch a unit that was compiled and proved on another machine."""
        if self._remotes is None or not self._adaptor(work.adaptor).compiles:
            return None
        found = self._remotes.unit(key, work.origin)
        if found is None or found[1].needs_proof:
            return None
        self._units.put(key, *found)
        return found[1]

    def _options_that_round(self, work: Work) -> dict[str, Json]:
        """Return options with which a piece in half precision rounds as eager does.

        Compilers keep values between ops in float32. That is usually more exact than eager, but not always: a sum of
        unrounded terms can disagree with the same terms rounded elsewhere.
        """
        rounds = eps_of(lowest_dtype(work.graph)) >= torch.finfo(torch.float16).eps
        return {**(self._adaptor(work.adaptor).rounding if rounds else {}), **self._options}

    def _compile_piece(self, work: Work, options: dict[str, Json], *, in_worker: bool) -> tuple[bytes, Artifact, Texts]:
        count("compiles")
        prover = self._prover_of(work)
        if prover is not None and not (in_worker and isinstance(self._pool, Cluster)):  # a cluster's workers prove
            prover.start()  # it imports torch while the piece compiles
        adaptor, tuned = self._adaptor(work.adaptor), _is_tuned(work)
        if not in_worker or self._pool is None:
            return compile_piece(adaptor, work.graph, work.origin, options=options, max_autotune=tuned)
        return self._pool.compile(
            CompileRequest(
                graph=work.graph,
                origin=work.origin,
                adaptor=work.adaptor,
                options=options,
                max_autotune=tuned,
                compiler=self._compiler(work, options),
                imports=imports_for(work.graph.ops, adaptor),
                settings=changed_settings(),
                groups=groups_of(work.graph),
            )
        )

    def _prove(self, work: Work, data: bytes, artifact: Artifact) -> tuple[Artifact, str]:
        """Return the artifact with the proof's result, and why it is unproved if a later proof may succeed.

        Artifacts that run the piece eagerly, and those that a cluster's worker has proved, need no proof.
        """
        if not artifact.needs_proof:
            return artifact, ""
        adaptor, prover = self._adaptor(work.adaptor), self._prover_of(work)
        if prover is None:
            return replace(artifact, proved=not adaptor.compiles), ""
        if groups_of(work.graph):
            return replace(artifact, proof_gap=NEEDS_RANKS), ""
        try:
            imports = imports_for(work.graph.ops, adaptor)
        except StaysHereError as error:
            return replace(artifact, proof_gap=f"not proved: {error}"), ""
        _, code = split_origin(data, artifact.kind)
        found = prover.prove(code, adaptor=work.adaptor, graph=work.graph, guards=artifact.guards, imports=imports)
        if found.verdict == "later":
            return replace(artifact, proved=False), found.reason
        return replace(artifact, proved=found.proved, proof_gap=found.reason), ""

    def _prover_of(self, work: Work) -> Prover | None:
        return self._prover if self._adaptor(work.adaptor).compiles else None

    def _adaptor(self, name: str) -> CompilerInterface:
        with self._lock:
            if name not in self._adaptors:
                adaptor = get_adaptor(name)
                adaptor.initialize_cache(self._layout.root)
                self._adaptors[name] = adaptor
            return self._adaptors[name]

    def _compiler(self, work: Work, options: dict[str, Json]) -> str:
        """Return the adaptor's digest of compiler and options, cached: slow for Inductor, the same for every piece."""
        tuned = _is_tuned(work)
        with self._lock:
            place = work.adaptor, tuned, *options
            if place not in self._hashes:
                self._hashes[place] = self._adaptor(work.adaptor).compute_hash(options, max_autotune=tuned)
            return self._hashes[place]

    def _report_waiting(self) -> None:
        self._on_event(Event(phase="compile", message="waiting for another process that compiles this piece"))


def _is_tuned(work: Work) -> bool:
    return work.tuned and work.adaptor != EAGER


def pool_of(
    config: CompilationConfig, on_event: OnEvent, *, on_cpu: bool
) -> AbstractContextManager[WorkerPool | Cluster | None]:
    """Return the workers of a warm; a context of None if everything is compiled in this process."""
    inductor = config.adaptor in ADAPTORS
    if config.executor and get_adaptor(config.adaptor).compiles:
        return Cluster(
            config.executor,
            timeout_secs=config.compile_timeout,
            prove=config.proof,
            inductor=inductor,
            on_event=on_event,
        )
    jobs = default_jobs() if config.jobs is None else config.jobs
    if jobs == 0 or not get_adaptor(config.adaptor).compiles:
        return nullcontext()
    native = takes_compiler(config, on_cpu=on_cpu)
    return WorkerPool(jobs=jobs, timeout_secs=config.compile_timeout, inductor=inductor, native=native)


def takes_compiler(config: CompilationConfig, *, on_cpu: bool) -> bool:
    """Return whether compiling here runs the host's C++ compiler; third-party adaptors are assumed not to."""
    return config.adaptor == AOT_INDUCTOR or (on_cpu and config.adaptor in ADAPTORS and config.adaptor != EAGER)


def prover_of(config: CompilationConfig, device_index: int | None) -> AbstractContextManager[Prover | None]:
    """Return the prover of a warm; a context of None if nothing is proved."""
    if not config.proof or not get_adaptor(config.adaptor).compiles:
        return nullcontext()
    return Prover(timeout_secs=config.compile_timeout, device_index=device_index)
