"""`import`: add a bundle to a cache after checking all of it. Prints nothing; importable without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cgtool.errors import RefusedError
from cgtool.plan.grammar import Record
from cgtool.store import signatures
from cgtool.store.bundle.install import Outcome, check_fits, check_pickles, install, unpacking_folder
from cgtool.store.bundle.reading import OpenBundle, Source
from cgtool.store.bundle.unpack import EntryContent, OnMember, unpack
from cgtool.store.bundle_index import Limits
from cgtool.store.layout import CacheLayout, short

SCHEMA = 1


class ImportedRank(Record, frozen=True, kw_only=True):
    """One rank and prefix of an imported entry."""

    rank: int
    prefix: str
    model: str


class ImportedEntry(Record, frozen=True, kw_only=True, omit_defaults=False):
    """One entry of the bundle, and the result of importing it."""

    hash: str
    #: "new", "merged" with the existing entry, or the "same" as it.
    outcome: Outcome
    #: How many rows were new to the cache.
    rows_added: int
    #: How many of its artifacts the bundle holds.
    artifacts: int
    size_bytes: int
    #: The verdict on this machine; None if not checked.
    verdict: str | None
    ranks: tuple[ImportedRank, ...]


class ImportReport(Record, frozen=True, kw_only=True, omit_defaults=False):
    """What was imported; its fields are those that `import --json` prints."""

    schema: int = SCHEMA
    #: The path or URL of the bundle; "-" for a stream.
    source: str
    root: str
    #: The id of the trusted key that signed it; None if no signature was required.
    signed_by: str | None
    #: The total size of all members.
    size_bytes: int
    entries: tuple[ImportedEntry, ...]
    warnings: tuple[str, ...]


def import_bundle(
    source: Source,
    *,
    cache_dir: Path | None = None,
    trust: bool = False,
    require_signature: Sequence[Path] = (),
    any_machine: bool = False,
    replace: bool = False,
    max_bytes: int = Limits().max_bytes,
    max_ratio: float = Limits().max_ratio,
    on_member: OnMember | None = None,
) -> ImportReport:
    """Check a bundle and add it to a cache; if the check fails, the cache is unchanged.

    Args:
        source: A file, a folder, or an open stream.
        cache_dir: The cache's root; None means the one that `warm` fills.
        trust: Whether the user trusts unsigned native code.
        require_signature: Files and folders with public keys, one of which must have signed the bundle.
        any_machine: Whether to import entries that this machine cannot load.
        replace: Whether the bundle's plan replaces a different plan of the same hash in the cache.
        max_bytes: The maximum total size of all members.
        max_ratio: The maximum decompression ratio.
        on_member: Called with the number of unpacked members and their total, before anything is installed.

    Raises:
        RefusedError: The bundle is untrusted, incomplete or unsupported on this machine; see `reason`.
        UsageError: No public keys were found in the named files and folders.
        CacheError: The bundle cannot be read, or the cache cannot be written.
    """
    keys = signatures.load_public_keys(require_signature) if require_signature else None
    if keys is None and not trust:
        what = source.what if isinstance(source, OpenBundle) else "A bundle"
        message = (
            f"{what} holds native code that runs in your process. Pass --trust if you trust it, or better, check who "
            "made it with --require-signature KEYS."
        )
        raise RefusedError(message, reason="not_trusted", path=_source_name(source))
    layout = CacheLayout.at(cache_dir)
    limits = Limits(max_bytes=max_bytes, max_ratio=max_ratio)
    with unpacking_folder(layout) as folder:
        unpacked = unpack(source, folder, keys=keys, limits=limits, on_member=on_member)
        warnings = list(check_pickles(unpacked.entries, trust=trust))
        verdicts = {} if any_machine else {content.hash: _verdict(content, warnings) for content in unpacked.entries}
        check_fits(layout, unpacked, replacing=replace)
        installed = install(layout, unpacked, replacing=replace)
    return ImportReport(
        source=_source_name(source),
        root=str(layout.root),
        signed_by=unpacked.signed_by,
        size_bytes=unpacked.index.size_bytes,
        entries=tuple(
            ImportedEntry(
                hash=content.hash,
                outcome=outcome,
                rows_added=rows,
                artifacts=len(content.artifacts),
                size_bytes=sum(content.artifacts.values()),
                verdict=verdicts.get(content.hash),
                ranks=tuple(ImportedRank(rank=m.rank, prefix=m.prefix, model=m.model) for m in content.manifests),
            )
            for content, (outcome, rows) in zip(unpacked.entries, installed, strict=True)
        ),
        warnings=tuple(warnings),
    )


def _source_name(source: Source) -> str:
    return str(source) if isinstance(source, Path) else getattr(source, "url", "-")


def _verdict(content: EntryContent, warnings: list[str]) -> str:
    from cgtool.store.machine import this_machine
    from cgtool.toolkit.verify.verdict import verdict

    found = verdict(content.key, this_machine())
    reasons = "; ".join(found.reasons)
    if found.level == "unsupported":
        message = (
            f"The entry {short(content.hash)} cannot be loaded on this machine: {reasons}. Nothing was changed. "
            "Warm the model for this machine, or import the entry anyway with --any-machine."
        )
        raise RefusedError(message, reason="unsupported", path=content.hash, actual=list(found.reasons))
    if found.level == "loads":
        warnings.append(f"The entry {short(content.hash)} loads, but recompiling it is advised: {reasons}.")
    return str(found.level)
