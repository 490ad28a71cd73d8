"""The grammar of `--ways` and `--starts`."""

from __future__ import annotations

import pytest

from cgtool.adaptor_registry import ADAPTORS
from cgtool.errors import UsageError
from cgtool.toolkit.bench.ways import GROUPS, WAYS, parse_starts, parse_ways


def names(text):
    return [way.name for way in parse_ways(text)]


def test_every_adaptor_is_a_way():
    assert set(GROUPS["cgtool"]) == {f"cgtool/{adaptor}" for adaptor in ADAPTORS}


def test_ways_are_in_the_order_of_the_table_and_include_eager():
    assert names("mega-cache, compile-cold") == ["eager", "compile-cold", "mega-cache"]
    assert names("") == ["eager"]
    assert names("all") == list(WAYS)
    assert names("torch,cgtool/eager") == ["eager", *GROUPS["torch"], "cgtool/eager"]


def test_a_bare_number_applies_to_ways_without_an_item():
    starts = parse_starts("15,torch=3,mega-cache=1", default=6)
    assert (starts["eager"], starts["compile-warm"], starts["mega-cache"], starts["cgtool/eager"]) == (15, 3, 1, 15)
    assert set(parse_starts("cgtool=2", default=6).values()) == {2, 6}


@pytest.mark.parametrize("text", ["many", "eager=", "eager=-1", "eager=1.5", "nobody=3"])
def test_invalid_starts_are_refused(text):
    with pytest.raises(UsageError, match="--starts"):
        parse_starts(text, default=6)


def test_only_torch_compile_with_empty_caches_is_cold():
    assert [way.name for way in WAYS.values() if way.is_cold] == ["compile-cold"]
