"""For a changed project, commands report the change as `load` does, and a second warm serves it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from soundness_classes import CLASSES
from soundness_code import CODE
from soundness_harness import Case, edit, request_of, zygote
from soundness_imports import IMPORTS
from soundness_objects import OBJECTS
from soundness_projects import PLACES, write_project

pytestmark = pytest.mark.torch

FEATURES = CLASSES | OBJECTS | CODE | IMPORTS
MODEL = "app/serve.py:spec"
OPTIONS = ("--adaptor", "eager")
#: One of each family and place.
CASES = [
    Case(name=name, feature=FEATURES[name], place=place, way="edit")
    for name, place in {
        "class_attribute": "config",
        "method": "submodule",
        "dataclass_default": "config",
        "enum_value": "model",
        "global_number": "helper",
        "from_import": "submodule",
        "import_of_an_import": "base",
        "file_read_at_import": "config",
    }.items()
]


def command(project: Path, *arguments: str) -> dict[str, Any]:
    """Run `cgtool` in the project's folder."""
    request = {"job": "command", "folder": str(project), "environment": {}, "arguments": arguments}
    return zygote("warm").ask(request)


def warm(project: Path, cache: str) -> str:
    """Warm the project and return its entry's hash."""
    answer = command(project, "warm", MODEL, "--cache-dir", cache, "--no-proof", "--jobs", "0", "--json", *OPTIONS)
    assert answer["status"] == 0, answer
    return json.loads(answer["output"])["hash"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.place}")
def test_commands_report_the_change(case, tmp_path):
    place, cache = PLACES[case.place], str(tmp_path / "cache")
    write_project(case.feature, place, tmp_path / "before")
    before = warm(tmp_path / "before", cache)
    assert command(tmp_path / "before", "warm", MODEL, "--cache-dir", cache, "--check", *OPTIONS)["status"] == 0

    after = tmp_path / "after"
    shutil.copytree(tmp_path / "before", after)
    edit(after / "app", case.feature, place)
    check = command(after, "warm", MODEL, "--cache-dir", cache, "--check", "--json", *OPTIONS)
    why = command(after, "why", MODEL, "--cache-dir", cache, "--json", *OPTIONS)
    assert (check["status"], why["status"]) == (3, 3)
    for document in (check, why):
        reasons = [str(reason) for reason in json.loads(document["output"])["reasons"]]
        assert case.is_named_by(reasons[0]), reasons

    difference = command(after, "diff", before, warm(after, cache), "--cache-dir", cache, "--json")
    assert difference["status"] == 3
    differences = [str(difference) for difference in json.loads(difference["output"])["differences"]]
    assert case.is_named_by(differences[0]), differences

    for folder in (after, tmp_path / "before"):  # both are served now, each by its own entry
        answer = zygote("serve").ask(request_of(place, folder, Path(cache)))
        assert answer["outcome"] == "hit", answer
        assert answer["served"] == answer["eager"]
