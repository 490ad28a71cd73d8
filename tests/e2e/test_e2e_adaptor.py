"""An adaptor of another distribution works in every command and process, if that distribution is installed."""

from __future__ import annotations

import functools

import pytest
from e2e_harness import REPO, cgtool, compare

from cgtool import load
from cgtool.errors import ConfigError
from cgtool.models import resolve_model

pytestmark = pytest.mark.torch

MODEL = f"{REPO / 'tests/cli/cli_sample_model.py'}:build"


@pytest.fixture(scope="module")
def installed(worded_site):
    """Runs the command in an environment with the distribution."""
    return functools.partial(cgtool, env=worded_site)


@pytest.fixture(scope="module")
def warmed(installed, tmp_path_factory):
    """A folder with a cache and a bundle of a model that a worker compiled with the adaptor."""
    folder = tmp_path_factory.mktemp("worded")
    log, root = folder / "log", folder / "cache"
    arguments = ("--adaptor", "worded", "--jobs", "1", "--inductor-config", f'{{"log": "{log}"}}')
    warm = ("warm", MODEL, "--cache-dir", root, "--json", "--quiet", *arguments)
    report = installed(*warm).report
    assert (report["compiled"], report["notes"]) == (4, [])
    assert log.read_text().split() == ["-c"] * 4  # sys.argv[0] of a worker
    assert installed(*warm).report["hit"]
    assert installed("export", folder / "bundle.tar.zst", "--cache-dir", root).code == 0
    return folder


def test_an_entry_of_another_distributions_adaptor_is_imported_verified_and_loaded(
    installed, warmed, worded_site, tmp_path
):
    imported = installed("import", warmed / "bundle.tar.zst", "--trust", "--cache-dir", tmp_path)
    assert imported.code == 0, imported.err
    assert {path.suffix for path in tmp_path.rglob("artifacts/*")} == {".worded"}
    verified = installed("verify", "--load", "--cache-dir", tmp_path)
    assert verified.code == 0, verified.out + verified.err
    listing = installed("inspect", "cache", tmp_path, "--json").report
    assert [entry["adaptor"] for entry in listing["entries"]] == ["worded"]
    assert compare(MODEL, tmp_path, [{"num_tokens": rows} for rows in (1, 3, 9)], env=worded_site)["failures"] == []


def test_errors_name_the_adaptor_if_its_distribution_is_not_installed(warmed, tmp_path):
    with pytest.raises(ConfigError, match=r"There is no adaptor 'worded'.*entry-point group cgtool.adaptors"):
        load(resolve_model(MODEL, weights="real").module, cache_dir=warmed / "cache")
    imported = cgtool("import", warmed / "bundle.tar.zst", "--trust", "--cache-dir", tmp_path / "imported")
    assert imported.code == 3
    assert "of a kind that no installed adaptor produces" in imported.err
    refused = cgtool("warm", MODEL, "--adaptor", "worded", "--cache-dir", tmp_path / "new")
    assert refused.code == 2
    assert "adaptors are aot_inductor, inductor_standalone, inductor, eager" in refused.err
