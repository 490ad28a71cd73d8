"""Opening packages with little memory, disk or descriptors: correct results or a clear error, and no leftovers."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
HERE = Path(__file__).parent

import torch  # noqa: E402
from aot_cases import CUSTOM_OPS  # noqa: E402
from aot_packages import package_of  # noqa: E402
from cli_harness import forked  # noqa: E402
from msgspec.structs import replace  # noqa: E402
from piece_cases import CASES, inputs_of  # noqa: E402

from cgtool.errors import ArtifactError  # noqa: E402
from cgtool.runtime import aoti_package  # noqa: E402
from cgtool.runtime.aoti_package import open_package  # noqa: E402
from cgtool.runtime.op_by_op import piece_function  # noqa: E402
from cgtool.store.artifacts import pack, unpack  # noqa: E402

pytestmark = pytest.mark.torch

#: Two packages whose files have the same names.
NAMES = ("two inputs", "a fact")
#: Opens a package as a server does and prints whether its result equals eager.
CHILD = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
import torch
from piece_cases import CASES, inputs_of
from cgtool.errors import ArtifactError
from cgtool.runtime import aoti_package
from cgtool.runtime.aoti_package import open_package
from cgtool.runtime.op_by_op import piece_function
aoti_package._PARENTS = aoti_package._PARENTS[1:]  # as where there is no /dev/shm
case = CASES["two inputs"]
try:
    run = open_package(pathlib.Path(package).read_bytes(), case.piece)
except ArtifactError as error:
    print("refused:", error)
else:
    with torch.no_grad():
        found, expected = (f(inputs_of(case, {"s0": 5})) for f in (run, piece_function(case.piece)))
    print("right" if torch.allclose(found[0], expected[0], atol=1e-5) else "wrong")
"""


#: Is killed while it opens a package.
KILLED = """
import os, signal
from cgtool.runtime import _torch
_torch.open_package = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
"""


@functools.cache
def data_of(name):
    return package_of(CASES[name].piece)


def is_right(run, name, rows=4, seed=0):
    case = CASES[name]
    with torch.no_grad():
        found, expected = (f(inputs_of(case, {"s0": rows}, seed)) for f in (run, piece_function(case.piece)))
    return torch.allclose(found[0], expected[0], atol=1e-5)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """All packages, compiled before a test removes what compiling needs."""
    for name in NAMES:
        data_of(name)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty temporary folder, the only one available."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(aoti_package, "_PARENTS", (None,))
    return tmp_path


def in_a_process(source=CHILD, *, before="", data=None, **changes):
    """Run `before` and a program in a fork; `package` is the path of a package."""
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as file:
        file.write(data_of("two inputs") if data is None else data)
        file.flush()
        return forked(f"package = {file.name!r}\n{before}\n{source}", HERE.parent, env={**os.environ, **changes})


def test_nothing_is_left_when_a_package_is_open(folder):
    data = data_of("two inputs")
    before = len(list(Path("/proc/self/fd").iterdir()))
    run = open_package(data, CASES["two inputs"].piece)
    assert list(folder.iterdir()) == []
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert is_right(run, "two inputs")


def test_opening_a_package_needs_only_a_few_hundred_bytes_on_disk(folder, monkeypatch):
    seen = []

    def look(path, device_index):
        files = [file for file in Path(path).rglob("*") if file.is_file() and not file.is_symlink()]
        seen.append((sum(file.stat().st_size for file in files), Path(path).stat().st_mode & 0o777))
        raise RuntimeError("looked")

    monkeypatch.setattr(aoti_package.private, "open_package", look)
    with pytest.raises(ArtifactError, match="looked"):
        open_package(data_of("two inputs"), CASES["two inputs"].piece)
    assert seen[0][0] < 1000
    assert seen[0][1] == 0o700
    assert list(folder.iterdir()) == []


@pytest.fixture
def no_memory_files(monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "no memory files here")

    monkeypatch.setattr(os, "memfd_create", refuse)


