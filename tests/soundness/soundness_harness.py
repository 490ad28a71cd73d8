"""Warms a project once, changes it in one way, starts it again, and classifies the outcome.

The outcomes:

    right     a hit that equals eager
    refused   a miss or a refusal whose first reason names the change
    nameless  a miss or a refusal whose first reason does not
    wrong     a hit that does not equal eager
    missed    a miss or a refusal before anything changed
    crash     an unexpected error
    unwarmed  the project could not be warmed, although it should be
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import re
import shutil
import socket
import tempfile
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cli_harness import server, torch_server
from soundness_projects import PLACES, Feature, Place, write_project

HERE = Path(__file__).parent
#: Changes before the project starts again: a file, the live process (a class, the object, or before the model is
#: built), its environment variables, the context of a call.
STARTS = ("edit", "live", "instance", "early", "environment", "context")
#: Checks that detect a change of the live process after `load`: `recheck()`, or each call if so configured.
LOOKS = ("recheck", "call")
#: All changes. (The way `same` changes nothing.)
WAYS = (*STARTS, *LOOKS)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A change of a feature, at a place, in a way."""

    name: str
    feature: Feature
    place: str
    way: str

    @property
    def id(self) -> str:
        return f"{self.name}-{self.place}-{self.way}"

    def is_named_by(self, reason: str) -> bool:
        """Return whether a reason names the change; for an edit, the name of the file suffices."""
        place = PLACES[self.place]
        names = [self.feature.names.replace("Holder", place.holder)]
        if self.way == "edit":
            names.append(re.escape(Path(self.feature.edit[0]).stem if len(self.feature.edit) == 3 else place.home))
        return re.search("|".join(names), reason) is not None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a change, and the message or the values that show it."""

    word: str
    shown: str


def cases(features: Mapping[str, Feature], ways: Collection[str] = WAYS, *, slow: bool) -> list[Any]:
    """Return the product of features, places and ways as parameters of a test; without `slow`, the quick ones.

    One place of each feature is always tried, and there one of the looks after `load`; which they are varies from
    feature to feature. Ways that repeat another's checks are tried for some features: an edited file for every third
    that has other ways; no change for every third without a look, whose first call shows the same, and for every
    sixteenth with one; the change that the look makes after `load`, made before it, for every third: both evaluate the
    same guards. The rest is slow.
    """
    found = []
    for name, feature in features.items():
        number = zlib.crc32(name.encode())
        always, looks = feature.places[number % len(feature.places)], LOOKS[number % len(LOOKS)]
        ways_there = ways_of(feature)
        plain = {"same", "edit"} if set(ways_there) > {"same", "edit"} else set()
        plain |= {"live" if feature.live else "instance"} & set(ways_there)
        for place, way in itertools.product(feature.places, ways_there):
            if way in ways and (place, way) != (
                "helper",
                "early",
            ):  # that object is created when its module is imported
                case = Case(name=name, feature=feature, place=place, way=way)
                every = 16 if way == "same" and looks in ways_there else 3 if way in plain else 1
                sampled = way == looks if way in LOOKS else not number % every
                always_tried = place == always and sampled
                if always_tried or slow:
                    found.append(pytest.param(case, id=case.id, marks=() if always_tried else pytest.mark.slow))
    return found


def ways_of(feature: Feature) -> list[str]:
    """Return the ways in which a feature can be changed."""
    ways = [way for way in STARTS if getattr(feature, way)]
    return ["same", *ways, *(LOOKS if feature.live or feature.instance else [])]


def judge(case: Case) -> Outcome:
    """Make the change and start again."""
    warmed = warm(case.feature, PLACES[case.place])
    before = _done(warmed.answer)
    if before["outcome"] != "warmed":
        if before["outcome"] == "refused" and case.feature.refused:
            return _named(before["reason"], case)
        return Outcome(word="unwarmed", shown=f"{before['kind']}: {before['reason']}")
    after = _done(start(case, warmed))
    if after["outcome"] == "crash":
        return Outcome(word="crash", shown=f"{after['kind']}: {after['reason']}")
    if case.way in {"same", *LOOKS} and not after.get("loaded", True):
        return Outcome(word="missed", shown=after["reason"])
    first = after.get("first", {}).get("served", before["eager"])
    if first != before["eager"]:
        return Outcome(word="wrong", shown=f"served {first} before the change, and eager gives {before['eager']}")
    if after.get("first", {}).get("outcome", "hit") != "hit":
        return Outcome(word="missed", shown=after["first"]["reason"])
    if (after["eager"] == before["eager"]) != (case.way == "same"):
        raise ValueError(f"eager gave {before['eager']} and gives {after['eager']}: that is no test of the change")
    if after["outcome"] == "refused":
        return _named(after["reason"], case)
    shown = f"served {after['served']}, and eager gives {after['eager']}"
    return Outcome(word="right" if after["served"] == after["eager"] else "wrong", shown=shown)


def test_a_change_is_refused_by_name_or_served_correctly(change):
    """Each module of tests imports this, for its features."""
    outcome = judge(change)
    assert outcome.word in {"refused", "right"}, outcome


def test_an_unchanged_project_is_a_hit(unchanged):
    """As above."""
    outcome = judge(unchanged)
    assert outcome.word == "right" or (unchanged.feature.refused and outcome.word == "refused"), outcome


def _done(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of a project; one that did not start is an error in the feature."""
    if answer["outcome"] == "broken":
        raise ValueError(answer["reason"])
    return answer


