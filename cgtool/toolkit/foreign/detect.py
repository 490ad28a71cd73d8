"""Detects which system wrote a folder or a file, and dispatches to its reader. Must not import torch.

Detection reads names, three levels deep, or the start of a single file. Systems are tried in the order cgtool, vLLM and
ATOM, torch, Triton, because torch's folder contains Triton's, and vLLM's may contain both.
"""

from __future__ import annotations

import os
from pathlib import Path

from cgtool.errors import CacheError
from cgtool.store.files import names_in
from cgtool.store.layout import KEY_FILE, CacheLayout, is_hash
from cgtool.toolkit.foreign.records import ForeignCache
from cgtool.toolkit.foreign.torch_caches import (
    detect_file,
    find_triton,
    is_torch_inductor,
    read_file,
    read_torch_inductor,
    read_triton,
)
from cgtool.toolkit.foreign.tree import display_text, open_regular
from cgtool.toolkit.foreign.vllm import detect_vllm, read_vllm

_READERS = {
    "vllm": read_vllm,
    "atom": read_vllm,
    "torch_inductor": read_torch_inductor,
    "triton": read_triton,
    "mega_cache": read_file,
    "compiled_artifact": read_file,
}
SYSTEMS = ("cgtool", *_READERS)

_OWN_FOLDERS = frozenset({"units", "lookup", "state"})
_MARK = b"a cache of cgtool"
_TAG_BYTES = 512


def detect(path: Path) -> str | None:
    """Return the system that wrote a folder or a file, one of `SYSTEMS`; None if unknown."""
    path = path.absolute()
    try:
        if not path.is_dir():
            return detect_file(path) if path.is_file() else None
        if _is_own(path):
            return "cgtool"
        system = detect_vllm(path)
        if system is None and is_torch_inductor(path):
            return "torch_inductor"
        return system or (None if find_triton(path) is None else "triton")
    except OSError:  # for example, a name that is too long or a link loop
        return None


def read_foreign(path: Path | None) -> ForeignCache | None:
    """Read another system's cache; None if cgtool or no known system wrote it."""
    if path is None:
        return None
    path = path.expanduser().absolute()
    reader = _READERS.get(detect(path) or "")
    return None if reader is None else reader(path)


def check_known(root: Path) -> None:
    """Raise CacheError if a folder without entries holds unrelated files, so that cgtool must not fill it."""
    try:
        holds_others = root.is_dir() and not CacheLayout(root=root).base.is_dir() and any(root.iterdir())
    except OSError as error:
        message = f"{display_text(root)} could not be listed: {error.strerror}. Check its permissions."
        raise CacheError(message, path=root) from error
    if holds_others and detect(root) is None:
        raise CacheError(
            f"{display_text(root)} is not a cache of cgtool, vLLM, ATOM, torch's Inductor or Triton, and not a "
            "mega-cache file. Name the cache's folder or file.",
            path=root,
            expected=SYSTEMS,
        )


def check_own(root: Path) -> None:
    """Raise CacheError if a folder without entries is another system's cache."""
    system = detect(root)
    if system not in (None, "cgtool"):
        message = (
            f"{root} is a cache of another system ({system}), which cgtool can only inspect: cgtool inspect cache "
            f"{root}"
        )
        raise CacheError(message, path=root, actual=system)


def _is_own(path: Path) -> bool:
    """Return whether a folder is a root of cgtool's cache, or the `torch_compile_cache` in one."""
    layout = CacheLayout.at(path)
    try:
        with open_regular(layout.tag) as stream:
            if _MARK in stream.read(_TAG_BYTES):
                return True
    except (CacheError, OSError):
        pass
    names = names_in(layout.base)
    return len(_OWN_FOLDERS.intersection(names)) > 1 or any(
        is_hash(name) and os.path.isfile(layout.base / name / KEY_FILE)  # noqa: PTH113 - False if it cannot be read
        for name in names
    )
