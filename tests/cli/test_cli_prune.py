"""`cgtool prune`, on a cache that is created without a compiler."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import time
from contextlib import suppress

import msgspec
import pytest
from cache_maker import lay_decoder as lay_entry
from cli_harness import COMMAND, environment, run

from cgtool.store.layout import CacheLayout, RankName
from cgtool.store.leases import hold
from cgtool.store.pruned import PrunedEntry, count_miss, note_pruned

PLAN_KEYS = "schema root rules entries files kept misses size_bytes frees_bytes notes outcome"
ENTRY_KEYS = "hash model ranks created last_used size_bytes frees_bytes units reasons instead"


def hashes(root):
    return set(CacheLayout(root=root).hashes())


def run_on_terminal(*arguments, answer):
    """Run `cgtool` on a terminal, type an answer (or interrupt it), and return (exit code, output)."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment(TERM="dumb"),
    )
    os.close(follower)
    shown = b""
    deadline = time.time() + 60
    while b"[y/N]" not in shown and process.poll() is None:
        assert time.time() < deadline
        shown += os.read(leader, 65536)
    if answer:
        os.write(leader, answer.encode())
    while not answer and process.poll() is None:  # a signal just before the read takes effect only with the next one
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):  # a second one during Python's own end would kill it
            process.wait(timeout=5)
    try:
        while True:
            shown += os.read(leader, 65536)
    except OSError:  # the other end is closed
        pass
    os.close(leader)
    return process.wait(timeout=60), shown.decode()


def test_a_dry_run_shows_the_plan_and_changes_nothing(tmp_path):
    hash_ = lay_entry(tmp_path, model="Tiny\x1b[31m\nModel")
    ran = run("prune", "--keep-last", "0", "--dry-run", "--cache-dir", tmp_path)
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0].split() == ["hash", "model", "used", "size", "frees", "why"]
    assert lines[1].startswith(f"{hash_[:10]}  Tiny\\x1b[31m\\nModel  never")
    assert lines[1].endswith("it is not among the last 0 of its model")
    assert lines[2] == "These models will miss until they are warmed again: Tiny\\x1b[31m\\nModel."
    assert lines[3].startswith(f"Would remove 1 entry from {tmp_path}, freeing ")
    assert len(lines) == 4
    assert hashes(tmp_path) == {hash_}


def test_yes_removes_without_asking_and_json_has_the_plan_and_the_outcome(tmp_path):
    kept, gone = lay_entry(tmp_path, seed=1), lay_entry(tmp_path, seed=2)
    ran = run("prune", "--entry", gone[:8], "--yes", "--json", "--cache-dir", tmp_path)
    assert (ran.code, ran.err) == (0, "")
    assert (" ".join(ran.report), ran.report["schema"]) == (PLAN_KEYS, 2)
    (entry,) = ran.report["entries"]
    assert (" ".join(entry), entry["hash"]) == (ENTRY_KEYS, gone)
    assert entry["ranks"] == [{"rank": 0, "prefix": "backbone"}]
    assert ran.report["misses"] == [{"model": "TinyModel", "hash": gone}]
    outcome = ran.report["outcome"]
    assert list(outcome) == ["removed", "removed_files", "freed_bytes", "kept", "failed"]
    assert (outcome["removed"], outcome["removed_files"], outcome["kept"], outcome["failed"]) == ([gone], 0, [], [])
    assert outcome["freed_bytes"] == ran.report["frees_bytes"] > 3000
    assert hashes(tmp_path) == {kept}


def test_in_a_pipe_it_needs_yes_and_removes_nothing(tmp_path):
    hash_ = lay_entry(tmp_path)
    ran = run("prune", "--keep-last", "0", "--cache-dir", tmp_path)
    assert (ran.code, ran.out) == (2, "")
    assert "Confirmation needs a terminal. Give --yes" in ran.err
    ran = run("prune", "--keep-last", "0", "--json", "--cache-dir", tmp_path)
    assert (ran.code, ran.report["error"]["exit_code"]) == (2, 2)
    assert hashes(tmp_path) == {hash_}


@pytest.mark.parametrize(("answer", "left"), [("y\n", 0), ("n\n", 1), ("\n", 1)])
def test_on_a_terminal_it_asks_first(tmp_path, answer, left):
    lay_entry(tmp_path)
    code, shown = run_on_terminal("prune", "--keep-last", "0", "--cache-dir", tmp_path, answer=answer)
    assert code == 0
    assert "Will remove 1 entry from" in shown
    assert ("Nothing was removed." in shown) == bool(left)
    assert ("Removed 1 entry" in shown) == (not left)
    assert len(hashes(tmp_path)) == left


def test_ctrl_c_at_the_prompt_removes_nothing(tmp_path):
    hash_ = lay_entry(tmp_path)
    code, _ = run_on_terminal("prune", "--keep-last", "0", "--cache-dir", tmp_path, answer="")
    assert code == 130
    assert hashes(tmp_path) == {hash_}


