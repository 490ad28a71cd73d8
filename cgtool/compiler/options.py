"""Options of Inductor for one compile: cgtool's own, the user's, and those of concrete sizes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from cgtool.compiler import _torch
from cgtool.errors import ConfigError
from cgtool.plan.pieces import Json

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
