"""After an edit of the model, a warm traces again and compiles only the pieces that changed."""

from __future__ import annotations

import pytest
from e2e_harness import FIXTURES
from e2e_harness import warm as warm_model

pytestmark = pytest.mark.torch


def warm(folder, cache):
    options = ("--adaptor", "eager", "--no-proof", "--jobs", 0, "--arg", "num_layers=2")
    return warm_model(f"{folder / 'tiny_llama.py'}:build", cache, *options)


def test_an_edit_of_the_last_norm_compiles_only_the_last_piece_of_each_variant(tmp_path):
    folder, cache = tmp_path / "model", tmp_path / "cache"
    folder.mkdir()
    text = (FIXTURES / "tiny_llama.py").read_text()
    (folder / "tiny_llama.py").write_text(text)
    first = warm(folder, cache)
    assert (first["compiled"], first["unique_pieces"]) == (6, 3)

    # A comment changes the file and no piece.
    (folder / "tiny_llama.py").write_text(text + "\n# a comment\n")
    commented = warm(folder, cache)
    assert commented["trace_secs"] > 0
    assert (commented["compiled"], commented["reused"]) == (0, 6)
    assert commented["hash"] != first["hash"]

    # The code after the last layer is in the last piece only: one piece in each of the two variants.
    last = "return self.norm(hidden)"
    assert text.count(last) == 1
    (folder / "tiny_llama.py").write_text(text.replace(last, f"{last} * 2.0"))
    changed = warm(folder, cache)
    assert (changed["compiled"], changed["reused"]) == (2, 4)
