"""Writes a small user project to a folder: a feature of Python or torch, in one of several places.

The project is a package `app`. `net.py` holds the model, whose `forward` asks a question (`probe`) of one object, `it`;
the place says which object that is and which file defines its class:

    place       it                     its class
    model       the model itself       Net in net.py
    base        the model itself       Base in base.py, which Net inherits
    submodule   self.block             Block in block.py
    config      self.settings          Settings in settings.py, a plain class
    helper      helper.TOOL            Tool in helper.py, a plain class
    argument    an argument of forward Thing in thing.py, a plain class
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of the object that traced code reads.

    Args:
        holder: The object's class.
        home: The module of that class, within `app`.
        of_model: How a program reaches the object, from `model` and `args`.
        in_forward: How `forward` does.
        is_module: Whether the class is an `nn.Module`.
    """

    holder: str
    home: str
    of_model: str
    in_forward: str
    is_module: bool


PLACES = {
    "model": Place(holder="Net", home="net", of_model="model", in_forward="self", is_module=True),
    "base": Place(holder="Base", home="base", of_model="model", in_forward="self", is_module=True),
    "submodule": Place(holder="Block", home="block", of_model="model.block", in_forward="self.block", is_module=True),
    "config": Place(
        holder="Settings", home="settings", of_model="model.settings", in_forward="self.settings", is_module=False
    ),
    "helper": Place(holder="Tool", home="helper", of_model="home.TOOL", in_forward="helper.TOOL", is_module=False),
    "argument": Place(holder="Thing", home="thing", of_model="args[1]", in_forward="thing", is_module=False),
}
MODULES = tuple(name for name, place in PLACES.items() if place.is_module)
PLAIN = tuple(name for name, place in PLACES.items() if not place.is_module)


@dataclass(frozen=True, kw_only=True, eq=False)
class Feature:
    """A fact that a compiled graph may depend on, and the ways to change it.

    Args:
        probe: The question that `forward` asks of `it`: an expression, or lines that return.
        head: Lines above the class.
        bases: Bases of the class, before the place's own.
        decorator: A line above `class`.
        body: Lines of the class.
        init: Lines of its `__init__`; None leaves the method out.
        tail: Lines below the class.
        files: Further files, by their paths from `app`.
        result: What `forward` returns, of `x` and the probe's `value`.
        parameters: Further parameters of `forward`, for a place whose object is no argument.
        arguments: What is given for them.
        edit: What to replace in the holder's file, by what; or in another: name of the file, what, by what.
        live: A change of the class or its module in the running process.
        instance: A change of `it` in the running process.
        early: A change of the running process before the model is built.
        environment: Variables that are set when the process starts; None unsets one.
        context: What calls are made under after a change, for `torch.no_grad()`.
        names: A pattern that the reason of a miss has to hold, beside the file's module for an edit.
        places: Where the feature can be.
        refused: Whether `warm` may refuse it.
    """

    probe: str = "it.factor()"
    head: str = ""
    bases: str = ""
    decorator: str = ""
    body: str = ""
    init: str | None = ""
    tail: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    result: str = "x * value"
    parameters: str = ""
    arguments: str = ""
    edit: tuple[str, str] | tuple[str, str, str] | None = None
    live: str = ""
    instance: str = ""
    early: str = ""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    context: str = ""
    names: str
    places: tuple[str, ...] = tuple(PLACES)
    refused: bool = False


def held(name: str, before: str, after: str, probe: str, in_place: str = "", **fields) -> Feature:
    """Return a feature of an attribute of `it`: its value is replaced, or changed in place.

    Without a new value, no file is edited.
    """
    made = f"self.{name} = {before}"
    changes = {
        "edit": (made, f"self.{name} = {after}") if after else None,
        "instance": in_place or f"it.{name} = {after}",
    }
    return Feature(**{"init": made, "probe": probe, "names": name, **changes, **fields})


def of_class(before: str, after: str, probe: str, **fields) -> Feature:
    """Return a feature of an attribute of the class: an assignment, and its replacement."""
    name, _, _ = after.partition(" = ")
    changes = {"edit": (before, after), "live": f"Holder.{after}", "names": f"{name}|Holder"}
    return Feature(**{"body": before, "probe": probe, **changes, **fields})


_NET = """\
import torch
from torch import nn
{imports}
{head}

def probe(it):
{probe}

{decorator}
class Net({bases}):
{body}
    def forward(self, x, {parameters}):
        it = {it}
        value = probe(it)
        return {result}
{tail}
"""

_HOLDER = """\
import torch
from torch import nn
{head}

{decorator}
class {holder}({bases}):
{body}

{tail}
"""

_SERVE = """\
import torch
import cgtool
from app import {modules}

def build():
    torch.manual_seed(0)
    return net.Net().eval()

def arguments():
    return (torch.linspace(1.0, 2.0, 4), {argument})

def spec():
    return cgtool.ModelSpec(module=build(), calls=[cgtool.ExampleCall(args=arguments())])
"""


def write_project(feature: Feature, place: Place, folder: Path) -> None:
    """Write the project's files into `folder`/app."""
    app = folder / "app"
    app.mkdir(parents=True)
    in_net = place.home == "net"
    own_bases = "nn.Module" if place.is_module else ""
    bases = ", ".join(filter(None, [feature.bases, own_bases]))
    holder = {"head": feature.head, "decorator": feature.decorator, "tail": feature.tail, "bases": bases}
    outer = {"head": "", "decorator": "", "tail": "", "bases": "nn.Module"}
    if place.holder == "Base":
        outer["bases"] = "base.Base"
    modules = ["net"] if in_net else ["net", place.home]
    members = {"block": "self.block = block.Block()", "settings": "self.settings = settings.Settings()"}
    files = {
        "__init__.py": "",
        "serve.py": _SERVE.format(
            modules=", ".join(modules), argument="thing.Thing()" if place.home == "thing" else feature.arguments
        ),
        "net.py": _NET.format(
            imports="" if in_net else f"from app import {place.home}",
            probe=textwrap.indent(feature.probe if "return" in feature.probe else f"return {feature.probe}", "    "),
            body=_class_body(feature, place) if in_net else _constructor(members.get(place.home, "")),
            parameters="thing" if place.home == "thing" else feature.parameters,
            it=place.in_forward,
            result=feature.result,
            **(holder if in_net else outer),
        ),
        **feature.files,
    }
    if not in_net:
        files[f"{place.home}.py"] = _HOLDER.format(
            holder=place.holder,
            body=_class_body(feature, place),
            **(holder | {"tail": feature.tail + ("\nTOOL = Tool()" if place.home == "helper" else "")}),
        )
    for name, text in files.items():
        path = app / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace("Holder", place.holder).replace("HOME", place.home))


def _class_body(feature: Feature, place: Place) -> str:
    body = textwrap.indent(feature.body or "pass", "    ")
    return body + "\n" if feature.init is None else f"{body}\n{_constructor(feature.init)}"


def _constructor(lines: str) -> str:
    return textwrap.indent(f"\ndef __init__(self):\n    super().__init__()\n{textwrap.indent(lines, '    ')}\n", "    ")
