"""`inspect artifact`: what one artifact holds, and which pieces it serves. Prints nothing; importable without torch.

An artifact of ours is matched to its digest; each is read as data, so nothing of it is unpickled, linked or executed.
JSON::

    {"schema": 2, "root": str, "digest": sha256, "kind": str, "size_bytes": int, "uses": [use...],
     "num_kernels": int | null, "kernels": [kernel...], "target": {str: json}, "compiler": {str: json},
     "members": [{"name": str, "size_bytes": int}...], "sources": [{"language": str, "text": str}...],
     "warnings": [str...]}
    use    = {"hash", "rank", "prefix", "variant", "piece_index", "shape", "adaptor", "tuned", "compile_secs",
              "kernels", "guards": [expr...], "proved", "proof_gap"}
    kernel = {"name": str, "registers": int | null, "shared_bytes": int | null, "constant_bytes": int | null}

and of another system's, `artifact` being as in `inspect cache` (`cgtool.toolkit.foreign.records`)::

    {"schema": 2, "system": str, "root": str, "entry": str, "artifact": {...}, "kernels": [kernel...],
     "facts": {str: json}, "compiler": str | null, "members": [...], "sources": [...], "warnings": [str...]}

`null` is unknown. `shared_bytes` is static shared memory as its section has it, the driver's own kilobyte included.
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
from cgtool.toolkit.foreign.tree import shown
from cgtool.toolkit.selection import abbreviate, published_ranks, resolve_entry, selection_error

SCHEMA = 2

#: Factors of the key that say what compiled an artifact.
COMPILERS = ("torch", "triton", "compiler", "inductor")

_DIGITS = re.compile(r"[0-9a-f]{1,64}\Z")
_PIECE = re.compile(r"([0-9a-f]{1,64})/([0-9]{1,7})\Z")
_PIECE_NUMBER = re.compile(r"[0-9]{1,9}")
_NAME_FIELDS = ("hash", "rank", "prefix")
_ROW_FIELDS = ("variant", "piece_index", "shape", "adaptor", "tuned")
_ARTIFACT_FIELDS = ("compile_secs", "kernels", "guards", "proved", "proof_gap")
#: What Triton's metadata says of how a kernel is launched and what it takes.
_LAUNCH = (
    *("name", "target", "num_warps", "num_ctas", "num_stages", "warp_size", "waves_per_eu", "maxnreg", "shared"),
    *("tmem_size", "global_scratch_size", "profile_scratch_size", "triton_version"),
)
#: Of what compilers wrote, by suffix.
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
    """What an artifact holds, and which rows name it.

    `target` and `compiler` are as the entry's key and the artifact itself say.
    """

    root: Path
    digest: str
    kind: str
    uses: tuple[Use, ...]
    contents: Contents
    target: dict[str, Any]
    compiler: dict[str, Any]
    warnings: tuple[str, ...]

    @property
    def num_kernels(self) -> int | None:
        """How many kernels it holds, as its compiler counted them; None where no manifest names it."""
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
            **_inside(self.contents),
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True, kw_only=True)
class ForeignArtifactReport:
    """What one artifact of an entry of another system's cache holds."""

    cache: ForeignCache
    entry: ForeignEntry
    artifact: ForeignArtifact
    contents: Contents

    @property
    def facts(self) -> dict[str, Any]:
        """What the system wrote of a kernel, and the code of the machine that it is for."""
        return {name: self.entry.kernel[name] for name in _LAUNCH if name in self.entry.kernel} | self.contents.target

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Those that are named in it, or the one that its entry is."""
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
            **_inside(self.contents),
            "warnings": list(self.contents.warnings),
        }


def _inside(contents: Contents) -> dict[str, Any]:
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
    """Show what an artifact holds.

    Args:
        artifact: The beginning of its digest, or the beginning of an entry's hash, "/" and a piece. In another
            system's cache: the beginning of its file's name or of its path below the entry, or the beginning of an
            entry's name, "/" and a piece or a path.
        shape: Of a piece: for which shape, as `inspect entry` writes it; None where it has one.
        variant: Of a piece: which variant; None where the piece has one artifact.
        rank: Of a piece: which rank; None for any.
        prefix: Of a piece: which compiled part; None for any.
        cache_dir: The cache's root; None means the cache that `warm` fills.

    Raises:
        UsageError: No artifact fits, or several do; the message lists them.
        CacheCorruptError: Its bytes differ from its digest.
        CacheError: The cache is empty or cannot be read.
    """
    wanted_shape = None if shape is None else parse_shape(shape)
    cache = read_foreign(cache_dir)
    if cache is not None:
        if variant is not None:
            raise UsageError("Entries of other systems have no variants. Leave --variant out.", actual=variant)

        def fits(artifact: ForeignArtifact) -> bool:
            is_shape = wanted_shape is None or (
                artifact.shape is not None and shape_matches(artifact.shape, wanted_shape)
            )
            is_rank = rank is None or artifact.rank.partition("_")[0] == str(rank)
            return is_shape and is_rank and prefix in (None, artifact.prefix)

        return _inspect_foreign(cache, artifact, fits)

    def serves(use: Use) -> bool:
        is_shape = wanted_shape is None or shape_matches(use.row.shape, wanted_shape)
        is_place = variant in (None, use.row.variant) and rank in (None, use.name.rank)
        return is_shape and is_place and prefix in (None, use.name.prefix)

    layout = CacheLayout.at(cache_dir)
    warnings: list[str] = []
    hashes, digest, kind = _chosen(layout, artifact, serves, warnings)
    uses = tuple(use for use in _uses(layout, hashes, warnings) if use.row.artifact.file == f"{digest}.{kind}")
    contents = contents_of(ObjectStore(layout.entry_dir(hashes[0])).get(digest, kind), kind)
    held = {source.text for source in contents.sources}
    generated = (  # what the compiler wrote and the artifact does not hold, where an entry keeps it
        Source(language=_LANGUAGES.get(Path(name).suffix, "text"), text=text)
        for name, text in generated_texts(layout, digest).items()
        if text not in held
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


def _chosen(
    layout: CacheLayout, artifact: str, serves: Callable[[Use], bool], warnings: list[str]
) -> tuple[list[str], str, str]:
    """Return the entries that hold the artifact, its digest and its kind."""
    wanted = artifact.lower()
    piece = _PIECE.match(wanted)
    if piece is not None:
        hash_ = resolve_entry(layout, piece[1])
        every = list(_uses(layout, [hash_], warnings))
        uses = [use for use in every if use.row.piece_index == int(piece[2]) and serves(use)]
        found = dict.fromkeys((use.row.artifact.digest, use.row.artifact.kind) for use in uses)
        if len(found) == 1:
            return ([hash_], *next(iter(found)))
        listed = [
            f"{short(use.row.artifact.digest)}  piece {use.row.piece_index}, shape {shape_text(use.row.shape)}, "
            f"variant {use.row.variant}, rank {use.name.rank}, {use.name.prefix}"
            for use in uses or every
        ]
        what = "Several artifacts of this piece fit" if uses else "No artifact of this entry fits"
        message = f"{what}. Name one of these by its digest, or by --shape, --variant, --rank and --prefix"
        raise selection_error(message, listed, more="entry", actual=artifact)
    if _DIGITS.match(wanted) is None:
        message = (
            f"{artifact[:80]!r} names no artifact. Give the beginning of its digest, or of an entry's hash with a "
            "piece, such as 3f9a/2."
        )
        raise UsageError(message, actual=artifact)
    held = _artifacts(layout, wanted)
    if len(held) == 1:
        (digest, kind), hashes = next(iter(held.items()))
        return hashes, digest, kind
    advice = "Name one by more of its digest" if held else "cgtool inspect entry shows the digests of an entry"
    listed = [f"{abbreviate(digest, [other for other, _ in held])} {kind}" for digest, kind in held]
    what = f"{len(held)} artifacts fit" if held else "No artifact fits"
    raise selection_error(f"{what}. {advice}", listed, more="entry", path=layout.root, actual=artifact)


def _artifacts(layout: CacheLayout, digits: str) -> dict[tuple[str, str], list[str]]:
    """Return (digest, kind) → the entries that hold it, of all artifacts whose digest begins so."""
    found: dict[tuple[str, str], list[str]] = {}
    for hash_ in dict.fromkeys(name.hash for name in published_ranks(layout)):
        for name in view_entry(layout, hash_).artifacts:
            digest, _, kind = name.partition(".")
            if digest.startswith(digits) and is_hash(digest) and kind:
                found.setdefault((digest, kind), []).append(hash_)
    return dict(sorted(found.items()))


def _uses(layout: CacheLayout, hashes: Sequence[str], warnings: list[str]) -> Iterator[Use]:
    for hash_ in hashes:
        entry = view_entry(layout, hash_)
        warnings += map(str, entry.problems)
        yield from (Use(name=manifest.name, row=row) for manifest in entry.manifests for row in manifest.rows)


def _factors(layout: CacheLayout, hash_: str, warnings: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what an entry's key says of the target and of the compilers."""
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


