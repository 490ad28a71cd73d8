"""Shared fixtures: an isolated home, one folder for compiled kernels, a cache root, and faulty disks."""

from __future__ import annotations

import compileall
import functools
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Write bytecode of tests and cgtool regardless of the environment: many processes import them again.
WRITES_NO_BYTECODE, sys.dont_write_bytecode = sys.dont_write_bytecode, False

from cli_harness import keep  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# Set at import, before a test module can import torch or start a process. Kernels are shared by all tests and all
# sessions, since the first C++ compile (headers, probes of the instruction set) costs more than everything after it.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"cgtool-tests-{os.getuid()}"))

# Tests write many small files, which a disk makes slower than the code under test. A memory file system must allow code
# to run, since packages are loaded from there, and have room for what failed tests leave behind.
MEMORY = Path("/dev/shm")
if os.access(MEMORY, os.W_OK | os.X_OK):
    _space = os.statvfs(MEMORY)
    if not _space.f_flag & os.ST_NOEXEC and _space.f_bavail * _space.f_frsize >= 8 << 30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# A shell that runs this in the background has it ignore Ctrl-C, which every process that a test starts would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Workers and their children share two cores, so idle threads must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A warm syncs some thirty times, and no test cuts the power. Tests that count system calls restore fsync.
os.fsync = lambda descriptor: None

TESTS = Path(__file__).parent

# A busy machine generates examples slowly, which is no fault. Under CI, Hypothesis' own profile is the parent.
settings.register_profile(
    "cgtool", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("cgtool")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Use three workers on two cores, because tests wait for other processes a fifth of the time.

    Use none when files were named: starting workers would cost more than it saves.
    """
    return 0 if config.option.file_or_dir else 3


def pytest_configure(config: pytest.Config) -> None:
    """Keep the order of `pytest_collection_modifyitems`; xdist would start with the files of many tests."""
    config.option.loadscopereorder = False
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(TESTS.parent / "cgtool", quiet=2)


def pytest_collection_finish() -> None:
    """Disable bytecode for modules that tests write and change, if the environment requests it.

    Also freeze the objects of modules imported so far, which live as long as this process. `gc.get_freeze_count` is
    replaced because it counts them one by one, and each load calls it.
    """
    sys.dont_write_bytecode = WRITES_NO_BYTECODE
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = functools.wraps(gc.get_freeze_count)(lambda: 1)
    gc.set_threshold(50_000, 20, 10)


def pytest_sessionfinish() -> None:
    """Freeze objects before pytest's final garbage collection, whose ten rounds are slow and useless."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the longest files of few tests, so that short ones fill up the end."""
    order = {name: place for place, name in enumerate(("e2e", "soundness", "cli", "compiler"))}
    items.sort(key=lambda item: order.get(item.path.relative_to(TESTS).parts[0], len(order)))


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Replace a long value by its length in test ids, which become part of environments, folders and reports."""
    if isinstance(val, (str, bytes)) and len(val) > 200:
        return f"{argname} of {len(val)}"
    return None


@pytest.fixture(scope="session", autouse=True)
def isolated_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home without the user's caches and settings, for this process and its children."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        for name in list(os.environ):
            if name.startswith("CGTOOL_") or name in {"XDG_CACHE_HOME", "RANK", "LOCAL_RANK"}:
                patch.delenv(name)
        yield home


@pytest.fixture(scope="module", autouse=True)
def process_as_it_was(isolated_home: Path) -> Iterator[None]:
    """Restore process-wide state after each file."""
    variables, folder, settings = dict(os.environ), Path.cwd(), _torch_settings()
    yield
    for name in os.environ.keys() - variables.keys() | {n for n in variables if os.environ.get(n) != variables[n]}:
        if name != "PYTEST_CURRENT_TEST":
            os.environ.pop(name) if name not in variables else os.environ.update({name: variables[name]})
    os.chdir(folder)
    gc.enable()
    for name, value in settings.items():
        if _torch_settings()[name] != value:
            getattr(sys.modules["torch"], f"set_{name}")(value)


def _torch_settings() -> dict[str, object]:
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    return {
        "default_dtype": torch.get_default_dtype(),
        "default_device": torch.get_default_device().type,
        "grad_enabled": torch.is_grad_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "num_threads": torch.get_num_threads(),
    }


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """Restore cgtool's logger, which a command run in this process redirects to its output.

    This happens before a test, too, because fixtures of modules and of the session run commands.
    """
    logger = logging.getLogger("cgtool")
    logger.handlers, logger.propagate, logger.level = [], True, logging.NOTSET
    yield
    logger.handlers, logger.propagate, logger.level = [], True, logging.NOTSET


@pytest.fixture(scope="session")
def worded_site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment with a distribution that provides an adaptor (worded_adaptor.py)."""
    site = tmp_path_factory.mktemp("site")
    metadata = site / "worded-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: worded\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[cgtool.adaptors]\nworded = worded_adaptor:Worded\n")
    shutil.copy(TESTS / "worded_adaptor.py", site)
    return keep({"PYTHONPATH": os.pathsep.join([str(site), str(TESTS.parent)])})


@pytest.fixture
def worded_here(worded_site: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the distribution of `worded_site` available in this process and its children."""
    from cgtool import adaptor_registry

    monkeypatch.setenv("PYTHONPATH", worded_site["PYTHONPATH"])
    monkeypatch.syspath_prepend(worded_site["PYTHONPATH"].partition(os.pathsep)[0])
    adaptor_registry._installed.cache_clear()
    yield
    adaptor_registry._installed.cache_clear()


@pytest.fixture
def cache_root(tmp_path: Path) -> Path:
    """The root of a test's cache; the folder does not exist yet."""
    return tmp_path / "cache"


def _mount(*arguments: str) -> None:
    try:
        subprocess.run(["mount", *arguments], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount")


def _unmount(path: Path) -> None:
    subprocess.run(["umount", "--lazy", str(path)], check=True, capture_output=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB; skips the test if this process cannot mount."""
    folder = tmp_path / "small"
    folder.mkdir()
    _mount("-t", "tmpfs", "-o", "size=512k,mode=755", "tmpfs", str(folder))
    yield folder
    _unmount(folder)


@pytest.fixture
def read_only() -> Iterator[Callable[[Path], Path]]:
    """Makes a folder read-only, even for root; skips the test if this process cannot mount."""
    mounted = []

    def make(folder: Path) -> Path:
        _mount("--bind", str(folder), str(folder))
        mounted.append(folder)
        _mount("-o", "remount,ro,bind", str(folder))
        return folder

    yield make
    for folder in mounted:
        _unmount(folder)
