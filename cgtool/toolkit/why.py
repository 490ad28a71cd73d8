"""`why`: would a model hit here, and if not, which entry is nearest and what keeps it from serving.

Owns the answer (`WhyReport`). Prints nothing. Importable without torch: building the model needs it, and is imported as
the command runs.
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

#: A layer's number within a name: "layers.0.eps".
_LAYER = re.compile(r"(?<=\.)\d+(?=\.[A-Za-z_])")


class EntryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What people want to know of an entry; times are in UTC, and the model's name is None where none can be read."""

    hash: str
    rank: int
    prefix: str
    model: str | None
    created: str | None
    last_used: str | None
    hits: int


class Reason(msgspec.Struct, frozen=True):
    """Why an entry does not serve the model."""

    #: For people; holds words of models and caches as they stand.
    sentence: str
    #: More lines: what changed in a file, what else changed alike.
    detail: tuple[str, ...] = ()


class WhyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a model would hit, and why not; its fields are the document that `why --json` prints."""

    schema: int = SCHEMA
    root: str
    hit: bool
    #: The entry that serves the model; None for a miss.
    entry: EntryFacts | None = None
    #: Of a miss, the entry that needs the fewest changes; None where there is none of this model.
    nearest: EntryFacts | None = None
    #: Why `nearest` does not serve it, the guilty first; empty for a hit.
    reasons: tuple[Reason, ...] = ()
    #: The shell line that mends a miss; "" for a hit, and where the model was given as an object.
    run: str = ""
    #: Of a miss, entries of this very model that prunes removed; None where they removed none.
    pruned: Pruned | None = None


def why(
    choice: ModelChoice,
    *,
    config: CompilationConfig,
    rank: int | None = None,
    arguments: Sequence[str] = (),
    on_event: OnEvent = ignore,
) -> WhyReport:
    """Say whether the cache serves a model, and if not, why; compiles and writes nothing.

    Args:
        choice: The model.
        config: What is to be compiled and how, and where the cache lies.
        rank: This process's place in a model-parallel group; None takes the environment's word.
        arguments: MODEL and the options as `cgtool warm` would take them, for the line that mends a miss.
        on_event: Told of each phase as it goes.

    Returns:
        The entry that serves it, or the nearest one and what keeps it from that.

    Raises:
        UsageError: The cache is switched off.
        ModelError: MODEL could not be found or built.
        CacheError: The cache cannot be read.
    """
    require_cache(config)
    report = why_spec(choice.build(on_event=on_event), config=config, rank=rank)
    return report if report.hit else replace(report, run=shlex.join(["cgtool", "warm", *arguments]))


def why_spec(
    spec: ModelSpec, *, config: CompilationConfig, cache_dir: Path | None = None, rank: int | None = None
) -> WhyReport:
    """Say whether the cache serves a model that is built already; see `why`."""
    # Imports torch: seconds that `--help` and wrong usage need not wait for.
    from cgtool.compiler.pipeline import warm
    from cgtool.runtime.factors import Live

    layout = CacheLayout.at(cache_dir if cache_dir is not None else config.cache_dir or None)
    place = environment().rank if rank is None else rank
    try:
        result = warm(spec, config=config, cache_dir=layout.root, rank=place, check=True)
    except CacheMissError as miss:
        nearest = None if miss.nearest is None else RankName(hash=miss.nearest, rank=place, prefix=spec.prefix)
        return WhyReport(
            root=str(layout.root),
            hit=False,
            nearest=None if nearest is None else _facts(layout, nearest),
            reasons=_reasons(miss.reasons or (str(miss),), EntrySide(layout, nearest.hash) if nearest else None),
            pruned=pruned(layout, Live.of(spec.module).lookup),
        )
    entry = _facts(layout, result.manifest.name)
    return WhyReport(root=str(layout.root), hit=True, entry=entry)


def _facts(layout: CacheLayout, name: RankName) -> EntryFacts:
    usage = StateStore(layout).usage(name)
    try:
        manifest = read_manifest(layout, name)
    except CacheError:
        manifest = None  # a reason says what is wrong with it
    model, created = (None, None) if manifest is None else (manifest.model, manifest.created)
    return EntryFacts(**asdict(name), model=model, created=created, last_used=usage.last_used, hits=usage.hits)


def _reasons(sentences: Sequence[str], nearest: EntrySide | None) -> tuple[Reason, ...]:
    """Return reasons with the lines of files that changed, those told once that say the same of several layers."""
    known = _of_files(nearest) if nearest is not None else {}
    # The adaptor says whether Inductor is used.
    names_adaptor = any(sentence.startswith("config.adaptor ") for sentence in sentences)
    groups: dict[str, list[str]] = {}
    for sentence in sentences:
        if not (names_adaptor and sentence.startswith("config.use_inductor ")):
            groups.setdefault(_LAYER.sub("#", sentence), []).append(sentence)
    return tuple(
        known.get(first) or Reason(first + (f" (and {len(others)} more like it)" if others else ""), tuple(others))
        for first, *others in groups.values()
    )


def _of_files(nearest: EntrySide) -> dict[str, Reason]:
    """Return the reasons that source files are, with their lines, by the sentence without them."""
    try:
        stored = nearest.key.value("sources") or {}
    except CacheError:
        return {}
    found = {}
    for difference in difference_between("sources", stored, source_digests(stored)):
        module = difference.path.removeprefix("sources.")
        text = _text_now(module)
        if text is not None and module in stored:
            changed = with_lines(
                Difference(what="source", path=difference.path, old=difference.old, new=difference.new, sentence=""),
                in_file_now(module, nearest.lines, text),
            )
            found[difference.sentence] = Reason(changed.sentence, changed.detail)
    return found


def _text_now(module: str) -> str | None:
    """Return the file of a module as it is on the disk; None where the module is not imported or has no such file."""
    file = getattr(sys.modules.get(module), "__file__", None)
    try:
        return None if file is None else Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
