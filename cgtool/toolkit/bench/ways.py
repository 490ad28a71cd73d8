"""The ways to start that a bench compares, and how users name them.

Must not import torch. Grammar of what `--ways` and `--starts` take::

    ways   = name ("," name)*                  a name of the table, or a group: torch, cgtool, all
    starts = item ("," item)*
    item   = number | name "=" number          a bare number is for all that no item names
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cgtool.adaptor_registry import ADAPTORS
from cgtool.config_checks import nearest
from cgtool.errors import UsageError
from cgtool.plan.pieces import EAGER

Kind = Literal["eager", "compile", "mega", "precompile", "cgtool"]

#: What every other way is compared with.
BASE = "eager"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to start.

    Args:
        name: How users name it: "compile-warm", "cgtool/aot_inductor".
        label: What people read.
        kind: What a start does.
        source: The preparation that it starts from, "" where it needs none. Ways with one source share its folder.
        adaptor: Of cgtool's ways.
        torch_caches: Start with torch's own cache folders as the preparation left them; else with empty ones.
    """

    name: str
    label: str
    kind: Kind
    source: str = ""
    adaptor: str | None = None
    torch_caches: bool = False

    @property
    def is_cold(self) -> bool:
        """Whether a start compiles everything: too slow to be repeated as often as the others."""
        return self.kind == "compile" and not self.torch_caches


def _of_cgtool(adaptor: str) -> Way:
    return Way(
        name=f"cgtool/{adaptor}",
        label=f"cgtool, {adaptor}",
        kind="cgtool",
        source=f"cgtool-{adaptor}",
        adaptor=adaptor,
        # What Inductor's own artifacts load from; a package and a piece graph hold all that they need.
        torch_caches=adaptor.startswith("inductor"),
    )


WAYS: Mapping[str, Way] = {
    way.name: way
    for way in (
        Way(name=BASE, label="eager", kind="eager"),
        Way(name="compile-cold", label="torch.compile, empty caches", kind="compile", source="torch"),
        Way(
            name="compile-warm",
            label="torch.compile, warm local caches",
            kind="compile",
            source="torch",
            torch_caches=True,
        ),
        Way(name="mega-cache", label="mega-cache loaded into empty caches", kind="mega", source="torch"),
        Way(
            name="aot-precompile",
            label="torch's AOT precompile",
            kind="precompile",
            source="precompile",
            torch_caches=True,
        ),
        *map(_of_cgtool, sorted(ADAPTORS, key=lambda adaptor: (adaptor == EAGER, adaptor))),
    )
}

GROUPS: Mapping[str, tuple[str, ...]] = {
    "all": tuple(WAYS),
    "torch": tuple(name for name, way in WAYS.items() if way.kind in {"compile", "mega", "precompile"}),
    "cgtool": tuple(name for name, way in WAYS.items() if way.kind == "cgtool"),
}


def parse_ways(text: str) -> tuple[Way, ...]:
    """Return the ways that `--ways` names, in the table's order; the base is always among them.

    Raises:
        UsageError: A name is unknown; the message names the nearest.
    """
    names = {BASE, *(name for word in _words(text) for name in _named(word, "--ways"))}
    return tuple(way for way in WAYS.values() if way.name in names)


def parse_starts(text: str, default: int) -> dict[str, int]:
    """Return how often each way starts, as `--starts` says; what it does not say is `default`.

    Raises:
        UsageError: A name is unknown, or a number is none or below 0.
    """
    counts: dict[str, int] = {}
    for word in _words(text):
        name, equals, number = word.rpartition("=")
        if not number.strip().isdecimal():
            message = f"--starts: {word!r} is neither a number nor way=number. Write 15 or 15,compile-warm=3."
            raise UsageError(message, path="--starts", actual=word)
        if equals:
            counts.update(dict.fromkeys(_named(name.strip(), "--starts"), int(number)))
        else:
            default = int(number)
    return {name: counts.get(name, default) for name in WAYS}


def sources_of(ways: Sequence[Way]) -> Iterator[str]:
    """Yield the preparations that ways start from, each once."""
    yield from dict.fromkeys(way.source for way in ways if way.source)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _named(word: str, option: str) -> tuple[str, ...]:
    if word in GROUPS:
        return GROUPS[word]
    if word not in WAYS:
        near, known = nearest(word, [*WAYS, *GROUPS]), ", ".join([*WAYS, *GROUPS])
        message = f"{option}: there is no way {word!r}; the nearest is {near!r}. Choose of {known}."
        raise UsageError(message, path=option, expected=[*WAYS, *GROUPS], actual=word)
    return (word,)
