"""The bytes of artifacts: their embedded origin, and the `.pt2` packages of AOTInductor. Must not import torch.

Each artifact records in its bytes which piece it was compiled from, and for which shape. A manifest row records the
same. If the two disagree, the row names the wrong artifact, even if the digests were recomputed to match. Artifacts
thus share a file only if their origins are equal. The origin is embedded by kind::

    json     {"piece": identity, "shape": shape, "graph": the piece's graph}
    pt2      a member of the archive, see below
    others   a line before the compiler's bytes: {"piece": identity, "shape": shape}

A package is a zip archive in the layout of torch's PT2 archives, so that torch's own loader can open it::

    piece/archive_format                                  "pt2"
    piece/archive_version                                 "0"
    piece/.data/version                                   "6": the archive version that torch writes
    piece/extra/cgtool_origin.json                        the origin
    piece/data/aotinductor/model/model.wrapper.so         the native code, including kernels of accelerators
    piece/data/aotinductor/model/model.wrapper.json       calls of custom ops and their arguments, if any
    piece/data/aotinductor/model/model.wrapper_metadata.json
    piece/data/aotinductor/model/<name>.cubin             kernels that are not part of the native code

There is exactly one `.so`, all names are plain, and there are no sources, because torch's loader would compile them.
Members are stored uncompressed, in order, with a fixed date, and with no bytes before, between or after them, so that
equal members give equal bytes.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from cgtool.errors import ArtifactError, CacheCorruptError
from cgtool.plan.grammar import Digest, Record, decode
from cgtool.plan.pieces import AOT_INDUCTOR, EAGER, KINDS, kind_of
from cgtool.plan.records import Plan
from cgtool.plan.shapes import Shape, shape_text
from cgtool.store.files import open_file
from cgtool.store.records import Artifact, Manifest, Row

_MAX_LINE_BYTES = 2**16


class Origin(Record, frozen=True, kw_only=True):
    """What an artifact was compiled from.

    Args:
        piece: The identity of the piece's graph before specialization.
        shape: The sizes that the artifact serves.
    """

    piece: Digest
    shape: Shape


class UnmarkedError(ArtifactError):
    """An artifact contains no valid origin."""


class _EagerArtifact(Origin, frozen=True, kw_only=True):
    """The artifact of a piece that runs eagerly."""

    graph: msgspec.Raw


def with_origin(data: bytes, kind: str, origin: Origin) -> bytes:
    """Return the bytes of an artifact with its origin embedded."""
    if kind == KINDS[EAGER]:
        graph = msgspec.Raw(data)
        return msgspec.json.encode(_EagerArtifact(piece=origin.piece, shape=origin.shape, graph=graph), order="sorted")
    encoded = msgspec.json.encode(origin, order="sorted")
    return with_origin_member(data, encoded) if kind == KINDS[AOT_INDUCTOR] else encoded + b"\n" + data


def split_origin(data: bytes, kind: str) -> tuple[Origin, bytes]:
    """Return an artifact's origin, and the bytes that its adaptor opens.

    Raises:
        UnmarkedError: The artifact contains no valid origin.
    """
    try:
        if kind == KINDS[EAGER]:
            artifact = decode(data, _EagerArtifact)
            return artifact, bytes(artifact.graph)
        if kind == KINDS[AOT_INDUCTOR]:
            return decode(origin_member(data), Origin), data
        line = data[: data.index(b"\n", 0, _MAX_LINE_BYTES)]
        return decode(line, Origin), data[len(line) + 1 :]
    except ValueError as error:
        message = f"An artifact does not record what it was compiled from ({error}). Warm again."
        raise UnmarkedError(message, actual=str(error)) from error


def code_of(data: bytes, row: Row, piece: str) -> bytes:
    """Return the bytes that the adaptor of a row opens, after checking the artifact's origin against the row.

    Raises:
        ArtifactError: The artifact belongs to another adaptor, piece or shape.
    """
    kind = row.artifact.kind
    if kind != kind_of(row.adaptor):
        message = f"The adaptor {row.adaptor} cannot open artifacts of the kind of {row.artifact.file}. Warm again."
        raise ArtifactError(message, expected=kind_of(row.adaptor), actual=kind)
    origin, code = split_origin(data, kind)
    if (origin.piece, origin.shape) != (piece, row.shape):
        message = (
            f"The artifact {row.artifact.file} was compiled from another piece or for another shape than its row "
            f"states (piece {row.piece_index}, {shape_text(row.shape)}). Warm again."
        )
        actual = [origin.piece, shape_text(origin.shape)]
        raise ArtifactError(message, expected=[piece, shape_text(row.shape)], actual=actual)
    return code


def misplaced(manifest: Manifest, plan: Plan, folder: Path) -> Iterator[tuple[Row, ArtifactError]]:
    """Yield the rows whose artifacts belong to other pieces or shapes according to `code_of`, with its error.

    Rows whose piece is not in the plan, or whose artifact cannot be read, are skipped.
    """
    steps = [{step.piece: step.graph for step in variant.steps} for variant in plan.variants]
    read: dict[str, bytes] = {}
    for row in manifest.rows:
        piece = steps[row.variant].get(row.piece_index) if row.variant < len(steps) else None
        file = row.artifact.file
        if piece is None:
            continue
        try:
            if file not in read:
                read[file] = _read_header(folder / file, row.artifact)
            code_of(read[file], row, piece)
        except ArtifactError as error:
            yield row, error
        except (OSError, CacheCorruptError):
            continue


def _read_header(path: Path, artifact: Artifact) -> bytes:
    """Return the beginning of an artifact, up to and including its origin."""
    with open_file(path) as file:
        return file.read(artifact.size_bytes if artifact.kind == KINDS[EAGER] else _MAX_LINE_BYTES)


_ROOT = "piece/"
_FOLDER = _ROOT + "data/aotinductor/model/"
_STEM = "model.wrapper"
_HEAD = {_ROOT + "archive_format": b"pt2", _ROOT + "archive_version": b"0", _ROOT + ".data/version": b"6\n"}
_ORIGIN = _ROOT + "extra/cgtool_origin.json"
_KERNEL = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\.(cubin|fatbin|hsaco|spv)"
_FIXED_MEMBERS = {*_HEAD, _ORIGIN}
_DATE = (1980, 1, 1, 0, 0, 0)
_REMEDY = "Warm again."
#: Sizes in a zip archive, without names: a local file header, a central directory entry, the end of central directory.
_LOCAL_BYTES, _ENTRY_BYTES, _END_BYTES = 30, 46, 22
#: The offset of the origin's local file header in a package, and of the size within that header.
_ORIGIN_AT = sum(_LOCAL_BYTES + len(name) + len(body) for name, body in _HEAD.items())
_SIZE_AT = 22


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """The members of a package.

    Args:
        native: The shared library.
        metadata: AOTInductor's description: the type of device, the platform, the instruction set.
        extern: JSON that describes its calls of custom ops; None if there are none.
        kernels: Kernels that are not part of the library, by file name.
        origin: Its origin in JSON; None for a newly compiled package.
    """

    native: bytes
    metadata: Mapping[str, str]
    extern: bytes | None = None
    kernels: Mapping[str, bytes] = msgspec.field(default_factory=dict)
    origin: bytes | None = None

    def files(self, stem: str) -> dict[str, bytes]:
        """Return all members except the native code, by the names that a loader expects beside `stem` + ".so"."""
        metadata = json.dumps(dict(sorted(self.metadata.items()))).encode()
        files = {f"{stem}_metadata.json": metadata, **self.kernels}
        return files if self.extern is None else {**files, f"{stem}.json": self.extern}


NATIVE_FILE = _STEM + ".so"
EXTERN_FILE = _STEM + ".json"
METADATA_FILE = _STEM + "_metadata.json"


def pack(package: Package) -> bytes:
    """Return the bytes of a package; equal packages give equal bytes.

    Raises:
        ArtifactError: A kernel's name does not match the grammar.
    """
    for name in package.kernels:
        _check_kernel(name)
    return _archive(package.files(_STEM), package.native, package.origin)


def archive_with_source(package: Package) -> bytes:
    """Return an archive for the loader of torch before 2.13, which finds the metadata by the name of a source file.

    The source is empty, and the loader does not compile it if the archive contains native code. Such an archive is
    never stored.
    """
    return _archive({_STEM + ".cpp": b"", **package.files(_STEM)}, package.native)


def with_origin_member(data: bytes, origin: bytes) -> bytes:
    """Return a package with the member that records its origin.

    Raises:
        ArtifactError: `data` is not a package.
    """
    return pack(replace(unpack(data, verified=True), origin=origin))


def origin_member(data: bytes) -> bytes:
    """Return the origin member of a package, which is at a fixed offset; ValueError if it is missing."""
    start = _ORIGIN_AT + _LOCAL_BYTES + len(_ORIGIN)
    if data[start - len(_ORIGIN) : start] != _ORIGIN.encode():
        raise ValueError(f"the package has no member {_ORIGIN}")
    size = int.from_bytes(data[_ORIGIN_AT + _SIZE_AT : _ORIGIN_AT + _SIZE_AT + 4], "little")
    return data[start : start + size]


def _archive(files: Mapping[str, bytes], native: bytes, origin: bytes | None = None) -> bytes:
    members = {**_HEAD} if origin is None else {**_HEAD, _ORIGIN: origin}
    members.update((_FOLDER + name, data) for name, data in sorted(files.items()))
    members[_FOLDER + NATIVE_FILE] = native
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name, date_time=_DATE), data)
    return out.getvalue()


def unpack(data: bytes, *, verified: bool = False) -> Package:
    """Return the members of a package; `verified` bytes matched a digest, so that CRC checks are skipped.

    Raises:
        ArtifactError: `data` is not a package, or contains a member that cgtool does not write.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data), metadata_encoding="ascii") as archive:
            infos = archive.infolist()
            _check_members(infos)
            _check_layout(infos, len(data))
            members = {info.filename: _body(data, info, verified=verified) for info in infos}
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError, OSError, RuntimeError) as error:
        raise ArtifactError(f"A package is corrupt ({error}). {_REMEDY}", actual=str(error)) from error
    files = {name.removeprefix(_FOLDER): body for name, body in members.items() if name not in _FIXED_MEMBERS}
    if any(members.get(name) != body for name, body in _HEAD.items()):
        raise ArtifactError(f"A package has a format that this cgtool does not know. {_REMEDY}")
    for name in (NATIVE_FILE, METADATA_FILE):
        if name not in files:
            raise ArtifactError(f"A package has no member {name}. {_REMEDY}", path=name)
    return Package(
        native=files.pop(NATIVE_FILE),
        metadata=_metadata(files.pop(METADATA_FILE)),
        extern=files.pop(EXTERN_FILE, None),
        origin=members.get(_ORIGIN),
        kernels={_check_kernel(name): body for name, body in files.items()},
    )


