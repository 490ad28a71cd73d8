"""`completion`: what a shell must be told to complete cgtool's commands, and where it looks for that. Prints nothing.

Importable without torch. Files that `install` writes, each for one user:

    bash  <data home>/bash-completion/completions/cgtool     found by bash-completion when `cgtool` is typed first
    fish  <configuration home>/fish/completions/cgtool.fish  found by fish itself
    zsh   ~/.zfunc/_cgtool                                   and a marked block in ~/.zshrc that puts ~/.zfunc on fpath
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

import msgspec

from cgtool.errors import UsageError
from cgtool.host import environment
from cgtool.store.files import os_errors_as_cache_errors, write_atomic

Shell = Literal["bash", "zsh", "fish"]
SHELLS: tuple[Shell, ...] = get_args(Shell)

_MARK = "# cgtool's completion"
_ZSHRC = f"""
{_MARK}
fpath+=~/.zfunc
autoload -Uz compinit && compinit
"""


class CompletionReport(msgspec.Struct, frozen=True, kw_only=True):
    """What completes cgtool's commands in a shell; its fields are what `completion --json` prints."""

    schema: int = 1
    shell: Shell
    script: str
    #: The files that were written or changed; empty where the script was only asked for.
    written: tuple[Path, ...] = ()


@os_errors_as_cache_errors(doing="written")
def completion(script_of: Callable[[Shell], str], *, shell: Shell | None, install: bool = False) -> CompletionReport:
    """Return a shell's script, and put it where the shell finds it if that is asked for.

    Args:
        script_of: Returns a shell's script, as click writes it.
        shell: Which shell; None means the user's own, by SHELL.
        install: Whether to write it to where the shell looks.

    Raises:
        UsageError: No shell was named, and SHELL names none of those that are known.
        CacheError: A file cannot be written.
    """
    chosen = shell or _users_shell()
    script = script_of(chosen)
    return CompletionReport(shell=chosen, script=script, written=_install(chosen, script) if install else ())


def _users_shell() -> Shell:
    name = Path(environment().shell or "").name
    for shell in SHELLS:
        if name == shell:
            return shell
    said = f"SHELL names {name!r}" if name else "SHELL is not set"
    raise UsageError(f"{said}, so say which shell is meant: {', '.join(SHELLS)}.", expected=SHELLS, actual=name)


def _install(shell: Shell, script: str) -> tuple[Path, ...]:
    import platformdirs  # milliseconds, and only for who installs

    home = Path.home()
    if shell == "bash":
        path = Path(platformdirs.user_data_dir()) / "bash-completion" / "completions" / "cgtool"
    elif shell == "fish":
        path = Path(platformdirs.user_config_dir()) / "fish" / "completions" / "cgtool.fish"
    else:
        path = home / ".zfunc" / "_cgtool"
    write_atomic(path, script.encode())
    if shell != "zsh":
        return (path,)
    # zsh looks into no folder of the user's own: one block in its start-up file, written once
    zshrc = (home / ".zshrc").resolve()  # people keep theirs elsewhere, behind a link
    if zshrc.exists() and _MARK in zshrc.read_text(encoding="utf-8", errors="replace"):
        return (path,)
    with zshrc.open("a", encoding="utf-8") as file:
        file.write(_ZSHRC)
    return path, zshrc
