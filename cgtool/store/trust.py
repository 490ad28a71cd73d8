"""The trust policy of a load: file ownership, or signatures. Must not import torch.

Artifacts are native code, so anyone who can write to a cache can run code in every process that loads from it. Without
trusted keys, every file and folder on the path to an entry must belong to this user or to root, and nobody else may
have write permission. Artifacts themselves are exempt because their bytes are checked against the manifest's digests.
The path starts at the root of the file system, because anyone who can rename a folder above the cache can replace it;
in a sticky folder (/tmp) others cannot. The cache's root must therefore be resolved, and files must be read through
that resolved path.

With trusted keys, an entry must be exactly as it was signed, wherever it is stored. Import keeps the signed index
beside the entry::

    <hash>/signatures/<sha256>.json    bundle.json of the imported bundle; the name is its digest
    <hash>/signatures/<sha256>.sig     bundle.sig

A trusted signature vouches for the index, the index for key.json and the rank's manifest, and the manifest for the
plan and every artifact. An entry that was merged or changed since no longer matches the signature and is refused.
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

_REMEDIES = (
    "Use a private cache (--cache-dir), move trusted entries with cgtool export and import, sign them and set "
    "CGTOOL_TRUSTED_KEYS, or trust everyone who can write there with CGTOOL_ALLOW_SHARED_CACHE=1."
)
#: Signatures to check per entry; others with write permission could add millions.
_MAX_SIGNATURES = 64
#: Reasons for refusing a signed entry, from the least to the most specific.
REASONS = ("unsigned", "untrusted_key", "wrong_signature", "changed")


class Records(msgspec.Struct, frozen=True, kw_only=True):
    """The raw bytes of an entry's two records."""

    key: bytes
    manifest: bytes


class TrustPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The requirements that an entry must meet before any of its content is interpreted.

    Args:
        trusted_keys: Files and folders of public keys, one of which must have signed the entry; if empty, no signature
            is required.
        allow_shared: Whether others may own the cache or write to it.
    """

    trusted_keys: Sequence[Path | str] = ()
    allow_shared: bool = False

    @classmethod
    def of(cls, config: CompilationConfig | None = None, keys: Sequence[Path | str] = ()) -> TrustPolicy:
        """Return the policy of this process, which combines the environment with a configuration.

        `keys` take precedence over the configuration's trusted keys, and those over the environment's.
        """
        env = environment()
        configured = () if config is None else tuple(config.trusted_keys)
        return cls(
            trusted_keys=tuple(keys) or configured or env.trusted_keys,
            allow_shared=env.allow_shared_cache or (config is not None and config.allow_shared_cache),
        )

    def read(self, layout: CacheLayout, name: RankName) -> Records | None:
        """Return the records of a trusted entry under a resolved root, or None if there is no such entry.

        Raises:
            RefusedError: foreign_owner, writable_by_others, unsigned, untrusted_key, wrong_signature or changed.
            UsageError: `trusted_keys` contain no key.
        """
        if not (self.trusted_keys or self.allow_shared):
            check_owner(layout, name)
        key, manifest = read_bytes(layout.key_file(name.hash)), read_bytes(layout.manifest_file(name))
        if key is None or manifest is None:
            return None
        records = Records(key=key, manifest=manifest)
        if self.trusted_keys:
            from cgtool.store.signatures import load_public_keys  # imported lazily: takes tens of milliseconds

            check_signed(layout, name, records, load_public_keys(self.trusted_keys))
        return records

    def check_place(self, layout: CacheLayout, name: RankName) -> None:
        """Check that an existing entry is trusted, because adding to an entry vouches for the rest of it.

        Raises:
            RefusedError: As for `read`.
        """
        layout = CacheLayout(root=resolved(layout.root))
        if os.path.lexists(layout.entry_dir(name.hash)):
            self.read(layout, name)

    def entry(self, layout: CacheLayout, name: RankName, records: Records) -> Entry | None:
        """Return the entry of trusted records; if they were signed, no other version of the manifest is accepted."""
        return read_entry(layout, name, manifest=records.manifest if self.trusted_keys else None)


def resolved(root: Path) -> Path:
    """Resolve the symlinks of a cache root.

    A root that leads through /proc/PID/root into another container is returned as is, because link targets there do not
    name files here. It is refused unless the policy does not check owners.
    """
    real = Path(os.path.realpath(root))
    return real if _identity(real) == _identity(root) else root


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def check_owner(layout: CacheLayout, name: RankName) -> None:
    """Check that only this user and root could have written the files that a load reads from an entry.

    Raises:
        RefusedError: foreign_owner or writable_by_others.
    """
    entry = f"{layout.root}/{CACHE_FOLDER}/{name.hash}"
    rank = f"{entry}/rank_{name.rank}"
    folder = f"{rank}/{name.prefix}"
    folders = (str(layout.root), f"{layout.root}/{CACHE_FOLDER}", entry, f"{entry}/{ARTIFACTS}", rank, folder)
    check_parents(layout.root)
    check_paths((*folders, f"{entry}/{KEY_FILE}", f"{folder}/{MANIFEST_FILE}", f"{folder}/{PLAN_FILE}"))


def check_unit_owner(layout: CacheLayout, key: str) -> None:
    """Check that only this user and root could have written a unit's record, whose digest vouches for its artifact."""
    folder = layout.unit_dir(key)
    check_parents(layout.root)
    check_paths(map(str, (layout.root, layout.base, layout.units_dir, folder.parent, folder, folder / UNIT_FILE)))


