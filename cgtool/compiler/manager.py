"""Compile or find: each unique piece is compiled once, whoever asks, and shared by pieces, sizes, ranges and processes.

Must not import Dynamo or Inductor: a manager that finds everything compiled needs only what the adaptor's digest does.

The key of a unit is the digest of the piece's identity, the shape, the options, what the adaptor says of compiler and
target, and the version of this way of building. What a unit is stored under depends on nothing else: no path, no name
of a model or a layer, no index of a piece.
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

#: Raise it when the way from a piece to an artifact changes: what older versions built is then compiled again.
BUILD_VERSION = 10
#: How many units are begun with before it is known what else there is to compile; each has a thread that waits.
_MOST_BEGUN = 64
#: What a piece is given to when an adaptor does not take it; all others are followed by `eager`.
_NEXT = {"aot_inductor": "inductor_standalone"}


def next_adaptor(adaptor: str) -> str | None:
    """Return what a piece is given to when `adaptor` does not take it; None where nothing is left."""
    return None if adaptor == EAGER else _NEXT.get(adaptor, EAGER)


@dataclass(frozen=True, kw_only=True)
class Built:
    """A unit that is stored, and how it came there."""

    artifact: Artifact
    #: Whether it had been compiled before: by another piece, size, rank, process or warm.
    reused: bool
    #: Why it was not proved this time, where a later warm may; else "".
    unproved: str = ""
    generated: Texts = field(default_factory=dict)


class CompilerManager:
    """Compiles unique pieces once and puts them into an entry; any thread may ask.

    Without a pool, all is compiled in this process; without a prover, units are stored as they are; without remotes,
    they come from here and stay here.
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
        self._begun: dict[str, Future[Built]] = {}
        self._lock = threading.RLock()

    def uses_workers(self, adaptor: str) -> bool:
        """Return whether pieces of an adaptor may be compiled outside of this process."""
        return self._pool is not None and self._adaptor(adaptor).compiles

    def key(self, work: Work) -> str:
        """Return the key of the unit that serves `work`.

        Raises:
            ConfigError: There is no such adaptor, or an option is unknown to the compiler.
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
        """Have a worker compile, from now on, what `ensure` will be asked for: it waits for that, and says how it went.

        Raises:
            ConfigError: There is no such adaptor, or an option is unknown to the compiler.
        """
        key = self.key(work)
        if self._pool is None or not self.uses_workers(work.adaptor):
            return
        future: Future[Built] = Future()
        with self._lock:
            is_new = key not in self._begun and len(self._begun) < _MOST_BEGUN
            if is_new:
                self._begun[key] = future
        if is_new:
            # settings of torch belong to a thread's context: the thread sees those of this one
            run, arguments = contextvars.copy_context().run, (self._settle, future, key, work)
            threading.Thread(target=run, args=arguments, name="cgtool-ahead", daemon=True).start()

    def ensure(self, work: Work, *, objects: ObjectStore, in_worker: bool = False) -> Built:
        """Return the unit that serves `work`, compiled now unless it was before; its artifact is in the entry.

        Two processes that ask for one unit at a time compile it once: the second waits, and finds it. Interrupted at
        any instant, the unit is either not there or whole. With `in_worker` a worker of the pool compiles it, while any
        thread of this process waits.

        Raises:
            StaysHereError: With `in_worker`: only this process can compile the piece.
            WorkerError: With `in_worker`: the worker crashed, hung, or ran out of memory or disk.
            CompileError: The compiler cannot compile the piece, or cannot save what it compiled. Nothing is stored.
            ProofCrashError: The process that proves the artifact died.
            ConfigError: An option is unknown to the compiler.
            CacheError: The cache cannot be written.
        """
        key = self.key(work)
        begun = self._begun.pop(key, None)
        built = self._found(key, work, in_worker=in_worker) if begun is None else begun.result()
        try:
            self._units.link_into(objects, key, built.artifact)
        except CacheCorruptError:  # damaged between the look and the link: as if it had not been there
            built = self._compile(key, work, in_worker=in_worker)
            self._units.link_into(objects, key, built.artifact)
        return built

    def _settle(self, future: Future[Built], key: str, work: Work) -> None:
        try:
            future.set_result(self._found(key, work, in_worker=True))
        except BaseException as error:  # noqa: BLE001  raised where the unit is asked for
            future.set_exception(error)

    def _found(self, key: str, work: Work, *, in_worker: bool) -> Built:
        """Return a unit as it is stored, or compile it now."""
        found = self._usable(key, work)
        return self._compile(key, work, in_worker=in_worker) if found is None else Built(artifact=found, reused=True)

    def _usable(self, key: str, work: Work) -> Artifact | None:
        """Return the artifact of a unit that may be used as it is."""
        found = self._units.find(key)
        return None if found is not None and found.needs_proof and self._prover_of(work) is not None else found

    def _compile(self, key: str, work: Work, *, in_worker: bool) -> Built:
        """Compile and prove a unit while no other process does, unless another one did it meanwhile."""
        with self._units.lock(key, on_wait=self._waiting):
            found = self._usable(key, work)
            if found is not None:
                return Built(artifact=found, reused=True)
            found = self._elsewhere(key, work)
            if found is not None:
                return Built(artifact=found, reused=True)
            unproved = self._units.find(key)
            data = None if unproved is None else self._units.data(key, unproved)
            is_stored = unproved is not None and data is not None
            try:
                if unproved is None or data is None:
                    data, artifact, texts = self._compiled(work, self._options, in_worker=in_worker)
                else:
                    artifact, texts = unproved, {}
                artifact, why_not = self._proved(work, data, artifact)
            except ProofMismatchError as error:
                self._units.remove(key)  # stored unproved, it would serve whoever asks for no proof
                options = self._rounding(work)
                if options == self._options:
                    raise
                _log.info("Piece %s is compiled again, to round all that eager rounds: %s", work.piece_index, error)
                data, artifact, texts = self._compiled(work, options, in_worker=in_worker)
                artifact, why_not = self._proved(work, data, artifact)
                is_stored = False
            self._units.put(key, data, artifact)
        if self._remotes is not None and not artifact.needs_proof and self._adaptor(work.adaptor).compiles:
            self._remotes.put_unit(key, data, artifact)
        return Built(artifact=artifact, reused=is_stored, unproved=why_not, generated=texts)

    def _elsewhere(self, key: str, work: Work) -> Artifact | None:
        """Take over a unit that was compiled and proved on another machine."""
        if self._remotes is None or not self._adaptor(work.adaptor).compiles:
            return None
        found = self._remotes.unit(key, work.origin)
        if found is None or found[1].needs_proof:
            return None
        self._units.put(key, *found)
        return found[1]

    def _rounding(self, work: Work) -> dict[str, Json]:
        """Return the options with which the adaptor rounds as eager does, where that can matter.

        A compiler keeps what lies between two ops in float32, which may be more exact than eager, and may not: a sum
        of what was not rounded does not fit terms that were.
        """
        rounds = eps_of(lowest_dtype(work.graph)) >= torch.finfo(torch.float16).eps
        return {**(self._adaptor(work.adaptor).rounding if rounds else {}), **self._options}

    def _compiled(self, work: Work, options: dict[str, Json], *, in_worker: bool) -> tuple[bytes, Artifact, Texts]:
        count("compiles")
        prover = self._prover_of(work)
        if prover is not None and not (in_worker and isinstance(self._pool, Cluster)):  # which proves for itself
            prover.start()  # it imports torch while the piece is compiled
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

    def _proved(self, work: Work, data: bytes, artifact: Artifact) -> tuple[Artifact, str]:
        """Return the artifact with what a proof found, and why there was none where a later one may succeed.

        Nothing is to be proved of what runs the piece as it stands, or was proved by the worker that compiled it.
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
        """Return the adaptor's digest of compiler and options: slow for Inductor, and the same for every piece."""
        tuned = _is_tuned(work)
        with self._lock:
            place = work.adaptor, tuned, *options
            if place not in self._hashes:
                self._hashes[place] = self._adaptor(work.adaptor).compute_hash(options, max_autotune=tuned)
            return self._hashes[place]

    def _waiting(self) -> None:
        self._on_event(Event(phase="compile", message="waiting for another process that compiles this piece"))


def _is_tuned(work: Work) -> bool:
    return work.tuned and work.adaptor != EAGER


def pool_of(
    config: CompilationConfig, on_event: OnEvent, *, on_cpu: bool
) -> AbstractContextManager[WorkerPool | Cluster | None]:
    """Return the workers of a warm; None where everything is compiled in this process."""
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
    """Return whether compiling here runs the host's C++ compiler; nobody knows it of another's adaptor."""
    return config.adaptor == AOT_INDUCTOR or (on_cpu and config.adaptor in ADAPTORS and config.adaptor != EAGER)


def prover_of(config: CompilationConfig, device_index: int | None) -> AbstractContextManager[Prover | None]:
    """Return what proves the artifacts of a warm; None where nothing is proved."""
    if not config.proof or not get_adaptor(config.adaptor).compiles:
        return nullcontext()
    return Prover(timeout_secs=config.compile_timeout, device_index=device_index)