@pytest.mark.usefixtures("no_memory_files")
def test_without_memory_files_the_code_is_in_a_private_folder(folder):
    runs = {name: open_package(data_of(name), CASES[name].piece) for name in NAMES}
    assert list(folder.iterdir()) == []
    assert all(is_right(run, name) for name, run in runs.items())


def test_no_writable_folder_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    monkeypatch.setattr(aoti_package, "_PARENTS", (None, str(tmp_path / "nowhere")))
    with pytest.raises(ArtifactError, match=r"temporary folder, and none can be written to .* Set TMPDIR"):
        open_package(data_of("two inputs"), CASES["two inputs"].piece)


def test_another_folder_is_used_if_the_first_is_missing(folder, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "missing"))
    monkeypatch.setattr(aoti_package, "_PARENTS", (None, str(folder)))
    assert is_right(open_package(data_of("two inputs"), CASES["two inputs"].piece), "two inputs")
    assert list(folder.iterdir()) == []


def test_too_many_open_files_are_reported():
    source = CHILD.replace(
        "try:\n    run = open_package(pathlib.Path(package).read_bytes(), case.piece)",
        "import os, resource\n"
        "data = pathlib.Path(package).read_bytes()\n"
        "import tempfile\n"
        "tempfile.gettempdir(), 'loads the codec of names'.encode('cp437')\n"
        "first = os.dup(0)\n"
        "os.close(first)\n"
        "free = 0\n"
        "while True:\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (first + free, 4096))\n"
        "    try:\n"
        "        run = open_package(data, case.piece)\n"
        "        break\n"
        "    except ArtifactError as error:\n"
        "        print(free, error)\n"
        "    free += 1\n"
        "try:\n    pass",
    )
    done = in_a_process(source)
    *refused, last = done.out.splitlines()
    assert (last, done.code) == ("right", 0), done.err
    assert refused
    assert all("Too many open files" in line and "ulimit -n" in line for line in refused), refused


@pytest.mark.parametrize("limit", [0, 4096, 65536])
def test_a_package_above_the_file_size_limit_is_reported(limit):
    before = (
        "import builtins, resource\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "def allow(num_bytes):\n    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))\n"
        "builtins.print = lambda *words, say=print: [allow(hard), say(*words)]  # to a file\n"
        f"allow({limit})"
    )
    done = in_a_process(before=before)
    (said,) = done.out.splitlines()
    assert said.startswith("refused: A compiled package of "), done.err
    assert said.endswith("Raise the limit (`ulimit -f`).")


#: Runs a shell command in a private mount namespace.
ALONE = """
import ctypes, os, pathlib, subprocess
who = {{"uid_map": f"0 {{os.getuid()}} 1", "setgroups": "deny", "gid_map": f"0 {{os.getgid()}} 1"}}
system = ctypes.CDLL(None, use_errno=True)
new_mounts, new_user, private = 0x20000, 0x10000000, 0x44000
assert system.unshare(new_mounts | new_user) == 0, ctypes.get_errno()
for name, text in who.items():
    pathlib.Path(f"/proc/self/{{name}}").write_text(text)
assert system.mount(None, b"/", None, private, None) == 0, ctypes.get_errno()
subprocess.run({!r}, shell=True, check=True)
"""


def in_a_place(script, folder):
    """Open a package after `script` mounted a file system at the temporary folder; skip if that is not permitted."""
    tried = shutil.which("unshare") and subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-ec", script], capture_output=True, check=False
    )
    if not tried or tried.returncode:
        pytest.skip("nothing can be mounted here")
    return in_a_process(before=ALONE.format(script), TMPDIR=str(folder))


@pytest.mark.parametrize(
    "options",
    [
        "size=64k,noexec",
        "ro",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("size=64k", "noexec", "size=4k")),
    ],
)
def test_a_package_opens_whatever_the_temporary_folder_is(tmp_path, options):
    done = in_a_place(f"mount -t tmpfs -o {options} tmpfs {tmp_path}", tmp_path)
    assert done.out.strip() == "right", done.err


