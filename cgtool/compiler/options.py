"""Inductor's options for a compile, and the digest of everything but the graph that decides the result."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch

from cgtool.compiler import _torch
from cgtool.errors import ConfigError
from cgtool.host import compiler_version, environment
from cgtool.plan.grammar import digest_of
from cgtool.plan.pieces import Json
from cgtool.runtime.factors import environment_factors, plain

#: Defaults for every compile.
_BASE: dict[str, Json] = {
    # else C++ kernels contain the number of threads of the compiling process
    "cpp.dynamic_threads": True,
    # padding adds guards on ratios of sizes, which a plan cannot express; concrete sizes need no guards
    "shape_padding": False,
}
#: Further defaults for concrete sizes.
_AUTOTUNE: dict[str, Json] = {"max_autotune": True, "coordinate_descent_tuning": True, "shape_padding": True}
#: Further defaults for packages of native code; torch 2.11 does not have the second option.
_PACKAGED: dict[str, Json] = {
    "aot_inductor.compile_wrapper_opt_level": "O1",
    # a package has 1.7 MB with line tables and 0.4 MB without; the sources are kept elsewhere
    "aot_inductor.enable_line_tables": False,
    # else torch reads accelerator kernels from files beside the package when they first run
    "aot_inductor.embed_kernel_binary": True,
}
#: Options that a user may not set → why.
_RESERVED = {
    "aot_inductor.output_path": "cgtool builds packages in its own folder",
    "aot_inductor.package": "artifacts of aot_inductor are packages",
    "aot_inductor.package_cpp_only": "a package holds native code and no sources",
    "cpp_wrapper": "artifacts are made with Inductor's Python wrapper",
    "force_disable_caches": "artifacts are saved through torch's caches; disable_cache turns cgtool's cache off",
    "freezing": "weights are inputs of a piece and never constants",
    "fx_graph_cache": "artifacts are saved through torch's caches; disable_cache turns cgtool's cache off",
    "fx_graph_remote_cache": "artifacts are compiled on this machine only",
    "triton.cudagraphs": "cudagraph_mode chooses CUDA graphs",
}

#: Options for places or effort, which do not change the generated code.
_NOT_CODE = ("cutlass_dir", "cache", "path", "dir", "compile_threads", "worker", "_debug", "trace", "log")


def inductor_patches(options: Mapping[str, Json], *, max_autotune: bool, packaged: bool = False) -> dict[str, Json]:
    """Return Inductor's options for a compile.

    Args:
        options: The user's options by Inductor's dotted names; "-" may stand for "_".
        max_autotune: Whether to autotune, for concrete sizes.
        packaged: Whether the result is a package of native code.

    Raises:
        ConfigError: An option is unknown (the message names the nearest), has the wrong type, or is reserved by cgtool.
    """
    known = _torch.inductor_options()
    chosen = {name.replace("-", "_"): value for name, value in options.items()}
    for name, value in chosen.items():
        _check(name, value, known)
    tuned = _AUTOTUNE if max_autotune else {}
    # torch's versions differ in these options
    native = {name: value for name, value in _PACKAGED.items() if packaged and name in known}
    return dict(sorted({**_BASE, **native, **tuned, **chosen}.items()))


def _check(name: str, value: Json, known: Mapping[str, Any]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"inductor_compile_config sets {name!r}, but this version of Inductor has no such option; the nearest is "
            f"{near!r}.",
            expected=near,
            actual=name,
        )
    if name in _RESERVED:
        raise ConfigError(
            f"inductor_compile_config sets {name!r}, which cgtool reserves: {_RESERVED[name]}. Leave it out.",
            actual=name,
        )
    current = known[name]
    if isinstance(current, bool | str) and value is not None and type(value) is not type(current):
        kind = type(current).__name__
        raise ConfigError(
            f"inductor_compile_config sets {name!r} to {value!r}, but the option takes a {kind}, such as {current!r}.",
            expected=kind,
            actual=value,
        )


def inductor_hash(adaptor: str, patches: Mapping[str, Json]) -> str:
    """Return the SHA-256 of torch, triton, the C++ compiler, the target and Inductor's settings.

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
    """Check that a C++ compiler works, before anything is traced.

    Raises:
        ConfigError: No C++ compiler works here.
    """
    cxx = environment().cxx
    if cxx is not None and not cxx.strip():
        raise _no_compiler(adaptor, "CXX is set but empty")
    if compiler_version() is None:
        raise _no_compiler(adaptor, f"CXX is {cxx!r}" if cxx else "there is no g++")


def _isa(adaptor: str) -> str:
    try:
        return _torch.cpu_isa()
    except RuntimeError as error:
        if type(error).__name__ != "InvalidCxxCompiler":  # its module differs between versions of torch
            raise
        raise _no_compiler(adaptor, str(error)) from error


def _no_compiler(adaptor: str, why: str) -> ConfigError:
    return ConfigError(
        f"The adaptor {adaptor!r} needs a C++ compiler, and none works here ({why}). Install one, set CXX to one, or "
        f"use --adaptor eager, which compiles nothing. Starting from a warm cache needs no compiler.",
        path="adaptor",
        actual=why,
    )
