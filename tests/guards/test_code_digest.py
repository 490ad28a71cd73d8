"""`code_digest` ignores where code is and reflects what it does."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from cgtool.guards.code import code_digest


def function_from(source: str, name: str = "f", filename: str = "<test>") -> object:
    namespace: dict[str, object] = {"__name__": "somewhere"}
    exec(compile(dedent(source), filename, "exec"), namespace)
    return namespace[name]


def test_lines_and_files_do_not_affect_the_digest() -> None:
    text = "def f(x):\n    y = x + 1\n    return [y for _ in range(3)]\n"
    moved = function_from("# a comment\n\n\n" + text.replace("    y", "\n    # why\n    y"), filename="/elsewhere/g.py")
    assert code_digest(function_from(text)) == code_digest(moved)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("def f(x): return x + 1", "def f(x): return x + 2", id="constant"),
        pytest.param("def f(x): return x + 1", "def f(x): return x + 1.0", id="int-and-float"),
        pytest.param("def f(x): return x + 1", "def f(x): return x + True", id="int-and-bool"),
        pytest.param("def f(x): return x * 0.0", "def f(x): return x * -0.0", id="sign-of-zero"),
        pytest.param("def f(x): return x + 1", "def f(x): return x - 1", id="operator"),
        pytest.param("def f(x): return x.sin()", "def f(x): return x.cos()", id="method-name"),
        pytest.param("def f(x): return sin(x)", "def f(x): return cos(x)", id="global-name"),
        pytest.param("def f(x, y=1): return x", "def f(x, y=2): return x", id="default"),
        pytest.param("def f(x, *, y=1): return x", "def f(x, *, y=2): return x", id="keyword-default"),
        pytest.param("def f(x): return [x + 1 for _ in x]", "def f(x): return [x + 2 for _ in x]", id="nested-code"),
        pytest.param("def f(x): return x in {'a', 'b'}", "def f(x): return x in {'a', 'c'}", id="set-constant"),
        pytest.param("def f(x): return x", "async def f(x): return x", id="flags"),
        pytest.param(
            "def m(c):\n def f(x): return x + c\n return f\nf = m(1)",
            "def m(c):\n def f(x): return x + c\n return f\nf = m(2)",
            id="closure-constant",
        ),
        pytest.param(
            "def m(c):\n def f(x): return c(x)\n return f\nf = m(lambda x: x + 1)",
            "def m(c):\n def f(x): return c(x)\n return f\nf = m(lambda x: x + 2)",
            id="closure-function",
        ),
        pytest.param(
            "import enum\nM = enum.Enum('M', 'A B')\ndef f(x, mode=M.A): return x",
            "import enum\nM = enum.Enum('M', 'A B')\ndef f(x, mode=M.B): return x",
            id="member-of-an-enum",
        ),
        pytest.param(
            "class A: pass\nclass B: pass\nf = (lambda x: x).__get__(A())",
            "class A: pass\nclass B: pass\nf = (lambda x: x).__get__(B())",
            id="class-of-a-method",
        ),
        pytest.param(
            "def f(x):\n try:\n  return x()\n except ValueError:\n  return 1",
            "def f(x):\n try:\n  return x()\n except TypeError:\n  return 1",
            id="exception",
        ),
    ],
)
def test_an_edit_changes_the_digest(before: str, after: str) -> None:
    assert code_digest(function_from(before)) != code_digest(function_from(after))


def test_globals_count_only_with_follow_globals() -> None:
    one, two = (function_from(f"C = {value}\ndef g(x): return x * C\ndef f(x): return g(x)") for value in (1, 2))
    assert code_digest(one) == code_digest(two)
    assert code_digest(one, follow_globals=True) != code_digest(two, follow_globals=True)


def test_an_edited_helper_changes_the_digest_with_follow_globals() -> None:
    one, two = (function_from(f"def g(x): return x {op} 2\ndef f(x): return [g(y) for y in x]") for op in "+*")
    assert code_digest(one, follow_globals=True) != code_digest(two, follow_globals=True)


def test_mutually_recursive_functions_terminate() -> None:
    text = "def m():\n def f(x): return g(x)\n def g(x): return f(x)\n return f\nf = m()"
    assert code_digest(function_from(text)) == code_digest(function_from(text))


def test_partials_and_their_arguments_change_the_digest() -> None:
    f, g = function_from("def f(x, y): return x"), function_from("def f(x, y): return y")
    partials = [functools.partial(f, *args, **named) for args in ((), (1,), (2,)) for named in ({}, {"y": 1}, {"y": 2})]
    # mypy asks for the arguments of g
    seen = {code_digest(partial) for partial in (*partials, functools.partial(g))}  # type: ignore[arg-type]
    assert len(seen) == len(partials) + 1


def test_other_processes_paths_and_hash_seeds_agree(tmp_path: Path) -> None:
    module = dedent(
        """
        import math
        def m(names, scale):
            def f(x, *, key={"b": 1, "a": 2}):
                if x in {"alpha", "beta", "gamma", "delta"}:
                    return names
                return math.sin(scale) + sum(g for g in names)
            return f
        f = m({"p", "q", "r", "s"}, 1e-6)
        """
    )
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import mod\n"
        "from cgtool.guards.code import code_digest\nimport json\n"
        "print(json.dumps([code_digest(mod.f), code_digest(mod.f, follow_globals=True), code_digest(mod.f.__code__)]))"
    )
    for lines in (0, 77):
        (tmp_path / str(lines)).mkdir()
        (tmp_path / str(lines) / "mod.py").write_text("\n" * lines + module)
    spec = importlib.util.spec_from_file_location("mod", tmp_path / "0" / "mod.py")
    mod = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mod)
    here = [code_digest(mod.f), code_digest(mod.f, follow_globals=True), code_digest(mod.f.__code__)]
    # another seed than this process has, whether that is set or random
    environment = {**os.environ, "PYTHONHASHSEED": "78", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, str(tmp_path / "77")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == here


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(("(1, 2)", "[1, 2]", "{1, 2}"), id="containers"),
        pytest.param(("2**70", "2**70 + 1", "float(2**70)", "str(2**70)"), id="integers of many bits"),
        pytest.param((r"'\ud800'", r"'\ud801'", "'?'"), id="half a character"),
        pytest.param(("1j", "2j", "'1j'", "...", "'Ellipsis'", "b'a'", "'a'", "None", "'None'"), id="rare constants"),
        pytest.param(("0.0", "-0.0", "0", "False"), id="zeros"),
        pytest.param(("{'a', 'b'}", "{'a', 'c'}", "{'a'}", "('a', 'b')"), id="sets"),
        pytest.param(("slice(1, 2)", "slice(1, 3)", "range(1, 2)", "range(1, 3)"), id="ranges"),
    ],
)
def test_different_values_change_the_digest_wherever_they_are(values: tuple[str, ...]) -> None:
    for text in (
        "def f(x): return x({})",
        "def f(x, y={}): return x",
        "def m(c):\n def f(): return c\n return f\nf = m({})",
    ):
        digests = {code_digest(function_from(text.replace("{}", value))) for value in values}
        assert len(digests) == len(values), text
        assert digests == {code_digest(function_from(text.replace("{}", value))) for value in values}