def _inspect_foreign(cache: ForeignCache, asked: str, fits: Callable[[ForeignArtifact], bool]) -> ForeignArtifactReport:
    there = [(entry, artifact) for entry in cache.entries for artifact in entry.artifacts]
    fitting = [(entry, artifact) for entry, artifact in there if _is_named(entry, artifact, asked) and fits(artifact)]
    exact = [pair for pair in fitting if asked in (pair[1].path, f"{pair[0].name}/{pair[1].path}")]
    chosen = exact if len(exact) == 1 else fitting
    if len(chosen) != 1:
        what = "Several artifacts fit" if fitting else "No artifact fits"
        listed = [shown(f"{entry.name}/{artifact.path}") for entry, artifact in fitting or there]
        message = f"{what}. Name one of these, or choose by --shape, --rank and --prefix"
        raise selection_error(message, listed, more="entry", actual=asked)
    entry, artifact = chosen[0]
    contents = foreign_contents(entry, artifact)
    return ForeignArtifactReport(cache=cache, entry=entry, artifact=artifact, contents=contents)


def _is_named(entry: ForeignEntry, artifact: ForeignArtifact, asked: str) -> bool:
    beginning, _, piece = asked.rpartition("/")
    names = (entry.name, entry.name.rpartition("/")[2])
    number = int(piece) if beginning and _PIECE_NUMBER.fullmatch(piece) else None
    paths = (artifact.path, artifact.path.rpartition("/")[2], *(f"{name}/{artifact.path}" for name in names))
    return any(path.startswith(asked) for path in paths) or (
        number is not None and artifact.piece_index == number and any(name.startswith(beginning) for name in names)
    )
