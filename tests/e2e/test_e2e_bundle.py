"""A real entry is exported, imported by another user at another place without a compiler, and loaded there."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys

import pytest
from bundle_maker import make_keys
from e2e_harness import FIXTURES, REPO, cgtool

pytestmark = pytest.mark.torch

#: Lets a command run with another's number, and with a torch that cannot be written to.
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
            came = torch.allclose(model(*args), spec.module(*args), rtol=1e-4, atol=1e-4)
    except cgtool.errors.RefusedError as error:
        came = error.reason
    except cgtool.errors.CgtoolError as error:
        came = str(error)
    print(json.dumps([came, sorted({"torch._dynamo", "torch._inductor", "cryptography"} & set(sys.modules))]))
"""


@pytest.fixture(scope="module")
def bundle(sized_cache, tmp_path_factory):
    """A folder with a signed bundle of a small model, its cache, and keys."""
    folder = tmp_path_factory.mktemp("bundle")
    make_keys(folder / "keys", "ours", "theirs")
    root = sized_cache("tiny_llama").copy(folder / "cache")
    done = cgtool("export", folder / "model.tar.zst", "--cache-dir", root, "--sign", folder / "keys/ours.pem")
    assert done.code == 0, done.err
    return folder


@pytest.fixture
def elsewhere(tmp_path):
    """Runs commands as another's machine would: another home and user, torch read-only, no compiler that works."""
    poison = tmp_path / "poison"
    poison.mkdir()
    for name in ("cc", "gcc", "g++", "c++", "clang", "clang++", "ld", "nvcc", "ptxas"):
        (poison / name).write_text('#!/bin/sh\necho "$*" >> "$HOME/compiled"\nexit 1\n')
        (poison / name).chmod(0o755)
    home = tmp_path / "home of another"
    home.mkdir()
    wrapper = ANOTHER if _may_be_another() else []

    def command(*arguments: object) -> subprocess.CompletedProcess[str]:
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
        asked = (home / "compiled").read_text().splitlines() if (home / "compiled").exists() else []
        assert set(asked) <= {"--version"}, "a compiler was called"
        return done

    return command


def _may_be_another() -> bool:
    return shutil.which("unshare") is not None and subprocess.run([*ANOTHER, "true"], check=False).returncode == 0


@pytest.fixture
def loads(bundle, elsewhere):
    """Loads the model from a cache as it is, with our key, with another one, and once others may write there."""

    def load(root):
        done = elsewhere("-c", LOADS, root, bundle / "keys/ours.pub", bundle / "keys/theirs.pub", FIXTURES)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return load


def test_an_entry_that_another_user_imports_without_a_compiler_is_proved_and_loads_there(
    bundle, elsewhere, loads, tmp_path
):
    root, public = tmp_path / "another" / "root", bundle / "keys/ours.pub"
    done = elsewhere(
        "-m", "cgtool", "import", bundle / "model.tar.zst", "--require-signature", public, "--cache-dir", root, "--json"
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [entry["outcome"] for entry in report["entries"]] == ["new"]
    assert report["entries"][0]["verdict"] in ("optimal", "loads")

    model = ("--model", f"{FIXTURES / 'tiny_llama.py'}:build")
    done = elsewhere("-m", "cgtool", "verify", "--load", *model, "--cache-dir", root, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    artifacts = {path.name for path in root.rglob("artifacts/*")}
    assert [(rank["opened"], rank["problems"]) for rank in report["load"]["entries"]] == [(len(artifacts), [])]
    assert report["load"]["model"] == {"hash": report["entries"][0]["hash"], "called": True, "sentence": ""}
    assert report["load"]["compiled"] == []
    assert report["ok"]

    plain, signed, other, shared = loads(root)
    assert plain == [True, []]
    assert signed == [True, ["cryptography"]]
    assert (other[0], shared[0]) == ("untrusted_key", "writable_by_others")


def test_a_changed_byte_of_an_artifact_is_never_opened(bundle, loads, tmp_path):
    shutil.copytree(bundle / "cache", tmp_path / "root")
    for path in (tmp_path / "root/torch_compile_cache").glob("*/artifacts/*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.chmod(0o644)
        path.write_bytes(data)
    assert "its bytes do not match its digest" in loads(tmp_path / "root")[0][0]


def test_two_exports_of_a_real_entry_give_one_archive(bundle, tmp_path):
    shutil.copytree(bundle / "cache", tmp_path / "copy")
    again = tmp_path / "again.tar.zst"
    key = bundle / "keys/ours.pem"
    done = cgtool("export", again, "--cache-dir", tmp_path / "copy", "--sign", key)
    assert done.code == 0, done.err
    assert again.read_bytes() == (bundle / "model.tar.zst").read_bytes()
