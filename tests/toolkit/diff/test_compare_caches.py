"""Comparing caches: how a side is named, and how entries are paired."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from cache_samples import MACHINE
from compare_samples import lay

from cgtool.errors import CacheError, UsageError
from cgtool.store.layout import KEY_FILE
from cgtool.store.records import Factor, Key
from cgtool.toolkit.bundle.choose import Choice
from cgtool.toolkit.bundle.export import export
from cgtool.toolkit.diff.records import Difference
from cgtool.toolkit.diff.run import Side, diff, machine_differences, open_side


def compare(tmp_path: Path) -> list[Difference]:
    return list(diff(str(tmp_path / "old"), str(tmp_path / "new")).differences)


def test_a_copy_of_a_cache_is_equal(tmp_path):
    lay(tmp_path / "old")
    lay(tmp_path / "old", model="Other", factors={"model": {"class": "toy:Other"}})
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    assert compare(tmp_path) == []


def test_entries_with_the_same_hash_are_compared(tmp_path):
    hash_ = lay(tmp_path / "old").hash
    assert lay(tmp_path / "new", data=b"other").hash == hash_
    (found,) = compare(tmp_path)
    assert found.what == "artifact"
    assert found.path == f"entry {hash_[:10]}: default/general/pieces 0, 2"


def test_the_only_entries_of_a_model_are_paired(tmp_path):
    old, new = lay(tmp_path / "old").hash, lay(tmp_path / "new", factors={"triton": "3.4.0"}).hash
    factor, entry = compare(tmp_path)
    assert factor.sentence == f'Toy, entry {old[:10]} → {new[:10]}: triton was null and is "3.4.0" now'
    assert (entry.what, entry.old, entry.new) == ("entry", old, new)
    assert entry.sentence == f"entry {old[:10]} (Toy) is only in the first, and {new[:10]} only in the second"


def test_several_entries_of_a_model_are_not_paired(tmp_path):
    lay(tmp_path / "old")
    hashes = [lay(tmp_path / "new", factors={"triton": version}).hash for version in ("3.4.0", "3.5.0")]
    found = compare(tmp_path)
    assert [difference.what for difference in found] == ["entry"] * 3
    assert {difference.new for difference in found} == {None, *hashes}


def test_an_unreadable_entry_is_a_difference_and_does_not_hide_others(tmp_path):
    broken, other = lay(tmp_path / "old"), lay(tmp_path / "old", model="Other", factors={"triton": "1"})
    lay(tmp_path / "new", data=b"other")
    (tmp_path / "new" / "torch_compile_cache" / broken.hash / "rank_0" / "backbone" / "manifest.json").write_text("{")
    found = compare(tmp_path)
    assert [difference.path for difference in found] == [broken.hash, other.hash]
    assert "cannot be compared: " in found[0].sentence


def test_an_entry_without_a_key_is_not_paired(tmp_path):
    hash_ = lay(tmp_path / "old").hash
    (tmp_path / "old" / "torch_compile_cache" / hash_ / KEY_FILE).unlink()
    lay(tmp_path / "new", factors={"triton": "1"})
    assert [difference.what for difference in compare(tmp_path)] == ["entry", "entry"]


def side(text, cache_dir=None):
    with open_side(str(text), cache_dir) as found:
        return found


def named(found: Side) -> tuple[Path, str | None]:
    return found.root, found.hash


def test_a_side_is_a_folder_an_entry_or_an_abbreviated_hash(tmp_path):
    entry = lay(tmp_path)
    folder = tmp_path / "torch_compile_cache"
    for whole in (tmp_path, folder):
        assert named(side(whole)) == (tmp_path, None)
    for one in (folder / entry.hash, f"{tmp_path}:{entry.hash[:4]}"):
        assert named(side(one)) == (tmp_path, entry.hash)
    assert named(side(entry.hash[:30].upper(), tmp_path)) == (tmp_path, entry.hash)


@pytest.mark.parametrize("folder", [False, True])
def test_a_bundle_is_its_only_entry_or_a_cache_and_is_removed_afterwards(tmp_path, folder):
    entries = [lay(tmp_path / "cache", factors={"triton": version}) for version in ("3.4.0", "3.5.0")]
    hashes = [entry.hash for entry in entries]
    for name, chosen in (("one", hashes[:1]), ("both", hashes)):
        choice = Choice(hashes=tuple(chosen))
        export(dest=tmp_path / name, choice=choice, cache_dir=tmp_path / "cache", folder=folder)
    with open_side(str(tmp_path / "one")) as one, open_side(str(tmp_path / "both")) as both:
        assert one.hash == (None if folder else hashes[0])
        assert (both.hash, list(both.entries)) == (None, sorted(hashes))
        root = one.root
    assert root.exists() == folder
    assert diff(str(tmp_path / "both"), str(tmp_path / "cache")).equal


def test_an_ambiguous_hash_lists_the_candidates(tmp_path):
    hashes = sorted(lay(tmp_path, factors={"triton": str(i)}).hash for i in range(17))
    first = next(digit for digit in "0123456789abcdef" if sum(hash_[0] == digit for hash_ in hashes) > 1)
    with pytest.raises(UsageError, match=rf"\d entries begin with '{first}' in ") as caught:
        side(first, tmp_path)
    assert str(caught.value).splitlines()[1:] == [f"  {hash_[:10]}" for hash_ in hashes if hash_[0] == first]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("nothing here", "There is no 'nothing here'", id="no path"),
        pytest.param("x" * 5000, "There is no ", id="too long for a path"),
        pytest.param("a\0b", "There is no ", id="null byte"),
        pytest.param("", "There is no ''", id="empty"),
        pytest.param("~nobody-is-called-so", "There is no ", id="no such user"),
        pytest.param("/nowhere:ab", "There is no ", id="no root"),
        pytest.param("zz:ab", "There is no ", id="no such root"),
    ],
)
def test_a_name_without_a_match_is_a_usage_error(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        side(text, tmp_path)


def test_an_unknown_hash_and_an_empty_cache_are_errors(tmp_path):
    with pytest.raises(CacheError, match="holds no entry"):
        side("ab", tmp_path)
    entry = lay(tmp_path)
    with pytest.raises(UsageError, match=f"No entry begins with .*\n  {entry.hash[:10]}"):
        side("f" * 64, tmp_path)


@pytest.mark.parametrize(
    ("changes", "paths"),
    [
        pytest.param({}, [], id="equal"),
        pytest.param({"torch": None}, ["torch"], id="no torch"),
        pytest.param({"capability": None, "compiler": None, "accelerators": None}, [], id="unknown facts"),
        pytest.param(
            {"python": "cpython 3.9", "torch": {**MACHINE.torch, "version": "3"}},
            ["torch.version", "python"],
            id="in order",
        ),
    ],
)
def test_a_machine_is_compared_by_its_known_facts(changes, paths):
    key = Key.of(Factor(name=name, value=value) for name, value in MACHINE.factors.items())
    assert [difference.path for difference in machine_differences(key, replace(MACHINE, **changes))] == paths