def check_parents(root: Path) -> None:
    """Check that nobody else can replace a resolved cache root or any folder above it."""
    for above in (root, *root.parents):
        path = str(above)
        status = _status(path)
        if status is None:
            continue
        if stat.S_ISLNK(status.st_mode):
            raise CacheError(
                f"{path} is a link, but was a folder before. Use the resolved path of the cache.", path=path
            )
        if above != root:  # check_paths checks the root itself
            # In a sticky folder, only the owner of a file can rename it.
            _check_status(path, status, allow_write=bool(status.st_mode & stat.S_ISVTX))


def check_paths(paths: Iterable[str]) -> None:
    """Check that files and folders belong to this user or root, and that nobody else can write to them.

    For a symlink, check the link, its target, and every folder on the path to the target. Missing paths pass, such as
    the artifacts folder of an entry without artifacts.
    """
    for path in paths:
        status = _status(path)
        if status is not None and stat.S_ISLNK(status.st_mode):
            _check_status(path, status, allow_write=True)  # only its owner can replace a link
            check_parents(Path(os.path.realpath(path)))
            status = _status(path, follow=True)
        if status is not None:
            _check_status(path, status)


def _status(path: str, *, follow: bool = False) -> os.stat_result | None:
    try:
        return os.stat(path, follow_symlinks=follow)  # noqa: PTH116 - a str, on the load path
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CacheError(f"{path} cannot be accessed: {error.strerror}. Check its permissions.", path=path) from error


def _check_status(path: str, status: os.stat_result, *, allow_write: bool = False) -> None:
    if not hasattr(os, "geteuid"):
        return  # Windows, where owner and mode do not determine who can write
    user, owner = os.geteuid(), status.st_uid
    if owner not in (user, 0):
        message = f"{path} belongs to another user ({owner}), who could have put any code there. {_REMEDIES}"
        raise RefusedError(message, reason="foreign_owner", path=path, actual=owner)
    mode = 0 if allow_write else status.st_mode
    if mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _is_private_group(path, status.st_gid, user)):
        who = "everyone" if mode & stat.S_IWOTH else "its group"
        actual = f"{mode & 0o7777:04o}"
        raise RefusedError(
            f"{path} is writable by {who}, who could have put any code there. Remove that permission. {_REMEDIES}",
            reason="writable_by_others",
            path=path,
            expected="no write for others",
            actual=actual,
        )


