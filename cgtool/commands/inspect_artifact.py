"""`inspect artifact`: what one artifact holds, and which pieces it serves. Prints nothing; importable without torch.

An artifact is matched to its digest and read as data: nothing of it is unpickled, linked or executed. JSON::

    {"schema": 1, "root": str, "digest": sha256, "kind": str, "size_bytes": int, "uses": [use...],
     "num_kernels": int | null, "kernels": [kernel...], "target": {str: json}, "compiler": {str: json},
     "members": [{"name": str, "size_bytes": int}...], "sources": [{"language": str, "text": str}...],
     "warnings": [str...]}
    use    = {"hash", "rank", "prefix", "variant", "piece_index", "shape", "adaptor", "compile_secs", "kernels",
              "guards": [expr...], "proved", "proof_gap"}
    kernel = {"name": str, "registers": int | null, "shared_bytes": int | null, "constant_bytes": int | null}

`null` is unknown. `shared_bytes` is static shared memory as its section has it, the driver's own kilobyte included.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgtool.cache.contents import Contents, contents_of
from cgtool.cache.files import telling
from cgtool.cache.key import read_key
from cgtool.cache.layout import ARTIFACTS, CacheLayout, RankName, resolve_root, short
from cgtool.cache.manifest import ManifestRow, read_manifest
from cgtool.cache.objects import ObjectStore
from cgtool.cache.shapes import shape_to_json, shape_words
from cgtool.commands.selection import beginning, one_hash, published
from cgtool.errors import CacheError, UsageError

SCHEMA = 1

#: Factors of the key that say what compiled an artifact, and for what.
COMPILERS = ("torch", "triton", "compiler", "inductor")
TARGET = "target"

_DIGITS = re.compile(r"[0-9a-f]{1,64}\Z")
_PIECE = re.compile(r"([0-9a-f]{1,64})/([0-9]{1,7})\Z")
_MOST_LISTED = 20


@dataclass(frozen=True, kw_only=True)
class ArtifactOptions:
    """What the user asked of `inspect artifact`.

    Args:
        artifact: The beginning of a digest, or the beginning of an entry's hash, "/" and a piece.
        shape: Of a piece: for which shape, as `inspect entry` writes it; None where it has one.
        variant: Of a piece: which variant; None where the piece has one artifact.
        rank: Of a piece: which rank; None for any.
        prefix: Of a piece: which compiled part; None for any.
        cache_dir: The cache's root; None means the cache that `warm` fills.
    """

    artifact: str
    shape: str | None = None
    variant: int | None = None
    rank: int | None = None
    prefix: str | None = None
    cache_dir: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Use:
    """One row of one manifest that names the artifact."""

    name: RankName
    row: ManifestRow

    def to_json(self) -> dict[str, Any]:
        """Return its JSON form."""
        row = self.row
        return {
            "hash": self.name.hash,
            "rank": self.name.rank,
            "prefix": self.name.prefix,
            "variant": row.variant,
            "piece_index": row.piece_index,
            "shape": shape_to_json(row.shape),
            "adaptor": row.adaptor,
            "compile_secs": row.compile_secs,
            "kernels": row.kernels,
            "guards": list(row.guards),
            "proved": row.proved,
            "proof_gap": row.proof_gap,
        }


@dataclass(frozen=True, kw_only=True)
class ArtifactReport:
    """What an artifact holds.

    Args:
        root: The cache's root.
        digest: The SHA-256 of its bytes.
        kind: Its kind.
        uses: The rows that name it.
        contents: What is in it.
        target: What it was compiled for, as the entry's key and the artifact itself say.
        compiler: What compiled it, likewise.
        warnings: What could not be read along.
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
        return max((use.row.kernels for use in self.uses), default=None)

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
            "kernels": [kernel.to_json() for kernel in self.contents.kernels],
            "target": self.target,
            "compiler": self.compiler,
            "members": [{"name": name, "size_bytes": size} for name, size in self.contents.members],
            "sources": [{"language": source.language, "text": source.text} for source in self.contents.sources],
            "warnings": list(self.warnings),
        }


@telling()
def inspect_artifact(options: ArtifactOptions) -> ArtifactReport:
    """Show what an artifact holds.

    Args:
        options: Which artifact.

    Raises:
        UsageError: No artifact fits, or several do; the message lists them.
        CacheCorruptError: Its bytes differ from its digest.
        CacheError: The cache is empty or cannot be read.
    """
    root = resolve_root(options.cache_dir)
    layout = CacheLayout(root=root)
    warnings: list[str] = []
    hashes, digest, kind = _chosen(layout, options, warnings)
    uses = tuple(use for use in _uses(layout, hashes, warnings) if (use.row.digest, use.row.kind) == (digest, kind))
    contents = contents_of(ObjectStore(layout.entry_dir(hashes[0])).get(digest, kind), kind)
    target, compiler = _factors(layout, hashes[0], warnings)
    return ArtifactReport(
        root=root,
        digest=digest,
        kind=kind,
        uses=uses,
        contents=contents,
        target={**target, **contents.target},
        compiler={**compiler, **({"native": contents.compiler} if contents.compiler else {})},
        warnings=(*warnings, *contents.warnings),
    )


