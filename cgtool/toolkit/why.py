"""`why`: whether a model would hit, and if not, which entry is nearest and why it does not match.

Prints nothing. Importable without torch, which is imported only when the model is built.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import asdict, replace

from cgtool.config import CompilationConfig
from cgtool.errors import CacheError, CacheMissError
from cgtool.events import OnEvent, ignore
from cgtool.guards.files import source_digests
from cgtool.host import environment
from cgtool.model import ModelSpec
from cgtool.store.key import difference_between
from cgtool.store.layout import CacheLayout, RankName
from cgtool.store.lookup import StateStore
from cgtool.store.pruned import Pruned, pruned
from cgtool.store.records import read_manifest
from cgtool.toolkit.diff.entries import EntrySide
from cgtool.toolkit.diff.records import Difference, in_file_now, with_lines
from cgtool.toolkit.model_choice import ModelChoice, require_cache

SCHEMA = 1

#: A layer's index within a name: "layers.0.eps".
_LAYER_INDEX = re.compile(r"(?<=\.)\d+(?=\.[A-Za-z_])")


class EntryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about an entry for display; times are in UTC."""

    hash: str
    rank: int
    prefix: str
    #: None, like `created`, if the manifest cannot be read.
    model: str | None
    created: str | None
    last_used: str | None
    hits: int


class Reason(msgspec.Struct, frozen=True):
    """Why an entry does not match the model."""

    #: May hold text from the model or the cache, not sanitized for a terminal.
    sentence: str
    #: More lines: the changes in a file, or the reasons that are alike.
    detail: tuple[str, ...] = ()


class WhyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a model would hit, and why not; the fields are the document that `why --json` prints."""

    schema: int = SCHEMA
    root: str
    hit: bool
    #: The matching entry; None for a miss.
    entry: EntryFacts | None = None
    #: For a miss, the entry with the fewest differences; None if the cache has no entry of this model.
    nearest: EntryFacts | None = None
    #: Why `nearest` does not match, the root cause first; empty for a hit.
    reasons: tuple[Reason, ...] = ()
    #: The shell command that fixes a miss; "" for a hit, and if the model was passed as an object.
    run: str = ""
    #: For a miss, the entries of this model that `prune` removed; None if there are none.
    pruned: Pruned | None = None


def why(
    choice: ModelChoice,
    *,
    config: CompilationConfig,
    rank: int | None = None,
    arguments: Sequence[str] = (),
    on_event: OnEvent = ignore,
) -> WhyReport:
    """Report whether a model would hit, and if not, why; compiles and writes nothing.

    Args:
        choice: The model.
        config: The compilation configuration and the cache directory.
        rank: This process's rank in a model-parallel group; None takes it from the environment.
        arguments: MODEL and options of the `cgtool warm` command that fixes a miss.
        on_event: Called with progress events.

    Returns:
        The matching entry, or the nearest one and why it does not match.

    Raises:
        UsageError: The cache is disabled.
        ModelError: MODEL cannot be found or built.
        CacheError: The cache cannot be read.
    """
    require_cache(config)
    report = why_spec(choice.build(on_event=on_event), config=config, rank=rank)
    return report if report.hit else replace(report, run=shlex.join(["cgtool", "warm", *arguments]))


def why_spec(
    spec: ModelSpec, *, config: CompilationConfig, cache_dir: Path | None = None, rank: int | None = None
) -> WhyReport:
    """Report whether a model that is already built would hit; see `why`."""
    # Imported late: torch takes seconds to import, and --help and usage errors do not need it.
    from cgtool.compiler.pipeline import warm
    from cgtool.runtime.factors import Live

    layout = CacheLayout.at(cache_dir if cache_dir is not None else config.cache_dir or None)
    rank = environment().rank if rank is None else rank
    try:
        result = warm(spec, config=config, cache_dir=layout.root, rank=rank, check=True)
    except CacheMissError as miss:
        nearest = None if miss.nearest is None else RankName(hash=miss.nearest, rank=rank, prefix=spec.prefix)
        return WhyReport(
            root=str(layout.root),
            hit=False,
            nearest=None if nearest is None else _facts(layout, nearest),
            reasons=_reasons(miss.reasons or (str(miss),), EntrySide(layout, nearest.hash) if nearest else None),
            pruned=pruned(layout, Live.of(spec.module).lookup),
        )
    return WhyReport(root=str(layout.root), hit=True, entry=_facts(layout, result.manifest.name))


def _facts(layout: CacheLayout, name: RankName) -> EntryFacts:
    usage = StateStore(layout).usage(name)
    try:
        manifest = read_manifest(layout, name)
    except CacheError:
        manifest = None  # one of the reasons reports the error
    model, created = (None, None) if manifest is None else (manifest.model, manifest.created)
    return EntryFacts(**asdict(name), model=model, created=created, last_used=usage.last_used, hits=usage.hits)


def _reasons(sentences: Sequence[str], nearest: EntrySide | None) -> tuple[Reason, ...]:
    """Add changed source lines to the reasons, and merge those that differ only in the layer."""
    source_reasons = _source_reasons(nearest) if nearest is not None else {}
    # `use_inductor` follows from the adaptor.
    names_adaptor = any(sentence.startswith("config.adaptor ") for sentence in sentences)
    groups: dict[str, list[str]] = {}
    for sentence in sentences:
        if not (names_adaptor and sentence.startswith("config.use_inductor ")):
            groups.setdefault(_LAYER_INDEX.sub("#", sentence), []).append(sentence)
    return tuple(
        source_reasons.get(first)
        or Reason(first + (f" (and {len(others)} more like it)" if others else ""), tuple(others))
        for first, *others in groups.values()
    )


def _source_reasons(nearest: EntrySide) -> dict[str, Reason]:
    """Map each sentence about a changed source file to a reason that names the changed lines."""
    try:
        stored = nearest.key.value("sources") or {}
    except CacheError:
        return {}
    reasons = {}
    for difference in difference_between("sources", stored, source_digests(stored)):
        module = difference.path.removeprefix("sources.")
        text = _source_text(module)
        if text is not None and module in stored:
            changed = with_lines(
                Difference(what="source", path=difference.path, old=difference.old, new=difference.new, sentence=""),
                in_file_now(module, nearest.lines, text),
            )
            reasons[difference.sentence] = Reason(changed.sentence, changed.detail)
    return reasons


def _source_text(module: str) -> str | None:
    """Read the source file of a module; None if the module is not imported or its file cannot be read."""
    file = getattr(sys.modules.get(module), "__file__", None)
    try:
        return None if file is None else Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
