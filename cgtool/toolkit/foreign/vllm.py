"""The compile caches of vLLM and of ATOM, which adopted vLLM's format. Must not import torch.

~/.cache/vllm/torch_compile_cache/
  <hash>/                                      10 hexadecimal digits, or a folder named in the user's configuration
    rank_<rank>_<data-parallel rank>/          in ATOM: rank_<device>
      <prefix>/                                absent in older vLLM, whose files are in the rank's folder
        vllm_compile_cache.py                  the index, see below
        cache_key_factors.json                 the factors of the hash
        computation_graph.py transformed_code.py
        artifact_compile_range_<start>_<end>_subgraph_<piece>      a file (binary) or a folder (unpacked)
        artifact_shape_<size or None>_subgraph_<piece>             the same, in older vLLM and in ATOM
      inductor_cache/ triton_cache/            with the adaptor "inductor": torch's and Triton's own caches
  torch_aot_compile/<64 hexadecimal digits>/
    rank_<rank>_<data-parallel rank>/model     one pickle
    inductor_cache/                            shared by the ranks

An entry is a hash folder. Neither system takes locks or keeps stamps, and both rebuild a removed entry. The index is a
Python literal::

    index   = { (shape, piece, compiler): handle, ... }
    shape   = None (general) | size | (start, end)          start = end is a single size
    piece   = its number among the compiled pieces
    handle  = (name, path)                                          older vLLM, and ATOM
            | {"graph_handle": (name, path), "cache_key": text}     newer vLLM
    name    = the file or folder beside the index ("inductor_standalone"), or the key of a compiled graph ("inductor")
    path    = its absolute path when it was written; with "inductor", the path of the generated code

Source: vllm/compilation/backends.py, atom/utils/backends.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from cgtool.errors import CacheError
from cgtool.plan.pieces import Json
from cgtool.plan.shapes import Shape
from cgtool.store.files import names_in
from cgtool.store.layout import CACHE_FOLDER, GRAPH_FILE, MANIFEST_FILE
from cgtool.toolkit.foreign.formats import MAX_BYTES, FormatError, parse_literal, pickle_protocol
from cgtool.toolkit.foreign.records import (
    ForeignArtifact,
    ForeignCache,
    ForeignEntry,
    binary_artifact,
    file_artifact,
    read_json,
    size_of,
)
from cgtool.toolkit.foreign.tree import File, Tree, display_text, join

_AOT_FOLDER = "torch_aot_compile"
_AOT_MODEL = "model"
_INDEX_FILE = "vllm_compile_cache.py"
_FACTORS_FILE = "cache_key_factors.json"
_SHARED_FOLDERS = ("inductor_cache", "triton_cache")
_RECORDS = frozenset({_INDEX_FILE, _FACTORS_FILE})
#: The folder of a compiled part holds at least one of these files.
_PART_FILES = _RECORDS | {GRAPH_FILE, "transformed_code.py", _AOT_MODEL}
_RANK = re.compile(r"rank_([0-9]{1,7}(?:_[0-9]{1,7})?)")
_ARTIFACT = re.compile(
    r"artifact_(?:compile_range_(?P<start>[0-9]{1,15})_(?P<end>[0-9]{1,15})|shape_(?P<shape>None|[0-9]{1,15}))"
    r"_subgraph_(?P<piece>[0-9]{1,9})"
)
#: The adaptor whose artifacts are entries of torch's own cache.
_INDUCTOR = "inductor"
_NAMES = {"vllm": "vLLM", "atom": "ATOM"}


class _Handle(msgspec.Struct, frozen=True):
    graph_handle: tuple[str, str]
    cache_key: str | None = None


_Row = tuple[tuple[int | tuple[int, int] | None, int, str], tuple[str, str] | _Handle]
_MAX_NUMBER = 1 << 53


class IndexRow(NamedTuple):
    """One row of an index."""

    shape: Shape
    piece_index: int
    compiler: str
    name: str
    #: The path of `name` when it was written.
    path: str
    #: None in the older format.
    cache_key: str | None


class Index(NamedTuple):
    """A parsed index."""

    #: "ranges" or "shapes" (the older format); None without rows.
    form: str | None
    rows: list[IndexRow]
    #: Descriptions of the rows that were skipped.
    problems: list[str]


def parse_index(data: bytes) -> Index:
    """Parse an index; a row outside of its grammar is a problem."""
    index = parse_literal(data)
    if not isinstance(index, dict):
        raise FormatError("it is not a dictionary")
    rows: list[IndexRow] = []
    problems: list[str] = []
    forms: set[str] = set()
    for key, value in index.items():
        try:
            (size, piece, compiler), handle = msgspec.convert((key, value), _Row)
            low, high = size if isinstance(size, tuple) else (size or 0, size or 0)
            if not 0 <= low <= high <= _MAX_NUMBER or not 0 <= piece <= _MAX_NUMBER:
                raise ValueError  # noqa: TRY301 - handled like a failed conversion
        except ValueError:
            problems.append(
                f"a row of the index has an unknown format and was skipped: {display_text(ascii((key, value)))}"
            )
            continue
        forms.add("ranges" if isinstance(handle, _Handle) or isinstance(size, tuple) else "shapes")
        handle = handle if isinstance(handle, _Handle) else _Handle(handle)
        shape = {} if size is None else _token_shape(low, high)
        rows.append(IndexRow(shape, piece, compiler, *handle.graph_handle, handle.cache_key))
    return Index(min(forms, default=None), rows, problems)


def artifact_name(name: str) -> tuple[Shape, int] | None:
    """Return the shape and the piece in an artifact's name; None if it is not an artifact's name."""
    match = _ARTIFACT.fullmatch(name)
    if match is None:
        return None
    if match["shape"] == "None":
        return {}, int(match["piece"])
    low, high = int(match["shape"] or match["start"]), int(match["shape"] or match["end"])
    return _token_shape(low, high), int(match["piece"])


def _token_shape(low: int, high: int) -> Shape:
    """Return the shape of a size or a range; vLLM's only dimension is the number of tokens in a batch."""
    return {"num_tokens": (low, high)}