def _chosen(layout: CacheLayout, options: ArtifactOptions, warnings: list[str]) -> tuple[list[str], str, str]:
    """Return the entries that hold the artifact, its digest and its kind."""
    wanted = options.artifact.lower()
    piece = _PIECE.match(wanted)
    if piece is not None:
        hash_ = one_hash(layout, piece[1])
        uses = [use for use in _uses(layout, [hash_], warnings) if _fits(use, int(piece[2]), options)]
        found = dict.fromkeys((use.row.digest, use.row.kind) for use in uses)
        if len(found) == 1:
            return ([hash_], *next(iter(found)))
        raise _not_one_row(options, uses, list(_uses(layout, [hash_], [])))
    if _DIGITS.match(wanted) is None:
        message = (
            f"{options.artifact[:80]!r} names no artifact. Give the beginning of its digest, or of an entry's hash "
            "with a piece, such as 3f9a/2."
        )
        raise UsageError(message, actual=options.artifact)
    held = _artifacts(layout, wanted)
    if len(held) == 1:
        (digest, kind), hashes = next(iter(held.items()))
        return hashes, digest, kind
    advice = "Name one by more of its digest" if held else "cgtool inspect entry shows the digests of an entry"
    digests = [digest for digest, _ in held]
    listed = "".join(f"\n  {beginning(digest, digests)} {kind}" for digest, kind in list(held)[:_MOST_LISTED])
    what = f"{len(held)} artifacts fit" if held else "No artifact fits"
    raise UsageError(f"{what}. {advice}{':' if held else '.'}{listed}", path=layout.root, actual=options.artifact)


def _artifacts(layout: CacheLayout, digits: str) -> dict[tuple[str, str], list[str]]:
    """Return (digest, kind) → the entries that hold it, of all artifacts whose digest begins so."""
    found: dict[tuple[str, str], list[str]] = {}
    for hash_ in dict.fromkeys(name.hash for name in published(layout)):
        try:
            names = [path.name for path in (layout.entry_dir(hash_) / ARTIFACTS).iterdir()]
        except OSError:
            continue
        for name in names:
            digest, _, kind = name.partition(".")
            if digest.startswith(digits) and len(digest) == 64 and kind:  # noqa: PLR2004 - digits of a SHA-256
                found.setdefault((digest, kind), []).append(hash_)
    return dict(sorted(found.items()))


def _uses(layout: CacheLayout, hashes: Sequence[str], warnings: list[str]) -> Iterator[Use]:
    for hash_ in hashes:
        for name in layout.rank_names(hash_):
            try:
                manifest = read_manifest(layout, name)
            except CacheError as error:
                warnings.append(str(error))
                continue
            for row in () if manifest is None else manifest.rows:
                yield Use(name=name, row=row)


def _fits(use: Use, piece: int, options: ArtifactOptions) -> bool:
    row = use.row
    return (
        row.piece_index == piece
        and options.shape in (None, shape_words(row.shape))
        and options.variant in (None, row.variant)
        and options.rank in (None, use.name.rank)
        and options.prefix in (None, use.name.prefix)
    )


def _not_one_row(options: ArtifactOptions, fitting: Sequence[Use], all_of_it: Sequence[Use]) -> UsageError:
    shown = fitting or all_of_it
    listed = [
        f"  {short(use.row.digest)}  piece {use.row.piece_index}, shape {shape_words(use.row.shape)}, variant "
        f"{use.row.variant}, rank {use.name.rank}, {use.name.prefix}"
        for use in shown[:_MOST_LISTED]
    ]
    if len(shown) > _MOST_LISTED:
        listed.append(f"  and {len(shown) - _MOST_LISTED} more, which cgtool inspect entry shows")
    what = "Several artifacts of this piece fit" if fitting else "No artifact of this entry fits"
    advice = "Name one of these by its digest, or by --shape, --variant, --rank and --prefix"
    return UsageError("\n".join([f"{what}. {advice}:", *listed]), actual=options.artifact)


def _factors(layout: CacheLayout, hash_: str, warnings: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what an entry's key says of the target and of the compilers."""
    try:
        key = read_key(layout, hash_)
    except CacheError as error:
        warnings.append(str(error))
        key = None
    if key is None:
        return {}, {}
    target = key.value(TARGET)
    compilers = {name: value for name in COMPILERS if (value := key.value(name)) not in (None, {})}
    return target if isinstance(target, dict) else {}, compilers