def _is_private_group(path: str, group: int, user: int) -> bool:
    """Return whether a group has no members but the user.

    Many systems create a private group for each user and make the user's files group-writable. If a file has an ACL,
    the group bits of its mode are the ACL mask, an upper bound for everyone whom the ACL names.
    """
    import grp  # imported lazily: queries the user database, only needed for group-writable files
    import pwd

    try:
        group_entry, me = grp.getgrgid(group), pwd.getpwuid(user)
    except KeyError:
        return False
    is_private = group_entry.gr_name == me.pw_name and me.pw_gid == group and set(group_entry.gr_mem) <= {me.pw_name}
    return is_private and not _has_acl(path)


def _has_acl(path: str) -> bool:
    if not hasattr(os, "getxattr"):
        return False  # not Linux
    try:
        os.getxattr(path, "system.posix_acl_access")
    except OSError as error:
        return error.errno not in (errno.ENODATA, errno.ENOTSUP, errno.EOPNOTSUPP)
    return True


def check_signed(layout: CacheLayout, name: RankName, records: Records, keys: PublicKeys) -> str:
    """Return the id of the trusted key whose signature matches an entry.

    Raises:
        RefusedError: unsigned, untrusted_key, wrong_signature or changed; the most specific reason among all signatures
            of the entry.
    """
    from cgtool.store import signatures

    what = f"The entry {short(name.hash)}"
    message = (
        f"{what} was imported without a signature, but the trust policy requires one. Import a signed bundle, load "
        "without trusted keys, or use another cache (--cache-dir)."
    )
    refusal = RefusedError(message, reason="unsigned", path=layout.entry_dir(name.hash))
    for path, index, signed in _signatures(layout, name.hash):
        try:
            if sha256_hex(index) != path.stem:
                raise _changed(name, path)
            signer = signatures.check(index, signed, keys, what=what)
            _check_digests(layout, name, records, index)
        except RefusedError as error:
            if error.reason in REASONS and REASONS.index(error.reason) > REASONS.index(refusal.reason):
                refusal = error
        else:
            return signer
    raise refusal


def _signatures(layout: CacheLayout, hash_: str) -> Iterator[tuple[Path, bytes, bytes]]:
    """Yield the path and bytes of each signed index of an entry, and the bytes of its signature file."""
    from cgtool.store.bundle_index import MAX_SIGNATURE_BYTES, Limits

    folder = layout.entry_dir(hash_) / SIGNATURES
    try:
        stems = sorted(path.stem for path in folder.iterdir() if path.suffix == ".json" and is_hash(path.stem))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise CacheError(f"{folder} cannot be listed: {error.strerror}. Check its permissions.", path=folder) from error
    for stem in stems[:_MAX_SIGNATURES]:
        path = folder / f"{stem}.json"
        index = _read_bounded(path, Limits().max_index_bytes)
        signed = _read_bounded(path.with_suffix(".sig"), MAX_SIGNATURE_BYTES)
        if index is not None and signed is not None:
            yield path, index, signed


def _read_bounded(path: Path, max_bytes: int) -> bytes | None:
    """Return a file's bytes, or None if it is not a regular file or larger than import would write."""
    try:
        status = path.stat()
    except OSError:
        return None
    return read_bytes(path) if stat.S_ISREG(status.st_mode) and status.st_size <= max_bytes else None


def _check_digests(layout: CacheLayout, name: RankName, records: Records, index: bytes) -> None:
    from cgtool.store.bundle_index import Limits, parse_index  # imported lazily: only signed entries need it

    digests = {member.path: member.sha256 for member in parse_index(index, limits=Limits()).members}
    for path, data in ((layout.key_file(name.hash), records.key), (layout.manifest_file(name), records.manifest)):
        if digests.get(path.relative_to(layout.root).as_posix()) != sha256_hex(data):
            raise _changed(name, path)


def _changed(name: RankName, path: Path) -> RefusedError:
    message = (
        f"The entry {short(name.hash)} does not match its signature: {path} was merged or changed since. Import the "
        "signed bundle into an empty cache (--cache-dir), or sign this entry again with cgtool export --sign."
    )
    return RefusedError(message, reason="changed", path=path)
