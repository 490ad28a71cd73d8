"""`bundle.json`: every member of a bundle with its digest and size. Must not import torch.

Grammar; the text is canonical JSON (`cgtool.digests`) and a line end, and what is spelled otherwise is refused::

    index  = {"schema": 1, "cgtool": version, "members": [member...], "digest": sha256 of the rest's canonical JSON}
    member = {"path": name, "sha256": digest, "size_bytes": int, "mode": "0444" | "0644"}

Members are sorted by path, and do not count bundle.json and bundle.sig. Names are those of `cgtool.cache.bundle.names`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from cgtool import __version__
from cgtool.cache.bundle.limits import (
    MAX_PACKAGE_BYTES,
    MAX_PLAN_BYTES,
    MAX_RECORD_BYTES,
    MAX_RECORD_VALUES,
    MAX_TEXT_BYTES,
    Limits,
    check_values,
)
from cgtool.cache.bundle.names import INDEX_FILE, PACKAGE_KIND, Place, check_distinct, place_of
from cgtool.cache.bundle.refusals import refused
from cgtool.cache.files import ARTIFACT_MODE, RECORD_MODE
from cgtool.cache.layout import ARTIFACTS, KEY_FILE, MANIFEST_FILE, PLAN_FILE, is_hash
from cgtool.digests import canonical_json, digest_of
from cgtool.pieces import Json
from cgtool.records import dataclass

SCHEMA = 1

#: The longest a version may be.
_VERSION_CHARACTERS = 64
_MAX_BYTES = {KEY_FILE: MAX_RECORD_BYTES, MANIFEST_FILE: MAX_RECORD_BYTES, PLAN_FILE: MAX_PLAN_BYTES}


@dataclass(frozen=True, kw_only=True)
class Member:
    """One file of a bundle.

    Args:
        path: Its name, relative and with slashes.
        sha256: The digest of its bytes.
        size_bytes: Its size.
    """

    path: str
    sha256: str
    size_bytes: int

    @property
    def place(self) -> Place:
        """Where it belongs in a cache."""
        return place_of(self.path)

    @property
    def mode(self) -> int:
        """The permissions that the cache gives such a file."""
        return ARTIFACT_MODE if self.path.split("/")[2:3] == [ARTIFACTS] else RECORD_MODE

    def to_json(self) -> Json:
        """Return the member as JSON."""
        mode = f"{self.mode:04o}"
        return {"path": self.path, "sha256": self.sha256, "size_bytes": self.size_bytes, "mode": mode}


@dataclass(frozen=True, kw_only=True)
class Index:
    """What a bundle holds.

    Args:
        members: Sorted by path.
        cgtool: The version that wrote it.
    """

    members: tuple[Member, ...]
    cgtool: str = __version__

    @property
    def hashes(self) -> tuple[str, ...]:
        """The entries that it holds parts of, in order."""
        return tuple(dict.fromkeys(member.path.split("/")[1] for member in self.members))

    @property
    def size_bytes(self) -> int:
        """The size of all members together."""
        return sum(member.size_bytes for member in self.members)

    def to_bytes(self) -> bytes:
        """Return the text of `bundle.json`."""
        members = [member.to_json() for member in self.members]
        body: dict[str, Json] = {"schema": SCHEMA, "cgtool": self.cgtool, "members": members}
        body["digest"] = digest_of(body)
        return canonical_json(body) + b"\n"


def parse_index(data: bytes, *, limits: Limits) -> Index:
    """Return the index in the bytes of a `bundle.json`, every name and number of which is checked.

    Args:
        data: The bytes.
        limits: How much it may promise.

    Raises:
        RefusedError: not_a_bundle, unknown_schema, bad_index, too_large, bomb, or what is wrong with a name.
    """
    check_values(data, member=INDEX_FILE, most=MAX_RECORD_VALUES)
    try:
        record = json.loads(data)
    except MemoryError as error:
        raise refused("too_large", "needs more memory than there is", member=INDEX_FILE) from error
    except (ValueError, RecursionError) as error:
        raise refused("bad_index", "is no JSON", member=INDEX_FILE, actual=type(error).__name__) from error
    if not isinstance(record, dict) or type(record.get("schema")) is not int:
        raise refused("not_a_bundle", "names no schema", member=INDEX_FILE)
    if record["schema"] != SCHEMA:
        raise _unknown_schema(record)
    writer, members = record.get("cgtool"), record.get("members")
    if not isinstance(members, list) or not _is_version(writer):
        raise refused("bad_index", "lacks a field", member=INDEX_FILE)
    check_number(len(members), limits)
    index = Index(members=tuple(map(_member, members)), cgtool=str(writer))
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
    if index.to_bytes() != data:
        raise refused("bad_index", "is not spelled as an index is, or differs from its digest", member=INDEX_FILE)
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


def _unknown_schema(record: dict[str, Any]) -> Exception:
    found = record["schema"]
    advice = "Nothing was changed. Use the version of cgtool that wrote it, or export again with this one."
    why = f"has the schema {str(found)[:20]}, and this cgtool reads {SCHEMA}"
    return refused("unknown_schema", why, member=INDEX_FILE, expected=SCHEMA, actual=min(found, 2**53), advice=advice)


def _is_version(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _VERSION_CHARACTERS and value.isascii() and value.isprintable()


def _member(data: Any) -> Member:
    """Return a member whose fields have the right types; names and numbers are checked afterwards, all together."""
    fields = data if isinstance(data, dict) else {}
    path, digest, size = fields.get("path"), fields.get("sha256"), fields.get("size_bytes")
    if not isinstance(path, str) or not isinstance(digest, str) or type(size) is not int:
        raise refused("bad_index", "names a member without path, sha256 and size_bytes", member=INDEX_FILE)
    return Member(path=path, sha256=digest, size_bytes=size)


def _check(member: Member) -> None:
    place = member.place
    if not is_hash(member.sha256) or member.size_bytes < 0:
        raise refused("bad_index", "has no digest or no size", member=member.path)
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
