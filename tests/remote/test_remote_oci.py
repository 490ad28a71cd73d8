"""A tag of a registry is a store whose layers others can pull: the folder that they get serves as a cache."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from bundle_maker import make_keys
from cache_maker import lay_entry
from cli_harness import run
from remote_servers import registry

from cgtool.store.layout import CacheLayout, RankName
from cgtool.store.trust import TrustPolicy


@pytest.fixture(scope="module")
def tag(tmp_path_factory):
    with registry(tmp_path_factory.mktemp("registry")) as url:
        yield url


def oras_pull(url: str, folder: Path) -> None:
    """Pull as `oras pull` does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from oras.client import OrasClient

        OrasClient(insecure=True).pull(target=url.removeprefix("oci://"), outdir=str(folder))


def test_what_oras_pulls_serves_as_a_cache(tag, tmp_path):
    make_keys(tmp_path, "release")
    hash_ = lay_entry(tmp_path / "cache", seed=1)
    pushed = run("push", tag, "--cache-dir", tmp_path / "cache", "--sign", tmp_path / "release.pem")
    assert pushed.code == 0, pushed.err
    oras_pull(tag, tmp_path / "pulled")
    assert run("diff", tmp_path / "cache", tmp_path / "pulled").code == 0
    verified = run("verify", "--cache-dir", tmp_path / "pulled", "--json").report
    assert [entry["problems"] for entry in verified["entries"]] == [[]]
    policy = TrustPolicy(trusted_keys=(str(tmp_path / "release.pub"),))
    layout = CacheLayout(root=tmp_path / "pulled")
    assert policy.read(layout, RankName(hash=hash_, rank=0, prefix="backbone")) is not None


def test_two_tags_share_the_layers_that_they_have_in_common(tag, tmp_path):
    lay_entry(tmp_path / "cache", seed=2)
    sent = [
        run("push", f"{tag}-{name}", "--cache-dir", tmp_path / "cache", "--json").report["entries"][0]["files"]
        for name in ("one", "two", "two")
    ]
    assert sent[0] == sent[1] > sent[2] == 0
    for name in ("one", "two"):
        pulled = run("pull", f"{tag}-{name}", "--trust", "--any-machine", "--cache-dir", tmp_path / name, "--json")
        assert [entry["outcome"] for entry in pulled.report["entries"]] == ["new"]


def test_an_image_that_cgtool_did_not_push_is_a_sentence(tag, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from oras.client import OrasClient

        (tmp_path / "file").write_text("x")
        target = tag.removeprefix("oci://") + "-other"
        OrasClient(insecure=True).push(target=target, files=[str(tmp_path / "file")], disable_path_validation=True)
    ran = run("pull", f"{tag}-other", "--trust", "--cache-dir", tmp_path / "cache")
    assert (ran.code, "holds no entry" in ran.err) == (1, True)
