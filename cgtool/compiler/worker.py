"""The program of a compile worker: compiles pieces in a child process and reports failures."""

from __future__ import annotations

import contextlib
import errno
import traceback
from pathlib import Path

from msgspec.structs import replace

from cgtool.child import Channel
from cgtool.compiler import _torch
from cgtool.compiler.adaptors.interface import get_adaptor
from cgtool.compiler.generated import compile_piece
from cgtool.compiler.proof.prover import Prover
from cgtool.compiler.request import (
    CompileReport,
    CompileRequest,
    WorkerSetup,
    apply_settings,
    import_providers,
    why_machines_differ,
    why_ops_differ,
)
from cgtool.errors import CgtoolError, CompileError, ModelError, ProofMismatchError, chain_of
from cgtool.executors.worker import Handed, UnitSetup
from cgtool.guards._torch import register_fake_group
from cgtool.plan.grammar import decode
from cgtool.store.artifacts import split_origin
from cgtool.store.files import FILE_LIMIT

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
#: What compilers and libraries print when a machine limit stops them → the limit.
_MACHINE_LIMITS = {
    "No space left on device": "disk",
    "Disk quota exceeded": "disk",
    "Killed signal terminated program": "memory",
    "Cannot allocate memory": "memory",
    "virtual memory exhausted": "memory",
    "std::bad_alloc": "memory",
    "File size limit exceeded": "file",
    "File too large": "file",
    "out of memory": "memory",
    "can't allocate memory": "memory",
}
_ADVICE = {
    "disk": "the disk is full. Free space for the cache and in TMPDIR, and warm again",
    "file": f"a file cannot be written: {FILE_LIMIT}",
    "memory": "memory ran out. Use fewer workers (--jobs), or a machine with more memory",
}
_LINE_CHARS = 200


def main(channel: Channel) -> None:
    """Compile pieces until the parent hangs up; every failure is reported in the answer."""
    _prepare(channel.setup(WorkerSetup))
    for request, _ in channel.requests(CompileRequest):
        channel.answer(*_answer(request))


def serve_units(channel: Channel) -> None:
    """Compile and prove units for `cgtool.executors.worker` until the parent hangs up."""
    setup = channel.setup(UnitSetup)
    _prepare(WorkerSetup(threads=1, inductor=setup.inductor, native=False, shared=setup.shared))
    with contextlib.ExitStack() as stack:
        prover: Prover | None = None
        for handed, data in channel.requests(Handed):
            request = decode(data, CompileRequest)
            if request.prove and prover is None:
                prover = stack.enter_context(Prover(timeout_secs=handed.timeout_secs))
            if prover is not None:
                prover.start()  # it imports torch while the piece is compiled
            report, artifact = _answer(request)
            if request.prove and prover is not None:
                report = _proved(prover, request, report, artifact)
            channel.answer(report, artifact if report.artifact is not None else b"")


def _proved(prover: Prover, request: CompileRequest, report: CompileReport, data: bytes) -> CompileReport:
    """Return the report with the proof's result; the artifact is dropped if it is wrong."""
    if report.artifact is None:
        return report
    _, code = split_origin(data, report.artifact.kind)
    guards = report.artifact.guards
    try:
        found = prover.prove(code, adaptor=request.adaptor, graph=request.graph, guards=guards, imports=request.imports)
    except ProofMismatchError as error:
        return CompileReport(status="wrong", reason=str(error))
    except CgtoolError as error:
        return CompileReport(status="failed", reason=str(error))
    if found.verdict == "later":
        return report
    return replace(report, artifact=replace(report.artifact, proved=found.proved, proof_gap=found.reason))


def _answer(request: CompileRequest) -> tuple[CompileReport, bytes]:
    try:
        return _compiled(request)
    except BaseException as error:  # noqa: BLE001  compilers raise anything, and the report describes it
        traceback.print_exc()
        fault = machine_fault(error)
        reason = fault or str(error).strip() or type(error).__name__
        rejected = isinstance(error, CompileError) and fault is None
        op = error.path if isinstance(error, CompileError) and rejected and isinstance(error.path, str) else None
        return CompileReport(status="rejected" if rejected else "failed", reason=reason, op=op), b""


def _compiled(request: CompileRequest) -> tuple[CompileReport, bytes]:
    differ = why_machines_differ(request.factors)
    if differ is not None:
        return CompileReport(status="refused", reason=f"compared with this worker, {differ}"), b""
    apply_settings(request.settings)
    try:
        import_providers(request.imports)
    except ModelError as error:
        return CompileReport(status="refused", reason=str(error)), b""
    for name, size in request.groups.items():
        register_fake_group(name, size)
    adaptor = get_adaptor(request.adaptor)
    differ = why_ops_differ(request.graph.ops)
    if differ is not None:
        return CompileReport(status="refused", reason=differ), b""
    if adaptor.compute_hash(request.options, max_autotune=request.max_autotune) != request.compiler:
        reason = "the compiler, its settings or the target differ from those of the request"
        return CompileReport(status="refused", reason=reason), b""
    data, artifact, texts = compile_piece(
        adaptor, request.graph, request.origin, options=request.options, max_autotune=request.max_autotune
    )
    return CompileReport(status="done", artifact=artifact, generated=dict(texts)), data


def machine_fault(error: BaseException) -> str | None:
    """Return which machine limit stopped a compile, by an error and its causes; None if none did."""
    for found in chain_of(error):
        if isinstance(found, OSError) and found.errno in _NO_SPACE:
            return _ADVICE["disk"]
        if isinstance(found, OSError) and found.errno == errno.EFBIG:
            return _ADVICE["file"]
        if isinstance(found, MemoryError) or (isinstance(found, OSError) and found.errno == errno.ENOMEM):
            return _ADVICE["memory"]
        for line in str(found).splitlines():
            kind = next((kind for text, kind in _MACHINE_LIMITS.items() if text in line), None)
            if kind is not None:
                return f"{_ADVICE[kind]} ({line.strip()[:_LINE_CHARS]})"
    return None


def _prepare(setup: WorkerSetup) -> None:
    """Import the compiler before the first unit, so that no unit's time limit includes it."""
    if setup.inductor:
        _torch.import_inductor(setup.threads)
        _torch.share_probes(Path(setup.shared))
        if setup.native:
            _torch.probe()
