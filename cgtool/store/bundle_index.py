"""`bundle.json` and what a bundle may hold: names, numbers, and the words of refusals. Must not import torch.

The index names every member of a bundle with its digest and size, sorted by path; bundle.json and bundle.sig do not
count. Grammar of the members' names, over that of `cgtool.store.layout`::

    member = "torch_compile_cache/" hash "/" inner
    inner  = "key.json" | "artifacts/" sha256 "." kind | "rank_" i "/" prefix "/" file
    file   = "manifest.json" | "plan.json" | "computation_graph.py" | "transformed_code.py"
    kind   = "pt2" | "json" | "aot" | "mega" | the name of another adaptor that this process knows

A name is matched to it before it becomes a path; what a stranger may try instead is told apart for the refusal only. A
kind that no adaptor opens is of no use, and nobody can say what it would do.

A refusal has a stable reason for programs, which `cgtool import --json` prints::

    not_trusted unsigned untrusted_key wrong_signature tampered bad_signature_file            who made it
    not_a_bundle unknown_schema bad_index bad_compression bad_header truncated trailing_data  what it is
    parent_path absolute_name strange_name outside_layout unknown_kind                        names
    duplicate_member case_collision
    link device fifo folder_member sparse pax_header strange_type                             types
    too_large bomb size_mismatch digest_mismatch                                              sizes and bytes
    missing_member unlisted_member missing_artifact unnamed_artifact                          what is there
    corrupt_key corrupt_manifest corrupt_plan strange_package strange_artifact pickle         what is in it
    unsupported other_plan other_schema_here link_here                                        what is here

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
#: Kinds whose bytes torch unpickles as it opens them.
PICKLE_KINDS = frozenset({"aot", "mega"})
PACKAGE_KIND = "pt2"

_GIB, _MIB = 2**30, 2**20
#: bundle.sig holds a few hundred bytes for each signature.
MAX_SIGNATURE_BYTES = 2**16
#: Records are parsed whole, and Python makes thirty bytes of each byte of "{},{},...". Packages are opened from memory,
#: by load too. What has no limit of its own is text that nobody parses.
_MAX_BYTES = {KEY_FILE: 32 * _MIB, MANIFEST_FILE: 32 * _MIB, PLAN_FILE: 64 * _MIB, PACKAGE_KIND: 4 * _GIB}
_MAX_TEXT_BYTES = 256 * _MIB
#: How many lists, objects and commas a record may hold.
_MAX_VALUES = {INDEX_FILE: 2_000_000, KEY_FILE: 2_000_000, MANIFEST_FILE: 2_000_000, PLAN_FILE: 4_000_000}

_SHOWN_CHARACTERS = 160
_ADVICE = "Nothing was changed. Ask whoever made the bundle for a whole one."


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What is read of a bundle before it is refused.

    Args:
        max_bytes: The size of all members together.
        max_ratio: Bytes unpacked for one byte packed, looked at once `ratio_from_bytes` were unpacked.
        max_members: How many members there may be.
        max_index_bytes: The size of bundle.json.
        ratio_from_bytes: Small bundles may pack well.
    """

    max_bytes: int = 64 * _GIB
    max_ratio: float = 250.0
    max_members: int = 1_000_000
    max_index_bytes: int = 32 * _MIB
    ratio_from_bytes: int = 32 * _MIB


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a member belongs: rank and prefix are of a file of a rank folder, the kind is of an artifact."""

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
        """Where it belongs in a cache."""
        return place_of(self.path)

    @property
    def mode(self) -> int:
        """The permissions that the cache gives such a file."""
        return ARTIFACT_MODE if self.path.split("/")[2:3] == [ARTIFACTS] else RECORD_MODE


class Index(Sealed, frozen=True, kw_only=True, tag="bundle-2"):
    """What a bundle holds.

    Args:
        members: Sorted by path.
    """

    members: tuple[Member, ...]

    @property
    def hashes(self) -> tuple[str, ...]:
        """The entries that it holds parts of, in order."""
        return tuple(dict.fromkeys(member.path.split("/")[1] for member in self.members))

    @property
    def size_bytes(self) -> int:
        """The size of all members together."""
        return sum(member.size_bytes for member in self.members)


def parse_index(data: bytes, *, limits: Limits) -> Index:
    """Return the index in the bytes of a `bundle.json`, every name and number of which is checked.

    Raises:
        RefusedError: unknown_schema, bad_index, too_large, bomb, or what is wrong with a name.
    """
    if len(data) > limits.max_index_bytes:
        raise _too_much(f"has {len(data)} bytes", INDEX_FILE, limits.max_index_bytes, len(data))
    check_values(data, INDEX_FILE)
    try:
        index = unseal(data, Index, path=INDEX_FILE)
    except CacheSchemaError as error:
        advice = "Nothing was changed. Use the version of cgtool that wrote it, or export again with this one."
        why = f"has the schema {error.actual}, and this cgtool reads {error.expected}"
        expected, actual = error.expected, error.actual
        raise refused(
            "unknown_schema", why, member=INDEX_FILE, expected=expected, actual=actual, advice=advice
        ) from error
    except CacheCorruptError as error:
        raise refused("bad_index", "is not as cgtool writes it", member=INDEX_FILE, actual=str(error)) from error
    except MemoryError as error:
        raise refused("too_large", "needs more memory than there is", member=INDEX_FILE) from error
    names = [member.path for member in index.members]
    if len(names) > limits.max_members:
        raise _too_much(f"promises {len(names)} members", INDEX_FILE, limits.max_members, len(names))
    for member in index.members:
        _check_member(member)
    _check_distinct(names)
    if names != sorted(names) or not names:
        why = "does not name the members in order" if names else "names no member"
        raise refused("bad_index", why, member=INDEX_FILE)
    if index.size_bytes > limits.max_bytes:
        advice = "Nothing was changed. Allow more with --max-size where you expect so much."
        why = f"promises {index.size_bytes} bytes"
        raise _too_much(why, INDEX_FILE, limits.max_bytes, index.size_bytes, advice=advice)
    return index


def check_values(data: bytes, name: str) -> None:
    """Check, before it is parsed, that JSON makes no more values than a record of cgtool's has.

    Raises:
        RefusedError: bomb.
    """
    most = _MAX_VALUES.get(name.rpartition("/")[2], sys.maxsize)
    found = data.count(b"{") + data.count(b"[") + data.count(b",")
    if found > most:
        why = "is a record that grows out of all proportion"
        raise refused("bomb", why, member=name, expected=most, actual=found)


def _check_member(member: Member) -> None:
    place = member.place
    if place.kind and not place.file.startswith(member.sha256 + "."):
        raise refused(
            "digest_mismatch",
            "is named by another digest than its own",
            member=member.path,
            expected=place.file.partition(".")[0],
            actual=member.sha256,
        )
    most = _MAX_BYTES.get(place.kind or place.file, sys.maxsize if place.kind else _MAX_TEXT_BYTES)
    if member.size_bytes > most:
        raise _too_much(f"promises {member.size_bytes} bytes", member.path, most, member.size_bytes)


def _check_distinct(names: Collection[str]) -> None:
    """Check that no two names, or two folders above them, are one on some file system."""
    whole: set[str] = set()
    for name in names:
        if name in whole:
            raise refused("duplicate_member", "is there twice", member=name)
        whole.add(name)
    spelled: dict[str, str] = {}
    for name in (*names, *sorted(names_of_folders(whole))):
        if spelled.setdefault(name.casefold(), name) != name:
            raise refused("case_collision", "differs from another in upper and lower case only", member=name)


def names_of_folders(names: Iterable[str]) -> set[str]:
    """Return every folder above some names."""
    found: set[str] = set()
    for name in names:
        folder = name.rpartition("/")[0]
        while folder and folder not in found:
            found.add(folder)
            folder = folder.rpartition("/")[0]
    return found


def place_of(name: str) -> Place:
    """Return where a member belongs.

    Raises:
        RefusedError: The name is outside of the grammar: parent_path, absolute_name, strange_name, unknown_kind or
            outside_layout.
    """
    parts = name.split("/")
    if name.startswith("/"):
        raise refused("absolute_name", "has an absolute name", member=name)
    if ".." in parts:
        raise refused("parent_path", "would lie outside of the cache", member=name)
    if not name.isascii() or not name.isprintable() or "\\" in name or "" in parts or "." in parts:
        raise refused("strange_name", "has a name with characters that no name of a cache has", member=name)
    place = _placed(parts)
    if place is None:
        raise refused("outside_layout", "has a name that nothing in a cache has", member=name)
    if place.kind and not is_kind(place.kind):
        why = "is an artifact of a kind that no adaptor here makes"
        raise refused("unknown_kind", why, member=name, actual=place.kind)
    return place


def _placed(parts: list[str]) -> Place | None:
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
    """Return a member's name as people may be shown it: quoted, escaped and cut."""
    return repr(name if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]}…")


def without_advice(error: RefusedError) -> str:
    """Return what is wrong, without what whoever imports can do about it."""
    return str(error).removesuffix(f" {_ADVICE}")


def refused(
    reason: str, why: str, *, member: str | None = None, expected: Any = None, actual: Any = None, advice: str = _ADVICE
) -> RefusedError:
    """Return the error for a bundle that is not believed, or for one member of it.

    `reason` is a stable word for programs, `why` the end of a sentence: "holds a link".
    """
    about = "The bundle" if member is None else f"The member {shown(member)} of the bundle"
    path = None if member is None else member[:_SHOWN_CHARACTERS]
    return RefusedError(f"{about} {why}. {advice}", reason=reason, path=path, expected=expected, actual=actual)


def _too_much(why: str, member: str, most: int, actual: int, *, advice: str = _ADVICE) -> RefusedError:
    why = f"{why}, and {most} are allowed"
    return refused("too_large", why, member=member, expected=most, actual=actual, advice=advice)
