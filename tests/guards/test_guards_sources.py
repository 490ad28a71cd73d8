"""Sources: every form resolves in a live model, and nothing outside the grammar does."""

from __future__ import annotations

import contextlib
import json
import math
import os
import string
import subprocess
import sys
import types
import weakref
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cgtool
from cgtool.guards.kinds import check
from cgtool.guards.sources import (
    NotImportedError,
    Roots,
    SourceError,
    canonical_module_name,
    find_module,
    find_qualified,
    parse_source,
    qualified_name,
)
from cgtool.plan.records import Guard, source_words

SCALE = 2.5


class Part:
    def __init__(self):
        self.eps = 1e-6
        self.table = {"a": 1, "b": 2}
        self.sizes = [8, 16, 32]
        self.ref = weakref.ref(Part)


class Whole:
    def __init__(self):
        self.part = Part()
        self.odd = {"": 1, 'quo"te': 2, "back\\slash": 3, "ü\n": 4, 7: 5}

    def forward(self, x):
        return x


def closed_over():
    depth = 3

    def forward(x):
        return x * depth

    return forward


WHOLE = Whole()
ROOTS = Roots(WHOLE, WHOLE.forward, {"x": [10, 20]})

FOUND = {
    "self": WHOLE,
    "self.part": WHOLE.part,
    "self.part.eps": 1e-6,
    'self.part.table["b"]': 2,
    "self.part.table|keys[1]": "b",
    "self.part.table|values[0]": 1,
    "self.part.sizes[-1]": 32,
    "self.part.sizes|list[1]": 16,
    "self.part|type": Part,
    "self.part|type.__name__": "Part",
    "self.part.ref|call": Part,
    "self.part|dict": vars(WHOLE.part),
    'self.part|dict["eps"]': 1e-6,
    "arg:x[1]": 20,
    f"global:{__name__}:SCALE": 2.5,
    "global:math:pi": math.pi,
    "module:math": math,
    "module:xml.etree.ElementTree": find_module("xml.etree.ElementTree"),
}


@pytest.mark.parametrize("text", FOUND)
def test_a_source_resolves_to_its_object(text):
    found = ROOTS.resolve(text)
    assert found is FOUND[text] or found == FOUND[text]


def test_a_free_variable_is_read_from_the_cell():
    function = closed_over()
    assert Roots(None, function).resolve("free:depth") == 3
    function.__closure__[0].cell_contents = 4
    assert Roots(None, function).resolve("free:depth") == 4
    del function.__closure__[0].cell_contents
    with pytest.raises(SourceError, match="depth"):
        Roots(None, function).resolve("free:depth")


@given(st.text() | st.integers(min_value=-(10**12), max_value=10**12))
def test_any_text_or_number_round_trips_as_a_key(key):
    text = f"arg:x[{json.dumps(key)}]"
    (accessor,) = parse_source(text).accessors
    assert (accessor.word, accessor.key) == ("item", key)
    assert Roots(None, None, {"x": {key: "here"}}).resolve(text) == "here"


ACCESSORS = st.one_of(
    st.text(string.ascii_letters + string.digits + "_", min_size=1).map(lambda name: f".{name}"),
    (st.text() | st.integers(-99, 99)).map(lambda key: f"[{json.dumps(key)}]"),
    st.sampled_from(["|type", "|dict", "|call"]),
    st.tuples(st.sampled_from(["keys", "values", "list"]), st.integers(0, 99)).map(lambda nth: f"|{nth[0]}[{nth[1]}]"),
)


@given(st.sampled_from(["self", "arg:x", "free:x", "global:a.b:c"]), st.lists(ACCESSORS, max_size=6))
def test_parsing_keeps_the_text_and_its_prefixes(root, accessors):
    text = root + "".join(accessors)
    source = parse_source(text)
    assert source.text == text
    assert len(source.accessors) == len(accessors)
    assert list(source.prefixes) == [root + "".join(accessors[:n]) for n in range(len(accessors))]


