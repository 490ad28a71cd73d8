r"""A compile worker: takes folders with units, and leaves artifacts, logs and results in them.

`python -m cgtool.build.workers.worker FOLDER...` does the units in these folders and ends: 0 where all are done, else
1. Without a folder it serves the process that started it, line by line::

    stdin   folder "\n" ...                          until it is closed
    stdout  "ready\n", then folder "\n" for each     when its result.json is written

Nothing but that protocol reaches stdout: while a unit is compiled, the descriptors 1 and 2 are its log's, so that what
the host's compiler says and where a crash happened (faulthandler) stand there. Must not import torch before it has its
keeper.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from cgtool.build.workers.endings import machine_fault, reason_of
from cgtool.build.workers.keeper import split_off
from cgtool.build.workers.unit import ARTIFACT_FILE, LOG_FILE, Status, Unit, UnitReport, read_unit
from cgtool.errors import CompileError, ModelError

READY = "ready"


def main(
    folders: Sequence[str] = (),
    *,
    threads: int = 1,
    inductor: bool = True,
    native: bool = True,
    shared: str | None = None,
) -> int:
    """Do the units in `folders`, or serve stdin.

    Args:
        folders: Folders with a `unit.json` each.
        threads: How many processes Inductor may use for one unit.
        inductor: Whether to import Inductor before there is a unit.
        native: Whether C++ code is written for the CPU.
        shared: A folder of all workers of one pool: what one of them found out of this machine, the others take.
    """
    if folders:
        statuses = [do_unit(Path(folder)).status for folder in folders]
        return int(any(status != "done" for status in statuses))
    split_off(sys.stdin.fileno())
    with os.fdopen(_take_stdout(), "w", encoding="utf-8") as answers:
        _prepare(threads, inductor=inductor, native=native, shared=shared)
        answers.write(f"{READY}\n")
        answers.flush()
        for line in sys.stdin:
            do_unit(Path(line.rstrip("\n")))
            answers.write(line)
            answers.flush()
    return 0


def do_unit(folder: Path) -> UnitReport:
    """Compile the unit in a folder and write its result; whatever goes wrong is in the result.

    Raises:
        OSError: The result could not be written.
    """
    key = ""
    with _logging_to(folder / LOG_FILE):
        try:
            unit = read_unit(folder)
            key = unit.key
            report = _compiled(unit, folder)
        except BaseException as error:  # noqa: BLE001  a compiler fails in any way it likes: the result says how
            traceback.print_exc()
            (folder / ARTIFACT_FILE).unlink(missing_ok=True)  # on a full disk, room for the result
            report = UnitReport(key=key, status=_status_of(error), reason=reason_of(error))
        report.write(folder)
    return report


def _compiled(unit: Unit, folder: Path) -> UnitReport:
    # What they import, torch above all, is imported by the keeper's child alone.
    from cgtool.build.adaptors import get_adaptor
    from cgtool.build.imports import import_providers
    from cgtool.build.workers.modules import why_ops_differ
    from cgtool.build.workers.settings import apply_settings

    apply_settings(unit.settings)
    try:
        import_providers(unit.imports)
    except ModelError as error:
        return UnitReport(key=unit.key, status="refused", reason=str(error))
    adaptor = get_adaptor(unit.adaptor)
    differ = why_ops_differ(unit.graph.ops)
    if differ is not None:
        return UnitReport(key=unit.key, status="refused", reason=differ)
    if adaptor.compute_hash(unit.options, max_autotune=unit.max_autotune) != unit.compiler:
        reason = "the compiler, its settings or the target here are not those that the unit was written for"
        return UnitReport(key=unit.key, status="refused", reason=reason)
    piece = adaptor.compile(unit.graph, options=unit.options, max_autotune=unit.max_autotune)
    (folder / ARTIFACT_FILE).write_bytes(piece.artifact)
    return UnitReport(
        key=unit.key, status="done", kernels=piece.kernels, compile_secs=piece.compile_secs, guards=tuple(piece.guards)
    )


def _status_of(error: BaseException) -> Status:
    return "rejected" if isinstance(error, CompileError) and machine_fault(error) is None else "failed"


def _prepare(threads: int, *, inductor: bool, native: bool, shared: str | None) -> None:
    """Import what compiles need before there is one: it counts for no unit's time."""
    from cgtool.build import adaptors  # noqa: F401 - for what it loads: torch
    from cgtool.build.workers import _torch, modules, settings  # noqa: F401 - as above

    if inductor:
        _torch.import_inductor()
        _torch.use_threads(threads)
        if shared is not None:
            _torch.share_probes(Path(shared))
        if native:
            _torch.probe()


def _take_stdout() -> int:
    """Keep stdout for the protocol, and send what else is printed to stderr."""
    kept = os.dup(1)
    os.dup2(2, 1)
    return kept


@contextlib.contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Send the descriptors 1 and 2, and the report of a crash, to a file while the block runs."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = os.dup(1), os.dup(2)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.enable(file=2)
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        faulthandler.disable()
        for descriptor, kept in enumerate(before, start=1):
            os.dup2(kept, descriptor)
            os.close(kept)
        os.close(log)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