def _check_members(infos: list[zipfile.ZipInfo]) -> None:
    seen: set[str] = set()
    for info in infos:
        if info.filename in seen:
            raise ArtifactError(f"A package contains the member {info.filename!r} twice. {_REMEDY}", path=info.filename)
        seen.add(info.filename)
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            msg = f"A package contains the compressed member {info.filename!r}; cgtool compresses none. {_REMEDY}"
            raise ArtifactError(msg, path=info.filename)
        if info.filename not in _FIXED_MEMBERS and not info.filename.startswith(_FOLDER):
            msg = f"A package contains the unexpected member {info.filename!r}. {_REMEDY}"
            raise ArtifactError(msg, path=info.filename)


def _check_layout(infos: list[zipfile.ZipInfo], num_bytes: int) -> None:
    """Check that the members are contiguous from the first byte on, and that the directory ends the archive."""
    at = 0
    for info in infos:
        if info.header_offset != at:
            break
        at += _LOCAL_BYTES + len(info.orig_filename.encode()) + info.file_size
    at += sum(_ENTRY_BYTES + len(info.orig_filename.encode()) for info in infos) + _END_BYTES
    if at != num_bytes:
        msg = f"A package contains bytes that belong to none of its members. {_REMEDY}"
        raise ArtifactError(msg, expected=at, actual=num_bytes)


def _body(data: bytes, info: zipfile.ZipInfo, *, verified: bool) -> bytes:
    """Return a member's bytes from an archive that passed `_check_members` and `_check_layout`."""
    start = info.header_offset + _LOCAL_BYTES + len(info.orig_filename.encode())
    body = data[start : start + info.file_size]
    if not verified and zlib.crc32(body) != info.CRC:
        raise zipfile.BadZipFile(f"the member {info.filename!r} does not match its checksum")
    return body


def _check_kernel(name: str) -> str:
    if not re.fullmatch(_KERNEL, name):
        msg = f"A package contains the member {name!r}, which is neither native code nor a kernel. {_REMEDY}"
        raise ArtifactError(msg, path=name)
    return name


def _metadata(data: bytes) -> dict[str, str]:
    try:
        metadata = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"The metadata of a package is not JSON ({error}). {_REMEDY}") from error
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ArtifactError(f"The metadata of a package does not map names to strings. {_REMEDY}", actual=metadata)
    return metadata
