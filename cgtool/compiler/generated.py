"""Generated code for people to read: kept beside a rank's plan, and dumped with its graph and program on request.

    generated/<digest[:16]>/     in a rank's folder and in a dump, by the artifact's digest
        wrapper.cpp, kernel.cpp  written by AOTInductor
        module_0.py              written by Inductor's other adaptors
        autotuning.json          [{"op": name, "candidates": [{"name": str, "secs": float}...]}...], fastest first

A load never opens these files, and no digest covers them. Importing this module must not import Dynamo or Inductor.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from cgtool.compiler.adaptors.interface import CompilerInterface
from cgtool.plan.pieces import Json, PieceGraph, kind_of
from cgtool.store.artifacts import Origin, with_origin
from cgtool.store.compiled_code import generated_dir, generated_sources, generated_texts
from cgtool.store.files import read_bytes, write_atomic
from cgtool.store.layout import CODE_FILE, GRAPH_FILE, CacheLayout, RankName
from cgtool.store.records import Artifact, Manifest

#: Name → text.
Texts = Mapping[str, str]


def compile_piece(
    adaptor: CompilerInterface, graph: PieceGraph, origin: Origin, *, options: Mapping[str, Json], max_autotune: bool
) -> tuple[bytes, Artifact, Texts]:
    """Compile a piece, as `CompilerInterface.compile` does.

    Returns:
        The artifact's bytes, which include their origin; its record; and the generated code.
    """
    from cgtool.compiler import _torch  # imports sympy, which a hit does not need

    started = time.perf_counter()
    recording: Any = _torch.record_autotuning() if max_autotune and adaptor.compiles else nullcontext([])
    with recording as tried:
        piece = adaptor.compile(graph, options=options, max_autotune=max_autotune)
    texts = dict(piece.sources)
    if not texts:
        texts |= {f"module_{number}.py": text for number, text in enumerate(generated_sources(piece.artifact))}
    if tried:
        texts["autotuning.json"] = json.dumps(tried, indent=1)
    data = with_origin(piece.artifact, kind_of(adaptor.name), origin)
    secs = time.perf_counter() - started
    artifact = Artifact.of(
        data, kind=kind_of(adaptor.name), compile_secs=secs, kernels=piece.kernels, guards=piece.guards
    )
    return data, artifact, texts


def keep_generated(layout: CacheLayout, manifest: Manifest, written: Mapping[str, Texts]) -> None:
    """Store the generated code of a rank's artifacts; that of reused artifacts is copied from another entry.

    Args:
        layout: The cache.
        manifest: The rank's manifest.
        written: Artifact digest → its generated code, for artifacts that were compiled now.

    Raises:
        CacheError: A file cannot be written.
    """
    for artifact in _artifacts(manifest):
        folder = generated_dir(layout, manifest.name, artifact.digest)
        if not folder.is_dir():
            _write(folder, written.get(artifact.digest) or generated_texts(layout, artifact.digest))


def dump_traced(layout: CacheLayout, name: RankName, files: Mapping[str, bytes], folder: str) -> None:
    """Write a rank's graph and program into the user's dump folder, by entry, rank and prefix.

    Raises:
        CacheError: A file cannot be written.
    """
    for file in (GRAPH_FILE, CODE_FILE):
        write_atomic(_dump_dir(layout, name, folder) / file, files[file])


def dump_entry(layout: CacheLayout, manifest: Manifest, folder: str) -> None:
    """Write a rank's graph, program and generated code into the user's dump folder.

    Raises:
        CacheError: A file cannot be read or written.
    """
    read = {file: read_bytes(layout.rank_dir(manifest.name) / file) for file in (GRAPH_FILE, CODE_FILE)}
    target = _dump_dir(layout, manifest.name, folder)
    for file, data in read.items():
        if data is not None:
            write_atomic(target / file, data)
    for artifact in _artifacts(manifest):
        kept = generated_dir(layout, manifest.name, artifact.digest)
        _write(target / kept.parent.name / kept.name, generated_texts(layout, artifact.digest))


def _artifacts(manifest: Manifest) -> Iterable[Artifact]:
    return {row.artifact.digest: row.artifact for row in manifest.rows}.values()


def _write(folder: Path, texts: Texts) -> None:
    for name, text in texts.items():
        write_atomic(folder / name, text.encode())


def _dump_dir(layout: CacheLayout, name: RankName, folder: str) -> Path:
    return Path(folder).expanduser() / layout.rank_dir(name).relative_to(layout.base)
