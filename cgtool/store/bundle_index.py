"""`bundle.json`: every member of a bundle with its digest and size. Must not import torch.

Members are sorted by path, and do not count bundle.json and bundle.sig. `cgtool.store.bundle_names` has their names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from cgtool.errors import CacheCorruptError, CacheSchemaError
from cgtool.plan.grammar import Count, Digest, Record
from cgtool.store.bundle_limits import (
    MAX_PACKAGE_BYTES,
    MAX_PLAN_BYTES,
    MAX_RECORD_BYTES,
    MAX_RECORD_VALUES,
    MAX_TEXT_BYTES,
    Limits,
    check_values,
)
from cgtool.store.bundle_names import INDEX_FILE, PACKAGE_KIND, Place, check_distinct, place_of
from cgtool.store.files import ARTIFACT_MODE, RECORD_MODE
from cgtool.store.layout import ARTIFACTS, KEY_FILE, MANIFEST_FILE, PLAN_FILE
from cgtool.store.refusals import refused
from cgtool.store.sealing import Sealed, unseal

_MAX_BYTES = {KEY_FILE: MAX_RECORD_BYTES, MANIFEST_FILE: MAX_RECORD_BYTES, PLAN_FILE: MAX_PLAN_BYTES}


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

    Args:
        data: The bytes.
        limits: How much it may promise.

    Raises:
        RefusedError: unknown_schema, bad_index, too_large, bomb, or what is wrong with a name.
    """
    check_values(data, member=INDEX_FILE, most=MAX_RECORD_VALUES)
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
    check_number(len(index.members), limits)
    check_members(index.members)
    names = [member.path for member in index.members]
    if names != sorted(names):
        raise refused("bad_index", "does not name the members in order", member=INDEX_FILE)
    if index.size_bytes > limits.max_bytes:
        why = f"promises {index.size_bytes} bytes, and {limits.max_bytes} are allowed"
        advice = "Nothing was changed. Allow more with --max-size where you expect so much."
        raise refused(
            "too_large", why, member=INDEX_FILE, expected=limits.max_bytes, actual=index.size_bytes, advice=advice
        )
    if not index.members:
        raise refused("bad_index", "names no member", member=INDEX_FILE)
    return index


def check_number(count: int, limits: Limits) -> None:
    """Check how many members there are.

    Raises:
        RefusedError: too_large.
    """
    if count > limits.max_members:
        why = f"promises {count} members"
        raise refused("too_large", why, member=INDEX_FILE, expected=limits.max_members, actual=count)


def check_members(members: Iterable[Member]) -> None:
    """Check names, digests and sizes, each for itself and the names together.

    Raises:
        RefusedError: too_large, bad_index, digest_mismatch, or what is wrong with a name.
    """
    members = tuple(members)
    check_distinct(member.path for member in members)
    for member in members:
        _check(member)


def _check(member: Member) -> None:
    place = member.place
    if place.kind and not place.file.startswith(member.sha256 + "."):
        raise refused(
            "digest_mismatch",
            "is named by another digest than its own",
            member=member.path,
            expected=place.file.partition(".")[0],
            actual=member.sha256,
        )
    if place.kind:
        most = MAX_PACKAGE_BYTES if place.kind == PACKAGE_KIND else sys.maxsize
    else:
        most = _MAX_BYTES.get(place.file, MAX_TEXT_BYTES)
    if member.size_bytes > most:
        why = f"promises {member.size_bytes} bytes, and {most} are allowed"
        raise refused("too_large", why, member=member.path, expected=most, actual=member.size_bytes)
