"""Random chains of warms, edits, imports and loads, drawn by hypothesis, against a model of the cache."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import linecache
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

pytest.importorskip("torch")

import torch
from torch import nn

import cgtool
from cgtool import CompilationConfig, adaptor_registry
from cgtool.compiler.adaptors.eager import EagerAdaptor
from cgtool.compiler.pipeline import warm
from cgtool.errors import CacheMissError
from cgtool.plan.grammar import digest_of
from cgtool.toolkit.bundle.choose import Choice
from cgtool.toolkit.bundle.export import export
from cgtool.toolkit.bundle.import_ import import_bundle

pytestmark = pytest.mark.torch

#: One item for each call: the ranges of the graph's symbols, and whether the artifact was tuned.
SERVED = []


class Standing(EagerAdaptor):
    """Stands in for a compiler; its artifacts contain whether they were tuned, and record each call."""

    name = "inductor_standalone"
    kind = "aot"
    compiles = True

    def compute_hash(self, options, *, max_autotune=False):
        return digest_of([super().compute_hash(options), max_autotune])

    def compile(self, graph, *, options, max_autotune=False):
        piece = super().compile(graph, options=options)
        return dataclasses.replace(piece, artifact=piece.artifact + b" " * max_autotune)

    def load(self, data, graph):
        function = super().load(data, graph)
        served = {"symbols": [(symbol.min, symbol.max) for symbol in graph.symbols], "tuned": data.endswith(b" ")}

        def run(args):
            SERVED.append(served)
            return function(args)

        return run


#: All versions of the file have the same size, so only their content differs.
SOURCE = """
import torch
from torch import nn


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.sin(x) * {scale}
"""
DYNAMIC = {"x": {0: ("batch", 2, None), 1: ("seq", 2, None)}}
CALLS = list(itertools.product((3, 4, 6, 20), (3, 4, 6, 20)))

scales, levels, prefixes = st.sampled_from([2, 3]), st.sampled_from([2, 3]), st.sampled_from(["backbone", "head"])
dims = st.sampled_from(["batch", "seq"])
wishes = st.sampled_from([("general",), ("size", 4), ("size", 6), ("range", 2, 8), ("range", 5, 16)])


class Chain(RuleBasedStateMachine):
    """A cache, and a model of it: the requested shapes of each entry."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.root = self.folder / "cache"
        self.source = self.folder / "chain_model.py"
        self.requested = {}
        self.units = set()
        self.grad = torch.no_grad()
        self.grad.__enter__()
        self.before = dict(adaptor_registry._registered)
        adaptor_registry._registered["inductor_standalone"] = Standing

    def teardown(self):
        adaptor_registry._registered.clear()
        adaptor_registry._registered.update(self.before)
        self.grad.__exit__(None, None, None)
        shutil.rmtree(self.folder)

    @initialize(scale=scales)
    def write(self, scale):
        self.edit(scale)

    @rule(scale=scales)
    def edit(self, scale):
        self.scale = scale
        self.source.write_text(SOURCE.format(scale=scale))
        os.utime(self.source, (1e9, 1e9))  # the modification time does not change
        linecache.checkcache()

    def module(self):
        spec = importlib.util.spec_from_file_location("chain_model", self.source)
        loaded = importlib.util.module_from_spec(spec)
        exec(compile(self.source.read_text(), str(self.source), "exec"), loaded.__dict__)  # no stale .pyc
        return loaded.Model().eval()

    def warm_for(self, wish, dim, level, prefix, **options):
        kind, *bounds = wish
        shapes = {
            "general": {},
            "size": {"compile_sizes": bounds, "size_dim": dim},
            "range": {"compile_ranges": [bounds], "size_dim": dim},
        }[kind]
        config = CompilationConfig(adaptor="inductor_standalone", level=level, jobs=0, proof=False, **shapes)
        call = cgtool.ExampleCall(args=(torch.rand(3, 5, 4),))
        spec = cgtool.ModelSpec(module=self.module(), calls=[call], dynamic=DYNAMIC, prefix=prefix)
        return warm(spec, config=config, cache_dir=self.root, **options)

    @rule(wish=wishes, dim=dims, level=levels, prefix=prefixes)
    def warm(self, wish, dim, level, prefix):
        shape = wish if wish == ("general",) else (*wish, dim)
        entry = self.requested.setdefault((self.scale, level, prefix), set())
        wanted = {("general",), shape}
        result = self.warm_for(wish, dim, level, prefix)
        assert result.hit == (wanted <= entry), (wanted, entry, result.reasons)
        # each unit, that is a piece and a shape, is compiled once
        new = {(self.scale, one) for one in wanted - entry} - self.units
        assert result.compiled == len(new), (new, self.units)
        entry |= wanted
        self.units |= new
        assert self.warm_for(wish, dim, level, prefix, check=True).hit

    @rule(level=levels, prefix=prefixes, sizes=st.sampled_from(CALLS))
    def load(self, level, prefix, sizes):
        module, entry = self.module(), self.requested.get((self.scale, level, prefix))
        config = CompilationConfig(adaptor="inductor_standalone", level=level)
        if entry is None:
            with pytest.raises(CacheMissError):
                cgtool.load(module, config=config, cache_dir=self.root, prefix=prefix)
            return
        run, x = cgtool.load(module, config=config, cache_dir=self.root, prefix=prefix), torch.rand(*sizes, 4)
        SERVED.clear()
        torch.testing.assert_close(run(x), torch.sin(x) * self.scale)
        (by,) = SERVED
        by_dim = dict(zip(("batch", "seq"), sizes, strict=True))
        hits = {kind: [one for one in entry if one[0] == kind and _holds(one, by_dim)] for kind in ("size", "range")}
        if hits["size"]:  # a size wins over a range
            assert by["tuned"]
            assert len(by["symbols"]) < 2
        elif hits["range"]:  # a range over the general shape
            assert not by["tuned"]
            assert {tuple(one[1:3]) for one in hits["range"]} & set(by["symbols"])
        else:
            assert not by["tuned"]
            assert [high for _, high in by["symbols"]] == [None, None]

    @rule()
    def move(self):
        """Export everything, and go on with a new cache that imported it."""
        if not self.requested:
            return
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        bundle = folder / "bundle.tar.zst"
        export(dest=bundle, cache_dir=self.root, choice=Choice(everything=True))
        self.root = folder / "cache"
        import_bundle(source=bundle, cache_dir=self.root, trust=True)
        self.units.clear()  # bundles contain no units, so other entries compile theirs again


