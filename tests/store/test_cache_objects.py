from __future__ import annotations

import errno
import os

import pytest

from cgtool.errors import CacheCorruptError, CacheError
from cgtool.plan.grammar import sha256_hex
from cgtool.store import entry as objects_module
from cgtool.store.entry import ObjectStore


@pytest.fixture
def objects(tmp_path):
    return ObjectStore(tmp_path / "entry")


def test_an_artifact_is_named_by_what_it_holds(objects):
    digest = objects.put(b"code", "pt2")
    assert digest == sha256_hex(b"code")
    assert [path.name for path in objects.folder.iterdir()] == [f"{digest}.pt2"]
    assert objects.get(digest, "pt2") == b"code"
    assert objects.size(digest, "pt2") == 4


def test_equal_artifacts_are_one_file_that_is_written_once(objects):
    path = objects.path(objects.put(b"code", "pt2"), "pt2")
    inode = path.stat().st_ino
    objects.put(b"code", "pt2")
    assert path.stat().st_ino == inode
    assert len(list(objects.folder.iterdir())) == 1


@pytest.mark.parametrize("harm", [b"", b"cod", b"c0de", b"code "])
def test_a_damaged_artifact_is_never_returned_and_replaced_by_put(objects, harm):
    digest = objects.put(b"code", "pt2")
    path = objects.path(digest, "pt2")
    path.chmod(0o600)
    path.write_bytes(harm)
    with pytest.raises(CacheCorruptError, match=path.name):
        objects.get(digest, "pt2")
    objects.put(b"code", "pt2")
    assert objects.get(digest, "pt2") == b"code"


def test_a_missing_artifact_is_named(objects):
    with pytest.raises(CacheCorruptError, match="is missing"):
        objects.get("ab" * 32, "pt2")
    assert objects.size("ab" * 32, "pt2") is None


@pytest.mark.parametrize(
    ("digest", "kind"), [("../x", "pt2"), ("ab" * 32, "../x"), ("ab" * 32, ""), ("ab" * 32, "a" * 41)]
)
def test_names_outside_of_the_grammar_never_become_paths(objects, digest, kind):
    with pytest.raises(CacheError, match="cannot be"):
        objects.path(digest, kind)


def test_a_link_shares_the_file(objects, tmp_path):
    source = tmp_path / "unit"
    source.write_bytes(b"code")
    objects.link_from(source, sha256_hex(b"code"), "pt2")
    objects.link_from(source, sha256_hex(b"code"), "pt2")
    assert objects.path(sha256_hex(b"code"), "pt2").samefile(source)
    assert len(list(objects.folder.iterdir())) == 1


def test_where_links_do_not_work_the_bytes_are_copied(objects, tmp_path, monkeypatch):
    source = tmp_path / "unit"
    source.write_bytes(b"code")

    def refuse(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(objects_module.os, "link", refuse)
    objects.link_from(source, sha256_hex(b"code"), "pt2")
    assert objects.get(sha256_hex(b"code"), "pt2") == b"code"
    assert not objects.path(sha256_hex(b"code"), "pt2").samefile(source)


def test_a_link_over_a_damaged_artifact_replaces_it(objects, tmp_path):
    source = tmp_path / "unit"
    source.write_bytes(b"code")
    path = objects.path(sha256_hex(b"code"), "pt2")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"harm")
    objects.link_from(source, sha256_hex(b"code"), "pt2")
    assert path.read_bytes() == b"code"


def test_a_source_with_other_bytes_is_not_taken(objects, tmp_path):
    source = tmp_path / "unit"
    source.write_bytes(b"harm")
    with pytest.raises(CacheCorruptError, match="unit is corrupt"):
        objects.link_from(source, sha256_hex(b"code"), "pt2")
    assert not objects.folder.exists()


def test_an_owner_can_remove_what_was_written(objects):
    path = objects.path(objects.put(b"code", "pt2"), "pt2")
    assert path.stat().st_mode & 0o222 == 0
    os.unlink(path)  # noqa: PTH108 - what rm does
    assert not path.exists()


def test_an_artifact_that_cannot_be_looked_at_is_not_called_absent(objects):
    path = objects.path(objects.put(b"code", "pt2"), "pt2")
    path.unlink()
    assert objects.size(sha256_hex(b"code"), "pt2") is None
    path.symlink_to(path)
    with pytest.raises(CacheError, match=path.name):
        objects.size(sha256_hex(b"code"), "pt2")
