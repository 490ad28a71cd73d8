"""The commands that load a warmed model, as text; `test_cli_warm` runs one."""

from __future__ import annotations

import ast
import shlex

import pytest

from cgtool.toolkit.model_choice import ModelChoice, load_call, start_line


def line(model="m.py:build", place=None, **changes):
    return start_line(ModelChoice(model=model, **changes), place or {})


def code_of(text):
    _, flag, code = shlex.split(text)
    assert flag == "-c"
    ast.parse(code)
    return code


def test_defaults_are_left_out():
    assert load_call("module", {"cache_dir": None, "rank": None, "prefix": None}) == "cgtool.load(module)"
    assert "spec = resolve_model('m.py:build', weights='real');" in code_of(line())


def test_other_values_are_passed():
    assert (
        load_call("m", {"cache_dir": "c", "rank": 1, "prefix": "p"})
        == "cgtool.load(m, cache_dir='c', rank=1, prefix='p')"
    )
    code = code_of(line(factory_args={"n": 4}, device="cuda", dtype="bfloat16", pythonpath=("src",)))
    assert "factory_args={'n': 4}, weights='real', device='cuda', dtype='bfloat16', pythonpath=('src',)" in code


@pytest.mark.parametrize("name", ["it's", 'a "b"', "$HOME", "`id`", "back\\slash", "bang!", "sp ace;rm"])
def test_names_are_quoted_for_the_shell(name):
    (statement,) = [
        node for node in ast.walk(ast.parse(code_of(line(model=f"{name}.py:build")))) if isinstance(node, ast.Call)
        if getattr(node.func, "id", "") == "resolve_model"
    ]  # fmt: skip
    assert ast.literal_eval(statement.args[0]) == f"{name}.py:build"
