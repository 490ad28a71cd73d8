"""Importing genuine bundles: new and merged entries, signatures, and both forms of a bundle."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path

import pytest
from bundle_maker import Forge, index_of, make_keys
from cache_maker import LOOKUP, lay_entry, tree
from cache_samples import resealed

from cgtool.errors import CacheError, RefusedError, UsageError
from cgtool.plan.shapes import shape_text
from cgtool.store.bundle.unpack import unpacked
from cgtool.store.entry import EntryWriter, read_entry
from cgtool.store.key import read_key
from cgtool.store.layout import CacheLayout, RankName
from cgtool.store.lookup import LookupStore
from cgtool.store.signatures import load_private_key, sign
from cgtool.toolkit.bundle.choose import Choice
from cgtool.toolkit.bundle.export import export
from cgtool.toolkit.bundle.import_ import ImportReport, import_bundle
from cgtool.toolkit.listing import scan
from cgtool.toolkit.verify.checks import check_entry


def exported(root: Path, **choice) -> bytes:
    out = io.BytesIO()
    export(dest=out, cache_dir=root, choice=Choice(**choice))
    return out.getvalue()


def imported(source, root: Path, **options) -> ImportReport:
    source = io.BytesIO(source) if isinstance(source, bytes) else source
    return import_bundle(**{"source": source, "cache_dir": root, "trust": True, **options})


def outcomes(report: ImportReport) -> list[tuple[str, int]]:
    return [(entry.outcome, entry.rows_added) for entry in report.entries]


def rows_of(root: Path, hash_: str, rank: int = 0) -> list[tuple[object, int]]:
    entry = read_entry(CacheLayout(root=root), RankName(hash=hash_, rank=rank, prefix="backbone"))
    for row in entry.manifest.rows:
        entry.artifact(row.artifact)
    return [(shape_text(row.shape), row.piece_index) for row in entry.manifest.rows]


def refused(*arguments, **options) -> str:
    with pytest.raises(RefusedError) as refusal:
        imported(*arguments, **options)
    return refusal.value.reason


def test_a_new_entry_is_identical_and_is_found(tmp_path):
    hash_ = lay_entry(tmp_path / "a")
    lay_entry(tmp_path / "a", rank=1)
    report = imported(exported(tmp_path / "a"), tmp_path / "b")
    assert outcomes(report) == [("new", 8)]
    base = Path("torch_compile_cache") / hash_
    assert tree(tmp_path / "b" / base) == tree(tmp_path / "a" / base)
    layout = CacheLayout(root=tmp_path / "b")
    assert tuple(LookupStore(layout).candidates(LOOKUP)) == (hash_,)
    assert (layout.lookup_dir / LOOKUP / hash_).is_file()
    assert layout.tag.is_file()
    assert [path.name for path in layout.base.iterdir() if path.name.startswith(".")] == []


def test_importing_the_same_bundle_again_changes_nothing(tmp_path):
    lay_entry(tmp_path / "a")
    bundle = exported(tmp_path / "a")
    imported(bundle, tmp_path / "b")
    before = tree(tmp_path / "b")
    assert outcomes(imported(bundle, tmp_path / "b")) == [("same", 0)]
    stateless = [{n: v for n, v in seen.items() if "/state" not in n} for seen in (before, tree(tmp_path / "b"))]
    assert stateless[0] == stateless[1]


def test_new_rows_are_merged_with_existing_ones(tmp_path):
    hash_ = lay_entry(tmp_path / "a", shapes=("general", "n=8"))
    lay_entry(tmp_path / "b", shapes=("general", "n=16"))
    assert outcomes(imported(exported(tmp_path / "a"), tmp_path / "b")) == [("merged", 2)]
    assert rows_of(tmp_path / "b", hash_) == [(s, p) for s in ("general", "n=8", "n=16") for p in (0, 2)]


def test_a_rank_is_added_beside_the_existing_one(tmp_path):
    hash_ = lay_entry(tmp_path / "a", rank=1)
    lay_entry(tmp_path / "b", rank=0)
    before = tree(tmp_path / "b/torch_compile_cache" / hash_ / "rank_0")
    assert outcomes(imported(exported(tmp_path / "a"), tmp_path / "b")) == [("merged", 4)]
    assert len(rows_of(tmp_path / "b", hash_, rank=1)) == 4
    assert tree(tmp_path / "b/torch_compile_cache" / hash_ / "rank_0") == before


def test_an_existing_row_wins_over_the_bundles_row(tmp_path):
    hash_ = lay_entry(tmp_path / "a", native_bytes=3000)
    lay_entry(tmp_path / "b", native_bytes=2000)
    before = (tmp_path / "b/torch_compile_cache" / hash_ / "rank_0/backbone/manifest.json").read_bytes()
    assert outcomes(imported(exported(tmp_path / "a"), tmp_path / "b")) == [("same", 0)]
    assert (tmp_path / "b/torch_compile_cache" / hash_ / "rank_0/backbone/manifest.json").read_bytes() == before


def test_a_missing_artifact_is_restored(tmp_path):
    hash_ = lay_entry(tmp_path / "a")
    bundle = exported(tmp_path / "a")
    next((tmp_path / "a/torch_compile_cache" / hash_ / "artifacts").iterdir()).unlink()
    assert outcomes(imported(bundle, tmp_path / "a")) == [("same", 0)]
    assert len(rows_of(tmp_path / "a", hash_)) == 4


@pytest.mark.parametrize("file", ["manifest.json", "plan.json"])
def test_a_torn_file_in_the_cache_is_replaced(tmp_path, file):
    hash_ = lay_entry(tmp_path / "a")
    bundle = exported(tmp_path / "a")
    path = tmp_path / "a/torch_compile_cache" / hash_ / "rank_0/backbone" / file
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    imported(bundle, tmp_path / "a")
    assert path.read_bytes() == whole


def test_another_plan_of_the_same_hash_is_refused_unless_replacing(tmp_path):
    hash_ = lay_entry(tmp_path / "a", say="_a", shapes=("general", "n=32"))
    lay_entry(tmp_path / "b", say="_b")
    bundle = exported(tmp_path / "a")
    before = tree(tmp_path / "b")
    assert refused(bundle, tmp_path / "b") == "other_plan"
    assert tree(tmp_path / "b") == before
    assert outcomes(imported(bundle, tmp_path / "b", replace=True)) == [("merged", 4)]
    plan = Path("torch_compile_cache") / hash_ / "rank_0/backbone/plan.json"
    assert (tmp_path / "b" / plan).read_bytes() == (tmp_path / "a" / plan).read_bytes()


def test_an_entry_of_a_newer_cgtool_in_the_cache_is_left_alone(tmp_path):
    hash_ = lay_entry(tmp_path / "a")
    bundle = exported(tmp_path / "a")
    path = tmp_path / "a/torch_compile_cache" / hash_ / "rank_0/backbone/manifest.json"
    path.write_bytes(resealed(path.read_bytes(), {"record": "manifest-99"}))
    before = tree(tmp_path / "a")
    assert refused(bundle, tmp_path / "a") == "other_schema_here"
    assert tree(tmp_path / "a") == before


def test_a_bundle_without_debug_files_merges_with_an_entry_that_has_them(tmp_path):
    hash_ = lay_entry(tmp_path / "a", shapes=("general", "n=8"))
    lay_entry(tmp_path / "b", shapes=("general", "n=16"))
    imported(exported(tmp_path / "a", debug=False), tmp_path / "b")
    assert len(rows_of(tmp_path / "b", hash_)) == 6
    entry = read_entry(CacheLayout(root=tmp_path / "b"), RankName(hash=hash_, rank=0, prefix="backbone"))
    assert sorted(entry.manifest.files) == ["computation_graph.py", "plan.json", "transformed_code.py"]
    lay_entry(tmp_path / "c", shapes=("general", "n=16"))
    imported(exported(tmp_path / "c", debug=False), tmp_path / "d")
    imported(exported(tmp_path / "a"), tmp_path / "d")
    entry = read_entry(CacheLayout(root=tmp_path / "d"), RankName(hash=hash_, rank=0, prefix="backbone"))
    assert sorted(entry.manifest.files) == ["computation_graph.py", "plan.json", "transformed_code.py"]


def test_a_folder_that_has_served_as_a_cache_is_imported(tmp_path):
    hash_ = lay_entry(tmp_path / "a")
    make_keys(tmp_path / "keys", "k")
    layer = tmp_path / "layer"
    export(dest=layer, cache_dir=tmp_path / "a", folder=True, sign=(tmp_path / "keys/k.pem",))
    list(LookupStore(CacheLayout(root=layer)).candidates(LOOKUP))
    (layer / "CACHEDIR.TAG").write_text("")
    report = imported(layer, tmp_path / "b", trust=False, require_signature=(tmp_path / "keys/k.pub",))
    assert outcomes(report) == [("new", 4)]
    assert Forge.of(tmp_path / "b", hash_).files.keys() == Forge.of(layer, hash_).files.keys()


def _replace(path: Path, make) -> None:
    path.unlink()
    make(path)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)


HOSTILE_FOLDERS = {
    "a link for a file": (
        "link",
        lambda base: _replace(base / "key.json", lambda path: path.symlink_to("/etc/passwd")),
    ),
    "a pipe": ("strange_type", lambda base: _replace(base / "key.json", os.mkfifo)),
    "a file too few": ("missing_member", lambda base: (base / "rank_0/backbone/plan.json").unlink()),
    "other bytes": ("digest_mismatch", lambda base: _flip(base / "rank_0/backbone/plan.json")),
    "a longer file": ("size_mismatch", lambda base: (base / "key.json").write_text("longer" * 1000)),
    "no index": ("not_a_bundle", lambda base: (base.parents[1] / "bundle.json").unlink()),
    "a link for the index": (
        "link",
        lambda base: _replace(base.parents[1] / "bundle.json", lambda p: p.symlink_to("/dev/zero")),
    ),
    "a folder for the signature": ("strange_type", lambda base: (base.parents[1] / "bundle.sig").mkdir()),
}


@pytest.mark.parametrize(("reason", "spoil"), HOSTILE_FOLDERS.values(), ids=HOSTILE_FOLDERS)
def test_a_hostile_folder_is_refused_for_its_reason(tmp_path, reason, spoil):
    hash_ = lay_entry(tmp_path / "a")
    export(dest=tmp_path / "in/layer", cache_dir=tmp_path / "a", folder=True)
    spoil(tmp_path / "in/layer/torch_compile_cache" / hash_)
    lay_entry(tmp_path / "b", seed=9)
    before = tree(tmp_path / "b")
    assert refused(tmp_path / "in/layer", tmp_path / "b") == reason
    assert tree(tmp_path / "b") == before


def test_files_of_a_folder_that_its_index_does_not_name_are_ignored(tmp_path):
    hash_ = lay_entry(tmp_path / "a")
    layer = tmp_path / "layer"
    export(dest=layer, cache_dir=tmp_path / "a", folder=True)
    members = Forge.of(layer, hash_).files.keys()
    lay_entry(layer, seed=9)  # warmed into the folder after the export
    (layer / "link").symlink_to("/")
    os.mkfifo(layer / "torch_compile_cache" / hash_ / "artifacts" / f"{'0' * 64}.pt2")
    (layer / "torch_compile_cache" / hash_ / "rank_1/backbone").mkdir(parents=True)
    (layer / "torch_compile_cache" / hash_ / "rank_1/backbone/plan.json").write_text("{}")
    assert outcomes(imported(layer, tmp_path / "b")) == [("new", 4)]
    assert Forge.of(tmp_path / "b", hash_).files.keys() == members


@pytest.fixture
def keys(tmp_path):
    make_keys(tmp_path / "keys", "ours", "theirs")
    return tmp_path / "keys"


def signed_forge(root: Path, hash_: str, *keys: Path) -> Forge:
    forge = Forge.of(root, hash_)
    return Forge(files=forge.files, signature=sign(index_of(forge.files), [load_private_key(key) for key in keys]))


def test_a_signature_is_accepted_or_refused_with_its_reason(tmp_path, keys):
    hash_ = lay_entry(tmp_path / "a")
    options = {"trust": False, "require_signature": (keys / "ours.pub",)}
    good = signed_forge(tmp_path / "a", hash_, keys / "ours.pem")
    plan = good.name("/plan.json")

    def tampered(members):
        return [
            m if m.name != plan else type(m)(name=m.name, data=m.data.replace(b"torch.sin", b"torch.tan"))
            for m in members
        ]

    cases = {
        "unsigned": Forge.of(tmp_path / "a", hash_).bytes(),
        "untrusted_key": signed_forge(tmp_path / "a", hash_, keys / "theirs.pem").bytes(),
        "wrong_signature": good.with_file(plan, good.files[plan] + b" ").bytes(),
        "tampered": good.bytes(change=tampered),
        "bad_signature_file": Forge(files=good.files, signature=b"{}").bytes(),
    }
    for reason, bundle in cases.items():
        assert refused(bundle, tmp_path / "b", **options) == reason
        assert not (tmp_path / "b").exists()
    report = imported(good.bytes(), tmp_path / "b", **options)
    assert outcomes(report) == [("new", 4)]
    assert len(report.signed_by) == 64


def test_the_signature_is_checked_before_the_index_is_parsed(tmp_path, keys):
    hash_ = lay_entry(tmp_path / "a")
    forge = signed_forge(tmp_path / "a", hash_, keys / "ours.pem")
    bundle = forge.bytes(index=b"[" * 100_000)
    assert refused(bundle, tmp_path / "b", require_signature=(keys / "ours.pub",)) == "wrong_signature"


def test_a_key_removed_from_the_folder_is_no_longer_trusted(tmp_path, keys):
    hash_ = lay_entry(tmp_path / "a")
    bundle = signed_forge(tmp_path / "a", hash_, keys / "ours.pem").bytes()
    folder = tmp_path / "trusted"
    folder.mkdir()
    for name in ("ours.pub", "theirs.pub"):
        (keys / name).rename(folder / name)
    imported(bundle, tmp_path / "b", trust=False, require_signature=(folder,))
    (folder / "ours.pub").unlink()
    assert refused(bundle, tmp_path / "c", trust=False, require_signature=(folder,)) == "untrusted_key"
    (folder / "theirs.pub").unlink()
    with pytest.raises(UsageError, match="There is no public key in"):
        imported(bundle, tmp_path / "c", trust=False, require_signature=(folder,))


def test_an_entry_keeps_its_signature_only_if_it_is_unchanged(tmp_path, keys):
    hash_ = lay_entry(tmp_path / "a")
    bundle = signed_forge(tmp_path / "a", hash_, keys / "ours.pem").bytes()
    folder = Path("torch_compile_cache") / hash_ / "signatures"
    imported(bundle, tmp_path / "new")
    assert sorted(path.suffix for path in (tmp_path / "new" / folder).iterdir()) == [".json", ".sig"]
    imported(bundle, tmp_path / "a")
    assert tree(tmp_path / "a" / folder) == tree(tmp_path / "new" / folder)
    lay_entry(tmp_path / "other", shapes=("n=32",))
    imported(bundle, tmp_path / "other")
    assert not (tmp_path / "other" / folder).exists()


@pytest.mark.parametrize("kind", ["aot", "mega"])
def test_a_bundle_with_pickle_needs_trust_as_well_as_a_signature(tmp_path, keys, kind):
    hash_ = lay_entry(tmp_path / "a", kind=kind)
    bundle = signed_forge(tmp_path / "a", hash_, keys / "ours.pem").bytes()
    signature = {"require_signature": (keys / "ours.pub",)}
    assert refused(bundle, tmp_path / "b", trust=False, **signature) == "pickle"
    report = imported(bundle, tmp_path / "b", **signature)
    assert len(report.warnings) == 1
    assert "and 3 more will be unpickled by torch when loaded" in report.warnings[0]


def test_an_entry_that_this_machine_cannot_load_is_refused_by_default(tmp_path):
    lay_entry(tmp_path / "a", factors={"python": "2.7.18"})
    bundle = exported(tmp_path / "a")
    with pytest.raises(RefusedError, match=r"cannot be loaded on this machine: .*--any-machine") as refusal:
        imported(bundle, tmp_path / "b")
    assert refusal.value.reason == "unsupported"
    assert refusal.value.actual
    assert not (tmp_path / "b").exists()
    report = imported(bundle, tmp_path / "b", any_machine=True)
    assert [entry.verdict for entry in report.entries] == [None]


def test_unpacked_yields_a_temporary_cache(tmp_path):
    hash_ = lay_entry(tmp_path / "a")
    with unpacked(io.BytesIO(exported(tmp_path / "a"))) as root:
        assert len(rows_of(root, hash_)) == 4
        assert CacheLayout(root=root).hashes() == [hash_]
    assert not root.exists()


def test_a_source_that_cannot_be_read_is_a_clear_error(tmp_path):
    with pytest.raises(CacheError, match="could not be read: no such file"):
        imported(tmp_path / "absent", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_stream_is_read_sequentially_in_small_pieces(tmp_path):
    class Pipe(io.RawIOBase):
        def __init__(self, data):
            self.rest = data

        def readable(self):
            return True

        def read(self, size=-1):
            head, self.rest = self.rest[: min(size, 3)], self.rest[min(size, 3) :]
            return head

    lay_entry(tmp_path / "a")
    assert outcomes(imported(Pipe(exported(tmp_path / "a")), tmp_path / "b")) == [("new", 4)]


def test_the_entry_may_be_published_while_it_is_imported(tmp_path):
    hash_ = lay_entry(tmp_path / "a", shapes=("general", "n=8"))
    bundle = exported(tmp_path / "a")
    lay_entry(tmp_path / "b", shapes=("n=16",))
    layout = CacheLayout(root=tmp_path / "b")
    writer = EntryWriter(layout, read_key(layout, hash_), rank=0, prefix="backbone")

    def storm():
        for _ in range(20):
            writer.add_rows([])

    thread = threading.Thread(target=storm)
    thread.start()
    imported(bundle, tmp_path / "b")
    thread.join()
    assert len(rows_of(tmp_path / "b", hash_)) == 6


def test_inspect_and_verify_accept_an_imported_entry(tmp_path, keys):
    hash_ = lay_entry(tmp_path / "a")
    imported(signed_forge(tmp_path / "a", hash_, keys / "ours.pem").bytes(), tmp_path / "b", any_machine=True)
    listing = scan(tmp_path / "b")
    assert (len(listing.entries), listing.warnings) == (1, ())
    findings = check_entry(CacheLayout(root=tmp_path / "b"), hash_)
    assert (findings.problems, findings.notes) == ([], [])
