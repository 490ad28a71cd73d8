"""`import cgtool`: the public names and their modules, at run time and for type checkers."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import cgtool

LIGHT = ["CUDAGraphMode", "CacheMissError", "CgtoolError", "CompilationConfig", "CompilationLevel", "ExampleCall"]
LIGHT += ["GuardError", "ModelSpec", "register_adaptor"]
SIGNATURES = {
    "load": {"module", "config", "cache_dir", "prefix", "rank"},
    "compile": {"module", "example_args", "example_kwargs", "dynamic", "config", "cache_dir", "prefix"},
}


@pytest.mark.parametrize("name", LIGHT)
def test_a_public_name_is_that_of_its_module(name):
    home = importlib.import_module(cgtool._HOMES[name])
    assert getattr(cgtool, name) is getattr(home, name)


def test_all_and_dir_list_the_public_names():
    assert set(cgtool.__all__) == {*cgtool._HOMES, "__version__"}
    assert dir(cgtool) == sorted(cgtool.__all__)


def test_type_checkers_see_the_same_public_names():
    tree = ast.parse(Path(cgtool.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    typed = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed == cgtool._HOMES
    assert (Path(cgtool.__file__).parent / "py.typed").is_file()


def test_the_error_for_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match=r"no attribute 'complie'; it has .*compile"):
        cgtool.complie  # noqa: B018  the access is the test


def test_a_public_name_is_imported_once():
    vars(cgtool).pop("ModelSpec", None)
    first = cgtool.ModelSpec
    assert vars(cgtool)["ModelSpec"] is first


def test_the_version_is_the_installed_one():
    try:
        installed = importlib.metadata.version("cgtool")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("cgtool runs from a clone and is not installed")
    assert cgtool.__version__ == installed


@pytest.mark.torch
def test_every_public_name_can_be_imported():
    code = "from cgtool import *\nimport cgtool\nprint([n for n in cgtool.__all__ if n not in globals()])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.torch
@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_load_and_compile_have_the_documented_parameters(name):
    import inspect

    parameters = inspect.signature(getattr(cgtool, name)).parameters
    assert set(parameters) >= SIGNATURES[name]
    assert [p.name for p in parameters.values() if p.kind is not p.KEYWORD_ONLY] == ["module"]
    assert parameters["prefix"].default is None
