"""The bytes of artifacts: what each says of its origin, and the `.pt2` packages of AOTInductor. Must not import torch.

An artifact says within its bytes which piece it was compiled from, and for which shape. A row of a manifest says so
too: where the two disagree, it leads to another's artifact, however its digests were redone. So only what agrees in
both shares a file. How the origin is put into the bytes, by kind::

    json     {"piece": identity, "shape": shape, "graph": the piece's graph}
    pt2      a member of the archive, see below
    others   a line before the compiler's bytes: {"piece": identity, "shape": shape}

A package is a zip archive in the layout of torch's PT2 archives, so that torch's own loader opens it too::

    piece/archive_format                                  "pt2"
    piece/archive_version                                 "0"
    piece/.data/version                                   "6": of the archive as torch writes it
    piece/extra/cgtool_origin.json                        what it was compiled from
    piece/data/aotinductor/model/model.wrapper.so         the native code, kernels of accelerators among it
    piece/data/aotinductor/model/model.wrapper.json       where it calls custom ops: which, and with what arguments
    piece/data/aotinductor/model/model.wrapper_metadata.json
    piece/data/aotinductor/model/<name>.cubin             kernels that are not within the native code

There is exactly one `.so`, its name and all others are plain, and there are no sources: torch's loader would compile
them. Members are stored without compression, in order, with one date, and nothing stands before, between or after
them: equal members give equal bytes.
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
        piece: The identity of the piece's graph, before it was specialised.
        shape: For which sizes.
    """

    piece: Digest
    shape: Shape


class UnmarkedError(ArtifactError):
    """An artifact does not say what it was compiled from."""


class _EagerArtifact(Origin, frozen=True, kw_only=True):
    """The artifact of a piece that runs as it stands."""

    graph: msgspec.Raw


def with_origin(data: bytes, kind: str, origin: Origin) -> bytes:
    """Return an artifact that says what it was compiled from."""
    if kind == KINDS[EAGER]:
        graph = msgspec.Raw(data)
        return msgspec.json.encode(_EagerArtifact(piece=origin.piece, shape=origin.shape, graph=graph), order="sorted")
    said = msgspec.json.encode(origin, order="sorted")
    return with_origin_member(data, said) if kind == KINDS[AOT_INDUCTOR] else said + b"\n" + data


def parted(data: bytes, kind: str) -> tuple[Origin, bytes]:
    """Return what an artifact was compiled from, and the bytes that its adaptor opens.

    Raises:
        UnmarkedError: It does not say.
    """
    try:
        if kind == KINDS[EAGER]:
            whole = decode(data, _EagerArtifact)
            return whole, bytes(whole.graph)
        if kind == KINDS[AOT_INDUCTOR]:
            return decode(origin_member(data), Origin), data
        said = data[: data.index(b"\n", 0, _MAX_LINE_BYTES)]
        return decode(said, Origin), data[len(said) + 1 :]
    except ValueError as error:
        message = f"An artifact does not say what it was compiled from ({error}). Warm again."
        raise UnmarkedError(message, actual=str(error)) from error


def code_of(data: bytes, row: Row, piece: str) -> bytes:
    """Return the bytes that the adaptor of a row opens, where the row is right in what it says of its artifact.

    Raises:
        ArtifactError: The artifact is of another adaptor, another piece or another shape.
    """
    kind = row.artifact.kind
    if kind != kind_of(row.adaptor):
        message = f"The artifact {row.artifact.file} is not of a kind that the adaptor {row.adaptor} opens. Warm again."
        raise ArtifactError(message, expected=kind_of(row.adaptor), actual=kind)
    origin, code = parted(data, kind)
    if (origin.piece, origin.shape) != (piece, row.shape):
        message = (
            f"The artifact {row.artifact.file} was compiled from another piece or for another shape than its row says "
            f"(piece {row.piece_index}, {shape_text(row.shape)}). Warm again."
        )
        said = [origin.piece, shape_text(origin.shape)]
        raise ArtifactError(message, expected=[piece, shape_text(row.shape)], actual=said)
    return code


