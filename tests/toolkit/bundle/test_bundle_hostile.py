"""A corpus of hostile bundles: each is refused for its own reason and changes nothing."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from bundle_maker import Forge, index_of
from cache_maker import lay_entry, tree
from cache_samples import sealed
from hostile_bundles import CONSISTENT, CORPUS, EVIL, replacing

from cgtool.errors import RefusedError
from cgtool.store.artifacts import Package, origin_member, pack
from cgtool.store.bundle_index import Limits, parse_index
from cgtool.toolkit.bundle.import_ import import_bundle


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
        import_bundle(source=bundle, cache_dir=target, trust=True)
    assert refusal.value.reason == reason
    assert refusal.value.exit_code == 3
    assert ".. " not in str(refusal.value)
    assert "Warm" not in str(refusal.value)  # the importing user may not have the model
    assert tree(tmp_path) == before


@pytest.mark.parametrize("form", ["archive", "folder"])
@pytest.mark.parametrize(("reason", "make"), CONSISTENT.values(), ids=CONSISTENT)
def test_a_consistent_hostile_bundle_is_refused_in_either_form(tmp_path, genuine, reason, make, form):
    forge = make(genuine)
    source = tmp_path / form
    if form == "archive":
        source.write_bytes(forge.bytes())
    else:
        for name, data in {**forge.files, "bundle.json": index_of(forge.files)}.items():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(data)
    with pytest.raises(RefusedError) as refusal:
        import_bundle(source=source, cache_dir=tmp_path / "cache", trust=True)
    assert refusal.value.reason == reason
    assert not (tmp_path / "cache").exists()


def test_the_genuine_bundle_behind_the_corpus_is_imported(tmp_path, genuine):
    bundle = tmp_path / "genuine.tar.zst"
    bundle.write_bytes(genuine.bytes())
    report = import_bundle(source=bundle, cache_dir=tmp_path / "cache", trust=True)
    assert [entry.outcome for entry in report.entries] == ["new"]
    assert Forge.of(tmp_path / "cache", report.entries[0].hash).files == genuine.files


def test_a_refusal_does_not_create_a_cache(tmp_path, genuine):
    with pytest.raises(RefusedError):
        import_bundle(source=io.BytesIO(genuine.bytes()[:-1]), cache_dir=tmp_path / "a" / "b", trust=True)
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_names_the_member_and_what_to_do(tmp_path, genuine):
    bundle = replacing("/key.json", type=tarfile.SYMTYPE, linkname="/etc/passwd")(genuine)
    with pytest.raises(RefusedError, match=r"is a symbolic link\. Nothing was changed\. Get an intact copy") as refusal:
        import_bundle(source=io.BytesIO(bundle), cache_dir=tmp_path, trust=True)
    assert refusal.value.path == genuine.name("/key.json")


def test_a_long_name_with_control_characters_is_truncated_and_escaped(tmp_path, genuine):
    bundle = genuine.with_file("torch_compile_cache/" + "\x1b[31m" * 2000, EVIL)
    record = index_of(bundle.files)
    with pytest.raises(RefusedError) as refusal:
        import_bundle(source=io.BytesIO(genuine.bytes(index=record)), cache_dir=tmp_path, trust=True)
    assert refusal.value.reason == "strange_name"
    assert len(str(refusal.value)) < 1500
    assert "\x1b" not in str(refusal.value)


def test_the_user_sets_the_limits(tmp_path, genuine):
    origin = origin_member(genuine.files[genuine.name(".pt2")])
    zeros = genuine.with_artifact(pack(Package(native=bytes(48 * 2**20), metadata={}, origin=origin)))
    report = import_bundle(source=io.BytesIO(zeros.bytes()), cache_dir=tmp_path, trust=True, max_ratio=1e6)
    assert report.size_bytes > 48 * 2**20
    with pytest.raises(RefusedError) as refusal:
        import_bundle(io.BytesIO(genuine.bytes()), cache_dir=tmp_path / "b", trust=True, max_bytes=100)
    assert refusal.value.reason == "too_large"


def test_more_members_than_allowed_are_refused(genuine):
    with pytest.raises(RefusedError) as refusal:
        parse_index(index_of(genuine.files), limits=Limits(max_members=3))
    assert refusal.value.reason == "too_large"


def _values(count: int) -> bytes:
    return b'{"schema":1,"x":[' + b"{}," * (count // 2) + b"0]}"


def _refusal_of(bundle: bytes, folder) -> RefusedError:
    with pytest.raises(RefusedError) as refusal:
        import_bundle(source=io.BytesIO(bundle), cache_dir=folder, trust=True, max_ratio=1e9)
    assert not folder.exists()
    return refusal.value


@pytest.mark.parametrize(("end", "most"), [("/key.json", 2_000_000), ("/manifest.json", 2_000_000)])
def test_a_record_with_too_many_values_is_refused_before_it_is_parsed(tmp_path, genuine, end, most):
    refusal = _refusal_of(genuine.with_file(genuine.name(end), _values(most)).bytes(), tmp_path / "cache")
    assert (refusal.reason, refusal.path, refusal.expected) == ("bomb", genuine.name(end), most)


def test_a_plan_with_too_many_values_is_refused_before_it_is_parsed(tmp_path, genuine):
    refusal = _refusal_of(genuine.with_plan(_values(4_000_000)).bytes(), tmp_path / "cache")
    assert (refusal.reason, refusal.path) == ("bomb", genuine.name("/plan.json"))


def test_an_index_with_too_many_values_or_bytes_is_refused_before_it_is_parsed(tmp_path, genuine):
    assert _refusal_of(genuine.bytes(index=_values(2_000_000)), tmp_path / "cache").reason == "bomb"
    assert _refusal_of(genuine.bytes(index=b" " * (2**25 + 1)), tmp_path / "cache").reason == "too_large"


def test_an_index_that_needs_too_much_memory_is_refused(genuine):
    code = (
        "import resource, sys; from cgtool.store.bundle_index import parse_index, Limits;"
        "data = sys.stdin.buffer.read();"
        "now = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize() + 2**24;"
        "resource.setrlimit(resource.RLIMIT_AS, (now, now)); parse_index(data, limits=Limits())"
    )
    members = [{"path": "x", "sha256": "0" * 64, "size_bytes": 0}] * 100_000
    index = sealed({"record": "bundle-2", "cgtool": "1.0", "members": members})
    ran = subprocess.run([sys.executable, "-c", code], input=index, capture_output=True, check=False)
    assert b"RefusedError: The member 'bundle.json' of the bundle needs more memory" in ran.stderr


@pytest.mark.parametrize("is_dangling", [False, True])
@pytest.mark.parametrize(
    "place",
    [
        "",
        "lookup",
        "state",
        *(f"{{hash}}{end}" for end in ("", "/artifacts", "/signatures", "/rank_0", "/rank_0/backbone")),
    ],
)
def test_an_import_does_not_write_through_a_link_in_the_cache(tmp_path, genuine, place, is_dangling):
    hash_ = lay_entry(tmp_path / "cache")
    link = tmp_path / "cache/torch_compile_cache" / place.format(hash=hash_)
    shutil.rmtree(link, ignore_errors=True)
    link.symlink_to(tmp_path / "outside")
    if not is_dangling:
        (tmp_path / "outside").mkdir()
    before = tree(tmp_path)
    with pytest.raises(RefusedError, match=f"^{link} is a link") as refusal:
        import_bundle(source=io.BytesIO(genuine.bytes()), cache_dir=tmp_path / "cache", trust=True)
    assert refusal.value.reason == "link_here"
    assert tree(tmp_path) == before
    assert link.is_symlink()
    assert is_dangling or not list((tmp_path / "outside").iterdir())


@pytest.mark.parametrize("how", ["a pipe", "a device"])
def test_a_source_that_is_not_a_file_is_refused_without_blocking(tmp_path, how):
    source = tmp_path / "pipe" if how == "a pipe" else Path("/dev/zero")
    if how == "a pipe":
        os.mkfifo(source)
    with pytest.raises(
        RefusedError, match=r"neither a file nor a folder\. Use a file .* or - to read a pipe"
    ) as refusal:
        import_bundle(source=source, cache_dir=tmp_path / "cache", trust=True)
    assert refusal.value.reason == "not_a_bundle"


def test_endless_empty_blocks_are_refused(tmp_path, genuine):
    frame = genuine.bytes()
    head = frame[:6] if not frame[4] & 0x20 else frame[:5]
    stream = io.BytesIO(head + b"\0\0\0" * 10**6)
    with pytest.raises(RefusedError, match="is larger than its decompressed content") as refusal:
        import_bundle(source=stream, cache_dir=tmp_path, trust=True)
    assert refusal.value.reason == "bad_compression"
    assert stream.tell() < 2 * 2**20


def test_without_trust_nothing_is_read(tmp_path):
    class Untouched(io.BytesIO):
        def read(self, *_):
            raise AssertionError

    with pytest.raises(RefusedError) as refusal:
        import_bundle(source=Untouched(), cache_dir=tmp_path)
    assert refusal.value.reason == "not_trusted"
