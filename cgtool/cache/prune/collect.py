"""Reading a whole cache quickly: what each entry and unit holds, by name. Must not import torch.

Prune looks at 100,000 artifacts before it says anything, so manifests are not parsed whole here: their first fields are
(`_head`), and digests are searched for in the rest. What is made of that is only ever a suspicion: before an artifact
is removed, its entry's manifests are read and checked whole (`cgtool.cache.prune.leftovers`). What cannot be read makes
its entry `readable = False`, and then nothing is concluded from what seems to be missing there. So is an entry with a
link in place of a folder: nobody follows it here, for what is behind it is not the cache's to remove.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from datetime import datetime
from pathlib import Path
from typing import Any

from cgtool.cache.files import is_temporary
from cgtool.cache.layout import (
    ARTIFACTS,
    MANIFEST_FILE,
    UNIT_FILE,
    CacheLayout,
    RankName,
    is_hash,
    is_prefix,
    parse_rank_folder,
)
from cgtool.cache.manifest import SCHEMA
from cgtool.errors import CacheError
from cgtool.records import dataclass

_UNIT_FILES = frozenset({UNIT_FILE, "lock"})
_BEFORE_DIGEST = '"artifact": "'
_LOOKUP = re.compile(rb'"lookup": ?\[([^\]]*)\]')
_HASHES = re.compile(rb"[0-9a-f]{64}")
#: The first field that the head of a manifest does without; a line like this cannot be inside of a JSON string.
_AFTER_HEAD = b'\n "splitting_ops"'


#: When a file was written, in nanoseconds since the epoch, and its size in bytes.
Status = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """One rank and prefix.

    Args:
        name: Its name.
        has_manifest: Whether there is a manifest.
        model: What people call the model; "" where the manifest cannot be read.
        created: When it was made, seconds since the epoch; None where that cannot be read.
        schema: The manifest's schema; None where that cannot be read.
        digests: Of the artifacts that the manifest seems to name.
        lookup: The digests of cheap facts that seem to lead here.
        files: The names in its folder.
        manifest_status: When the manifest was written, in ns since the epoch, and its size; None where there is none.
    """

    name: RankName
    has_manifest: bool
    model: str = ""
    created: float | None = None
    schema: int | None = None
    digests: frozenset[str] = frozenset()
    lookup: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    manifest_status: Status | None = None


@dataclass(frozen=True, kw_only=True)
class EntryFacts:
    """One entry.

    Args:
        hash: Its hash.
        ranks: Its ranks and prefixes.
        artifacts: The names in its folder of artifacts.
        files: The names in its own folder.
        readable: Whether all of it could be listed and read.
        is_link: Whether its folder is a link; then what is in it is not for removal one by one.
    """

    hash: str
    ranks: tuple[RankFacts, ...]
    artifacts: tuple[str, ...]
    files: tuple[str, ...]
    readable: bool
    is_link: bool = False

    @property
    def model(self) -> str:
        """What people call the model."""
        return next((rank.model for rank in self.ranks if rank.model), "")

    @property
    def created(self) -> float | None:
        """When the last of its ranks was made, seconds since the epoch; None where that is not known."""
        return max((rank.created for rank in self.ranks if rank.created is not None), default=None)

    @property
    def is_newer(self) -> bool:
        """Whether a newer version of cgtool wrote any of it."""
        return any(rank.schema is not None and rank.schema > SCHEMA for rank in self.ranks)

    @property
    def is_finished(self) -> bool:
        """Whether any rank has a manifest."""
        return any(rank.has_manifest for rank in self.ranks)


@dataclass(frozen=True, kw_only=True)
class CacheFacts:
    """All of a cache.

    Args:
        layout: Where it lies.
        entries: By hash, in order.
        units: The names in each unit's folder, by key; where that was asked for of those alone that are not `is_whole`.
        units_readable: Whether all units could be listed.
        strays: Names in the cache folder of what is being written, or was when its writer died.
    """

    layout: CacheLayout
    entries: dict[str, EntryFacts]
    units: dict[str, list[str]]
    units_readable: bool
    strays: tuple[str, ...]

    @property
    def readable(self) -> bool:
        """Whether it is known what every entry shares."""
        return self.units_readable and all(entry.readable for entry in self.entries.values())


def collect(layout: CacheLayout, *, whole_units: bool = True) -> CacheFacts:
    """Return what a cache holds; an entry that cannot be read is marked and never an error.

    Args:
        layout: Where it lies.
        whole_units: Whether units that are as they should be are of interest: nearly all of a hundred thousand.

    Raises:
        CacheError: The cache folder itself cannot be listed.
    """
    base = str(layout.base)
    try:
        names = names_in(base, follow=True)
    except OSError as error:
        raise CacheError(
            f"The folder {layout.base} could not be listed: {error.strerror}. Check its permissions.", path=layout.base
        ) from error
    units, units_readable = _units(layout, whole=whole_units)
    entries = {name: _entry(f"{base}/{name}", name) for name in sorted(names) if is_hash(name)}
    return CacheFacts(
        layout=layout,
        entries=entries,
        units=units,
        units_readable=units_readable,
        strays=tuple(sorted(name for name in names if is_temporary(name))),
    )


def names_in(folder: str, *, follow: bool = False) -> list[str]:
    """Return the names in a folder; none where it is not there.

    Args:
        folder: Its path, without "/" at the end.
        follow: Whether it may be a link.

    Raises:
        OSError: It cannot be listed, or is a link.
    """
    if not follow and _is_link(folder):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), folder)
    try:
        return os.listdir(folder)  # noqa: PTH208 - names alone, of a hundred thousand folders
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_link(path: str) -> bool:
    return os.path.islink(path)  # noqa: PTH114 - a str, a hundred thousand times


def status_of(path: str | Path) -> Status | None:
    """Return what tells whether a file was written since; None where there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - a hundred thousand times
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def stamps_in(layout: CacheLayout) -> dict[str, Status]:
    """Return the stamps of loads, by `RankName.flat`; none where they cannot be read."""
    found: dict[str, Status] = {}
    with contextlib.suppress(OSError), os.scandir(layout.state_dir / "used") as stamps:
        for stamp in stamps:
            with contextlib.suppress(OSError):
                status = stamp.stat()
                found[stamp.name] = status.st_mtime_ns, status.st_size
    return found


