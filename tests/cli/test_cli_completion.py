"""`cgtool completion`: the scripts, where they are installed, and completion in a real shell."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess

import pytest
from cli_harness import COMMAND, environment, run


def complete(*words):
    """Return the candidates for the last word, as click gives them to bash: "kind,value" lines."""
    env = {"_CGTOOL_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    return run(env=env)


def test_commands_subcommands_and_options_are_completed():
    ran = complete("cgtool", "insp")
    assert (ran.code, ran.out, ran.err) == (0, "plain,inspect\n", "")
    assert complete("cgtool", "warm", "--compile-si").out == "plain,--compile-sizes\n"
    assert complete("cgtool", "inspect", "gra").out == "plain,graph\n"


def test_a_shell_that_click_does_not_know_fails_silently():
    ran = run(env={"_CGTOOL_COMPLETE": "tcsh_source"})
    assert (ran.code, ran.out, ran.err) == (1, "", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_printed(shell):
    ran = run("completion", shell)
    assert ran.code == 0
    assert "_CGTOOL_COMPLETE" in ran.out
    assert shell in ran.out


def test_the_default_is_the_users_shell():
    assert run("completion", env={"SHELL": "/usr/bin/fish"}).out == run("completion", "fish").out
    for value, problem in (("/bin/tcsh", "SHELL is 'tcsh', which is not supported"), ("", "SHELL is not set")):
        ran = run("completion", env={"SHELL": value})
        assert ran.code == 2
        assert f"{problem}. Name one of: bash, zsh, fish." in ran.err


@pytest.mark.parametrize(
    ("shell", "files"),
    [
        ("bash", [".local/share/bash-completion/completions/cgtool"]),
        ("fish", [".config/fish/completions/cgtool.fish"]),
        ("zsh", [".zfunc/_cgtool", ".zshrc"]),
    ],
)
def test_installing_writes_to_the_users_folders_and_is_idempotent(tmp_path, shell, files):
    (tmp_path / ".zshrc").write_text("alias l=ls\n")
    env = {"HOME": str(tmp_path), "XDG_DATA_HOME": "", "XDG_CONFIG_HOME": ""}
    report = run("completion", shell, "--install", "--json", env=env).report
    assert (report["schema"], report["shell"]) == (1, shell)
    assert report["written"] == [str(tmp_path / name) for name in files]
    assert (tmp_path / files[0]).read_text() == report["script"]
    zshrc = (tmp_path / ".zshrc").read_text()
    assert zshrc.startswith("alias l=ls\n")
    assert zshrc.count("compinit") == (2 if shell == "zsh" else 0)
    assert run("completion", shell, "--install", env=env).code == 0
    assert (tmp_path / ".zshrc").read_text() == zshrc


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_a_real_bash_completes_a_command(tmp_path):
    command = tmp_path / "cgtool"
    command.write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    command.chmod(0o755)
    script = run("completion", "bash").out
    lines = f"""{script}
COMP_WORDS=(cgtool ins); COMP_CWORD=1
_cgtool_completion cgtool
echo "${{COMPREPLY[@]}}"
"""
    env = environment(PATH=f"{tmp_path}:{os.environ['PATH']}")
    done = subprocess.run(["bash", "-c", lines], capture_output=True, text=True, env=env, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("inspect\n", "")
