"""The trust policy: owners, permissions and signatures."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import msgspec
import pytest
from bundle_maker import make_keys
from cache_maker import lay_entry
from cache_samples import sealed

from cgtool.errors import CacheError, RefusedError, UsageError
from cgtool.plan.grammar import sha256_hex
from cgtool.store import trust
from cgtool.store.entry import EntryWriter, read_entry
from cgtool.store.key import read_key
from cgtool.store.layout import CacheLayout, RankName
from cgtool.store.trust import TrustPolicy
from cgtool.toolkit.bundle.choose import Choice
from cgtool.toolkit.bundle.export import export
from cgtool.toolkit.bundle.import_ import import_bundle

OTHER_USER = 54321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


def check(root: Path, hash_: str, **policy: object) -> None:
    layout = CacheLayout(root=root)
    assert TrustPolicy(**policy).read(layout, RankName(hash=hash_, rank=0, prefix="backbone")) is not None


def reason(root: Path, hash_: str, **policy: object) -> str:
    with pytest.raises(RefusedError) as refusal:
        check(root, hash_, **policy)
    assert refusal.value.exit_code == 3
    return refusal.value.reason


PLACES = (
    "",
    "torch_compile_cache",
    "torch_compile_cache/{hash}",
    "torch_compile_cache/{hash}/key.json",
    "torch_compile_cache/{hash}/artifacts",
    "torch_compile_cache/{hash}/rank_0",
    "torch_compile_cache/{hash}/rank_0/backbone",
    "torch_compile_cache/{hash}/rank_0/backbone/manifest.json",
    "torch_compile_cache/{hash}/rank_0/backbone/plan.json",
)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("right", [0o002, 0o020], ids=["everyone", "the group"])
def test_path_writable_by_others_is_refused(tmp_path, place, right):
    root = tmp_path / "cache"
    hash_ = lay_entry(root)
    check(root, hash_)
    path = root / place.format(hash=hash_)
    os.chown(path, -1, OTHER_USER) if os.geteuid() == 0 else None
    path.chmod(path.stat().st_mode | right)
    with pytest.raises(RefusedError, match=str(path)) as refusal:
        check(root, hash_)
    assert refusal.value.reason == "writable_by_others"
    check(root, hash_, allow_shared=True)


@needs_root
@pytest.mark.parametrize("place", PLACES)
def test_path_owned_by_another_user_is_refused(tmp_path, place):
    root = tmp_path / "cache"
    hash_ = lay_entry(root)
    path = root / place.format(hash=hash_)
    os.chown(path, OTHER_USER, -1)
    with pytest.raises(RefusedError, match=str(path)) as refusal:
        check(root, hash_)
    assert refusal.value.reason == "foreign_owner"
    assert refusal.value.actual == OTHER_USER
    check(root, hash_, allow_shared=True)


@needs_root
def test_files_of_root_are_trusted(tmp_path):
    root = tmp_path / "cache"
    hash_ = lay_entry(root)
    for folder in (tmp_path, *tmp_path.parents):  # pytest keeps its folders to itself
        if not folder.stat().st_mode & 0o001:
            folder.chmod(0o755)
    child = os.fork()
    if child == 0:
        os.seteuid(OTHER_USER)
        try:
            check(root, hash_)
        except BaseException:  # noqa: BLE001 - nothing may run on as the parent's twin
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("right", [0o002, 0o020], ids=["everyone", "the group"])
def test_writable_parent_folder_is_refused_unless_it_is_sticky(tmp_path, right):
    above = tmp_path / "above"
    hash_ = lay_entry(above / "between" / "cache")
    os.chown(above, -1, OTHER_USER) if os.geteuid() == 0 else None
    above.chmod(0o755 | right)
    assert reason(above / "between" / "cache", hash_) == "writable_by_others"
    check(above / "between" / "cache", hash_, allow_shared=True)
    above.chmod(0o1755 | right)
    check(above / "between" / "cache", hash_)


@needs_root
def test_parent_folder_owned_by_another_user_is_refused(tmp_path):
    hash_ = lay_entry(tmp_path / "above" / "cache")
    os.chown(tmp_path / "above", OTHER_USER, -1)
    (tmp_path / "above").chmod(0o1755)  # its owner may rename in it all the same
    assert reason(tmp_path / "above" / "cache", hash_) == "foreign_owner"


def test_root_replaced_by_a_symlink_is_not_followed(tmp_path):
    hash_ = lay_entry(tmp_path / "cache")
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    with pytest.raises(CacheError, match="is a link, but was a folder before"):
        check(tmp_path / "link", hash_)


def test_write_permission_for_a_private_group_is_accepted(tmp_path):
    root = tmp_path / "cache"
    hash_ = lay_entry(root)
    if not trust._is_private_group(str(root), os.getegid(), os.geteuid()):
        pytest.skip("this user has no group of its own")
    root.chmod(0o775)
    check(root, hash_)


def test_acl_that_grants_write_permission_is_refused(tmp_path):
    root = tmp_path / "cache"
    hash_ = lay_entry(root)
    if not trust._is_private_group(str(root), os.getegid(), os.geteuid()):
        pytest.skip("this user has no group of its own")
    everyone = 0xFFFFFFFF  # the entries for the owner, a user, the owning group, the mask and all others
    entries = [(1, 7, everyone), (2, 7, OTHER_USER), (4, 5, everyone), (0x10, 7, everyone), (0x20, 5, everyone)]
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(root / "torch_compile_cache" / hash_ / "rank_0", "system.posix_acl_access", acl)
    except OSError:
        pytest.skip("this file system has no ACLs")
    assert reason(root, hash_) == "writable_by_others"


@pytest.fixture
def signed(tmp_path):
    """A cache into which a signed bundle of two entries was imported, and the trusted keys."""
    make_keys(tmp_path / "keys", "ours", "theirs")
    hashes = [lay_entry(tmp_path / "source", seed=seed) for seed in range(2)]
    bundle = tmp_path / "signed.tar.zst"
    choice = Choice(everything=True)
    key = tmp_path / "keys/ours.pem"
    export(dest=bundle, choice=choice, cache_dir=tmp_path / "source", sign=(key,))
    import_bundle(source=bundle, cache_dir=tmp_path / "cache", trust=True, any_machine=True)
    return tmp_path / "cache", min(hashes), tmp_path / "keys/ours.pub"


def test_signed_entry_is_trusted_regardless_of_its_owner(signed):
    root, hash_, key = signed
    check(root, hash_, trusted_keys=[key])
    root.chmod(0o777)
    check(root, hash_, trusted_keys=[str(key)])


def test_unsigned_entry_is_refused(signed, tmp_path):
    _, hash_, key = signed
    assert reason(tmp_path / "source", hash_, trusted_keys=[key]) == "unsigned"


def test_entry_signed_by_an_untrusted_key_is_refused(signed, tmp_path):
    root, hash_, _ = signed
    assert reason(root, hash_, trusted_keys=[tmp_path / "keys/theirs.pub"]) == "untrusted_key"


@pytest.mark.parametrize(
    ("end", "why"), [(".json", "changed"), (".json renamed", "wrong_signature"), (".sig", "wrong_signature")]
)
def test_signature_of_something_else_is_refused(signed, end, why):
    root, hash_, key = signed
    path = next((root / "torch_compile_cache" / hash_ / "signatures").glob(f"*{end.split()[0]}"))
    data = path.read_bytes()
    if end == ".sig":
        record = json.loads(data)
        record["signatures"][0]["signature"] = "A" * 86 + "=="
        path.write_bytes(json.dumps(record).encode())
    else:
        path.write_bytes(data.replace(b'"size_bytes"', b'"Size_bytes"', 1))
    if end == ".json renamed":
        stem = sha256_hex(path.read_bytes())
        for each in (path, path.with_suffix(".sig")):
            each.rename(each.with_stem(stem))
    assert reason(root, hash_, trusted_keys=[key]) == why


@pytest.mark.parametrize("what", ["a pipe", "gigabytes", "a folder"])
def test_files_that_are_not_signatures_are_ignored(signed, what):
    root, hash_, key = signed
    path = root / "torch_compile_cache" / hash_ / "signatures" / ("0" * 64 + ".json")
    path.with_suffix(".sig").write_bytes(b"{}")
    if what == "a pipe":
        os.mkfifo(path)
    elif what == "a folder":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 2**40)
    check(root, hash_, trusted_keys=[key])


def test_excess_signatures_are_not_read(signed):
    root, hash_, key = signed
    folder = root / "torch_compile_cache" / hash_ / "signatures"
    for number in range(64):
        for end in (".json", ".sig"):
            (folder / f"{number:064x}{end}").write_bytes(b"{}")
    assert reason(root, hash_, trusted_keys=[key]) == "changed"
    (folder / f"{0:064x}.json").unlink()
    check(root, hash_, trusted_keys=[key])


def test_merged_manifest_is_no_longer_signed(signed):
    root, hash_, key = signed
    layout = CacheLayout(root=root)
    name = RankName(hash=hash_, rank=0, prefix="backbone")
    EntryWriter(layout, read_key(layout, hash_), rank=0, prefix="backbone").update(
        lambda entry: (entry.manifest.with_rows([]), {"computation_graph.py": b"# another\n"})
    )
    assert reason(root, hash_, trusted_keys=[key]) == "changed"
    assert read_entry(layout, name) is not None


def test_changed_key_is_no_longer_signed(signed):
    root, hash_, key = signed
    path = root / "torch_compile_cache" / hash_ / "key.json"
    path.write_bytes(sealed({**json.loads(path.read_bytes()), "cgtool": "9.9"}))
    assert reason(root, hash_, trusted_keys=[key]) == "changed"


def test_only_the_signed_manifest_is_read(signed):
    root, hash_, key = signed
    layout = CacheLayout(root=root)
    name, policy = RankName(hash=hash_, rank=0, prefix="backbone"), TrustPolicy(trusted_keys=[key])
    records = policy.read(layout, name)
    rows = read_entry(layout, name).manifest.rows
    EntryWriter(layout, read_key(layout, hash_), rank=0, prefix="backbone").update(
        lambda entry: (msgspec.structs.replace(entry.manifest, rows=()), {})
    )
    assert policy.entry(layout, name, records).manifest.rows == rows
    assert reason(root, hash_, trusted_keys=[key]) == "changed"


@pytest.mark.parametrize("place", PLACES[2:])
def test_symlink_to_a_trusted_folder_is_followed(tmp_path, place):
    root = tmp_path / "cache"
    hash_ = lay_entry(root)
    path, elsewhere = root / place.format(hash=hash_), tmp_path / "elsewhere"
    elsewhere.mkdir()
    path.rename(elsewhere / "moved")
    path.symlink_to(elsewhere / "moved")
    check(root, hash_)
    elsewhere.chmod(0o777)
    assert reason(root, hash_) == "writable_by_others"
    elsewhere.chmod(0o1777)
    check(root, hash_)


@needs_root
def test_symlink_owned_by_another_user_is_refused(tmp_path):
    root = tmp_path / "cache"
    hash_ = lay_entry(root)
    path = root / "torch_compile_cache" / hash_ / "key.json"
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    os.chown(path, OTHER_USER, -1, follow_symlinks=False)
    assert reason(root, hash_) == "foreign_owner"


def test_signature_of_another_entry_is_not_accepted(signed, tmp_path):
    root, hash_, key = signed
    base = root / "torch_compile_cache"
    third = lay_entry(root, seed=3)
    (base / third / "signatures").mkdir()
    for path in (base / hash_ / "signatures").iterdir():
        (base / third / "signatures" / path.name).write_bytes(path.read_bytes())
    assert reason(root, third, trusted_keys=[key]) == "changed"


def test_missing_trusted_keys_are_an_error(signed, tmp_path):
    root, hash_, _ = signed
    with pytest.raises(UsageError, match="There is no key at"):
        check(root, hash_, trusted_keys=[tmp_path / "absent.pub"])


def test_signed_folder_export_is_a_signed_cache(signed, tmp_path):
    _, hash_, key = signed
    export(
        dest=tmp_path / "layer",
        choice=Choice(everything=True),
        cache_dir=tmp_path / "source",
        folder=True,
        sign=(key.with_suffix(".pem"),),
    )
    check(tmp_path / "layer", hash_, trusted_keys=[key])
