"""Creates caches without compiling: single entries, and large caches in seconds. Must not import torch.

`lay_entry` publishes one entry of valid packages, `lay_decoder` one of two variants. `make_cache` creates any number of
entries as `UnitStore` and `EntryWriter` would, and is quick because it does not flush to disk. Each of its entries is a
decoder of `layers` layers, split at attention, with artifacts for the general shape and for sizes, each a unit that is
linked into the entry.
"""

from __future__ import annotations

import json
import os
import random
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from cgtool.plan.grammar import digest_of, sha256_hex
from cgtool.plan.pieces import Node, PieceGraph, SymbolRange, TensorMeta
from cgtool.plan.records import Plan, Step, Variant
from cgtool.plan.shapes import Shape, parse_shape, shape_text
from cgtool.plan.writing import encode_plan
from cgtool.store.artifacts import Origin, Package, origin_member, pack, with_origin
from cgtool.store.entry import EntryWriter
from cgtool.store.files import ensure_root, seal
from cgtool.store.layout import CODE_FILE, GRAPH_FILE, PLAN_FILE, UNIT_FILE, CacheLayout, RankName
from cgtool.store.records import Artifact, Factor, FileRecord, Key, Manifest, Row, Unit, VariantCounts, timestamp

MODELS = ("Llama-3.1-8B", "Qwen3-4B", "Gemma-3-12B", "Mixtral-8x7B", "GPT-2")
ADAPTORS = {"pt2": "aot_inductor", "json": "eager", "aot": "inductor_standalone", "mega": "inductor"}
LOOKUP = "cd" * 32
ADAPTOR, KIND = "aot_inductor", "pt2"
DAY_SECS = 86400.0
#: The number of unique pieces of an entry: 3 for a decoder, else a divisor of the number of its artifacts.
_UNIQUE = (3, 5, 4, 2, 1)


def lay_entry(
    root: Path,
    *,
    seed: int = 0,
    model: str = "Toy",
    rank: int = 0,
    prefix: str = "backbone",
    kind: str = "pt2",
    shapes: tuple[str, ...] = ("general", "n=8"),
    say: str = "",
    native_bytes: int = 2000,
    factors: Mapping[str, object] | None = None,
) -> str:
    """Publish an entry of three pieces, the middle one splitting, and return its hash.

    Args:
        seed: Changes the hash.
        say: Changes the plan, but not the hash.
        native_bytes: The size of each package's native code.
        factors: Additional factors of the key.
    """
    key = Key.of([Factor(name="model", value=seed), *(Factor(name=n, value=v) for n, v in (factors or {}).items())])
    writer = EntryWriter(CacheLayout(root=root), key, rank=rank, prefix=prefix)
    rows = tuple(
        _row(writer, kind=kind, shape=shape, piece=piece, data=f"{seed} {rank}", native_bytes=native_bytes)
        for shape in shapes
        for piece in (0, 2)
    )
    manifest = manifest_of(
        writer.name,
        model=model,
        adaptor=ADAPTORS[kind],
        splitting_ops=("ns::attn",),
        variants=(VariantCounts(name="default", pieces=3, splitting_pieces=1, unique_pieces=2),),
        rows=rows,
        lookup=(LOOKUP,),
        created="2026-01-31T12:00:00.123Z",
    )
    files = {
        PLAN_FILE: encode_plan(_plan(_TOY, splitting=_TOY[1], qualname="toy:Toy", say=say)),
        GRAPH_FILE: b"# the graph\n",
        CODE_FILE: b"# the code\n",
    }
    writer.publish(manifest, files)
    return key.hash


def manifest_of(name: RankName, **fields: Any) -> Manifest:
    """Return the manifest of a rank at level 3."""
    return Manifest(hash=name.hash, rank=name.rank, prefix=name.prefix, level=3, **fields)


