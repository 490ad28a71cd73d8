"""`completion`: the script that completes cgtool's commands in a shell. Prints nothing; importable without torch.

Files that `install` writes for the current user:

    bash  <data home>/bash-completion/completions/cgtool     loaded by bash-completion on first use of `cgtool`
    fish  <configuration home>/fish/completions/cgtool.fish  loaded by fish
    zsh   ~/.zfunc/_cgtool                                   and a marked block in ~/.zshrc that adds ~/.zfunc to fpath
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
    """The completion script of a shell; the fields are the document that `completion --json` prints."""

    schema: int = 1
    shell: Shell
    script: str
    #: Files written or changed by `install`.
    written: tuple[Path, ...] = ()


@os_errors_as_cache_errors(doing="written")
def completion(script_of: Callable[[Shell], str], *, shell: Shell | None, install: bool = False) -> CompletionReport:
    """Return a shell's completion script, and optionally install it.

    Args:
        script_of: Generates the script of a shell.
        shell: The shell; None means the user's own, from SHELL.
        install: Whether to write the script to where the shell finds it.

    Raises:
        UsageError: No shell is given, and SHELL is unset or names an unsupported one.
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
    problem = f"SHELL is {name!r}, which is not supported" if name else "SHELL is not set"
    raise UsageError(f"{problem}. Name one of: {', '.join(SHELLS)}.", expected=SHELLS, actual=name)


def _install(shell: Shell, script: str) -> tuple[Path, ...]:
    import platformdirs  # takes milliseconds to import, and only --install needs it

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
    # zsh searches no folder of the user's by default, so add one in its start-up file, once.
    zshrc = (home / ".zshrc").resolve()  # often a link into a dotfiles repository
    if zshrc.exists() and _MARK in zshrc.read_text(encoding="utf-8", errors="replace"):
        return (path,)
    with zshrc.open("a", encoding="utf-8") as file:
        file.write(_ZSHRC)
    return path, zshrc
