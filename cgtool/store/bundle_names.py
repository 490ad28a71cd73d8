"""The names that members of a bundle may have. Must not import torch.

Grammar, over that of `cgtool.store.layout`::

    member = "torch_compile_cache/" hash "/" inner
    inner  = "key.json" | "artifacts/" sha256 "." kind | "rank_" i "/" prefix "/" file
    file   = "manifest.json" | "plan.json" | "computation_graph.py" | "transformed_code.py"
    kind   = "pt2" | "json" | "aot" | "mega" | the name of another adaptor that this process knows

A name is matched to it before it becomes a path. What a stranger may try instead is told apart for the refusal only. A
kind that no adaptor opens is of no use, and nobody can say what it would do.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from cgtool.adaptor_registry import is_kind
from cgtool.records import dataclass
from cgtool.store.layout import (
    ARTIFACTS,
    CACHE_FOLDER,
    KEY_FILE,
    MANIFEST_FILE,
    RANK_FILES,
    is_hash,
    is_prefix,
    parse_rank_folder,
)
from cgtool.store.refusals import refused

INDEX_FILE = "bundle.json"
SIGNATURE_FILE = "bundle.sig"

#: Kinds whose bytes torch unpickles as it opens them.
PICKLE_KINDS = frozenset({"aot", "mega"})
PACKAGE_KIND = "pt2"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a member belongs.

    Args:
        hash: The entry.
        rank: Of a file of a rank folder; else None.
        prefix: Of a file of a rank folder; else "".
        file: The file's own name.
        kind: Of an artifact; else "".
    """

    hash: str
    rank: int | None = None
    prefix: str = ""
    file: str
    kind: str = ""


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
        raise refused(
            "unknown_kind", "is an artifact of a kind that no adaptor here makes", member=name, actual=place.kind
        )
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


def check_distinct(names: Iterable[str]) -> None:
    """Check that no two names are one on some file system.

    Raises:
        RefusedError: duplicate_member, unicode_collision or case_collision.
    """
    whole: set[str] = set()
    composed: set[str] = set()
    folded: set[str] = set()
    for name in names:
        if name in whole:
            raise refused("duplicate_member", "is there twice", member=name)
        one = name if name.isascii() else unicodedata.normalize("NFC", name)
        if one in composed:
            raise refused("unicode_collision", "has the name of another in another spelling of Unicode", member=name)
        small = one.casefold()
        if small in folded:
            raise refused("case_collision", "differs from another in upper and lower case only", member=name)
        whole.add(name)
        composed.add(one)
        folded.add(small)
    # A file system that ignores case would make one folder of two.
    spelled: dict[str, str] = {}
    for name in names_of_folders(whole):
        other = spelled.setdefault(name.casefold(), name)
        if other != name:
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
