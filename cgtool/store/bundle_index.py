"""`bundle.json`, the grammar and limits of a bundle's members, and refusals. Must not import torch.

The index lists every member of a bundle except bundle.json and bundle.sig, with its digest and size, sorted by path.
Grammar of member names, which extends that of `cgtool.store.layout`::

    member = "torch_compile_cache/" hash "/" inner
    inner  = "key.json" | "artifacts/" sha256 "." kind | "rank_" i "/" prefix "/" file
    file   = "manifest.json" | "plan.json" | "computation_graph.py" | "transformed_code.py"
    kind   = "pt2" | "json" | "aot" | "mega" | the name of another adaptor that this process knows

A name is validated against this grammar before it becomes a path. Invalid names are classified only for the refusal.
Kinds that no adaptor opens are refused: they are useless, and their effect is unknown.

Each refusal has a stable machine-readable reason, which `cgtool import --json` prints::

    not_trusted unsigned untrusted_key wrong_signature tampered bad_signature_file            origin
    not_a_bundle unknown_schema bad_index bad_compression bad_header truncated trailing_data  format
    parent_path absolute_name strange_name outside_layout unknown_kind                        names
    duplicate_member case_collision
    link device fifo folder_member sparse pax_header strange_type                             types
    too_large bomb size_mismatch digest_mismatch                                              sizes and bytes
    missing_member unlisted_member missing_artifact unnamed_artifact                          completeness
    corrupt_key corrupt_manifest corrupt_plan strange_package strange_artifact pickle         content
    unsupported other_plan other_schema_here link_here                                        the cache imported into

Load adds (`cgtool.store.trust`): foreign_owner writable_by_others changed.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from cgtool.adaptor_registry import is_kind
from cgtool.errors import CacheCorruptError, CacheSchemaError, RefusedError
from cgtool.plan.grammar import Count, Digest, Record
from cgtool.store.files import ARTIFACT_MODE, RECORD_MODE, Sealed, unseal
from cgtool.store.layout import (
    ARTIFACTS,
    CACHE_FOLDER,
    KEY_FILE,
    MANIFEST_FILE,
    PLAN_FILE,
    RANK_FILES,
    is_hash,
    is_prefix,
    parse_rank_folder,
)

INDEX_FILE = "bundle.json"
SIGNATURE_FILE = "bundle.sig"
#: Kinds whose bytes torch unpickles when it opens them.
PICKLE_KINDS = frozenset({"aot", "mega"})
PACKAGE_KIND = "pt2"

_GIB, _MIB = 2**30, 2**20
#: A signature takes a few hundred bytes.
MAX_SIGNATURE_BYTES = 2**16
#: Records are parsed in memory, where each byte of "{},{},..." takes thirty; packages are opened from memory too, also
#: by load. The other text files are never parsed.
_MAX_BYTES = {KEY_FILE: 32 * _MIB, MANIFEST_FILE: 32 * _MIB, PLAN_FILE: 64 * _MIB, PACKAGE_KIND: 4 * _GIB}
_MAX_TEXT_BYTES = 256 * _MIB
#: The maximum number of lists, objects and commas in a record.
_MAX_VALUES = {INDEX_FILE: 2_000_000, KEY_FILE: 2_000_000, MANIFEST_FILE: 2_000_000, PLAN_FILE: 4_000_000}

_SHOWN_CHARACTERS = 160
_ADVICE = "Nothing was changed. Get an intact copy from whoever made the bundle."


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits above which a bundle is refused.

    Args:
        max_bytes: Total size of all members, in bytes.
        max_ratio: Compression ratio, checked after `ratio_from_bytes` were decompressed.
        max_members: Number of members.
        max_index_bytes: Size of bundle.json, in bytes.
        ratio_from_bytes: Decompressed bytes from which on `max_ratio` applies; small bundles may compress well.
    """

    max_bytes: int = 64 * _GIB
    max_ratio: float = 250.0
    max_members: int = 1_000_000
    max_index_bytes: int = 32 * _MIB
    ratio_from_bytes: int = 32 * _MIB


