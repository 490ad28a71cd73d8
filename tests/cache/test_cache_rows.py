"""The quick reading of a manifest's rows finds what JSON finds, or says that it cannot."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from cache_samples import sample_key
from hypothesis import given
from hypothesis import strategies as st

from cgtool.cache.layout import RankName
from cgtool.cache.listing import entry_listing
from cgtool.cache.manifest import FileRecord, Manifest, ManifestRow, VariantCounts
from cgtool.cache.rows import RowFigures, figures_of, quick_rows, without_rows
from cgtool.cache.state import Usage
from cgtool.errors import CacheCorruptError, CacheSchemaError

NAME = RankName(hash=sample_key().hash, rank=0, prefix="backbone")
SHAPES = st.one_of(
    st.just("general"),
    st.integers(0, 10**6),
    st.tuples(st.integers(1, 9), st.integers(9, 99)),
    st.dictionaries(st.text(), st.integers(0, 9), min_size=1),
)
ROWS = st.builds(
    ManifestRow,
    variant=st.just(0),
    shape=SHAPES,
    piece_index=st.integers(0, 8),
    adaptor=st.sampled_from(["eager", "aot_inductor"]),
    digest=st.sampled_from(["ab" * 32, "cd" * 32, "ef" * 32]),
    kind=st.sampled_from(["pt2", "json"]),
    size_bytes=st.integers(0, 10**18 - 1),
    compile_secs=st.floats(0, 1e6),
    kernels=st.integers(0, 9),
    guards=st.lists(st.text()).map(tuple),
    proof_gap=st.text(),
)


def manifest(rows: list[ManifestRow]) -> Manifest:
    by_identity = {row.identity: row for row in rows}
    by_file: dict[tuple[str, str], ManifestRow] = {}
    kept = tuple(
        row
        for row in by_identity.values()
        if (by_file.setdefault((row.digest, row.kind), row).size_bytes, by_file[row.digest, row.kind].compile_secs)
        == (row.size_bytes, row.compile_secs)
    )
    return Manifest(
        hash=NAME.hash,
        rank=NAME.rank,
        prefix=NAME.prefix,
        model="Toy",
        level=3,
        adaptor="eager",
        splitting_ops=("ns::attn",),
        variants=(VariantCounts(name="default", pieces=9, splitting_pieces=4, unique_pieces=3),),
        rows=kept,
    )


def in_one_order(figures: RowFigures) -> tuple[object, ...]:
    shapes = sorted(map(repr, figures.shapes))
    return sorted(figures.sizes.items()), sorted(figures.secs.items()), shapes, figures.unshared_bytes


@given(st.lists(ROWS, min_size=1, max_size=12))
def test_the_quick_way_finds_what_json_finds(rows):
    data = manifest(rows).to_bytes()
    quick = quick_rows(data)
    if quick is not None:
        record = json.loads(data)
        assert in_one_order(quick) == in_one_order(figures_of(record["rows"]))
        assert json.loads(without_rows(data)) == {**record, "rows": []}


def row(shape: object = "general", size: int = 7, secs: float = 1.5) -> ManifestRow:
    return ManifestRow(
        variant=0,
        shape=shape,
        piece_index=0,
        adaptor="eager",
        digest="ab" * 32,
        kind="pt2",
        size_bytes=size,
        compile_secs=secs,
        kernels=1,
    )


@pytest.mark.parametrize("shape", ["general", 8, (2, 4), {"batch": 1, "seq": 2}])
def test_the_quick_way_serves_what_cgtool_writes(shape):
    quick = quick_rows(manifest([row(shape)]).to_bytes())
    assert quick == RowFigures(
        sizes={"ab" * 32 + ".pt2": 7}, secs={"ab" * 32 + ".pt2": 1.5}, shapes=(shape,), unshared_bytes=7
    )


def test_json_that_is_laid_out_in_another_way_is_left_to_json():
    data = manifest([row()]).to_bytes()
    assert quick_rows(json.dumps(json.loads(data)).encode()) is None
    assert quick_rows(json.dumps(json.loads(data), indent=2).encode()) is None
    assert quick_rows(manifest([]).to_bytes()) is None
    assert quick_rows(b"") is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param('"size_bytes": 7', '"size_bytes": -7', id="negative size"),
        pytest.param('"size_bytes": 7', '"size_bytes": true', id="no number"),
        pytest.param('"size_bytes": 7', f'"size_bytes": {10**400}', id="more than a disk"),
        pytest.param('"size_bytes": 9', f'"size_bytes": {2**63}', id="more than a file"),
        pytest.param('"compile_secs": 1.5', f'"compile_secs": {10**400}', id="more than ever"),
        pytest.param('"compile_secs": 1.5', '"compile_secs": NaN', id="not a number"),
        pytest.param('"compile_secs": 1.5', '"compile_secs": 1e999', id="infinite"),
        pytest.param('"shape": "general"', '"shape": "all"', id="shape"),
        pytest.param('"artifact": "', '"artefact": "', id="missing field"),
        pytest.param('"variants": [', '"variants": [], "more": [', id="no variant"),
        pytest.param('"rank": 0', '"rank": 1', id="of another folder"),
        pytest.param('"model": "Toy"', '"model": 3', id="model"),
        pytest.param('"rows": [', '"rows": 3, "more": [', id="rows"),
    ],
)
@pytest.mark.parametrize("artifacts", [True, False])
def test_a_field_outside_of_the_grammar_is_a_corrupt_manifest(tmp_path, old, new, artifacts):
    files = {"plan.json": FileRecord(sha256="ab" * 32, size_bytes=9)}
    data = replace(manifest([row()]), files=files).to_bytes().decode()
    assert old in data
    with pytest.raises(CacheCorruptError, match=f"{tmp_path} is corrupt: a field is wrong"):
        entry_listing(data.replace(old, new).encode(), path=tmp_path, name=NAME, usage=Usage(), artifacts=artifacts)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b'{"schema": true}', b"[" * 100_000, b"\xff"])
def test_what_is_no_manifest_is_corrupt(tmp_path, data):
    with pytest.raises(CacheCorruptError):
        entry_listing(data, path=tmp_path, name=NAME, usage=Usage(), artifacts=False)


def test_a_newer_schema_says_so(tmp_path):
    data = manifest([row()]).to_bytes().replace(b'"schema": 2', b'"schema": 9')
    with pytest.raises(CacheSchemaError, match="Update cgtool"):
        entry_listing(data, path=tmp_path, name=NAME, usage=Usage(), artifacts=False)
