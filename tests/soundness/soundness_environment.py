"""Features of the environment: the ways in which code reads environment variables and the working directory."""

from __future__ import annotations

from soundness_code import READS
from soundness_projects import Feature


def of_mode(**fields) -> Feature:
    """Return a feature of the variable SOUND_MODE."""
    return Feature(**{"head": "import os", "environment": {"SOUND_MODE": "fast"}, "names": "SOUND_MODE"} | fields)


def asks(condition: str, **fields) -> Feature:
    """Return a feature whose method `factor` returns 3.0 where a condition of the environment holds."""
    return of_mode(body=READS.format(f"3.0 if {condition} else 2.0"), **fields)


ENVIRONMENT = {
    "getenv": asks("os.getenv('SOUND_MODE') == 'fast'", live="os.environ['SOUND_MODE'] = 'fast'"),
    "getenv_default": asks("os.getenv('SOUND_MODE', 'slow') == 'fast'", live="os.environ['SOUND_MODE'] = 'fast'"),
    "environ_get": asks("os.environ.get('SOUND_MODE') == 'fast'", live="os.environ['SOUND_MODE'] = 'fast'"),
    "in_environ": asks("'SOUND_MODE' in os.environ", live="os.environ['SOUND_MODE'] = 'fast'"),
    "environ_item": asks("os.environ['SOUND_SET'] == 'fast'", environment={"SOUND_SET": "fast"}, names="SOUND_SET"),
    "environ_item_unset": asks(
        "os.environ.get('SOUND_SET') is None", environment={"SOUND_SET": None}, names="SOUND_SET"
    ),
    "environ_by_alias": asks(
        "environ.get('SOUND_MODE') == 'fast'", head="from os import environ", live="home.environ['SOUND_MODE'] = 'fast'"
    ),
    "getenv_by_alias": asks("getenv('SOUND_MODE') == 'fast'", head="from os import getenv"),
    "getenv_by_name_of_a_global": asks("os.getenv(NAME) == 'fast'", head="import os\n\nNAME = 'SOUND_MODE'"),
    "getenv_by_computed_name": asks(
        "os.getenv('SOUND_' + 'mode'.upper()) == 'fast'", names="SOUND_MODE|getenv|app", refused=True
    ),
    "environ_copied": asks(
        "dict(os.environ).get('SOUND_MODE') == 'fast'", names="SOUND_MODE|environ|app", refused=True
    ),
    "environ_iterated": asks(
        "any(name == 'SOUND_MODE' for name in os.environ)", names="SOUND_MODE|environ|app", refused=True
    ),
    "environ_by_try": of_mode(
        body=(
            "def factor(self):\n    try:\n        return 3.0 if os.environ['SOUND_MODE'] else 2.0\n"
            "    except KeyError:\n        return 2.0"
        )
    ),
    "environ_in_a_helper_of_a_helper": of_mode(
        head="from app.deeper import mode",
        body="def factor(self):\n    return 3.0 if mode() == 'fast' else 2.0",
        files={"deeper.py": "import os\n\ndef mode():\n    return os.getenv('SOUND_MODE')\n"},
    ),
    "environ_at_import": of_mode(
        body=READS.format("MODE"),
        head="import os\n\nMODE = 3.0 if os.getenv('SOUND_MODE') else 2.0",
        names="SOUND_MODE|MODE",
    ),
    "environ_in_init": of_mode(
        init="self.gain = 3.0 if os.getenv('SOUND_MODE') else 2.0", probe="it.gain", names="SOUND_MODE|gain"
    ),
    "environ_in_a_property": of_mode(
        body="@property\ndef gain(self):\n    return 3.0 if os.getenv('SOUND_MODE') else 2.0",
        probe="it.gain",
        names="SOUND_MODE|gain",
    ),
    "environ_in_a_default": of_mode(
        body="def factor(self, mode=os.getenv('SOUND_MODE')):\n    return 3.0 if mode else 2.0",
        names="SOUND_MODE|factor|Holder",
    ),
    "environ_with_a_default_from_another": asks(
        "os.getenv('SOUND_OTHER', os.getenv('SOUND_MODE')) == 'fast'", names="SOUND_MODE"
    ),
    "environ_under_another_name": asks(
        "VARIABLES.get('SOUND_MODE') == 'fast'",
        head="import os\n\nVARIABLES = os.environ",
        names="SOUND_MODE|VARIABLES",
        refused=True,
    ),
    "environ_on_an_object": of_mode(
        init="self.variables = os.environ",
        probe="3.0 if 'SOUND_MODE' in it.variables else 2.0",
        names="SOUND_MODE|variables",
        refused=True,
    ),
    "environ_as_a_default": of_mode(
        body="def factor(self, variables=os.environ):\n    return 3.0 if variables.get('SOUND_MODE') else 2.0",
        names="SOUND_MODE|factor",
        refused=True,
    ),
    "getenv_under_another_name": asks(
        "ask('SOUND_MODE') == 'fast'", head="import os\n\nask = os.getenv", names="SOUND_MODE|ask", refused=True
    ),
    "method_of_environ": asks(
        "get('SOUND_MODE') == 'fast'", head="import os\n\nget = os.environ.get", names="SOUND_MODE|get", refused=True
    ),
    "expanded_text": asks(
        "os.path.expandvars('$SOUND_MODE') == 'fast'", names="SOUND_MODE|expandvars|HOME|app", refused=True
    ),
    "environ_in_forward": of_mode(
        head="",
        probe="import os\nreturn 3.0 if os.getenv('SOUND_MODE') else 2.0",
        live="import os; os.environ['SOUND_MODE'] = 'fast'",
        places=("model",),
    ),
    "home_of_the_user": asks(
        "os.path.expanduser('~') == '/elsewhere'",
        environment={"HOME": "/elsewhere"},
        names="HOME|expanduser|home",
        refused=True,
    ),
    "folder_of_the_process": Feature(
        head="import os",
        body="def factor(self):\n    return 3.0 if os.getcwd() == '/' else 2.0",
        live="import os; os.chdir('/')",
        names="getcwd|folder",
        refused=True,
    ),
}
