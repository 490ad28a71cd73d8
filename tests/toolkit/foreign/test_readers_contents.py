"""The contents of another system's artifact are read within limits, and nothing outside of its entry is read."""

from __future__ import annotations

from pathlib import Path

from foreign_samples import SCALE, unpack
from msgspec.structs import replace

from cgtool.toolkit.foreign.contents import foreign_contents
from cgtool.toolkit.foreign.detect import read_foreign
from cgtool.toolkit.foreign.records import ForeignArtifact, ForeignEntry


def scale_of(root: Path) -> ForeignEntry:
    return next(entry for entry in read_foreign(root).entries if entry.name == SCALE)


def artifact_at(entry: ForeignEntry, path: str) -> ForeignArtifact:
    return next(artifact for artifact in entry.artifacts if artifact.path == path)


def test_a_large_file_is_not_opened_and_a_long_text_is_truncated(tmp_path: Path) -> None:
    root = unpack("triton", tmp_path)
    with (root / SCALE / "scale.cubin").open("r+b") as file:
        file.truncate((64 << 20) + 1)
    (root / SCALE / "scale.ptx").write_bytes(b"x" * ((4 << 20) + 1))
    entry = scale_of(root)
    large = foreign_contents(entry, artifact_at(entry, "scale.cubin"))
    assert (large.kernels, large.warnings) == ((), ("scale.cubin was not opened: it has 67108865 bytes.",))
    long = foreign_contents(entry, artifact_at(entry, "scale.ptx"))
    assert (len(long.sources[0].text), long.warnings) == (
        4 << 20,
        ("scale.ptx has 4194305 bytes; only the first 4194304 are shown.",),
    )


def test_only_the_first_files_of_a_folder_are_opened(tmp_path: Path) -> None:
    root = unpack("atom", tmp_path)
    entry = next(entry for entry in read_foreign(root).entries if entry.name == "9b41aa03d5")
    artifact = entry.artifacts[0]
    for number in range(70):
        (entry.path / artifact.path / f"{number:02}.py").write_text(f"x = {number}\n")
    found = foreign_contents(entry, artifact)
    assert (len(found.members), len(found.sources)) == (73, 64)
    assert found.warnings == ("Only the first 64 files were opened.",)


def test_files_outside_of_the_entry_or_behind_a_link_are_not_read(tmp_path: Path) -> None:
    root = unpack("triton", tmp_path)
    (tmp_path / "secret.ptx").write_text("secret")
    (root / SCALE / "link.ptx").symlink_to(tmp_path / "secret.ptx")
    entry = scale_of(root)
    artifact = artifact_at(entry, "scale.ptx")
    for path in ("../../secret.ptx", "link.ptx", str(tmp_path / "secret.ptx"), "", "gone.ptx"):
        sources = foreign_contents(entry, replace(artifact, path=path)).sources
        assert not any("secret" in source.text for source in sources), path
    assert foreign_contents(entry, replace(artifact, path="../../secret.ptx")).sources == ()


def test_a_file_that_changed_after_it_was_listed_is_a_warning(tmp_path: Path) -> None:
    root = unpack("mega_cache", tmp_path)
    (entry,) = read_foreign(root).entries
    root.write_bytes(b"torn")
    found = foreign_contents(entry, entry.artifacts[0])
    assert (found.sources, len(found.warnings)) == ((), 1)
    assert found.warnings[0].startswith("The artifact could not be read: ")
