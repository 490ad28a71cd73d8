"""Features of special methods, which Python looks up on the class."""

from __future__ import annotations

from soundness_projects import PLACES, PLAIN, Feature, of_class


def special(method: str, probe: str, was: str, becomes: str, **fields) -> Feature:
    """Return a feature of a special method that returns one expression and then another."""
    return Feature(
        body=f"def {method}(self, *args):\n    return {was}",
        probe=probe,
        edit=(f"*args):\n        return {was}", f"*args):\n        return {becomes}"),
        live=f"Holder.{method} = lambda self, *args: {becomes}",
        names=fields.pop("names", f"{method}|Holder"),
        **fields,
    )


def added(method: str, probe: str, becomes: str, **fields) -> Feature:
    """Return a feature of a special method that a class has only after the change."""
    return of_class("other = 1.0", f"{method} = lambda self, *args: {becomes}", probe, **fields)


SPECIAL = {
    "call": special("__call__", "it()", "2.0", "3.0", places=PLAIN),
    "length": special("__len__", "float(len(it))", "2", "3"),
    "truth_by_length": special("__len__", "2.0 if it else 3.0", "2", "0"),
    "truth_by_length_added": added("__len__", "2.0 if it else 3.0", "0"),
    "truth": special("__bool__", "2.0 if it else 3.0", "True", "False"),
    "truth_added": added("__bool__", "2.0 if it else 3.0", "False"),
    "truth_by_not": added("__bool__", "3.0 if not it else 2.0", "False"),
    "truth_by_or": added("__bool__", "2.0 if (it or None) is not None else 3.0", "False"),
    "equality": special("__eq__", "2.0 if it == 5 else 3.0", "True", "False", places=PLAIN),
    "equality_added": added("__eq__", "3.0 if it == 5 else 2.0", "True", places=PLAIN),
    "inequality_added": added("__ne__", "2.0 if it != 5 else 3.0", "False", places=PLAIN),
    "less_than": special("__lt__", "2.0 if it < 5 else 3.0", "True", "False"),
    "contains": special("__contains__", "2.0 if 5 in it else 3.0", "True", "False"),
    "item": special("__getitem__", "it[0]", "2.0", "3.0"),
    "iteration": special("__iter__", "sum(it)", "iter([1.0, 1.0])", "iter([1.0, 2.0])"),
    "reversed": special("__reversed__", "sum(reversed(it))", "iter([1.0, 1.0])", "iter([1.0, 2.0])"),
    "multiplication": special("__mul__", "it * 1.0", "2.0", "3.0"),
    "multiplication_from_the_right": special("__rmul__", "1.0 * it", "2.0", "3.0"),
    "addition": special("__add__", "it + 1.0", "2.0", "3.0"),
    "negation": special("__neg__", "-it", "2.0", "3.0"),
    "absolute": special("__abs__", "abs(it)", "2.0", "3.0", refused=True),
    "number": special("__float__", "float(it)", "2.0", "3.0", refused=True),
    "index": special("__index__", "[1.0, 2.0, 3.0][it]", "1", "2", refused=True),
    "text": special("__str__", "float(len(str(it)))", "'ab'", "'abc'", refused=True),
    "format": Feature(
        body="def __format__(self, how):\n    return 'ab'",
        probe="2.0 if f'{it}' == 'ab' else 3.0",
        edit=("return 'ab'", "return 'abc'"),
        live="Holder.__format__ = lambda self, how: 'abc'",
        names="__format__|StringFormat|Holder",
        refused=True,
    ),
    "hash": special("__hash__", "2.0 if hash(it) == 5 else 3.0", "5", "6", refused=True),
    "names_of_attributes": special(
        "__dir__",
        "2.0 if 'gain' in dir(it) else 3.0",
        "['gain']",
        "[]",
        refused=True,
        names=r"__dir__|dir\(it\)|Holder",
    ),
    "getattr": special("__getattr__", "it.gain", "2.0", "3.0", places=PLAIN),
    "getattr_of_a_module": Feature(
        body=(
            "def __getattr__(self, name):\n    if name == 'gain':\n        return 2.0\n"
            "    return super().__getattr__(name)"
        ),
        probe="it.gain",
        edit=("return 2.0", "return 3.0"),
        live="Holder.__getattr__ = lambda self, name: 3.0 if name == 'gain' else nn.Module.__getattr__(self, name)",
        names="__getattr__|gain|Holder",
    ),
    "getattr_added": of_class(
        "other = 1.0",
        "__getattr__ = lambda self, name: 3.0",
        "getattr(it, 'gain', 2.0)",
        names="__getattr__|gain|Holder",
        places=PLAIN,
    ),
    "getattribute": of_class(
        "other = 1.0",
        "__getattribute__ = lambda self, name: 3.0",
        "it.gain",
        body="gain = 2.0\nother = 1.0",
        names="__getattribute__|gain|Holder",
        places=PLAIN,
    ),
    "class_of_an_object": Feature(
        head="class Other:\n    pass\n",
        body="other = 1.0",
        probe="from app import HOME\nreturn 3.0 if isinstance(it, HOME.Other) else 2.0",
        edit=("other = 1.0", "__class__ = Other"),
        names="__class__|Other|Holder",
        places=PLAIN,
    ),
    "missing_key": Feature(
        head="class Table(dict):\n    def __missing__(self, key):\n        return 2.0\n",
        init="self.table = Table()",
        probe="it.table['gain']",
        edit=("return 2.0", "return 3.0"),
        live="home.Table.__missing__ = lambda self, key: 3.0",
        names="__missing__|Table|table",
        refused=True,
    ),
    "next": Feature(
        head=(
            "class Steps:\n    def __iter__(self):\n        return self\n\n"
            "    def __next__(self):\n        return 2.0\n"
        ),
        body="def factor(self):\n    return next(iter(Steps()))",
        edit=("return 2.0", "return 3.0"),
        live="home.Steps.__next__ = lambda self: 3.0",
        names="__next__|Steps",
    ),
    "subclass_hook": of_class(
        "other = 1.0",
        "extra = 1.0",
        "from app import HOME\nreturn 3.0 if isinstance(it, HOME.Marker) else 2.0",
        head="import abc\n\nclass Marker(abc.ABC):\n    @classmethod\n    def __subclasshook__(cls, other):\n"
        "        return hasattr(other, 'extra')\n",
        names="extra|Marker|Holder",
    ),
    "init_of_a_subclass": Feature(
        head="class Parent:\n    def __init_subclass__(cls):\n        cls.gain = 2.0\n",
        bases="Parent",
        probe="it.gain",
        edit=("cls.gain = 2.0", "cls.gain = 3.0"),
        live="Holder.gain = 3.0",
        names="gain|Parent|Holder",
        places=tuple(place for place in PLACES if place != "base"),  # whose subclass has a gain of its own
    ),
    "name_of_a_member": Feature(
        head=(
            "class Named:\n    def __set_name__(self, owner, name):\n        self.gain = 2.0\n\n"
            "    def __get__(self, instance, owner=None):\n        return self.gain\n"
        ),
        body="gain = Named()",
        probe="it.gain",
        edit=("self.gain = 2.0", "self.gain = 3.0"),
        live="vars(Holder)['gain'].gain = 3.0",
        names="gain|Named|Holder",
    ),
    "torch_function": Feature(
        body=(
            "@classmethod\ndef __torch_function__(cls, function, types, args, kwargs=None):\n    return args[0] * 2.0"
        ),
        probe="it",
        result="torch.add(x, value)",
        edit=("args[0] * 2.0", "args[0] * 3.0"),
        live="Holder.__torch_function__ = classmethod(lambda cls, function, types, args, kwargs=None: args[0] * 3.0)",
        names="__torch_function__|Holder",
        refused=True,
    ),
}
