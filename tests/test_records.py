"""Records that are cheap to declare behave as the standard library's frozen dataclasses do."""

from __future__ import annotations

import copy
import dataclasses
import inspect

import pytest

from cgtool.records import dataclass as record


def declare(decorator):
    @decorator(frozen=True, kw_only=True)
    class Point:
        """A point."""

        x: int
        y: int = 2
        tags: dict = dataclasses.field(default_factory=dict, hash=False)

    @decorator(frozen=True, kw_only=True)
    class Checked(Point):
        z: int = 0

        def __post_init__(self):
            object.__setattr__(self, "y", self.y + 1)

    return Point, Checked


BOTH = [pytest.param(record, id="ours"), pytest.param(dataclasses.dataclass, id="the standard's")]


@pytest.mark.parametrize("decorator", BOTH)
def test_values_defaults_and_comparison(decorator):
    point, checked = declare(decorator)
    one = point(x=1)
    assert (one.x, one.y, one.tags, point.y) == (1, 2, {}, 2)
    assert one == point(x=1)
    assert one != point(x=2)
    assert one != checked(x=1, y=1)
    assert hash(one) == hash(point(x=1, tags={1: 1}))
    assert repr(one).endswith("Point(x=1, y=2, tags={})")
    assert one.tags is not point(x=1).tags
    assert (checked(x=1).y, checked(x=1).z) == (3, 0)
    assert point.__doc__ == "A point."
    assert copy.deepcopy(one) == one


@pytest.mark.parametrize("decorator", BOTH)
def test_what_others_ask_a_dataclass_for(decorator):
    point, checked = declare(decorator)
    assert dataclasses.is_dataclass(point)
    assert [f.name for f in dataclasses.fields(checked(x=1))] == ["x", "y", "tags", "z"]
    assert dataclasses.replace(point(x=1), y=5) == point(x=1, y=5)
    assert dataclasses.asdict(point(x=1)) == {"x": 1, "y": 2, "tags": {}}
    assert list(inspect.signature(checked).parameters) == ["x", "y", "tags", "z"]
    assert point.__dataclass_params__.frozen


@pytest.mark.parametrize("decorator", BOTH)
def test_what_does_not_fit_is_refused(decorator):
    point, _ = declare(decorator)
    with pytest.raises(TypeError, match=r"missing.*x"):
        point(y=1)
    with pytest.raises(TypeError, match=r"unexpected.*q"):
        point(x=1, q=2)
    with pytest.raises(TypeError):
        point(1)
    one = point(x=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.x = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        del one.x
