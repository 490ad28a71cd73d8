"""Reading the compile caches of vLLM and of ATOM, which took its form over from vLLM. Must not import torch.

Where things lie is in `vllm_layout`, the index in `vllm_index`. An entry is a hash folder: neither system locks or
keeps stamps, and each builds an entry again that is gone.
"""

from __future__ import annotations

import json
from pathlib import Path

from cgtool.errors import CacheError
from cgtool.plan.pieces import Json
from cgtool.store.layout import CACHE_FOLDER
from cgtool.toolkit.foreign.entries import made_entry, pickle_artifact, read_json
from cgtool.toolkit.foreign.records import ForeignArtifact, ForeignCache, ForeignEntry
from cgtool.toolkit.foreign.tree import Tree, join, size_of
from cgtool.toolkit.foreign.vllm_layout import (
    AOT_FOLDER,
    AOT_MODEL,
    FACTORS_FILE,
    PART_FILES,
    RANK,
    SHARED_FOLDERS,
    Place,
    artifact_name,
    find_places,
    system_of,
)
from cgtool.toolkit.foreign.vllm_pieces import PieceReader
from cgtool.toolkit.foreign.words import shown

_NAMES = {"vllm": "vLLM", "atom": "ATOM"}


def detect_vllm(path: Path) -> str | None:
    """Return "vllm" or "atom" if one of them wrote a folder, else None."""
    places = find_places(path)
    return system_of(places) if places else None


def read_vllm(path: Path) -> ForeignCache:
    """Return what a folder that vLLM or ATOM wrote holds.

    Args:
        path: A cache, an entry's folder, or a part of one.
    """
    warnings: list[str] = []
    places = find_places(path)
    root = path / CACHE_FOLDER if any(place.path.is_relative_to(path / CACHE_FOLDER) for place in places) else path
    tree = Tree(root, warnings)
    system = system_of(places)
    reader = _Reader(tree, warnings, _NAMES[system])
    entries = [reader.entry(place, _below(place.path, root)) for place in places]
    entries += reader.strangers(places, root)
    return ForeignCache(
        system=system,
        version=" ".join(sorted(reader.forms)) or None,
        root=root,
        entries=tuple(sorted(entries, key=lambda entry: entry.name)),
        size_bytes=size_of(tree.files.values()),
        warnings=tuple(warnings),
        deletion=(
            f"A hash folder may be removed whole: {_NAMES[system]} compiles it again. It takes no locks, so stop the "
            "servers that use it first."
        ),
    )


