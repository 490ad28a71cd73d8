"""`inspect artifact`: the contents of an artifact, and the pieces that it serves.

Prints nothing; importable without torch. The digest of a cgtool artifact is verified. Artifacts are read as data:
nothing is unpickled, linked or executed. JSON::

    {"schema": 2, "root": str, "digest": sha256, "kind": str, "size_bytes": int, "uses": [use...],
     "num_kernels": int | null, "kernels": [kernel...], "target": {str: json}, "compiler": {str: json},
     "members": [{"name": str, "size_bytes": int}...], "sources": [{"language": str, "text": str}...],
     "warnings": [str...]}
    use    = {"hash", "rank", "prefix", "variant", "piece_index", "shape", "adaptor", "tuned", "compile_secs",
              "kernels", "guards": [expr...], "proved", "proof_gap"}
    kernel = {"name": str, "registers": int | null, "shared_bytes": int | null, "constant_bytes": int | null}

JSON of another system's artifact; `artifact` is a record of `cgtool.toolkit.foreign.records`::

    {"schema": 2, "system": str, "root": str, "entry": str, "artifact": {...}, "kernels": [kernel...],
     "facts": {str: json}, "compiler": str | null, "members": [...], "sources": [...], "warnings": [str...]}

`null` means unknown. `shared_bytes` is the size of the static shared-memory section, which includes the kilobyte that
the driver reserves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cgtool.errors import CacheError, UsageError
from cgtool.plan.shapes import parse_shape, shape_matches, shape_text
from cgtool.store.compiled_code import Kernel, generated_texts
from cgtool.store.entry import ObjectStore
from cgtool.store.files import os_errors_as_cache_errors
from cgtool.store.key import read_key
from cgtool.store.layout import CacheLayout, RankName, is_hash, short
from cgtool.store.records import Row
from cgtool.store.walk import view_entry
from cgtool.toolkit.contents import Contents, Source, contents_of
from cgtool.toolkit.foreign.contents import foreign_contents
from cgtool.toolkit.foreign.detect import read_foreign
from cgtool.toolkit.foreign.records import ForeignArtifact, ForeignCache, ForeignEntry, foreign_json
from cgtool.toolkit.foreign.tree import display_text
from cgtool.toolkit.selection import abbreviate, published_ranks, resolve_entry, selection_error

SCHEMA = 2

#: Factors of the key that identify the compilers.
COMPILERS = ("torch", "triton", "compiler", "inductor")

_DIGITS = re.compile(r"[0-9a-f]{1,64}\Z")
_PIECE = re.compile(r"([0-9a-f]{1,64})/([0-9]{1,7})\Z")
_PIECE_NUMBER = re.compile(r"[0-9]{1,9}")
_NAME_FIELDS = ("hash", "rank", "prefix")
_ROW_FIELDS = ("variant", "piece_index", "shape", "adaptor", "tuned")
_ARTIFACT_FIELDS = ("compile_secs", "kernels", "guards", "proved", "proof_gap")
#: Fields of Triton's metadata on the launch and the resources of a kernel.
_LAUNCH_FIELDS = (
    *("name", "target", "num_warps", "num_ctas", "num_stages", "warp_size", "waves_per_eu", "maxnreg", "shared"),
    *("tmem_size", "global_scratch_size", "profile_scratch_size", "triton_version"),
)
#: Languages of generated files, by suffix.
_LANGUAGES = {".cpp": "cpp", ".cu": "cuda", ".h": "cpp", ".py": "python", ".json": "json"}


@dataclass(frozen=True, kw_only=True)
class Use:
    """One row of one manifest that names the artifact."""

    name: RankName
    row: Row

    def to_json(self) -> dict[str, Any]:
        """Return its JSON form."""
        parts = ((self.name, _NAME_FIELDS), (self.row, _ROW_FIELDS), (self.row.artifact, _ARTIFACT_FIELDS))
        return {field: getattr(record, field) for record, fields in parts for field in fields}


@dataclass(frozen=True, kw_only=True)
class ArtifactReport:
    """The contents of an artifact, and the rows that name it."""

    root: Path
    digest: str
    kind: str
    uses: tuple[Use, ...]
    contents: Contents
    #: From the entry's key and from the artifact, as is `compiler`.
    target: dict[str, Any]
    compiler: dict[str, Any]
    warnings: tuple[str, ...]

    @property
    def num_kernels(self) -> int | None:
        """The number of kernels that its compiler recorded; None if no manifest names it."""
        return max((use.row.artifact.kernels for use in self.uses), default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the document that `inspect artifact --json` prints."""
        return {
            "schema": SCHEMA,
            "root": str(self.root),
            "digest": self.digest,
            "kind": self.kind,
            "size_bytes": self.contents.size_bytes,
            "uses": [use.to_json() for use in self.uses],
            "num_kernels": self.num_kernels,
            "kernels": [asdict(kernel) for kernel in self.contents.kernels],
            "target": self.target,
            "compiler": self.compiler,
            **_contents_json(self.contents),
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True, kw_only=True)
class ForeignArtifactReport:
    """The contents of an artifact in another system's cache."""

    cache: ForeignCache
    entry: ForeignEntry
    artifact: ForeignArtifact
    contents: Contents

    @property
    def facts(self) -> dict[str, Any]:
        """The launch metadata of a kernel, and the target of native code."""
        metadata = self.entry.kernel
        return {name: metadata[name] for name in _LAUNCH_FIELDS if name in metadata} | self.contents.target

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels named in the artifact, or the kernel of its entry."""
        name = self.facts.get("name")
        return self.contents.kernels or ((Kernel(name=name),) if isinstance(name, str) else ())

    def to_json(self) -> dict[str, Any]:
        """Return the document that `inspect artifact --json` prints."""
        return {
            "schema": SCHEMA,
            "system": self.cache.system,
            "root": str(self.cache.root),
            "entry": self.entry.name,
            "artifact": foreign_json(self.artifact),
            "kernels": [asdict(kernel) for kernel in self.kernels],
            "facts": self.facts,
            "compiler": self.contents.compiler,
            **_contents_json(self.contents),
            "warnings": list(self.contents.warnings),
        }


def _contents_json(contents: Contents) -> dict[str, Any]:
    return {
        "members": [{"name": name, "size_bytes": size} for name, size in contents.members],
        "sources": [asdict(source) for source in contents.sources],
    }


@os_errors_as_cache_errors()
def inspect_artifact(
    artifact: str,
    *,
    shape: str | None = None,
    variant: int | None = None,
    rank: int | None = None,
    prefix: str | None = None,
    cache_dir: Path | None = None,
) -> ArtifactReport | ForeignArtifactReport:
    """Report the contents of an artifact.

    Args:
        artifact: An abbreviation of its digest, or an abbreviation of an entry's hash, "/" and a piece. In another
            system's cache: the start of its file name or of its path below the entry, or the start of an entry's name,
            "/" and a piece or a path.
        shape: The shape of the piece, as `inspect entry` writes it; None if it has only one.
        variant: The variant of the piece; None if it has only one artifact.
        rank: The rank of the piece; None for any.
        prefix: The compiled part of the piece; None for any.
        cache_dir: The cache's root; None means the default cache.

    Raises:
        UsageError: No artifact or several artifacts match; the message lists them.
        CacheCorruptError: Its bytes differ from its digest.
        CacheError: The cache is empty or cannot be read.
    """
    wanted_shape = None if shape is None else parse_shape(shape)
    cache = read_foreign(cache_dir)
    if cache is not None:
        if variant is not None:
            raise UsageError("Entries of other systems have no variants. Leave --variant out.", actual=variant)

        def matches_artifact(artifact: ForeignArtifact) -> bool:
            is_shape = wanted_shape is None or (
                artifact.shape is not None and shape_matches(artifact.shape, wanted_shape)
            )
            is_rank = rank is None or artifact.rank.partition("_")[0] == str(rank)
            return is_shape and is_rank and prefix in (None, artifact.prefix)

        return _inspect_foreign(cache, artifact, matches_artifact)

    def matches_use(use: Use) -> bool:
        is_shape = wanted_shape is None or shape_matches(use.row.shape, wanted_shape)
        is_place = variant in (None, use.row.variant) and rank in (None, use.name.rank)
        return is_shape and is_place and prefix in (None, use.name.prefix)

    layout = CacheLayout.at(cache_dir)
    warnings: list[str] = []
    hashes, digest, kind = _find_artifact(layout, artifact, matches_use, warnings)
    uses = tuple(use for use in _uses(layout, hashes, warnings) if use.row.artifact.file == f"{digest}.{kind}")
    contents = contents_of(ObjectStore(layout.entry_dir(hashes[0])).get(digest, kind), kind)
    texts = {source.text for source in contents.sources}
    generated = (  # generated code that an entry keeps beside the artifact
        Source(language=_LANGUAGES.get(Path(name).suffix, "text"), text=text)
        for name, text in generated_texts(layout, digest).items()
        if text not in texts
    )
    target, compiler = _factors(layout, hashes[0], warnings)
    return ArtifactReport(
        root=layout.root,
        digest=digest,
        kind=kind,
        uses=uses,
        contents=replace(contents, sources=(*contents.sources, *generated)),
        target={**target, **contents.target},
        compiler={**compiler, **({"native": contents.compiler} if contents.compiler else {})},
        warnings=(*warnings, *contents.warnings),
    )


def _find_artifact(
    layout: CacheLayout, artifact: str, matches: Callable[[Use], bool], warnings: list[str]
) -> tuple[list[str], str, str]:
    """Return the entries that hold the artifact, its digest and its kind."""
    lower = artifact.lower()
    piece = _PIECE.match(lower)
    if piece is not None:
        hash_ = resolve_entry(layout, piece[1])
        all_uses = list(_uses(layout, [hash_], warnings))
        uses = [use for use in all_uses if use.row.piece_index == int(piece[2]) and matches(use)]
        artifacts = dict.fromkeys((use.row.artifact.digest, use.row.artifact.kind) for use in uses)
        if len(artifacts) == 1:
            return ([hash_], *next(iter(artifacts)))
        listed = [
            f"{short(use.row.artifact.digest)}  piece {use.row.piece_index}, shape {shape_text(use.row.shape)}, "
            f"variant {use.row.variant}, rank {use.name.rank}, {use.name.prefix}"
            for use in uses or all_uses
        ]
        problem = "Several artifacts of this piece match" if uses else "No artifact of this entry matches"
        message = f"{problem}. Name one of these by its digest, or by --shape, --variant, --rank and --prefix"
        raise selection_error(message, listed, more="entry", actual=artifact)
    if _DIGITS.match(lower) is None:
        message = (
            f"{artifact[:80]!r} does not name an artifact. Give the start of its digest, or the start of an entry's "
            "hash with a piece, such as 3f9a/2."
        )
        raise UsageError(message, actual=artifact)
    holders = _artifacts_by_digest(layout, lower)
    if len(holders) == 1:
        (digest, kind), hashes = next(iter(holders.items()))
        return hashes, digest, kind
    advice = "Give more digits of one" if holders else "cgtool inspect entry shows the digests of an entry"
    listed = [f"{abbreviate(digest, [other for other, _ in holders])} {kind}" for digest, kind in holders]
    problem = f"{len(holders)} artifacts match" if holders else "No artifact matches"
    raise selection_error(f"{problem}. {advice}", listed, more="entry", path=layout.root, actual=artifact)


def _artifacts_by_digest(layout: CacheLayout, digits: str) -> dict[tuple[str, str], list[str]]:
    """Return (digest, kind) → hashes of the entries that hold it, for all digests that start with `digits`."""
    holders: dict[tuple[str, str], list[str]] = {}
    for hash_ in dict.fromkeys(name.hash for name in published_ranks(layout)):
        for name in view_entry(layout, hash_).artifacts:
            digest, _, kind = name.partition(".")
            if digest.startswith(digits) and is_hash(digest) and kind:
                holders.setdefault((digest, kind), []).append(hash_)
    return dict(sorted(holders.items()))


def _uses(layout: CacheLayout, hashes: Sequence[str], warnings: list[str]) -> Iterator[Use]:
    for hash_ in hashes:
        entry = view_entry(layout, hash_)
        warnings += map(str, entry.problems)
        yield from (Use(name=manifest.name, row=row) for manifest in entry.manifests for row in manifest.rows)


def _factors(layout: CacheLayout, hash_: str, warnings: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the target and the compilers from an entry's key."""
    try:
        key = read_key(layout, hash_)
    except CacheError as error:
        warnings.append(str(error))
        key = None
    if key is None:
        return {}, {}
    target = key.value("target")
    compilers = {name: value for name in COMPILERS if (value := key.value(name)) not in (None, {})}
    return target if isinstance(target, dict) else {}, compilers


