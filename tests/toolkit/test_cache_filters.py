from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from cgtool.errors import UsageError
from cgtool.store.lookup import Usage
from cgtool.store.records import Manifest, VariantCounts, timestamp
from cgtool.toolkit.filters import FIELDS, parse_filter, parse_order
from cgtool.toolkit.listing import EntryListing

DAY = 86400.0
NOW = 1_700_000_000.0


def entry(**changes: object) -> EntryListing:
    """Return an entry; `changes` replace fields of its manifest, usage or listing."""
    manifest = Manifest(
        hash="3f9a" + "0" * 60,
        rank=0,
        prefix="backbone",
        model="Llama-3.1-8B",
        level=3,
        adaptor="aot_inductor",
        created=timestamp(NOW - 40 * DAY),
        splitting_ops=(),
        variants=(VariantCounts(name="default", pieces=9, splitting_pieces=4, unique_pieces=3),),
        rows=(),
    )
    usage = Usage(hits=2, last_used=timestamp(NOW - 35 * DAY))
    listing = EntryListing(
        manifest=manifest,
        usage=usage,
        shapes=({},),
        own_bytes=2 * 10**9 - 6,
        unshared_bytes=3 * 2**30,
        artifact_secs=90.0,
        artifact_files={f"{number}.pt2": 1 for number in range(6)},
    )

    def changes_of(record: object) -> dict[str, object]:
        return {name: value for name, value in changes.items() if hasattr(record, name)}

    return dataclasses.replace(
        listing,
        **changes_of(listing),
        manifest=structs.replace(manifest, **changes_of(manifest)),
        usage=structs.replace(usage, **changes_of(usage)),
    )


@pytest.mark.parametrize(
    ("expression", "passes"),
    [
        ("model~LLAMA-3", True),
        ("model~qwen", False),
        ("model=Llama-3.1-8B", True),
        ("model=llama-3.1-8b", False),
        ("model!=Llama-3.1-8B", False),
        ("model ~ 3.1-8B ", True),
        ("Model~a=b", False),
        ("hash=3f9a", True),
        ("hash=3F9A", True),
        ("hash=9a", False),
        ("hash!=3f9a", False),
        ("hash~9a0", True),
        ("prefix=backbone", True),
        ("adaptor!=eager", True),
        ("rank=0", True),
        ("rank>0", False),
        ("rank>=0", True),
        ("pieces=9", True),
        ("unique<3", False),
        ("unique<=3", True),
        ("artifacts!=6", False),
        ("hits=2", True),
        ("size>1GB", True),
        ("size=2000MB", True),
        ("size>1.9GiB", False),
        ("size > 1.8 gib", True),
        ("size<2000000001", True),
        ("unshared=3G", True),
        ("artifact_secs=90", True),
        ("artifact_secs=1.5min", True),
        ("saved_secs>=3min", True),
        ("saved_secs>1h", False),
        ("last_used>30d", True),
        ("last_used>35d", False),
        ("last_used>=35d", True),
        ("last_used<5w", False),
        ("last_used<=5w", True),
        ("last_used<36d", True),
        ("created>40d", False),
        ("created<41d", True),
        ("last_used=never", False),
        ("last_used!=never", True),
        # NOW is 2023-11-14T22:13:20Z; 35 and 40 days earlier are 2023-10-10 and 2023-10-05
        ("last_used>2023-10-09", True),
        ("last_used>2023-10-10", False),
        ("last_used>=2023-10-10", True),
        ("last_used<2023-10-10", False),
        ("last_used<=2023-10-10", True),
        ("last_used<2023-10-11", True),
        ("last_used=2023-10-10", True),
        ("last_used!=2023-10-10", False),
        ("created=2023-10-05T22:13:20", True),
        ("created=2023-10-06T00:13:20+02:00", True),
        ("created>2023-10-05T22:13:19Z", True),
    ],
)
def test_a_filter_passes_matching_entries(expression, passes):
    assert parse_filter(expression, now=NOW)(entry()) is passes


