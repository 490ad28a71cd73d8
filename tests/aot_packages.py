"""Packages of test pieces: several pieces compiled as one, each package compiled once for all tests and sessions.

Every compile with AOTInductor compiles many C++ headers, so several pieces share a package. Packages are cached beside
torch's own caches, keyed by the files of cgtool that determine their bytes.
"""

from __future__ import annotations

import itertools
import os
import re
import warnings
from pathlib import Path

from piece_cases import Case

from cgtool.compiler.adaptors.interface import get_adaptor
from cgtool.plan.grammar import digest_of, sha256_hex
from cgtool.plan.pieces import Node, PieceGraph, SymbolRange, TensorMeta
from cgtool.store.lock import file_lock

_REPO = Path(__file__).resolve().parents[1]
#: The files that determine the bytes of a package, besides torch and the compiler.
_SOURCES = (
    "cgtool/compiler/_torch.py",
    "cgtool/compiler/adaptors/_torch.py",
    "cgtool/compiler/adaptors/aot_inductor.py",
    "cgtool/compiler/adaptors/inductor.py",
    "cgtool/compiler/fx_piece.py",
    "cgtool/compiler/sizes.py",
    "cgtool/compiler/options.py",
    "cgtool/store/artifacts.py",
    "tests/piece_ops.py",
)


def package_of(piece: PieceGraph) -> bytes:
    """The bytes of a piece's package, compiled unless an earlier test compiled it; it has no guards."""
    compiler = get_adaptor("aot_inductor")
    sources = [sha256_hex((_REPO / name).read_bytes()) for name in _SOURCES]
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "cgtool-packages"
    file = folder / digest_of([piece.identity(), compiler.compute_hash({}), sources])
    with file_lock(file.with_suffix(".lock")):
        if not file.exists():
            with warnings.catch_warnings(action="ignore"):  # as a warm does
                compiled = compiler.compile(piece, options={})
            assert compiled.guards == ()
            unfinished = file.with_suffix(".new")
            unfinished.write_bytes(compiled.artifact)
            unfinished.rename(file)
    return file.read_bytes()


def side_by_side(cases: list[Case]) -> Case:
    """A piece that combines all `cases`."""
    fresh = itertools.count()
    symbols = [{symbol.name: f"s{next(fresh)}" for symbol in case.piece.symbols} for case in cases]
    starts = list(itertools.accumulate((len(case.piece.inputs) for case in cases), initial=0))
    nodes = list(itertools.accumulate((len(case.piece.nodes) for case in cases), initial=starts[-1]))
    moved = [
        _moved(case.piece, names, at, node_at)
        for case, names, at, node_at in zip(cases, symbols, starts, nodes, strict=False)
    ]
    sizes = tuple(
        {
            names[symbol]: size
            for case, names in zip(cases, symbols, strict=True)
            for symbol, size in case.sizes[min(n, len(case.sizes) - 1)].items()
        }
        for n in range(max(len(case.sizes) for case in cases))
    )
    joined = {
        name: tuple(itertools.chain.from_iterable(getattr(piece, name) for piece in moved))
        for name in ("symbols", "facts", "inputs", "aliases", "nodes", "outputs", "results")
    }
    tolerances = (
        *(case.tolerance for case in cases for _ in case.piece.outputs),
        *(case.tolerance for case in cases for _ in case.piece.inputs),
    )
    return Case(piece=PieceGraph(**joined, ops={}), sizes=sizes, tolerances=tolerances)


def _moved(piece: PieceGraph, names: dict[str, str], start: int, first_node: int) -> PieceGraph:
    """A piece with its symbols renamed and its inputs and nodes renumbered."""

    def text(dim):
        return dim if isinstance(dim, int) else re.sub(r"\bs\d+\b", lambda found: names[found[0]], dim)

    def ref(value):
        if isinstance(value, str) and value.startswith("%"):
            number = int(value[1:])
            inside = number - len(piece.inputs)
            return f"%{start + number if inside < 0 else first_node + inside}"
        if isinstance(value, list):
            return [ref(item) for item in value]
        if isinstance(value, dict) and not {"s", "const"} & set(value):
            return {key: ref(item) for key, item in value.items()}
        return value

    def meta(found):
        return TensorMeta(
            dtype=found.dtype,
            shape=tuple(map(text, found.shape)),
            stride=tuple(map(text, found.stride)),
            device=found.device,
        )

    return PieceGraph(
        symbols=tuple(SymbolRange(name=names[s.name], min=s.min, max=s.max) for s in piece.symbols),
        facts=tuple(map(text, piece.facts)),
        inputs=tuple(map(meta, piece.inputs)),
        aliases=tuple(tuple(start + position for position in group) for group in piece.aliases),
        nodes=tuple(
            Node(kind=n.kind, target=n.target, args=tuple(ref(list(n.args))), kwargs=ref(n.kwargs)) for n in piece.nodes
        ),
        outputs=tuple(map(ref, piece.outputs)),
        results=tuple(map(meta, piece.results)),
        ops={},
    )