def _entry(folder: str, hash_: str) -> EntryFacts:
    is_link = _is_link(folder)
    ranks: list[RankFacts] = []
    artifacts: list[str] = []
    files: list[str] = []
    readable = not is_link
    try:
        files = names_in(folder, follow=True)
        for rank in sorted(rank for file in files if (rank := parse_rank_folder(file)) is not None):
            whole = _ranks(hash_, rank, f"{folder}/rank_{rank}", ranks)
            readable = readable and whole
        artifacts = names_in(f"{folder}/{ARTIFACTS}")
    except OSError:
        readable = False
    return EntryFacts(
        hash=hash_,
        ranks=tuple(ranks),
        artifacts=tuple(artifacts),
        files=tuple(files),
        readable=readable,
        is_link=is_link,
    )


def _ranks(hash_: str, rank: int, folder: str, found: list[RankFacts]) -> bool:
    """Add the facts of all prefixes of a rank, and return whether they are all there is to know."""
    if _is_link(folder):
        return False
    readable = True
    for prefix in sorted(filter(is_prefix, names_in(folder))):
        inner = f"{folder}/{prefix}"
        if _is_link(inner):
            readable = False
            continue
        facts, whole = _rank(RankName(hash=hash_, rank=rank, prefix=prefix), inner)
        found.append(facts)
        readable = readable and whole
    return readable


def _rank(name: RankName, folder: str) -> tuple[RankFacts, bool]:
    """The facts of a rank, and whether they are all there is to know."""
    files = tuple(names_in(folder, follow=True))
    if MANIFEST_FILE not in files:
        return RankFacts(name=name, has_manifest=False, files=files), True
    before = status_of(f"{folder}/{MANIFEST_FILE}")  # what is written after that is news
    try:
        with open(f"{folder}/{MANIFEST_FILE}", "rb", buffering=0) as stream:  # noqa: PTH123 - one of thousands
            data = stream.read()
    except FileNotFoundError:  # removed just now
        return RankFacts(name=name, has_manifest=False, files=files), False
    except OSError:
        return RankFacts(name=name, has_manifest=True, files=files, manifest_status=before), False
    head = _head(data)
    lookup = _LOOKUP.search(data, max(data.find(b'"lookup"'), 0))  # found ten times as quickly as by the pattern
    _, *rows = data.decode("ascii", "replace").split(_BEFORE_DIGEST)
    schema = head.get("schema")
    facts = RankFacts(
        name=name,
        has_manifest=True,
        model=head["model"] if isinstance(head.get("model"), str) else "",
        created=_epoch(head.get("created")),
        schema=schema if type(schema) is int else None,
        digests=frozenset([row[:64] for row in rows]),
        lookup=() if lookup is None else tuple(text.decode() for text in _HASHES.findall(lookup[1])),
        files=files,
        manifest_status=before,
    )
    return facts, schema == SCHEMA


def _head(data: bytes) -> dict[str, Any]:
    """The first fields of a manifest; {} where it is torn."""
    head, found, _ = data.partition(_AFTER_HEAD)
    for text in (head.rstrip(b", \n") + b"}" if found else b"", data):
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(fields, dict):
            return fields
    return {}


def _epoch(text: Any) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def is_whole(files: list[str]) -> bool:
    """Return whether a unit's folder holds its record and one artifact, and beside them a lock at most."""
    others = set(files) - _UNIT_FILES
    return UNIT_FILE in files and len(others) == 1 and not others.pop().startswith(".")


def _units(layout: CacheLayout, *, whole: bool) -> tuple[dict[str, list[str]], bool]:
    """The names in each unit's folder, but of whole units only where they are wanted, and whether all were listed."""
    base = f"{layout.base}/units"
    units: dict[str, list[str]] = {}
    readable = True
    try:
        shards = names_in(base)
    except OSError:
        return {}, False
    for shard in shards:
        above = f"{base}/{shard}"
        try:
            if _is_link(above):
                readable = False
                continue
            with os.scandir(above) as found:
                items = list(found)
            for item in items:
                if item.is_symlink():
                    readable = False
                elif item.name.startswith(shard):
                    files = names_in(item.path, follow=True)  # for it is none
                    if (whole or not is_whole(files)) and is_hash(item.name):
                        units[item.name] = files
        except OSError:
            readable = False
    return units, readable
