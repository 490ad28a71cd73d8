"""Features of identity: which objects, weights and tensors are the same."""

from __future__ import annotations

from soundness_projects import MODULES, PLAIN, Feature, held

SENTINEL = "class Sentinel:\n    pass\n\nMISSING = Sentinel()\n"


def become_one(made: str, **fields) -> Feature:
    """Return a feature of two objects that are replaced by one."""
    changes = {"edit": (f"self.two = {made}", "self.two = self.one"), "instance": "it.two = it.one"}
    init, probe = f"self.one = {made}\nself.two = {made}", "3.0 if it.one is it.two else 2.0"
    return Feature(**{"init": init, "probe": probe, "names": "one|two", **changes, **fields})


def become_two(made: str, **fields) -> Feature:
    """Return a feature of one object that is replaced by two."""
    changes = {"edit": ("self.two = self.one", f"self.two = {made}"), "instance": f"it.two = {made}"}
    init, probe = f"self.one = {made}\nself.two = self.one", "2.0 if it.one is it.two else 3.0"
    return Feature(**{"init": init, "probe": probe, "names": "one|two", **changes, **fields})


IDENTITY = {
    "two_names_of_one_list": become_two("[1]"),
    "two_lists_become_one": become_one("[1]"),
    "two_objects_become_one": become_one("Inner()", head="class Inner:\n    pass\n"),
    "elements_of_a_list": held(
        "parts",
        "[Inner(), Inner()]",
        "[Inner()] * 2",
        "3.0 if it.parts[0] is it.parts[1] else 2.0",
        "it.parts[1] = it.parts[0]",
        head="class Inner:\n    pass\n",
    ),
    "elements_by_walrus": held(
        "parts",
        "[Inner(), Inner()]",
        "[Inner()] * 2",
        "3.0 if (first := it.parts[0]) is it.parts[1] and first is not None else 2.0",
        "it.parts[1] = it.parts[0]",
        head="class Inner:\n    pass\n",
    ),
    "number_of_different_objects": held(
        "parts",
        "[Inner(), Inner()]",
        "[Inner()] * 2",
        "float(len({part for part in it.parts}))",
        "it.parts[1] = it.parts[0]",
        head="class Inner:\n    pass\n",
        refused=True,
    ),
    "number_of_different_ids": held(
        "parts",
        "[Inner(), Inner()]",
        "[Inner()] * 2",
        "float(len({id(part) for part in it.parts}))",
        "it.parts[1] = it.parts[0]",
        head="class Inner:\n    pass\n",
        names="parts|id",
        refused=True,
    ),
    "object_in_a_list": Feature(
        head="class Inner:\n    pass\n",
        init="self.one = Inner()\nself.parts = [Inner()]",
        probe="3.0 if it.one in it.parts else 2.0",
        edit=("self.parts = [Inner()]", "self.parts = [self.one]"),
        instance="it.parts[0] = it.one",
        names="parts|one",
    ),
    "object_as_a_key": Feature(
        head="class Inner:\n    pass\n",
        init="self.one = Inner()\nself.table = {Inner(): 1}",
        probe="3.0 if it.one in it.table else 2.0",
        edit=("{Inner(): 1}", "{self.one: 1}"),
        instance="it.table = {it.one: 1}",
        names="table|one",
        refused=True,
    ),
    "sentinel": held(
        "value",
        "MISSING",
        "Sentinel()",
        "from app import HOME\nreturn 2.0 if it.value is HOME.MISSING else 3.0",
        "it.value = home.Sentinel()",
        head=SENTINEL,
        names="value|MISSING",
    ),
    "sentinel_rebound": Feature(
        head=SENTINEL,
        init="self.value = MISSING",
        probe="from app import HOME\nreturn 2.0 if it.value is HOME.MISSING else 3.0",
        live="home.MISSING = home.Sentinel()",
        names="value|MISSING|Holder",
    ),
    "plain_sentinel": held(
        "value",
        "MISSING",
        "object()",
        "from app import HOME\nreturn 2.0 if it.value is HOME.MISSING else 3.0",
        head="MISSING = object()",
        names="value|MISSING",
    ),
    "default_sentinel": held(
        "value",
        "MISSING",
        "None",
        "it.factor(it.value)",
        "it.value = home.Sentinel()",
        head=SENTINEL,
        body="def factor(self, value=MISSING):\n    return 2.0 if value is MISSING else 3.0",
        names="value|MISSING|Holder",
    ),
    "methods_of_one_object": held(
        "call",
        "self.factor",
        "type(self).__new__(type(self)).factor",
        "2.0 if it.call.__self__ is it else 3.0",
        "it.call = Holder.__new__(Holder).factor",
        body="def factor(self):\n    return 2.0",
        names="call|factor",
        places=PLAIN,
    ),
    "owner_and_part": Feature(
        head="class Inner:\n    pass\n",
        init="self.inner = Inner()\nself.inner.owner = self",
        probe="2.0 if it.inner.owner is it else 3.0",
        edit=("self.inner.owner = self", "self.inner.owner = None"),
        instance="it.inner.owner = None",
        names="owner",
        places=PLAIN,
    ),
    "submodules_become_one": become_one("nn.Identity()", places=MODULES),
    "submodules_become_two": become_two("nn.Identity()", places=MODULES),
    "weights_become_tied": become_one("nn.Parameter(torch.ones(4))", names="one|two|tied", places=MODULES),
    "weights_become_untied": become_two("nn.Parameter(torch.ones(4))", names="one|two|tied", places=MODULES),
    "buffers_become_one": Feature(
        init="self.register_buffer('one', torch.ones(4))\nself.register_buffer('two', torch.ones(4))",
        probe="3.0 if it.one is it.two else 2.0",
        edit=("self.register_buffer('two', torch.ones(4))", "self.register_buffer('two', self.one)"),
        instance="it.two = it.one",
        names="one|two|tied",
        places=MODULES,
    ),
    "buffers_share_memory_and_one_is_written": Feature(
        init="self.one = torch.ones(4)\nself.two = torch.ones(4)",
        probe="it.one.fill_(2.0)\nreturn it.two",
        edit=("self.two = torch.ones(4)", "self.two = self.one[:]"),
        instance="it.two = it.one[:]",
        names="one|two|memory|storage",
    ),
    "tensors_become_one": become_one("torch.ones(4)"),
    "tensors_of_a_list_become_one": held(
        "parts",
        "[torch.ones(4), torch.ones(4)]",
        "[torch.ones(4)] * 2",
        "3.0 if it.parts[0] is it.parts[1] else 2.0",
        "it.parts[1] = it.parts[0]",
    ),
    "tensor_in_a_list": Feature(
        init="self.one = torch.ones(4)\nself.parts = [torch.ones(4)]",
        probe="3.0 if any(part is it.one for part in it.parts) else 2.0",
        edit=("[torch.ones(4)]", "[self.one]"),
        instance="it.parts[0] = it.one",
        names="parts|one",
    ),
    "same_class": held(
        "kind",
        "One",
        "Two",
        "from app import HOME\nreturn 2.0 if it.kind is HOME.One else 3.0",
        "it.kind = home.Two",
        head="class One:\n    pass\n\nclass Two:\n    pass\n",
        names="kind|One|Two",
    ),
    "same_function": held(
        "call",
        "one",
        "two",
        "from app import HOME\nreturn 2.0 if it.call is HOME.one else 3.0",
        "it.call = home.two",
        head="def one():\n    return 1\n\ndef two():\n    return 1\n",
        names="call|one|two",
    ),
}
