"""Rows that point to another row's artifact are detected although all digests match."""

from __future__ import annotations

import shutil

import pytest
from msgspec.structs import replace

pytest.importorskip("torch")

import torch
from torch import nn

import cgtool
from cgtool import CompilationConfig, ExampleCall, ModelSpec
from cgtool.compiler.pipeline import warm
from cgtool.errors import ArtifactError
from cgtool.plan.records import parse_plan
from cgtool.plan.shapes import shape_text
from cgtool.store.artifacts import Origin, Package, code_of, pack, split_origin, unpack, with_origin
from cgtool.store.entry import EntryWriter, read_entry
from cgtool.store.key import read_key
from cgtool.store.layout import CacheLayout, RankName
from cgtool.store.records import Artifact, Row
from cgtool.toolkit.verify.checks import check_entry
from cgtool.toolkit.verify.run import verify

pytestmark = pytest.mark.torch

SAID = Origin(piece="ab" * 32, shape={"n": (8, 8)})
CODE = {"json": b'{"a":1}', "pt2": pack(Package(native=b"\x7fELF", metadata={"a": "b"})), "aot": b"\0\n{}", "toy": b""}
ADAPTORS = {"json": "eager", "pt2": "aot_inductor", "aot": "inductor_standalone", "toy": "toy"}


class Model(nn.Module):
    """Two pieces with the same inputs and outputs around attention."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        heads = x[None, None]
        x = nn.functional.scaled_dot_product_attention(heads, heads, heads)[0, 0]
        return torch.sin(self.second(x))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    root = tmp_path_factory.mktemp("warmed")
    module = Model().eval()
    spec = ModelSpec(module=module, calls=[ExampleCall(args=(torch.rand(6, 4),))], dynamic={"x": {0: "n"}})
    config = CompilationConfig(adaptor="eager", proof=False, compile_sizes=(8, 16))
    with torch.no_grad():
        return root, warm(spec, config=config, cache_dir=root).hash


@pytest.fixture
def cache(warmed, tmp_path):
    shutil.copytree(warmed[0], tmp_path / "cache")
    return CacheLayout(root=tmp_path / "cache"), RankName(hash=warmed[1], rank=0, prefix="backbone")


def exchanged(cache, first, second):
    """Exchange the artifacts of two rows, given by piece and shape."""
    layout, name = cache
    entry = read_entry(layout, name)
    rows = {(row.piece_index, shape_text(row.shape)): row for row in entry.manifest.rows if row.variant == 0}
    swap = {id(rows[first]): rows[second].artifact, id(rows[second]): rows[first].artifact}
    changed = tuple(replace(row, artifact=swap.get(id(row), row.artifact)) for row in entry.manifest.rows)
    writer = EntryWriter(layout, read_key(layout, name.hash), rank=0, prefix="backbone")
    writer.publish(replace(entry.manifest, rows=changed), entry.files)


@pytest.mark.parametrize(
    ("first", "second"), [((0, "general"), (2, "general")), ((0, "n=8"), (0, "n=16")), ((2, "general"), (2, "n=8"))]
)
def test_exchanged_rows_are_detected_by_load_and_by_verify(cache, model, first, second):
    layout, name = cache
    with torch.no_grad():
        torch.testing.assert_close(cgtool.load(model, cache_dir=layout.root)(torch.ones(8, 4)), model(torch.ones(8, 4)))
    assert check_entry(layout, name.hash).problems == []
    exchanged(cache, first, second)
    with pytest.raises(ArtifactError, match="compiled from another piece or for another shape"):
        cgtool.load(model, cache_dir=layout.root)
    assert {problem.kind for problem in check_entry(layout, name.hash).problems} == {"misplaced"}
    assert verify(cache_dir=layout.root, repair=True).ok
    with torch.no_grad():
        torch.testing.assert_close(cgtool.load(model, cache_dir=layout.root)(torch.ones(8, 4)), model(torch.ones(8, 4)))


def test_only_rows_of_the_same_piece_and_shape_share_a_file(cache):
    layout, name = cache
    entry = read_entry(layout, name)
    plan = parse_plan(entry.files["plan.json"], path=layout.root)
    made = {}
    for row in entry.manifest.rows:
        [piece] = [step.graph for step in plan.variants[row.variant].steps if step.piece == row.piece_index]
        made.setdefault(row.artifact.digest, set()).add((piece, shape_text(row.shape)))
    assert all(len(origins) == 1 for origins in made.values())


@pytest.mark.parametrize("kind", CODE)
def test_every_kind_of_artifact_records_its_origin(kind):
    data = with_origin(CODE[kind], kind, SAID)
    assert data == with_origin(CODE[kind], kind, SAID)
    origin, code = split_origin(data, kind)
    assert (origin.piece, origin.shape) == (SAID.piece, SAID.shape)
    assert code == (data if kind == "pt2" else CODE[kind])
    if kind == "pt2":
        assert replaced_origin(unpack(data)) == unpack(CODE[kind])
    artifact = Artifact(digest="cd" * 32, kind=kind, size_bytes=1, compile_secs=0.0)
    row = Row(variant=0, piece_index=0, shape=SAID.shape, adaptor=ADAPTORS[kind], artifact=artifact)
    assert code_of(data, row, SAID.piece) == code
    for wrong in (replace(row, shape={}), replace(row, shape={"m": (8, 8)}), replace(row, adaptor="inductor")):
        with pytest.raises(ArtifactError):
            code_of(data, wrong, SAID.piece)
    with pytest.raises(ArtifactError):
        code_of(data, row, "cd" * 32)


def replaced_origin(package):
    return Package(native=package.native, metadata=package.metadata)


@pytest.mark.parametrize("kind", CODE)
@pytest.mark.parametrize("cut", [0, 1, 40])
def test_an_artifact_without_an_origin_is_refused(kind, cut):
    for data in (CODE[kind], with_origin(CODE[kind], kind, SAID)[:cut], b"[]\n", b'{"piece":"x","shape":{}}\n'):
        with pytest.raises(ArtifactError, match="does not record what it was compiled from"):
            split_origin(data, kind)
