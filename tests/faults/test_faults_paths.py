"""Paths that cannot be accessed are errors of the public functions, too."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from faults_harness import lay_start, prune_two, told
from syscalls import calls_of, copy_anew, failed_at

from cgtool.errors import CacheError
from cgtool.store.layout import CacheLayout
from cgtool.toolkit.bundle.choose import Choice
from cgtool.toolkit.bundle.export import export
from cgtool.toolkit.bundle.import_ import import_bundle
from cgtool.toolkit.completion import completion
from cgtool.toolkit.diff.run import diff
from cgtool.toolkit.inspect.artifact import inspect_artifact
from cgtool.toolkit.inspect.cache import inspect_cache
from cgtool.toolkit.inspect.entry import inspect_entry, inspect_key
from cgtool.toolkit.inspect.graph import inspect_graph
from cgtool.toolkit.prune.plan import Rules
from cgtool.toolkit.prune.run import plan_prune, prune_stats
from cgtool.toolkit.verify.run import verify

EVERYTHING = Choice(everything=True)
COMMANDS: dict[str, Callable[[Path, Path], object]] = {
    "verify a cache": lambda _, path: verify(cache_dir=path),
    "verify a path": lambda _, path: verify(targets=(str(path),)),
    "prune": lambda _, path: plan_prune(Rules(), cache_dir=path),
    "prune --stats": lambda _, path: prune_stats(path),
    "export from": lambda there, path: export(dest=there / "out", cache_dir=path, choice=EVERYTHING),
    "export to": lambda there, path: export(dest=path, cache_dir=there / "other", choice=EVERYTHING),
    "export to a folder": lambda there, path: export(
        dest=path, cache_dir=there / "other", choice=EVERYTHING, folder=True
    ),
    "import from": lambda there, path: import_bundle(
        source=path, cache_dir=there / "cache", trust=True, any_machine=True
    ),
    "import to": lambda there, path: import_bundle(
        source=there / "bundle", cache_dir=path, trust=True, any_machine=True
    ),
    "inspect cache": lambda _, path: inspect_cache(path),
    "inspect entry": lambda _, path: inspect_entry(cache_dir=path),
    "inspect key": lambda _, path: inspect_key(cache_dir=path),
    "inspect graph": lambda _, path: inspect_graph(cache_dir=path),
    "diff": lambda there, path: diff(str(path), str(there / "other")),
    "inspect artifact": lambda _, path: inspect_artifact("0" * 10, cache_dir=path),
}


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"diff", "verify a path"}))  # which say it is not there
def test_too_long_name_is_a_cache_error(tmp_path: Path, command: str) -> None:
    lay_start(tmp_path / "start", command)
    path = tmp_path / ("x" * 300)
    with pytest.raises(CacheError, match=r"xxx.* could not be .*: File name too long\. Check .*\."):
        COMMANDS[command](tmp_path / "start", path)


@pytest.mark.parametrize(
    "command", ["inspect artifact", "inspect entry", "inspect key", "inspect graph", "export from"]
)
def test_unreadable_manifest_is_a_cache_error(tmp_path: Path, command: str) -> None:
    lay_start(tmp_path / "start", command)
    cache = tmp_path / "start" / "cache"
    manifest = next(cache.rglob("manifest.json"))
    manifest.unlink()
    manifest.symlink_to("x" * 300)
    with pytest.raises(CacheError, match=rf"{manifest} could not be read: File name too long\. Check .*\."):
        COMMANDS[command](tmp_path / "start", cache)


def test_prune_continues_if_it_cannot_check_a_removed_entry(tmp_path: Path) -> None:
    start, work = tmp_path / "start", tmp_path / "work"
    lay_start(start, "prune")
    copy_anew(start, work)
    calls = calls_of(partial(prune_two, work), names="newfstatat", under=work)
    gone = [call for call in calls if re.search(r'/[0-9a-f]{64}", .* ENOENT', call.text)]
    copy_anew(start, work)
    ended = failed_at(gone[-1], "EIO", partial(told, prune_two, work))
    assert ended.code == 0, ended.said
    assert len(CacheLayout(root=work / "cache").hashes()) == 1


def test_unwritable_startup_file_is_a_cache_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".zshrc").symlink_to("x" * 300)
    with pytest.raises(CacheError, match=r"could not be written: File name too long\. Check .*\."):
        completion(lambda _: "# a script\n", shell="zsh", install=True)
