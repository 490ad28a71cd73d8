"""Children look into units while this process reads entries; nothing that is wrong depends on them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from verify_samples import lay

from cgtool.cache.layout import CacheLayout
from cgtool.cache.verify import beside as beside_module
from cgtool.cache.verify.beside import Beside, beside
from cgtool.cache.verify.findings import UnitFindings
from cgtool.cache.verify.hashing import hashing
from cgtool.cache.verify.units import Seen, look, sound_units, units_above, verify_units


@pytest.fixture
def layout(cache_root: Path) -> CacheLayout:
    return lay(cache_root)


def found(layout: CacheLayout, children: Beside | None = None) -> UnitFindings:
    with hashing() as hasher:
        return verify_units(layout, hasher) if children is None else verify_units(layout, hasher, children.seen_in)


@contextlib.contextmanager
def started(layout: CacheLayout, count: int) -> Iterator[Beside]:
    children = Beside(str(layout.units_dir), count)
    try:
        yield children
    finally:
        children.close()


def seen_by(children: Beside, layout: CacheLayout) -> dict[str, Seen]:
    return {key: seen for above in units_above(str(layout.units_dir)) for key, seen in children.seen_in(above).items()}


@pytest.mark.parametrize("count", [1, 3])
def test_children_see_what_this_process_sees(layout: CacheLayout, count: int) -> None:
    base = str(layout.units_dir)
    with started(layout, count) as children:
        seen = seen_by(children, layout)
    assert seen == {key: one for above in units_above(base) for key, one in sound_units(base, above).items()}
    assert seen


def test_what_is_found_is_the_same_with_children(layout: CacheLayout) -> None:
    alone = found(layout)
    with started(layout, 2) as children:
        assert found(layout, children) == alone
    assert alone.num_files > 0


@pytest.mark.parametrize("damage", ["record", "artifact", "stray"])
def test_what_is_wrong_is_named_with_children(layout: CacheLayout, damage: str) -> None:
    record = next(layout.units_dir.rglob("unit.json"))
    artifact = next(path for path in record.parent.iterdir() if path.suffix == ".eager")
    target = {"record": record, "artifact": artifact, "stray": record.parent / "strange"}[damage]
    data = target.read_bytes() if target.exists() else b"x"
    target.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with started(layout, 1) as children:
        assert children.seen_in(record.parent.parent.name).get(record.parent.name) == (
            None if damage != "artifact" else look(str(record.parent), record.parent.name)
        )
    with started(layout, 1) as children:
        units = found(layout, children)
    assert next(iter((*units.problems, *units.notes))).path == target
    assert units == found(layout)


def test_a_unit_that_changes_after_a_child_saw_it_is_looked_at_again(layout: CacheLayout) -> None:
    record = next(layout.units_dir.rglob("unit.json"))
    artifact = next(path for path in record.parent.iterdir() if path.suffix == ".eager")
    with started(layout, 1) as children:
        assert children._lines[0].result()
        artifact.rename(artifact.with_name(f"{'0' * 64}.eager"))
        (problem,) = found(layout, children).problems
    assert (problem.kind, problem.path) == ("missing", artifact)


def test_a_child_that_is_killed_leaves_its_work_to_this_process(
    layout: CacheLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside_module, "_BOOT", "import time; print('[\"ab\", [', flush=True); time.sleep(600)")
    alone = found(layout)
    with started(layout, 2) as children:
        for child in children._children:
            child.kill()
        assert found(layout, children) == alone


def test_where_no_child_can_be_started_this_process_does_it(
    layout: CacheLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = found(layout)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with started(layout, 2) as children:
        assert found(layout, children) == alone


def test_children_end_with_the_block(layout: CacheLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_module, "_BOOT", "import time; time.sleep(600)")
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt), started(layout, 2) as children:
        raise KeyboardInterrupt
    assert time.monotonic() - begin < 60
    assert [child.returncode for child in children._children] == [-signal.SIGKILL] * 2


def test_a_child_whose_parent_was_killed_ends(layout: CacheLayout) -> None:
    """It writes to a pipe that nobody reads, as whoever writes more than a pipe holds finds out."""
    command = [sys.executable, "-c", beside_module._BOOT, json.dumps(sys.path), str(layout.units_dir), "0", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        child.stdout.close()  # type: ignore[union-attr]
        said = child.stderr.read()  # type: ignore[union-attr]
    assert child.returncode in (0, 1, 120)
    assert b"Traceback" not in said


@pytest.mark.parametrize(("num_units", "jobs", "count"), [(10, 8, 0), (9000, 8, 2), (9000, 1, 0), (90_000, 4, 3)])
def test_children_are_started_where_they_are_worth_it(
    layout: CacheLayout, monkeypatch: pytest.MonkeyPatch, num_units: int, jobs: int, count: int
) -> None:
    monkeypatch.setattr(beside_module, "_about", lambda _: num_units)
    with beside(layout, jobs) as children:
        assert len(children._children) == count


def test_a_program_that_is_no_python_starts_no_child(layout: CacheLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_module, "_about", lambda _: 90_000)
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with beside(layout, 4) as children:
        assert children._children == []
        assert found(layout, children) == found(layout)


def test_units_are_counted_about(layout: CacheLayout) -> None:
    base = layout.units_dir
    for number in range(256):
        for unit in range(4):
            os.makedirs(base / f"{number:02x}" / f"{number:02x}{unit:062x}", exist_ok=True)  # noqa: PTH103
    assert beside_module._about(str(base)) in range(900, 1200)