def misplaced(manifest: Manifest, plan: Plan, folder: Path) -> Iterator[tuple[Row, ArtifactError]]:
    """Yield the rows that lead to artifacts of other pieces or shapes, as `code_of` finds them, and why.

    A row whose piece the plan lacks, or whose artifact cannot be read, is passed over.
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
                read[file] = _beginning(folder / file, row.artifact)
            code_of(read[file], row, piece)
        except ArtifactError as error:
            yield row, error
        except (OSError, CacheCorruptError):
            continue


def _beginning(path: Path, artifact: Artifact) -> bytes:
    """Return as much of an artifact as says what it was compiled from."""
    with open_file(path) as file:
        return file.read(artifact.size_bytes if artifact.kind == KINDS[EAGER] else _MAX_LINE_BYTES)


_ROOT = "piece/"
_FOLDER = _ROOT + "data/aotinductor/model/"
_STEM = "model.wrapper"
_HEAD = {_ROOT + "archive_format": b"pt2", _ROOT + "archive_version": b"0", _ROOT + ".data/version": b"6\n"}
_ORIGIN = _ROOT + "extra/cgtool_origin.json"
_KERNEL = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\.(cubin|fatbin|hsaco|spv)"
_OURS = {*_HEAD, _ORIGIN}
_DATE = (1980, 1, 1, 0, 0, 0)
_REMEDY = "Warm again."
#: Bytes of a zip archive beside names and contents: before a member, in the directory for it, at the archive's end.
_LOCAL_BYTES, _ENTRY_BYTES, _END_BYTES = 30, 46, 22
#: Where the member begins that says what a package was compiled from, and where in its header its size stands.
_ORIGIN_AT = sum(_LOCAL_BYTES + len(name) + len(body) for name, body in _HEAD.items())
_SIZE_AT = 22


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """The members of a package.

    Args:
        native: The shared library.
        metadata: What AOTInductor says of it: the type of device, the platform, the instruction set.
        extern: The JSON that says which custom ops it calls; None where it calls none.
        kernels: File name → bytes of a kernel that is not within the library.
        origin: What it was compiled from, in JSON; None for one that was compiled just now.
    """

    native: bytes
    metadata: Mapping[str, str]
    extern: bytes | None = None
    kernels: Mapping[str, bytes] = msgspec.field(default_factory=dict)
    origin: bytes | None = None

    def files(self, stem: str) -> dict[str, bytes]:
        """Return every member but the native code, by file name, as a loader wants them beside `stem` + ".so"."""
        files = {f"{stem}_metadata.json": _json(self.metadata), **self.kernels}
        return files if self.extern is None else {**files, f"{stem}.json": self.extern}


NATIVE_FILE = _STEM + ".so"
EXTERN_FILE = _STEM + ".json"
METADATA_FILE = _STEM + "_metadata.json"


def pack(package: Package) -> bytes:
    """Return the bytes of a package; equal packages give equal bytes.

    Raises:
        ArtifactError: A kernel's name is outside the grammar.
    """
    for name in package.kernels:
        _check_kernel(name)
    return _archive(package.files(_STEM), package.native, package.origin)


def archive_with_source(package: Package) -> bytes:
    """Return an archive for the loader of torch before 2.13, which names the metadata after a source.

    The source is empty, and is not compiled where native code is beside it. Such an archive is never stored.
    """
    return _archive({_STEM + ".cpp": b"", **package.files(_STEM)}, package.native)


def with_origin_member(data: bytes, origin: bytes) -> bytes:
    """Return a package with the member that says what it was compiled from.

    Raises:
        ArtifactError: `data` is no package.
    """
    return pack(replace(unpack(data, vouched=True), origin=origin))


def origin_member(data: bytes) -> bytes:
    """Return the member that says what a package was compiled from; it stands at one place in all packages.

    Raises:
        ValueError: There is no such member at that place.
    """
    start = _ORIGIN_AT + _LOCAL_BYTES + len(_ORIGIN)
    if data[start - len(_ORIGIN) : start] != _ORIGIN.encode():
        raise ValueError(f"a package lacks its member {_ORIGIN}")
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


def unpack(data: bytes, *, vouched: bool = False) -> Package:
    """Return the members of a package; where a digest vouched for its bytes, their checksums say nothing more.

    Raises:
        ArtifactError: It is no package, or holds a member that no package of ours has.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data), metadata_encoding="ascii") as archive:
            infos = archive.infolist()
            _check_members(infos)
            _check_layout(infos, len(data))
            members = {info.filename: _body(data, info, vouched=vouched) for info in infos}
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError, OSError, RuntimeError) as error:
        raise ArtifactError(f"A package is torn ({error}). {_REMEDY}", actual=str(error)) from error
    found = {name.removeprefix(_FOLDER): body for name, body in members.items() if name not in _OURS}
    if any(members.get(name) != body for name, body in _HEAD.items()):
        raise ArtifactError(f"A package is of a format that this cgtool does not know. {_REMEDY}")
    for name in (NATIVE_FILE, METADATA_FILE):
        if name not in found:
            raise ArtifactError(f"A package lacks its member {name}. {_REMEDY}", path=name)
    return Package(
        native=found.pop(NATIVE_FILE),
        metadata=_metadata(found.pop(METADATA_FILE)),
        extern=found.pop(EXTERN_FILE, None),
        origin=members.get(_ORIGIN),
        kernels={_check_kernel(name): body for name, body in found.items()},
    )