def lay_decoder(
    root: Path, *, model: str = "TinyModel", seed: int = 0, prefix: str = "backbone", rank: int = 0, marked: bool = True
) -> str:
    """Publish an entry of five pieces, two of them splitting and three unique ones compiled; return its hash.

    Args:
        seed: Changes the hash.
        marked: Whether its artifacts name the unit that they were compiled as.
    """
    key = Key.of([Factor(name="model", value=seed)])
    writer = EntryWriter(CacheLayout(root=root), key, rank=rank, prefix=prefix)
    targets = ("torch.sin", "torch.cos", "torch.tan")
    first, middle, last = (_graph(target, 64 + seed, sized=True) for target in targets)
    attention = _graph("torch.ops.toy.attention", 64 + seed, sized=True)
    pieces = [first, attention, middle, attention, last]
    fixed = {"prefill": {}, "decode": {"num_tokens": 1}}
    rows = []
    for index in (0, 2, 4):
        data = f"artifact {index} {seed}".encode() * 100
        data = with_origin(data, "aot", Origin(piece=pieces[index].identity(), shape={})) if marked else data
        rows.append(put_row(writer, "aot", data, piece=index, compile_secs=1.25, kernels=1))
    manifest = manifest_of(
        writer.name,
        model=model,
        adaptor="inductor_standalone",
        splitting_ops=("toy.attention",),
        variants=tuple(
            VariantCounts(name=name, pieces=5, splitting_pieces=2, unique_pieces=3, fixed=dims)
            for name, dims in fixed.items()
        ),
        rows=tuple(rows),
    )
    plan = _plan(pieces, splitting=attention, qualname="tiny:TinyModel", fixed=fixed)
    writer.publish(manifest, {PLAN_FILE: encode_plan(plan), GRAPH_FILE: b"# graph\n", CODE_FILE: b"# code\n"})
    return key.hash


def package(text: str = "", *, native_bytes: int = 2000) -> bytes:
    """A package that is valid except that no loader can open it."""
    native = b"\x7fELF" + text.encode()
    return pack(Package(native=native.ljust(native_bytes, b"\x90"), metadata={"AOTI_DEVICE_KEY": "cpu"}))


def _row(writer: EntryWriter, *, kind: str, shape: str, piece: int, data: str, native_bytes: int) -> Row:
    text = f"{data} {shape} {piece}"
    body = package(text, native_bytes=native_bytes) if kind == "pt2" else json.dumps(text).encode()
    origin = Origin(piece=_TOY[piece].identity(), shape=parse_shape(shape))
    body = with_origin(body, kind, origin)
    return put_row(writer, kind, body, piece=piece, shape=shape, compile_secs=1.5, kernels=2)


def put_row(writer: EntryWriter, kind: str, data: bytes, *, piece: int, shape: str = "general", **artifact: Any) -> Row:
    """Store an artifact and return its row."""
    record = Artifact(digest=writer.objects.put(data, kind), kind=kind, size_bytes=len(data), **artifact)
    return Row(variant=0, shape=parse_shape(shape), piece_index=piece, adaptor=ADAPTORS[kind], artifact=record)


def tree(root: Path) -> dict[str, tuple[int, bytes]]:
    """The permissions and content of every file below a folder, by name."""
    found: dict[str, tuple[int, bytes]] = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        content = b"" if not stat.S_ISREG(status.st_mode) else path.read_bytes()
        found[str(path.relative_to(root))] = (status.st_mode, content)
    return found


def make_cache(
    root: Path,
    *,
    entries: int,
    artifacts_per_entry: int,
    artifact_bytes: int = 512,
    seed: int = 0,
    layers: int = 4,
    ranks: int = 1,
    shared: int = 0,
    now: float | None = None,
    library: bytes = b"",
) -> tuple[RankName, ...]:
    """Create a cache and return the names of its ranks, the newest entry last.

    Args:
        root: The cache root; existing entries stay.
        entries: The number of entries, which cycle through `MODELS`.
        artifacts_per_entry: The number of different artifacts of each entry.
        artifact_bytes: The size of each artifact, or of its native code.
        seed: Changes keys, names and bytes.
        layers: The number of layers of each model, which has one more compiled piece.
        ranks: The number of ranks of each entry, which share all artifacts.
        shared: The number of artifacts that an entry shares with the previous one.
        now: The current time: entry i of n was created n - i days ago; every third was never used, and the others were
            used i % 7 + 1 times, the last time half a day after their creation.
        library: Native code; each artifact is a package with a different part of it. Without it, artifacts are random
            bytes, which is enough unless they are opened, as import and load do. Each artifact names its unit, so it
            has at least half a kilobyte.
    """
    maker = _Maker(CacheLayout(root=root), artifact_bytes=artifact_bytes, seed=seed, library=library)
    at = time.time() if now is None else now
    names: list[RankName] = []
    before: list[_Unit] = []
    for number in range(entries):
        kept = before[:shared]
        units = [*kept, *maker.units(number, range(len(kept), artifacts_per_entry), artifacts_per_entry)]
        created = at - DAY_SECS * (entries - number)
        made = maker.entry(number, units, layers=layers, ranks=ranks, created=created)
        if number % 3:
            for name in made:
                maker.used(name, hits=number % 7 + 1, last=created + DAY_SECS / 2)
        names += made
        before = units
    return tuple(names)


