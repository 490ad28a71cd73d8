"""Features of imports: modules of the project, their own imports, and installed distributions."""

from __future__ import annotations

from soundness_code import reads
from soundness_projects import Feature

DEEPER = {"deeper.py": "FACTOR = 2.0\n\ndef scale():\n    return 2.0\n"}
DEEPER_EDIT = ("deeper.py", "FACTOR = 2.0", "FACTOR = 3.0")
SOLID = "FACTOR = 2.0\n\ndef scale():\n    return 2.0\n\nclass Parent:\n    gain = 2.0\n"
METADATA = "Metadata-Version: 2.1\nName: solid\nVersion: 1.0\n"
INSTALLED = {
    "../solid/__init__.py": SOLID,
    "../solid-1.0.dist-info/METADATA": METADATA,
    "../solid-1.0.dist-info/RECORD": "solid/__init__.py,,\nsolid-1.0.dist-info/METADATA,,\n",
}
EDITABLE = {
    "../solid/__init__.py": SOLID,
    "../solid-1.0.dist-info/METADATA": METADATA,
    "../solid-1.0.dist-info/RECORD": "solid-1.0.dist-info/METADATA,,\n",
    "../solid-1.0.dist-info/direct_url.json": '{"url": "file:///solid", "dir_info": {"editable": true}}',
}


def of_deeper(expression: str, **fields) -> Feature:
    """Return a feature of a module `deeper`; the default edit changes its FACTOR."""
    return reads(expression, **{"files": DEEPER, "edit": DEEPER_EDIT, "names": "FACTOR|deeper"} | fields)


IMPORTS = {
    "from_import": of_deeper("FACTOR", head="from app.deeper import FACTOR", live="home.FACTOR = 3.0"),
    "from_import_of_a_function": of_deeper(
        "scale()",
        head="from app.deeper import scale",
        edit=("deeper.py", "return 2.0", "return 3.0"),
        live="home.scale = lambda: 3.0",
        names="scale|deeper",
    ),
    "module_alias": of_deeper(
        "lower.FACTOR",
        head="from app import deeper as lower",
        live="home.lower.FACTOR = 3.0",
        names="FACTOR|deeper|lower",
    ),
    "star_import": of_deeper("FACTOR", head="from app.deeper import *", live="home.FACTOR = 3.0"),
    "import_in_a_function": Feature(
        body="def factor(self):\n    from app.deeper import FACTOR\n    return FACTOR",
        files=DEEPER,
        edit=DEEPER_EDIT,
        live="import app.deeper; app.deeper.FACTOR = 3.0",
        names="FACTOR|deeper",
    ),
    "relative_import": of_deeper(
        "deeper.scale()",
        head="from . import deeper",
        edit=("deeper.py", "return 2.0", "return 3.0"),
        live="home.deeper.scale = lambda: 3.0",
        names="scale|deeper",
    ),
    "attribute_of_a_module_absent": of_deeper(
        "getattr(deeper, 'EXTRA', 2.0)",
        head="from app import deeper",
        edit=("deeper.py", "FACTOR = 2.0", "EXTRA = 3.0"),
        live="home.deeper.EXTRA = 3.0",
        names="EXTRA|deeper",
    ),
    "module_getattr": reads(
        "deeper.GAIN",
        head="from app import deeper",
        files={"deeper.py": "def __getattr__(name):\n    return 2.0\n"},
        edit=("deeper.py", "return 2.0", "return 3.0"),
        live="home.deeper.GAIN = 3.0",
        names="GAIN|deeper",
    ),
    "value_made_by_a_function_at_import": of_deeper(
        "FACTOR",
        head="from app.deeper import scale\n\nFACTOR = scale()",
        edit=("deeper.py", "return 2.0", "return 3.0"),
    ),
    "file_read_at_import": reads(
        "FACTOR",
        head="from pathlib import Path\n\nFACTOR = float(Path(__file__).with_name('data.json').read_text())",
        files={"data.json": "2.0"},
        edit=("data.json", "2.0", "3.0"),
        names="FACTOR|data",
    ),
    "import_of_an_import": Feature(
        head="from app.middle import Parent",
        bases="Parent",
        probe="it.gain",
        files={
            "middle.py": "from app.deeper import FACTOR\n\nclass Parent:\n    gain = FACTOR\n",
            **DEEPER,
        },
        edit=DEEPER_EDIT,
        live="home.Parent.gain = 3.0",
        names="gain|deeper|Parent|Holder",
    ),
    "plugin_that_registers": Feature(
        head="TABLE = {'gain': 2.0}\n\ndef scale():\n    return TABLE['gain']\n",
        body="def factor(self):\n    return scale()",
        tail="from app import plugin",
        files={"plugin.py": "import sys\n\n\nOWN = 2.0\nsys.modules['app.HOME'].TABLE['gain'] = OWN\n"},
        edit=("plugin.py", "OWN = 2.0", "OWN = 3.0"),
        names="TABLE|gain|plugin",
    ),
    "installed_function": reads(
        "scale()",
        head="from solid import scale",
        files=INSTALLED,
        edit=("../solid/__init__.py", "return 2.0", "return 3.0"),
        live="home.scale.__code__ = (lambda: 3.0).__code__",
        names="solid|scale",
    ),
    "installed_class": Feature(
        head="from solid import Parent",
        bases="Parent",
        probe="getattr(it, 'extra', 2.0)",
        files=INSTALLED,
        edit=("../solid/__init__.py", "gain = 2.0", "extra = 3.0"),
        live="home.Parent.extra = 3.0",
        names="solid|Parent|extra|Holder",
    ),
    "installed_version": reads(
        "FACTOR",
        head="import importlib.metadata\n\nFACTOR = float(importlib.metadata.version('solid'))",
        files=INSTALLED,
        edit=("../solid-1.0.dist-info/METADATA", "Version: 1.0", "Version: 2.0"),
        names="solid|FACTOR",
    ),
    "editable_module": reads(
        "getattr(solid, 'EXTRA', 2.0)",
        head="import solid",
        files=EDITABLE,
        edit=("../solid/__init__.py", "FACTOR = 2.0", "EXTRA = 3.0"),
        live="home.solid.EXTRA = 3.0",
        names="solid|EXTRA",
    ),
}
