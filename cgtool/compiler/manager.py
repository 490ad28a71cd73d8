"""Compile or load: each unique piece is compiled once, whoever asks, and shared by pieces, sizes, ranks and processes.

Must not import Dynamo or Inductor: a manager that finds everything compiled needs only what the adaptor's digest does.

The key of a unit is the digest of the piece's identity, the shape, the options, what the adaptor says of compiler and
target, and the version of this way of building. What a unit is stored under depends on nothing else: no path, no name
of a model or a layer, no index of a piece.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from msgspec.structs import replace

from cgtool.compiler.adaptors.interface import CompilerInterface, PieceCallable
from cgtool.compiler.generated import Texts, compile_piece
from cgtool.compiler.proof import Prover
from cgtool.compiler.workers.pool import WorkerPool
from cgtool.compiler.workers.request import CompileRequest, StaysHereError, changed_settings, imports_for
from cgtool.config import CompilationConfig
from cgtool.errors import CacheCorruptError, ProofMismatchError
from cgtool.events import Event, OnEvent, count, ignore
from cgtool.plan.grammar import digest_of, sha256_hex
from cgtool.plan.pieces import PieceGraph
from cgtool.plan.shapes import shape_text
from cgtool.store.artifacts import Origin, parted, with_origin
from cgtool.store.entry import ObjectStore
from cgtool.store.records import Artifact
from cgtool.store.units import UnitStore

#: Raise it when the way from a piece to an artifact changes: what older versions built is then compiled again.
BUILD_VERSION = 3


@dataclass(frozen=True, kw_only=True)
class Built:
    """A unit that is stored, and how it came there.

    Args:
        artifact: What it compiled to.
        reused: Whether it had been compiled before: by another piece, size, rank, process or warm.
        unproved: Why it was not proved this time, where a later warm may; else "".
        generated: What the compiler wrote for people just now.
    """

    artifact: Artifact
    reused: bool
    unproved: str = ""
    generated: Texts = field(default_factory=dict)


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

    def key(self, graph: PieceGraph, origin: Origin, *, max_autotune: bool = False) -> str:
        """Return the key of the unit that `graph`, which is `origin.piece` at `origin.shape`, compiles to.

        Raises:
            ConfigError: An option is unknown to the compiler.
        """
        return digest_of(
            {
                "piece": origin.piece,
                "shape": shape_text(origin.shape),
                "graph": graph.identity(),
                "adaptor": self._adaptor.name,
                "compiler": self._compiler(max_autotune=max_autotune),
                "build": BUILD_VERSION,
            }
        )

    def ensure(
        self,
        graph: PieceGraph,
        origin: Origin,
        *,
        objects: ObjectStore,
        max_autotune: bool = False,
        in_worker: bool = False,
    ) -> Built:
        """Return the unit of `graph`, compiled now unless it was before; its artifact is in the entry.

        Two processes that ask for one unit at a time compile it once: the second waits, and finds it. Interrupted at
        any instant, the unit is either not there or whole.

        Args:
            graph: A piece, specialised or restricted to the shape.
            origin: The piece and the shape.
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
        key = self.key(graph, origin, max_autotune=max_autotune)
        work = _Compile(key=key, graph=graph, origin=origin, max_autotune=max_autotune, in_worker=in_worker)
        found = self._found(key)
        built = self._compile_locked(work) if found is None else Built(artifact=found, reused=True)
        try:
            self._units.link_into(objects, key, built.artifact)
        except CacheCorruptError:  # damaged between the look and the link: as if it had not been there
            built = self._compile_locked(work)
            self._units.link_into(objects, key, built.artifact)
        return built

    def load(self, artifact: Artifact, graph: PieceGraph, *, objects: ObjectStore) -> PieceCallable:
        """Return a callable from an artifact of the entry.

        Raises:
            ArtifactError: The bytes cannot be opened here.
            CacheCorruptError: The bytes are gone or differ from their digest.
        """
        _, code = parted(objects.get(artifact.digest, artifact.kind), artifact.kind)
        return self._adaptor.load(code, graph)

    def _found(self, key: str) -> Artifact | None:
        """Return the artifact of a unit that may be used as it is."""
        found = self._units.find(key)
        return None if found is not None and self._prover is not None and found.needs_proof else found

    def _compile_locked(self, work: _Compile) -> Built:
        """Compile a unit while no other process does, unless another one did it meanwhile."""
        with self._units.lock(work.key, on_wait=self._waiting):
            found = self._found(work.key)
            if found is not None:
                return Built(artifact=found, reused=True)
            unproved = self._units.find(work.key)
            data = None if unproved is None else self._units.data(work.key, unproved)
            if unproved is None or data is None:
                data, artifact, texts = self._compiled(work)
            else:
                artifact, texts = unproved, {}
            try:
                artifact, why_not = self._proved(work, data, artifact)
            except ProofMismatchError:
                self._units.remove(work.key)  # stored unproved, it would serve whoever asks for no proof
                raise
            self._units.put(work.key, data, artifact)
        return Built(artifact=artifact, reused=unproved is not None, unproved=why_not, generated=texts)

    def _proved(self, work: _Compile, data: bytes, artifact: Artifact) -> tuple[Artifact, str]:
        """Return the artifact with what a proof found, and why there was none where a later one may succeed.

        Nothing is to be proved of what runs the piece as it stands.
        """
        if self._prover is None:
            return replace(artifact, proved=not self._adaptor.compiles), ""
        try:
            imports = imports_for(work.graph.ops, self._adaptor)
        except StaysHereError as error:
            return replace(artifact, proof_gap=f"not proved: {error}"), ""
        _, code = parted(data, artifact.kind)
        found = self._prover.prove(
            code, adaptor=self._adaptor.name, graph=work.graph, guards=artifact.guards, imports=imports
        )
        if found.may_pass_later:
            return replace(artifact, proved=False), found.reason or ""
        return replace(artifact, proved=found.proved, proof_gap=found.reason or ""), ""

    def _compiled(self, work: _Compile) -> tuple[bytes, Artifact, Texts]:
        count("compiles")
        if self._prover is not None:
            self._prover.start()  # it imports torch while the piece is compiled
        if work.in_worker and self._pool is not None:
            code, artifact, texts = self._pool.compile(self._request(work))
        else:
            piece, texts = compile_piece(
                self._adaptor, work.graph, options=self._options, max_autotune=work.max_autotune
            )
            code, artifact = piece.artifact, piece.record(self._adaptor.name)
        data = with_origin(code, artifact.kind, work.origin)
        return data, replace(artifact, digest=sha256_hex(data), size_bytes=len(data)), texts

    def _request(self, work: _Compile) -> CompileRequest:
        return CompileRequest(
            graph=work.graph,
            adaptor=self._adaptor.name,
            options=self._options,
            max_autotune=work.max_autotune,
            compiler=self._compiler(max_autotune=work.max_autotune),
            imports=imports_for(work.graph.ops, self._adaptor),
            settings=changed_settings(),
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
    origin: Origin
    max_autotune: bool
    in_worker: bool
