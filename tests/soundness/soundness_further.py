"""Further features: what code can read of functions, classes and containers.

Most of them were right when they were written; they stand here so that they stay so. Those that are a few lines of a
module, a question and a change of the live process stand in `soundness_further.txt`::

    == name (may be refused)
    lines above the class
    ?? the question
    !! the change
    :: what the reason of a miss has to name
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from soundness_code import reads
from soundness_projects import Feature

PLACES = ("model", "submodule", "helper")
_FEATURE = re.compile(
    r"== (?P<name>\w+)(?P<refused> \(may be refused\))?\n(?P<head>.*?)"
    r"\n\?\? (?P<question>.*?)\n!! (?P<live>.*?)\n:: (?P<names>.*?)\n",
    re.DOTALL,
)


def written() -> Iterator[tuple[str, Feature]]:
    """Yield the features of the text, by name."""
    for found in _FEATURE.finditer(Path(__file__).with_suffix(".txt").read_text()):
        yield (
            found["name"],
            reads(
                found["question"],
                head=found["head"],
                live=found["live"],
                names=found["names"],
                refused=found["refused"] is not None,
            ),
        )


_FEATURES = dict(written()) | {
    "global_of_a_module_that_is_not_imported": reads(
        "loose.factor()",
        head=(
            "import importlib.util\nimport pathlib\n\n"
            "path = pathlib.Path(__file__).parent.with_name('loose.py')\n"
            "spec = importlib.util.spec_from_file_location('loose', path)\n"
            "loose = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(loose)"
        ),
        files={"../loose.py": "GAIN = 2.0\n\ndef factor():\n    return GAIN\n"},
        live="home.loose.GAIN = 3.0",
        names="GAIN|loose",
    ),
    "module_getattr": reads(
        "deeper.gain",
        head="from app import deeper",
        files={"deeper.py": "def __getattr__(name):\n    return 2.0\n"},
        live="sys.modules['app.deeper'].__getattr__ = lambda name: 3.0",
        names="deeper|gain|__getattr__",
        refused=True,
    ),
    "module_getattr_added": reads(
        "getattr(deeper, 'gain', 2.0)",
        head="from app import deeper",
        files={"deeper.py": "A = 1\n"},
        live="sys.modules['app.deeper'].__getattr__ = lambda name: 3.0",
        names="deeper|gain|__getattr__",
        refused=True,
    ),
    "module_all": reads(
        "float(len(deeper.__all__))",
        head="from app import deeper",
        files={"deeper.py": "__all__ = ['a', 'b']\n"},
        live="sys.modules['app.deeper'].__all__.append('x')",
        names="deeper|__all__",
    ),
    "module_vars": reads(
        "3.0 if 'extra' in vars(deeper) else 2.0",
        head="from app import deeper",
        files={"deeper.py": "A = 1\n"},
        live="sys.modules['app.deeper'].extra = 1",
        names="deeper|extra",
        refused=True,
    ),
    "module_dir": reads(
        "3.0 if 'extra' in dir(deeper) else 2.0",
        head="from app import deeper",
        files={"deeper.py": "A = 1\n"},
        live="sys.modules['app.deeper'].extra = 1",
        names="deeper|extra",
        refused=True,
    ),
    "enum_calls_a_function_of_another_module": reads(
        "2.0 if f'{Mode.A}' == 'slow' else 3.0",
        head=(
            "import enum\n\nfrom app import deeper\n\nclass Mode(enum.Enum):\n    A = 1\n\n"
            "    def __format__(self, how):\n        return deeper.named()\n"
        ),
        files={"deeper.py": "LIMIT = 'slow'\n\ndef named():\n    return LIMIT\n"},
        edit=("deeper.py", "'slow'", "'fast'"),
        live="sys.modules['app.deeper'].LIMIT = 'fast'",
        names="deeper|LIMIT",
    ),
    "module_replaced": reads(
        "deeper.A",
        head="from app import deeper",
        files={"deeper.py": "A = 2.0\n"},
        live="import types; home.deeper = types.SimpleNamespace(A=3.0)",
        names="deeper",
    ),
    "global_star_import": reads(
        "GAIN",
        head="from app.deeper import *",
        files={"deeper.py": "GAIN = 2.0\n"},
        live="home.GAIN = 3.0",
        names="GAIN",
    ),
    "flag_in_forward": reads(
        "2.0 if (Mode.A | Mode.B) & Mode.A else 3.0",
        head="import enum\n\nclass Mode(enum.Flag):\n    A = 1\n    B = 2\n    C = 4\n\n",
        names="factor",
    ),
    "flag_attr_c": reads(
        "2.0 if self.mode & (Mode.A | Mode.C) else 3.0",
        head="import enum\n\nclass Mode(enum.Flag):\n    A = 1\n    B = 2\n    C = 4\n\n",
        init="self.mode = Mode.A | Mode.B",
        names="factor",
    ),
    "flag_contains": reads(
        "2.0 if Mode.A in self.mode else 3.0",
        head="import enum\n\nclass Mode(enum.Flag):\n    A = 1\n    B = 2\n    C = 4\n\n",
        init="self.mode = Mode.A | Mode.B",
        names="factor",
    ),
    "import_in_forward": Feature(
        body="def factor(self):\n    import app.deeper\n    return app.deeper.GAIN",
        files={"deeper.py": "GAIN = 2.0\n"},
        edit=("deeper.py", "2.0", "3.0"),
        names="deeper",
    ),
    "import_mod_in_forward": Feature(
        body="def factor(self):\n    from app import deeper\n    return deeper.GAIN",
        files={"deeper.py": "GAIN = 2.0\n"},
        edit=("deeper.py", "2.0", "3.0"),
        names="deeper",
    ),
    "import_pkg_in_forward": Feature(
        body="def factor(self):\n    import app.sub.deeper\n    return app.sub.deeper.GAIN",
        files={"sub/__init__.py": "", "sub/deeper.py": "GAIN = 2.0\n"},
        edit=("sub/deeper.py", "2.0", "3.0"),
        names="deeper",
    ),
    "path_class_str": Feature(
        body="root = pathlib.Path('a/b')\n\ndef factor(self):\n    return 2.0 if str(self.root) == 'a/b' else 3.0",
        head="import pathlib",
        live="Holder.root = home.pathlib.Path('c')",
        names="root",
    ),
    "path_attr": reads(
        "2.0 if str(self.root) == 'a/b' else 3.0",
        head="import pathlib",
        init="self.root = pathlib.Path('a/b')",
        instance="it.root = __import__('pathlib').Path('c')",
        names="root",
    ),
    "logger_debug": Feature(
        body="def factor(self):\n    logger.debug('x %s', 1)\n    return 2.0",
        head="import logging\n\nlogger = logging.getLogger(__name__)",
        names="factor",
    ),
    "logging_root": Feature(
        body="def factor(self):\n    logging.warning('x')\n    return 2.0",
        head="import logging",
        names="factor",
    ),
    "environ_as": reads(
        "3.0 if e.get('SOUND_MODE') == 'fast' else 2.0",
        head="from os import environ as e",
        environment={"SOUND_MODE": "fast"},
        names="SOUND_MODE",
    ),
    "getenv_as": reads(
        "3.0 if g('SOUND_MODE') == 'fast' else 2.0",
        head="from os import getenv as g",
        environment={"SOUND_MODE": "fast"},
        names="SOUND_MODE",
    ),
}
FURTHER = {name: replace(feature, places=PLACES) for name, feature in _FEATURES.items()}
