from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cache_samples import manifest_of, put_row, with_shape, writer
from hypothesis import given
from hypothesis import strategies as st

from cgtool.cache.fallbacks import Fallback
from cgtool.cache.layout import RANK_FILES, RankName
from cgtool.cache.manifest import FileRecord, Manifest, ManifestRow, VariantCounts, parse_manifest
from cgtool.cache.shapes import shape_from_json, shape_text, shape_to_json, shape_words
from cgtool.errors import CacheCorruptError, CacheError, CacheSchemaError

HASHES = st.text("0123456789abcdef", min_size=64, max_size=64)
SIZES = st.integers(1, 10**9)
SHAPES = st.one_of(
    st.just("general"),
    st.just(0),
    st.just({"batch": 0}),
    SIZES,
    st.tuples(SIZES, SIZES).map(lambda pair: (min(pair), max(pair))),
    st.dictionaries(st.text(min_size=1), SIZES, min_size=1, max_size=3),
)
ROWS = st.builds(
    ManifestRow,
    variant=st.integers(0, 2),
    shape=SHAPES,
    piece_index=st.integers(0, 99),
    adaptor=st.sampled_from(["eager", "inductor", "inductor_standalone"]),
    digest=HASHES,
    kind=st.sampled_from(["eager", "pt2", "eager.json"]),
    size_bytes=st.integers(0, 2**40),
    compile_secs=st.floats(0, 1e6, allow_nan=False),
    kernels=st.integers(0, 99),
    guards=st.lists(st.text(), max_size=2).map(tuple),
)
VARIANTS = st.builds(
    VariantCounts,
    name=st.text(),
    pieces=st.just(100),
    splitting_pieces=st.integers(0, 50),
    unique_pieces=st.integers(0, 50),
    fixed=st.dictionaries(st.text(), SIZES, max_size=2),
)
MANIFESTS = st.builds(
    Manifest,
    hash=HASHES,
    rank=st.integers(0, 4096),
    prefix=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,20}", fullmatch=True),
    model=st.text(),
    level=st.integers(0, 3),
    adaptor=st.just("inductor"),
    splitting_ops=st.lists(st.text(), max_size=3).map(tuple),
    variants=st.lists(VARIANTS, min_size=3, max_size=3).map(tuple),
    rows=st.lists(ROWS, max_size=8, unique_by=lambda row: row.identity).map(tuple),
    files=st.dictionaries(
        st.sampled_from(RANK_FILES), st.builds(FileRecord, sha256=HASHES, size_bytes=st.integers(0, 10**9))
    ),
    lookup=st.lists(HASHES, max_size=2).map(tuple),
    created=st.just("2026-01-31T12:00:00.123Z"),
    extra=st.dictionaries(st.text(), st.integers() | st.text(), max_size=2),
)
PATH = Path("manifest.json")


def read(manifest, data):
    return parse_manifest(data, path=PATH, name=manifest.name)


@given(MANIFESTS)
def test_a_manifest_is_read_back_as_it_was(manifest):
    again = read(manifest, manifest.to_bytes())
    assert {row.identity for row in again.rows} == {row.identity for row in manifest.rows}
    ordered = replace(again, rows=manifest.rows, cgtool=None)
    assert ordered == manifest
    assert set(map(repr, again.rows)) == set(map(repr, manifest.rows))
    assert again.to_bytes() == manifest.to_bytes()


@given(MANIFESTS, st.randoms())
def test_its_bytes_do_not_depend_on_the_order_of_rows(manifest, random):
    rows = list(manifest.rows)
    random.shuffle(rows)
    assert replace(manifest, rows=tuple(rows)).to_bytes() == manifest.to_bytes()


@given(MANIFESTS, st.data())
def test_no_changed_byte_changes_what_is_read(manifest, data):
    whole = manifest.to_bytes()
    position = data.draw(st.integers(0, len(whole) - 1))
    harmed = whole[:position] + bytes([data.draw(st.integers(0, 255))]) + whole[position + 1 :]
    try:
        again = read(manifest, harmed)
    except (CacheCorruptError, CacheSchemaError):
        return
    assert again == read(manifest, whole)


@given(MANIFESTS, st.lists(ROWS, max_size=5))
def test_added_rows_replace_those_of_their_identity_and_keep_the_others(manifest, rows):
    merged = manifest.with_rows(rows)
    wanted = {row.identity: row for row in (*manifest.rows, *rows)}
    assert {row.identity: row for row in merged.rows} == wanted
    assert len(merged.rows) == len(wanted)


@given(SHAPES)
def test_a_shape_is_read_back_as_it_was(shape):
    assert shape_from_json(shape_to_json(shape)) == shape


@pytest.mark.parametrize(
    "shape",
    [-1, True, 1.0, "generic", None, [], [1], [1, 2, 3], [2, 1], [0, 4], [1, True], {}, {"b": -1}, {"b": "1"}],
)
def test_what_is_no_shape_is_refused(shape):
    with pytest.raises(CacheError, match="general"):
        shape_from_json(shape)


