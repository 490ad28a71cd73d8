"""Another user, without a compiler, imports an exported entry elsewhere and loads it."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys

import pytest
from bundle_maker import make_keys
from e2e_harness import FIXTURES, REPO, SERVED
from e2e_harness import cgtool as command
from hold_harness import fixture_spec

import cgtool

pytestmark = pytest.mark.torch

#: Runs a command as another user, with torch mounted read-only.
MOUNTS = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec unshare --map-user=4242 --map-group=4242 "$@"'
TORCH = importlib.util.find_spec("torch").submodule_search_locations[0]
ANOTHER = ["unshare", "-r", "-m", "sh", "-c", MOUNTS, TORCH]

LOADS = """
import json, os, sys
root, ours, theirs, fixtures = sys.argv[1:]
sys.path.insert(0, fixtures)
import cgtool, tiny_llama, torch
spec = tiny_llama.build()
args = spec.calls[0].args
for keys in (), (ours,), (theirs,), "shared":
    if keys == "shared":
        os.chmod(root, 0o777)
        keys = ()
    try:
        model = cgtool.load(spec.module, cache_dir=root, trusted_keys=keys)
        with torch.no_grad():
            result = torch.allclose(model(*args), spec.module(*args), rtol=1e-4, atol=1e-4)
    except cgtool.errors.RefusedError as error:
        result = error.reason
    except cgtool.errors.CgtoolError as error:
        result = str(error)
    print(json.dumps([result, sorted({"torch._dynamo", "torch._inductor", "cryptography"} & set(sys.modules))]))
"""


@pytest.fixture(scope="module")
def bundle(native_llama, tmp_path_factory):
    """A folder with a signed bundle of a small model, its cache, and keys."""
    folder = tmp_path_factory.mktemp("bundle")
    make_keys(folder / "keys", "ours", "theirs")
    root = native_llama.copy(folder / "cache")
    done = command("export", folder / "model.tar.zst", "--cache-dir", root, "--sign", folder / "keys/ours.pem")
    assert done.code == 0, done.err
    return folder


@pytest.fixture
def elsewhere(tmp_path):
    """Runs Python as on another machine: another home and user, torch read-only, and compilers that fail."""
    poison = tmp_path / "poison"
    poison.mkdir()
    for name in ("cc", "gcc", "g++", "c++", "clang", "clang++", "ld", "nvcc", "ptxas"):
        (poison / name).write_text('#!/bin/sh\necho "$*" >> "$HOME/compiled"\nexit 1\n')
        (poison / name).chmod(0o755)
    home = tmp_path / "home of another"
    home.mkdir()
    can_switch = shutil.which("unshare") and subprocess.run([*ANOTHER, "true"], check=False).returncode == 0
    wrapper = ANOTHER if can_switch else []

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        variables = {"HOME": str(home), "PATH": str(poison), "PYTHONPATH": str(REPO), "USER": "another"}
        line = [shutil.which("env"), "-i", *(f"{name}={value}" for name, value in variables.items())]
        done = subprocess.run(
            [*wrapper, *line, sys.executable, *map(str, arguments)],
            cwd=home,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        calls = (home / "compiled").read_text().splitlines() if (home / "compiled").exists() else []
        assert set(calls) <= {"--version"}, "a compiler was called"
        return done

    return run


def test_another_user_without_a_compiler_imports_verifies_and_loads_an_entry(bundle, elsewhere, tmp_path):
    root, public = tmp_path / "another" / "root", bundle / "keys/ours.pub"
    done = elsewhere(
        "-m", "cgtool", "import", bundle / "model.tar.zst", "--require-signature", public, "--cache-dir", root, "--json"
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [entry["outcome"] for entry in report["entries"]] == ["new"]
    assert report["entries"][0]["verdict"] in ("optimal", "loads")

    model = ("--model", f"{SERVED}:llama")
    done = elsewhere("-m", "cgtool", "verify", "--load", *model, "--cache-dir", root, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    artifacts = {path.name for path in root.rglob("artifacts/*")}
    assert [(rank["opened"], rank["problems"]) for rank in report["load"]["entries"]] == [(len(artifacts), [])]
    assert report["load"]["model"] == {"hash": report["entries"][0]["hash"], "called": True, "sentence": ""}
    assert report["load"]["compiled"] == []
    assert report["ok"]

    # Load as it is, with our key, with another key, and when others can write to the cache.
    done = elsewhere("-c", LOADS, root, public, bundle / "keys/theirs.pub", FIXTURES)
    assert done.returncode == 0, done.stderr
    plain, signed, other, shared = map(json.loads, done.stdout.splitlines())
    assert plain == [True, []]
    assert signed == [True, ["cryptography"]]
    assert (other[0], shared[0]) == ("untrusted_key", "writable_by_others")


def test_an_artifact_with_a_changed_byte_is_not_opened(bundle, tmp_path):
    shutil.copytree(bundle / "cache", tmp_path / "root")
    for path in (tmp_path / "root/torch_compile_cache").glob("*/artifacts/*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.chmod(0o644)
        path.write_bytes(data)
    with pytest.raises(cgtool.CgtoolError, match="its bytes do not match its digest"):
        cgtool.load(fixture_spec("llama").module, cache_dir=tmp_path / "root")


def test_two_exports_of_an_entry_are_the_same_archive(bundle, tmp_path):
    shutil.copytree(bundle / "cache", tmp_path / "copy")
    again = tmp_path / "again.tar.zst"
    key = bundle / "keys/ours.pem"
    done = command("export", again, "--cache-dir", tmp_path / "copy", "--sign", key)
    assert done.code == 0, done.err
    assert again.read_bytes() == (bundle / "model.tar.zst").read_bytes()
