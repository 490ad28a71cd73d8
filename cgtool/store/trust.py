"""Whose cache load believes: who may have written to it, or who signed it. Must not import torch.

An artifact is native code, so whoever can write to a cache can run code in each process that loads from it. Without
trusted keys, everything on the way to an entry must belong to this user or to root, and nobody else may write to it;
artifacts themselves need no look, since their bytes are matched to digests that the manifest names. The way begins at
the file system's root, for whoever may rename a folder above the cache can put another in its place; in a sticky one
(/tmp) others cannot. So the cache's root must have been resolved, and what is read is read through that very path.

With trusted keys, an entry must be as it was signed, wherever it lies. Import leaves beside it what was signed::

    <hash>/signatures/<sha256>.json    the bundle.json of the bundle that it came in; the name is its digest
    <hash>/signatures/<sha256>.sig     the bundle.sig

A trusted signature vouches for the index, the index for key.json and for the rank's manifest, and the manifest for the
plan and for each artifact. An entry that was merged or changed since is no longer what was signed, and is refused.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cgtool.errors import CacheError, RefusedError
from cgtool.host import environment
from cgtool.plan.grammar import sha256_hex
from cgtool.store.entry import Entry, read_entry
from cgtool.store.files import read_bytes
from cgtool.store.layout import (
    ARTIFACTS,
    CACHE_FOLDER,
    KEY_FILE,
    MANIFEST_FILE,
    PLAN_FILE,
    SIGNATURES,
    UNIT_FILE,
    CacheLayout,
    RankName,
    is_hash,
    short,
)

if TYPE_CHECKING:
    from cgtool.config import CompilationConfig
    from cgtool.store.signatures import PublicKeys

_SHARE = (
    "Use a cache of your own (--cache-dir), move what you trust with cgtool export and import, sign it and set "
    "CGTOOL_TRUSTED_KEYS, or believe whoever can write there with CGTOOL_ALLOW_SHARED_CACHE=1."
)
#: More bundles than one entry comes in; whoever can write there could lay down millions.
_MOST_SIGNATURES = 64
#: Reasons for which one entry is refused; each tells more than those before it.
TELLING = ("unsigned", "untrusted_key", "wrong_signature", "changed")


class Records(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes of an entry's two records, of which nothing was interpreted yet."""

    key: bytes
    manifest: bytes


class TrustPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of an entry before anything of it is interpreted.

    Args:
        trusted_keys: Files and folders of public keys, one of which must have signed it; none asks for no signature.
        allow_shared: Whether others may own the cache or write to it.
    """

    trusted_keys: Sequence[Path | str] = ()
    allow_shared: bool = False

    @classmethod
    def of(cls, config: CompilationConfig | None = None, keys: Sequence[Path | str] = ()) -> TrustPolicy:
        """Return the policy of this process: what is asked for in one place cannot be taken back in another.

        Keys that are given stand before the configuration's and the environment's.
        """
        env = environment()
        configured = () if config is None else tuple(config.trusted_keys)
        return cls(
            trusted_keys=tuple(keys) or configured or env.trusted_keys,
            allow_shared=env.allow_shared_cache or (config is not None and config.allow_shared_cache),
        )

    def read(self, layout: CacheLayout, name: RankName) -> Records | None:
        """Read the records of an entry that may be believed, below a resolved root; None where there is no such entry.

        Raises:
            RefusedError: foreign_owner, writable_by_others, unsigned, untrusted_key, wrong_signature or changed.
            UsageError: There is no key where `trusted_keys` says.
        """
        if not (self.trusted_keys or self.allow_shared):
            check_owner(layout, name)
        key, manifest = read_bytes(layout.key_file(name.hash)), read_bytes(layout.manifest_file(name))
        if key is None or manifest is None:
            return None
        records = Records(key=key, manifest=manifest)
        if self.trusted_keys:
            from cgtool.store.signatures import load_public_keys  # tens of milliseconds, and only under this policy

            check_signed(layout, name, records, load_public_keys(self.trusted_keys))
        return records

    def check_place(self, layout: CacheLayout, name: RankName) -> None:
        """Check that an entry, if it is there already, may be believed: who adds to it vouches for the rest.

        Raises:
            RefusedError: As `read`.
        """
        layout = CacheLayout(root=resolved(layout.root))
        if os.path.lexists(layout.entry_dir(name.hash)):
            self.read(layout, name)

    def entry(self, layout: CacheLayout, name: RankName, records: Records) -> Entry | None:
        """Return the entry of records that were believed; where they were signed, no other manifest is taken."""
        return read_entry(layout, name, manifest=records.manifest if self.trusted_keys else None)


def resolved(root: Path) -> Path:
    """Return a cache root without links; as it is where they lead through /proc/PID/root into another container.

    There the names behind a link say nothing here. Such a root is refused unless the policy asks for no owner.
    """
    found = Path(os.path.realpath(root))
    return found if _identity(found) == _identity(root) else root


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def check_owner(layout: CacheLayout, name: RankName) -> None:
    """Check that only this user and root could have written what load reads of an entry.

    Raises:
        RefusedError: foreign_owner or writable_by_others.
    """
    entry = f"{layout.root}/{CACHE_FOLDER}/{name.hash}"
    rank = f"{entry}/rank_{name.rank}"
    folder = f"{rank}/{name.prefix}"
    folders = (str(layout.root), f"{layout.root}/{CACHE_FOLDER}", entry, f"{entry}/{ARTIFACTS}", rank, folder)
    check_way(layout.root)
    check_paths((*folders, f"{entry}/{KEY_FILE}", f"{folder}/{MANIFEST_FILE}", f"{folder}/{PLAN_FILE}"))


def check_unit_owner(layout: CacheLayout, key: str) -> None:
    """Check that only this user and root could have written a unit's record, whose digest vouches for its artifact."""
    folder = layout.unit_dir(key)
    check_way(layout.root)
    check_paths(map(str, (layout.root, layout.base, layout.units_dir, folder.parent, folder, folder / UNIT_FILE)))


def check_way(root: Path) -> None:
    """Check that nobody else can put another folder in the place of a resolved cache root, or of one above it."""
    for above in (root, *root.parents):
        path = str(above)
        status = _status(path)
        if status is None:
            continue
        if stat.S_ISLNK(status.st_mode):
            raise CacheError(f"{path} is a link, where a folder was. Name the cache by its own path.", path=path)
        if above != root:  # what is asked of it is asked of all that lies in it
            # In a sticky folder only the owner of a file may rename it.
            _check_status(path, status, may_write=bool(status.st_mode & stat.S_ISVTX))


def check_paths(paths: Iterable[str]) -> None:
    """Check that files and folders belong to this user or root, and that nobody else may write to them.

    Where one is a link, that holds for the link, for what it leads to, and for every folder on the way there. What is
    missing passes, as the artifacts of an entry without any.
    """
    for path in paths:
        status = _status(path)
        if status is not None and stat.S_ISLNK(status.st_mode):
            _check_status(path, status, may_write=True)  # its owner alone may replace it
            check_way(Path(os.path.realpath(path)))
            status = _status(path, follow=True)
        if status is not None:
            _check_status(path, status)


def _status(path: str, *, follow: bool = False) -> os.stat_result | None:
    try:
        return os.stat(path, follow_symlinks=follow)  # noqa: PTH116 - a str on the way of a load
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CacheError(f"{path} cannot be looked at: {error.strerror}. Check its permissions.", path=path) from error


def _check_status(path: str, status: os.stat_result, *, may_write: bool = False) -> None:
    if not hasattr(os, "geteuid"):
        return  # Windows, where none of this says who may write
    user, owner = os.geteuid(), status.st_uid
    if owner not in (user, 0):
        message = f"{path} belongs to another user ({owner}), who could have put any code there. {_SHARE}"
        raise RefusedError(message, reason="foreign_owner", path=path, actual=owner)
    mode = 0 if may_write else status.st_mode
    if mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _is_private(path, status.st_gid, user)):
        who = "everyone" if mode & stat.S_IWOTH else "its group"
        actual = f"{mode & 0o7777:04o}"
        raise RefusedError(
            f"{path} can be written to by {who}, who could have put any code there. Take that right away. {_SHARE}",
            reason="writable_by_others",
            path=path,
            expected="no write for others",
            actual=actual,
        )