@dataclass(frozen=True, kw_only=True)
class Place:
    """A member's place in a cache. Only files of a rank folder have a rank and prefix; only artifacts have a kind."""

    hash: str
    rank: int | None = None
    prefix: str = ""
    file: str
    kind: str = ""


class Member(Record, frozen=True, kw_only=True):
    """One file of a bundle.

    Args:
        path: Its name, relative and with slashes.
        sha256: The digest of its bytes.
        size_bytes: Its size.
    """

    path: str
    sha256: Digest
    size_bytes: Count

    @property
    def place(self) -> Place:
        """Its place in a cache."""
        return place_of(self.path)

    @property
    def mode(self) -> int:
        """The permissions of its file in a cache."""
        return ARTIFACT_MODE if self.path.split("/")[2:3] == [ARTIFACTS] else RECORD_MODE


class Index(Sealed, frozen=True, kw_only=True, tag="bundle-2"):
    """The index of a bundle.

    Args:
        members: The members, sorted by path.
    """

    members: tuple[Member, ...]

    @property
    def hashes(self) -> tuple[str, ...]:
        """The hashes of the entries in the bundle, in order."""
        return tuple(dict.fromkeys(member.path.split("/")[1] for member in self.members))

    @property
    def size_bytes(self) -> int:
        """The total size of all members."""
        return sum(member.size_bytes for member in self.members)


def parse_index(data: bytes, *, limits: Limits) -> Index:
    """Parse a `bundle.json` and check every name and number in it.

    Raises:
        RefusedError: unknown_schema, bad_index, too_large, bomb, or the reason that a name is refused.
    """
    if len(data) > limits.max_index_bytes:
        raise _too_large(f"has {len(data)} bytes", INDEX_FILE, limits.max_index_bytes, len(data))
    check_values(data, INDEX_FILE)
    try:
        index = unseal(data, Index, path=INDEX_FILE)
    except CacheSchemaError as error:
        advice = "Nothing was changed. Use the version of cgtool that wrote it, or export again with this version."
        why = f"has schema {error.actual}, but this cgtool reads schema {error.expected}"
        expected, actual = error.expected, error.actual
        raise refused(
            "unknown_schema", why, member=INDEX_FILE, expected=expected, actual=actual, advice=advice
        ) from error
    except CacheCorruptError as error:
        raise refused("bad_index", "was not written by cgtool", member=INDEX_FILE, actual=str(error)) from error
    except MemoryError as error:
        raise refused("too_large", "needs more memory than is available", member=INDEX_FILE) from error
    names = [member.path for member in index.members]
    if len(names) > limits.max_members:
        raise _too_large(f"lists {len(names)} members", INDEX_FILE, limits.max_members, len(names))
    for member in index.members:
        _check_member(member)
    _check_distinct(names)
    if names != sorted(names) or not names:
        why = "does not list the members in order" if names else "lists no members"
        raise refused("bad_index", why, member=INDEX_FILE)
    if index.size_bytes > limits.max_bytes:
        advice = "Nothing was changed. Raise --max-size if you expect this much."
        why = f"lists {index.size_bytes} bytes"
        raise _too_large(why, INDEX_FILE, limits.max_bytes, index.size_bytes, advice=advice)
    return index


def check_values(data: bytes, name: str) -> None:
    """Check, before parsing JSON, that it does not contain more values than a record of cgtool may have.

    Raises:
        RefusedError: bomb.
    """
    limit = _MAX_VALUES.get(name.rpartition("/")[2], sys.maxsize)
    actual = data.count(b"{") + data.count(b"[") + data.count(b",")
    if actual > limit:
        raise refused("bomb", "is a record with too many values", member=name, expected=limit, actual=actual)


