"""Names of modules in a plan never cause an import."""

from __future__ import annotations

import copy
import sys

import pytest

pytest.importorskip("torch")

import torch
from test_runtime_mutations import Entry

pytestmark = pytest.mark.torch

PLANTED = "planted_by_a_stranger"
#: The modules that were imported; an audit hook stays as long as the process.
_asked: list[str] = []
sys.addaudithook(lambda event, arguments: _asked.append(str(arguments[0])) if event == "import" else None)


@pytest.fixture(scope="module")
def entry(tmp_path_factory):
    return Entry(tmp_path_factory.mktemp("entry"))


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A module that could be imported but is not, in a package that is not imported either."""
    package = tmp_path / PLANTED
    package.mkdir()
    for name in ("__init__.py", "inner.py"):
        (package / name).write_text("import enum\nx = 1\nclass C(dict): pass\nclass E(enum.Enum):\n    A = 1\n")
    monkeypatch.syspath_prepend(tmp_path)


def _text(plan, source):
    plan["texts"]["parents"].append(-1)
    plan["texts"]["ends"].append(source)
    return len(plan["texts"]["ends"]) - 1


def _model_guard(plan, source, kind="value", expected=1):
    plan["guards"].append([kind, expected, [_text(plan, source)]])
    for variant in plan["variants"]:
        variant["model_guards"].append(len(plan["guards"]) - 1)


def _first(field, value):
    def change(plan):
        for variant in plan["variants"]:
            variant[field] = [*variant[field], value] if field == "call_guards" else value

    return change


def _input(plan):
    plan["inputs"].append([_text(plan, f"global:{PLANTED}:x"), 0])
    plan["variants"][0]["inputs"].append(len(plan["inputs"]) - 1)


CHANGES = {
    "a guard on a global": lambda plan: _model_guard(plan, f"global:{PLANTED}:x"),
    "a guard on a module": lambda plan: _model_guard(
        plan, f"module:{PLANTED}", kind="type", expected="builtins:module"
    ),
    "a guard on an inner module": lambda plan: _model_guard(plan, f"global:{PLANTED}.inner:x"),
    "one object with a global": lambda plan: _model_guard(plan, "self", kind=f"same:global:{PLANTED}:x"),
    "a guard of each call": _first("call_guards", [f"global:{PLANTED}:x", "value", 1]),
    "an input": _input,
    "the class of an output": _first("output", ["call", f"{PLANTED}:C", [], []]),
    "the class of an inner module": _first("output", ["call", f"{PLANTED}.inner:C", [], []]),
    "an enum in an output": _first("output", ["const", ["enum", f"{PLANTED}:E", "A"]]),
    "a type in an output": _first("output", ["const", ["type", f"{PLANTED}:C"]]),
    "the model's class": lambda plan: plan.update(qualname=f"{PLANTED}:Model"),
}


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_name_in_a_plan_never_causes_an_import(entry, change):
    plan = copy.deepcopy(entry.plan)
    change(plan)
    _asked.clear()
    with torch.no_grad():
        entry.outcome(plan)
    assert not [name for name in _asked if PLANTED in name]
    assert PLANTED not in sys.modules