def detect_vllm(path: Path) -> str | None:
    """Return "vllm" or "atom" if one of them wrote a folder, else None."""
    return _system_of(_find_entries(path).values())


def _find_entries(path: Path) -> dict[str, Path]:
    """Find the entries of a cache, or the entry that a folder is, by name."""
    if _is_hash_folder(path):
        return {path.name: path}
    base = path / CACHE_FOLDER
    base = base if base.is_dir() else path
    folders = {} if base.name == _AOT_FOLDER else {child.name: child for child in _folders(base)}
    aot = base if base.name == _AOT_FOLDER else base / _AOT_FOLDER
    folders |= {f"{_AOT_FOLDER}/{child.name}": child for child in _folders(aot)}
    return {name: child for name, child in folders.items() if _is_hash_folder(child)}


def _system_of(entries: Iterable[Path]) -> str | None:
    """Return the system by its spelling of ranks; None without entries."""
    ranks = (match[1] for path in entries for child in _folders(path) if (match := _RANK.fullmatch(child.name)))
    rank = next(ranks, None)
    return None if rank is None else "vllm" if "_" in rank else "atom"


def _is_hash_folder(path: Path) -> bool:
    """Return whether a rank of a folder holds a compiled part; cgtool's folders of the same names hold a manifest."""
    ranks = [child for child in _folders(path) if _RANK.fullmatch(child.name)]
    listings = [names_in(folder) for rank in ranks for folder in (rank, *_folders(rank))]
    return any(MANIFEST_FILE not in names and _is_part(names) for names in listings)


def _is_part(names: Collection[str]) -> bool:
    return not _PART_FILES.isdisjoint(names) or any(map(artifact_name, names))


def _folders(path: Path) -> list[Path]:
    """Return the visible subfolders of a folder, sorted, without links; none if it cannot be listed."""
    try:
        return sorted(
            child for child in path.iterdir() if child.name[0] != "." and not child.is_symlink() and child.is_dir()
        )
    except OSError:
        return []


def read_vllm(path: Path) -> ForeignCache:
    """Read a cache or an entry's folder that vLLM or ATOM wrote."""
    found = _find_entries(path)
    root = path / CACHE_FOLDER if any(entry.is_relative_to(path / CACHE_FOLDER) for entry in found.values()) else path
    tree = Tree(root)
    system = _system_of(found.values()) or "vllm"
    tops = {name: "" if entry == root else entry.relative_to(root).as_posix() for name, entry in found.items()}
    readers = [_EntryReader(tree, name, top) for name, top in tops.items()]
    entries = [reader.entry() for reader in readers]
    if root not in found.values():
        entries += _other_entries(tree, set(tops.values()), _NAMES[system])
    deletion = (
        f"A hash folder may be removed whole: {_NAMES[system]} compiles it again. It takes no locks, so stop the "
        "servers that use it first."
    )
    version = " ".join(sorted({form for reader in readers for form in reader.forms})) or None
    entries.sort(key=lambda entry: entry.name)
    return ForeignCache.of(system, tree, entries, version=version, deletion=deletion)


def _other_entries(tree: Tree, known: set[str], system: str) -> Iterator[ForeignEntry]:
    """Yield the folders beside the known entries: those that entries share, and unrelated ones."""
    for above in ("", _AOT_FOLDER):
        for name in tree.folders(above):
            path = join(above, name)
            if path in known or path == _AOT_FOLDER:
                continue
            kind, why = "other", f"{system} did not write it in a known format"
            if name in _SHARED_FOLDERS:
                kind, why = "shared", "compiled models beside it may load from it"
            yield ForeignEntry.of(path, kind, tree, (), folder=path, deletable=False, why_not=why)
        for name in tree.names(above):
            tree.warnings.append(f"{display_text(tree.top / above / name)} is not part of the cache and was skipped.")


