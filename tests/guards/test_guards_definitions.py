"""Class definitions: a patched or edited member is reported, and nothing else changes them."""

from __future__ import annotations

import abc
import dataclasses
import enum
import functools
import json
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("torch")

from cgtool.guards.code import define, is_platform_code
from cgtool.plan.rendering import definition_words

pytestmark = pytest.mark.torch


def source(body: str) -> str:
    head = "import abc, dataclasses, enum, functools, typing\nclass One: pass\nclass Two: pass\n"
    return head + textwrap.dedent(body)


def made(body: str):
    scope = {"__name__": __name__}
    exec(source(body), scope)
    return scope["C"]


CHANGES = {
    "a method": ("class C:\n def f(self): return 1", "class C:\n def f(self): return 2", "member f has changed"),
    "a default": ("class C:\n def f(self, x=1): return x", "class C:\n def f(self, x=2): return x", "member f has"),
    "a closure": (
        "def make(n):\n class C:\n  def f(self): return n\n return C\nC = make(1)",
        "def make(n):\n class C:\n  def f(self): return n\n return C\nC = make(2)",
        "member f has changed",
    ),
    "data": ("class C:\n x = 1", "class C:\n x = True", "member x has changed"),
    "more": ("class C: pass", "class C:\n x = 1", "member x was added"),
    "less": ("class C:\n x = 1", "class C: pass", "member x was removed"),
    "the order of bases": ("class C(One, Two): pass", "class C(Two, One): pass", "member __bases__ has changed"),
    "a metaclass": ("class C: pass", "class M(type): pass\nclass C(metaclass=M): pass", "member __class__ has changed"),
    "a property": (
        "class C:\n @property\n def x(self): return 1",
        "class C:\n @property\n def x(self): return 2",
        "member x has changed",
    ),
    "how a property is set": (
        "class C:\n x = property(len, lambda s, v: 1)",
        "class C:\n x = property(len, lambda s, v: 2)",
        "member x has changed",
    ),
    "a cached property": (
        "class C:\n @functools.cached_property\n def x(self): return 1",
        "class C:\n @functools.cached_property\n def x(self): return 2",
        "member x has changed",
    ),
    "a static method": (
        "class C:\n @staticmethod\n def x(): return 1",
        "class C:\n @classmethod\n def x(cls): return 1",
        "member x has changed",
    ),
    "slots": ("class C:\n __slots__ = ('a',)", "class C:\n __slots__ = ('a', 'b')", "member b was added"),
    "an enum": (
        "class C(enum.Enum):\n A = 1\n B = 2",
        "class C(enum.Enum):\n A = 1\n B = 3",
        "member B has changed",
    ),
    "a field": (
        "@dataclasses.dataclass\nclass C:\n x: int = 1",
        "@dataclasses.dataclass\nclass C:\n x: int = 2",
        "member __dataclass_fields__.x has changed",
    ),
    "what a field is for": (
        "@dataclasses.dataclass\nclass C:\n x: int = 1",
        "@dataclasses.dataclass\nclass C:\n x: int = dataclasses.field(default=1, kw_only=True)",
        "member __dataclass_fields__.x has changed",
    ),
    "what makes a field": (
        "@dataclasses.dataclass\nclass C:\n x: list = dataclasses.field(default_factory=list)",
        "@dataclasses.dataclass\nclass C:\n x: list = dataclasses.field(default_factory=tuple)",
        "member __dataclass_fields__.x has changed",
    ),
    "a descriptor": (
        "class D:\n def __init__(s, n): s.n = n\n def __get__(s, *a): return s.n\nclass C:\n x = D(1)",
        "class D:\n def __init__(s, n): s.n = n\n def __get__(s, *a): return s.n\nclass C:\n x = D(2)",
        "member x has changed",
    ),
    "what is registered": (
        "class C(abc.ABC): pass",
        "class C(abc.ABC): pass\nC.register(One)",
        "member register has changed",
    ),
    "a named tuple's default": (
        "class C(typing.NamedTuple):\n x: int = 1",
        "class C(typing.NamedTuple):\n x: int = 2",
        "member __new__ has changed",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_class_member_is_reported(name):
    before, after, words = CHANGES[name]
    assert words in definition_words(define(made(before)), define(made(after)))


SAME = {
    "a docstring of a class": ("class C:\n 'one'", "class C:\n 'two'"),
    "where it stands": ("class C:\n def f(self): return 1", "\n\n\nclass C:\n def f(self): return 1"),
    "an annotation": ("class C:\n x: int = 1", "class C:\n x: float = 1"),
    "a registry that grows": ("class C:\n registry = {}", "class C:\n registry = {'a': One}"),
    "an ABC's memory": ("class C(abc.ABC): pass", "class C(abc.ABC): pass\nisinstance(1, C)"),
}


@pytest.mark.parametrize("name", SAME)
def test_members_that_no_call_reads_are_excluded(name):
    before, after = SAME[name]
    assert define(made(before)) == define(made(after))


def test_a_container_counts_where_code_names_it():
    before, after = (made(f"class C:\n table = {{'a': {n}}}") for n in (1, 2))
    assert define(before, ["table"]) != define(after, ["table"])


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Everything(abc.ABC):  # noqa: B024
    """A class with every kind of member, to be compared in two processes."""

    size: int = 1
    names: frozenset[str] = frozenset({"a", "b", "c", "d"})
    colour: Colour = Colour.RED
    kinds = (int, functools.partial(int, base=2))

    @functools.cached_property
    def area(self):
        return {name for name in self.names if name in {"x", "y", "z"}}


def test_a_definition_is_the_same_in_every_process():
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import test_guards_definitions as m;"
        "from cgtool.guards.code import define; print(json.dumps(define(m.Everything)))"
    )
    command = [sys.executable, "-c", code, __file__.rpartition("/")[0]]
    told = subprocess.run(command, env={"PYTHONHASHSEED": "1"}, capture_output=True, text=True, check=True).stdout
    assert json.loads(told) == json.loads(json.dumps(define(Everything)))


def test_classes_of_torch_and_python_are_platform_code():
    assert is_platform_code(dict)
    assert is_platform_code(enum.Enum)
    assert not is_platform_code(Everything)