def _named(reason: str, case: Case) -> Outcome:
    return Outcome(word="refused" if case.is_named_by(reason) else "nameless", shown=reason)


@dataclass(frozen=True, kw_only=True)
class Warmed:
    """A warmed project, its cache, and the result of `warm`."""

    folder: Path
    cache: Path
    answer: dict[str, Any]


@functools.cache
def warm(feature: Feature, place: Place) -> Warmed:
    """Write a project and warm it, once for all of its changes."""
    folder = scratch_folder()
    write_project(feature, place, folder / "project")
    request = {"job": "warm", "folder": str(folder / "project"), "cache": str(folder / "cache")}
    return Warmed(folder=folder / "project", cache=folder / "cache", answer=zygote("warm").ask(request))


def start(case: Case, warmed: Warmed) -> dict[str, Any]:
    """Start the changed project in a fresh process."""
    feature, place, way = case.feature, PLACES[case.place], case.way
    folder = warmed.folder
    if way == "edit":
        folder = scratch_folder() / "project"
        shutil.copytree(warmed.folder, folder, ignore=shutil.ignore_patterns("__pycache__"))
        edit(folder / "app", feature, place)
    request = request_of(place, folder, warmed.cache)
    if way == "environment":
        request["environment"] = dict(feature.environment)
    elif way in LOOKS:
        request |= {"late": feature.live or feature.instance, "looks": way}
    elif way == "instance":
        request["live"] = feature.instance
    elif way in {"early", "live", "context"}:
        request[way] = getattr(feature, way)
    return zygote("serve").ask(request)


def request_of(place: Place, folder: Path, cache: Path) -> dict[str, Any]:
    """Return the request to start a project as it is."""
    return {
        "job": "serve",
        "folder": str(folder),
        "cache": str(cache),
        "home": f"app.{place.home}",
        "holder": place.holder,
        "it": place.of_model,
        "environment": {},
        "early": "",
        "live": "",
        "late": "",
        "looks": "",
        "context": "torch.no_grad()",
    }


def edit(app: Path, feature: Feature, place: Place) -> None:
    """Make the feature's edit in a file."""
    assert feature.edit is not None
    *file, old, new = (part.replace("Holder", place.holder) for part in feature.edit)
    path = app / (file[0] if file else f"{place.home}.py")
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {path.name}"
    path.write_text(text.replace(old, new))


class Zygote:
    """A process that forks a child for each request, itself forked from a process that has imported torch."""

    def __init__(self, kind: str) -> None:
        variables = {**os.environ, "SOUND_SET": "slow"}  # every other variable of the features is unset at first
        forks = torch_server() if kind == "serve" else server(None, with_torch=True)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            program = (str(HERE / "soundness_zygote.py"), _scratch(), variables, [kind])
            self._running = forks.start(*program, theirs.fileno())
            self._talk = ours.makefile("rw", buffering=1)
        atexit.register(self._talk.close)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self._talk.write(json.dumps(request) + "\n")
        answer = self._talk.readline()
        assert answer, self._running.err[-3000:]
        return json.loads(answer)


@functools.cache
def zygote(kind: str) -> Zygote:
    """Return the one zygote of a kind."""
    return Zygote(kind)


def scratch_folder() -> Path:
    """Return a new folder that is removed when this process ends."""
    return Path(tempfile.mkdtemp(dir=_scratch()))


@functools.cache
def _scratch() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="soundness-"))
    atexit.register(shutil.rmtree, folder)
    return folder
