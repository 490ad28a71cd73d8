"""An adaptor that another distribution brings takes a model the whole way, in every process that is started for it."""

from __future__ import annotations

import functools

import pytest
from e2e_harness import REPO, cgtool, compare

from cgtool import load
from cgtool.errors import ConfigError
from cgtool.models import resolve_model

pytestmark = pytest.mark.torch

MODEL = f"{REPO / 'tests/cli/cli_sample_model.py'}:build"


@pytest.fixture
def installed(worded_site):
    """Runs the command where the distribution is installed."""
    return functools.partial(cgtool, env=worded_site)


def test_an_adaptor_of_another_distribution_warms_travels_and_loads(installed, worded_site, tmp_path, cache_root):
    log = tmp_path / "log"
    arguments = ("--adaptor", "worded", "--jobs", "1", "--inductor-config", f'{{"log": "{log}"}}')
    warm = ("warm", MODEL, "--cache-dir", cache_root, "--json", "--quiet", *arguments)
    report = installed(*warm).report
    assert (report["compiled"], report["notes"]) == (4, [])
    assert log.read_text().split() == ["-c"] * 4  # a worker's program
    assert installed(*warm).report["hit"]

    bundle, there = tmp_path / "bundle.tar.zst", tmp_path / "there"
    assert installed("export", bundle, "--cache-dir", cache_root).code == 0
    taken = installed("import", bundle, "--trust", "--cache-dir", there)
    assert taken.code == 0, taken.err
    assert {path.suffix for path in there.rglob("artifacts/*")} == {".worded"}
    verified = installed("verify", "--load", "--cache-dir", there)
    assert verified.code == 0, verified.out + verified.err
    shown = installed("inspect", "cache", there, "--json").report
    assert [entry["adaptor"] for entry in shown["entries"]] == ["worded"]
    assert compare(MODEL, there, [{"num_tokens": rows} for rows in (1, 3, 9)], env=worded_site)["failures"] == []


def test_where_the_distribution_is_not_installed_it_is_named(installed, tmp_path, cache_root):
    warm = installed("warm", MODEL, "--cache-dir", cache_root, "--adaptor", "worded", "--jobs", "0", "--no-proof")
    assert warm.code == 0, warm.err
    with pytest.raises(ConfigError, match=r"There is no adaptor 'worded'.*entry-point group cgtool.adaptors"):
        load(resolve_model(MODEL, weights="real").module, cache_dir=cache_root)
    bundle = tmp_path / "bundle.tar.zst"
    assert installed("export", bundle, "--cache-dir", cache_root).code == 0
    taken = cgtool("import", bundle, "--trust", "--cache-dir", tmp_path / "there")
    assert taken.code == 3
    assert "of a kind that no installed adaptor produces" in taken.err
    refused = cgtool("warm", MODEL, "--adaptor", "worded", "--cache-dir", tmp_path / "new")
    assert refused.code == 2
    assert "adaptors are aot_inductor, inductor_standalone, inductor, eager" in refused.err