def _holds(shape, by_dim):
    kind, *bounds, dim = shape
    return by_dim[dim] == bounds[0] if kind == "size" else bounds[0] <= by_dim[dim] <= bounds[1]


TestAnyChain = Chain.TestCase
TestAnyChain.settings = settings(
    max_examples=6, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
)


class Sized(nn.Module):
    def forward(self, x):
        return torch.sin(x) * 2


def test_a_compile_size_that_equals_a_variant_is_tuned(cache_root, monkeypatch):
    monkeypatch.setitem(adaptor_registry._registered, "inductor_standalone", Standing)
    call = cgtool.ExampleCall(args=(torch.rand(3, 5, 4),))
    spec = cgtool.ModelSpec(module=Sized().eval(), calls=[call], dynamic={"x": {0: "batch", 1: "seq"}})
    plain = CompilationConfig(adaptor="inductor_standalone", jobs=0, proof=False)
    sized = plain.replace(compile_sizes=[{"batch": 1, "seq": 1}])

    def is_tuned():
        SERVED.clear()
        with torch.no_grad():
            cgtool.load(spec.module, cache_dir=cache_root)(torch.rand(1, 1, 4))
        return SERVED[-1]["tuned"]

    with torch.no_grad():
        warm(spec, config=plain, cache_dir=cache_root)
        assert not is_tuned()
        tuned = warm(spec, config=sized, cache_dir=cache_root)
        assert (tuned.hit, tuned.compiled) == (False, 1)
        assert is_tuned()
        assert warm(spec, config=sized, cache_dir=cache_root).hit
        assert warm(spec, config=plain, cache_dir=cache_root).hit  # tuned artifacts serve a plain configuration too