def _check_members(infos: list[zipfile.ZipInfo]) -> None:
    seen: set[str] = set()
    for info in infos:
        if info.filename in seen:
            raise ArtifactError(f"A package holds the member {info.filename!r} twice. {_REMEDY}", path=info.filename)
        seen.add(info.filename)
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            msg = f"A package holds the member {info.filename!r} compressed, which none of ours is. {_REMEDY}"
            raise ArtifactError(msg, path=info.filename)
        if info.filename not in _OURS and not info.filename.startswith(_FOLDER):
            msg = f"A package holds the member {info.filename!r}, which belongs to no package of a piece. {_REMEDY}"
            raise ArtifactError(msg, path=info.filename)


def _check_layout(infos: list[zipfile.ZipInfo], num_bytes: int) -> None:
    """Check that members lie one after another from the first byte on, and that the directory ends the archive."""
    at = 0
    for info in infos:
        if info.header_offset != at:
            break
        at += _LOCAL_BYTES + len(info.orig_filename.encode()) + info.file_size
    at += sum(_ENTRY_BYTES + len(info.orig_filename.encode()) for info in infos) + _END_BYTES
    if at != num_bytes:
        msg = f"A package holds bytes that belong to none of its members. {_REMEDY}"
        raise ArtifactError(msg, expected=at, actual=num_bytes)


def _body(data: bytes, info: zipfile.ZipInfo, *, vouched: bool) -> bytes:
    """Return a member's bytes; the archive was checked to hold members as they are, and nothing between them."""
    start = info.header_offset + _LOCAL_BYTES + len(info.orig_filename.encode())
    body = data[start : start + info.file_size]
    if not vouched and zlib.crc32(body) != info.CRC:
        raise zipfile.BadZipFile(f"bytes of the member {info.filename!r} differ from their checksum")
    return body


def _check_kernel(name: str) -> str:
    if not re.fullmatch(_KERNEL, name):
        msg = f"A package holds the member {name!r}, which is neither native code nor a kernel. {_REMEDY}"
        raise ArtifactError(msg, path=name)
    return name


def _metadata(data: bytes) -> dict[str, str]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"The metadata of a package are no JSON ({error}). {_REMEDY}") from error
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ArtifactError(f"The metadata of a package are not words by name. {_REMEDY}", actual=found)
    return found


def _json(value: Mapping[str, str]) -> bytes:
    return json.dumps(dict(sorted(value.items()))).encode()
