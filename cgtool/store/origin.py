"""What an artifact says of itself, within its bytes: which piece it was compiled from, and for which shape.

A row of a manifest says so too. Where the two disagree, the row leads to another's artifact, however its digests were
redone. So only what agrees in both shares a file. Must not import torch. How the word is put into the bytes, by kind::

    json     {"piece": identity, "shape": shape, "graph": the piece's graph}
    pt2      a member of the archive, see `cgtool.store.packages`
    others   a line before the compiler's bytes: {"piece": identity, "shape": shape}
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from cgtool.adaptor_registry import KINDS, kind_of
from cgtool.errors import ArtifactError
from cgtool.plan.grammar import Digest, Record, decode
from cgtool.plan.pieces import AOT_INDUCTOR, EAGER
from cgtool.plan.records import Plan
from cgtool.plan.shapes import Shape, shape_text
from cgtool.store.packages import origin_member, with_origin_member
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
    """Return an artifact that says what it was compiled from.

    Args:
        data: What the adaptor compiled.
        kind: The kind of the adaptor's artifacts.
        origin: What it was compiled from.
    """
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

    Args:
        data: The artifact's bytes, whose digest was checked.
        row: The row that leads to it.
        piece: The identity of the row's piece.

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

    Args:
        manifest: Whose rows; one whose piece the plan lacks, or whose artifact cannot be read, is passed over.
        plan: Its plan.
        folder: Where the artifacts lie.
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
        except OSError:
            continue


def _beginning(path: Path, artifact: Artifact) -> bytes:
    """Return as much of an artifact as says what it was compiled from."""
    with path.open("rb") as file:
        return file.read(artifact.size_bytes if artifact.kind == KINDS[EAGER] else _MAX_LINE_BYTES)
