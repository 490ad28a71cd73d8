"""Compile or load: each unique piece is compiled once, whoever asks, and shared by pieces, sizes, ranks and processes.

Must not import Dynamo or Inductor: a manager that finds everything compiled needs neither.

The key of a unit is the digest of the piece's identity, the options, what the adaptor says of compiler and target, what
the caller says of the environment, and the version of cgtool's own build. What a unit is stored under depends on nothing
else: no path, no name of a model or a layer, no index of a piece.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from cgtool.build.adaptors.interface import CompilerInterface, PieceCallable
from cgtool.cache.objects import ObjectStore
from cgtool.cache.units import UnitRecord, UnitStore, new_record
from cgtool.digests import digest_of
from cgtool.errors import CacheCorruptError
from cgtool.events import Event, OnEvent, ignore
from cgtool.pieces import Json, PieceGraph

#: Raise it when the way from a piece to an artifact changes: what older versions built is then compiled again.
BUILD_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ShapeOptions:
    """How a piece is compiled for one shape.

    Args:
        options: The user's options for the compiler.
        max_autotune: Whether the compiler may try variants of each kernel: for concrete sizes.
        label: What progress calls the shape: "general", "8", "16-512".
    """

    options: Mapping[str, Json] = field(default_factory=dict)
    max_autotune: bool = False
    label: str = "general"


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
        guards: Facts over the graph's symbols that the compiler relies on.
        reused: Whether it had been compiled before: by another piece, size, rank, process or warm.
    """

    key: str
    digest: str
    kind: str
    size_bytes: int
    compile_secs: float
    kernels: int
    guards: tuple[str, ...]
    reused: bool


class CompilerManager:
    """Compiles unique pieces once and puts them into an entry.

    Args:
        store: The artifacts of the entry that is being made.
        units: All units of the cache.
        adaptor: The compiler.
        unit_env: What else decides an artifact's bytes; enters every unit's key.
        on_event: Told of each compile as it begins and ends.

    Attributes:
        compiled: How many pieces this manager compiled.
        reused: How many it found compiled.
        compile_secs: How long it spent compiling, in seconds.
    """

    def __init__(
        self,
        *,
        store: ObjectStore,
        units: UnitStore,
        adaptor: CompilerInterface,
        unit_env: Json = None,
        on_event: OnEvent = ignore,
    ) -> None:
        self._store = store
        self._units = units
        self._adaptor = adaptor
        self._unit_env = unit_env
        self._on_event = on_event
        self._results: dict[str, UnitResult] = {}
        self._hashes: dict[str, str] = {}
        self.compiled = 0
        self.reused = 0
        self.compile_secs = 0.0

    def key(self, graph: PieceGraph, *, shape_options: ShapeOptions) -> str:
        """Return the key of the unit that `graph` compiles to.

        Raises:
            ConfigError: An option is unknown to the compiler.
        """
        how = {"options": dict(shape_options.options), "max_autotune": shape_options.max_autotune}
        known_as = digest_of(how)
        if known_as not in self._hashes:
            # seconds for Inductor, and the same for every piece
            self._hashes[known_as] = self._adaptor.compute_hash(
                shape_options.options, max_autotune=shape_options.max_autotune
            )
        return digest_of(
            {
                "piece": graph.identity(),
                "adaptor": self._adaptor.name,
                "compiler": self._hashes[known_as],
                "environment": self._unit_env,
                "build": BUILD_VERSION,
                **how,
            }
        )

    def ensure(self, graph: PieceGraph, *, shape_options: ShapeOptions | None = None) -> UnitResult:
        """Return the unit of `graph`, compiled now unless it was before; its artifact is in the entry.

        Two processes that ask for one unit at a time compile it once: the second waits, and finds it. Interrupted at
        any instant, the unit is either not there or whole.

        Args:
            graph: A piece, specialised or restricted to the shape.
            shape_options: How it is compiled; None: with no options.

        Raises:
            CompileError: The compiler cannot compile the piece, or cannot save what it compiled. Nothing is stored.
            ConfigError: An option is unknown to the compiler.
            CacheError: The cache cannot be written.
        """
        how = shape_options or ShapeOptions()
        key = self.key(graph, shape_options=how)
        if key in self._results:
            self.reused += 1
            return self._results[key]
        record = self._units.find(key)
        reused = record is not None
        if record is None:
            with self._units.lock(key, on_wait=lambda: self._say(f"waiting for another process: {how.label}")):
                record = self._units.find(key)  # another process may have compiled it meanwhile
                reused = record is not None
                if record is None:
                    record = self._compile(key, graph, how)
        record = self._link(key, graph, how, record)
        self.reused += reused
        result = _result(key, record, reused=reused)
        self._results[key] = _result(key, record, reused=True)
        return result

    def load(self, result: UnitResult, graph: PieceGraph) -> PieceCallable:
        """Return a callable from an artifact of the entry.

        Raises:
            ArtifactError: The bytes cannot be opened here.
            CacheCorruptError: The bytes are gone or differ from their digest.
        """
        return self._adaptor.load(self._store.get(result.digest, result.kind), graph)

    def _compile(self, key: str, graph: PieceGraph, how: ShapeOptions) -> UnitRecord:
        self._say(f"compiling {how.label}, {len(graph.nodes)} ops")
        start = time.perf_counter()
        piece = self._adaptor.compile(graph, options=how.options, max_autotune=how.max_autotune)
        record = new_record(
            piece.artifact,
            kind=self._adaptor.kind,
            compile_secs=piece.compile_secs,
            kernels=piece.kernels,
            guards=piece.guards,
        )
        self._units.put(key, piece.artifact, record)
        secs = time.perf_counter() - start
        self.compiled += 1
        self.compile_secs += secs
        self._say(f"compiled {how.label}, {piece.kernels} kernels", secs=secs)
        return record

    def _link(self, key: str, graph: PieceGraph, how: ShapeOptions, record: UnitRecord) -> UnitRecord:
        try:
            self._units.link_into(self._store, key, record)
        except CacheCorruptError:
            # damaged between the look and the link: as if it had not been there
            with self._units.lock(key):
                record = self._compile(key, graph, how)
            self._units.link_into(self._store, key, record)
        return record

    def _say(self, message: str, *, secs: float | None = None) -> None:
        self._on_event(Event(phase="compile", message=message, done=self.compiled + self.reused, secs=secs))


def _result(key: str, record: UnitRecord, *, reused: bool) -> UnitResult:
    return UnitResult(
        key=key,
        digest=record.digest,
        kind=record.kind,
        size_bytes=record.size_bytes,
        compile_secs=record.compile_secs,
        kernels=record.kernels,
        guards=record.guards,
        reused=reused,
    )