def test_an_entry_in_use_is_kept_and_listed(tmp_path):
    hash_ = lay_entry(tmp_path)
    lease = hold(CacheLayout(root=tmp_path), RankName(hash=hash_, rank=0, prefix="backbone"))
    ran = run("prune", "--keep-last", "0", "--yes", "--cache-dir", tmp_path)
    assert (ran.code, ran.out) == (0, f"Nothing to remove in {tmp_path}.\n")
    assert ran.err == f"Kept: {hash_[:10]} TinyModel: a live process uses it.\n"
    lease.release()


def test_stats_show_the_misses_of_pruned_entries(tmp_path):
    hash_ = lay_entry(tmp_path)
    lookup = "ab" * 32
    layout = CacheLayout(root=tmp_path)
    pruned = PrunedEntry(hash="cd" * 32, model="Gone", when="2026-01-01T00:00:00.000Z", why="it was named")
    note_pruned(layout, {lookup: [pruned]})
    count_miss(layout, lookup)
    ran = run("prune", "--stats", "--cache-dir", tmp_path)
    assert ran.code == 0
    assert ran.out.splitlines()[1].split()[:2] == ["cdcdcdcdcd", "Gone"]
    assert ran.out.splitlines()[-1] == "Prunes caused 1 miss."
    report = run("prune", "--stats", "--json", "--cache-dir", tmp_path).report
    assert list(report) == ["schema", "root", "misses", "pruned"]
    assert (report["schema"], report["misses"]) == (2, 1)
    assert report["pruned"][0]["entries"] == [msgspec.to_builtins(pruned)]
    assert hashes(tmp_path) == {hash_}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--older-than", "30"), "'30' is not an age such as 30d, 12h or 90min."),
        (("--older-than", "-1d"), "'-1d' is not an age"),
        (("--max-size", "10XB"), "'10XB' is not a size such as 10GB or 512MiB."),
        (("--max-size", "9" * 400), "'99999999999999999999'… is too large."),
        (("--older-than", f"{'9' * 308}w"), "'99999999999999999999'… is too large."),
        (("--entry", "../x"), "'../x' is not a prefix of a hash"),
        (("--entry", "abc", "--dry-run"), "No entry begins with 'abc'"),
        (("--keep-last", "-1"), "-1 is not in the range"),
    ],
)
def test_usage_errors(tmp_path, options, message):
    ran = run("prune", *options, "--cache-dir", tmp_path)
    assert ran.code == 2
    assert message in ran.err


def test_the_report_has_the_parsed_rules(tmp_path):
    orphan = CacheLayout(root=tmp_path).entry_dir(lay_entry(tmp_path)) / "artifacts" / f"{'0' * 64}.eager"
    orphan.write_bytes(b"x")
    options = ("--older-than", "1.5h", "--max-size", "512 MiB", "--orphans", "--dry-run", "--json")
    report = run("prune", *options, "--cache-dir", tmp_path).report
    assert report["rules"] == {
        "older_than_secs": 5400.0,
        "max_bytes": 2**29,
        "stale": False,
        "orphans": True,
        "units": False,
        "keep_last": None,
        "entries": [],
        "keep_units": False,
    }
    path = str(orphan.relative_to(tmp_path / "torch_compile_cache"))
    assert (report["files"], report["outcome"]) == ([{"path": path, "kind": "artifact", "frees_bytes": 1}], None)


def test_a_path_that_is_not_a_cache_fails(tmp_path):
    ran = run("prune", "--dry-run", "--cache-dir", tmp_path / "nowhere")
    assert ran.code == 1
    assert ran.err == f"Error: {tmp_path}/nowhere does not exist. Name the folder of a cache.\n"
    (tmp_path / "file").touch()
    ran = run("prune", "--dry-run", "--cache-dir", tmp_path / "file")
    assert (ran.code, ran.err) == (
        1,
        f"Error: {tmp_path}/file is a file and not a cache folder. Name the folder of a cache.\n",
    )


def test_a_missing_default_cache_has_nothing_to_remove(tmp_path):
    ran = run("prune", "--yes", env={"HOME": str(tmp_path)})
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("Nothing to remove in ")


def test_control_characters_in_a_model_name_are_escaped(tmp_path):
    lay_entry(tmp_path, model="\x07" * 10_000)
    ran = run("prune", "--keep-last", "0", "--dry-run", "--json", "--cache-dir", tmp_path)
    assert json.loads(ran.out)["entries"][0]["model"] == "\x07" * 10_000
    ran = run("prune", "--keep-last", "0", "--dry-run", "--cache-dir", tmp_path)
    assert "\x07" not in ran.out
    assert max(map(len, ran.out.splitlines())) < 300
