"""A corpus of hostile bundles: each is refused for its own reason, and nothing in or around the cache changes."""

from __future__ import annotations

import io
import tarfile

import pytest
from bundle_maker import Forge, index_of, lay_entry, tree
from hostile_bundles import CORPUS, EVIL, replacing

from cgtool.cache.bundle.index import parse_index
from cgtool.cache.bundle.limits import Limits
from cgtool.cache.packages import Package, pack
from cgtool.commands.import_ import ImportOptions, import_bundle
from cgtool.errors import RefusedError


@pytest.fixture(scope="module")
def genuine(tmp_path_factory) -> Forge:
    root = tmp_path_factory.mktemp("genuine")
    return Forge.of(root, lay_entry(root))


@pytest.mark.parametrize(("reason", "make"), CORPUS.values(), ids=CORPUS)
def test_a_hostile_bundle_is_refused_for_its_reason_and_changes_nothing(tmp_path, genuine, reason, make):
    target = tmp_path / "outer" / "cache"
    lay_entry(target, seed=9)
    bundle = tmp_path / "outer" / "hostile.tar.zst"
    bundle.write_bytes(make(genuine))
    before = tree(tmp_path)
    with pytest.raises(RefusedError) as refusal:
        import_bundle(ImportOptions(source=bundle, cache_dir=target, trust=True))
    assert refusal.value.reason == reason
    assert refusal.value.exit_code == 3
    assert tree(tmp_path) == before


def test_the_bundle_that_all_of_them_are_forged_from_is_taken(tmp_path, genuine):
    bundle = tmp_path / "genuine.tar.zst"
    bundle.write_bytes(genuine.bytes())
    report = import_bundle(ImportOptions(source=bundle, cache_dir=tmp_path / "cache", trust=True))
    assert [entry.installed.outcome for entry in report.entries] == ["new"]
    assert Forge.of(tmp_path / "cache", report.entries[0].content.hash).files == genuine.files


def test_a_refusal_leaves_no_cache_where_there_was_none(tmp_path, genuine):
    with pytest.raises(RefusedError):
        import_bundle(
            ImportOptions(source=io.BytesIO(genuine.bytes()[:-1]), cache_dir=tmp_path / "a" / "b", trust=True)
        )
    assert list(tmp_path.iterdir()) == []


def test_every_refusal_names_the_member_and_says_what_to_do(tmp_path, genuine):
    bundle = replacing("/key.json", type=tarfile.SYMTYPE, linkname="/etc/passwd")(genuine)
    with pytest.raises(RefusedError, match=r"is a symbolic link\. Nothing was changed\. Ask whoever") as refusal:
        import_bundle(ImportOptions(source=io.BytesIO(bundle), cache_dir=tmp_path, trust=True))
    assert refusal.value.path == genuine.name("/key.json")


def test_a_name_of_ten_thousand_letters_and_control_characters_is_cut_and_escaped(tmp_path, genuine):
    bundle = genuine.with_file("torch_compile_cache/" + "\x1b[31m" * 2000, EVIL)
    record = index_of(bundle.files)
    with pytest.raises(RefusedError) as refusal:
        import_bundle(ImportOptions(source=io.BytesIO(genuine.bytes(index=record)), cache_dir=tmp_path, trust=True))
    assert refusal.value.reason == "strange_name"
    assert len(str(refusal.value)) < 1500
    assert "\x1b" not in str(refusal.value)


def test_limits_are_the_users(tmp_path, genuine):
    zeros = genuine.with_artifact(pack(Package(native=bytes(48 * 2**20), metadata={})))
    options = ImportOptions(source=io.BytesIO(zeros.bytes()), cache_dir=tmp_path, trust=True, max_ratio=1e6)
    assert import_bundle(options).size_bytes > 48 * 2**20
    small = ImportOptions(source=io.BytesIO(genuine.bytes()), cache_dir=tmp_path / "b", trust=True, max_bytes=100)
    with pytest.raises(RefusedError) as refusal:
        import_bundle(small)
    assert refusal.value.reason == "too_large"


def test_more_members_than_allowed_are_refused(genuine):
    with pytest.raises(RefusedError) as refusal:
        parse_index(index_of(genuine.files), limits=Limits(max_members=3))
    assert refusal.value.reason == "too_large"


def test_without_trust_nothing_is_read(tmp_path):
    class Untouched(io.BytesIO):
        def read(self, *_):
            raise AssertionError

    with pytest.raises(RefusedError) as refusal:
        import_bundle(ImportOptions(source=Untouched(), cache_dir=tmp_path))
    assert refusal.value.reason == "not_trusted"
