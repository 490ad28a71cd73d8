"""Errors of AOTInductor for pieces that it cannot compile or save name the cause, so that another adaptor can serve."""

from __future__ import annotations

import re

import pytest
import torch
from cli_harness import REPO, environment, forked
from piece_cases import CASES, X, call, graph

from cgtool.compiler.adaptors.aot_inductor import _check_extern, _hold_back_views
from cgtool.compiler.adaptors.interface import get_adaptor
from cgtool.compiler.fx_piece import rebuild
from cgtool.compiler.options import check_compiler
from cgtool.errors import ArtifactError, CompileError, ConfigError

pytestmark = pytest.mark.torch


def extern(kind, value):
    """Return torch's record of a call of a custom op with one argument."""
    given = {"name": "how", "arg": {kind: value}, "kind": 1}
    return {"nodes": [{"name": "buf0", "node": {"target": "user::op", "inputs": [given], "outputs": []}}]}


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("as_float", "Infinity"),
        ("as_float", "NaN"),
        ("as_floats", [1.0, "-Infinity"]),
        ("as_ints", []),
        ("as_sym_ints", []),
        ("as_tensors", []),
        ("as_optional_tensors", []),
    ],
)
def test_an_argument_that_torch_does_not_read_back_is_rejected(kind, value):
    with pytest.raises(CompileError, match=r"argument how of user::op.*eager"):
        _check_extern(extern(kind, value))


@pytest.mark.parametrize(
    ("kind", "value"),
    [("as_float", 1.5), ("as_floats", []), ("as_floats", [1.0]), ("as_ints", [0]), ("as_string", "Infinity")],
)
def test_an_argument_that_torch_reads_back_is_accepted(kind, value):
    _check_extern(extern(kind, value))


FAIL = """
import sys
sys.path.insert(0, sys.argv[1])
from piece_cases import CASES
from cgtool.compiler.adaptors.interface import get_adaptor
from cgtool.errors import CgtoolError
compiler = get_adaptor("aot_inductor")
try:
    compiler.compute_hash({})
    compiler.compile(CASES["only views"].piece, options={})
except CgtoolError as error:
    print(type(error).__name__, error)
"""


def with_compiler(path):
    """Return the error of a compile with another C++ compiler."""
    done = forked(FAIL, REPO / "tests", env=environment(CXX=str(path)))
    assert done.code == 0, done.err
    return done.out


def test_a_missing_compiler_is_reported():
    found = with_compiler("/nonexistent/g++")
    assert found.startswith("ConfigError The adaptor 'aot_inductor' needs a C++ compiler")
    assert "/nonexistent/g++" in found


@pytest.mark.parametrize(
    ("cxx", "why"),
    [("", "CXX is set but empty"), ("  ", "CXX is set but empty"), ("/nonexistent/g++", "CXX is '/nonexistent/g++'")],
)
def test_a_missing_compiler_is_detected_before_tracing(monkeypatch, cxx, why):
    monkeypatch.setenv("CXX", cxx)
    with pytest.raises(ConfigError, match=re.escape(f"none works here ({why})")):
        check_compiler("aot_inductor")


def test_a_compiler_that_fails_is_quoted(tmp_path):
    broken = tmp_path / "broken++"
    broken.write_text(
        '#!/bin/sh\nfor word in "$@"; do case "$word" in --version|-v|-dump*) exec g++ "$@";; esac; done\n'
        'echo "In file included from here:" >&2; echo "x.cpp:7:1: error: out of cheese" >&2; exit 1\n'
    )
    broken.chmod(0o755)
    found = with_compiler(broken)
    assert found.startswith("CompileError the C++ compiler failed")
    assert "error: out of cheese" in found
    assert found.rstrip().endswith("(adaptor 'eager')")


_LIBRARY = torch.library.Library("cgtool_unfit", "FRAGMENT")
_LIBRARY.define("unfaked(Tensor x) -> Tensor")
_LIBRARY.impl("unfaked", lambda x: x + 1, "CPU")


def test_an_op_that_cannot_be_traced_is_named():
    piece = graph([X], [call("torch.ops.cgtool_unfit.unfaked.default", "%0")], ["%1"])
    with pytest.raises((CompileError, ArtifactError), match=r"cgtool_unfit\.unfaked"):
        get_adaptor("aot_inductor").compile(piece, options={})


def test_sizes_that_depend_on_data_are_rejected():
    piece = graph([X], [call("torch.nonzero", "%0"), call("torch.sin", "%0")], ["%1", "%2"])
    with pytest.raises(CompileError, match=r"nbacked.*the piece can run eagerly"):
        get_adaptor("aot_inductor").compile(piece, options={})


def test_a_view_as_a_wider_dtype_is_rejected():
    piece = graph([X], [call("torch.ops.aten.view.dtype", "%0", {"dtype": "float64"})], ["%1"])
    with pytest.raises(CompileError, match=r"float32 as torch\.float64"):
        _hold_back_views(rebuild(piece), piece)


def test_a_view_of_an_input_is_not_returned_by_native_code():
    piece = graph([X], [call("torch.sin", "%0"), call("torch.narrow", "%0", 0, 1, 1)], ["%2", "%1"])
    assert _hold_back_views(rebuild(piece), piece) == [["input", 0, [1, 8], [8, 1], 8], ["native", 0]]


@pytest.mark.parametrize("name", ["two inputs", "a fact", "two symbols", "autocast"])
def test_a_piece_without_shared_memory_is_unchanged(name):
    piece = CASES[name].piece
    rebuilt = rebuild(piece)
    before = str(rebuilt.module.graph)
    assert _hold_back_views(rebuilt, piece) is None
    assert str(rebuilt.module.graph) == before
