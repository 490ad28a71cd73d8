"""Which system wrote a folder or a file, found by looking at it, and what it holds. Must not import torch.

Looking reads names, three levels deep, and the beginning of a single file. Where several fit, the first rules: cgtool,
vLLM and ATOM, torch, Triton; a folder of torch's holds one of Triton's, and one of vLLM's may hold both.
"""

from __future__ import annotations

from pathlib import Path

from cgtool.errors import CacheError
from cgtool.store.layout import CacheLayout
from cgtool.toolkit.foreign.own import is_own, read_own
from cgtool.toolkit.foreign.records import ForeignCache
from cgtool.toolkit.foreign.single_files import detect_file, read_file
from cgtool.toolkit.foreign.torch_inductor import is_torch_inductor, read_torch_inductor
from cgtool.toolkit.foreign.triton import find_triton, read_triton
from cgtool.toolkit.foreign.vllm import detect_vllm, read_vllm
from cgtool.toolkit.foreign.words import shown

SYSTEMS = ("cgtool", "vllm", "atom", "torch_inductor", "triton", "mega_cache", "compiled_artifact")

_READERS = {
    "cgtool": read_own,
    "vllm": read_vllm,
    "atom": read_vllm,
    "torch_inductor": read_torch_inductor,
    "triton": read_triton,
    "mega_cache": read_file,
    "compiled_artifact": read_file,
}


def detect(path: Path) -> str | None:
    """Return which system wrote a folder or a file, one of `SYSTEMS`; None if none is known to.

    Args:
        path: A cache's root or what lies in it, or a file. It may be missing.
    """
    path = path.absolute()
    try:
        if path.is_dir():
            return _detect_folder(path)
        return detect_file(path) if path.is_file() else None
    except OSError:  # a name that is too long, a loop of links
        return None


def read_cache(path: Path) -> ForeignCache:
    """Return what a cache holds, whichever system wrote it; opens what it must and executes nothing.

    Args:
        path: A cache's root or what lies in it, or a file.

    Returns:
        The cache; what is torn, missing or strange in it is a warning or a problem there.

    Raises:
        CacheError: No known system wrote it, or it is not there.
    """
    path = path.absolute()
    system = detect(path)
    if system is None:
        raise _unknown(path)
    return _READERS[system](path)


def check_known(root: Path) -> None:
    """Check that a folder without entries is one that cgtool may fill, and not a folder of other things.

    Args:
        root: A cache's root, as `resolve_root` gives it; it may be missing.

    Raises:
        CacheError: Something is in it, and no known system wrote it; or it cannot be listed.
    """
    try:
        holds_others = root.is_dir() and not CacheLayout(root=root).base.is_dir() and any(root.iterdir())
    except OSError as error:
        message = f"{shown(root)} could not be listed: {error.strerror}. Check its permissions."
        raise CacheError(message, path=root) from error
    if holds_others and detect(root) is None:
        raise _unknown(root)


def _unknown(path: Path) -> CacheError:
    return CacheError(
        f"{shown(path)} is no cache that cgtool knows: none of its own, of vLLM, ATOM, torch's Inductor or Triton, "
        "and no mega-cache file. Name the cache's folder or file.",
        path=path,
        expected=SYSTEMS,
    )


def _detect_folder(path: Path) -> str | None:
    if is_own(path):
        return "cgtool"
    system = detect_vllm(path)
    if system is not None:
        return system
    if is_torch_inductor(path):
        return "torch_inductor"
    return None if find_triton(path) is None else "triton"
