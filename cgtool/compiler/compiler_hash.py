"""Everything beside the graph that decides what Inductor makes of a piece, as one digest."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cgtool.compiler import _torch
from cgtool.errors import ConfigError
from cgtool.guards.environment import environment_factors, plain
from cgtool.host import compiler_version, environment
from cgtool.plan.grammar import digest_of
from cgtool.plan.pieces import Json

#: Options that name places, or say how hard to work, and change no code.
_NOT_CODE = ("cutlass_dir", "cache", "path", "dir", "compile_threads", "worker", "_debug", "trace", "log")


def inductor_hash(adaptor: str, patches: Mapping[str, Json]) -> str:
    """Return the SHA-256 of torch, triton, the C++ compiler, the target and Inductor's settings.

    Args:
        adaptor: The adaptor's name.
        patches: The options that the compile sets.

    Raises:
        ConfigError: No C++ compiler works here.
    """
    options = {
        name: plain(value)
        for name, value in _torch.portable_options(patches).items()
        if name in patches or not any(word in name for word in _NOT_CODE)
    }
    return digest_of(
        {
            "adaptor": adaptor,
            "environment": environment_factors(),
            "isa": _isa(adaptor) if not torch.cuda.is_available() else None,
            "options": options,
        }
    )


def check_compiler(adaptor: str) -> None:
    """See that a C++ compiler is here, before anything is traced for it.

    Args:
        adaptor: Whose pieces are to be compiled.

    Raises:
        ConfigError: None works.
    """
    named = environment().cxx
    if named is not None and not named.strip():
        raise _no_compiler(adaptor, "CXX is set, and empty")
    if compiler_version() is None:
        raise _no_compiler(adaptor, f"CXX is {named!r}" if named else "there is no g++")


def _isa(adaptor: str) -> str:
    try:
        return _torch.cpu_isa()
    except RuntimeError as error:
        if type(error).__name__ != "InvalidCxxCompiler":  # torch gave it several homes
            raise
        raise _no_compiler(adaptor, str(error)) from error


def _no_compiler(adaptor: str, why: str) -> ConfigError:
    return ConfigError(
        f"The adaptor {adaptor!r} needs a C++ compiler, and none works here ({why}). Install one, name one with CXX, "
        f"or choose the adaptor 'eager' (--adaptor eager), which compiles nothing. A start from a cache that is warm "
        f"needs no compiler.",
        path="adaptor",
        actual=why,
    )
