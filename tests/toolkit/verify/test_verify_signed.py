"""What an entry remembers of who signed it is read and matched too."""

from __future__ import annotations

import json
import os

import pytest
from verify_samples import HASH, lay

from cgtool.plan.grammar import sha256_hex
from cgtool.toolkit.verify.checks import check_entry


def _sign(layout):
    """Lay beside the entry what import leaves of a signed bundle, and return the folder and the name of both files."""
    folder = layout.entry_dir(HASH) / "signatures"
    folder.mkdir()
    stem = sha256_hex(b"an index")
    (folder / f"{stem}.json").write_bytes(b"an index")
    row = {"key": "0" * 64, "signature": "A" * 86 + "=="}
    (folder / f"{stem}.sig").write_text(json.dumps({"schema": 1, "signatures": [row]}))
    return folder, stem


@pytest.mark.parametrize(
    ("end", "harm", "kind"),
    [
        (".json", "change", "digest"),
        (".sig", "change", "corrupt"),
        (".json", "remove", "missing"),
        (".sig", "remove", "missing"),
        (".json", "pipe", "not_a_file"),
        (".sig", "pipe", "not_a_file"),
    ],
)
def test_what_an_entry_remembers_of_who_signed_it_is_checked(cache_root, end, harm, kind):
    layout = lay(cache_root)
    folder, stem = _sign(layout)
    assert check_entry(layout, HASH).problems == []
    path = folder / f"{stem}{end}"
    if harm == "change":
        path.write_bytes(path.read_bytes() + b"}")
    else:
        path.unlink()
    if harm == "pipe":
        os.mkfifo(path)
    (problem,) = check_entry(layout, HASH).problems
    assert (layout.root / problem.path, problem.kind) == (path, kind)
    assert problem.sentence.endswith("import the signed bundle again.")


def test_what_else_lies_among_signatures_is_a_note(cache_root):
    layout = lay(cache_root)
    folder, _ = _sign(layout)
    (folder / "readme.txt").touch()
    found = check_entry(layout, HASH)
    assert [(note.kind, layout.root / note.path) for note in found.notes] == [("foreign", folder / "readme.txt")]
    assert found.problems == []
