"""Ranks share compiled pieces: under torchrun, without an agent, and warmed by a single process."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from e2e_harness import cgtool, forked_ranks, torchrun, two_ranks, units

pytestmark = pytest.mark.torch

MODEL = Path(__file__).with_name("ranks_model.py")
OPTIONS = ("--jobs", "0", "--adaptor", "eager")


def test_two_ranks_of_torchrun_compile_each_piece_once_and_equal_the_whole_model(tmp_path):
    root = tmp_path / "cache"
    options = ("--json", "--quiet", "--no-proof", *OPTIONS)
    arguments = ("warm", f"{MODEL}:build", "--cache-dir", root, *options)
    reports = torchrun({}, tmp_path / "warm", "-m", "cgtool", *arguments)
    assert sorted(report["rank"] for report in reports) == [0, 1]
    assert len({report["hash"] for report in reports}) == 1
    assert sum(report["compiled"] for report in reports) == units(root) == 3
    for report in reports:
        assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
        assert sum(rank["compiled"] for rank in report["ranks"]) == 3
    for rank in (0, 1):
        assert len(list(root.glob(f"torch_compile_cache/*/rank_{rank}/*/manifest.json"))) == 1
    # Each rank has half of the weights; the sums over both equal the whole model.
    loaded = forked_ranks({}, MODEL, root)
    assert loaded == [{"rank": rank, "equal": [True] * 3} for rank in (0, 1)]


def manifests(root):
    manifests = [json.loads(path.read_text()) for path in root.rglob("manifest.json")]
    return sorted(manifests, key=lambda manifest: manifest["rank"])


def test_one_rank_reports_for_both_and_they_share_equal_pieces(tmp_path):
    first, second = two_ranks(f"{MODEL}:build_uneven", tmp_path)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "Rank 1: " in first.out
    assert "trace 1/1" in first.err
    assert (second.out, second.err) == ("", "")
    digests = [{row["artifact"]["digest"] for row in manifest["rows"]} for manifest in manifests(tmp_path)]
    assert [len(rank) for rank in digests] == [3, 3]
    assert len(digests[0] & digests[1]) == 2
    assert units(tmp_path) == 4
    first, second = two_ranks(f"{MODEL}:build_uneven", tmp_path, "--check")
    assert (first.code, second.code, second.out, second.err) == (0, 0, "", "")


@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_that_fails_ends_the_others_with_its_error_and_exit_code(tmp_path, which):
    ended = two_ranks(f"{MODEL}:build_where_one_fails", tmp_path, "--arg", f"which={which}")
    assert [ran.code for ran in ended] == [1, 1]
    assert f"Rank {which} failed: " in ended[1 - which].err
    for ran in ended:
        assert f"the weights of rank {which} are not there" in ran.err


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others_with_an_error(tmp_path):
    first, second = two_ranks(f"{MODEL}:build_where_one_dies", tmp_path)
    assert (first.code, second.code) == (1, -signal.SIGKILL)
    assert "Rank 1 has been silent for 20 s: it died, is stopped, or lost its machine." in first.err


def test_one_process_warms_all_ranks(tmp_path):
    root = tmp_path / "cache"
    options = ("--cache-dir", root, "--world-size", 2, *OPTIONS)
    report = cgtool("warm", f"{MODEL}:build", "--json", *options, forks=True).report
    assert [(rank["rank"], rank["compiled"], rank["reused"]) for rank in report["ranks"]] == [(0, 3, 0), (1, 0, 3)]
    assert "without communication between ranks" in report["notes"][-1]
    assert forked_ranks({}, MODEL, root) == [{"rank": rank, "equal": [True] * 3} for rank in (0, 1)]
    failed = cgtool("warm", f"{MODEL}:build_where_one_fails", *options, forks=True)
    assert failed.code == 1
    assert "Rank 1 of 2: " in failed.err
    assert "the weights of rank 1 are not there" in failed.err


def test_rank_and_world_size_exclude_each_other(tmp_path):
    both = cgtool("warm", f"{MODEL}:build", "--cache-dir", tmp_path, "--world-size", 2, "--rank", 1)
    assert both.code == 2
    assert "--world-size" in both.err
