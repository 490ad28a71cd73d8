"""Exporting bundles: their contents byte for byte, what is selected, and how destinations are replaced."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
from bundle_maker import Forge, archive, make_keys, opened
from cache_maker import ADAPTORS, lay_entry, tree

from cgtool.errors import CacheCorruptError, CacheError, RefusedError, UsageError
from cgtool.plan.shapes import shape_text
from cgtool.store.bundle.gather import gather
from cgtool.store.entry import read_entry
from cgtool.store.layout import CacheLayout, RankName
from cgtool.store.leases import claimed
from cgtool.store.records import parse_manifest
from cgtool.toolkit.bundle.choose import Choice
from cgtool.toolkit.bundle.export import export, write_archive
from cgtool.toolkit.bundle.import_ import import_bundle


def exported(root, **choice) -> bytes:
    out = io.BytesIO()
    export(dest=out, cache_dir=root, choice=Choice(**choice))
    return out.getvalue()


def names_in(bundle: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(opened(bundle))) as tar:
        return tar.getnames()


def read_in(bundle: bytes, end: str) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(opened(bundle))) as tar:
        return tar.extractfile(next(name for name in tar.getnames() if name.endswith(end))).read()


def test_a_bundle_is_the_archive_that_tarfile_makes_of_the_entry(tmp_path):
    hash_ = lay_entry(tmp_path)
    forge = Forge.of(tmp_path, hash_)
    bundle = exported(tmp_path)
    index = read_in(bundle, "bundle.json")
    assert archive([*forge.heads(index), *forge.members()]) == opened(bundle)
    assert [member["path"] for member in json.loads(index)["members"]] == sorted(forge.files)


@pytest.mark.skipif(shutil.which("tar") is None or shutil.which("zstd") is None, reason="needs tar and zstd")
def test_tar_and_zstd_unpack_it(tmp_path):
    hash_ = lay_entry(tmp_path / "a")
    bundle = tmp_path / "a.tar.zst"
    bundle.write_bytes(exported(tmp_path / "a"))
    (tmp_path / "b").mkdir()
    subprocess.run(["tar", "-I", "zstd", "-xf", bundle, "-C", tmp_path / "b"], check=True)
    assert Forge.of(tmp_path / "b", hash_).files == Forge.of(tmp_path / "a", hash_).files


def test_the_same_entry_gives_the_same_archive_at_another_place_and_time(tmp_path, monkeypatch):
    lay_entry(tmp_path / "a")
    lay_entry(tmp_path / "a", rank=1)
    first = opened(exported(tmp_path / "a"))
    shutil.copytree(tmp_path / "a", tmp_path / "elsewhere/b")
    for path in (tmp_path / "elsewhere").rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o777 if path.is_dir() else 0o666)
    CacheLayout(root=tmp_path / "elsewhere/b").state_dir.mkdir(exist_ok=True)
    monkeypatch.setattr(time, "time", lambda: 2e9)
    assert opened(exported(tmp_path / "elsewhere/b")) == first
    assert opened(exported(tmp_path / "a")) == first


def test_units_lookup_markers_and_state_are_not_exported(tmp_path):
    hash_ = lay_entry(tmp_path)
    layout = CacheLayout(root=tmp_path)
    (layout.unit_dir("ab" * 32)).mkdir(parents=True)
    (layout.entry_dir(hash_) / "signatures").mkdir()
    (layout.entry_dir(hash_) / "signatures/x.sig").write_text("old")
    orphan = layout.entry_dir(hash_) / f"artifacts/{'ab' * 32}.pt2"
    orphan.write_text("no manifest names it")
    names = names_in(exported(tmp_path))
    assert names[0] == "bundle.json"
    assert {name.split("/")[2] for name in names[1:]} == {"key.json", "artifacts", "rank_0"}
    assert len(names) == 1 + 1 + 4 + 4  # the index, the key, four artifacts, and four files of the rank


def test_several_models_need_a_choice(tmp_path):
    one, other = lay_entry(tmp_path), lay_entry(tmp_path, seed=1, model="Other")
    with pytest.raises(UsageError, match="holds several models") as error:
        exported(tmp_path)
    assert one[:10] in str(error.value)
    assert other[:10] in str(error.value)
    assert {name.split("/")[1] for name in names_in(exported(tmp_path, everything=True))[1:]} == {one, other}
    assert {name.split("/")[1] for name in names_in(exported(tmp_path, hashes=(other[:6],)))[1:]} == {other}
    assert {name.split("/")[1] for name in names_in(exported(tmp_path, filters=("model~oth",)))[1:]} == {other}


@pytest.mark.parametrize("hashes", [("ffff",), ("",), ("../x",), ("zz",)])
def test_an_unknown_hash_lists_the_known_ones(tmp_path, hashes):
    hash_ = lay_entry(tmp_path)
    lay_entry(tmp_path, seed=1)
    with pytest.raises(UsageError, match=rf"begins? with .*Name one of these:[\s\S]*{hash_[:10]}"):
        exported(tmp_path, hashes=hashes)


def test_an_empty_cache_and_filters_without_a_match_are_errors(tmp_path):
    with pytest.raises(CacheError, match=r"holds no entry\. List its entries with"):
        exported(tmp_path)
    lay_entry(tmp_path)
    with pytest.raises(CacheError, match="holds no entry that matches these filters"):
        exported(tmp_path, filters=("model~nothing",))


def test_an_unfinished_entry_is_not_exported(tmp_path):
    hash_ = lay_entry(tmp_path)
    CacheLayout(root=tmp_path).manifest_file(RankName(hash=hash_, rank=0, prefix="backbone")).unlink()
    with pytest.raises(CacheError, match=f"Entry {hash_[:10]} is unfinished"):
        exported(tmp_path, hashes=(hash_[:10],))


def test_a_chosen_rank_is_exported_with_its_artifacts(tmp_path):
    hash_ = lay_entry(tmp_path)
    lay_entry(tmp_path, rank=1)
    names = names_in(exported(tmp_path, ranks=(1,)))
    base = f"torch_compile_cache/{hash_}"
    assert sum(name.startswith(f"{base}/rank_1/") for name in names) == 4
    assert not any(name.startswith(f"{base}/rank_0/") for name in names)
    assert sum(name.startswith(f"{base}/artifacts/") for name in names) == 4
    with pytest.raises(UsageError, match=r"The selected entries have no rank 7\. Name one of these: 0, 1\."):
        exported(tmp_path, ranks=(7,))


def manifest_in(bundle: bytes):
    path = next(name for name in names_in(bundle) if name.endswith("/manifest.json"))
    name = RankName(hash=path.split("/")[1], rank=0, prefix="backbone")
    return parse_manifest(read_in(bundle, "/manifest.json"), path=Path(path), name=name)


def test_chosen_shapes_are_exported_with_a_new_sealed_manifest(tmp_path):
    lay_entry(tmp_path, shapes=("general", "n=8", "n=2-64", "batch=4"))
    bundle = exported(tmp_path, shapes=("n=8", "batch=4"))
    assert [shape_text(row.shape) for row in manifest_in(bundle).rows] == ["batch=4", "batch=4", "n=8", "n=8"]
    assert sum("/artifacts/" in name for name in names_in(bundle)) == 4
    with pytest.raises(UsageError, match=r"has no artifact for n=9\. Its shapes are: general, n=2-64, batch=4, n=8"):
        exported(tmp_path, shapes=("n=9",))


def test_without_debug_files_the_manifest_does_not_name_them(tmp_path):
    lay_entry(tmp_path)
    bundle = exported(tmp_path, debug=False)
    assert not any(name.endswith(".py") for name in names_in(bundle))
    assert list(manifest_in(bundle).files) == ["plan.json"]


@pytest.mark.parametrize("kind", ADAPTORS)
def test_a_corrupt_artifact_is_not_exported(tmp_path, kind):
    hash_ = lay_entry(tmp_path, kind=kind)
    path = next((tmp_path / "torch_compile_cache" / hash_ / "artifacts").iterdir())
    data = bytearray(path.read_bytes())
    data[2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    dest = tmp_path / "out.tar.zst"
    dest.write_text("old")
    with pytest.raises(CacheCorruptError, match=path.name):
        export(dest=dest, cache_dir=tmp_path)
    assert dest.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["CACHEDIR.TAG", "out.tar.zst", "torch_compile_cache"]


def test_an_entry_published_again_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    lay_entry(tmp_path, shapes=("n=8",))

    def published_first(*args, **options):
        monkeypatch.undo()
        lay_entry(tmp_path)
        return read_entry(*args, **options)

    monkeypatch.setattr("cgtool.store.bundle.gather.read_entry", published_first)
    rows = manifest_in(exported(tmp_path)).rows
    assert [shape_text(row.shape) for row in rows] == ["general", "general", "n=8", "n=8"]


@pytest.mark.parametrize("change", ["other", "shorter", "longer", "missing"])
def test_an_artifact_that_changes_during_export_leaves_a_stream_that_import_refuses(tmp_path, change):
    hash_ = lay_entry(tmp_path / "cache")
    layout = CacheLayout(root=tmp_path / "cache")
    contents = gather(layout, [RankName(hash=hash_, rank=0, prefix="backbone")])
    path = max((layout.entry_dir(hash_) / "artifacts").iterdir())
    data = path.read_bytes()
    path.unlink()
    changed = {"other": bytes(len(data)), "shorter": data[:-1], "longer": data + b"x"}
    if change in changed:
        path.write_bytes(changed[change])
    out = io.BytesIO()
    with pytest.raises(CacheCorruptError, match=path.name):
        write_archive(out, contents)
    with pytest.raises(RefusedError) as refusal:
        import_bundle(source=io.BytesIO(out.getvalue()), cache_dir=tmp_path / "there", trust=True)
    assert refusal.value.reason in {"truncated", "not_a_bundle"}  # depends on how much zstd had flushed
    assert not (tmp_path / "there").exists()


def test_a_file_is_replaced_atomically(tmp_path):
    lay_entry(tmp_path / "cache")
    dest = tmp_path / "out.tar.zst"
    dest.write_text("old")
    reader = tmp_path / "reader"
    reader.hardlink_to(dest)
    report = export(dest=dest, cache_dir=tmp_path / "cache")
    assert dest.stat().st_size == report.written_bytes
    assert dest.read_bytes() == exported(tmp_path / "cache")
    assert reader.read_text() == "old"
    with pytest.raises(UsageError, match=r"is a folder\. Name a file such as"):
        export(dest=tmp_path, cache_dir=tmp_path / "cache")


def test_a_folder_is_written_reproducibly_and_never_over_another(tmp_path):
    hash_ = lay_entry(tmp_path / "cache")
    make_keys(tmp_path / "keys", "k")
    dest = tmp_path / "layer"
    options = {"cache_dir": tmp_path / "cache", "folder": True}
    export(dest=dest, **options)
    assert Forge.of(dest, hash_).files == Forge.of(tmp_path / "cache", hash_).files
    assert sorted(path.name for path in dest.iterdir()) == ["bundle.json", "torch_compile_cache"]
    assert {path.stat().st_mtime for path in [dest, *dest.rglob("*")]} == {0}
    with pytest.raises(UsageError, match="already exists"):
        export(dest=dest, **options)
    (tmp_path / "empty").mkdir()
    export(dest=tmp_path / "empty", **options)
    assert tree(tmp_path / "empty") == tree(dest)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "empty", "keys", "layer"]


def test_a_signed_folder_holds_its_signature_where_load_reads_it(tmp_path):
    hash_ = lay_entry(tmp_path / "cache")
    make_keys(tmp_path / "keys", "k")
    dest = tmp_path / "layer"
    export(dest=dest, cache_dir=tmp_path / "cache", folder=True, sign=(tmp_path / "keys/k.pem",))
    kept = sorted((dest / "torch_compile_cache" / hash_ / "signatures").iterdir())
    assert [path.suffix for path in kept] == [".json", ".sig"]
    assert kept[0].read_bytes() == (dest / "bundle.json").read_bytes()
    assert kept[1].read_bytes() == (dest / "bundle.sig").read_bytes()


def test_a_destination_that_cannot_be_written_is_a_clear_error(tmp_path):
    lay_entry(tmp_path / "cache")
    (tmp_path / "file").write_text("")
    for dest in (tmp_path / "absent/out.tar.zst", tmp_path / "file/out.tar.zst"):
        with pytest.raises(CacheError, match=r"could not be written: [^.]+\. .* name another place\."):
            export(dest=dest, cache_dir=tmp_path / "cache")
    with pytest.raises(CacheError, match="could not be written"):
        export(dest=tmp_path / "file/layer", cache_dir=tmp_path / "cache", folder=True)


def test_an_entry_that_a_stopped_prune_holds_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr("cgtool.store.leases._PAUSE_SECS", 0)
    hash_ = lay_entry(tmp_path / "cache")
    with claimed(CacheLayout(root=tmp_path / "cache"), hash_) as mine:
        assert mine
        with pytest.raises(CacheError, match=r"Another process is removing chosen entries from .* Wait until it ends"):
            export(dest=tmp_path / "out.tar.zst", cache_dir=tmp_path / "cache")
    assert not (tmp_path / "out.tar.zst").exists()
    export(dest=tmp_path / "out.tar.zst", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    ("say", "why"),
    [
        pytest.param(
            "x" * 2**26,
            r"/plan\.json' of the bundle is listed with \d+ bytes, but only 67108864 are",
            id="bytes",
        ),
        pytest.param("," * 4_000_001, r"/plan\.json' of the bundle is a record with too many values", id="values"),
    ],
)
def test_a_plan_that_import_refuses_is_not_exported(tmp_path: Path, say: str, why: str) -> None:
    lay_entry(tmp_path / "cache", say=say)
    stream = io.BytesIO()
    dests = [(stream, False), (tmp_path / "out" / "one.tar.zst", False), (tmp_path / "out" / "folder", True)]
    (tmp_path / "out").mkdir()
    for dest, folder in dests:
        with pytest.raises(CacheError, match=why) as error:
            export(dest=dest, cache_dir=tmp_path / "cache", folder=folder)
        assert str(error.value).startswith("Nothing was exported, because import would refuse it. The member")
        assert str(error.value).endswith(". Select other or fewer entries.")
    assert stream.getvalue() == b""
    assert list((tmp_path / "out").iterdir()) == []


def test_prefixes_that_differ_in_case_only_are_not_exported(tmp_path: Path) -> None:
    for prefix in ("backbone", "Backbone"):
        lay_entry(tmp_path, prefix=prefix)
    with pytest.raises(CacheError, match="differs from another only in case"):
        export(dest=io.BytesIO(), cache_dir=tmp_path)
