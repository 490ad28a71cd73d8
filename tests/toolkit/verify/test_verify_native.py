"""The glibc that native code asks for, as its own library says it."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import pytest

from cgtool.store.artifacts import Package, pack
from cgtool.store.machine import version_pair
from cgtool.toolkit.verify.verdict import glibc_needed, glibc_of_entry

LIBRARIES = sorted(Path(sysconfig.get_config_var("DESTSHARED") or "/nowhere").glob("*.so"))[:8]


def said_by(data: bytes) -> str | None:
    """The newest version among all names of versions in a file's bytes."""
    return max((found.decode() for found in re.findall(rb"\0GLIBC_(\d+\.\d+)", data)), key=version_pair, default=None)


@pytest.mark.skipif(not LIBRARIES, reason="this Python has no libraries of its own")
def test_a_package_says_which_glibc_its_library_needs(tmp_path: Path) -> None:
    for library in LIBRARIES:
        path = tmp_path / f"{library.name}.pt2"
        path.write_bytes(pack(Package(native=library.read_bytes(), metadata={})))
        assert glibc_needed(path) == said_by(library.read_bytes()) == glibc_needed(library)
    assert glibc_of_entry(map(str, tmp_path.iterdir())) == said_by(b"".join(path.read_bytes() for path in LIBRARIES))


@pytest.mark.skipif(not LIBRARIES, reason="this Python has no libraries of its own")
def test_a_torn_library_says_nothing_and_never_hangs(tmp_path: Path) -> None:
    whole = LIBRARIES[0].read_bytes()
    path = tmp_path / "torn.pt2"
    for kept in range(0, len(whole), len(whole) // 50):
        path.write_bytes(whole[:kept])
        assert glibc_needed(path) in (None, said_by(whole))
    for at in range(64):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        glibc_needed(path)


def test_what_is_no_package_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.eager").write_bytes(b"\x7fELF\x02\x01")
    (tmp_path / "b.pt2").write_bytes(b"")
    assert glibc_of_entry([*map(str, tmp_path.iterdir()), "gone.pt2"]) is None
