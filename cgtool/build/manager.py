"""Compile or load: each unique piece is compiled once, whoever asks, and shared by pieces, sizes, ranks and processes.

Must not import Dynamo or Inductor: a manager that finds everything compiled needs only what the adaptor's digest does.

The key of a unit is the digest of the piece's identity, the options, what the adaptor says of compiler and target, and
the version of this way of building. What a unit is stored under depends on nothing else: no path, no name of a model or
a layer, no index of a piece.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from cgtool.build.adaptors.interface import CompiledPiece, CompilerInterface, PieceCallable
from cgtool.build.proof import Prover
from cgtool.build.workers.modules import imports_for
from cgtool.build.workers.pool import WorkerPool
from cgtool.build.workers.settings import changed_settings
from cgtool.build.workers.unit import StaysHereError, Unit
from cgtool.cache.objects import ObjectStore
from cgtool.cache.units import UnitRecord, UnitStore, new_record
from cgtool.config import CompilationConfig
from cgtool.digests import digest_of
from cgtool.errors import CacheCorruptError, ProofMismatchError
from cgtool.events import Event, OnEvent, ignore
from cgtool.pieces import PieceGraph

#: Raise it when the way from a piece to an artifact changes: what older versions built is then compiled again.
BUILD_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class UnitResult:
    """A compiled piece that is in the entry now.

    Args:
        key: The unit's key.
        digest: The SHA-256 of the artifact's bytes.
        kind: The artifact's kind, which is its file suffix.
        size_bytes: The artifact's size.
        compile_secs: How long it took to compile, when it was compiled, in seconds.
        kernels: How many kernels were generated.
        guards: Facts over the graph's symbols that the compiler relies on, beyond the graph's ranges and facts.
        proved: Whether it was run and compared with the piece.
        proof_gap: Why it cannot be, where that was tried; else "".
        unproved: Why it was not proved this time, where a later warm may; else "".
        reused: Whether it had been compiled before: by another piece, size, rank, process or warm.
    """

    key: str
    digest: str
    kind: str
    size_bytes: int
    compile_secs: float
    kernels: int
    guards: tuple[str, ...]
    proved: bool
    proof_gap: str
    unproved: str
    reused: bool


class CompilerManager:
    """Compiles unique pieces once and puts them into an entry.

    Args:
        units: All units of the cache.
        adaptor: The compiler.
        config: Where the user's options for the compiler come from.
        on_event: Told when a unit is waited for, because another process compiles it.
        pool: Worker processes to compile in; None compiles in this process alone.
        prover: Runs each unit before it is stored; None stores it without.
    """

    def __init__(
        self,
        units: UnitStore,
        adaptor: CompilerInterface,
        config: CompilationConfig,
        *,
        on_event: OnEvent = ignore,
        pool: WorkerPool | None = None,
        prover: Prover | None = None,
    ) -> None:
        self._units = units
        self._adaptor = adaptor
        self._options = dict(config.inductor_compile_config)
        self._on_event = on_event
        self._pool = pool if adaptor.compiles else None
        self._prover = prover if adaptor.compiles else None
        self._hashes: dict[bool, str] = {}
        self._lock = threading.Lock()

    @property
    def has_workers(self) -> bool:
        """Whether pieces may be compiled outside of this process."""
        return self._pool is not None

    def key(self, graph: PieceGraph, *, max_autotune: bool = False) -> str:
        """Return the key of the unit that `graph` compiles to.

        Raises:
            ConfigError: An option is unknown to the compiler.
        """
        return digest_of(
            {
                "piece": graph.identity(),
                "adaptor": self._adaptor.name,
                "compiler": self._compiler(max_autotune=max_autotune),
                "build": BUILD_VERSION,
            }
        )

    def ensure(
        self, graph: PieceGraph, *, objects: ObjectStore, max_autotune: bool = False, in_worker: bool = False
    ) -> UnitResult:
        """Return the unit of `graph`, compiled now unless it was before; its artifact is in the entry.

        Two processes that ask for one unit at a time compile it once: the second waits, and finds it. Interrupted at
        any instant, the unit is either not there or whole.

        Args:
            graph: A piece, specialised or restricted to the shape.
            objects: The artifacts of the entry.
            max_autotune: Whether the compiler may try variants of each kernel: for concrete sizes.
            in_worker: Whether a worker of the pool compiles it, while any thread of this process waits.

        Raises:
            StaysHereError: With `in_worker`: only this process can compile the piece.
            WorkerError: With `in_worker`: the worker crashed, hung, or ran out of memory or disk.
            CompileError: The compiler cannot compile the piece, or cannot save what it compiled. Nothing is stored.
            ProofCrashError: The process that proves the artifact died.
            ConfigError: An option is unknown to the compiler.
            CacheError: The cache cannot be written.
        """
        key = self.key(graph, max_autotune=max_autotune)
        work = _Compile(key=key, graph=graph, max_autotune=max_autotune, in_worker=in_worker)
        record = self._found(key)
        built = self._compile_locked(work) if record is None else _Built(record=record, reused=True)
        try:
            self._units.link_into(objects, key, built.record)
        except CacheCorruptError:  # damaged between the look and the link: as if it had not been there
            built = self._compile_locked(work)
            self._units.link_into(objects, key, built.record)
        return _result(key, built)

    def load(self, unit: UnitResult, graph: PieceGraph, *, objects: ObjectStore) -> PieceCallable:
        """Return a callable from an artifact of the entry.

        Raises:
            ArtifactError: The bytes cannot be opened here.
            CacheCorruptError: The bytes are gone or differ from their digest.
        """
        return self._adaptor.load(objects.get(unit.digest, unit.kind), graph)

    def _found(self, key: str) -> UnitRecord | None:
        """Return the record of a unit that may be used as it is."""
        found = self._units.find(key)
        return None if found is not None and self._prover is not None and found.needs_proof else found

    def _compile_locked(self, work: _Compile) -> _Built:
        """Compile a unit while no other process does, unless another one did it meanwhile."""
        with self._units.lock(work.key, on_wait=self._waiting):
            found = self._found(work.key)
            if found is not None:
                return _Built(record=found, reused=True)
            unproved = self._units.find(work.key)
            data = None if unproved is None else self._units.data(work.key, unproved)
            if unproved is None or data is None:
                data, record = self._compiled(work)
            else:
                record = unproved
            try:
                record, why_not = self._proved(work, data, record)
            except ProofMismatchError:
                self._units.remove(work.key)  # stored unproved, it would serve whoever asks for no proof
                raise
            self._units.put(work.key, data, record)
        return _Built(record=record, reused=unproved is not None, unproved=why_not)

    def _proved(self, work: _Compile, data: bytes, record: UnitRecord) -> tuple[UnitRecord, str]:
        """Return the record with what a proof found, and why there was none where a later one may succeed.

        Nothing is to be proved of what runs the piece as it stands.
        """
        if self._prover is None:
            return replace(record, proved=not self._adaptor.compiles), ""
        try:
            imports = imports_for(work.graph.ops, self._adaptor)
        except StaysHereError as error:
            return replace(record, proof_gap=f"not proved: {error}"), ""
        found = self._prover.prove(
            data, adaptor=self._adaptor.name, graph=work.graph, guards=record.guards, imports=imports
        )
        if found.may_pass_later:
            return replace(record, proved=False), found.reason or ""
        return replace(record, proved=found.proved, proof_gap=found.reason or ""), ""

    def _compiled(self, work: _Compile) -> tuple[bytes, UnitRecord]:
        if self._prover is not None:
            self._prover.start()  # it imports torch while the piece is compiled
        if work.in_worker and self._pool is not None:
            piece = self._compiled_in_worker(work, self._pool)
        else:
            piece = self._adaptor.compile(work.graph, options=self._options, max_autotune=work.max_autotune)
        return piece.artifact, new_record(
            piece.artifact,
            kind=self._adaptor.kind,
            compile_secs=piece.compile_secs,
            kernels=piece.kernels,
            guards=piece.guards,
        )

    def _compiled_in_worker(self, work: _Compile, pool: WorkerPool) -> CompiledPiece:
        unit = Unit(
            key=work.key,
            graph=work.graph,
            adaptor=self._adaptor.name,
            options=self._options,
            max_autotune=work.max_autotune,
            compiler=self._compiler(max_autotune=work.max_autotune),
            imports=imports_for(work.graph.ops, self._adaptor),
            settings=changed_settings(),
        )
        report, artifact = pool.compile(unit)
        return CompiledPiece(
            artifact=artifact, kernels=report.kernels, compile_secs=report.compile_secs, guards=report.guards
        )

    def _compiler(self, *, max_autotune: bool) -> str:
        """Return the adaptor's digest of compiler and options: slow for Inductor, and the same for every piece."""
        with self._lock:
            if max_autotune not in self._hashes:
                self._hashes[max_autotune] = self._adaptor.compute_hash(self._options, max_autotune=max_autotune)
            return self._hashes[max_autotune]

    def _waiting(self) -> None:
        self._on_event(Event(phase="compile", message="waiting for another process that compiles this piece"))


@dataclass(frozen=True, kw_only=True)
class _Compile:
    """One unit to compile, and where."""

    key: str
    graph: PieceGraph
    max_autotune: bool
    in_worker: bool


@dataclass(frozen=True, kw_only=True)
class _Built:
    """A unit that is stored, how it came there, and why it was not proved where a later warm may."""

    record: UnitRecord
    reused: bool
    unproved: str = ""


def _result(key: str, built: _Built) -> UnitResult:
    record = built.record
    return UnitResult(
        key=key,
        digest=record.digest,
        kind=record.kind,
        size_bytes=record.size_bytes,
        compile_secs=record.compile_secs,
        kernels=record.kernels,
        guards=record.guards,
        proved=record.proved,
        proof_gap=record.proof_gap,
        unproved=built.unproved,
        reused=built.reused,
    )