def _check_member(member: Member) -> None:
    place = member.place
    if place.kind and not place.file.startswith(member.sha256 + "."):
        raise refused(
            "digest_mismatch",
            "has a name that does not match its digest",
            member=member.path,
            expected=place.file.partition(".")[0],
            actual=member.sha256,
        )
    limit = _MAX_BYTES.get(place.kind or place.file, sys.maxsize if place.kind else _MAX_TEXT_BYTES)
    if member.size_bytes > limit:
        raise _too_large(f"is listed with {member.size_bytes} bytes", member.path, limit, member.size_bytes)


def _check_distinct(names: Collection[str]) -> None:
    """Check that names and their folders are distinct, on case-insensitive file systems too."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise refused("duplicate_member", "is duplicated", member=name)
        seen.add(name)
    by_folded: dict[str, str] = {}
    for name in (*names, *sorted(names_of_folders(seen))):
        if by_folded.setdefault(name.casefold(), name) != name:
            raise refused("case_collision", "differs from another only in case", member=name)


def names_of_folders(names: Iterable[str]) -> set[str]:
    """Return every folder above some names."""
    folders: set[str] = set()
    for name in names:
        folder = name.rpartition("/")[0]
        while folder and folder not in folders:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
    return folders


def place_of(name: str) -> Place:
    """Return a member's place in a cache.

    Raises:
        RefusedError: The name does not match the grammar: parent_path, absolute_name, strange_name, unknown_kind or
            outside_layout.
    """
    parts = name.split("/")
    if name.startswith("/"):
        raise refused("absolute_name", "has an absolute name", member=name)
    if ".." in parts:
        raise refused("parent_path", "would be outside the cache", member=name)
    if not name.isascii() or not name.isprintable() or "\\" in name or "" in parts or "." in parts:
        raise refused("strange_name", "has a name with characters that are not used in a cache", member=name)
    place = _parse_place(parts)
    if place is None:
        raise refused("outside_layout", "has a name that does not occur in a cache", member=name)
    if place.kind and not is_kind(place.kind):
        why = "is an artifact of a kind that no installed adaptor produces"
        raise refused("unknown_kind", why, member=name, actual=place.kind)
    return place


def _parse_place(parts: list[str]) -> Place | None:
    match parts:
        case [top, hash_, file] if top == CACHE_FOLDER and is_hash(hash_) and file == KEY_FILE:
            return Place(hash=hash_, file=file)
        case [top, hash_, folder, file] if top == CACHE_FOLDER and is_hash(hash_) and folder == ARTIFACTS:
            digest, _, kind = file.partition(".")
            return Place(hash=hash_, file=file, kind=kind) if is_hash(digest) and kind else None
        case [top, hash_, folder, prefix, file] if top == CACHE_FOLDER and is_hash(hash_) and is_prefix(prefix):
            rank = parse_rank_folder(folder)
            known = file == MANIFEST_FILE or file in RANK_FILES
            return Place(hash=hash_, rank=rank, prefix=prefix, file=file) if rank is not None and known else None
    return None


def shown(name: str) -> str:
    """Return a member's name for display: quoted, escaped and truncated."""
    return repr(name if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]}…")


def without_advice(error: RefusedError) -> str:
    """Return the message of a refusal without the advice for the importing user."""
    return str(error).removesuffix(f" {_ADVICE}")


def refused(
    reason: str, why: str, *, member: str | None = None, expected: Any = None, actual: Any = None, advice: str = _ADVICE
) -> RefusedError:
    """Return the error for a bundle that is refused because of itself or one of its members.

    `reason` is the stable machine-readable reason; `why` completes a sentence: "is a symbolic link".
    """
    subject = "The bundle" if member is None else f"The member {shown(member)} of the bundle"
    path = None if member is None else member[:_SHOWN_CHARACTERS]
    return RefusedError(f"{subject} {why}. {advice}", reason=reason, path=path, expected=expected, actual=actual)


def _too_large(why: str, member: str, limit: int, actual: int, *, advice: str = _ADVICE) -> RefusedError:
    why = f"{why}, but only {limit} are allowed"
    return refused("too_large", why, member=member, expected=limit, actual=actual, advice=advice)
