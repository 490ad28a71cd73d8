"""Where vLLM and ATOM put what they compile, found from whichever folder of it a user names. Must not import torch.

~/.cache/vllm/torch_compile_cache/
  <hash>/                                      10 hexadecimal digits, or any folder that a user's configuration names
    rank_<rank>_<data-parallel rank>/          of ATOM: rank_<device>
      <prefix>/                                absent in older vLLM: its files lie in the rank's folder
        vllm_compile_cache.py                  see cgtool.toolkit.foreign.vllm_index
        cache_key_factors.json                 what the hash was made of
        computation_graph.py transformed_code.py
        artifact_compile_range_<start>_<end>_subgraph_<piece>      a file (binary) or a folder (unpacked)
        artifact_shape_<size or None>_subgraph_<piece>             the same, older, and of ATOM
      inductor_cache/ triton_cache/            of the adaptor "inductor": torch's and Triton's own caches
  torch_aot_compile/<64 hexadecimal digits>/
    rank_<rank>_<data-parallel rank>/model     one pickle
    inductor_cache/                            shared by the ranks
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from cgtool.plan.shapes import Shape
from cgtool.records import dataclass
from cgtool.store.layout import CACHE_FOLDER, MANIFEST_FILE
from cgtool.toolkit.foreign.vllm_index import INDEX_FILE, tokens

AOT_FOLDER = "torch_aot_compile"
AOT_MODEL = "model"
FACTORS_FILE = "cache_key_factors.json"
GRAPH_FILE = "computation_graph.py"
CODE_FILE = "transformed_code.py"
SHARED_FOLDERS = ("inductor_cache", "triton_cache")
_RECORDS = frozenset({INDEX_FILE, FACTORS_FILE})
#: One of these is in the folder of each compiled part.
PART_FILES = _RECORDS | {GRAPH_FILE, CODE_FILE, AOT_MODEL}

RANK = re.compile(r"rank_([0-9]{1,7}(?:_[0-9]{1,7})?)")
_ARTIFACT = re.compile(
    r"artifact_(?:compile_range_(?P<start>[0-9]{1,15})_(?P<end>[0-9]{1,15})|shape_(?P<shape>None|[0-9]{1,15}))"
    r"_subgraph_(?P<piece>[0-9]{1,9})"
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """One entry's folder.

    Args:
        name: The entry's name.
        path: Its folder.
        part_of: The folder that is deleted with it; None if it is whole.
        rank: Which rank it is, where it is a part of one.
        prefix: Which prefix, likewise.
    """

    name: str
    path: Path
    part_of: Path | None = None
    rank: str | None = None
    prefix: str | None = None


def artifact_name(name: str) -> tuple[Shape, int] | None:
    """Return the shape and the piece that an artifact's name says; None for another name."""
    match = _ARTIFACT.fullmatch(name)
    if match is None:
        return None
    if match["shape"] is not None:
        shape = {} if match["shape"] == "None" else tokens(int(match["shape"]))
    else:
        shape = tokens(int(match["start"]), int(match["end"]))
    return shape, int(match["piece"])


def find_places(path: Path) -> list[Place]:
    """Return the entries in a folder that vLLM or ATOM wrote; none if it is no such folder."""
    if _is_prefix_folder(path):
        return [_part(path)]
    if RANK.fullmatch(path.name) and _is_rank_folder(path):
        return [Place(name=path.name, path=path, part_of=path.parent, rank=_rank_text(path.name))]
    if _is_hash_folder(path):
        return [Place(name=path.name, path=path)]
    base = path / CACHE_FOLDER
    base = base if base.is_dir() else path
    aot = base if base.name == AOT_FOLDER else base / AOT_FOLDER
    places = (
        []
        if aot is base
        else [Place(name=child.name, path=child) for child in _folders(base) if _is_hash_folder(child)]
    )
    places += [
        Place(name=f"{AOT_FOLDER}/{child.name}", path=child) for child in _folders(aot) if _is_hash_folder(child)
    ]
    return places


def system_of(places: list[Place]) -> str:
    """Return "atom" if ranks are spelled as ATOM does, or the path says so; else "vllm"."""
    for place in places:
        names = [place.path.name, place.path.parent.name, *(child.name for child in _folders(place.path))]
        for name in names:
            if match := RANK.fullmatch(name):
                return "vllm" if "_" in match[1] else "atom"
    return "vllm"


def _part(path: Path) -> Place:
    rank = path if RANK.fullmatch(path.name) else path.parent
    if RANK.fullmatch(rank.name) is None:
        return Place(name=path.name, path=path)
    prefix = "" if rank is path else path.name
    return Place(name=path.name, path=path, part_of=rank.parent, rank=_rank_text(rank.name), prefix=prefix)


def _rank_text(name: str) -> str:
    match = RANK.fullmatch(name)
    return "" if match is None else match[1]


def _is_prefix_folder(path: Path) -> bool:
    names = _names(path)
    return _is_foreign(names) and (bool(_RECORDS & names) or any(map(artifact_name, names)))


def _is_foreign(names: set[str]) -> bool:
    """Whether cgtool did not write a part's folder: an entry of its own has folders of the same names."""
    return MANIFEST_FILE not in names


def _is_rank_folder(path: Path) -> bool:
    return any(
        _is_foreign(names) and (not PART_FILES.isdisjoint(names) or any(map(artifact_name, names)))
        for names in map(_names, (path, *_folders(path)))
    )


def _is_hash_folder(path: Path) -> bool:
    return any(RANK.fullmatch(child.name) and _is_rank_folder(child) for child in _folders(path))


def _folders(path: Path) -> Iterator[Path]:
    """The folders right in a folder, sorted; links, hidden ones and what cannot be listed are left out."""
    try:
        with os.scandir(path) as found:
            names = sorted(
                child.name for child in found if child.is_dir(follow_symlinks=False) and child.name[0] != "."
            )
    except OSError:
        return
    yield from map(path.joinpath, names)


def _names(path: Path) -> set[str]:
    try:
        return {child.name for child in path.iterdir()}
    except OSError:
        return set()
