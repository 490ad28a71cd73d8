"""The child: takes requests, proves, answers. What it prints goes to the parent's file in memory.

Must not import torch._dynamo, torch._inductor or sympy.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import resource
import signal
import socket
import traceback
from typing import Any

from cgtool.build.proof.protocol import receive, send

#: Linux: which signal a descriptor sends when something happens to it (fcntl.F_SETSIG, which Python does not name).
_F_SETSIG = 10


def main(sock_fd: int, life_fd: int) -> None:
    """Serve until the parent closes its end.

    Args:
        sock_fd: The child's end of the socket pair.
        life_fd: The reading end of a pipe that the parent holds open while it lives.
    """
    _die_with_parent(life_fd)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    sock = socket.socket(fileno=sock_fd)
    import torch  # noqa: F401 - the parent waits for a child that is ready

    import cgtool.build.proof.run  # noqa: F401 - as above

    send(sock, {"ready": True})
    while True:
        try:
            request, data = receive(sock)
        except EOFError:
            return
        reply = _answer(sock, request, data)
        send(sock, reply)
        if reply.get("last"):
            return


def _die_with_parent(life_fd: int) -> None:
    """Ask the kernel for SIGKILL when the pipe's other end closes: no thread of ours need run for it.

    PR_SET_PDEATHSIG would end us with the thread that started us.
    """
    fcntl.fcntl(life_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life_fd, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life_fd, fcntl.F_SETFL, fcntl.fcntl(life_fd, fcntl.F_GETFL) | os.O_ASYNC)
    os.set_blocking(life_fd, False)
    try:
        if not os.read(life_fd, 1):  # closed before we asked
            os._exit(1)
    except BlockingIOError:
        pass


def _answer(sock: socket.socket, request: dict[str, Any], data: bytes) -> dict[str, Any]:
    from cgtool.build.imports import import_providers
    from cgtool.build.proof.record import ProofRecord
    from cgtool.build.proof.run import prove_artifact
    from cgtool.errors import NoRoomError, ProofMismatchError
    from cgtool.pieces import PieceGraph

    graph = PieceGraph.from_json(request["graph"])
    on_accelerator = any(meta.device != "cpu" for meta in graph.inputs)
    try:
        import_providers(request["imports"])
        _set_up(request, on_accelerator=on_accelerator)
        record = prove_artifact(
            data,
            adaptor=request["adaptor"],
            graph=graph,
            guards=tuple(request["guards"]),
            device_index=request["device_index"],
            stage=lambda name: send(sock, {"stage": name}),
        )
    except ProofMismatchError as error:
        # a kernel that failed may have left the accelerator's context unusable
        return {"mismatch": str(error), "last": on_accelerator}
    except NoRoomError as error:
        return {"no_room": str(error)}
    except Exception as error:  # noqa: BLE001 - nothing was learnt of the artifact, and the parent says so
        traceback.print_exc()
        words = " ".join(str(error).split()) or type(error).__name__
        reason = f"not proved: {type(error).__name__}: {words}"
        record = ProofRecord(shapes=(), worst_error=0.0, secs=0.0, reason=reason, may_pass_later=True)
        return {"record": record.to_json(), "last": on_accelerator}
    return {"record": record.to_json()}


def _set_up(request: dict[str, Any], *, on_accelerator: bool) -> None:
    import torch

    from cgtool.build.workers.settings import apply_settings

    apply_settings({"torch": request["settings"]})
    index = request["device_index"]
    if on_accelerator and index is not None:
        torch.accelerator.set_device_index(index)
