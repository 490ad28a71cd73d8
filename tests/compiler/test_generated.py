"""Generated code is kept beside the plan, copied to other entries, dumped, and covered by no digest."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cgtool.adaptor_registry import register_adaptor
from cgtool.compiler.adaptors.eager import EagerAdaptor
from cgtool.compiler.pipeline import warm
from cgtool.config import CompilationConfig
from cgtool.model import ExampleCall, ModelSpec
from cgtool.plan.grammar import digest_of
from cgtool.store.layout import CacheLayout, RankName
from cgtool.store.records import read_manifest
from cgtool.toolkit.bundle.export import export
from cgtool.toolkit.inspect.artifact import inspect_artifact
from cgtool.toolkit.verify.run import verify

pytestmark = pytest.mark.torch


@register_adaptor("writing")
class Writing(EagerAdaptor):
    """Compiles as eager does, and generates a source that is not in the artifact."""

    name = "writing"
    compiles = True

    def compute_hash(self, options, *, max_autotune=False):
        return digest_of("writing")

    def compile(self, graph, *, options, max_autotune=False):
        piece = super().compile(graph, options=options)
        return dataclasses.replace(piece, sources={"wrapper.cpp": f"// {len(graph.nodes)} nodes"})


class Model(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return torch.sin(x)


def warmed(root, *, scale=2.0, rank=0, dump=""):
    model = Model(scale).eval()
    spec = ModelSpec(module=model, calls=[ExampleCall(args=(torch.rand(3, 4),))], dynamic={})
    config = CompilationConfig(adaptor="writing", jobs=0, proof=False, debug_dump_path=str(dump))
    return warm(spec, config=config, cache_dir=root, rank=rank)


def generated(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("generated/*/*") if path.is_file()}


def test_generated_code_is_kept_per_artifact_and_copied_to_other_ranks(cache_root, tmp_path):
    layout = CacheLayout(root=cache_root)
    first, second = (warmed(cache_root, rank=rank) for rank in (0, 1))
    assert (first.compiled, second.compiled) == (1, 0)
    kept = generated(layout.base / first.hash / "rank_0")
    assert list(kept.values()) == ["// 1 nodes"]
    assert generated(layout.base / first.hash / "rank_1") == kept
    (name,) = kept
    (row,) = read_manifest(layout, RankName(hash=first.hash, rank=0, prefix="backbone")).rows
    assert name == f"backbone/generated/{row.artifact.digest[:16]}/wrapper.cpp"


def test_generated_code_is_dumped_on_a_miss_and_on_a_hit(cache_root, tmp_path):
    first = warmed(cache_root, dump=tmp_path / "miss")
    again = warmed(cache_root, dump=tmp_path / "hit")
    assert again.hit
    other = warmed(cache_root, rank=1, dump=tmp_path / "hit")
    (place,) = generated(tmp_path / "miss")
    assert place.startswith(f"{first.hash}/rank_0/backbone/generated/")
    assert set(generated(tmp_path / "hit")) == {place, place.replace("rank_0", "rank_1")}
    for result in (first, other):
        folder = tmp_path / "hit" / result.hash / f"rank_{result.manifest.rank}" / "backbone"
        assert (folder / "computation_graph.py").is_file()
        assert (folder / "transformed_code.py").is_file()


def test_inspect_shows_generated_code_and_verify_and_export_ignore_it(cache_root, tmp_path):
    result = warmed(cache_root)
    report = inspect_artifact(f"{result.hash[:12]}/0", cache_dir=cache_root)
    assert [(source.language, source.text) for source in report.contents.sources] == [("cpp", "// 1 nodes")]
    found = verify(cache_dir=cache_root)
    assert found.ok
    assert [note for entry in found.entries for note in entry.notes] == []
    for file in (cache_root / "torch_compile_cache" / result.hash).rglob("wrapper.cpp"):
        file.write_text("edited")
    assert verify(cache_dir=cache_root).ok
    export(dest=tmp_path / "out", cache_dir=cache_root, folder=True)
    assert generated(tmp_path / "out") == {}
