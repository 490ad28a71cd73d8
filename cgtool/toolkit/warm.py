"""`warm`: compile a model into the cache before it is served, or say whether that is still to be done.

Owns what the user asked of a model (`ModelOptions`, which `why` and `check` take too), what came of it (`WarmReport`),
and the lines that start from what was warmed. Prints nothing. Importable without torch: the pipeline, which needs it,
is imported as the command runs.
"""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import sys
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
from cgtool.store.layout import CacheLayout, resolve_root
from cgtool.toolkit.scan import list_entry

SCHEMA = 2
DEFAULT_PREFIX = "backbone"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A model as the user names it, how it is compiled, and its place in a cache.

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
        require: Dynamic dimension → its smallest and its largest size that must be served; beside the factory's word.
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
    require: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def build(self, on_event: OnEvent) -> ModelSpec:
        """Build the model."""
        began = time.perf_counter()
        on_event(Event(phase="model", message="importing torch"))
        # Seconds that `--help` and wrong usage need not wait for.
        from cgtool.models import resolve_model

        on_event(Event(phase="model", message=self.model))
        spec = resolve_model(
            self.model,
            factory_args=dict(self.factory_args),
            weights=self.weights,
            device=self.device,
            dtype=self.dtype,
            pythonpath=self.pythonpath,
        )
        on_event(Event(phase="model", message=self.model, secs=time.perf_counter() - began))
        prefix = spec.prefix if self.prefix is None else self.prefix
        return dataclasses.replace(spec, prefix=prefix, require={**spec.require, **self.require})


def require_cache(config: CompilationConfig) -> None:
    """Refuse a configuration that switches the cache off."""
    if config.disable_cache:
        message = (
            "The cache is switched off (--no-cache, CGTOOL_DISABLE_CACHE or disable_cache): nothing is stored in it, "
            "and nothing hits. Switch it on and run this again; cgtool.compile compiles without a cache."
        )
        raise UsageError(message)


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

    entry: Mapping[str, Any] | None = None
    root: str
    hit: bool = False
    compiled: int = 0
    reused: int = 0
    trace_secs: float = 0.0
    compile_secs: float = 0.0
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    start: str
    load_call: str

    def to_json(self) -> dict[str, Any]:
        """Return the document that `warm --json` prints: the entry and what this run did."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del own["entry"], own["load_call"]
        return {
            "schema": SCHEMA,
            "root": self.root,
            **(self.entry or {}),
            **own,
            "reasons": list(self.reasons),
            "notes": list(self.notes),
        }


def warm(options: ModelOptions, *, check: bool = False, on_event: OnEvent = ignore) -> WarmReport:
    """Compile what the cache lacks of a model, or only look whether it lacks anything.

    Args:
        options: What the user asked.
        check: Only say what is missing; nothing is compiled or written.
        on_event: Told of each phase as it goes.

    Raises:
        UsageError: The cache is switched off.
        ModelError: MODEL could not be found or built.
        CgtoolError: Whatever the pipeline could not do.
    """
    require_cache(options.config)
    spec = options.build(on_event)
    # Imports Dynamo and Inductor: seconds that a MODEL which is not there need not wait for.
    from cgtool.compiler.pipeline import warm as run_pipeline

    rank = environment().rank if options.rank is None else options.rank
    # The environment's word needs no repeating: `cgtool.load` hears it too.
    named = options.cache_dir is not None and str(options.cache_dir) != environment().cache_dir
    place = {
        "cache_dir": str(options.cache_dir) if named else None,
        "rank": rank or None,
        "prefix": None if spec.prefix == DEFAULT_PREFIX else spec.prefix,
    }
    lines: dict[str, Any] = {"start": start_line(options, place), "load_call": load_call("module", place)}
    try:
        result = run_pipeline(
            spec, config=options.config, cache_dir=options.cache_dir, rank=rank, check=check, on_event=on_event
        )
    except CacheMissError as miss:
        return WarmReport(root=str(resolve_root(options.cache_dir)), reasons=miss.reasons or (str(miss),), **lines)
    name = result.manifest.name
    listing = list_entry(CacheLayout(root=Path(result.root)), name)
    return WarmReport(
        entry=None if listing is None else listing.to_json(),
        root=str(result.root),
        hit=result.hit,
        compiled=result.compiled,
        reused=result.reused,
        trace_secs=result.trace_secs,
        compile_secs=result.compile_secs,
        reasons=tuple(result.reasons),
        notes=(*spec.notes, *result.notes),
        **lines,
    )


def load_call(module: str, place: Mapping[str, Any]) -> str:
    """Return the Python expression that loads `module` from its entry: "cgtool.load(module)"."""
    return _call("cgtool.load", module, **place)


def start_line(options: ModelOptions, place: Mapping[str, Any]) -> str:
    """Return a shell line that builds the model for real, loads it from the cache and calls it once."""
    build = _call(
        "resolve_model",
        repr(options.model),
        factory_args=dict(options.factory_args) or None,
        weights="real",
        device=options.device,
        dtype=options.dtype,
        pythonpath=options.pythonpath or None,
    )
    statements = (
        "import cgtool, torch",
        "from cgtool.models import resolve_model",
        f"spec = {build}",
        f"model = {load_call('spec.module', place)}",
        "torch.set_grad_enabled(False)",
        "print(model(*spec.calls[0].args, **spec.calls[0].kwargs))",
    )
    return f"{_python()} -c {_quoted('; '.join(statements))}"


def _call(function: str, first: str, **keywords: Any) -> str:
    named = [f"{name}={value!r}" for name, value in keywords.items() if value is not None]
    return f"{function}({', '.join([first, *named])})"


def _quoted(code: str) -> str:
    # Double quotes around Python's single ones read better; the shell must find nothing to expand in them.
    return f'"{code}"' if not set(code) & set('"$`\\!') else shlex.quote(code)


def _python() -> str:
    found = shutil.which("python")
    same = found is not None and Path(found).absolute() == Path(sys.executable).absolute()
    return "python" if same else shlex.quote(sys.executable)
