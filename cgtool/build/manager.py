"""Compile or load: each unique piece is compiled once, whoever asks, and shared by pieces, sizes, ranks and processes.

Must not import Dynamo or Inductor: a manager that finds everything compiled needs only what the adaptor's digest does.

The key of a unit is the digest of the piece's identity, the options, what the adaptor says of compiler and target, and
the version of this way of building. What a unit is stored under depends on nothing else: no path, no name of a model or
a layer, no index of a piece.
"""

from __future__ import annotations

from dataclasses import dataclass

from cgtool.build.adaptors.interface import CompilerInterface, PieceCallable
from cgtool.cache.objects import ObjectStore
from cgtool.cache.units import UnitRecord, UnitStore, new_record
from cgtool.config import CompilationConfig
from cgtool.digests import digest_of
from cgtool.errors import CacheCorruptError
from cgtool.events import Event, OnEvent, ignore
from cgtool.pieces import PieceGraph

#: Raise it when the way from a piece to an artifact changes: what older versions built is then compiled again.
BUILD_VERSION = 1


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
        units: All units of the cache.
        adaptor: The compiler.
        config: Where the user's options for the compiler come from.
        on_event: Told when a unit is waited for, because another process compiles it.
    """

    def __init__(
        self,
        units: UnitStore,
        adaptor: CompilerInterface,
        config: CompilationConfig,
        *,
        on_event: OnEvent = ignore,
    ) -> None:
        self._units = units
        self._adaptor = adaptor
        self._options = dict(config.inductor_compile_config)
        self._on_event = on_event
        self._hashes: dict[bool, str] = {}

    def key(self, graph: PieceGraph, *, max_autotune: bool = False) -> str:
        """Return the key of the unit that `graph` compiles to.

        Raises:
            ConfigError: An option is unknown to the compiler.
        """
        if max_autotune not in self._hashes:
            # slow for Inductor, and the same for every piece
            self._hashes[max_autotune] = self._adaptor.compute_hash(self._options, max_autotune=max_autotune)
        return digest_of(
            {
                "piece": graph.identity(),
                "adaptor": self._adaptor.name,
                "compiler": self._hashes[max_autotune],
                "build": BUILD_VERSION,
            }
        )

    def ensure(self, graph: PieceGraph, *, objects: ObjectStore, max_autotune: bool = False) -> UnitResult:
        """Return the unit of `graph`, compiled now unless it was before; its artifact is in the entry.

        Two processes that ask for one unit at a time compile it once: the second waits, and finds it. Interrupted at
        any instant, the unit is either not there or whole.

        Args:
            graph: A piece, specialised or restricted to the shape.
            objects: The artifacts of the entry.
            max_autotune: Whether the compiler may try variants of each kernel: for concrete sizes.

        Raises:
            CompileError: The compiler cannot compile the piece, or cannot save what it compiled. Nothing is stored.
            ConfigError: An option is unknown to the compiler.
            CacheError: The cache cannot be written.
        """
        key = self.key(graph, max_autotune=max_autotune)
        record = self._units.find(key)
        reused = record is not None
        if record is None:
            record, reused = self._compile_locked(key, graph, max_autotune=max_autotune)
        try:
            self._units.link_into(objects, key, record)
        except CacheCorruptError:  # damaged between the look and the link: as if it had not been there
            record, reused = self._compile_locked(key, graph, max_autotune=max_autotune)
            self._units.link_into(objects, key, record)
        return _result(key, record, reused=reused)

    def load(self, unit: UnitResult, graph: PieceGraph, *, objects: ObjectStore) -> PieceCallable:
        """Return a callable from an artifact of the entry.

        Raises:
            ArtifactError: The bytes cannot be opened here.
            CacheCorruptError: The bytes are gone or differ from their digest.
        """
        return self._adaptor.load(objects.get(unit.digest, unit.kind), graph)

    def _compile_locked(self, key: str, graph: PieceGraph, *, max_autotune: bool) -> tuple[UnitRecord, bool]:
        """Compile a unit while no other process does; return its record, and whether another one did it meanwhile."""
        with self._units.lock(key, on_wait=self._waiting):
            found = self._units.find(key)
            if found is not None:
                return found, True
            piece = self._adaptor.compile(graph, options=self._options, max_autotune=max_autotune)
            record = new_record(
                piece.artifact,
                kind=self._adaptor.kind,
                compile_secs=piece.compile_secs,
                kernels=piece.kernels,
                guards=piece.guards,
            )
            self._units.put(key, piece.artifact, record)
        return record, False

    def _waiting(self) -> None:
        self._on_event(Event(phase="compile", message="waiting for another process that compiles this piece"))


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
