"""What import would refuse is not exported, and is told of before anything is written."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from bundle_maker import lay_entry
from msgspec.structs import replace

from cgtool.errors import CacheError
from cgtool.store.bundle_index import Index, Limits
from cgtool.toolkit.bundle.export import ExportOptions, export
from cgtool.toolkit.bundle.importable import check_importable


@pytest.mark.parametrize(
    ("say", "why"),
    [
        pytest.param(
            "x" * 2**26, r"/plan\.json' of the bundle promises \d+ bytes, and 67108864 are allowed", id="bytes"
        ),
        pytest.param("," * 4_000_001, r"/plan\.json' of the bundle is a record that grows out of all", id="values"),
    ],
)
def test_a_plan_that_import_refuses_is_not_exported(tmp_path: Path, say: str, why: str) -> None:
    lay_entry(tmp_path / "cache", say=say)
    stream = io.BytesIO()
    dests = [(stream, False), (tmp_path / "out" / "one.tar.zst", False), (tmp_path / "out" / "folder", True)]
    (tmp_path / "out").mkdir()
    for dest, folder in dests:
        with pytest.raises(CacheError, match=why) as error:
            export(ExportOptions(dest=dest, cache_dir=tmp_path / "cache", folder=folder))
        assert str(error.value).startswith("Nothing was exported, for import would refuse it. The member")
        assert str(error.value).endswith(". Choose other entries, or fewer of them.")
    assert stream.getvalue() == b""
    assert list((tmp_path / "out").iterdir()) == []


def test_prefixes_that_are_one_name_on_some_file_system_are_not_exported(tmp_path: Path) -> None:
    for prefix in ("backbone", "Backbone"):
        lay_entry(tmp_path, prefix=prefix)
    with pytest.raises(CacheError, match="differs from another in upper and lower case only"):
        export(ExportOptions(dest=io.BytesIO(), cache_dir=tmp_path))


def test_numbers_and_sizes_of_members_have_the_limits_of_import(tmp_path: Path) -> None:
    lay_entry(tmp_path)
    found = export(ExportOptions(dest=io.BytesIO(), cache_dir=tmp_path)).contents
    count, data = len(found.index.members), found.index_bytes
    check_importable(found.index, data, {}, limits=Limits(max_members=count, max_index_bytes=len(data)))
    with pytest.raises(CacheError, match=f"promises {count} members"):
        check_importable(found.index, data, {}, limits=Limits(max_members=count - 1))
    with pytest.raises(CacheError, match=f"has {len(data)} bytes, and {len(data) - 1} are allowed"):
        check_importable(found.index, data, {}, limits=Limits(max_index_bytes=len(data) - 1))
    members = [replace(m, size_bytes=2**32 + 1) if m.path.endswith(".pt2") else m for m in found.index.members]
    with pytest.raises(CacheError, match="of the bundle promises 4294967297 bytes, and 4294967296 are"):
        check_importable(Index(members=tuple(members)), data, {})