class _Reader:
    def __init__(self, tree: Tree, warnings: list[str], system: str) -> None:
        self.tree = tree
        self.warnings = warnings
        self.system = system
        #: which forms of the index there are
        self.forms: set[str] = set()

    def entry(self, place: Place, top: str) -> ForeignEntry:
        """Return the entry in a folder.

        Args:
            place: The folder.
            top: The same under the tree's.
        """
        pieces = PieceReader(self.tree, top)
        factors: dict[str, Json] = {}
        problems: list[str] = []
        others: list[ForeignArtifact] = []
        parts = self._parts(place, top)
        for rank, prefix, folder in parts:
            pieces.read(folder, rank=rank, prefix=prefix)
            others += self._model(folder, top, rank)
            self._factors(folder, f"rank_{rank}/{prefix}".rstrip("/"), factors, problems)
        others += self._shared(top)
        self.forms |= pieces.forms
        artifacts = [*pieces.artifacts, *others]
        part = place.part_of
        return made_entry(
            place.name,
            "aot_model" if any(artifact.what == "aot_model" for artifact in artifacts) else "model",
            place.path,
            self.tree.under(top),
            artifacts,
            ranks=tuple(dict.fromkeys(rank for rank, _, _ in parts if rank)),
            prefixes=tuple(dict.fromkeys(prefix for _, prefix, _ in parts if prefix)),
            factors=_one_or_all(factors),
            problems=(*pieces.problems, *problems),
            deletable=part is None,
            why_not="" if part is None else f"it is a part of {shown(part)}, which may be removed whole",
        )

    def strangers(self, places: list[Place], root: Path) -> list[ForeignEntry]:
        """Return what lies beside the entries: folders that several of them share, which are named, and the rest."""
        known = {_below(place.path, root) for place in places}
        if "" in known:
            return []
        found: list[ForeignEntry] = []
        for above in ("", AOT_FOLDER):
            for name in self.tree.folders(above):
                path = join(above, name)
                if path in known or path == AOT_FOLDER:
                    continue
                shared = name in SHARED_FOLDERS
                why = (
                    "compiled models beside it may load from it"
                    if shared
                    else f"{self.system} did not write it in a form that is known"
                )
                kind = "shared" if shared else "other"
                files = self.tree.under(path)
                found.append(made_entry(path, kind, root / path, files, (), deletable=False, why_not=why))
            self.warnings += [
                f"{shown(root / above / name)} is not part of the cache and was skipped."
                for name in self.tree.names(above)
            ]
        return found

    def _parts(self, place: Place, top: str) -> list[tuple[str, str, str]]:
        """The rank, prefix and folder of each part of an entry, by rank and prefix."""
        if place.prefix is not None:
            return [(place.rank or "", place.prefix, top)]
        if place.rank is not None:
            return [(place.rank, prefix, join(top, prefix)) for prefix in self._prefixes(top)]
        ranks = [(match[1], name) for name in self.tree.folders(top) if (match := RANK.fullmatch(name))]
        if not ranks:
            return [("", "", top)]
        in_order = sorted(ranks, key=lambda rank: [int(number) for number in rank[0].split("_")])
        return [
            (rank, prefix, join(join(top, name), prefix) if prefix else join(top, name))
            for rank, name in in_order
            for prefix in self._prefixes(join(top, name))
        ]

    def _prefixes(self, rank_folder: str) -> list[str]:
        """The prefixes of a rank, with "" for what lies right in its folder."""
        names = [name for name in self.tree.folders(rank_folder) if self._is_part(join(rank_folder, name))]
        return ["", *names] if self._is_part(rank_folder) or not names else names

    def _is_part(self, folder: str) -> bool:
        names = self.tree.names(folder)
        if not PART_FILES.isdisjoint(names):
            return True
        return any(artifact_name(name) for name in (*names, *self.tree.folders(folder)))

    def _model(self, folder: str, top: str, rank: str) -> list[ForeignArtifact]:
        file = self.tree.files.get(join(folder, AOT_MODEL))
        return [] if file is None else [pickle_artifact(self.tree, file, "aot_model", top=top, rank=rank)]

    def _shared(self, top: str) -> list[ForeignArtifact]:
        """The caches of torch and Triton inside of an entry, each as one."""
        ranks = [name for name in self.tree.folders(top) if RANK.fullmatch(name)]
        return [
            ForeignArtifact(
                path=_inner(path, top),
                what=name,
                size_bytes=size_of(files),
                holds_pickle=name == "inductor_cache",
                members=(f"{len(files)} files",),
            )
            for above in (top, *(join(top, rank) for rank in ranks))
            for name in SHARED_FOLDERS
            if self.tree.is_folder(path := join(above, name)) and (files := self.tree.under(path))
        ]

    def _factors(self, folder: str, part: str, factors: dict[str, Json], problems: list[str]) -> None:
        path = join(folder, FACTORS_FILE)
        if path not in self.tree.files:
            return
        try:
            factors[part] = read_json(self.tree, path)
        except (CacheError, OSError) as error:
            problems.append(f"{FACTORS_FILE} of {shown(part)} could not be read: {error}")


def _one_or_all(factors: dict[str, Json]) -> Json:
    """The factors of all parts if they are equal, as they should be; else those of each part by its name."""
    texts = {json.dumps(value, sort_keys=True) for value in factors.values()}
    return dict(factors) if len(texts) > 1 else next(iter(factors.values()), None)


def _below(path: Path, root: Path) -> str:
    return "" if path == root else path.relative_to(root).as_posix()


def _inner(path: str, top: str) -> str:
    return path.removeprefix(f"{top}/") if top else path