def test_a_package_opens_with_a_full_temporary_folder(tmp_path):
    fill = f"head -c 1000000 /dev/zero > {tmp_path}/full 2>/dev/null || true"
    done = in_a_place(f"mount -t tmpfs -o size=64k tmpfs {tmp_path}; {fill}", tmp_path)
    assert done.out.strip() == "right", done.err


def test_a_killed_opening_leaves_a_few_hundred_bytes(tmp_path):
    assert in_a_process(before=KILLED, TMPDIR=str(tmp_path)).code == -9
    left = [file.lstat().st_size for file in tmp_path.rglob("*") if not file.is_dir()]
    assert 0 < sum(left) < 1000


def test_packages_of_equal_names_are_not_mixed():
    data = {name: data_of(name) for name in NAMES}
    kept = []
    for turn in range(200):
        name = NAMES[(turn // 3) % 2]
        run = open_package(data[name], CASES[name].piece)
        assert is_right(run, name, rows=4 + turn % 2 * 4)
        if turn % 5 == 0:
            kept.append((name, run))
        if turn % 50 == 49:
            kept = kept[::2]
    assert all(is_right(run, name, rows=8) for name, run in kept)


@pytest.mark.usefixtures("no_memory_files")
def test_packages_of_equal_names_are_not_mixed_without_memory_files(folder):
    data = {name: data_of(name) for name in NAMES}
    for turn in range(60):
        name = NAMES[turn % 2]
        assert is_right(open_package(data[name], CASES[name].piece), name)
    assert list(folder.iterdir()) == []


def in_threads(work):
    """Run `work` in eight threads that start together; return the results in order."""
    start, found = threading.Barrier(8), {}

    def begin(index):
        start.wait()
        found[index] = work(index)

    threads = [threading.Thread(target=begin, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found.get(index) for index in range(8)]


def asked(num):
    """Inputs and eager's outputs, computed in advance because threads share the random state."""
    case = CASES["two inputs"]
    calls = [inputs_of(case, {"s0": 2 + seed % 9}, seed) for seed in range(num)]
    with torch.no_grad():
        return [(inputs, piece_function(case.piece)(list(inputs))[0]) for inputs in calls]


def test_several_threads_may_call_one_function():
    run, calls = open_package(data_of("two inputs"), CASES["two inputs"].piece), asked(40)

    def work(index):
        return all(torch.allclose(run(list(x))[0], y, atol=1e-5) for x, y in (*calls[index:], *calls[:index]) * 5)

    assert in_threads(work) == [True] * 8


def test_several_threads_may_open_one_package():
    data, calls = data_of("two inputs"), asked(8)

    def work(index):
        x, y = calls[index]
        runs = [open_package(data, CASES["two inputs"].piece) for _ in range(10)]
        return all(torch.allclose(run(list(x))[0], y, atol=1e-5) for run in runs)

    assert in_threads(work) == [True] * 8


@pytest.fixture
def before_2_13(monkeypatch):
    """Emulate a torch whose loader can only open archives, which it unpacks itself."""
    monkeypatch.setattr(aoti_package.private, "opens_folders", lambda: False)


@pytest.mark.usefixtures("before_2_13")
def test_files_unpacked_for_one_thread_stay_while_another_opens(monkeypatch):
    """Other threads that finish in the meantime must not remove the files that torch unpacked for this one."""
    data, calls = data_of("two inputs"), asked(8)
    opened = aoti_package.private.open_package
    missing = []

    def slow(path, device_index):
        before = aoti_package._unpacked_folders()
        loader = opened(path, device_index)
        time.sleep(0.02)
        missing.extend(folder for folder in aoti_package._unpacked_folders() - before if not Path(folder).exists())
        return loader

    monkeypatch.setattr(aoti_package.private, "open_package", slow)

    def work(index):
        x, y = calls[index]
        runs = [open_package(data, CASES["two inputs"].piece) for _ in range(4)]
        return all(torch.allclose(run(list(x))[0], y, atol=1e-5) for run in runs)

    assert in_threads(work) == [True] * 8
    assert missing == []
    assert not any(Path(folder).exists() for folder in aoti_package._unpacked_folders())


@pytest.mark.usefixtures("before_2_13")
def test_unpacked_kernels_stay_when_another_package_is_opened(monkeypatch):
    monkeypatch.delenv("TMPDIR", raising=False)  # torch unpacks there, and the test looks below /tmp
    package = replace(unpack(data_of("two inputs")), kernels={"k.cubin": b"\x7fELF"})
    before = aoti_package._unpacked_folders()
    first = open_package(pack(package), CASES["two inputs"].piece)
    [kept] = aoti_package._unpacked_folders() - before
    second = open_package(data_of("two inputs"), CASES["two inputs"].piece)
    try:
        assert (Path(kept) / "piece/data/aotinductor/model/k.cubin").exists()
        assert is_right(first, "two inputs")
        assert is_right(second, "two inputs")
    finally:
        shutil.rmtree(kept)


def test_the_next_load_removes_the_folder_of_a_killed_load(folder):
    assert in_a_process(before=KILLED, TMPDIR=str(folder)).code == -9
    [left] = folder.iterdir()
    others = [folder / "cgtool-notes", folder / f"cgtool-{'0' * 16}.txt", folder / "else"]
    for other in others:
        other.mkdir()
    open_package(data_of("two inputs"), CASES["two inputs"].piece)
    assert left.exists()  # it may belong to another process that has just created it
    for path in (left, *others):
        os.utime(path, (0, 0))
    open_package(data_of("two inputs"), CASES["two inputs"].piece)
    assert sorted(folder.iterdir()) == sorted(others)


def test_the_next_load_removes_the_folder_of_an_interrupted_load(folder):
    left = aoti_package._new_folder(str(folder), aoti_package.Packages())
    assert len(aoti_package._folders[left].held) == 1
    open_package(data_of("two inputs"), CASES["two inputs"].piece)
    assert list(folder.iterdir()) == []
    assert not any(path.is_symlink() and str(left) in str(path.readlink()) for path in Path("/proc/self/fd").iterdir())


def test_the_folder_of_a_running_load_is_kept(folder):
    with aoti_package.Packages() as live:
        live.open(data_of("two inputs"), CASES["two inputs"].piece)
        [held] = folder.iterdir()
        os.utime(held, (0, 0))
        aoti_package._folders.pop(held)  # another process does not have the record
        open_package(data_of("two inputs"), CASES["two inputs"].piece)
        assert held.exists()


def test_an_op_that_is_not_registered_is_reported():
    name = "a custom op of several results"
    source = (
        "import pathlib, sys\nsys.path.insert(0, sys.argv[1])\n"
        "from piece_cases import X, graph\nfrom cgtool.errors import ArtifactError\n"
        "from cgtool.runtime.aoti_package import open_package\n"
        "try:\n    open_package(pathlib.Path(package).read_bytes(), graph([X], [], ['%0', '%0']))\n"
        "except ArtifactError as error:\n    print(error)\n"
    )
    done = in_a_process(source, data=package_of(CUSTOM_OPS[name].piece))
    assert "cgtool_user" in done.out, done.err
    assert "Import the module" in done.out


@pytest.mark.slow
def test_torchs_own_loader_opens_a_package(tmp_path):
    path = tmp_path / "piece.pt2"
    path.write_bytes(data_of("two inputs"))
    source = (
        "import sys, torch\nimport torch._inductor\n"
        "run = torch._inductor.aoti_load_package(sys.argv[2])\n"
        "print(run(torch.ones(3, 8), torch.ones(8, 8)).shape)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", source, str(HERE.parent), str(path)], capture_output=True, text=True, check=False
    )
    assert "outdated" not in done.stderr
    assert done.stdout.strip() == "torch.Size([3, 8])", done.stderr
