"""What becomes of a unit that a proof refutes, or does not reach, and of a machine on which nothing opens."""

from __future__ import annotations

import pytest

from cgtool.store.layout import CacheLayout
from cgtool.store.records import Artifact
from cgtool.store.units import UnitStore


def test_a_unit_that_was_removed_is_found_no_more(tmp_path):
    units = UnitStore(CacheLayout(root=tmp_path))
    key = "ab" * 32
    units.put(key, b"code", Artifact.of(b"code", kind="json", compile_secs=0.0, kernels=0))
    assert units.find(key) is not None
    units.remove(key)
    assert units.find(key) is None
    units.remove(key)  # twice is once


@pytest.mark.torch
def test_no_room_for_any_package_is_no_mismatch_of_one(tmp_path, monkeypatch):
    """Else a full machine would send pieces to a slower compiler for good."""
    from cgtool.compiler.proof import prove
    from cgtool.errors import NoRoomError
    from cgtool.runtime import aoti_package

    def refuse(*_args, **_options):
        raise aoti_package._no_room(OSError(28, "No space left on device"))

    monkeypatch.setattr(prove, "open_package", refuse)
    with pytest.raises(NoRoomError, match="Set TMPDIR"):
        prove.open_artifact(b"", "aot_inductor", None, None)


class _Finds:
    """Finds what it is told to, in order; the real prover's findings are shown in tests/compiler/proof."""

    def __init__(self, *records):
        self.records = list(records)

    def start(self):
        pass

    def prove(self, data, **_):
        return self.records.pop(0)


@pytest.mark.torch
@pytest.mark.parametrize("lasting", [False, True])
def test_only_what_lies_in_the_piece_is_remembered(tmp_path, lasting):
    from hostile_adaptors import work_of

    from cgtool.compiler.manager import CompilerManager
    from cgtool.compiler.proof.prover import ProofRecord
    from cgtool.config import CompilationConfig
    from cgtool.store.entry import ObjectStore

    reason = "not proved: there was not enough memory"
    failed = ProofRecord(shapes=(), worst_error=0.0, secs=0.0, reason=reason, may_pass_later=not lasting)
    passed = ProofRecord(shapes=({"s0": 2},), worst_error=0.0, secs=0.0)
    prover = _Finds(failed, passed)
    manager = CompilerManager(CacheLayout(root=tmp_path), CompilationConfig(), prover=prover)
    first, again = (manager.ensure(*work_of(0), objects=ObjectStore(tmp_path / "entry")) for _ in range(2))
    assert (first.reused, again.reused) == (False, True)
    assert not first.artifact.proved
    if lasting:
        assert (first.artifact.proof_gap, first.unproved, again.artifact.proof_gap) == (reason, "", reason)
        assert len(prover.records) == 1, "it was tried again in vain"
    else:
        assert (first.artifact.proof_gap, first.unproved) == ("", reason)
        assert (again.artifact.proved, again.artifact.proof_gap, again.unproved) == (True, "", "")
