"""What every compiler looks like to the rest of cgtool. Must not import Dynamo or Inductor.

An adaptor turns a `PieceGraph` into bytes, and bytes into a callable. The bytes are all that `load` has: it opens no
file, and it traces and compiles no graph.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch

from cgtool.adaptor_registry import adaptor_class
from cgtool.errors import ConfigError
from cgtool.plan.pieces import Json, PieceGraph

#: Takes the piece's inputs as a list, which it empties, and returns its outputs as a list, even of one.
PieceCallable = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]

#: How torch and C++ compilers name the op that they fail at: by its C function, or by its schema.
_NAMED = (
    re.compile(r"\baoti_torch_(?:cpu|cuda|xpu|mps)_(?P<op>\w+)"),
    re.compile(r"extern kernel (?P<op>\w+::[\w.]+)"),
    re.compile(r"operator whose output has alias annotations: (?P<op>\w+::[\w.]+)"),
    re.compile(r"target: (?P<op>\w+\.[\w.]+)"),
)


@dataclass(frozen=True, kw_only=True)
class CompiledPiece:
    """What a compiler made of a piece.

    Args:
        artifact: The bytes that `load` takes.
        kernels: How many kernels were generated.
        guards: Facts over the graph's symbols that the compiler relies on, beyond the graph's own ranges and facts.
        sources: What the compiler wrote and the artifact does not hold, for people: name → text.
    """

    artifact: bytes
    kernels: int = 0
    guards: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)


class CompilerInterface(ABC):
    """A compiler of pieces.

    Attributes:
        name: How configuration spells it.
        compiles: Whether it makes code: that is done in worker processes, and proved before it is trusted.
        rounding: Options with which its code rounds all that eager rounds; none where it has no such options.
    """

    name: str
    compiles: bool = True
    rounding: Mapping[str, Json] = MappingProxyType({})

    def initialize_cache(self, cache_dir: Path) -> None:  # noqa: B027  most have no state
        """Prepare for compiles into one cache; called once, before the first. Nothing to do for most compilers.

        Args:
            cache_dir: The cache's root.
        """

    @abstractmethod
    def compute_hash(self, options: Mapping[str, Json], *, max_autotune: bool = False) -> str:
        """Return the SHA-256 of everything beside the graph that decides what `compile` gives.

        Args:
            options: The user's options for the compiler.
            max_autotune: As for `compile`.

        Raises:
            ConfigError: An option is unknown, or one that cgtool keeps for itself.
        """

    @abstractmethod
    def compile(self, graph: PieceGraph, *, options: Mapping[str, Json], max_autotune: bool = False) -> CompiledPiece:
        """Compile a piece.

        Args:
            graph: The piece; without symbols it is compiled for one size.
            options: The user's options for the compiler.
            max_autotune: Whether the compiler may try variants of each kernel: for concrete sizes.

        Returns:
            The artifact and what is known of it. How long it took is measured by who asks.

        Raises:
            CompileError: The compiler cannot compile the piece, or cannot save what it compiled.
            ConfigError: An option is unknown, or one that cgtool keeps for itself.
        """

    @abstractmethod
    def load(self, data: bytes, graph: PieceGraph) -> PieceCallable:
        """Return a callable from an artifact's bytes, without tracing or compiling a graph.

        Args:
            data: What `compile` gave, in this process or in another.
            graph: The piece that was compiled.

        Returns:
            A function that takes the piece's inputs as a list, which it empties, and returns its outputs as a list.

        Raises:
            ArtifactError: The bytes cannot be opened here.
        """


def get_adaptor(name: str) -> CompilerInterface:
    """Return the adaptor that configuration calls `name`.

    Raises:
        ConfigError: There is none (the message names those there are), or what brings it brings something else.
    """
    # a compiler's module is loaded when it is asked for: `eager` needs nothing but torch
    found = adaptor_class(name)
    if not (isinstance(found, type) and issubclass(found, CompilerInterface) and getattr(found, "name", None) == name):
        raise ConfigError(
            f"The adaptor {name!r} is to be a CompilerInterface whose `name` is {name!r}, and what brings it gives "
            f"{found!r}. Mend or remove it.",
            path=name,
            actual=repr(found),
        )
    return found()


def op_named_in(text: str) -> str | None:
    """Return the op that an error's text names; None where there is none."""
    for pattern in _NAMED:
        match = pattern.search(text)
        if match is not None:
            return match["op"].replace("::", ".").replace(".", "::", 1) if "." in match["op"] else match["op"]
    return None
