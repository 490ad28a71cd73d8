"""`import`: take a bundle into a cache, once all of it was checked. Prints nothing; importable without torch.

A bundle is unpacked in `torch_compile_cache/.import.<pid>.<token>.tmp/`, a cache root of its own that no reader looks
into, before any of it is believed. Its maker holds a lock on it, so that one which nobody holds was left by a killed
process and is removed by the next import.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from cgtool.errors import RefusedError
from cgtool.plan.grammar import Record
from cgtool.store import signatures
from cgtool.store.bundle_index import Limits, refused, shown
from cgtool.store.files import cache_error, discard, os_errors_as_cache_errors, sync_folder
from cgtool.store.layout import CacheLayout, resolve_root, short
from cgtool.store.leases import hold_folder, is_abandoned
from cgtool.toolkit.bundle.install import Outcome, check_fits, check_no_links, install
from cgtool.toolkit.bundle.unpack import EntryContent, unpack

SCHEMA = 1

_NAME = re.compile(r"\.import\.[0-9]+\.[0-9a-f]+\.tmp")


class ImportedRank(Record, frozen=True, kw_only=True):
    """One rank and prefix of an entry of the bundle."""

    rank: int
    prefix: str
    model: str


class ImportedEntry(Record, frozen=True, kw_only=True, omit_defaults=False):
    """One entry of the bundle, and what became of it.

    Args:
        hash: Its hash.
        outcome: "new", "merged" with what was there, or the "same" as it.
        rows_added: How many rows the cache did not have.
        artifacts: How many artifacts it has in the bundle.
        size_bytes: The size of those.
        verdict: What was said of this machine; None where nobody asked.
        ranks: Its ranks and prefixes.
    """

    hash: str
    outcome: Outcome
    rows_added: int
    artifacts: int
    size_bytes: int
    verdict: str | None
    ranks: tuple[ImportedRank, ...]


class ImportReport(Record, frozen=True, kw_only=True, omit_defaults=False):
    """What was imported; its fields are those that `import --json` prints.

    Args:
        source: The bundle; "-" for a stream.
        root: The cache's root.
        signed_by: The id of the trusted key that signed it; None where no keys were asked for.
        size_bytes: The size of all members together.
        entries: What became of each entry.
        warnings: What the user should know.
    """

    schema: int = SCHEMA
    source: str
    root: str
    signed_by: str | None
    size_bytes: int
    entries: tuple[ImportedEntry, ...]
    warnings: tuple[str, ...]


def import_bundle(
    source: Path | IO[bytes],
    *,
    cache_dir: Path | None = None,
    trust: bool = False,
    require_signature: Sequence[Path] = (),
    any_machine: bool = False,
    replace: bool = False,
    max_bytes: int = Limits().max_bytes,
    max_ratio: float = Limits().max_ratio,
) -> ImportReport:
    """Check a bundle and take it into a cache; where anything is wrong with it, nothing is changed.

    Args:
        source: A file, a folder, or an open stream.
        cache_dir: The cache's root; None means the one that `warm` fills.
        trust: Whether the user vouches for native code that nobody signed.
        require_signature: Files and folders of public keys, one of which must have signed it.
        any_machine: Whether to take what this machine cannot load.
        replace: Whether the bundle's plan wins where the cache holds another of the same hash.
        max_bytes: The most that all members may come to.
        max_ratio: The most that a packed byte may grow to.

    Raises:
        RefusedError: It is not trusted, not whole, or not fit for this machine; `reason` says which.
        UsageError: There are no public keys where some were named.
        CacheError: It cannot be read, or the cache cannot be written.
    """
    keys = signatures.load_public_keys(require_signature) if require_signature else None
    if keys is None and not trust:
        message = (
            "A bundle holds native code that runs in your process. Import what you trust with --trust, or better check "
            "who made it with --require-signature KEYS."
        )
        raise RefusedError(message, reason="not_trusted", path=_spelled(source))
    layout = CacheLayout(root=resolve_root(cache_dir))
    limits = Limits(max_bytes=max_bytes, max_ratio=max_ratio)
    with unpacking_folder(layout) as folder:
        unpacked = unpack(source, folder, keys=keys, limits=limits)
        warnings = list(_check_pickles(unpacked.entries, trust=trust))
        verdicts = {} if any_machine else {content.hash: _verdict(content, warnings) for content in unpacked.entries}
        check_fits(layout, unpacked, replacing=replace)
        installed = install(layout, unpacked, replacing=replace)
    return ImportReport(
        source=_spelled(source),
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


def _spelled(source: Path | IO[bytes]) -> str:
    return str(source) if isinstance(source, Path) else "-"


def _check_pickles(entries: tuple[EntryContent, ...], *, trust: bool) -> list[str]:
    """Say which artifacts torch will unpickle; who signed them says who made them, not that pickle was wanted."""
    names = [name for content in entries for name in content.pickles]
    if names and not trust:
        advice = "Nothing was changed. Import it with --trust, or warm with the adaptor aot_inductor, which has none."
        raise refused("pickle", "is opened by unpickling it", member=names[0], advice=advice)
    if not names:
        return []
    more = "" if len(names) == 1 else f" and {len(names) - 1} more"
    return [f"{shown(names[0])}{more} will be unpickled by torch when loaded, which runs any code in it."]


def _verdict(content: EntryContent, warnings: list[str]) -> str:
    from cgtool.store.machine import this_machine
    from cgtool.toolkit.verify.verdict import verdict

    found = verdict(content.key, this_machine())
    reasons = "; ".join(found.reasons)
    if found.level == "unsupported":
        message = (
            f"The entry {short(content.hash)} of the bundle cannot be loaded on this machine: {reasons}. Nothing was "
            "changed. Export one for this machine, or import it all the same with --any-machine."
        )
        raise RefusedError(message, reason="unsupported", path=content.hash, actual=list(found.reasons))
    if found.level == "loads":
        warnings.append(f"The entry {short(content.hash)} loads, but compiling it again is advised: {reasons}.")
    return str(found.level)


@contextlib.contextmanager
def unpacking_folder(layout: CacheLayout) -> Iterator[Path]:
    """Yield a new folder beside the entries of a cache; what was made for it is gone afterwards."""
    check_no_links([layout.base])
    made = _make(layout.base)
    folder = layout.base / f".import.{os.getpid()}.{secrets.token_hex(6)}.tmp"
    try:
        for leftover in _abandoned(layout):
            discard(leftover)
        try:
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise cache_error(error, folder) from error
        with os_errors_as_cache_errors(folder):
            descriptor = hold_folder(folder)
        try:
            yield folder
        finally:
            os.close(descriptor)
    finally:
        discard(folder)
        for above in made:
            with contextlib.suppress(OSError):  # something is in it by now
                above.rmdir()


def _abandoned(layout: CacheLayout) -> list[Path]:
    """Return the folders that killed imports left in a cache."""
    try:
        found = [path for path in layout.base.iterdir() if _NAME.fullmatch(path.name)]
    except OSError:
        return []
    return [path for path in found if is_abandoned(path)]


def _make(folder: Path) -> list[Path]:
    """Make a folder and those above it; return those that were missing, the innermost first."""
    missing = []
    try:
        for above in (folder, *folder.parents):
            if above.is_dir():
                break
            missing.append(above)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        for above in missing:
            with contextlib.suppress(OSError):
                above.rmdir()
        raise cache_error(error, folder) from error
    for above in missing:
        sync_folder(above.parent)
    return missing