def test_an_unused_entry_counts_as_used_at_its_creation():
    new, old = (entry(last_used=None, created=timestamp(NOW - days * DAY)) for days in (1, 40))
    older = parse_filter("last_used>30d", now=NOW)
    assert (older(new), older(old)) == (False, True)
    assert parse_filter("last_used=never", now=NOW)(new)


def test_an_invalid_timestamp_counts_as_the_epoch():
    assert parse_filter("created>1000d", now=NOW)(entry(created="\x1b[2J"))


NAMES = ", ".join(FIELDS)
NO_TIME = (
    "does not hold a time. Write an age such as 30d, 12h or 90min, a date such as 2026-01-31, or never (with = and !=)."
)
NO_FILTER = "is not a filter. Write FIELD OPERATOR VALUE, such as model~llama, size>1GB or last_used>30d."


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("siez>1GB", f"'siez>1GB' does not name a field. Use one of: {NAMES}."),
        ("model", f"'model' {NO_FILTER}"),
        ("", f"'' {NO_FILTER}"),
        ("model>x", "'model>x' uses an operator that model does not support. Use one of: =  !=  ~."),
        ("size~1GB", "'size~1GB' uses an operator that size does not support. Use one of: =  !=  >  >=  <  <=."),
        ("size>big", "'size>big' needs a size such as 512MiB, 1GB or 4096."),
        ("size>1d", "'size>1d' needs a size such as 512MiB, 1GB or 4096."),
        ("hits>-1", "'hits>-1' needs a number such as 3."),
        ("hits>nan", "'hits>nan' needs a number such as 3."),
        ("artifact_secs>1GB", "'artifact_secs>1GB' needs a duration such as 30, 2min or 1h."),
        ("last_used>1GB", f"'last_used>1GB' {NO_TIME}"),
        ("last_used>never", f"'last_used>never' {NO_TIME}"),
    ],
)
def test_an_invalid_filter_is_an_error_with_advice(expression, message):
    with pytest.raises(UsageError) as caught:
        parse_filter(expression, now=NOW)
    assert str(caught.value) == message
    assert caught.value.actual == expression


def test_an_error_truncates_a_long_expression():
    with pytest.raises(UsageError) as caught:
        parse_filter("x" * 10_000, now=NOW)
    assert len(str(caught.value)) < 200


@settings(max_examples=30)
@given(st.text(), st.text())
def test_any_text_is_a_filter_or_a_usage_error(field, value):
    for expression in (field, f"model~{value}", f"created>{value}", f"size={value}", f"{field}={value}"):
        try:
            parse_filter(expression, now=NOW)(entry())
        except UsageError as error:
            assert str(error)  # noqa: PT017 - both outcomes are valid


@pytest.mark.parametrize(
    ("order", "models"),
    [
        ("model", ["a", "b", "c"]),
        ("model:desc", ["c", "b", "a"]),
        ("size", ["b", "c", "a"]),
        ("size:asc", ["a", "c", "b"]),
        ("last_used", ["b", "a", "c"]),
        ("HITS:asc", ["a", "c", "b"]),
    ],
)
def test_text_sorts_ascending_and_numbers_descending_by_default(order, models):
    entries = [
        entry(model="b", own_bytes=30, hits=9, last_used=timestamp(NOW)),
        entry(model="a", own_bytes=10, hits=0, last_used=timestamp(NOW - DAY)),
        entry(model="c", own_bytes=20, hits=0, last_used=None),
    ]
    assert [one.manifest.model for one in parse_order(order)(entries)] == models


@pytest.mark.parametrize("order", ["", "siez", "size:down", "size:", ":asc", "size:asc:desc"])
def test_an_invalid_order_is_a_usage_error(order):
    with pytest.raises(UsageError, match=r"Use one of: hash|Write size, size:asc or size:desc"):
        parse_order(order)