HOSTILE = [
    "",
    " self",
    "self ",
    "selfish",
    "SELF",
    "self.",
    "self..x",
    "self.x()",
    "self.x;import os",
    "self.x y",
    "self.café",
    "self[x]",
    "self[0",
    "self[0][",
    "self['a']",
    'self["a]',
    'self["\\q"]',
    'self["\n"]',
    "self[007]",
    "self[1.0]",
    f"self[{'9' * 5000}]",
    f"self|keys[{'9' * 5000}]",
    "self|eval",
    "self|keys",
    "self|keys[-1]",
    "self|type()",
    "arg:",
    "arg:1x",
    "arg:x\n",
    "global:os",
    "global:os:",
    "global:os:system('x')",
    "global::x",
    "global:../os:x",
    "global:os.:x",
    "module:",
    "module:os;x",
    "module:os:path",
    "state:",
    "builtin:open",
    "__import__('os')",
    "self\x00",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_malformed_sources_are_refused_with_a_message(text):
    with pytest.raises(SourceError, match="malformed source"):
        parse_source(text)


@given(st.text(max_size=30))
def test_any_text_is_parsed_or_refused(text):
    for candidate in (text, f"self{text}", f"arg:{text}", f"global:math:{text}"):
        with contextlib.suppress(SourceError):
            assert parse_source(candidate).text == candidate


GONE = {
    "self.other": "other",
    "self.part.table[3]": "part.table",
    "self.part.sizes[9]": "part.sizes",
    "self.part.sizes|list[9]": "part.sizes",
    "self.part.eps[0]": "part.eps",
    "self.part.eps|dict": "part.eps",
    "self.part.eps|keys[0]": "part.eps",
    f"global:{__name__}:NOTHING": "NOTHING",
    "module:no_such_module_anywhere": "no_such_module_anywhere",
    "arg:y": "during a call",
    "free:depth": "depth",
    "self.failing": "failing",
}


@pytest.mark.parametrize("text", GONE)
def test_a_missing_object_is_reported_by_name(text, monkeypatch):
    def fail(self):
        raise RuntimeError("not today")

    monkeypatch.setattr(Whole, "failing", property(fail), raising=False)
    with pytest.raises(SourceError, match=GONE[text]):
        Roots(WHOLE, WHOLE.forward, {}).resolve(text)


def test_nothing_but_a_weak_reference_is_called():
    called = []
    holder = types.SimpleNamespace(function=lambda: called.append(1))
    with pytest.raises(SourceError):
        Roots(holder).resolve("self.function|call")
    assert called == []


def test_no_module_is_imported_because_a_plan_names_it(tmp_path, monkeypatch):
    (tmp_path / "fails_at_import_xyz.py").write_text("raise RuntimeError('broken')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(NotImportedError, match=r"fails_at_import_xyz was imported when this was compiled"):
        find_module("fails_at_import_xyz")
    told = Guard(source="global:fails_at_import_xyz:SCALE", kind="value", expected=1)
    assert check([told], Roots(None)) == []  # its file says what it will be, and is compared on its own


def test_sources_are_rendered_as_users_write_them():
    said = {
        "self": "the model",
        "self.layers.0.eps": "layers.0.eps",
        "arg:input_ids": "input_ids",
        "global:pkg.tiny:SCALE": "pkg.tiny.SCALE",
        "module:pkg": "pkg",
        "self.a|type.forward": "a's type.forward",
    }
    assert {text: source_words(text) for text in said} == said


def test_qualified_names_resolve():
    for thing in (Part, Part.__init__, json.dumps, string.Template):
        assert find_qualified(qualified_name(thing)) is thing


SCRIPT = """
import sys
from cgtool.guards.sources import find_qualified, qualified_name
from cgtool.guards.sources import Roots, canonical_module_name
class Here: pass
VALUE = 7
name = qualified_name(Here)
assert find_qualified(name) is Here
assert Roots(None).resolve("global:" + canonical_module_name("__main__") + ":VALUE") == 7
print(name)
"""


def test_the_running_script_has_its_import_name(tmp_path):
    package = tmp_path / "package_of_test"
    package.mkdir()
    (package / "__init__.py").touch()
    for path in (tmp_path / "the_script.py", package / "inner.py", package / "__main__.py"):
        path.write_text(SCRIPT)

    def run(*arguments):
        env = {**os.environ, "PYTHONPATH": str(Path(cgtool.__file__).parents[1])}
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout.strip()

    assert run("the_script.py") == "the_script:Here"
    assert run(str(tmp_path / "the_script.py")) == "the_script:Here"
    assert run("-m", "the_script") == "the_script:Here"
    assert run("-m", "package_of_test.inner") == "package_of_test.inner:Here"
    assert run("-m", "package_of_test") == "package_of_test.__main__:Here"
    assert run("-c", SCRIPT) == "__main__:Here"
    assert canonical_module_name("anything.else") == "anything.else"
