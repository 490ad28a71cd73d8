"""What the prover and its child say to each other, over a socket pair. Must not import torch.

A message is::

    8 bytes     length of the head, big endian
    8 bytes     length of the body, big endian
    head        JSON
    body        bytes: the artifact of a request, nothing in a reply

The child says {"ready": true} once torch is imported. A request is {"adaptor", "graph", "guards", "imports",
"device_index", "settings"}; it is answered by any number of {"stage": words}, and then by
{"record": {...}} or {"mismatch": sentence}. With "last": true the child ends after it, for its device is in no state to
go on.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

_LENGTHS = struct.Struct(">QQ")
_CHUNK = 1 << 20


def send(sock: socket.socket, head: dict[str, Any], body: bytes = b"", *, deadline: float | None = None) -> None:
    """Send one message.

    Args:
        sock: One end of the pair.
        head: What JSON can say.
        body: What it cannot.
        deadline: On `time.monotonic`'s clock; None waits for ever.

    Raises:
        TimeoutError: The deadline passed.
        OSError: The other end is gone.
    """
    text = json.dumps(head).encode()
    sock.settimeout(_remaining(deadline))
    sock.sendall(_LENGTHS.pack(len(text), len(body)) + text)
    if body:
        sock.settimeout(_remaining(deadline))
        sock.sendall(body)


def receive(sock: socket.socket, *, deadline: float | None = None) -> tuple[dict[str, Any], bytes]:
    """Return the head and the body of the next message.

    Args:
        sock: One end of the pair.
        deadline: On `time.monotonic`'s clock; None waits for ever.

    Raises:
        TimeoutError: The deadline passed.
        EOFError: The other end is gone.
        OSError: The other end is gone.
    """
    head_bytes, body_bytes = _LENGTHS.unpack(_exactly(sock, _LENGTHS.size, deadline))
    head = json.loads(_exactly(sock, head_bytes, deadline))
    return head, _exactly(sock, body_bytes, deadline)


def _exactly(sock: socket.socket, num_bytes: int, deadline: float | None) -> bytes:
    found = bytearray()
    while len(found) < num_bytes:
        sock.settimeout(_remaining(deadline))
        part = sock.recv(min(num_bytes - len(found), _CHUNK))
        if not part:
            raise EOFError
        found += part
    return bytes(found)


def _remaining(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
