"""Container images of caches: the copied folder is a cache, and images share layers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import subprocess
import tarfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from bundle_maker import make_keys
from cache_maker import lay_entry
from cli_harness import forked
from remote_cli import run
from remote_servers import registry

from cgtool.store.layout import CacheLayout, RankName
from cgtool.store.trust import TrustPolicy

FIXTURE = Path(__file__).parents[2] / "fixtures/tiny_llama.py"
#: Loads from a folder, and from what a link into another container leads to, where there is one.
LOADING = """
import sys
folder, here, there = sys.argv[1:]
sys.path.insert(0, folder)
import cgtool, tiny_llama, torch
spec = tiny_llama.build(num_layers=1)
def check(**options):
    with torch.no_grad():
        model = cgtool.load(spec.module, **options)
        assert torch.equal(model(*spec.calls[0].args), spec.module(*spec.calls[0].args))
check(cache_dir=here)
if there:
    try:
        check(cache_dir=there)
    except cgtool.CacheMissError as error:
        assert "is a link, but was a folder before" in str(error), error
    else:
        raise AssertionError("nobody vouched for it")
    check(cache_dir=there, config=cgtool.CompilationConfig(allow_shared_cache=True, adaptor="eager"))
"""
#: Needs no program of the new root: what comes after it is built into the shell.
ROOTED = 'mount --bind "$1" "$1" && cd "$1" && pivot_root . before && echo ready && read line'
DOCKERFILE = "FROM scratch\nCOPY --from={image} / /var/cache/cgtool/\n"
CUDA = {
    "torch": {"version": "2.11.0+cu128", "with_cuda": "12.8", "with_hip": None},
    "target": {"cpu": {"machine": "x86_64"}, "accelerators": ["sm_90 x132"]},
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    with registry(tmp_path_factory.mktemp("registry")) as url:
        yield url.removesuffix(":v1")


def fetched(url: str, what: str, *, kind: str = "application/octet-stream") -> bytes:
    """A manifest or a blob of the repository of a tag."""
    host, _, name = url.removeprefix("oci://").partition("/")
    place = f"http://{host}/v2/{name.partition(':')[0]}/{what}"
    with urllib.request.urlopen(urllib.request.Request(place, headers={"Accept": kind}), timeout=30) as answer:
        return answer.read()


def manifest_of(url: str) -> bytes:
    return fetched(url, f"manifests/{url.rpartition(':')[2]}", kind="application/vnd.oci.image.manifest.v1+json")


def layers_of(url: str) -> list[str]:
    return [layer["digest"] for layer in json.loads(manifest_of(url))["layers"]]


def config_of(url: str) -> dict:
    return json.loads(fetched(url, f"blobs/{json.loads(manifest_of(url))['config']['digest']}"))


def applied(url: str, folder: Path) -> Path:
    """What an image holds, by its layers one over the other."""
    folder.mkdir()
    for layer, digest in zip(layers_of(url), config_of(url)["rootfs"]["diff_ids"], strict=True):
        data = fetched(url, f"blobs/{layer}")
        assert f"sha256:{hashlib.sha256(data).hexdigest()}" == digest
        (folder / "layer").write_bytes(data)
        with tarfile.open(folder / "layer") as tar:
            tar.extractall(folder, filter="fully_trusted")
    (folder / "layer").unlink()
    return folder


def built(url: str, folder: Path) -> Path:
    """What a build copies out of an image, by buildah."""
    if shutil.which("buildah") is None:
        pytest.skip("buildah is not installed")
    (folder / "context").mkdir(parents=True)
    (folder / "Dockerfile").write_text(DOCKERFILE.format(image=url.removeprefix("oci://")))
    buildah = ["buildah", "--storage-driver", "vfs", "--root", folder / "storage", "--runroot", folder / "run"]
    build = ["bud", "--isolation", "chroot", "--tls-verify=false", "--output", f"type=local,dest={folder / 'made'}"]
    tried = subprocess.run([*buildah, "from", "scratch"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"buildah does not work here: {tried.stderr.strip()}")
    subprocess.run([*buildah, *build, "-f", folder / "Dockerfile", folder / "context"], capture_output=True, check=True)
    return folder / "made/var/cache/cgtool"


def export(url: str, cache: Path, *more: object) -> dict:
    ran = run("export", url, "--all", "--cache-dir", cache, "--json", *more)
    assert ran.code == 0, ran.err
    return ran.report


@pytest.mark.parametrize("unpack", [applied, built])
def test_cache_copied_from_an_image_is_complete(repository, tmp_path, unpack):
    lay_entry(tmp_path / "cache", seed=1)
    lay_entry(tmp_path / "cache", seed=2, model="Another")
    assert export(f"{repository}:plain", tmp_path / "cache", "--no-debug")["form"] == "image"
    export(f"{repository}:plain", tmp_path / "cache")
    made = unpack(f"{repository}:plain", tmp_path / "made")
    assert run("diff", tmp_path / "cache", made).code == 0
    verified = run("verify", "--cache-dir", made, "--json").report
    assert [entry["problems"] for entry in verified["entries"]] == [[], []]
    assert run("export", tmp_path / "again.tar.zst", "--all", "--cache-dir", made).code == 0


@contextlib.contextmanager
def in_another_container(root: Path) -> Iterator[Path | None]:
    """Let a process have a folder as its root; yields the way to it through /proc, by which modelcars share files.

    Yields None where processes may not be given a root of their own.
    """
    (root / "before").mkdir()
    command = ["unshare", "--mount", "sh", "-c", ROOTED, "sh", str(root)]
    if shutil.which(command[0]) is None:
        yield None
        return
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield Path(f"/proc/{process.pid}/root") if process.stdout.readline() == b"ready\n" else None


@pytest.mark.torch
def test_model_loads_from_an_image(repository, tmp_path):
    model = ("warm", f"{FIXTURE}:build", "--arg", "num_layers=1", "--adaptor", "eager", "--cache-dir")
    assert run(*model, tmp_path / "cache").code == 0
    export(f"{repository}:model", tmp_path / "cache")
    (tmp_path / "car").mkdir()
    here = applied(f"{repository}:model", tmp_path / "car/models")
    with in_another_container(tmp_path / "car") as root:
        there = tmp_path / "mounted" if root is not None else ""
        if there:
            there.symlink_to(root / "models")
        loaded = forked(LOADING, FIXTURE.parent, here, there)
    assert loaded.code == 0, loaded.err


def test_shared_artifact_is_pruned_with_the_last_entry_that_links_to_it(repository, tmp_path):
    hashes = [lay_entry(tmp_path / "cache", seed=3, factors={"width": width}) for width in (1, 2)]
    export(f"{repository}:two", tmp_path / "cache")
    made = applied(f"{repository}:two", tmp_path / "made")
    shared = made / "torch_compile_cache/artifacts"
    listed = run("inspect", "cache", made, "--json")
    assert (len(listed.report["entries"]), listed.report["warnings"]) == (2, [])
    for hash_, left in zip(hashes, (4, 0), strict=True):
        assert run("prune", "--cache-dir", made, "--entry", hash_, "--yes").code == 0
        again = run("prune", "--cache-dir", made, "--yes")
        assert (again.code, "no entry links to" in again.out) == (0, not left), again.out
        assert len(list(shared.iterdir())) == left
        assert all(path.exists() for path in made.rglob("*"))


def test_equal_caches_give_equal_images_that_share_layers(repository, tmp_path):
    for name, factors in (("one", {}), ("copy", {}), ("other", {"width": 3})):
        lay_entry(tmp_path / name, seed=3, factors=factors)
        export(f"{repository}:{name}", tmp_path / name)
    assert manifest_of(f"{repository}:one") == manifest_of(f"{repository}:copy")
    one, other = (layers_of(f"{repository}:{name}") for name in ("one", "other"))
    assert one[:-1] == other[:-1]
    assert one[-1] != other[-1]
    assert len(one) == 1 + 4


def test_image_does_not_exceed_the_layer_limit(repository, tmp_path):
    lay_entry(tmp_path / "cache", seed=4, shapes=tuple(f"n={size}" for size in range(2, 62)))
    report = export(f"{repository}:many", tmp_path / "cache")
    assert (report["members"] > 120, len(layers_of(f"{repository}:many"))) == (True, 102)
    made = applied(f"{repository}:many", tmp_path / "made")
    assert run("diff", tmp_path / "cache", made).code == 0


def test_image_keeps_signatures(repository, tmp_path):
    make_keys(tmp_path, "release")
    hash_ = lay_entry(tmp_path / "cache", seed=5)
    export(f"{repository}:signed", tmp_path / "cache", "--sign", tmp_path / "release.pem")
    made = applied(f"{repository}:signed", tmp_path / "made")
    name = RankName(hash=hash_, rank=0, prefix="backbone")
    policy = TrustPolicy(trusted_keys=(str(tmp_path / "release.pub"),))
    assert policy.read(CacheLayout(root=made), name) is not None


def test_image_has_labels_for_its_targets(repository, tmp_path):
    hash_ = lay_entry(tmp_path / "cache", seed=6, factors=CUDA)
    size_bytes = export(f"{repository}:cuda", tmp_path / "cache")["size_bytes"]
    manifest, config = json.loads(manifest_of(f"{repository}:cuda")), config_of(f"{repository}:cuda")
    said = config["config"]["Labels"]
    assert said == manifest["annotations"]
    target = {
        "backend": "cuda", "arch": "90", "torch_version": "2.11.0+cu128", "warp_size": 32, "cuda_version": "12.8",
    }  # fmt: skip
    assert json.loads(said["cache.cgtool.image/summary"]) == {"targets": [target]}
    assert said["cache.cgtool.image/cache-size-bytes"] == str(size_bytes)
    assert (said["cache.cgtool.image/entry-count"], said["io.kserve.km/cache-hash"]) == ("1", hash_)
    assert (config["architecture"], config["os"]) == ("amd64", "linux")
    ran = run("export", f"{repository}:cuda", "--all", "--cache-dir", tmp_path / "cache")
    assert f"COPY --from={repository.removeprefix('oci://')}:cuda / " in ran.out + ran.err


def test_image_has_a_single_processor_architecture(repository, tmp_path):
    for seed, machine in enumerate(("x86_64", "aarch64")):
        lay_entry(tmp_path / "cache", seed=seed, factors={"target": {"cpu": {"machine": machine}}})
    ran = run("export", f"{repository}:mixed", "--all", "--cache-dir", tmp_path / "cache")
    assert (ran.code, "aarch64 and x86_64" in ran.err) == (2, True)


def test_corrupt_artifact_leaves_the_image_unchanged(repository, tmp_path):
    hash_ = lay_entry(tmp_path / "cache", seed=7)
    export(f"{repository}:whole", tmp_path / "cache")
    before = manifest_of(f"{repository}:whole")
    artifact = sorted((tmp_path / f"cache/torch_compile_cache/{hash_}/artifacts").iterdir())[1]
    data = bytearray(artifact.read_bytes())
    data[-1] ^= 1
    artifact.chmod(0o644)
    artifact.write_bytes(data)
    ran = run("export", f"{repository}:whole", "--all", "--cache-dir", tmp_path / "cache")
    assert (ran.code, "do not match its digest" in ran.err) == (1, True)
    assert manifest_of(f"{repository}:whole") == before


def test_push_and_export_do_not_replace_each_others_tags(repository, tmp_path):
    lay_entry(tmp_path / "cache", seed=8)
    here = ("--cache-dir", tmp_path / "cache")
    export(f"{repository}:image", tmp_path / "cache")
    assert run("push", f"{repository}:store", *here).code == 0
    before = [manifest_of(f"{repository}:{name}") for name in ("image", "store")]
    for command, code, sentence in (
        (("push", f"{repository}:image", *here), 1, "is a container image"),
        (("pull", f"{repository}:image", "--trust", *here), 1, "is a container image"),
        (("inspect", "cache", f"{repository}:image"), 1, "is a container image"),
        (("import", f"{repository}:image", "--trust", *here), 2, "has no bundles"),
        (("export", f"{repository}:store", *here), 2, "is not an image of a cache"),
    ):
        ran = run(*command)
        assert (ran.code, sentence in ran.err) == (code, True), ran.err
    assert [manifest_of(f"{repository}:{name}") for name in ("image", "store")] == before
