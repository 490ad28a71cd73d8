from __future__ import annotations

from pathlib import Path

import pytest

from cgtool.store.layout import CacheLayout, RankName, parse_rank_folder, resolve_root

HASH = "ab" * 32


def test_the_argument_wins_over_the_environment_and_that_over_the_default(monkeypatch, tmp_path, isolated_home):
    assert resolve_root() == isolated_home / ".cache" / "cgtool"
    monkeypatch.setenv("CGTOOL_CACHE_DIR", str(tmp_path / "env"))
    assert resolve_root() == tmp_path / "env"
    assert resolve_root(tmp_path / "argument") == tmp_path / "argument"
    assert resolve_root(str(tmp_path / "argument")) == tmp_path / "argument"


def test_a_root_is_absolute_and_may_be_named_by_the_folder_in_it(monkeypatch, tmp_path, isolated_home):
    monkeypatch.chdir(tmp_path)
    assert resolve_root("here") == tmp_path / "here"
    assert resolve_root(tmp_path / "torch_compile_cache") == tmp_path
    assert resolve_root("~/there") == isolated_home / "there"


def test_everything_lies_where_the_design_puts_it():
    layout = CacheLayout(root=Path("/r"))
    name = RankName(hash=HASH, rank=3, prefix="eagle_head")
    base = "/r/torch_compile_cache"
    assert str(layout.manifest_file(name)) == f"{base}/{HASH}/rank_3/eagle_head/manifest.json"
    assert str(layout.key_file(HASH)) == f"{base}/{HASH}/key.json"
    assert str(layout.unit_dir(HASH)) == f"{base}/units/ab/{HASH}"
    assert str(layout.lookup_dir) == f"{base}/lookup"
    assert str(layout.used_file(name)) == f"{base}/state/used/{HASH}-rank_3-eagle_head"
    assert str(layout.tag) == "/r/CACHEDIR.TAG"


def test_ranks_and_prefixes_are_listed_in_order_and_junk_is_not(tmp_path):
    layout = CacheLayout(root=tmp_path)
    for folder in ("rank_10/b", "rank_2/a", "rank_2/.x", "rank_02/a", "rank_x/a", "other/a"):
        (layout.entry_dir(HASH) / folder).mkdir(parents=True)
    (layout.entry_dir(HASH) / "rank_5").touch()
    (layout.base / "junk").touch()
    assert layout.hashes() == [HASH]
    assert [(name.rank, name.prefix) for name in layout.rank_names(HASH)] == [(2, "a"), (10, "b")]


def test_an_empty_root_lists_nothing(tmp_path):
    assert CacheLayout(root=tmp_path / "no").hashes() == []


@pytest.mark.parametrize(
    ("name", "rank"), [("rank_0", 0), ("rank_17", 17), ("rank_007", None), ("rank_", None), ("rank_1x", None)]
)
def test_rank_folders_are_told_from_others(name, rank):
    assert parse_rank_folder(name) == rank
