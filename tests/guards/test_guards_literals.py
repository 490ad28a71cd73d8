"""Literals: plain values as data, one to one; values without a rule are reported."""

from __future__ import annotations

import collections
import enum
import functools
import json
import math
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from cgtool.guards.kinds import NoRuleError, encode_literal
from cgtool.plan.grammar import canonical_json
from cgtool.plan.rendering import spell

pytestmark = pytest.mark.torch


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Number(enum.IntEnum):
    ONE = 1


class Plain:
    def method(self):
        return 1

    @property
    def shown(self):
        return 2

    @functools.cached_property
    def kept(self):
        return 3


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary(),
    st.just(...),
    st.sampled_from([torch.float32, torch.int64, torch.strided, torch.channels_last, torch.device("cpu"), Colour.RED]),
    st.slices(10),
    st.builds(range, st.integers(0, 5), st.integers(0, 5), st.integers(1, 3)),
)
KEYS = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.text(max_size=3), st.binary(max_size=3))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.frozensets(KEYS, max_size=4),
        st.sets(KEYS, max_size=4),
        st.lists(st.integers(0, 9), max_size=3).map(torch.Size),
    ),
    max_leaves=8,
)


def identical(one, other):
    """Return whether no program can distinguish two plain values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(identical, one, other))
    if isinstance(one, dict):
        return identical(list(one.items()), list(other.items()))
    if isinstance(one, (set, frozenset)):
        return sorted(map(repr, one)) == sorted(map(repr, other))
    if isinstance(one, (float, complex, slice, range)):  # all empty ranges compare equal
        return repr(one) == repr(other)
    return one == other


@settings(max_examples=400)
@given(VALUES, VALUES)
def test_values_have_equal_data_if_and_only_if_they_are_identical(one, other):
    assert (canonical_json(encode_literal(one)) == canonical_json(encode_literal(other))) == identical(one, other)


@given(VALUES)
def test_data_is_json_and_can_be_rendered(value):
    data = encode_literal(value)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert isinstance(spell(data), str)
    assert spell(data)


def test_values_that_compare_equal_in_python_are_distinguished():
    groups = [
        [True, 1, 1.0, 1 + 0j, Number.ONE, "1", b"1"],
        [0.0, -0.0, 0, False, None, ""],
        [(1, 2), [1, 2], torch.Size((1, 2)), {1, 2}, frozenset({1, 2})],
        [(), [], {}, set(), frozenset(), None],
        [["f", "1.0"], 1.0],
        [["dtype", "float32"], torch.float32],
        [{"a": 1, "b": 2}, {"b": 2, "a": 1}],
        [(True,), (1,), (1.0,)],
        [range(0, 3, 1), range(0, 4, 1), slice(0, 3, 1)],
        [int, int | None, int | str, (int, type(None))],
    ]
    for group in groups:
        spelled = [canonical_json(encode_literal(value)) for value in group]
        assert len(set(spelled)) == len(group), group


def test_all_nans_are_the_same_value():
    assert encode_literal(math.nan) == encode_literal(float("nan")) == ["f", "nan"]
    assert encode_literal(-math.inf) == ["f", "-inf"]


def test_a_set_has_no_order():
    assert encode_literal({"b", "a", 3, None}) == encode_literal({None, 3, "a", "b"})


def test_the_index_of_a_device_is_not_encoded():
    assert encode_literal(torch.device("cuda", 0)) == encode_literal(torch.device("cuda", 5)) == ["device", "cuda"]
    assert encode_literal(torch.device("cpu")) != encode_literal(torch.device("cuda"))


def test_objects_are_encoded_by_name_and_functions_by_code():
    assert encode_literal(Plain) == ["type", f"{__name__}:Plain"]
    assert encode_literal(json) == ["module", "json"]
    assert encode_literal(Colour.BLUE) == ["enum", f"{__name__}:Colour", "BLUE"]
    assert encode_literal(len)[:2] == ["function", "builtins:len"]
    assert encode_literal(dict.get)[1] == "builtins:dict.get"
    assert encode_literal(torch.ops.aten.mm.default) == ["op", "aten.mm.default"]
    assert encode_literal(Plain.method)[:2] == ["function", f"{__name__}:Plain.method"]
    assert encode_literal(Plain().method) == encode_literal(Plain().method) != encode_literal(Plain.method)
    assert encode_literal(vars(Plain)["shown"])[1] == f"{__name__}:Plain.shown"
    assert encode_literal(vars(Plain)["kept"])[1] == f"{__name__}:Plain.kept"
    assert encode_literal(functools.lru_cache(len_of))[1] == f"{__name__}:len_of"


def len_of(x):
    return len(x)


def test_functions_with_the_same_name_and_different_code_differ():
    def make(text):
        names = {"__name__": "some_module"}
        exec(text, names)
        return encode_literal(names["f"])

    assert make("def f(x): return x + 1") == make("\n\n# moved\ndef f(x): return x + 1")
    assert make("def f(x): return x + 1") != make("def f(x): return x + 2")
    assert make("def f(x): return x") != make("def g(x): return x\nf = g")


def test_ordered_and_default_dicts_are_dicts():
    assert encode_literal(collections.OrderedDict(a=1)) == ["d", ["a", 1]]
    assert encode_literal(collections.defaultdict(int, a=1)) == ["d", ["a", 1]]


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "value",
    [Plain(), object(), Text("a"), [Plain()], {"a": (Plain(),)}, functools.partial(len), torch.zeros(1), iter([1])],
    ids=lambda value: type(value).__name__,
)
def test_a_value_without_a_rule_is_reported(value):
    with pytest.raises(NoRuleError, match=r"A value of type .* cannot be encoded as data"):
        encode_literal(value)


ITEM = typing.TypeVar("ITEM")
ANNOTATIONS = {
    "test_guards_literals:ITEM": ITEM,
    "test_guards_literals:UserId": typing.NewType("UserId", int),
    "builtins:list": typing.List,  # noqa: UP006 - not the class `list`
    "builtins:list[builtins:int]": list[int],
    "builtins:dict[builtins:int, test_guards_literals:ITEM]": dict[int, ITEM],
    "typing.Literal['a', 1]": typing.Literal["a", 1],
    "collections.abc:Callable[[builtins:int], builtins:str]": typing.Callable[[int], str],
    "typing:Annotated[builtins:int, 'rows']": typing.Annotated[int, "rows"],
    "Later": typing.ForwardRef("Later"),
}


def test_annotations_are_encoded_with_their_arguments():
    data = {text: encode_literal(value) for text, value in ANNOTATIONS.items()}
    assert {text: spell(literal) for text, literal in data.items()} == {text: text for text in ANNOTATIONS}
    assert encode_literal(list[int]) != encode_literal(typing.List[int])  # noqa: UP006 - not `list[int]`
    assert encode_literal(tuple[ITEM, ...]) == encode_literal(tuple[ITEM, ...])


def test_literals_are_rendered_as_python():
    said = {
        "None": None,
        "True": True,
        "'text'": "text",
        "1e-06": 1e-6,
        "(1, 2)": (1, 2),
        "[1, 'a']": [1, "a"],
        "{'a': 1}": {"a": 1},
        "Size(2, 3)": torch.Size((2, 3)),
        "{1, 2}": {1, 2},
        "1::2": slice(1, None, 2),
        "range(0, 3, 1)": range(3),
        "float32": torch.float32,
        "cpu": torch.device("cpu"),
        "...": ...,
        f"{__name__}:Colour.RED": Colour.RED,
    }
    assert {spell(encode_literal(value)): value for value in said.values()} == said
