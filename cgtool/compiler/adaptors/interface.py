"""The interface of compilers. Must not import Dynamo or Inductor.

An adaptor turns a `PieceGraph` into bytes, and the bytes into a callable. `load` works from the bytes alone: it opens
no file, and it neither traces nor compiles a graph.
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

#: Takes the piece's inputs as a list, which it empties, and returns the list of its outputs.
PieceCallable = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]

#: How the errors of torch and of C++ compilers name an op: by its C function, or by its schema.
_OP_PATTERNS = (
    re.compile(r"\baoti_torch_(?:cpu|cuda|xpu|mps)_(?P<op>\w+)"),
    re.compile(r"extern kernel (?P<op>\w+::[\w.]+)"),
    re.compile(r"operator whose output has alias annotations: (?P<op>\w+::[\w.]+)"),
    re.compile(r"target: (?P<op>\w+\.[\w.]+)"),
)


@dataclass(frozen=True, kw_only=True)
class CompiledPiece:
    """The result of compiling a piece.

    Args:
        artifact: The bytes that `load` takes.
        kernels: The number of generated kernels.
        guards: Facts about the graph's symbols that the compiler relies on, beyond the graph's own ranges and facts.
        sources: Generated code that the artifact does not contain, for people to read: file name → text.
    """

    artifact: bytes
    kernels: int = 0
    guards: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)


class CompilerInterface(ABC):
    """A compiler of pieces.

    Attributes:
        name: The adaptor's name in the configuration.
        compiles: Whether it generates code, which happens in worker processes and is proved before it is used.
        rounding: Options with which its code rounds intermediate values as eager does; empty if there are none.
    """

    name: str
    compiles: bool = True
    rounding: Mapping[str, Json] = MappingProxyType({})

    def initialize_cache(self, cache_dir: Path) -> None:  # noqa: B027  most have no state
        """Prepare for compiles into a cache; called once, before the first. Most compilers need no preparation.

        Args:
            cache_dir: The cache's root.
        """

    @abstractmethod
    def compute_hash(self, options: Mapping[str, Json], *, max_autotune: bool = False) -> str:
        """Return the SHA-256 of everything but the graph that decides the result of `compile`.

        Args:
            options: The user's options for the compiler.
            max_autotune: As for `compile`.

        Raises:
            ConfigError: An option is unknown, or reserved by cgtool.
        """

    @abstractmethod
    def compile(self, graph: PieceGraph, *, options: Mapping[str, Json], max_autotune: bool = False) -> CompiledPiece:
        """Compile a piece.

        Args:
            graph: The piece; without symbols, it is compiled for one size.
            options: The user's options for the compiler.
            max_autotune: Whether the compiler may autotune kernels; used for concrete sizes.

        Returns:
            The artifact, with its kernels, guards and sources.

        Raises:
            CompileError: The compiler cannot compile the piece, or cannot save the result.
            ConfigError: An option is unknown, or reserved by cgtool.
        """

    @abstractmethod
    def load(self, data: bytes, graph: PieceGraph) -> PieceCallable:
        """Return a callable from an artifact's bytes, without tracing or compiling a graph.

        Args:
            data: The artifact of `compile`, from this process or another.
            graph: The piece that was compiled.

        Returns:
            A function that takes the piece's inputs as a list, which it empties, and returns the list of its outputs.

        Raises:
            ArtifactError: The artifact cannot be opened here.
        """


def get_adaptor(name: str) -> CompilerInterface:
    """Return the adaptor of this name. Its module is imported now: `eager` needs nothing but torch.

    Raises:
        ConfigError: There is no such adaptor (the message names those there are), or its distribution provides
            something else.
    """
    found = adaptor_class(name)
    if not (isinstance(found, type) and issubclass(found, CompilerInterface) and getattr(found, "name", None) == name):
        raise ConfigError(
            f"The adaptor {name!r} must be a subclass of CompilerInterface with `name = {name!r}`, but its "
            f"distribution provides {found!r}. Fix or uninstall it.",
            path=name,
            actual=repr(found),
        )
    return found()


def op_named_in(text: str) -> str | None:
    """Return the op that an error's text names, if any."""
    for pattern in _OP_PATTERNS:
        match = pattern.search(text)
        if match is not None:
            return match["op"].replace("::", ".").replace(".", "::", 1) if "." in match["op"] else match["op"]
    return None
