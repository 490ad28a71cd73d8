"""Usage errors, broken pipes and unexpected exceptions: exit codes, messages, and nothing written."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
from pathlib import Path

import click
import pytest
from cache_maker import lay_decoder as lay_entry
from cli_harness import COMMAND, environment, run

from cgtool import errors
from cgtool.cli import failures, logs
from cgtool.cli.failures import Terminated
from cgtool.cli.output import Output
from cgtool.events import Event, ignore

ERROR_KEYS = ["type", "message", "exit_code", "path", "reason", "expected", "actual", "reasons"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.CgtoolError("x"), 1),
        (errors.UsageError("x"), 2),
        (errors.ConfigError("x"), 2),
        (errors.UnmatchedSplittingOpError("x"), 2),
        (errors.CacheMissError("x"), 3),
        (errors.RefusedError("x", reason="unsigned"), 3),
        (errors.CompileError("x"), 1),
        (click.UsageError("x"), 2),
        (click.Abort(), 130),
        (KeyboardInterrupt(), 130),
        (Terminated(15), 143),
        (Terminated(1), 129),
        (BrokenPipeError(), 141),
        (PermissionError(13, "Permission denied", "/x"), 1),
        (MemoryError(), 1),
        (SystemExit(0), 1),
        (ZeroDivisionError("division by zero"), 1),
        (RecursionError(), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_every_error_has_an_exit_code_and_a_message(error, code):
    failure = failures.failure_of(error)
    assert failure.exit_code == code
    assert bool(failure.message) == (code != failures.READER_GONE)


def test_the_reasons_of_a_miss_are_kept_in_order():
    failure = failures.failure_of(errors.CacheMissError("It missed.", reasons=("a", "b"), path="/c"))
    assert failure.reasons == ("a", "b")
    assert failure.to_json()["error"]["path"] == "/c"


def test_a_refusal_has_a_stable_reason():
    failure = failures.failure_of(errors.RefusedError("No.", reason="digest_mismatch", expected="a", actual="b"))
    error = failure.to_json()["error"]
    assert (error["exit_code"], error["reason"], error["expected"], error["actual"]) == (3, "digest_mismatch", "a", "b")


def test_values_that_json_cannot_express_become_text():
    failure = failures.failure_of(errors.CgtoolError("x", path=Path("/a"), expected={1: 2}, actual=[b"x", 1]))
    error = failure.to_json()["error"]
    assert (error["path"], error["expected"], error["actual"]) == ("/a", "{1: 2}", ["b'x'", 1])


USAGE = {
    "unknown command": (["wram"], "No such command 'wram'."),
    "unknown option": (["warm", "m.py:b", "--compile-size", "1"], "No such option '--compile-size'."),
    "no model": (["warm"], "Missing argument 'MODEL'."),
    "argument without a value": (["warm", "m.py:b", "--arg", "num_layers"], "'num_layers' is not name=value."),
    "invalid argument name": (["warm", "m.py:b", "--arg", "a-b=1"], "'a-b' is not a valid argument name."),
    "task given twice": (["warm", "m.py:b", "--task", "a", "--arg", "task=b"], "--arg already sets the task."),
    "argument given twice": (["warm", "m.py:b", "--arg", "a=1", "--arg", "a=2"], "'a' is given twice. Give it once."),
    "weights": (["warm", "m.py:b", "--weights", "none"], "'none' is not one of 'fake', 'real'."),
    "rank": (["warm", "m.py:b", "--rank", "-1"], "-1 is not in the range x>=0."),
    "size 0": (["warm", "m.py:b", "--compile-sizes", "0"], "--compile-sizes: compile_sizes is [0]"),
    "size in words": (["warm", "m.py:b", "--compile-sizes", "all"], "'all' is none of these."),
    "torn JSON": (["warm", "m.py:b", "--compile-sizes", '{"batch": 1'], "it is not valid JSON"),
    "range that ends before it starts": (["warm", "m.py:b", "--compile-ranges", "16-1"], "--compile-ranges:"),
    "required without a size": (["warm", "m.py:b", "--require", "n"], "'n' is not a range of sizes."),
    "required twice": (["warm", "m.py:b", "--require", "n=1", "--require", "n=2-3"], "'n' is given twice."),
    "level": (["warm", "m.py:b", "--level", "4"], "--level: level is 4: levels are 0 (NO_COMPILATION)"),
    "adaptor": (["warm", "m.py:b", "--adaptor", "inductr"], "--adaptor: adaptor is 'inductr'"),
    "op": (["warm", "m.py:b", "--splitting-ops", "attention"], "'attention' is none of these"),
    "config that is not JSON": (["warm", "m.py:b", "--compilation-config", "level=3"], "it is not valid JSON"),
    "unknown key": (
        ["warm", "m.py:b", "--compilation-config", '{"compile_size": [1]}'],
        "cgtool has no setting 'compile_size'; the nearest is 'compile_sizes'.",
    ),
    "inductor config": (["warm", "m.py:b", "--inductor-config", "{max_autotune"], "is not valid JSON"),
    "cache disabled": (["warm", "m.py:b", "--no-cache"], "The cache is switched off"),
    "quiet and verbose": (["warm", "m.py:b", "-q", "-v"], "--quiet and --verbose are mutually exclusive."),
}


@pytest.mark.parametrize(("arguments", "sentence"), USAGE.values(), ids=USAGE)
def test_usage_errors_as_text_and_as_json(tmp_path, arguments, sentence):
    env = {"CGTOOL_CACHE_DIR": str(tmp_path / "cache")}
    ran, document = (run(*arguments, *more, cwd=tmp_path, env=env) for more in ([], ["--json"]))
    assert (ran.code, document.code, ran.out) == (2, 2, "")
    assert ran.err.startswith("Error: ")
    assert sentence in ran.err
    assert "Traceback" not in ran.err
    error = document.report["error"]
    assert (document.report["schema"], list(error), error["exit_code"]) == (1, ERROR_KEYS, 2)
    assert sentence in error["message"]
    assert list(tmp_path.iterdir()) == []


def test_the_flag_and_the_variable_both_disable_the_cache(tmp_path):
    flag = run("warm", "m.py:b", "--no-cache", cwd=tmp_path)
    variable = run("warm", "m.py:b", cwd=tmp_path, env={"CGTOOL_DISABLE_CACHE": "1"})
    assert flag == variable
    assert flag.code == 2


def test_a_traceback_is_printed_only_with_its_option(tmp_path):
    assert "Traceback" not in run("inspect", "cache", tmp_path / "x").err
    assert "Traceback (most recent call last)" in run("inspect", "cache", tmp_path / "x", "--traceback").err


def _read_one_line(*arguments: object, **env: str) -> tuple[int, str, bytes]:
    """Run with a reader that reads one line and closes the pipe, as `| head -1` does."""
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(**env)
    )
    line = process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read().decode()
    process.stderr.close()
    return process.wait(timeout=60), err, line


@pytest.mark.parametrize("buffering", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_reader_that_closes_the_pipe_causes_no_traceback(tmp_path, buffering):
    for rank in range(100):  # more than fits into a pipe
        lay_entry(tmp_path, rank=rank)
    code, err, line = _read_one_line("inspect", "cache", tmp_path, "--json", PYTHONUNBUFFERED=buffering)
    assert line == b"{\n"
    assert err == ""
    assert code == 141


def test_a_pipe_without_a_reader_causes_no_traceback(tmp_path):
    lay_entry(tmp_path)
    for arguments in (("inspect", "cache", tmp_path), ("--help",), ("inspect", "cache", tmp_path / "x", "--json")):
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run(
            [*COMMAND, *map(str, arguments)],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=environment(),
            timeout=60,
        )
        os.close(writing)
        assert "Traceback" not in done.stderr
        assert "BrokenPipe" not in done.stderr
        assert done.returncode == (1 if str(arguments[-1]) == "--json" else 141)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_output_device_is_an_error(tmp_path):
    lay_entry(tmp_path)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, "inspect", "cache", str(tmp_path)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=environment(),
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr == "Error: No space left on device. Redirect the output elsewhere, or free some space.\n"


def test_a_deleted_working_directory_is_an_error(tmp_path):
    lay_entry(tmp_path / "cache")
    gone = tmp_path / "gone"
    gone.mkdir()
    command = shlex.join([*COMMAND, "inspect", "cache", str(tmp_path / "cache")])
    done = subprocess.run(
        ["sh", "-c", f'rmdir "$PWD" && {command}'],
        cwd=gone,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env=environment(),
        timeout=60,
    )
    assert done.returncode == 1
    advice = "The working directory no longer exists: change to one that does."
    assert done.stderr == f"Error: No such file or directory. {advice}\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- 2>&- <&-"])
def test_closed_streams_do_not_crash(tmp_path, closed):
    lay_entry(tmp_path)
    command = " ".join([*COMMAND, "inspect", "cache", str(tmp_path), closed])
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0
    assert done.stderr == ""


def test_an_ascii_stream_shows_escapes(tmp_path):
    lay_entry(tmp_path, model="größe")
    ran = run("inspect", "cache", tmp_path, env={"PYTHONIOENCODING": "ascii"})
    assert ran.code == 0
    assert "gr\\xf6\\xdfe" in ran.out


def test_verbose_shows_the_source_of_each_setting(tmp_path):
    ran = run("warm", tmp_path / "none.py:build", "--level", "2", "--verbose", env={"CGTOOL_COMPILE_SIZES": "8"})
    assert [line for line in ran.err.splitlines() if line.startswith("cgtool.cli.settings: ")] == [
        "cgtool.cli.settings: compile_sizes is [8], set by the variable CGTOOL_COMPILE_SIZES",
        "cgtool.cli.settings: level is 2, set by --level",
    ]


def test_only_torchs_own_log_handlers_are_silenced():
    logger = logging.getLogger("torch.of_this_test")
    logger.handlers = [logging.StreamHandler(), logging.FileHandler(os.devnull, delay=True), logging.NullHandler()]
    for verbose, level in ((True, logging.NOTSET), (False, logging.ERROR)):
        logs.silencing_torch(Output(verbose=verbose), ignore)(Event("note", "begun"))
        assert [handler.level for handler in logger.handlers] == [level, logging.NOTSET, logging.NOTSET]
