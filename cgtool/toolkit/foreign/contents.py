"""Reads the contents of another system's artifact: kernels and text. Must not import torch.

Text is recognized by suffix, and native code describes itself. Any other file is probably a pickle, which is searched
for the text of modules that Inductor generated (`cgtool.store.compiled_code`). Nothing is unpickled, linked or run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

from cgtool.errors import CacheError
from cgtool.store.compiled_code import read_native
from cgtool.toolkit.contents import Contents, Source, contents_of, inductor_kernels
from cgtool.toolkit.foreign.formats import read_structure
from cgtool.toolkit.foreign.records import ForeignArtifact, ForeignEntry
from cgtool.toolkit.foreign.tree import File, Tree, display_text

_LANGUAGES = {
    ".py": "python",
    **dict.fromkeys((".cpp", ".h", ".hpp"), "cpp"),
    **dict.fromkeys((".json", ".best_config"), "json"),
    **dict.fromkeys((".ptx", ".amdgcn", ".llir", ".ttgir", ".ttir", ".source", ".spvasm", ".gluon"), "text"),
}
_ELF = b"\x7fELF"
_MAX_BYTES = 64 << 20
_MAX_TEXT_BYTES = 4 << 20
#: Maximum number of files that are opened in an artifact that is a folder.
_MAX_FILES = 64


def foreign_contents(entry: ForeignEntry, artifact: ForeignArtifact) -> Contents:
    """Return the contents of an artifact."""
    warnings: list[str] = []
    tree = Tree(entry.path)  # its warnings are reported by `inspect cache`
    if entry.kind == "mega_cache":
        parts = list(_member(tree, artifact, warnings))
        names: tuple[tuple[str, int], ...] = ()
    else:
        files = _files(tree, artifact)
        prefix = f"{artifact.path}/"
        names = tuple((file.path.removeprefix(prefix), file.size_bytes) for file in files) if len(files) > 1 else ()
        parts = list(_read(tree, files, warnings))
    return _merge(artifact, names, [_file_contents(name, data, warnings) for name, data in parts], warnings)


def _files(tree: Tree, artifact: ForeignArtifact) -> list[File]:
    """Return the artifact's file, or the files of its folder; a path outside of the entry is not in the tree."""
    if not tree.is_folder(""):  # the entry is a single file
        return list(tree.files.values())
    file = tree.files.get(artifact.path)
    return [file] if file is not None else tree.under(artifact.path) if tree.is_folder(artifact.path) else []


def _read(tree: Tree, files: Iterable[File], warnings: list[str]) -> Iterator[tuple[str, bytes]]:
    for number, file in enumerate(files):
        if number == _MAX_FILES:
            warnings.append(f"Only the first {_MAX_FILES} files were opened.")
            return
        if file.size_bytes > _MAX_BYTES:
            warnings.append(f"{display_text(file.name)} was not opened: it has {file.size_bytes} bytes.")
            continue
        try:
            yield file.name, tree.read(file.path, _MAX_BYTES)
        except (CacheError, OSError) as error:
            warnings.append(f"{display_text(file.name)} could not be read: {error}")


def _member(tree: Tree, artifact: ForeignArtifact, warnings: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the bytes of a member of a mega-cache."""
    try:
        with tree.open("") as stream:
            for member in read_structure(stream).members:
                if f"{member.kind}/{member.key}" == artifact.path and member.size_bytes <= _MAX_BYTES:
                    stream.seek(member.start)
                    yield member.key, stream.read(member.size_bytes)
                    return
    except (CacheError, OSError) as error:
        warnings.append(f"The artifact could not be read: {error}")


def _file_contents(name: str, data: bytes, warnings: list[str]) -> Contents:
    language = _LANGUAGES.get(PurePosixPath(name).suffix)
    if language is not None:
        if len(data) > _MAX_TEXT_BYTES:
            warnings.append(f"{display_text(name)} has {len(data)} bytes; only the first {_MAX_TEXT_BYTES} are shown.")
        text = data[:_MAX_TEXT_BYTES].decode("utf-8", "backslashreplace")
        kernels = inductor_kernels(text) if language == "python" else ()
        source = Source(language=language, text=text)
        return Contents(size_bytes=len(data), kernels=kernels, target={}, sources=(source,))
    if data.startswith(_ELF):
        native = read_native(data)
        target = {"architectures": [native.target]} if native.target else {}
        return Contents(size_bytes=len(data), kernels=native.kernels, target=target, compiler=native.compiler)
    return contents_of(data, "aot")


def _merge(
    artifact: ForeignArtifact, names: tuple[tuple[str, int], ...], parts: list[Contents], warnings: list[str]
) -> Contents:
    sources = dict.fromkeys((source.language, source.text) for part in parts for source in part.sources)
    return Contents(
        size_bytes=artifact.size_bytes,
        members=names,
        kernels=tuple({kernel.name: kernel for part in parts for kernel in part.kernels}.values()),
        target={name: value for part in parts for name, value in part.target.items()},
        compiler=next((part.compiler for part in parts if part.compiler), None),
        sources=tuple(Source(language=language, text=text) for language, text in sources),
        warnings=tuple(warnings),
    )
