"""What an entry remembers of who signed it, as a check reads it. Must not import torch; writes nothing.

`signatures/<sha256>.json` must have the digest that is its name, and `<sha256>.sig` beside it must hold signatures;
whose they are is for the policy of load to say (`cgtool.store.trust`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from cgtool.errors import CacheError, RefusedError
from cgtool.plan.grammar import sha256_hex
from cgtool.store.bundle_index import MAX_SIGNATURE_BYTES, Limits
from cgtool.store.files import read_bytes
from cgtool.store.layout import is_hash
from cgtool.store.signatures import parse_signatures
from cgtool.toolkit.verify import findings as found
from cgtool.toolkit.verify.findings import Note, Problem, ProblemKind
from cgtool.toolkit.verify.strays import stray

_REMEDY = "Remove both files of that name, and import the signed bundle again."
_ENDS = (".json", ".sig")


def check_signatures(folder: Path) -> tuple[list[Problem], list[Note]]:
    """Read everything in an entry's folder of signatures.

    Args:
        folder: The folder; one that is missing has nothing wrong.

    Returns:
        What is wrong, and what is none of cgtool's.
    """
    try:
        names = set(os.listdir(folder))  # noqa: PTH208 - names are all that is wanted
    except (FileNotFoundError, NotADirectoryError):
        return [], []
    except OSError as error:
        return [found.of_error(folder, CacheError(f"{folder} could not be listed: {error}."))], []
    ours = {name for name in names if is_hash(Path(name).stem) and Path(name).suffix in _ENDS}
    notes = [note for name in sorted(names - ours) if (note := stray(folder / name)) is not None]
    stems = sorted({Path(name).stem for name in ours})
    return [problem for stem in stems for problem in _check_pair(folder, stem, names)], notes


def _check_pair(folder: Path, stem: str, names: Iterable[str]) -> list[Problem]:
    problems = []
    for end, check in ((".json", _check_index), (".sig", _check_signature)):
        path = folder / f"{stem}{end}"
        if path.name not in names:
            problems.append(_problem(path, "missing", "is missing, and its other half is there"))
            continue
        try:
            problem = check(path)
        except CacheError as error:
            problem = found.of_error(path, error)
        problems += [] if problem is None else [problem]
    return problems


def _check_index(path: Path) -> Problem | None:
    data = _read(path, Limits().max_index_bytes)
    if data is None:
        return _problem(path, "not_a_file", "is no file that import writes")
    return None if sha256_hex(data) == path.stem else _problem(path, "digest", "differs from the digest in its name")


def _check_signature(path: Path) -> Problem | None:
    data = _read(path, MAX_SIGNATURE_BYTES)
    if data is None:
        return _problem(path, "not_a_file", "is no file that import writes")
    try:
        parse_signatures(data)
    except RefusedError:
        return _problem(path, "corrupt", "holds no signatures")
    return None


def _read(path: Path, most: int) -> bytes | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return read_bytes(path) if stat.S_ISREG(status.st_mode) and status.st_size <= most else None


def _problem(path: Path, kind: ProblemKind, why: str) -> Problem:
    return Problem(path=path, kind=kind, sentence=f"{path} {why}. {_REMEDY}")
