"""Records and the layout: round trips, and rejection of corrupt bytes, wrong types and invalid names."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from cache_samples import manifest_of, put_row, resealed, with_shape, writer
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cgtool.errors import CacheCorruptError, CacheError, CacheSchemaError
from cgtool.plan.shapes import parse_shape, shape_text
from cgtool.store.files import seal, unseal
from cgtool.store.layout import RANK_FILES, CacheLayout, RankName, resolve_root
from cgtool.store.records import (
    Artifact,
    Fallback,
    FileRecord,
    Manifest,
    Row,
    Unit,
    VariantCounts,
    parse_manifest,
)

HASHES = st.text("0123456789abcdef", min_size=64, max_size=64)
SIZES = st.integers(1, 10**9)
DIMS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
PAIRS = st.one_of(
    st.tuples(SIZES, SIZES).map(lambda pair: (min(pair), max(pair))), st.integers(0, 99).map(lambda n: (n, n))
)
SHAPES = st.dictionaries(DIMS, PAIRS, max_size=3)
ARTIFACTS = st.builds(
    Artifact,
    digest=HASHES,
    kind=st.sampled_from(["eager", "pt2", "eager.json"]),
    size_bytes=st.integers(0, 2**40),
    compile_secs=st.floats(0, 1e6, allow_nan=False),
    kernels=st.integers(0, 99),
    guards=st.lists(st.text(), max_size=2).map(tuple),
    proved=st.booleans(),
    proof_gap=st.text(),
)
ROWS = st.builds(
    Row,
    variant=st.integers(0, 2),
    shape=SHAPES,
    piece_index=st.integers(0, 99),
    adaptor=st.sampled_from(["eager", "inductor", "inductor_standalone"]),
    tuned=st.booleans(),
    artifact=ARTIFACTS,
)
VARIANTS = st.builds(
    VariantCounts,
    name=st.text(),
    pieces=st.just(100),
    splitting_pieces=st.integers(0, 50),
    unique_pieces=st.integers(0, 50),
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
    rows=st.lists(ROWS, max_size=8, unique_by=lambda row: row.place).map(tuple),
    files=st.dictionaries(
        st.sampled_from(RANK_FILES), st.builds(FileRecord, sha256=HASHES, size_bytes=st.integers(0, 10**9))
    ),
    lookup=st.lists(HASHES, max_size=2).map(tuple),
    created=st.just("2026-01-31T12:00:00.123Z"),
)
PATH = Path("manifest.json")


def read(manifest, data):
    return parse_manifest(data, path=PATH, name=manifest.name)


@given(MANIFESTS)
def test_manifest_survives_a_round_trip(manifest):
    assert read(manifest, manifest.to_bytes()) == manifest


@given(HASHES, ARTIFACTS)
def test_unit_survives_a_round_trip(key, artifact):
    unit = Unit(key=key, artifact=artifact)
    assert unseal(seal(unit), Unit, path=PATH) == unit


@given(MANIFESTS, st.randoms())
def test_rows_are_sorted(manifest, random):
    rows = list(manifest.rows)
    random.shuffle(rows)
    bare = replace(manifest, rows=())
    assert bare.with_rows(rows).to_bytes() == bare.with_rows(manifest.rows).to_bytes()


@given(MANIFESTS, st.data())
def test_every_changed_byte_is_detected(manifest, data):
    whole = manifest.to_bytes()
    position = data.draw(st.integers(0, len(whole) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != whole[position]))
    with pytest.raises(CacheCorruptError):
        read(manifest, whole[:position] + bytes([byte]) + whole[position + 1 :])


@given(MANIFESTS, st.data())
def test_truncated_file_is_corrupt(manifest, data):
    whole = manifest.to_bytes()
    with pytest.raises(CacheCorruptError):
        read(manifest, whole[: data.draw(st.integers(0, len(whole) - 1))])


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(MANIFESTS, st.data())
def test_sealed_field_of_another_type_is_corrupt_or_read(manifest, data):
    junk = data.draw(JUNK)

    def change(record):
        place, key = record, data.draw(st.sampled_from(sorted(record)))
        while isinstance(place[key], (dict, list)) and place[key] and data.draw(st.booleans()):
            place = place[key]
            key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        place[key] = junk

    with contextlib.suppress(CacheCorruptError, CacheSchemaError):
        read(manifest, resealed(manifest.to_bytes(), change))


@given(MANIFESTS, st.lists(ROWS, max_size=5))
def test_added_rows_replace_rows_of_the_same_place(manifest, rows):
    merged = manifest.with_rows(rows)
    wanted = {row.place: row for row in (*manifest.rows, *rows)}
    assert {row.place: row for row in merged.rows} == wanted
    assert len(merged.rows) == len(wanted)


@given(SHAPES)
def test_shape_survives_a_round_trip_as_text(shape):
    assert parse_shape(shape_text(shape)) == shape


def test_another_schema_version_is_distinguished_from_corruption(manifest):
    for tag, words in {"manifest-9": "Update cgtool", "manifest-1": "Warm the model again"}.items():
        with pytest.raises(CacheSchemaError, match=f"schema {tag[-1]} .*{words}"):
            read(manifest, resealed(manifest.to_bytes(), {"record": tag}))
    with pytest.raises(CacheSchemaError, match=r"schema 2 and was written by cgtool 0\.0\.9; .* Warm the model again"):
        read(manifest, b'{\n "schema": 2,\n "cgtool": "0.0.9",\n "hash": "ab"\n}\n')
    with pytest.raises(CacheCorruptError, match="a field is invalid"):
        read(manifest, seal(Unit(key="ab" * 32, artifact=manifest.rows[0].artifact)))


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
        pytest.param({"size_dim": "seq"}, id="unknown field"),
        pytest.param({"rows": {}}, id="rows object"),
        pytest.param({"rows": [{}]}, id="empty row"),
        pytest.param({"rows": [None]}, id="row null"),
        pytest.param({"lookup": ["../x"]}, id="lookup"),
        pytest.param({"splitting_ops": "ns::op"}, id="splitting ops as text"),
    ],
)
def test_sealed_manifest_that_violates_the_grammar_is_corrupt(manifest, change):
    with pytest.raises(CacheCorruptError, match=r"manifest\.json is corrupt: a field is invalid"):
        read(manifest, resealed(manifest.to_bytes(), change))


@pytest.mark.parametrize(
    "change",
    [
        {"artifact": None},
        {"piece_index": 9},
        {"piece_index": -1},
        {"variant": 1},
        {"shape": 0},
        {"shape": "general"},
        {"shape": {"n": 8}},
        {"shape": {"n": [0, 8]}},
        {"shape": {"n": [2, 1]}},
        {"shape": {"n": [1, 2, 3]}},
        {"shape": {"n": [-1, -1]}},
        {"shape": {"n": [True, True]}},
        {"shape": {"a b": [1, 1]}},
        {"adaptor": "a b"},
        {"tuned": 1},
        {"more": 1},
    ],
    ids=str,
)
def test_sealed_row_that_violates_the_grammar_is_corrupt(manifest, change):
    with pytest.raises(CacheCorruptError, match="a field is invalid"):
        read(manifest, resealed(manifest.to_bytes(), lambda record: record["rows"][0].update(change)))


@pytest.mark.parametrize(
    "change",
    [
        {"digest": "../../etc/passwd"},
        {"digest": "ab" * 32 + "\n"},
        {"kind": "a/b"},
        {"kind": ".."},
        {"kind": "PT2"},
        {"kind": "a" * 41},
        {"size_bytes": None},
        {"size_bytes": 2**60},
        {"compile_secs": "1"},
        {"guards": [1]},
    ],
    ids=str,
)
def test_sealed_artifact_that_violates_the_grammar_is_corrupt(manifest, change):
    with pytest.raises(CacheCorruptError, match=r"at `\$\.rows\[0\]\.artifact"):
        read(manifest, resealed(manifest.to_bytes(), lambda record: record["rows"][0]["artifact"].update(change)))


def test_duplicate_rows_are_corrupt(manifest):
    with pytest.raises(CacheCorruptError, match="is duplicated"):
        read(manifest, resealed(manifest.to_bytes(), lambda record: record["rows"].append(record["rows"][0])))


def test_shape_must_include_the_sizes_that_its_variant_fixes(manifest):
    fixed = resealed(manifest.to_bytes(), lambda record: record["variants"][0].update(fixed={"batch": 1}))
    with pytest.raises(CacheCorruptError, match="general is outside its variant, which is for batch=1"):
        read(manifest, fixed)


def test_a_row_is_found_by_its_place(manifest):
    row = manifest.rows[0]
    ranged, tuned = with_shape(row, "n=2-8"), replace(row, tuned=True)
    both = manifest.with_rows([ranged])

    def found(manifest, shape, *, tuned=False):
        return manifest.row(variant=0, shape=parse_shape(shape), piece_index=0, adaptor="eager", tuned=tuned)

    assert found(both, "general") == row
    assert found(both, "n=2-8") == ranged
    assert found(both, "n=8") is None
    assert found(both, "general", tuned=True) is None
    assert found(both.with_rows([tuned]), "general") == found(both.with_rows([tuned]), "general", tuned=True) == tuned


def test_fallback_drops_the_rows_that_it_supersedes(manifest):
    row = replace(manifest.rows[0], adaptor="aot_inductor")
    whole = replace(manifest, rows=(row, with_shape(row, "n=8"), replace(row, piece_index=1)))

    def fallen(adaptor):
        fallback = Fallback(variant=0, piece_index=0, shape={}, adaptor=adaptor, reason="other numbers")
        rows = whole.with_rows([replace(row, adaptor=adaptor)], [fallback]).rows
        return {(row.piece_index, shape_text(row.shape), row.adaptor) for row in rows}

    other = (1, "general", "aot_inductor")
    standalone = "inductor_standalone"
    assert fallen(standalone) == {(0, "general", standalone), (0, "n=8", "aot_inductor"), other}
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
def test_invalid_name_is_refused(hash_, rank, prefix):
    with pytest.raises(CacheError, match="is not a valid"):
        RankName(hash=hash_, rank=rank, prefix=prefix)


HASH = "ab" * 32


def test_cache_dir_argument_overrides_environment_and_default(monkeypatch, tmp_path, isolated_home):
    assert resolve_root() == isolated_home / ".cache" / "cgtool"
    monkeypatch.setenv("CGTOOL_CACHE_DIR", str(tmp_path / "env"))
    assert resolve_root() == tmp_path / "env"
    assert resolve_root(tmp_path / "argument") == tmp_path / "argument"
    assert resolve_root(str(tmp_path / "argument")) == tmp_path / "argument"


def test_root_is_absolute_and_accepts_the_cache_folder_itself(monkeypatch, tmp_path, isolated_home):
    monkeypatch.chdir(tmp_path)
    assert resolve_root("here") == tmp_path / "here"
    assert resolve_root(tmp_path / "torch_compile_cache") == tmp_path
    assert resolve_root("~/there") == isolated_home / "there"


def test_paths_follow_the_documented_layout():
    layout = CacheLayout(root=Path("/r"))
    name = RankName(hash=HASH, rank=3, prefix="eagle_head")
    base = "/r/torch_compile_cache"
    assert str(layout.manifest_file(name)) == f"{base}/{HASH}/rank_3/eagle_head/manifest.json"
    assert str(layout.key_file(HASH)) == f"{base}/{HASH}/key.json"
    assert str(layout.unit_dir(HASH)) == f"{base}/units/ab/{HASH}"
    assert str(layout.lookup_dir) == f"{base}/lookup"
    assert str(layout.used_file(name)) == f"{base}/state/used/{HASH}-rank_3-eagle_head"
    assert str(layout.tag) == "/r/CACHEDIR.TAG"


def test_ranks_and_prefixes_are_listed_in_order_without_junk(tmp_path):
    layout = CacheLayout(root=tmp_path)
    for folder in ("rank_10/b", "rank_2/a", "rank_2/.x", "rank_02/a", "rank_x/a", "other/a"):
        (layout.entry_dir(HASH) / folder).mkdir(parents=True)
    (layout.entry_dir(HASH) / "rank_5").touch()
    (layout.base / "junk").touch()
    assert layout.hashes() == [HASH]
    assert [(name.rank, name.prefix) for name in layout.rank_names(HASH)] == [(2, "a"), (10, "b")]
