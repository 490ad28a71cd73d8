from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgtool.errors import CacheCorruptError
from cgtool.plan.grammar import sha256_hex
from cgtool.store.key import FACTOR_ORDER, differences, read_key, sentences, write_key
from cgtool.store.layout import CacheLayout
from cgtool.store.records import Factor, Key, parse_key

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
VALUES = st.dictionaries(st.sampled_from([*FACTOR_ORDER, "other"]), JSON, max_size=6)


def key_of(values):
    return Key.of(Factor(name=name, value=value) for name, value in values.items())


def words(old, new):
    return sentences(differences(key_of(old), key_of(new)))


def shuffled(value, order):
    """The same JSON with the keys of its dicts in another order."""
    if isinstance(value, dict):
        return {key: shuffled(value[key], order) for key in sorted(value, key=order)}
    return [shuffled(item, order) for item in value] if isinstance(value, list) else value


@given(VALUES, st.randoms())
def test_the_hash_does_not_depend_on_any_order(values, random):
    other = shuffled(values, lambda _: random.random())
    factors = [Factor(name=name, value=value) for name, value in other.items()]
    random.shuffle(factors)
    assert Key.of(factors).hash == key_of(values).hash


@given(VALUES, VALUES)
def test_keys_differ_exactly_if_differences_are_reported(left, right):
    same = json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)
    found = differences(key_of(left), key_of(right))
    assert (key_of(left).hash == key_of(right).hash) == same
    assert (found == []) == same
    assert all(one.sentence.startswith((one.path, "the environment variable ")) for one in found)


@given(VALUES)
def test_key_survives_a_round_trip(values):
    key = key_of(values)
    again = parse_key(key.to_bytes(), path=Path("key.json"), hash_=key.hash)
    assert again == key
    assert again.hash == key.hash


@pytest.mark.parametrize(
    ("left", "right"), [(1, True), (1, 1.0), (0, False), (None, False), ("1", 1), ([], {}), ([1], 1)]
)
def test_values_that_compare_equal_in_python_have_different_hashes(left, right):
    assert key_of({"config": left}).hash != key_of({"config": right}).hash
    assert len(words({"config": {"x": left}}, {"config": {"x": right}})) == 1


def test_value_that_json_cannot_represent_is_refused():
    for value in (float("nan"), float("inf"), object(), {1, 2}):
        with pytest.raises((TypeError, ValueError)):
            Factor(name="config", value=value)


def test_combined_hash_is_stable():
    # Worked out from the grammar alone. A change of it makes every cache in the world a miss: raise the schema.
    assert key_of({"config": {"level": 3}, "torch": "2.13.0"}).hash == (
        "978a94a065e4e44577c94f2e087b13368be336b323307a53cf802a803d873af6"
    )


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        pytest.param({"config": {"level": 3}}, {"config": {"level": 2}}, "config.level was 3 and is 2 now", id="leaf"),
        pytest.param(
            {"config": {"a": {"b": [1, {"c": "x"}]}}},
            {"config": {"a": {"b": [1, {"c": None}]}}},
            'config.a.b[1].c was "x" and is null now',
            id="deep",
        ),
        pytest.param(
            {"torch": "2.13.0"}, {"torch": "2.15.0"}, 'torch was "2.13.0" and is "2.15.0" now', id="whole factor"
        ),
        pytest.param(
            {"config": {}},
            {"config": {"dtype": "bf16"}},
            'config.dtype is "bf16" now and was not there before',
            id="added",
        ),
        pytest.param({"config": {"dtype": 1}}, {"config": {}}, "config.dtype was 1 and is gone now", id="removed"),
        pytest.param(
            {"config": {"x": None}}, {"config": {}}, "config.x was null and is gone now", id="null is not absent"
        ),
        pytest.param({}, {"triton": "3.4"}, 'triton is "3.4" now and was not there before', id="new factor"),
        pytest.param(
            {"sources": {"toy.model": "a" * 64}},
            {"sources": {"toy.model": "b" * 64}},
            "sources.toy.model has changed (its digest was aaaaaaaaaa and is bbbbbbbbbb now)",
            id="digest",
        ),
        pytest.param(
            {"calls": {"in put": [1]}},
            {"calls": {"in put": [1, 2]}},
            'calls["in put"] was [1] and is [1, 2] now',
            id="another length",
        ),
        pytest.param(
            {"state": "x" * 200 + "y"},
            {"state": "x" * 200 + "z"},
            f'state has changed (it begins with "{"x" * 79}… in both)',
            id="long and alike",
        ),
    ],
)
def test_difference_sentence_names_the_leaf(old, new, said):
    assert words(old, new) == (said,)


def test_differences_are_ordered_by_factor_with_unknown_factors_last():
    old = dict.fromkeys(["aaa", *reversed(FACTOR_ORDER), "zzz"], 1)
    found = differences(key_of(old), key_of(dict.fromkeys(old, 2)))
    assert [one.factor for one in found] == [*FACTOR_ORDER, "aaa", "zzz"]


def test_key_is_written_once_and_read_back(cache_root):
    layout = CacheLayout(root=cache_root)
    key = key_of({"config": {"level": 3}})
    assert read_key(layout, key.hash) is None
    write_key(layout, key)
    inode = layout.key_file(key.hash).stat().st_ino
    write_key(layout, key)
    assert layout.key_file(key.hash).stat().st_ino == inode
    assert read_key(layout, key.hash) == key
    assert key.value("config") == {"level": 3}
    assert key.value("torch") is None


def test_corrupt_key_is_replaced_by_the_next_writer(cache_root):
    layout = CacheLayout(root=cache_root)
    key = key_of({"config": {"level": 3}})
    write_key(layout, key)
    path = layout.key_file(key.hash)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(CacheCorruptError, match=r"key\.json is corrupt"):
        read_key(layout, key.hash)
    write_key(layout, key)
    assert read_key(layout, key.hash) == key


def test_key_in_another_entrys_folder_is_corrupt(cache_root):
    layout = CacheLayout(root=cache_root)
    key = key_of({"config": {"level": 3}})
    write_key(layout, key)
    layout.entry_dir(key.hash).rename(layout.entry_dir("ab" * 32))
    with pytest.raises(CacheCorruptError, match="do not match the hash of its folder"):
        read_key(layout, "ab" * 32)


def test_too_deeply_nested_key_is_corrupt(cache_root):
    layout = CacheLayout(root=cache_root)
    key = key_of({"model": "toy"})
    write_key(layout, key)
    for depth in (*range(200, 1200, 10), 100_000):  # each reader of JSON gives up at another
        nested = b'"model": ' + b"[" * depth + b"]" * depth
        body = key.to_bytes().partition(b',\n "sha256"')[0].replace(b'"model": "toy"', nested)
        seal = sha256_hex(body).encode()
        layout.key_file(key.hash).write_bytes(body + b',\n "sha256": "' + seal + b'"\n}\n')
        with pytest.raises(CacheCorruptError):
            read_key(layout, key.hash)
