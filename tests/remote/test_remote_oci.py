"""Registry tags as stores, whose layers other tools can pull as a cache."""

from __future__ import annotations

import base64
import json
import urllib.request
import warnings
from pathlib import Path
from typing import Any

import pytest
from bundle_maker import make_keys
from cache_maker import lay_entry
from remote_cli import run
from remote_servers import PASSWORD, USER, faulty, registry

from cgtool.store.layout import CacheLayout, RankName
from cgtool.store.trust import TrustPolicy

TITLE = "org.opencontainers.image.title"


@pytest.fixture(scope="module")
def tag(tmp_path_factory):
    with registry(tmp_path_factory.mktemp("registry")) as url:
        yield url


def manifest_of(url: str) -> Any:
    place, _, tag = url.removeprefix("oci://").rpartition(":")
    host, _, name = place.partition("/")
    kind = {"Accept": "application/vnd.oci.image.manifest.v1+json"}
    request = urllib.request.Request(f"http://{host}/v2/{name}/manifests/{tag}", headers=kind)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def oras_pull(url: str, folder: Path) -> None:
    """Pull as `oras pull` does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from oras.client import OrasClient

        OrasClient(insecure=True).pull(target=url.removeprefix("oci://"), outdir=str(folder))


def test_folder_pulled_by_oras_is_a_cache(tag, tmp_path):
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


def test_tags_share_common_layers(tag, tmp_path):
    lay_entry(tmp_path / "cache", seed=2)
    sent = [
        run("push", f"{tag}-{name}", "--cache-dir", tmp_path / "cache", "--json").report["entries"][0]["files"]
        for name in ("one", "two", "two")
    ]
    assert sent[0] == sent[1] > sent[2] == 0
    for name in ("one", "two"):
        pulled = run("pull", f"{tag}-{name}", "--trust", "--any-machine", "--cache-dir", tmp_path / name, "--json")
        assert [entry["outcome"] for entry in pulled.report["entries"]] == ["new"]


def test_entries_pushed_by_two_machines_have_unique_paths(tag, tmp_path):
    machines = {name: tmp_path / name for name in ("first", "second")}
    hashes = {
        lay_entry(machines["first"], seed=4, shapes=("general", "n=8")),
        lay_entry(machines["second"], seed=4, shapes=("n=8", "n=16")),
    }
    for cache in (*machines.values(), machines["first"]):
        assert run("push", f"{tag}-both", "--cache-dir", cache).code == 0
    titles = [layer["annotations"].get(TITLE) for layer in manifest_of(f"{tag}-both")["layers"]]
    assert len(titles) - titles.count(None) == len({*titles} - {None})  # else oras refuses the second one
    oras_pull(f"{tag}-both", tmp_path / "pulled")
    [entry] = run("verify", "--cache-dir", tmp_path / "pulled", "--json").report["entries"]
    assert entry["problems"] == []
    merged = run("pull", f"{tag}-both", "--trust", "--any-machine", "--cache-dir", tmp_path / "merged", "--json")
    assert {one["hash"] for one in merged.report["entries"]} == hashes
    assert run("verify", "--cache-dir", tmp_path / "merged").code == 0
    assert run("prune", f"{tag}-both", "--entry", *hashes, "--yes").code == 0
    left = [layer["annotations"]["dev.cgtool.name"] for layer in manifest_of(f"{tag}-both")["layers"]]
    assert [name for name in left if not name.startswith("artifacts/")] == []


@pytest.mark.parametrize(
    ("factors", "targets"),
    [
        pytest.param(
            {
                "torch": {"version": "2.11.0", "with_cuda": "12.8", "with_hip": None},
                "target": {"cpu": {"machine": "x86_64"}, "accelerators": ["sm_90 x132", "sm_100 x148"]},
            },
            [("cuda", "100", 32, "12.8"), ("cuda", "90", 32, "12.8")],
            id="cuda",
        ),
        pytest.param(
            {
                "torch": {"version": "2.11.0", "with_cuda": None, "with_hip": "7.0"},
                "target": {
                    "cpu": {"machine": "x86_64"},
                    "accelerators": ["gfx1100 x96", "gfx942:sramecc+ x304"],
                },
            },
            [("hip", "gfx1100", 32, None), ("hip", "gfx942", 64, None)],
            id="hip",
        ),
        pytest.param(
            {
                "torch": {"version": "2.11.0", "with_cuda": None, "with_hip": None},
                "target": {"cpu": {"machine": "aarch64"}, "accelerators": []},
            },
            [("cpu", "aarch64", None, None)],
            id="cpu",
        ),
    ],
)
def test_tag_has_labels_for_its_targets(tag, tmp_path, factors, targets):
    name, hash_ = f"{tag}-{targets[0][0]}", lay_entry(tmp_path / "cache", seed=5, factors=factors)
    assert run("push", name, "--cache-dir", tmp_path / "cache").code == 0
    other = lay_entry(tmp_path / "more", seed=6, factors=factors)
    assert run("push", name, "--cache-dir", tmp_path / "more").code == 0
    said = manifest_of(name)["annotations"]
    listed = json.loads(said["cache.cgtool.image/summary"])["targets"]
    found = [(one["backend"], one["arch"], one.get("warp_size"), one.get("cuda_version")) for one in listed]
    assert (found, {one["torch_version"] for one in listed}) == (targets, {"2.11.0"})
    assert said["cache.cgtool.image/entry-count"] == "2"
    assert said["io.kserve.km/cache-hash"] == ",".join(sorted([hash_, other]))
    oras_pull(name, tmp_path / "pulled")
    files = (tmp_path / "pulled/torch_compile_cache").rglob("*")
    contents = {path.read_bytes() for path in files if path.is_file()}
    assert said["cache.cgtool.image/cache-size-bytes"] == str(sum(map(len, contents)))


def test_foreign_image_is_reported(tag, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from oras.client import OrasClient

        (tmp_path / "file").write_text("x")
        target = tag.removeprefix("oci://") + "-other"
        OrasClient(insecure=True).push(target=target, files=[str(tmp_path / "file")], disable_path_validation=True)
    ran = run("pull", f"{tag}-other", "--trust", "--cache-dir", tmp_path / "cache")
    assert (ran.code, "holds no entry" in ran.err) == (1, True)


@pytest.fixture(scope="module")
def closed(tmp_path_factory):
    """A tag of a registry that asks for a password."""
    with registry(tmp_path_factory.mktemp("closed"), password=True) as url:
        yield url


def test_credentials_come_from_docker_login_or_the_url_and_are_never_shown(closed, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    lay_entry(tmp_path / "cache", seed=7)
    here = ("--cache-dir", tmp_path / "cache")
    for url in (closed, closed.replace("//", f"//{USER}:wrong-word@")):
        for command in (("push", url, *here), ("export", url, *here), ("pull", url, "--trust", *here)):
            refused = run(*command)
            assert (refused.code, "docker login" in refused.err) == (1, True), refused.err
            assert "wrong-word" not in refused.out + refused.err
    named = closed.replace("//", f"//{USER}:{PASSWORD}@")
    pushed = run("push", named, *here, "--json")
    image = run("export", f"{named}-image", *here, "--json")
    (tmp_path / ".docker").mkdir()
    host = closed.removeprefix("oci://").partition("/")[0]
    known = {"auths": {host: {"auth": base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()}}}
    (tmp_path / ".docker/config.json").write_text(json.dumps(known))
    pulled = run("pull", closed, "--trust", "--any-machine", "--cache-dir", tmp_path / "pulled", "--json")
    for ran in (pushed, image, pulled):
        assert ran.code == 0, ran.err
        assert PASSWORD not in ran.out + ran.err


def test_read_only_registry_is_reported(tmp_path):
    lay_entry(tmp_path / "cache", seed=8)
    with faulty(tmp_path / "nothing") as server:
        url = server.url.replace("http:", "oci:") + "/team/models:v1"
        for command in ("push", "export"):
            ran = run(command, url, "--cache-dir", tmp_path / "cache")
            assert (ran.code, "could not accept a layer: it returned 501" in ran.err) == (1, True), ran.err
            assert "WebDAV" not in ran.err
