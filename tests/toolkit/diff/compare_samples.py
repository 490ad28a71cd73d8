"""Entries that differ in one thing each, written without a compiler. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
from cache_maker import graph_of, manifest_of, put_row, steps_of

from cgtool.plan.grammar import digest_of
from cgtool.plan.pieces import Json, Node, PieceGraph, SymbolRange
from cgtool.plan.records import Guard, Input, Plan, Variant
from cgtool.plan.shapes import parse_shape
from cgtool.plan.writing import encode_plan
from cgtool.store.artifacts import Origin, with_origin
from cgtool.store.entry import EntryWriter
from cgtool.store.layout import CODE_FILE, GRAPH_FILE, PLAN_FILE, CacheLayout
from cgtool.store.records import Factor, Fallback, Key, Row, VariantCounts
from cgtool.toolkit.diff.entries import EntrySide

FACTORS: Mapping[str, Json] = {
    "config": {"level": 3, "adaptor": "eager"},
    "model": {"class": "toy:Toy"},
    "sources": {"toy": "a" * 64},
    "torch": {"version": "2.13.0", "with_cuda": None},
    "triton": None,
    "python": "cpython 3.11",
    "compiler": "(Debian) 12.2.0",
    "target": {"accelerators": [], "cpu": {"capability": "AVX512"}},
    "inductor_environment": {},
}
GUARDS = (
    Guard(source="self.layers.0.eps", kind="value", expected=["f", "1e-06"]),
    Guard(source="self.layers.1.eps", kind="value", expected=["f", "1e-06"]),
    Guard(source="self.mode", kind="type", expected="toy:Mode"),
    Guard(source="global:toy:Toy.forward", kind="code", expected="b" * 64),
)
GRAPH_TEXT = '''"""The computation graph."""

def forward(x):

    # ---- piece 0 ----
    # toy.py:12, in forward: y = x.sin()
    y = torch.sin(x)
    # toy.py:13, in forward: z = y + self.eps
    z = _operator.add(y, 1e-06)
    # helpers.py:4, in scale: return z * 2
    mul = _operator.mul(z, 2)
'''


def piece(target: str = "torch.sin", *, eps: str = "1e-06", more: bool = False) -> PieceGraph:
    """Return a piece of two operations, or of three if `more`."""
    nodes = [
        Node(kind="function", target=target, args=("%0",), kwargs={}),
        Node(kind="function", target="_operator.add", args=("%1", {"f": eps}), kwargs={}),
    ]
    if more:
        nodes.insert(1, Node(kind="method", target="abs", args=("%1",), kwargs={}))
        nodes[2] = Node(kind="function", target="_operator.add", args=("%2", {"f": eps}), kwargs={})
    return graph_of(nodes)


ATTENTION = piece("torch.ops.toy.attention")
HIDDEN = ATTENTION.inputs[0]


def variant(graphs: list[PieceGraph], **changes: object) -> Variant:
    """Return a variant of these pieces; `ATTENTION` is a splitting piece."""
    fields = {
        "name": "default",
        "fixed": {},
        "dims": {"rows": ("s0",)},
        "symbols": (SymbolRange(name="s0", min=2, max=None),),
        "relations": (),
        "inputs": (Input(source="arg:x", meta=HIDDEN),),
        "model_guards": GUARDS,
        "call_guards": (),
        "output": ["v", len(graphs)],
        **changes,
    }
    return Variant(steps=steps_of(graphs, ATTENTION), **fields)  # type: ignore[arg-type]


def plan_of(graphs: list[PieceGraph] | None = None, **changes: object) -> Plan:
    """Return a plan of one variant."""
    graphs = [piece(), ATTENTION, piece()] if graphs is None else graphs
    return Plan(
        method="forward",
        qualname="toy:Toy",
        variants=(variant(graphs, **changes),),
        graphs={graph.identity(): graph for graph in graphs},
    )


def row(to: EntryWriter, index: int, *, shape: str = "general", data: bytes = b"code", proved: bool = True) -> Row:
    """Store an artifact that was compiled from `piece()`, and return its row."""
    origin = Origin(piece=piece().identity(), shape=parse_shape(shape))
    data = with_origin(b'"' + data + b'"', "json", origin)
    return put_row(to, "json", data, piece=index, shape=shape, compile_secs=1.0, kernels=1, proved=proved)


def lay(
    root: Path,
    *,
    factors: Mapping[str, Json] | None = None,
    plan: Plan | None = None,
    shapes: tuple[str, ...] = ("general",),
    data: bytes = b"code",
    proved: bool = True,
    fallbacks: tuple[Fallback, ...] = (),
    graph_text: str | None = GRAPH_TEXT,
    model: str = "Toy",
    rank: int = 0,
    prefix: str = "backbone",
) -> EntrySide:
    """Publish an entry; its "guards" factor follows from its plan, as in a warm."""
    plan = plan or plan_of()
    guards = digest_of(msgspec.to_builtins([tuple(variant.model_guards) for variant in plan.variants]))
    values = {**FACTORS, **(factors or {}), "guards": guards}
    layout = CacheLayout(root=root)
    to = EntryWriter(layout, Key.of(Factor(name=n, value=v) for n, v in values.items()), rank=rank, prefix=prefix)
    steps = plan.variants[0].steps
    manifest = manifest_of(
        to.name,
        model=model,
        adaptor="eager",
        splitting_ops=("toy::attention",),
        variants=(VariantCounts(name="default", pieces=len(steps), splitting_pieces=1, unique_pieces=1),),
        rows=tuple(
            row(to, step.piece, shape=shape, data=data, proved=proved)
            for shape in shapes
            for step in steps
            if not step.splitting
        ),
        fallbacks=fallbacks,
    )
    files = {PLAN_FILE: encode_plan(plan)}
    if graph_text is not None:
        files |= {GRAPH_FILE: graph_text.encode(), CODE_FILE: b"# code\n"}
    to.publish(manifest, files)
    return EntrySide(layout, to.name.hash)