class _EntryReader:
    """Reads one entry: the artifacts of its ranks and prefixes, in their indexes and on disk."""

    def __init__(self, tree: Tree, name: str, top: str) -> None:
        self.tree = tree
        self.name = name
        #: Its folder, relative to the tree.
        self.top = top
        self.artifacts: list[ForeignArtifact] = []
        self.problems: list[str] = []
        #: The formats of its indexes.
        self.forms: set[str] = set()
        self._torch_keys: set[str | None] = set()

    def entry(self) -> ForeignEntry:
        parts = self._parts()
        for rank, prefix, folder in parts:
            self._add_pieces(folder, {"rank": rank, "prefix": prefix})
        factors: dict[str, Json] = {}
        for rank, prefix, folder in parts:
            model = self.tree.files.get(join(folder, _AOT_MODEL))
            if model is not None:
                of_rank = {"top": self.top, "rank": rank}
                self.artifacts.append(file_artifact(self.tree, model, "aot_model", pickled=True, **of_rank))
            if join(folder, _FACTORS_FILE) in self.tree.files:
                part = f"rank_{rank}/{prefix}".rstrip("/")
                try:
                    factors[part] = read_json(self.tree, join(folder, _FACTORS_FILE))
                except (CacheError, OSError) as error:
                    self.problems.append(f"{_FACTORS_FILE} of {display_text(part)} could not be read: {error}")
        self._add_shared_caches()
        # All parts should have the same factors; if not, keep them by part.
        are_equal = len({json.dumps(value, sort_keys=True) for value in factors.values()}) <= 1
        return ForeignEntry.of(
            self.name,
            "aot_model" if any(artifact.what == "aot_model" for artifact in self.artifacts) else "model",
            self.tree,
            self.artifacts,
            folder=self.top,
            ranks=tuple(dict.fromkeys(rank for rank, _, _ in parts if rank)),
            prefixes=tuple(dict.fromkeys(prefix for _, prefix, _ in parts if prefix)),
            factors=next(iter(factors.values()), None) if are_equal else factors,
            problems=tuple(self.problems),
        )

    def _parts(self) -> list[tuple[str, str, str]]:
        """Return (rank, prefix, folder) of each part, sorted; "" is the prefix of a part without its own folder."""
        tree, parts = self.tree, []
        ranks = [match[1] for name in tree.folders(self.top) if (match := _RANK.fullmatch(name))]
        for rank in sorted(ranks, key=lambda rank: [int(number) for number in rank.split("_")]):
            above = join(self.top, f"rank_{rank}")
            prefixes = [name for name in tree.folders(above) if self._is_part(join(above, name))]
            if self._is_part(above) or not prefixes:
                prefixes.insert(0, "")
            parts += [(rank, prefix, join(above, prefix)) for prefix in prefixes]
        return parts

    def _is_part(self, folder: str) -> bool:
        return _is_part([*self.tree.names(folder), *self.tree.folders(folder)])

    def _add_pieces(self, folder: str, where: dict[str, str]) -> None:
        """Add the pieces of one rank and prefix: those in the index, then others on disk."""
        indexed: set[str] = set()
        for row in self._index_rows(folder):
            facts = {**where, "shape": row.shape, "piece_index": row.piece_index}
            if row.compiler == _INDUCTOR:
                self.artifacts.append(self._inductor_artifact(folder, row, facts))
            else:
                indexed.add(row.name)
                self.artifacts.append(self._indexed_artifact(folder, row, facts))
        for name in sorted({*self.tree.folders(folder), *self.tree.names(folder)} - indexed):
            if (shape_and_piece := artifact_name(name)) is not None:
                shape, piece = shape_and_piece
                artifact = self._artifact(join(folder, name), None, {**where, "shape": shape, "piece_index": piece})
                self.artifacts.append(_with_problem(artifact, "no row of the index names it"))

    def _index_rows(self, folder: str) -> list[IndexRow]:
        path = join(folder, _INDEX_FILE)
        if path not in self.tree.files:
            return []
        try:
            index = parse_index(self.tree.read(path, MAX_BYTES))
        except (CacheError, OSError) as error:
            self.problems.append(f"{display_text(self._below(path))} could not be read: {error}")
            return []
        self.problems += index.problems
        if index.form is not None:
            self.forms.add(index.form)
        parents = {row.path.rpartition("/")[0] for row in index.rows if row.compiler != _INDUCTOR}
        elsewhere = sorted(parent for parent in parents - {str(self.tree.top / folder)} if parent.startswith("/"))
        if elsewhere:
            self.problems.append(
                f"{display_text(self._below(path))} was moved and still names files under "
                f"{display_text(elsewhere[0])}: a process that opens them misses"
            )
        return index.rows

    def _indexed_artifact(self, folder: str, row: IndexRow, facts: dict[str, Any]) -> ForeignArtifact:
        path = join(folder, row.name)
        if "/" in row.name or row.name in {"", ".", ".."}:
            where, problem = row.name, f"the index names {display_text(row.name)}, which is not a plain file name"
        elif path not in self.tree.files and not self.tree.is_folder(path):
            where, problem = self._below(path), "the index names it, but it is missing"
        else:
            artifact = self._artifact(path, row.cache_key, facts)
            if artifact_name(row.name) in (None, (row.shape, row.piece_index)):
                return artifact
            return _with_problem(artifact, "its name has another shape or piece than the index")
        return ForeignArtifact(path=where, what="compiled_artifact", size_bytes=0, problems=(problem,), **facts)

    def _artifact(self, path: str, key: str | None, facts: dict[str, Any]) -> ForeignArtifact:
        file = self.tree.files.get(path)
        if file is None:
            return self._unpacked_artifact(path, facts)
        artifact, torch_key = binary_artifact(self.tree, file, key=key, top=self.top, **facts)
        self._torch_keys |= {torch_key} - {None}
        if torch_key is None or len(self._torch_keys) == 1:
            return artifact
        return _with_problem(artifact, "it was written by another torch than the other artifacts")

    def _unpacked_artifact(self, path: str, facts: dict[str, Any]) -> ForeignArtifact:
        files = self.tree.under(path)
        problems = [
            f"{display_text(file.path.removeprefix(f'{path}/'))} is empty"
            for file in files
            if file.size_bytes == 0 and not file.name.endswith(".lock")
        ]
        if not any("/aotautograd/" in file.path for file in files):
            problems.append("it does not hold an AOTAutograd graph, so it cannot be loaded")
        pickles = sum(map(self._is_pickle, files))
        facts |= {"members": (f"{len(files)} files, {pickles} of them pickles",), "problems": tuple(problems)}
        return self._files_artifact(path, "unpacked_artifact", files, holds_pickle=pickles > 0, **facts)

    def _inductor_artifact(self, folder: str, row: IndexRow, facts: dict[str, Any]) -> ForeignArtifact:
        """Return an artifact of the adaptor "inductor": generated code, and a graph in torch's cache beside it."""
        parts = row.path.split("/")[-3:]
        above = folder.rpartition("/")[0]
        cache = next((base for base in (above, folder) if self.tree.is_folder(join(base, "inductor_cache"))), above)
        path = join(cache, *parts)
        code = self.tree.files.get(path) if parts[0] == "inductor_cache" else None
        graph = self.tree.under(join(cache, f"inductor_cache/fxgraph/{row.name[1:3]}/{row.name}"))
        problems = [] if code else ["its generated code is missing"]
        if not graph:
            problems.append(f"its compiled graph {display_text(row.name)} is missing")
        files = [*graph, code] if code else graph
        problems += [f"{display_text(file.name)} is empty" for file in files if not file.size_bytes]
        facts |= {"members": (f"compiled graph {row.name}",), "problems": tuple(problems)}
        holds_pickle = any(map(self._is_pickle, graph))
        return self._files_artifact(path, "generated_code", files, holds_pickle=holds_pickle, **facts)

    def _files_artifact(self, path: str, what: str, files: Iterable[File], **rest: Any) -> ForeignArtifact:
        return ForeignArtifact(path=self._below(path), what=what, size_bytes=size_of(files), **rest)

    def _add_shared_caches(self) -> None:
        """Add the entry's caches of torch and Triton, one artifact each."""
        ranks = [name for name in self.tree.folders(self.top) if _RANK.fullmatch(name)]
        for path in (join(self.top, above, name) for above in ("", *ranks) for name in _SHARED_FOLDERS):
            files, what = self.tree.under(path), path.rpartition("/")[2]
            if files:
                rest = {"holds_pickle": what == "inductor_cache", "members": (f"{len(files)} files",)}
                self.artifacts.append(self._files_artifact(path, what, files, **rest))

    def _is_pickle(self, file: File) -> bool:
        try:
            with self.tree.open(file.path) as stream:
                return pickle_protocol(stream.read(2)) is not None
        except (CacheError, OSError):
            return False

    def _below(self, path: str) -> str:
        return path.removeprefix(f"{self.top}/") if self.top else path


def _with_problem(artifact: ForeignArtifact, problem: str) -> ForeignArtifact:
    return replace(artifact, problems=(*artifact.problems, problem))
