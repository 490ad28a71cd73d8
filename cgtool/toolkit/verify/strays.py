"""What lies in a cache and nothing names: leftovers of killed processes, orphans, files of others. No torch here."""

from __future__ import annotations

import os
import re
from pathlib import Path

from cgtool.store.files import is_temporary
from cgtool.toolkit.verify.findings import Note

_WRITER = re.compile(r"\..*\.(\d{1,10})\.[0-9a-f]+\.tmp")
_NEXT = re.compile(r"\..+\.[0-9a-f]{64}\.next")


def stray(path: Path) -> Note | None:
    """Return what a file is that nothing names; None for what a live process is writing just now.

    Args:
        path: The file; its name is looked at and not its content.
    """
    if is_temporary(path.name):
        if _is_being_written(path.name):
            return None
        return Note(path=path, kind="temporary", sentence=f"{path} was left by a process that is gone.")
    if _NEXT.fullmatch(path.name):
        return Note(path=path, kind="temporary", sentence=f"{path} was left by a process that was ended as it wrote.")
    return Note(path=path, kind="foreign", sentence=f"{path} is none of cgtool's files.")


def next_name(name: str, digest: str) -> str:
    """Return what a rank's file is called while it is being published (see `cgtool.store.entry`)."""
    return f".{name}.{digest}.next"


def orphan(path: Path) -> Note:
    """Return the note on an intact artifact that no manifest names."""
    return Note(path=path, kind="orphan", sentence=f"{path} is named by no manifest: `cgtool prune` removes it.")


def unfinished(path: Path) -> Note:
    """Return the note on an entry or a unit that a warm has begun and not come to its end."""
    sentence = f"{path} was begun and never finished: warming the same model goes on from there."
    return Note(path=path, kind="unfinished", sentence=sentence)


def _is_being_written(name: str) -> bool:
    """Whether the process that a temporary file is named after runs; another host's cannot be seen from here."""
    match = _WRITER.fullmatch(name)
    if match is None:
        return False
    if os.name != "posix":  # elsewhere signal 0 is no question
        return True
    try:
        os.kill(int(match[1]), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it runs, and is another user's
        return True
    return True
