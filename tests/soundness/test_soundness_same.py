"""No false misses: a change that cannot affect the result is a hit or at most a trace, and compiles nothing."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from soundness_classes import CLASSES
from soundness_harness import request_of, scratch_folder, zygote
from soundness_objects import OBJECTS
from soundness_projects import PLACES, write_project

pytestmark = pytest.mark.torch

FEATURES = {"method": CLASSES["method"], "init": OBJECTS["init_default"], "dict": OBJECTS["key_of_a_dict"]}


@dataclass(frozen=True, kw_only=True)
class Same:
    """A change that cannot change the result.

    Args:
        environment: Variables of the process.
        live: What the process does before `load`.
        early: What it does before the model is built.
        moved: Whether the project lies elsewhere.
        prepend: What is added before all files of the project.
        append: What is added after them.
        write: Files that are added to or replaced in the project.
        traced: Whether a trace is allowed.
    """

    environment: dict[str, str] = field(default_factory=dict)
    live: str = ""
    early: str = ""
    moved: bool = False
    prepend: str = ""
    append: str = ""
    write: dict[str, str] = field(default_factory=dict)
    traced: bool = False


SAME = {
    "another process": Same(),
    "another home": Same(environment={"HOME": "/nonexistent", "XDG_CACHE_HOME": "/nonexistent/cache"}),
    "another port and host": Same(environment={"MASTER_PORT": "29501", "MASTER_ADDR": "10.0.0.1"}),
    "an unrelated variable": Same(environment={"SOUND_UNRELATED": "1"}),
    "another folder of temporary files": Same(environment={"TMPDIR": "/var/tmp"}),
    "another working directory": Same(early="os.chdir('/')"),
    "another install path": Same(moved=True),
    "another order of imports": Same(early="import decimal, xml.dom, app.serve, torch.fx"),
    "an unrelated module is imported": Same(write={"unrelated.py": "VALUE = 1\n"}, early="import app.unrelated"),
    "an unrelated module is edited": Same(write={"unrelated.py": "VALUE = 2\n"}),
    "an empty line": Same(prepend="\n", traced=True),
    "a docstring": Same(prepend='"""The user\'s own words."""\n', traced=True),
    "a comment": Same(append="# a comment\n", traced=True),
    "an attribute that nothing reads": Same(live="model.seen_today = 17"),
    "a second model": Same(live="other = sys.modules['app.serve'].build(); other(*args)"),
    "a call before load": Same(live="model(*args)"),
    "a call through torch.compile before load": Same(live="torch.compile(model, backend='eager')(*args)"),
    "weights of other values": Same(live="[weight.data.mul_(1.5) for weight in model.parameters()]"),
    "weights that are other tensors": Same(
        live="model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)"
    ),
    "names of modules that nothing reads": Same(live="home.UNRELATED = object(); net.UNRELATED = 1"),
    "moved to its own device": Same(live="model.to('cpu')"),
    "training and back": Same(live="model.train(); model.eval()"),
    "a hook that came and went": Same(live="model.register_forward_hook(print).remove()"),
    "a state dict": Same(live="model.load_state_dict(model.state_dict())"),
    "a deep copy": Same(live="import copy; copy.deepcopy(model)"),
    "another seed": Same(live="import random; random.seed(1); torch.manual_seed(1)"),
    "garbage collection": Same(live="import gc; gc.collect(); gc.disable()"),
    "fewer threads": Same(live="torch.set_num_threads(1)", environment={"OMP_NUM_THREADS": "1"}),
    "devices that are hidden": Same(environment={"CUDA_VISIBLE_DEVICES": ""}),
    "a frozen model": Same(live="model.requires_grad_(False)"),
    "logging": Same(live="import logging; logging.getLogger('torch._dynamo').setLevel(logging.DEBUG)"),
}


def warm(project: Path, cache: Path, **environment: str) -> dict[str, Any]:
    """Run `cgtool warm` and return its document."""
    arguments = ["warm", "app/serve.py:spec", "--adaptor", "eager", "--jobs", "0", "--no-proof", "--json"]
    request = {
        "job": "command",
        "folder": str(project),
        "environment": environment,
        "arguments": [*arguments, "--cache-dir", str(cache)],
    }
    answer = zygote("warm").ask(request)
    assert answer["status"] == 0, answer
    return json.loads(answer["output"])


@functools.cache
def warmed(name: str, place: str) -> Path:
    """Return the folder of a project warmed from the command line, and of its cache."""
    folder = scratch_folder()
    write_project(FEATURES[name], PLACES[place], folder / "project")
    (folder / "project" / "app" / "unrelated.py").write_text("VALUE = 1\n")
    assert warm(folder / "project", folder / "cache")["compiled"] == 1
    return folder


def changes(*, slow: bool) -> list[Any]:
    """Return the product of changes, features and places; without `slow`, one of each change."""
    found = []
    for name in SAME:
        products = list(itertools.product(FEATURES, PLACES))
        always = products[zlib.crc32(name.encode()) % len(products)]
        for feature, place in products if slow else [always]:
            marks = [] if (feature, place) == always else [pytest.mark.slow]
            found.append(pytest.param(name, feature, place, id=f"{name}-{feature}-{place}", marks=marks))
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    slow = "not slow" not in metafunc.config.option.markexpr
    metafunc.parametrize(("name", "feature", "place"), changes(slow=slow))


def test_an_irrelevant_change_compiles_nothing(name, feature, place, tmp_path):
    same, source = SAME[name], warmed(feature, place)
    project, cache = source / "project", source / "cache"
    if same.moved or same.prepend or same.append or same.write:
        project = shutil.copytree(project, tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__"))
        for path in (project / "app").glob("*.py"):
            path.write_text(same.prepend + path.read_text() + same.append)
    for file, text in same.write.items():
        (project / "app" / file).write_text(text)
    if same.traced:  # makes an entry of its own
        cache = shutil.copytree(cache, tmp_path / "cache")
    else:
        request = request_of(PLACES[place], project, cache) | {"environment": same.environment, "early": same.early}
        late = {"late": same.live, "looks": "recheck"} if same.live else {}
        for answer in (zygote("serve").ask(request | {"live": same.live}), zygote("serve").ask(request | late)):
            assert answer["outcome"] == "hit", answer
            assert answer["served"] == answer["eager"]
    assert warm(project, cache, **same.environment)["compiled"] == 0
