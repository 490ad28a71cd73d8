"""The compiled pieces of one entry of vLLM or ATOM: what the index names, and what is there. Must not import torch."""

from __future__ import annotations

from typing import Any

from cgtool.errors import CacheError
from cgtool.toolkit.foreign.binary import pickle_protocol
from cgtool.toolkit.foreign.entries import binary_artifact
from cgtool.toolkit.foreign.literals import MOST_BYTES
from cgtool.toolkit.foreign.records import ForeignArtifact
from cgtool.toolkit.foreign.tree import File, Tree, join, size_of
from cgtool.toolkit.foreign.vllm_index import INDEX_FILE, Index, IndexRow, parse_index
from cgtool.toolkit.foreign.vllm_layout import artifact_name
from cgtool.toolkit.foreign.words import shown

_MISSING = "the index names it and it is missing"
_UNNAMED = "no row of the index names it"
#: The adaptor whose artifacts are entries of torch's own cache.
_OLD_ADAPTOR = "inductor"


class PieceReader:
    """Reads the pieces of the ranks and prefixes of one entry.

    Args:
        tree: What holds the entry's folder.
        top: The entry's folder under it.
    """

    def __init__(self, tree: Tree, top: str) -> None:
        self.tree = tree
        self.top = top
        self.artifacts: list[ForeignArtifact] = []
        self.problems: list[str] = []
        self.forms: set[str] = set()
        self._torch_keys: set[str] = set()

    def read(self, folder: str, *, rank: str, prefix: str) -> None:
        """Add the pieces of one rank and prefix.

        Args:
            folder: Where its index lies, under the tree's top.
            rank: As the system spells it.
            prefix: Which compiled part of the model.
        """
        where = {"rank": rank, "prefix": prefix}
        index = self._index(folder)
        named: set[str] = set()
        for row in index.rows if index else ():
            if row.compiler == _OLD_ADAPTOR:
                self.artifacts.append(self._old(folder, row, where))
            else:
                named.add(row.name)
                self.artifacts.append(self._named(folder, row, where))
        for name in sorted({*self.tree.folders(folder), *self.tree.names(folder)} - named):
            said = artifact_name(name)
            if said is not None:
                found = self._found(join(folder, name), None, {**where, "shape": said[0], "piece_index": said[1]})
                problems = (*found.problems, _UNNAMED)
                self.artifacts.append(_changed(found, problems=problems))

    def _index(self, folder: str) -> Index | None:
        path = join(folder, INDEX_FILE)
        if path not in self.tree.files:
            return None
        try:
            index = parse_index(self.tree.read(path, MOST_BYTES))
        except (CacheError, OSError) as error:
            self.problems.append(f"{shown(self._inner(path))} could not be read: {error}")
            return None
        self.problems += index.problems
        if index.form is not None:
            self.forms.add(index.form)
        elsewhere = sorted({above for row in index.rows if (above := self._elsewhere(row, folder))})
        if elsewhere:
            self.problems.append(
                f"{shown(self._inner(path))} names files under {shown(elsewhere[0])}, where it does not lie now: it "
                "was moved, and what opens those paths misses"
            )
        return index

    def _elsewhere(self, row: IndexRow, folder: str) -> str | None:
        """The folder that a row's absolute path says, if this is not the folder that the index lies in."""
        if row.compiler == _OLD_ADAPTOR or not row.path.startswith("/"):
            return None
        above = row.path.rpartition("/")[0]
        return None if above == str(self.tree.top / folder) else above

    def _named(self, folder: str, row: IndexRow, where: dict[str, str]) -> ForeignArtifact:
        facts: dict[str, Any] = {**where, "shape": row.shape, "piece_index": row.piece_index}
        if "/" in row.name or row.name in {"", ".", ".."}:
            problem = f"the index names {shown(row.name)}, which is no plain name"
            return ForeignArtifact(path=row.name, what="compiled_artifact", size_bytes=0, problems=(problem,), **facts)
        path = join(folder, row.name)
        if path not in self.tree.files and not self.tree.is_folder(path):
            return ForeignArtifact(
                path=self._inner(path), what="compiled_artifact", size_bytes=0, problems=(_MISSING,), **facts
            )
        found = self._found(path, row.cache_key, facts)
        said = artifact_name(row.name)
        if said is not None and said != (row.shape, row.piece_index):
            problems = (*found.problems, "its name says another shape or piece than the index does")
            return _changed(found, problems=problems)
        return found

    def _found(self, path: str, key: str | None, facts: dict[str, Any]) -> ForeignArtifact:
        file = self.tree.files.get(path)
        if file is None:
            return self._unpacked(path, facts)
        artifact, torch_key = binary_artifact(self.tree, file, key=key, top=self.top, **facts)
        if torch_key is not None:
            self._torch_keys.add(torch_key)
            if len(self._torch_keys) > 1:
                return _changed(artifact, problems=(*artifact.problems, "another torch wrote it than the others"))
        return artifact

    def _unpacked(self, path: str, facts: dict[str, Any]) -> ForeignArtifact:
        files = self.tree.under(path)
        problems = [f"{shown(file.path.removeprefix(f'{path}/'))} has zero bytes" for file in files if _is_torn(file)]
        if not any("/aotautograd/" in file.path for file in files):
            problems.append("it holds no graph of AOTAutograd, with which loading begins")
        pickles = sum(self._protocol(file) is not None for file in files)
        return ForeignArtifact(
            path=self._inner(path),
            what="unpacked_artifact",
            size_bytes=size_of(files),
            holds_pickle=pickles > 0,
            members=(f"{len(files)} files, {pickles} of them pickle",),
            problems=tuple(problems),
            **facts,
        )

    def _old(self, folder: str, row: IndexRow, where: dict[str, str]) -> ForeignArtifact:
        """An artifact of the adaptor "inductor": generated code, and a graph in torch's cache beside it."""
        parts = row.path.split("/")[-3:]
        tail = "/".join(parts)
        above = folder.rpartition("/")[0]
        cache = next((base for base in (above, folder) if self.tree.is_folder(join(base, "inductor_cache"))), above)
        code = self.tree.files.get(join(cache, tail)) if parts[0] == "inductor_cache" else None
        graph = self.tree.under(join(cache, f"inductor_cache/fxgraph/{row.name[1:3]}/{row.name}"))
        problems = []
        if code is None:
            problems.append("the index names its code and that is missing")
        if not graph:
            problems.append(f"the index names the compiled graph {shown(row.name)} and that is missing")
        problems += [f"{shown(file.name)} has zero bytes" for file in (code, *graph) if file and not file.size_bytes]
        files = [*graph, *([] if code is None else [code])]
        return ForeignArtifact(
            path=self._inner(join(cache, tail)),
            what="generated_code",
            size_bytes=size_of(files),
            shape=row.shape,
            piece_index=row.piece_index,
            holds_pickle=any(self._protocol(file) is not None for file in graph),
            members=(f"compiled graph {row.name}",),
            problems=tuple(problems),
            **where,
        )

    def _protocol(self, file: File) -> int | None:
        try:
            with self.tree.opened(file.path) as stream:
                return pickle_protocol(stream.read(2))
        except (CacheError, OSError):
            return None

    def _inner(self, path: str) -> str:
        return path.removeprefix(f"{self.top}/") if self.top else path


def _is_torn(file: File) -> bool:
    return file.size_bytes == 0 and not file.name.endswith(".lock")


def _changed(artifact: ForeignArtifact, **changes: Any) -> ForeignArtifact:
    return ForeignArtifact(**{**vars(artifact), **changes})
