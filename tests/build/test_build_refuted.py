"""What becomes of a unit that a proof refutes, and of a machine on which nothing can be opened."""

from __future__ import annotations

import pytest

from cgtool.cache.layout import CacheLayout
from cgtool.cache.units import UnitStore, new_record


def test_a_unit_that_was_removed_is_found_no_more(tmp_path):
    units = UnitStore(CacheLayout(root=tmp_path))
    key = "ab" * 32
    units.put(key, b"code", new_record(b"code", kind="json", compile_secs=0.0, kernels=0))
    assert units.find(key) is not None
    units.remove(key)
    assert units.find(key) is None
    units.remove(key)  # twice is once


@pytest.mark.torch
def test_no_room_for_any_package_is_no_mismatch_of_one(tmp_path, monkeypatch):
    """Else a full machine would send pieces to a slower compiler for good."""
    from cgtool.build.proof import run
    from cgtool.errors import NoRoomError
    from cgtool.runtime import packages

    def refuse(*_args, **_options):
        raise packages._no_room(OSError(28, "No space left on device"))

    monkeypatch.setattr(packages, "open_package", refuse)
    one = object.__new__(run._Prover)
    one._adaptor, one._data, one._graph, one._device_index = "aot_inductor", b"", None, None
    with pytest.raises(NoRoomError, match="Set TMPDIR"):
        one._open()
