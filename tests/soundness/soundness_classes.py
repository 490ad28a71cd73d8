"""Features of classes: attributes, methods, bases and special methods."""

from __future__ import annotations

from soundness_projects import MODULES, PLACES, PLAIN, Feature, held, of_class

FACTOR = "def factor(self):\n    return 2.0"
LIVE_FACTOR = "Holder.factor = lambda self: 3.0"


PARENT = "class Parent:\n    gain = 2.0\n\n    def factor(self):\n        return 2.0\n"

#: Where the object's class is the one that the feature is written into.
OWN = tuple(name for name in PLACES if name != "base")

CLASSES = {
    "class_attribute": of_class("gain = 2.0", "gain = 3.0", "it.gain"),
    "class_table": Feature(
        body='table = {"gain": 2.0, "other": 1.0}',
        probe='it.table["gain"]',
        edit=('"gain": 2.0', '"gain": 3.0'),
        live='Holder.table["gain"] = 3.0',
        names="table|Holder",
    ),
    "class_attribute_by_type": of_class("gain = 2.0", "gain = 3.0", "type(it).gain"),
    "attribute_of_parent": Feature(
        head=PARENT,
        bases="Parent",
        probe="it.gain",
        edit=("gain = 2.0", "gain = 3.0"),
        live="home.Parent.gain = 3.0",
        names="gain|Parent|Holder",
    ),
    "attribute_of_grandparent": Feature(
        head="class Grand:\n    gain = 2.0\n\nclass Parent(Grand):\n    pass\n",
        bases="Parent",
        probe="it.gain",
        edit=("gain = 2.0", "gain = 3.0"),
        live="home.Grand.gain = 3.0",
        names="gain|Grand|Holder",
    ),
    "attribute_overridden_in_subclass": of_class("other = 1.0", "gain = 3.0", "it.gain", head=PARENT, bases="Parent"),
    "method_overridden_in_subclass": Feature(
        head=PARENT,
        bases="Parent",
        body="other = 1.0",
        edit=("other = 1.0", "factor = lambda self: 3.0"),
        live=LIVE_FACTOR,
        names="factor|Holder",
    ),
    "method": Feature(
        body=FACTOR,
        edit=("return 2.0", "return 3.0"),
        live=LIVE_FACTOR,
        instance="it.factor = lambda: 3.0",
        names="factor|Holder",
    ),
    "method_by_super": Feature(
        head=PARENT,
        bases="Parent",
        body="def factor(self):\n    return super().factor() * 1.0",
        edit=("        return 2.0", "        return 3.0"),
        live="home.Parent.factor = lambda self: 3.0",
        names="factor|Parent|Holder",
    ),
    "method_in_the_middle_of_super": Feature(
        head=PARENT + "\nclass Middle(Parent):\n    pass\n",
        bases="Middle",
        body="def factor(self):\n    return super().factor() * 1.0",
        edit=("class Middle(Parent):\n    pass", "class Middle(Parent):\n    factor = lambda self: 3.0"),
        live="home.Middle.factor = lambda self: 3.0",
        names="factor|Middle|Holder",
    ),
    "order_of_bases": Feature(
        head="class One:\n    gain = 2.0\n\nclass Two:\n    gain = 3.0\n",
        bases="One, Two",
        probe="it.gain",
        edit=("(One, Two", "(Two, One"),
        live="Holder.__bases__ = (Holder.__bases__[1], Holder.__bases__[0], *Holder.__bases__[2:])",
        names="One|Two|bases|gain|Holder",
        places=MODULES,
    ),
    "static_method": Feature(
        body="@staticmethod\ndef factor():\n    return 2.0",
        edit=("return 2.0", "return 3.0"),
        live="Holder.factor = staticmethod(lambda: 3.0)",
        names="factor|Holder",
    ),
    "class_method": of_class(
        "gain = 2.0",
        "gain = 3.0",
        "it.factor()",
        body="gain = 2.0\n\n@classmethod\ndef factor(cls):\n    return cls.gain",
    ),
    "property": Feature(
        body="@property\ndef gain(self):\n    return 2.0",
        probe="it.gain",
        edit=("return 2.0", "return 3.0"),
        live="Holder.gain = property(lambda self: 3.0)",
        names="gain|Holder",
    ),
    "attribute_behind_a_property": of_class(
        "_gain = 2.0", "_gain = 3.0", "it.gain", body="_gain = 2.0\n\n@property\ndef gain(self):\n    return self._gain"
    ),
    "descriptor": Feature(
        head="class Fixed:\n    def __get__(self, instance, owner=None):\n        return 2.0\n",
        body="gain = Fixed()",
        probe="it.gain",
        edit=("return 2.0", "return 3.0"),
        live="home.Fixed.__get__ = lambda self, instance, owner=None: 3.0",
        names="gain|Fixed|Holder",
    ),
    "state_of_a_descriptor": Feature(
        head=(
            "class Fixed:\n    def __init__(self, value):\n        self.value = value\n\n"
            "    def __get__(self, instance, owner=None):\n        return self.value\n"
        ),
        body="gain = Fixed(2.0)",
        probe="it.gain",
        edit=("Fixed(2.0)", "Fixed(3.0)"),
        live='vars(Holder)["gain"].value = 3.0',
        names="gain|Fixed|Holder",
    ),
    "cached_property": Feature(
        head="import functools",
        body="@functools.cached_property\ndef gain(self):\n    return 2.0",
        probe="it.gain",
        edit=("return 2.0", "return 3.0"),
        instance='it.__dict__["gain"] = 3.0',
        names="gain|Holder",
        refused=True,
    ),
    "slots": held("gain", "2.0", "3.0", "it.gain", body="__slots__ = ('gain',)", names="gain|Holder", places=PLAIN),
    "name_of_class": of_class(
        "other = 1.0",
        "__qualname__ = 'Another'",
        "float(len(type(it).__qualname__))",
        head="class Other:\n    pass\n",
        names="Another|qualname|Holder",
        places=OWN[1:],
    ),
    "docstring": Feature(
        body='"""ab"""',
        probe="float(len(type(it).__doc__))",
        edit=('"""ab"""', '"""abc"""'),
        live="Holder.__doc__ = 'abc'",
        names="__doc__|Holder",
        places=OWN,
    ),
    "isinstance_by_registration": Feature(
        head="import abc\n\nclass Marker(abc.ABC):\n    pass\n",
        probe="from app import HOME\nreturn 3.0 if isinstance(it, HOME.Marker) else 2.0",
        tail="# nothing is registered",
        edit=("# nothing is registered", "Marker.register(Holder)"),
        live="home.Marker.register(Holder)",
        names="Marker|regist",
    ),
    "issubclass_by_registration": Feature(
        head="import abc\n\nclass Marker(abc.ABC):\n    pass\n",
        probe="from app import HOME\nreturn 3.0 if issubclass(type(it), HOME.Marker) else 2.0",
        tail="# nothing is registered",
        edit=("# nothing is registered", "Marker.register(Holder)"),
        live="home.Marker.register(Holder)",
        names="Marker|regist",
    ),
    "isinstance_by_registration_with_pythons_abc": Feature(
        head="from collections.abc import Sequence",
        probe="from app import HOME\nreturn 3.0 if isinstance(it, HOME.Sequence) else 2.0",
        tail="# nothing is registered",
        edit=("# nothing is registered", "Sequence.register(Holder)"),
        live="home.Sequence.register(Holder)",
        names="Sequence|regist",
    ),
    "isinstance_by_registration_with_a_heir_of_pythons_abc": Feature(
        head="from numbers import Real",
        probe="from app import HOME\nreturn 3.0 if isinstance(it, HOME.Real) else 2.0",
        live="import numbers; numbers.Integral.register(Holder)",
        names="Real|regist",
    ),
    "isinstance_by_metaclass": Feature(
        head=(
            "class Meta(type):\n    def __instancecheck__(cls, instance):\n        return False\n\n"
            "class Marker(metaclass=Meta):\n    pass\n"
        ),
        probe="from app import HOME\nreturn 3.0 if isinstance(it, HOME.Marker) else 2.0",
        edit=("return False", "return True"),
        live="home.Meta.__instancecheck__ = lambda cls, instance: True",
        names="Marker|Meta|instancecheck",
    ),
    "isinstance_by_base": Feature(
        head="class Marker:\n    pass\n\nclass Parent:\n    pass\n",
        bases="Parent",
        probe="from app import HOME\nreturn 3.0 if isinstance(it, HOME.Marker) else 2.0",
        edit=("class Parent:", "class Parent(Marker):"),
        instance=(
            "kind = type(it)\n"
            "names = {'__module__': kind.__module__, '__qualname__': kind.__qualname__}\n"
            "it.__class__ = type(kind.__name__, (kind, home.Marker), names)"
        ),
        names="Marker|Parent|Holder|bases",
    ),
    "isinstance_of_a_protocol": of_class(
        "other = 1.0",
        "extra = lambda self: None",
        "from app import HOME\nreturn 3.0 if isinstance(it, HOME.Marker) else 2.0",
        head="import typing\n\n@typing.runtime_checkable\nclass Marker(typing.Protocol):\n    def extra(self): ...\n",
        names="Marker|extra|Holder",
    ),
    "attribute_of_metaclass": Feature(
        head="class Meta(type):\n    gain = 2.0\n\nclass Other(metaclass=Meta):\n    pass\n",
        body="other = Other",
        probe="it.other.gain",
        edit=("gain = 2.0", "gain = 3.0"),
        live="home.Meta.gain = 3.0",
        names="gain|Meta|other",
    ),
    "property_of_metaclass": Feature(
        head=(
            "GAIN = 2.0\n\nclass Meta(type):\n    @property\n    def gain(cls):\n        return GAIN\n\n"
            "class Other(metaclass=Meta):\n    pass\n"
        ),
        body="other = Other",
        probe="it.other.gain",
        edit=("GAIN = 2.0", "GAIN = 3.0"),
        live="home.GAIN = 3.0",
        names="gain|GAIN|Meta|other",
    ),
    "dataclass_default": Feature(
        head="import dataclasses",
        decorator="@dataclasses.dataclass",
        body="gain: float = 2.0",
        init=None,
        probe="it.gain",
        edit=("gain: float = 2.0", "gain: float = 3.0"),
        early="Holder.__init__.__defaults__ = (3.0,)",
        instance="it.gain = 3.0",
        names="gain|Holder",
        places=PLAIN,
    ),
    "dataclass_factory": Feature(
        head="import dataclasses",
        decorator="@dataclasses.dataclass",
        body="gains: list = dataclasses.field(default_factory=lambda: [2.0])",
        init=None,
        probe="it.gains[0]",
        edit=("[2.0]", "[3.0]"),
        instance="it.gains[0] = 3.0",
        names="gains|Holder",
        places=PLAIN,
    ),
    "dataclass_fields": Feature(
        head="import dataclasses",
        decorator="@dataclasses.dataclass",
        body="gain: float = 2.0\n# the last field",
        init=None,
        probe="import dataclasses\nreturn float(len(dataclasses.fields(it)))",
        edit=("# the last field", "more: float = 2.0"),
        live="del Holder.__dataclass_fields__['gain']",
        names="fields|gain|Holder",
        places=PLAIN,
    ),
    "named_tuple_default": Feature(
        head="import typing\n\nclass Pair(typing.NamedTuple):\n    gain: float = 2.0\n",
        init="self.pair = Pair()",
        probe="it.pair.gain",
        edit=("gain: float = 2.0", "gain: float = 3.0"),
        instance="it.pair = home.Pair(3.0)",
        names="pair|Holder",
    ),
    "enum_value": Feature(
        head="import enum\n\nclass Mode(enum.Enum):\n    ONE = 2.0\n",
        init="self.mode = Mode.ONE",
        probe="it.mode.value",
        edit=("ONE = 2.0", "ONE = 3.0"),
        live="home.Mode.ONE._value_ = 3.0",
        names="mode|Mode",
    ),
    "enum_of_numbers": held(
        "mode",
        "Mode.ONE",
        "Mode.TWO",
        "it.mode * 1.0",
        "it.mode = home.Mode.TWO",
        head="import enum\n\nclass Mode(enum.IntEnum):\n    ONE = 2\n    TWO = 3\n",
        names="mode|Mode",
    ),
    "enum_member": held(
        "mode",
        "Mode.ONE",
        "Mode.TWO",
        "from app import HOME\nreturn 2.0 if it.mode is HOME.Mode.ONE else 3.0",
        "it.mode = home.Mode.TWO",
        head="import enum\n\nclass Mode(enum.Enum):\n    ONE = 1\n    TWO = 2\n",
        names="mode|Mode",
    ),
    "enum_from_the_class": Feature(
        head="import enum\n\nclass Mode(enum.Enum):\n    ONE = 2.0\n",
        probe="from app import HOME\nreturn HOME.Mode.ONE.value",
        edit=("ONE = 2.0", "ONE = 3.0"),
        live="home.Mode.ONE._value_ = 3.0",
        names="Mode",
    ),
    "enum_number_of_members": Feature(
        head="import enum\n\nclass Mode(enum.Enum):\n    ONE = 1\n    TWO = 2\n    # the last one\n",
        probe="from app import HOME\nreturn float(len(HOME.Mode))",
        edit=("# the last one", "THREE = 3"),
        names="Mode",
    ),
}