def test_shapes_have_one_spelling():
    assert shape_text({"b": 1, "a": 2}) == shape_text({"a": 2, "b": 1})
    assert len({shape_text(shape) for shape in ("general", 1, (1, 1), {"a": 1})}) == 4


@pytest.mark.parametrize(
    ("shape", "shown"), [("general", "general"), (8, "8"), ((1, 16), "1-16"), ({"batch": 4, "seq": 2}, "batch=4 seq=2")]
)
def test_shapes_for_people_are_the_same_of_a_shape_and_of_its_json(shape, shown):
    assert shape_words(shape) == shape_words(shape_to_json(shape)) == shown


@pytest.fixture
def manifest(cache_root):
    to = writer(cache_root)
    return manifest_of(to, (put_row(to),))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"files": {"../../evil.py": {"sha256": "ab" * 32, "size_bytes": 1}}}, id="file outside"),
        pytest.param({"files": {"plan.json": {"sha256": "../x", "size_bytes": 1}}}, id="file digest"),
        pytest.param({"hash": "x"}, id="hash"),
        pytest.param({"prefix": "../up"}, id="prefix"),
        pytest.param({"prefix": ".hidden"}, id="hidden prefix"),
        pytest.param({"rank": -1}, id="rank"),
        pytest.param({"rank": "0"}, id="rank as text"),
        pytest.param({"variants": []}, id="no variant"),
        pytest.param({"variants": None}, id="variants null"),
        pytest.param({"rows": {}}, id="rows object"),
        pytest.param({"rows": [{}]}, id="empty row"),
        pytest.param({"rows": [None]}, id="row null"),
        pytest.param({"lookup": ["../x"]}, id="lookup"),
        pytest.param({"splitting_ops": "ns::op"}, id="splitting ops as text"),
    ],
)
def test_a_sealed_manifest_that_breaks_the_grammar_is_corrupt(manifest, change, monkeypatch):
    body = {**manifest.to_json(), **change}
    if change == {"rows": {}}:
        body["rows"] = {"variant": 1}
    monkeypatch.setattr(Manifest, "to_json", lambda self: body)
    with pytest.raises(CacheCorruptError, match=r"manifest\.json is corrupt: a field is wrong"):
        read(manifest, manifest.to_bytes())


@pytest.mark.parametrize(
    "change",
    [
        {"artifact": "../../etc/passwd"},
        {"kind": "a/b"},
        {"kind": ".."},
        {"kind": "PT2"},
        {"piece_index": 9},
        {"piece_index": -1},
        {"variant": 1},
        {"shape": [2, 1]},
        {"size_bytes": None},
        {"compile_secs": "1"},
        {"adaptor": "a b"},
        {"guards": [1]},
    ],
    ids=str,
)
def test_a_sealed_row_that_breaks_the_grammar_is_corrupt(manifest, change, monkeypatch):
    body = manifest.to_json()
    body["rows"] = [{**body["rows"][0], **change}]
    monkeypatch.setattr(Manifest, "to_json", lambda self: body)
    with pytest.raises(CacheCorruptError, match="a field is wrong"):
        read(manifest, manifest.to_bytes())


def test_two_rows_of_one_identity_are_corrupt(manifest):
    twice = replace(manifest, rows=manifest.rows * 2)
    with pytest.raises(CacheCorruptError, match="one row of each identity"):
        read(manifest, twice.to_bytes())


def test_a_row_is_found_by_its_identity(manifest):
    row = manifest.rows[0]
    ranged = with_shape(row, (2, 8))
    both = manifest.with_rows([ranged])
    assert both.row(variant=0, shape="general", piece_index=0, adaptor="eager") == row
    assert both.row(variant=0, shape=(2, 8), piece_index=0, adaptor="eager") == ranged
    assert both.row(variant=0, shape=8, piece_index=0, adaptor="eager") is None


def test_a_fallback_takes_the_rows_of_what_it_fell_from(manifest):
    row = replace(manifest.rows[0], adaptor="aot_inductor")
    whole = replace(manifest, rows=(row, with_shape(row, 8), replace(row, piece_index=1)))

    def fallen(adaptor):
        fallback = Fallback(variant=0, piece_index=0, shape="general", adaptor=adaptor, reason="other numbers")
        rows = whole.with_rows([replace(row, adaptor=adaptor)], [fallback]).rows
        return {(row.piece_index, row.shape, row.adaptor) for row in rows}

    other = (1, "general", "aot_inductor")
    standalone = "inductor_standalone"
    assert fallen(standalone) == {(0, "general", standalone), (0, 8, "aot_inductor"), other}
    assert fallen("eager") == {(0, "general", "eager"), other}  # as it stands, a piece serves all sizes


@pytest.mark.parametrize(
    ("hash_", "rank", "prefix"),
    [
        ("ab", 0, "backbone"),
        ("ab" * 32, -1, "backbone"),
        ("ab" * 32, 0, "../x"),
        ("ab" * 32, 0, ""),
        ("ab" * 32, 0, "a/b"),
    ],
)
def test_a_name_outside_of_the_grammar_is_refused(hash_, rank, prefix):
    with pytest.raises(CacheError, match="cannot be a"):
        RankName(hash=hash_, rank=rank, prefix=prefix)