def _is_private(path: str, group: int, user: int) -> bool:
    """Whether what a group may write is the user's own all the same.

    Systems make a group for each user, whose files are group-writable then. Where a file has an ACL, the mode's bits of
    the group are the most that anyone whom it names may do, and not the group's.
    """
    import grp  # asks the system's user database, and only where a group may write
    import pwd

    try:
        found, me = grp.getgrgid(group), pwd.getpwuid(user)
    except KeyError:
        return False
    own = found.gr_name == me.pw_name and me.pw_gid == group and set(found.gr_mem) <= {me.pw_name}
    return own and not _has_acl(path)


def _has_acl(path: str) -> bool:
    if not hasattr(os, "getxattr"):
        return False  # not Linux
    try:
        os.getxattr(path, "system.posix_acl_access")
    except OSError as error:
        return error.errno not in (errno.ENODATA, errno.ENOTSUP, errno.EOPNOTSUPP)
    return True


def check_signed(layout: CacheLayout, name: RankName, records: Records, keys: PublicKeys) -> str:
    """Return the id of the trusted key that signed an entry as it is.

    Raises:
        RefusedError: unsigned, untrusted_key, wrong_signature or changed: the most telling of all signatures there.
    """
    from cgtool.store import signatures

    what = f"The entry {short(name.hash)}"
    message = (
        f"{what} was not imported with a signature, and this policy asks for one. Import a bundle that was signed, "
        "load without trusted keys, or use another cache (--cache-dir)."
    )
    refusal = RefusedError(message, reason="unsigned", path=layout.entry_dir(name.hash))
    for path, index, signed in _signatures(layout, name.hash):
        try:
            if sha256_hex(index) != path.stem:
                raise _changed(name, path)
            signer = signatures.check(index, signed, keys, what=what)
            _check_digests(layout, name, records, index)
        except RefusedError as error:
            if error.reason in TELLING and TELLING.index(error.reason) > TELLING.index(refusal.reason):
                refusal = error
        else:
            return signer
    raise refusal


def _signatures(layout: CacheLayout, hash_: str) -> Iterator[tuple[Path, bytes, bytes]]:
    """Yield the file of what was signed, its bytes, and the signatures, as import left them; one pair at a time."""
    from cgtool.store.bundle_index import MAX_SIGNATURE_BYTES, Limits

    folder = layout.entry_dir(hash_) / SIGNATURES
    try:
        stems = sorted(path.stem for path in folder.iterdir() if path.suffix == ".json" and is_hash(path.stem))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise CacheError(f"{folder} cannot be listed: {error.strerror}. Check its permissions.", path=folder) from error
    for stem in stems[:_MOST_SIGNATURES]:
        path = folder / f"{stem}.json"
        index = _bounded(path, Limits().max_index_bytes)
        signed = _bounded(path.with_suffix(".sig"), MAX_SIGNATURE_BYTES)
        if index is not None and signed is not None:
            yield path, index, signed


def _bounded(path: Path, most: int) -> bytes | None:
    """Return a file's bytes; None where it is none, or larger than import writes it."""
    try:
        status = path.stat()
    except OSError:
        return None
    return read_bytes(path) if stat.S_ISREG(status.st_mode) and status.st_size <= most else None


def _check_digests(layout: CacheLayout, name: RankName, records: Records, index: bytes) -> None:
    from cgtool.store.bundle_index import (
        Limits,
        parse_index,  # with all else of bundles, which other loads do without
    )

    digests = {member.path: member.sha256 for member in parse_index(index, limits=Limits()).members}
    for path, data in ((layout.key_file(name.hash), records.key), (layout.manifest_file(name), records.manifest)):
        if digests.get(path.relative_to(layout.root).as_posix()) != sha256_hex(data):
            raise _changed(name, path)


def _changed(name: RankName, path: Path) -> RefusedError:
    message = (
        f"The entry {short(name.hash)} is not as it was signed: {path} was merged or changed since. Import the signed "
        "bundle into an empty cache (--cache-dir), or sign this one anew with cgtool export --sign."
    )
    return RefusedError(message, reason="changed", path=path)
