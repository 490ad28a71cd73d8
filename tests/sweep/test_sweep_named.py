"""Of a configuration or a machine, `why` names what changed in its first reason, and `diff` in its first difference."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")

import sweep_subject as subject
import torch
from test_sweep_changes import CONFIGS, EAGER, MACHINES

from cgtool.compiler.pipeline import warm
from cgtool.config import CompilationConfig
from cgtool.model import ModelSpec
from cgtool.runtime.factors import Live
from cgtool.store.layout import CacheLayout
from cgtool.store.pruned import PrunedEntry, note_pruned
from cgtool.toolkit.diff.entries import EntrySide, compare_entries
from cgtool.toolkit.why import why_spec

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> EntrySide:
    return warmed(subject.build(), tmp_path_factory.mktemp("named"), EAGER)


def warmed(spec: ModelSpec, folder: Path, config: CompilationConfig) -> EntrySide:
    with torch.no_grad():
        result = warm(spec, config=config, cache_dir=folder)
    return EntrySide(CacheLayout(root=folder), result.hash)


def first_reason(spec: ModelSpec, base: EntrySide, config: CompilationConfig = EAGER) -> str:
    with torch.no_grad():
        report = why_spec(spec, config=config, cache_dir=base.layout.root)
    assert report.nearest is not None
    assert report.nearest.hash == base.hash
    return report.reasons[0].sentence


def first_difference(base: EntrySide, other: EntrySide) -> str:
    return compare_entries(EntrySide(base.layout, base.hash), other)[0].sentence


def slow_unless(names, sample):
    return [pytest.param(name, marks=() if name in sample else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", slow_unless(CONFIGS, {"splitting_ops"}))
def test_a_field_of_the_configuration_is_named_first(name, base, tmp_path):
    fields, words = CONFIGS[name]
    config = CompilationConfig(**{"adaptor": "eager", **fields})
    reason = first_reason(subject.build(), base, config)
    assert re.search(words, reason), reason
    difference = first_difference(base, warmed(subject.build(), tmp_path, config))
    assert re.search(words, difference), difference


@pytest.mark.slow
@pytest.mark.parametrize("change", MACHINES)
def test_a_part_of_the_environment_is_named_first(change, base, tmp_path, monkeypatch):
    asked, value, words = change
    monkeypatch.setattr(*asked, lambda: value)
    reason = first_reason(subject.build(), base)
    assert re.search(words, reason), reason
    difference = first_difference(base, warmed(subject.build(), tmp_path, EAGER))
    assert re.search(words, difference), difference


@pytest.mark.slow
def test_a_variable_of_the_environment_is_named_first(base, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    assert "TORCHINDUCTOR_MAX_AUTOTUNE" in first_reason(subject.build(), base)
    difference = first_difference(base, warmed(subject.build(), tmp_path, EAGER))
    assert difference == ('the environment variable TORCHINDUCTOR_MAX_AUTOTUNE was unset and is "1" now')


def test_the_same_model_hits_and_its_entry_equals_itself(base, tmp_path):
    with torch.no_grad():
        report = why_spec(subject.build(), config=EAGER, cache_dir=base.layout.root)
    assert report.hit
    assert report.entry is not None
    assert (report.entry.hash, report.entry.model) == (base.hash, "Subject")
    assert (report.nearest, report.reasons, report.run) == (None, (), "")
    shutil.copytree(base.layout.root, tmp_path / "copy")
    assert compare_entries(base, EntrySide(CacheLayout(root=tmp_path / "copy"), base.hash)) == []


def test_a_model_whose_entry_was_pruned_misses_with_the_record_of_it(base, tmp_path):
    layout = CacheLayout(root=tmp_path / "copy")
    shutil.copytree(base.layout.root, layout.root)
    spec = subject.build()
    lookup = Live.of(spec.module).lookup
    entry = PrunedEntry(hash=base.hash, model="Subject", when="2026-01-31T12:00:00Z", why="not used for 31 days")
    note_pruned(layout, {lookup: [entry]})
    assert why_spec(spec, config=EAGER, cache_dir=layout.root).pruned is None  # it is there
    shutil.rmtree(layout.entry_dir(base.hash))
    report = why_spec(spec, config=EAGER, cache_dir=layout.root)
    assert (report.hit, report.nearest) == (False, None)
    assert report.pruned is not None
    assert report.pruned.entries == (entry,)
