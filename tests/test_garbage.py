"""Putting off collections: what a block made is old afterwards, and what somebody froze stays frozen."""

from __future__ import annotations

import gc

import pytest

from cgtool.host import gc_paused


@pytest.fixture
def no_frozen():
    gc.unfreeze()
    yield
    gc.unfreeze()


class Made:
    """What garbage collection looks at."""


@pytest.mark.usefixtures("no_frozen")
def test_what_a_block_made_is_for_full_collections_alone():
    with gc_paused():
        assert not gc.isenabled()
        made = [Made() for _ in range(10)]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    old = {id(item) for item in gc.get_objects(generation=2)}
    assert old.issuperset(map(id, made))


@pytest.mark.usefixtures("no_frozen")
def test_what_somebody_froze_stays_frozen():
    gc.freeze()
    frozen = gc.get_freeze_count()
    with gc_paused():
        pass
    assert gc.get_freeze_count() == frozen > 0


def test_where_collections_are_off_they_stay_off():
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
