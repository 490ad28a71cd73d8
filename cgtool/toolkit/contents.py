"""What an artifact holds, read as data by its kind. Must not import torch; unpickles and executes nothing.

Kinds: `pt2` (a package of `aot_inductor`, see `cgtool.store.artifacts`), `aot` and `mega` (torch's own formats, which
hold the generated source), `json` (the graph of a piece that runs as it stands). Of others the size alone is known.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from typing import Any

from cgtool.errors import ArtifactError
from cgtool.store.artifacts import NATIVE_FILE, split_origin, unpack
from cgtool.store.compiled_code import Kernel, generated_sources, read_native

_MEGA_LENGTH_BYTES = 8
_MOST_HEAD_BYTES = 1 << 20
#: How Inductor's modules make their kernels: `cpp_fused_add_0 = async_compile.cpp_pybinding(...)`.
_KERNEL = re.compile(r"^([A-Za-z_][A-Za-z0-9_]{0,300}) = async_compile\.(?!wait)[a-z_]+\(", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Text that an artifact holds: "python" is what Inductor generated, "json" what it calls or the piece's graph."""

    language: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What is in an artifact: what it is packed from, (name, bytes) each, kernels, target, native compiler, text."""

    size_bytes: int
    members: tuple[tuple[str, int], ...] = ()
    kernels: tuple[Kernel, ...] = ()
    target: dict[str, Any]
    compiler: str | None = None
    sources: tuple[Source, ...] = ()
    warnings: tuple[str, ...] = ()


def contents_of(data: bytes, kind: str) -> Contents:
    """Return what an artifact holds."""
    size_bytes = len(data)
    if kind == "pt2":
        return _of_package(data)
    if kind in ("aot", "mega"):
        with contextlib.suppress(ArtifactError):  # one that does not say what it was compiled from is read all the same
            _, data = split_origin(data, kind)
        texts = generated_sources(data)
        return Contents(
            size_bytes=size_bytes,
            kernels=named_kernels(*texts),
            target=_mega_head(data) if kind == "mega" else {},
            sources=tuple(Source(language="python", text=text) for text in texts),
        )
    sources = (Source(language="json", text=_spaced(data)),) if kind == "json" else ()
    return Contents(size_bytes=len(data), target={}, sources=sources)


def named_kernels(*texts: str) -> tuple[Kernel, ...]:
    """Return the kernels that modules which Inductor wrote name, each once, in order."""
    return tuple(Kernel(name=name) for name in dict.fromkeys(name for text in texts for name in _KERNEL.findall(text)))


def _of_package(data: bytes) -> Contents:
    try:
        package = unpack(data, verified=True)
    except ArtifactError as error:
        return Contents(size_bytes=len(data), target={}, warnings=(str(error),))
    native = read_native(package.native)
    members = {NATIVE_FILE: len(package.native)}
    members |= {name: len(body) for name, body in package.files("model.wrapper").items()}
    read = {name: read_native(body) for name, body in package.kernels.items()}
    # A file that says nothing of itself is one kernel, by its name.
    kernels = [kernel for name, code in read.items() for kernel in code.kernels or (Kernel(name=name),)]
    architectures = sorted({code.target for code in read.values() if code.target})
    called = () if package.extern is None else (Source(language="json", text=_spaced(package.extern)),)
    return Contents(
        size_bytes=len(data),
        members=tuple(members.items()),
        kernels=(*native.kernels, *kernels),
        target={**package.metadata, **({"architectures": architectures} if architectures else {})},
        compiler=native.compiler,
        sources=called,
    )


def _mega_head(data: bytes) -> dict[str, Any]:
    length = int.from_bytes(data[:_MEGA_LENGTH_BYTES], "big")
    if length > _MOST_HEAD_BYTES:
        return {}
    try:
        head = json.loads(data[_MEGA_LENGTH_BYTES : _MEGA_LENGTH_BYTES + length])
    except (ValueError, RecursionError):
        return {}
    return {"torch": head["torch"]} if isinstance(head, dict) and isinstance(head.get("torch"), str) else {}


def _spaced(data: bytes) -> str:
    """Return JSON with one field a line; what is none stays as it is."""
    try:
        return json.dumps(json.loads(data), indent=1)
    except (ValueError, RecursionError):
        return data.decode("utf-8", "backslashreplace")
