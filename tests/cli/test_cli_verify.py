"""`cgtool verify`: text, exit codes and JSON, for intact, damaged and untrusted caches."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from cache_maker import lay_decoder as lay_entry
from cache_maker import lay_entry as lay_whole
from cache_maker import make_cache
from cache_samples import resealed
from cli_harness import COMMAND, environment, run

from cgtool.store.layout import CacheLayout, RankName, short
from cgtool.toolkit.verify.load import Opening, _open_all

#: A cache with hundreds of units, which two threads share.
ENTRIES, ARTIFACTS = 20, 20


def spoil(root: Path) -> Path:
    """Damage the first artifact, keeping its size."""
    path = min(root.rglob("artifacts/*"))
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    return path


def test_an_intact_cache_as_a_table_and_as_json(cache_root: Path) -> None:
    hash_ = lay_entry(cache_root)
    ran = run("verify", "--cache-dir", cache_root)
    assert (ran.code, ran.err) == (3, "")  # this entry's variants are not all compiled
    first, second = ran.out.splitlines()[:2]
    assert first.split() == ["hash", "model", "files", "size", "problems", "verdict"]
    assert second.split()[:3] == [short(hash_), "TinyModel", "8"]
    report = run("verify", hash_[:12], "--cache-dir", cache_root, "--json").report
    assert set(report) == {"schema", "root", "entries", "units", "load", "files", "size_bytes", "secs", "failed", "ok"}
    (entry,) = report["entries"]
    decode = [
        {"rank": 0, "prefix": "backbone", "variant": 1, "piece_index": piece, "shape": {"num_tokens": [1, 1]}}
        for piece in (0, 2, 4)
    ]
    assert entry == {
        "hash": hash_,
        "models": ["TinyModel"],
        "verdict": {"level": "optimal", "reasons": []},
        "problems": [],
        "notes": [],
        "holes": decode,
        "missing_ranks": [],
        "unknown_pieces": 0,
        "repairs": [],
        "refused": False,
        "files": 8,
        "size_bytes": report["size_bytes"],
    }
    assert (report["schema"], report["root"], report["units"], report["load"]) == (2, str(cache_root), None, None)
    assert (report["files"], report["ok"]) == (8, False)


def test_an_entry_that_others_can_write_to_is_unsupported_and_not_opened(cache_root: Path) -> None:
    hash_ = lay_whole(cache_root)
    before = run("verify", hash_[:12], "--cache-dir", cache_root, "--json").report["entries"][0]["verdict"]
    (cache_root / "torch_compile_cache" / hash_ / "rank_0").chmod(0o777)
    ran = run("verify", hash_[:12], "--cache-dir", cache_root, "--load", "--json")
    verdict = ran.report["entries"][0]["verdict"]
    assert (ran.code, verdict["level"], ran.report["load"]["entries"]) == (3, "unsupported", [])
    assert verdict["reasons"][0].startswith(f"Load refuses it (writable_by_others): {cache_root}")
    assert verdict["reasons"][1:] == before["reasons"]
    shared = run("verify", hash_[:12], "--cache-dir", cache_root, "--json", env={"CGTOOL_ALLOW_SHARED_CACHE": "1"})
    assert shared.report["entries"][0]["verdict"] == before


def test_an_entry_for_another_machine_fails_only_if_it_is_named_or_strict(tmp_path: Path) -> None:
    """A cache that many machines fill is intact even if this machine supports only some of its entries."""
    cache, alone, bundle = tmp_path / "cache", tmp_path / "alone", tmp_path / "both.tar.zst"
    other = {"torch": {"version": "1.0.0"}}
    here, there = lay_whole(cache), lay_whole(cache, factors=other)
    lay_whole(alone, factors=other)
    table, named = run("verify", cache), run("verify", there[:12], "--cache-dir", cache)
    assert run("export", bundle, "--all", "--cache-dir", cache).code == 0
    report = run("verify", cache, "--json").report
    assert {entry["hash"]: entry["verdict"]["level"] for entry in report["entries"]} == {
        here: "optimal",
        there: "unsupported",
    }
    assert (table.code, report["ok"]) == (0, True)
    assert f"{short(there)} is unsupported on this machine:\n  - " in table.out
    assert table.out.splitlines()[-1].startswith(f"Verified 2 entries in {cache} (")
    assert table.out.splitlines()[-1].endswith("; 1 of them for other machines")
    assert named.code == 3
    assert named.out.splitlines()[-1].startswith("Verification failed: 1 entry of 1 (read")
    folder = CacheLayout(root=cache).entry_dir(there)
    targets = [(folder,), (f"{cache}:{there[:12]}",), (cache, "--strict"), (alone,), (bundle,)]
    assert [run("verify", *arguments).code for arguments in targets] == [3, 3, 3, 3, 3]
    assert run("verify", here[:12], "--cache-dir", cache, "--strict").code == 0


def test_entries_that_are_unsupported_for_the_same_reasons_are_listed_together(tmp_path: Path) -> None:
    other = {"torch": {"version": "1.0.0"}}
    hashes = sorted(lay_whole(tmp_path, factors={**other, "source": number}) for number in range(10))
    out = run("verify", tmp_path).out
    named = ", ".join(short(hash_) for hash_ in hashes[:8])
    assert f"\n{named} and 2 more are unsupported on this machine:\n  - torch.version was " in out
    assert out.count("unsupported on this machine") == 1


def test_the_opening_process_applies_the_trust_policy_before_it_opens_anything(cache_root: Path) -> None:
    name = RankName(hash=lay_whole(cache_root), rank=0, prefix="backbone")
    (cache_root / "torch_compile_cache").chmod(0o777)
    openings: list[Opening] = []
    done = _open_all(CacheLayout(root=cache_root), name, openings.append)
    assert (openings, done.opened, done.problems[0].path) == ([], 0, "")
    assert done.problems[0].sentence.startswith(f"{cache_root}/torch_compile_cache is writable by everyone")


def test_a_damaged_artifact_is_reported_with_exit_code_3(cache_root: Path) -> None:
    lay_entry(cache_root)
    path = spoil(cache_root)
    ran = run("verify", cache_root)
    assert ran.code == 3
    assert f"{path} is corrupt: its digest is" in ran.out
    assert "Repair it with `cgtool verify --repair`" in ran.out
    report = run("verify", cache_root, "--json")
    (problem,) = report.report["entries"][0]["problems"]
    assert (report.code, problem["kind"]) == (3, "digest")
    assert problem["path"] == str(path.relative_to(cache_root))


def test_an_artifact_that_does_not_record_its_piece_is_a_problem(cache_root: Path) -> None:
    lay_entry(cache_root, marked=False)
    ran = run("verify", cache_root, "--json")
    (entry,) = ran.report["entries"]
    assert ran.code == 3
    assert [problem["kind"] for problem in entry["problems"]] == ["misplaced"] * 3
    assert all("does not record what it was compiled from" in problem["sentence"] for problem in entry["problems"])


def test_missing_ranks_are_reported(cache_root: Path) -> None:
    hash_ = lay_entry(cache_root, rank=1)
    missing = run("verify", cache_root, "--json").report["entries"][0]["missing_ranks"]
    assert missing == [["backbone", 0]]
    ran = run("verify", cache_root, "--world-size", 2)
    assert f"{short(hash_)} is unsupported on this machine:\n  - Rank 0 is missing for a world size of 2" in ran.out


def test_an_untrusted_model_name_is_escaped_and_truncated(cache_root: Path) -> None:
    lay_entry(cache_root, model="\x1b]0;owned\x07\n[red]" + "x" * 10_000)
    ran = run("verify", cache_root)
    assert "\x1b" not in ran.out
    assert "\x07" not in ran.out
    assert r"\x1b]0;owned\x07\n[red]" in ran.out
    assert max(map(len, ran.out.splitlines())) < 300


@pytest.mark.parametrize(
    ("target", "code", "message"),
    [
        pytest.param("/nowhere/at/all", 1, "/nowhere/at/all does not exist", id="missing path"),
        pytest.param(__file__, 3, "Use a file written by cgtool export", id="a file that is not a bundle"),
        pytest.param("abcdef", 2, "No entry begins with 'abcdef'", id="unknown hash"),
    ],
)
def test_a_target_that_is_not_a_cache_is_an_error(cache_root: Path, target: str, code: int, message: str) -> None:
    lay_entry(cache_root)
    option = ["--cache-dir", cache_root] * (target == "abcdef")
    ran = run("verify", target, *option)
    assert (ran.code, ran.out) == (code, "")
    assert message in ran.err


def test_a_bundle_can_be_verified_before_it_is_imported(tmp_path: Path) -> None:
    hash_ = lay_whole(tmp_path / "cache")
    bundle = tmp_path / "one.tar.zst"
    assert run("export", bundle, "--cache-dir", tmp_path / "cache").code == 0
    ran = run("verify", bundle, "--json")
    (entry,) = ran.report["entries"]
    assert (entry["hash"], entry["problems"]) == (hash_, [])
    assert entry["verdict"] == {"level": "optimal", "reasons": []}
    assert (ran.report["root"], ran.report["units"]) == (str(bundle), None)
    assert run("verify", bundle, "--repair").code == 2
    data = bytearray(bundle.read_bytes())
    data[len(data) // 2] ^= 1
    bundle.write_bytes(data)
    ran = run("verify", bundle, "--json")
    assert ran.code == 3
    assert ran.report["error"]["reason"]


def test_contradicting_options_are_usage_errors(cache_root: Path) -> None:
    lay_entry(cache_root)
    for arguments in (("--model", "m:f"), ("--arg", "a=1", "--load"), (cache_root, cache_root), ("--world-size", 0)):
        ran = run("verify", *arguments)
        assert ran.code == 2, arguments
        assert ran.err.startswith("Error: "), ran.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rank", "0"), "--rank needs a model. Name it with --model."),
        (("--load", "--arg", "n=1"), "--arg needs a model. Name it with --model."),
        (("--model", "m.py:build"), "--model needs --load. Give --load too."),
    ],
)
def test_options_of_a_model_need_a_model_which_needs_load(options: tuple[str, ...], message: str) -> None:
    ran = run("verify", *options)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err.replace("\n", " ")


def test_an_empty_default_cache_has_nothing_to_verify(tmp_path: Path) -> None:
    ran = run("verify", env={"HOME": str(tmp_path)})
    assert ran.code == 0
    assert "nothing to verify" in ran.out


def test_ctrl_c_ends_a_verification_at_once_with_130(cache_root: Path) -> None:
    lay_entry(cache_root)
    with min(cache_root.rglob("plan.json")).open("r+b") as file:
        file.truncate(1 << 38)
    manifest = min(cache_root.rglob("manifest.json"))
    whole = {"sha256": "ab" * 32, "size_bytes": 1 << 38}  # reading it takes minutes
    manifest.write_bytes(resealed(manifest.read_bytes(), lambda record: record["files"].update({"plan.json": whole})))
    process = subprocess.Popen(
        [*COMMAND, "verify", str(cache_root)], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not _reads(process.pid, "plan.json"):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)  # reading the file would take longer on any machine
    assert (process.returncode, out) == (130, b"")


def _reads(pid: int, name: str) -> bool:
    folder = Path(f"/proc/{pid}/fd")
    try:
        return any(link.readlink().name == name for link in folder.iterdir())
    except OSError:
        return False


def test_progress_is_shown_on_a_terminal_but_not_in_a_pipe(cache_root: Path) -> None:
    lay_entry(cache_root)
    assert run("verify", cache_root).err == ""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "verify", str(cache_root)], env=environment(TERM="xterm"), stdout=subprocess.DEVNULL, stderr=child
    )
    os.close(child)
    shown = b""
    while select.select([parent], [], [], 60)[0]:
        try:
            more = os.read(parent, 4096)
        except OSError:
            break
        if not more:
            break
        shown += more
    assert process.wait(60) == 3
    os.close(parent)
    assert b"verify" in shown


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("verified") / "cache"
    make_cache(root, entries=ENTRIES, artifacts_per_entry=ARTIFACTS)
    return root


def verified(root: Path, jobs: int) -> dict[str, Any]:
    report = run("verify", root, "--json", "--jobs", jobs).report
    return {name: value for name, value in report.items() if name != "secs"}


def test_one_and_two_threads_give_the_same_report(large: Path) -> None:
    two = verified(large, 2)
    assert two == verified(large, 1)
    # an entry: its key, its manifest, three more files of its rank, its artifacts; a unit: its record and its artifact
    assert two["files"] == ENTRIES * (5 + ARTIFACTS) + ENTRIES * ARTIFACTS * 2
    assert two["units"]["problems"] == []
    assert [problem for entry in two["entries"] for problem in entry["problems"]] == []


def test_two_threads_report_damaged_units(large: Path) -> None:
    record = min(large.rglob("unit.json"))
    artifact = max(path for path in (large / "torch_compile_cache" / "units").rglob("*.pt2"))
    for path in (record, artifact):
        data = path.read_bytes()
        path.unlink()  # an entry has a hard link to the artifact
        path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
    problems = verified(large, 2)["units"]["problems"]
    assert {problem["path"] for problem in problems} == {str(path.relative_to(large)) for path in (record, artifact)}
