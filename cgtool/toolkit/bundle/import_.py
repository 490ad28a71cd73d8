"""`import`: take a bundle into a cache, once all of it was checked. Prints nothing; importable without torch.

The report as JSON::

    {"schema": 1, "source": str, "root": str, "signed_by": key id|null, "size_bytes": int, "warnings": [str...],
     "entries": [{"hash": hash, "outcome": "new"|"merged"|"same", "rows_added": int, "artifacts": int,
                  "size_bytes": int, "verdict": "optimal"|"loads"|"unsupported"|null,
                  "ranks": [{"rank": int, "prefix": str, "model": str}...]}...]}

A bundle is unpacked in `torch_compile_cache/.import.<pid>.<token>.tmp/`, a cache root of its own that no reader looks
into, before any of it is believed. Its maker holds a lock on it, so that one which nobody holds was left by a killed
process and is removed by the next import.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from cgtool.errors import RefusedError
from cgtool.store import signatures
from cgtool.store.bundle_index import Limits, refused, shown
from cgtool.store.files import cache_error, discard, os_errors_as_cache_errors, sync_folder
from cgtool.store.layout import CacheLayout, resolve_root, short
from cgtool.store.leases import hold_folder, is_abandoned
from cgtool.toolkit.bundle.install import Installed, check_fits, check_no_links, install
from cgtool.toolkit.bundle.unpack import EntryContent, unpack

SCHEMA = 1

_NAME = re.compile(r"\.import\.[0-9]+\.[0-9a-f]+\.tmp")


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """What the user asked.

    Args:
        source: A file, a folder, or an open stream.
        cache_dir: The cache's root; None means the one that `warm` fills.
        trust: Whether the user vouches for native code that nobody signed.
        require_signature: Files and folders of public keys, one of which must have signed it.
        any_machine: Whether to take what this machine cannot load.
        replace: Whether the bundle's plan wins where the cache holds another of the same hash.
        max_bytes: The most that all members may come to.
        max_ratio: The most that a packed byte may grow to.
    """

    source: Path | IO[bytes]
    cache_dir: Path | None = None
    trust: bool = False
    require_signature: tuple[Path, ...] = ()
    any_machine: bool = False
    replace: bool = False
    max_bytes: int = Limits().max_bytes
    max_ratio: float = Limits().max_ratio


@dataclass(frozen=True, kw_only=True)
class ImportedEntry:
    """One entry of the bundle, and what became of it.

    Args:
        installed: What became of it.
        content: What it holds.
        verdict: What was said of this machine; None where nobody asked.
    """

    installed: Installed
    content: EntryContent
    verdict: str | None

    @property
    def size_bytes(self) -> int:
        """The size of its artifacts."""
        return sum(self.content.artifacts.values())

    def to_json(self) -> dict[str, Any]:
        """Return its JSON form."""
        return {
            "hash": self.content.hash,
            "outcome": self.installed.outcome,
            "rows_added": self.installed.rows_added,
            "artifacts": len(self.content.artifacts),
            "size_bytes": self.size_bytes,
            "verdict": self.verdict,
            "ranks": [{"rank": m.rank, "prefix": m.prefix, "model": m.model} for m in self.content.manifests],
        }


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    """What was imported; the JSON form stands at the head of this module."""

    source: str
    root: Path
    signed_by: str | None
    size_bytes: int
    entries: tuple[ImportedEntry, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the document that `import --json` prints."""
        return {
            "schema": SCHEMA,
            "source": self.source,
            "root": str(self.root),
            "signed_by": self.signed_by,
            "size_bytes": self.size_bytes,
            "entries": [entry.to_json() for entry in self.entries],
            "warnings": list(self.warnings),
        }


def import_bundle(options: ImportOptions) -> ImportReport:
    """Check a bundle and take it into a cache; where anything is wrong with it, nothing is changed.

    Raises:
        RefusedError: It is not trusted, not whole, or not fit for this machine; `reason` says which.
        UsageError: There are no public keys where some were named.
        CacheError: It cannot be read, or the cache cannot be written.
    """
    keys = signatures.load_public_keys(options.require_signature) if options.require_signature else None
    if keys is None and not options.trust:
        message = (
            "A bundle holds native code that runs in your process. Import what you trust with --trust, or better check "
            "who made it with --require-signature KEYS."
        )
        raise RefusedError(message, reason="not_trusted", path=_spelled(options.source))
    layout = CacheLayout(root=resolve_root(options.cache_dir))
    limits = Limits(max_bytes=options.max_bytes, max_ratio=options.max_ratio)
    with unpacking_folder(layout) as folder:
        unpacked = unpack(options.source, folder, keys=keys, limits=limits)
        warnings = list(_check_pickles(unpacked.entries, trust=options.trust))
        verdicts = {content.hash: _verdict(content, options, warnings) for content in unpacked.entries}
        check_fits(layout, unpacked, replacing=options.replace)
        installed = install(layout, unpacked, replacing=options.replace)
    return ImportReport(
        source=_spelled(options.source),
        root=layout.root,
        signed_by=unpacked.signed_by,
        size_bytes=unpacked.index.size_bytes,
        entries=tuple(
            ImportedEntry(installed=done, content=content, verdict=verdicts[content.hash])
            for done, content in zip(installed, unpacked.entries, strict=True)
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


def _verdict(content: EntryContent, options: ImportOptions, warnings: list[str]) -> str | None:
    if options.any_machine:
        return None
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
    """Yield a new folder beside the entries of a cache; what was made for it is gone afterwards, unless it holds more.

    Raises:
        RefusedError: link_here: the folder of the entries is a link.
        CacheError: It cannot be made: read-only, full, no permission.
    """
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
