"""What decides beside the graph what Inductor makes of a piece: the options of a compile, and a digest of all of it."""

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

#: In force for every compile unless the user sets them.
_BASE: dict[str, Json] = {
    # else the number of threads of the compiling process is written into C++ kernels
    "cpp.dynamic_threads": True,
    # padding of matrices is decided by ratios of sizes: guards that no plan can say; concrete sizes need none
    "shape_padding": False,
}
#: For concrete sizes, unless the user sets them.
_AUTOTUNE: dict[str, Json] = {"max_autotune": True, "coordinate_descent_tuning": True, "shape_padding": True}
#: For packages of native code, unless the user sets them; the second is not in 2.11.
_PACKAGED: dict[str, Json] = {
    "aot_inductor.compile_wrapper_opt_level": "O1",
    # 1.7 MB a package with them, 0.4 without; sources are kept elsewhere
    "aot_inductor.enable_line_tables": False,
    # else torch reads kernels of accelerators from files beside the package when they first run
    "aot_inductor.embed_kernel_binary": True,
}
#: What a user may not set here, and where it belongs.
_KEPT = {
    "aot_inductor.output_path": "packages are built in a folder of cgtool's own",
    "aot_inductor.package": "artifacts of aot_inductor are packages",
    "aot_inductor.package_cpp_only": "a package holds native code and no sources",
    "cpp_wrapper": "artifacts are made with Inductor's Python wrapper",
    "force_disable_caches": "what is compiled is saved through torch's caches; disable_cache switches cgtool's off",
    "freezing": "weights are inputs of a piece and never constants",
    "fx_graph_cache": "what is compiled is saved through torch's caches; disable_cache switches cgtool's off",
    "fx_graph_remote_cache": "artifacts are made on this machine alone",
    "triton.cudagraphs": "CUDA graphs are chosen by cudagraph_mode",
}

#: Options that name places, or say how hard to work, and change no code.
_NOT_CODE = ("cutlass_dir", "cache", "path", "dir", "compile_threads", "worker", "_debug", "trace", "log")


def inductor_patches(options: Mapping[str, Json], *, max_autotune: bool, packaged: bool = False) -> dict[str, Json]:
    """Return the options of Inductor that a compile sets.

    Args:
        options: The user's, by Inductor's dotted names; "-" may stand for "_".
        max_autotune: Whether the sizes are concrete.
        packaged: Whether the result is a package of native code.

    Raises:
        ConfigError: An option is unknown (the message names the nearest), of another type than Inductor's, or one that
            cgtool keeps for itself.
    """
    known = _torch.inductor_options()
    chosen = {name.replace("-", "_"): value for name, value in options.items()}
    for name, value in chosen.items():
        _check(name, value, known)
    tuned = _AUTOTUNE if max_autotune else {}
    # those that this version of torch has
    native = {name: value for name, value in _PACKAGED.items() if packaged and name in known}
    return dict(sorted({**_BASE, **native, **tuned, **chosen}.items()))


def _check(name: str, value: Json, known: Mapping[str, Any]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"inductor_compile_config sets {name!r}, and Inductor of this torch has no such option; the nearest is "
            f"{near!r}.",
            expected=near,
            actual=name,
        )
    if name in _KEPT:
        raise ConfigError(
            f"inductor_compile_config sets {name!r}, which is not yours to set: {_KEPT[name]}. Leave it out.",
            actual=name,
        )
    now = known[name]
    if isinstance(now, bool | str) and value is not None and type(value) is not type(now):
        raise ConfigError(
            f"inductor_compile_config sets {name!r} to {value!r}, and Inductor takes a {type(now).__name__} there, "
            f"such as {now!r}.",
            expected=type(now).__name__,
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
    """See that a C++ compiler is here, before anything is traced for it.

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