@dataclass(frozen=True, kw_only=True)
class _Unit:
    record: Artifact
    path: str


class _Maker:
    def __init__(self, layout: CacheLayout, *, artifact_bytes: int, seed: int, library: bytes) -> None:
        self.layout = layout
        self.artifact_bytes = artifact_bytes
        self.seed = seed
        self.library = library
        self.random = random.Random(seed)
        self.plans: dict[int, bytes] = {}
        self.heads: dict[tuple[str, str], bytes] = {}
        ensure_root(layout.root)
        for folder in ("lookup/indexed", "state/used", "state/locks", "state/leases"):
            (layout.base / folder).mkdir(parents=True, exist_ok=True)

    def units(self, entry: int, numbers: range, count: int) -> Iterator[_Unit]:
        for number in numbers:
            data = self._bytes(_origin(number, _num_unique(count)))
            key = digest_of(["unit", self.seed, entry, number])
            folder = str(self.layout.unit_dir(key))
            record = Artifact(
                digest=sha256_hex(data),
                kind=KIND,
                size_bytes=len(data),
                compile_secs=round(2 + self.random.random() * 4, 3),
                kernels=1 + number % 5,
                proved=True,
            )
            Path(folder).mkdir(parents=True)
            unit = _Unit(record=record, path=f"{folder}/{record.file}")
            _write(unit.path, data, mode=0o444)
            _write(f"{folder}/{UNIT_FILE}", seal(Unit(key=key, artifact=record)))
            _write(f"{folder}/lock", b"")
            yield unit

    def entry(self, number: int, units: list[_Unit], *, layers: int, ranks: int, created: float) -> list[RankName]:
        model = MODELS[number % len(MODELS)]
        unique = _num_unique(len(units))
        layers = max(layers, unique - 1)
        key = Key.of(
            [
                Factor(name="model", value={"class": f"models:{model}"}),
                Factor(name="config", value={"adaptor": ADAPTOR, "level": 3}),
                Factor(name="sources", value={"models": digest_of([self.seed, number])}),
                Factor(name="torch", value={"version": "2.13.0"}),
            ]
        )
        folder = self.layout.entry_dir(key.hash)
        (folder / "artifacts").mkdir(parents=True)
        _write(f"{folder}/key.json", key.to_bytes())
        for unit in units:
            os.link(unit.path, f"{folder}/artifacts/{unit.record.file}")
        manifest = manifest_of(
            RankName(hash=key.hash, rank=0, prefix="backbone"),
            model=model,
            adaptor=ADAPTOR,
            splitting_ops=("toy::attention",),
            variants=(
                VariantCounts(name="default", pieces=2 * layers + 1, splitting_pieces=layers, unique_pieces=unique),
            ),
            rows=tuple(_rows(units, unique, layers)),
            lookup=(digest_of(["facts", model]),),
            created=timestamp(created),
        )
        return [self._rank(manifest, rank, layers, unique) for rank in range(ranks)]

    def used(self, name: RankName, *, hits: int, last: float) -> None:
        path = self.layout.used_file(name)
        _write(str(path), b"." * hits)
        os.utime(path, (last, last))

    def _rank(self, manifest: Manifest, rank: int, layers: int, unique: int) -> RankName:
        if layers not in self.plans:
            self.plans[layers] = encode_plan(_decoder(layers, unique))
        files = {PLAN_FILE: self.plans[layers], GRAPH_FILE: b"# the graph\n", CODE_FILE: b"# the code\n"}
        name = RankName(hash=manifest.hash, rank=rank, prefix=manifest.prefix)
        folder = self.layout.rank_dir(name)
        folder.mkdir(parents=True)
        for file, data in files.items():
            _write(f"{folder}/{file}", data)
        named = {file: FileRecord(sha256=sha256_hex(data), size_bytes=len(data)) for file, data in files.items()}
        _write(f"{folder}/manifest.json", replace(manifest, rank=rank, files=named).to_bytes())
        for digest in manifest.lookup:
            (self.layout.lookup_dir / digest).mkdir(exist_ok=True)
            (self.layout.lookup_dir / digest / name.hash).touch()
        _write(str(self.layout.lookup_dir / "indexed" / name.flat), b"")
        _write(str(self.layout.entry_lock(name)), b"")
        (self.layout.state_dir / "leases" / name.hash).touch()
        return name

    def _bytes(self, origin: Origin) -> bytes:
        if self.library:
            start = self.random.randrange(len(self.library) - self.artifact_bytes)
            native = b"\x7fELF" + self.library[start : start + self.artifact_bytes - 4]
            return with_origin(pack(Package(native=native, metadata={"AOTI_DEVICE_KEY": "cpu"})), KIND, origin)
        head = self.heads.get(place := (origin.piece, shape_text(origin.shape)))
        if head is None:
            package = with_origin(pack(Package(native=b"", metadata={})), KIND, origin)
            said = origin_member(package)
            head = self.heads[place] = package[: package.index(said) + len(said)]
        num_bytes = max(self.artifact_bytes - len(head), 16)
        return head + (self.random.randbytes(num_bytes // 3 + 1) * 3)[:num_bytes]


def _num_unique(num_artifacts: int) -> int:
    return next(count for count in _UNIQUE if num_artifacts % count == 0)


def _origin(number: int, unique: int) -> Origin:
    """The key of the unit of an artifact, by its number in the entry."""
    size = 8 * (number // unique)
    return Origin(piece=_IDENTITIES[number % unique], shape={"num_tokens": (size, size)} if size else {})


def _rows(units: list[_Unit], unique: int, layers: int) -> Iterator[Row]:
    """Rows of every compiled piece for every shape; the pieces between the first and the last are equal."""
    for number in range(len(units) // unique):
        shape: Shape = {"num_tokens": (8 * number, 8 * number)} if number else {}
        for layer in range(layers + 1):
            which = unique - 1 if layer == layers else min(layer, max(unique - 2, 0))
            record = units[number * unique + which].record
            yield Row(variant=0, shape=shape, piece_index=2 * layer, adaptor=ADAPTOR, artifact=record)


def _decoder(layers: int, unique: int) -> Plan:
    """Alternating compiled pieces and attention; the pieces between the first and the last are equal."""
    graphs = [_graph("torch.sin", 64 + number) for number in range(unique)]
    order = [graphs[unique - 1 if i == layers else min(i, max(unique - 2, 0))] for i in range(layers + 1)]
    attention = _graph("torch.ops.toy.attention.default")
    pieces = [piece for graph in order for piece in (graph, attention)][:-1]
    return _plan(pieces, splitting=attention, qualname="models:Decoder")


def _plan(
    pieces: list[PieceGraph],
    *,
    splitting: PieceGraph,
    qualname: str,
    say: str = "",
    fixed: Mapping[str, dict[str, int]] | None = None,
) -> Plan:
    steps = steps_of(pieces, splitting)
    variants = tuple(
        Variant(
            name=name,
            fixed=dims,
            dims={"num_tokens": ("s0",)},
            symbols=(SymbolRange(name="s0", min=2, max=None),),
            relations=(),
            inputs=(),
            model_guards=(),
            call_guards=(),
            steps=steps,
            output=["v", len(pieces)],
        )
        for name, dims in (fixed or {"default": {}}).items()
    )
    known = {graph.identity(): graph for graph in pieces}
    return Plan(method="forward" + say, qualname=qualname, variants=variants, graphs=known)


def steps_of(pieces: list[PieceGraph], splitting: PieceGraph) -> tuple[Step, ...]:
    """The steps of pieces, each of which takes the output of the previous one."""
    return tuple(
        Step(
            piece=index,
            splitting=graph is splitting,
            graph=graph.identity(),
            symbols={"s0": "s0"},
            inputs=(index,),
            outputs=(index + 1,),
        )
        for index, graph in enumerate(pieces)
    )


def _graph(target: str, width: int = 64, *, sized: bool = False) -> PieceGraph:
    """A piece of one op, after a size node if `sized`."""
    size = Node(kind="size", target=None, args=("%0", 0), kwargs={})
    op = Node(kind="function", target=target, args=("%0",), kwargs={})
    return graph_of([size, op] if sized else [op], width)


def graph_of(nodes: list[Node], width: int = 64) -> PieceGraph:
    """A piece with one input that returns the result of its last operation."""
    hidden = TensorMeta(dtype="float32", shape=("s0", width), stride=(width, 1), device="cpu")
    return PieceGraph(
        symbols=(SymbolRange(name="s0", min=2, max=None),),
        facts=(),
        inputs=(hidden,),
        aliases=(),
        nodes=tuple(nodes),
        outputs=(f"%{len(nodes)}",),
        results=(hidden,),
        ops={},
    )


def _write(path: str, data: bytes, *, mode: int = 0o644) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


_IDENTITIES = tuple(_graph("torch.sin", 64 + number).identity() for number in range(max(_UNIQUE)))


#: The pieces of `lay_entry`, the middle one splitting.
_TOY = [_graph(target) for target in ("torch.sin", "torch.ops.ns.attn", "torch.cos")]
