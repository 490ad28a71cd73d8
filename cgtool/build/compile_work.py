"""Compiling the work that a plan needs: each unique artifact once, and eagerly what no compiler takes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cgtool.build.adaptors import get_adaptor
from cgtool.build.manager import CompilerManager, UnitResult
from cgtool.build.wanted import Work
from cgtool.cache.layout import CacheLayout
from cgtool.cache.manifest import ManifestRow, shape_words
from cgtool.cache.objects import ObjectStore
from cgtool.cache.units import UnitStore
from cgtool.config import EAGER, CompilationConfig
from cgtool.digests import digest_of
from cgtool.errors import CompileError
from cgtool.events import Event, OnEvent

#: How many pieces a line of progress names.
_MOST_LISTED = 6


@dataclass(kw_only=True)
class Compiled:
    """What came of it.

    Args:
        rows: A row for each item of the work.
        compiled: How many artifacts this process compiled.
        secs: How long all of it took, in seconds.
        fallbacks: variant → piece → why no compiler took it; such a piece runs as it stands.
    """

    rows: list[ManifestRow] = field(default_factory=list)
    compiled: int = 0
    secs: float = 0.0
    fallbacks: dict[int, dict[int, str]] = field(default_factory=dict)


def compile_work(
    work: Iterable[Work], *, layout: CacheLayout, objects: ObjectStore, config: CompilationConfig, on_event: OnEvent
) -> Compiled:
    """Compile or reuse every artifact of `work` and put it into an entry.

    A piece that the compiler refuses for all of its variant's sizes runs as it stands, and is reported; one that it
    refuses for a concrete size or a range alone is an error.

    Args:
        work: What is needed.
        layout: Where the cache lies.
        objects: The entry's artifacts.
        config: Where the compiler's options come from.
        on_event: Told of each artifact.

    Raises:
        CompileError: A piece cannot be compiled for a concrete size or a range.
        ConfigError: The compiler does not know an option.
        CacheError: The cache cannot be written.
    """
    started = time.perf_counter()
    groups = list(unique(work))
    managers = _Managers(layout, config, on_event)
    result = Compiled()
    for done, group in enumerate(groups):
        items = [item for item in group if item.piece_index not in result.fallbacks.get(item.variant, {})]
        if not items:
            continue
        label = _label(items)
        on_event(Event(phase="compile", message=label, done=done, total=len(groups)))
        items, unit = _ensure(items, managers, objects, result)
        result.compiled += not unit.reused
        secs = 0.0 if unit.reused else unit.compile_secs
        said = f"{label}, compiled before" if unit.reused else label
        on_event(Event(phase="compile", message=said, done=done + 1, total=len(groups), secs=secs))
        result.rows += [_row(item, unit) for item in items]
    result.secs = time.perf_counter() - started
    return result


def row_name(work: Work) -> dict[str, Any]:
    """Return what names a row of the manifest."""
    return {
        "variant": work.variant,
        "shape": work.shape,
        "piece_index": work.piece_index,
        "adaptor": work.adaptor,
    }


class _Managers:
    """A manager for each adaptor, made when it is first needed."""

    def __init__(self, layout: CacheLayout, config: CompilationConfig, on_event: OnEvent) -> None:
        self._layout = layout
        self._units = UnitStore(layout)
        self._config = config
        self._on_event = on_event
        self._made: dict[str, CompilerManager] = {}

    def get(self, adaptor: str) -> CompilerManager:
        if adaptor not in self._made:
            compiler = get_adaptor(adaptor)
            compiler.initialize_cache(self._layout.root)
            self._made[adaptor] = CompilerManager(self._units, compiler, self._config, on_event=self._on_event)
        return self._made[adaptor]


def _ensure(
    items: list[Work], managers: _Managers, objects: ObjectStore, result: Compiled
) -> tuple[list[Work], UnitResult]:
    first = items[0]
    try:
        unit = managers.get(first.adaptor).ensure(first.graph, objects=objects, max_autotune=first.max_autotune)
    except CompileError as error:
        if not all(item.is_base for item in items):
            raise
        for item in items:
            result.fallbacks.setdefault(item.variant, {})[item.piece_index] = str(error)
        eager = [dataclasses.replace(item, adaptor=EAGER, max_autotune=False) for item in items]
        return eager, managers.get(EAGER).ensure(first.graph, objects=objects)
    return items, unit


def unique(work: Iterable[Work]) -> Iterator[list[Work]]:
    """Yield the work in groups that one artifact serves, in order of first need."""
    groups: dict[str, list[Work]] = {}
    for item in work:
        name = digest_of([item.graph.identity(), item.adaptor, item.max_autotune, item.is_base])
        groups.setdefault(name, []).append(item)
    yield from groups.values()


def _label(items: list[Work]) -> str:
    """Return what is compiled, for people: "pieces 2, 4, 6 (general)"."""
    indices = sorted({item.piece_index for item in items})
    listed = ", ".join(map(str, indices[:_MOST_LISTED]))
    more = f" and {len(indices) - _MOST_LISTED} more" if len(indices) > _MOST_LISTED else ""
    shape = items[0].shape
    kind = "size " if isinstance(shape, int) else "range " if isinstance(shape, tuple) else ""
    return f"{'piece' if len(indices) == 1 else 'pieces'} {listed}{more} ({kind}{shape_words(shape)})"


def _row(work: Work, unit: UnitResult) -> ManifestRow:
    return ManifestRow(
        **row_name(work),
        digest=unit.digest,
        kind=unit.kind,
        size_bytes=unit.size_bytes,
        compile_secs=unit.compile_secs,
        kernels=unit.kernels,
        guards=tuple(unit.guards),
    )


def merged(first: Mapping[int, Mapping[int, str]], other: Mapping[int, Mapping[int, str]]) -> dict[int, dict[int, str]]:
    """Return both maps of eager pieces as one."""
    return {index: {**first.get(index, {}), **other.get(index, {})} for index in sorted({*first, *other})}
