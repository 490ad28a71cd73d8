"""`warm`: compile a model into the cache before it is served, or say whether that is still to be done.

Owns what the user asked (`WarmOptions`) and what came of it (`WarmReport`). Prints nothing. Importable
without torch: the pipeline, which needs it, is imported as the command runs.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cgtool.config import CompilationConfig
from cgtool.errors import CacheMissError, UsageError
from cgtool.events import Event, OnEvent, ignore
from cgtool.host import environment
from cgtool.model import ModelSpec
from cgtool.store.layout import CacheLayout, RankName, resolve_root
from cgtool.toolkit.scan import list_entry
from cgtool.toolkit.start import load_call, start_line

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class WarmOptions:
    """What the user asked of `warm`.

    Args:
        model: MODEL as it was given: "path/to/file.py:factory", "package.module:factory", "hf:PATH".
        factory_args: Keyword arguments for the factory.
        weights: "fake" builds the module without memory for its weights, "real" builds it as the factory does.
        device: Where the module is built, as torch spells it; None leaves it to the factory.
        dtype: Its default floating dtype, as torch spells it; None leaves it to the factory.
        pythonpath: Folders put on `sys.path` first.
        config: What to compile and how.
        cache_dir: The cache's root; None means the configured or the user's own.
        rank: This process's place in a model-parallel group; None takes the environment's word.
        prefix: Which compiled part of the model this is; None takes the factory's word.
        check: Only say whether the cache serves the model.
    """

    model: str
    factory_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    weights: Literal["fake", "real"] = "fake"
    device: str | None = None
    dtype: str | None = None
    pythonpath: tuple[str, ...] = ()
    config: CompilationConfig = dataclasses.field(default_factory=CompilationConfig)
    cache_dir: Path | None = None
    rank: int | None = None
    prefix: str | None = None
    check: bool = False


@dataclass(frozen=True, kw_only=True)
class WarmReport:
    """What came of a warm.

    Args:
        entry: The entry as `inspect cache --json` prints it; None where a check found none.
        root: The cache's root.
        hit: Whether the cache already held all of it.
        compiled: How many artifacts were compiled.
        reused: How many were there already.
        trace_secs: Seconds that tracing took.
        compile_secs: Seconds that compiling took.
        reasons: Why the cache does not serve the model, the most telling first; empty where it does.
        notes: Advice for the user.
        start: A shell line that loads the model from this entry and calls it once.
        load_call: The Python expression that loads a module from this entry.
    """

    entry: Mapping[str, Any] | None
    root: str
    hit: bool
    compiled: int
    reused: int
    trace_secs: float
    compile_secs: float
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    start: str
    load_call: str

    def to_json(self) -> dict[str, Any]:
        """Return the document that `warm --json` prints: the entry and what this run did."""
        return {
            "schema": SCHEMA,
            "root": self.root,
            **(self.entry or {}),
            "hit": self.hit,
            "compiled": self.compiled,
            "reused": self.reused,
            "trace_secs": self.trace_secs,
            "compile_secs": self.compile_secs,
            "reasons": list(self.reasons),
            "notes": list(self.notes),
            "start": self.start,
        }


def warm(options: WarmOptions, on_event: OnEvent = ignore) -> WarmReport:
    """Compile what the cache lacks of a model, or only look whether it lacks anything.

    Args:
        options: What the user asked.
        on_event: Told of each phase as it goes.

    Returns:
        What was compiled. With `options.check`, what is missing; nothing is compiled or written then.

    Raises:
        UsageError: The cache is switched off.
        ModelError: MODEL could not be found or built.
        CgtoolError: Whatever the pipeline could not do.
    """
    if options.config.disable_cache:
        message = (
            "The cache is switched off (--no-cache, CGTOOL_DISABLE_CACHE or disable_cache), and filling it is all that "
            "warm does. Switch it on, or leave warm out: cgtool.compile compiles in the process itself then."
        )
        raise UsageError(message)
    if options.rank is None:
        options = dataclasses.replace(options, rank=environment().rank)
    spec = _built(options, on_event)
    # Imports torch, Dynamo and Inductor: seconds that a MODEL which is not there need not wait for.
    from cgtool.compiler.pipeline import warm as run_pipeline

    try:
        result = run_pipeline(
            spec,
            config=options.config,
            cache_dir=options.cache_dir,
            rank=options.rank or 0,
            check=options.check,
            on_event=on_event,
        )
    except CacheMissError as miss:
        return _report(
            options, spec.prefix, root=str(resolve_root(options.cache_dir)), reasons=miss.reasons or (str(miss),)
        )
    return _report(
        options,
        spec.prefix,
        root=str(result.root),
        entry=_entry_of(Path(result.root), RankName(hash=result.hash, rank=result.rank, prefix=result.prefix)),
        hit=result.hit,
        compiled=result.compiled,
        reused=result.reused,
        trace_secs=result.trace_secs,
        compile_secs=result.compile_secs,
        reasons=tuple(result.reasons),
        notes=tuple(result.notes),
    )


def _built(options: WarmOptions, on_event: OnEvent) -> ModelSpec:
    began = time.perf_counter()
    on_event(Event(phase="model", message="importing torch"))
    # Imports torch: seconds that `--help` and wrong usage need not wait for.
    from cgtool.models import resolve_model

    on_event(Event(phase="model", message=options.model))
    spec = resolve_model(
        options.model,
        factory_args=dict(options.factory_args),
        weights=options.weights,
        device=options.device,
        dtype=options.dtype,
        pythonpath=options.pythonpath,
    )
    on_event(Event(phase="model", message=options.model, secs=time.perf_counter() - began))
    return spec if options.prefix is None else dataclasses.replace(spec, prefix=options.prefix)


def _report(
    options: WarmOptions,
    prefix: str,
    *,
    root: str,
    entry: Mapping[str, Any] | None = None,
    hit: bool = False,
    compiled: int = 0,
    reused: int = 0,
    trace_secs: float = 0.0,
    compile_secs: float = 0.0,
    reasons: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
) -> WarmReport:
    # The environment's word needs no repeating: `cgtool.load` hears it too.
    named = options.cache_dir is not None and str(options.cache_dir) != environment().cache_dir
    cache_dir = str(options.cache_dir) if named else None
    start = start_line(
        options.model,
        factory_args=options.factory_args,
        device=options.device,
        dtype=options.dtype,
        pythonpath=options.pythonpath,
        cache_dir=cache_dir,
        rank=options.rank or 0,
        prefix=prefix,
    )
    return WarmReport(
        entry=entry,
        root=root,
        hit=hit,
        compiled=compiled,
        reused=reused,
        trace_secs=trace_secs,
        compile_secs=compile_secs,
        reasons=reasons,
        notes=notes,
        start=start,
        load_call=load_call("module", cache_dir=cache_dir, rank=options.rank or 0, prefix=prefix),
    )


def _entry_of(root: Path, name: RankName) -> Mapping[str, Any] | None:
    listing = list_entry(CacheLayout(root=root), name)
    return None if listing is None else dict(listing.to_json())
