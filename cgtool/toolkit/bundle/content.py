"""What the members of one entry must say of each other before it is believed. Must not import torch.

Their bytes were matched to the index by now. Here the records are parsed, as load will parse them, and what one names
must be there, in the index's words, while nothing is there that none names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from cgtool.errors import ArtifactError, CacheCorruptError, CacheSchemaError
from cgtool.plan.records import Plan, parse_plan
from cgtool.records import dataclass
from cgtool.store.artifacts import misplaced, unpack
from cgtool.store.bundle_index import (
    MAX_PLAN_VALUES,
    MAX_RECORD_VALUES,
    PACKAGE_KIND,
    PICKLE_KINDS,
    Member,
    check_values,
    refused,
)
from cgtool.store.key import Key, read_key
from cgtool.store.layout import (
    ARTIFACTS,
    CACHE_FOLDER,
    KEY_FILE,
    MANIFEST_FILE,
    PLAN_FILE,
    CacheLayout,
    RankName,
)
from cgtool.store.records import Manifest, Row, parse_manifest


@dataclass(frozen=True, kw_only=True)
class EntryContent:
    """One entry of a bundle, checked.

    Args:
        hash: Its hash.
        key: Its factors.
        manifests: Of each rank and prefix, in order.
        pickles: The artifacts that torch would unpickle, by member name.
    """

    hash: str
    key: Key
    manifests: tuple[Manifest, ...]
    pickles: tuple[str, ...]

    @property
    def artifacts(self) -> dict[tuple[str, str], int]:
        """The size of each artifact that a manifest names, by digest and kind."""
        return {
            (row.artifact.digest, row.artifact.kind): row.artifact.size_bytes
            for manifest in self.manifests
            for row in manifest.rows
        }


def check_entry(layout: CacheLayout, hash_: str, members: Iterable[Member]) -> EntryContent:
    """Check one entry that lies unpacked under a cache root of its own.

    Args:
        layout: Where it lies.
        hash_: Which entry.
        members: The index's words for its files.

    Raises:
        RefusedError: Something in it is not as cgtool writes it; the error names the member.
        CacheError: It cannot be read.
    """
    there = {member.path: member for member in members}
    base = f"{CACHE_FOLDER}/{hash_}"
    key_name = f"{base}/{KEY_FILE}"
    if key_name not in there:
        raise refused("missing_member", "is missing", member=key_name)
    with _believing(key_name, "corrupt_key"):
        check_growth((layout.root / key_name).read_bytes(), key_name)
        key = read_key(layout, hash_)
    if key is None:
        raise refused("missing_member", "is missing", member=key_name)
    names = sorted(_rank_names(hash_, there.values()), key=lambda name: (name.rank, name.prefix))
    ranks = [_check_rank(layout, name, there) for name in names]
    if not ranks:
        raise refused("missing_member", "is missing", member=f"{base}/rank_0")
    manifests = tuple(manifest for manifest, _ in ranks)
    named = _artifact_names(base, (row for manifest in manifests for row in manifest.rows), there)
    folder = f"{base}/{ARTIFACTS}/"
    for name in there:
        if name.startswith(folder) and name not in named:
            raise refused("unnamed_artifact", "is an artifact that no manifest names", member=name)
    for name in sorted(named):
        if there[name].place.kind == PACKAGE_KIND:
            check_package(layout.root / name, there[name])
    for manifest, plan in ranks:
        _check_origins(layout.root / folder, folder, manifest, plan)
    pickles = tuple(name for name in sorted(named) if there[name].place.kind in PICKLE_KINDS)
    return EntryContent(hash=hash_, key=key, manifests=manifests, pickles=pickles)


def _rank_names(hash_: str, members: Iterable[Member]) -> set[RankName]:
    places = [member.place for member in members]
    return {RankName(hash=hash_, rank=p.rank, prefix=p.prefix) for p in places if p.rank is not None}


def _check_rank(layout: CacheLayout, name: RankName, there: Mapping[str, Member]) -> tuple[Manifest, Plan]:
    folder = f"{CACHE_FOLDER}/{name.hash}/rank_{name.rank}/{name.prefix}"
    manifest_name, plan_name = f"{folder}/{MANIFEST_FILE}", f"{folder}/{PLAN_FILE}"
    for needed in (manifest_name, plan_name):
        if needed not in there:
            raise refused("missing_member", "is missing", member=needed)
    path = layout.root / manifest_name
    with _believing(manifest_name, "corrupt_manifest"):
        data = path.read_bytes()
        check_growth(data, manifest_name)
        manifest = parse_manifest(data, path=path, name=name)
    for file, record in manifest.files.items():
        member = there.get(f"{folder}/{file}")
        if member is None:
            raise refused("missing_member", "is named by its manifest and is missing", member=f"{folder}/{file}")
        if (record.sha256, record.size_bytes) != (member.sha256, member.size_bytes):
            raise refused("digest_mismatch", "is another file than its manifest names", member=member.path)
    ours = {place.file for m in there.values() if (place := m.place).prefix == name.prefix and place.rank == name.rank}
    for file in sorted(ours - manifest.files.keys() - {MANIFEST_FILE}):
        raise refused("unlisted_member", "is named by no manifest", member=f"{folder}/{file}")
    return manifest, _check_plan(layout.root / plan_name, plan_name, manifest)


def _check_plan(path: Path, name: str, manifest: Manifest) -> Plan:
    with _believing(name, "corrupt_plan"):
        data = path.read_bytes()
        check_growth(data, name)
        plan = parse_plan(data, path=path)
    if len(plan.variants) != len(manifest.variants):
        raise refused(
            "corrupt_plan",
            "has other variants than its manifest says",
            member=name,
            expected=len(manifest.variants),
            actual=len(plan.variants),
        )
    pieces = [{step.piece for step in variant.steps} for variant in plan.variants]
    for row in manifest.rows:
        if row.piece_index not in pieces[row.variant]:
            raise refused("corrupt_plan", "lacks a piece that its manifest names", member=name, actual=row.piece_index)
    return plan


def _check_origins(folder: Path, name: str, manifest: Manifest, plan: Plan) -> None:
    """Check that each artifact is what its row says, as load does."""
    for row, error in misplaced(manifest, plan, folder):
        why = f"is not what its manifest says: {_without_remedy(error)}"
        raise refused("strange_artifact", why, member=name + row.artifact.file)


def check_growth(data: bytes, name: str) -> None:
    """Check what a record comes to, before it is parsed.

    Args:
        data: Its bytes.
        name: The member that it is; a text that nobody parses passes.

    Raises:
        RefusedError: bomb.
    """
    file = name.rpartition("/")[2]
    if file == PLAN_FILE:
        check_values(data, member=name, most=MAX_PLAN_VALUES)
    elif file in (KEY_FILE, MANIFEST_FILE):
        check_values(data, member=name, most=MAX_RECORD_VALUES)


def _artifact_names(base: str, rows: Iterator[Row], there: Mapping[str, Member]) -> set[str]:
    found = set()
    for row in rows:
        name = f"{base}/{ARTIFACTS}/{row.artifact.file}"
        member = there.get(name)
        if member is None:
            raise refused("missing_artifact", "is named by a manifest and is missing", member=name)
        if member.size_bytes != row.artifact.size_bytes:
            raise refused(
                "size_mismatch",
                "has another size than its manifest says",
                member=name,
                expected=row.artifact.size_bytes,
                actual=member.size_bytes,
            )
        found.add(name)
    return found


def check_package(path: Path, member: Member) -> None:
    """Check that a package holds native code, kernels and metadata of ours, and nothing else.

    Raises:
        RefusedError: strange_package.
    """
    try:
        unpack(path.read_bytes(), vouched=True)
    except ArtifactError as error:
        why = f"is no package of cgtool's: {_without_remedy(error)}"
        raise refused("strange_package", why, member=member.path) from error


def _without_remedy(error: ArtifactError) -> str:
    return str(error).rpartition(". ")[0]  # whoever imports cannot warm it again


@contextlib.contextmanager
def _believing(member: str, reason: str) -> Iterator[None]:
    """Turn what a stranger's record makes a parser raise into a refusal that names the member."""
    try:
        yield
    except CacheSchemaError as error:
        why = f"has the schema {str(error.actual)[:20]}, and this cgtool reads {error.expected}"
        raise refused("unknown_schema", why, member=member, expected=error.expected) from error
    except (CacheCorruptError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise refused(reason, "is not as cgtool writes it", member=member, actual=str(error)[:500]) from error
    except RecursionError as error:
        raise refused(reason, "is nested without end", member=member) from error
    except MemoryError as error:
        raise refused("too_large", "needs more memory than there is", member=member) from error
