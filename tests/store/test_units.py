from __future__ import annotations

import multiprocessing
import os

import pytest
from cache_samples import UNIT, compile_unit, resealed, run_beside, without_locks
from syscalls import each_kill

from cgtool.errors import CacheCorruptError, CacheError
from cgtool.store.entry import ObjectStore
from cgtool.store.records import Artifact
from cgtool.store.units import UnitStore

SPAWN = multiprocessing.get_context("spawn")
DATA = b"compiled code"
RECORD = Artifact.of(DATA, kind="inductor_standalone", compile_secs=1.23456, kernels=3, guards=("s0 <= 512",))


@pytest.fixture
def units(layout):
    return UnitStore(layout)


def test_stored_unit_is_found_with_its_metadata(units):
    assert units.find(UNIT) is None
    units.put(UNIT, DATA, RECORD)
    assert units.find(UNIT) == RECORD
    assert units.artifact_path(UNIT, RECORD).read_bytes() == DATA
    assert (RECORD.compile_secs, RECORD.kernels, RECORD.guards) == (1.235, 3, ("s0 <= 512",))


@pytest.mark.parametrize("key", ["", "ab", "../" + "a" * 61, "AB" * 32, "ab" * 32 + "\n"])
def test_invalid_key_never_becomes_a_path(units, key):
    with pytest.raises(CacheError):
        units.find(key)


@pytest.mark.parametrize("harm", ["flip", "truncate", "empty", "remove"])
@pytest.mark.parametrize("which", ["artifact", "record"])
def test_corrupt_unit_is_absent_logged_and_replaced(units, layout, caplog, which, harm):
    units.put(UNIT, DATA, RECORD)
    path = units.artifact_path(UNIT, RECORD) if which == "artifact" else layout.unit_dir(UNIT) / "unit.json"
    data = path.read_bytes()
    path.chmod(0o600)
    if harm == "remove":
        path.unlink()
    else:
        flipped = data.replace(b"3", b"4") if which == "record" else b"X" + data[1:]
        path.write_bytes({"flip": flipped, "truncate": data[:-2], "empty": b""}[harm])
    assert units.find(UNIT) is None
    # A unit without its record was never finished, which is no news.
    assert ("is corrupt" in caplog.text) == ((which, harm) != ("record", "remove"))
    units.put(UNIT, DATA, RECORD)
    assert units.find(UNIT) == RECORD


UNIT_PLACES = (
    "",
    "torch_compile_cache",
    "torch_compile_cache/units",
    f"torch_compile_cache/units/{UNIT[:2]}",
    f"torch_compile_cache/units/{UNIT[:2]}/{UNIT}",
    f"torch_compile_cache/units/{UNIT[:2]}/{UNIT}/unit.json",
)


@pytest.mark.parametrize("place", UNIT_PLACES)
@pytest.mark.parametrize("how", ["everyone may write", "another user owns it"])
def test_untrusted_unit_is_absent_with_one_warning(units, layout, caplog, place, how):
    units.put(UNIT, DATA, RECORD)
    path = layout.root / place
    if how == "everyone may write":
        path.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(path, 54321, -1)
    else:
        pytest.skip("only root may give files away")
    assert units.find(UNIT) is None
    assert units.find(UNIT) is None
    assert caplog.text.count("could have put any code there") == 1
    assert UnitStore(layout, allow_shared=True).find(UNIT) == RECORD


def test_a_unit_of_a_newer_schema_is_absent(units, layout):
    units.put(UNIT, DATA, RECORD)
    path = layout.unit_dir(UNIT) / "unit.json"
    path.write_bytes(resealed(path.read_bytes(), {"record": "unit-4"}))
    assert units.find(UNIT) is None


def test_a_unit_copied_under_another_key_is_absent(units, layout):
    other = "ba" * 32
    units.put(UNIT, DATA, RECORD)
    layout.unit_dir(other).parent.mkdir(parents=True)
    layout.unit_dir(UNIT).rename(layout.unit_dir(other))
    assert units.find(other) is None


def test_entry_shares_the_file_of_its_unit(units, layout):
    units.put(UNIT, DATA, RECORD)
    objects = ObjectStore(layout.entry_dir("cd" * 32))
    units.link_into(objects, UNIT, RECORD)
    assert objects.get(RECORD.digest, RECORD.kind) == DATA
    assert objects.path(RECORD.digest, RECORD.kind).samefile(units.artifact_path(UNIT, RECORD))


def test_corrupt_unit_is_never_linked_into_an_entry(units, layout):
    units.put(UNIT, DATA, RECORD)
    path = units.artifact_path(UNIT, RECORD)
    path.chmod(0o600)
    path.write_bytes(b"X" + DATA[1:])
    objects = ObjectStore(layout.entry_dir("cd" * 32))
    with pytest.raises(CacheCorruptError, match=path.name):
        units.link_into(objects, UNIT, RECORD)
    assert not objects.has(RECORD)


def test_concurrent_processes_compile_a_unit_once(cache_root, tmp_path, units):
    log = tmp_path / "log"
    run_beside(*[(compile_unit, (cache_root, log, 0.3))] * 4)
    assert log.read_text() == "compiled\n"
    assert units.find(UNIT) is not None


def test_without_flock_concurrent_compiles_all_succeed(cache_root, tmp_path, units):
    log = tmp_path / "log"
    run_beside(*[(without_locks, (compile_unit, cache_root, log, 0.3))] * 3)
    assert units.find(UNIT) is not None


def test_unit_of_a_killed_process_is_compiled_by_the_next(cache_root, tmp_path, units):
    log = tmp_path / "log"
    dying = SPAWN.Process(target=compile_unit, args=(cache_root, log, 0.2), kwargs={"die": True})
    dying.start()
    while not log.exists():
        pass
    compile_unit(cache_root, log, 0.0)
    dying.join()
    assert dying.exitcode == -9
    assert log.read_text() == "compiled\n" * 2
    assert units.find(UNIT) is not None


def test_put_killed_at_any_syscall_leaves_no_unit_or_a_complete_one(cache_root, units):
    def put():
        units.put(UNIT, DATA, RECORD)

    found = []
    for _ in each_kill(cache_root.with_name("nothing"), cache_root, put):
        found.append(units.find(UNIT))
        assert found[-1] is None or units.data(UNIT, RECORD) == DATA
        put()
        assert units.find(UNIT) == RECORD
    assert [record for record in found if record not in (None, RECORD)] == []
    assert {record is None for record in found} == {True, False}
    assert len(found) > 10