def _inspect_foreign(
    cache: ForeignCache, name: str, matches: Callable[[ForeignArtifact], bool]
) -> ForeignArtifactReport:
    artifacts = [(entry, artifact) for entry in cache.entries for artifact in entry.artifacts]
    matching = [pair for pair in artifacts if _is_named(*pair, name) and matches(pair[1])]
    exact = [pair for pair in matching if name in (pair[1].path, f"{pair[0].name}/{pair[1].path}")]
    chosen = exact if len(exact) == 1 else matching
    if len(chosen) != 1:
        problem = "Several artifacts match" if matching else "No artifact matches"
        listed = [display_text(f"{entry.name}/{artifact.path}") for entry, artifact in matching or artifacts]
        message = f"{problem}. Name one of these, or choose by --shape, --rank and --prefix"
        raise selection_error(message, listed, more="entry", actual=name)
    entry, artifact = chosen[0]
    contents = foreign_contents(entry, artifact)
    return ForeignArtifactReport(cache=cache, entry=entry, artifact=artifact, contents=contents)


def _is_named(entry: ForeignEntry, artifact: ForeignArtifact, name: str) -> bool:
    """Return whether `name` abbreviates the artifact's path, or names the entry and the artifact's piece."""
    entry_start, _, piece = name.rpartition("/")
    entry_names = (entry.name, entry.name.rpartition("/")[2])
    number = int(piece) if entry_start and _PIECE_NUMBER.fullmatch(piece) else None
    paths = (artifact.path, artifact.path.rpartition("/")[2], *(f"{own}/{artifact.path}" for own in entry_names))
    return any(path.startswith(name) for path in paths) or (
        number is not None
        and artifact.piece_index == number
        and any(own.startswith(entry_start) for own in entry_names)
    )
