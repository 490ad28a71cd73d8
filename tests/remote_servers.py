"""Real stores on the loopback interface, started per test, and a server with injectable faults."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import socket
import socketserver
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

LOOPBACK = "127.0.0.1"
USER, PASSWORD = "ann", "s3cret-word"
#: The password for docker-registry, hashed by bcrypt with the minimum cost.
HASHED = "$2b$04$abcdefghijklmnopqrstuuzQDw2v3CQSMowG.sq3X.nH1lfmlmQMW"
NGINX = """
daemon off; worker_processes 1; pid {root}/pid; error_log {root}/error.log;
events {{ }}
http {{
  access_log off; client_max_body_size 0; client_body_temp_path {root}/body; proxy_temp_path {root}/proxy;
  fastcgi_temp_path {root}/fastcgi; uwsgi_temp_path {root}/uwsgi; scgi_temp_path {root}/scgi;
  server {{
    listen {address};
    location / {{
      root {root}/files; dav_methods PUT DELETE MKCOL COPY MOVE; create_full_put_path on; autoindex on;
    }}
  }}
}}
"""


#: Programs that serve on a free port and print it; separate processes, so that their warnings do not fail tests.
WEBDAV = """
import json, sys
from cheroot import wsgi
from wsgidav.wsgidav_app import WsgiDAVApp
server = wsgi.Server((sys.argv[2], 0), WsgiDAVApp(json.loads(sys.argv[1])), numthreads=12)
server.prepare()
print(server.bind_addr[1], flush=True)
server.serve()
"""
S3 = """
import threading
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
threading.Event().wait()
"""


@contextlib.contextmanager
def webdav(folder: Path, *, password: bool = False, address: str = LOOPBACK, within: str = "") -> Iterator[str]:
    """Run WsgiDAV on Cheroot; yield its URL, including credentials if required.

    Args:
        folder: The folder to serve.
        password: Whether to require a password.
        address: The address to listen on.
        within: The network namespace of this address; "" for the current one.
    """
    for name in ("requests", "wsgidav", "cheroot"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "provider_mapping": {"/": str(folder)},
        "simple_dc": {"user_mapping": {"*": {USER: {"password": PASSWORD}} if password else True}},
        "http_authenticator": {"accept_basic": True, "accept_digest": False, "default_to_digest": False},
        "verbose": 0,
        "logging": {"enable": False},
    }
    with _says_its_port(WEBDAV, json.dumps(config), address, within=within) as port:
        yield f"http://{f'{USER}:{PASSWORD}@' if password else ''}{address}:{port}"


@contextlib.contextmanager
def nginx(folder: Path) -> Iterator[str]:
    """Run nginx with its own DAV module, which does not support PROPFIND: folders are listed by index pages."""
    pytest.importorskip("requests", reason="requests is not installed")
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed")
    (folder / "files").mkdir(parents=True)

    def command(port: int) -> list[str]:
        (folder / "nginx.conf").write_text(NGINX.format(root=folder, address=f"{LOOPBACK}:{port}"))
        user = ["-g", "user root;"] if os.geteuid() == 0 else []
        return [program, "-c", str(folder / "nginx.conf"), "-p", str(folder), *user]

    with _on_a_port(command, "/") as port:
        yield f"http://{LOOPBACK}:{port}"


@contextlib.contextmanager
def s3(patch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run Moto's S3 server, and point the variables of the AWS tools to it."""
    for name in ("moto", "flask", "obstore"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    with _says_its_port(S3) as port:
        endpoint = f"http://{LOOPBACK}:{port}"
        for_s3(patch, endpoint)
        request = urllib.request.Request(f"{endpoint}/models", method="PUT")
        urllib.request.urlopen(request, timeout=30).close()
        yield "s3://models/cgtool"


def for_s3(patch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Point the variables of the AWS tools to a server."""
    patch.setenv("AWS_ENDPOINT_URL", endpoint)
    patch.setenv("AWS_ALLOW_HTTP", "true")
    patch.setenv("AWS_ACCESS_KEY_ID", USER)
    patch.setenv("AWS_SECRET_ACCESS_KEY", PASSWORD)
    patch.setenv("AWS_REGION", "us-east-1")


@contextlib.contextmanager
def registry(folder: Path, *, password: bool = False) -> Iterator[str]:
    """Run docker-registry on a folder; yield the URL of a tag, without credentials."""
    pytest.importorskip("oras", reason="oras is not installed")
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("docker-registry is not installed")
    folder.mkdir(parents=True, exist_ok=True)

    def command(port: int) -> list[str]:
        storage = f"storage: {{filesystem: {{rootdirectory: {folder}/data}}}}"
        (folder / "users").write_text(f"{USER}:{HASHED}\n")
        auth = f"auth: {{htpasswd: {{realm: tests, path: {folder}/users}}}}" if password else ""
        (folder / "config.yml").write_text(f"version: 0.1\n{storage}\n{auth}\nhttp: {{addr: '{LOOPBACK}:{port}'}}\n")
        return [program, "serve", str(folder / "config.yml")]

    with _on_a_port(command, "/v2/") as port:
        yield f"oci://{LOOPBACK}:{port}/team/models:v1"


@contextlib.contextmanager
def _says_its_port(program: str, *arguments: str, within: str = "") -> Iterator[int]:
    entering = ["ip", "netns", "exec", within] if within else []
    command = [*entering, sys.executable, "-W", "ignore", "-c", program, *arguments]
    with _ended(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)) as process:
        assert process.stdout is not None
        with process.stdout as said:
            yield int(said.readline())


@contextlib.contextmanager
def _on_a_port(command: Callable[[int], list[str]], page: str) -> Iterator[int]:
    """Run a server on an unused port; retry with another if the port was taken in the meantime."""
    for _ in range(5):
        port = unused_port()
        started = subprocess.Popen(command(port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with _ended(started) as process:
            if _answers(process, f"http://{LOOPBACK}:{port}{page}"):
                yield port
                return
    pytest.fail("no port is free")


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        process.terminate()  # nginx takes its workers along
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)


def _answers(process: subprocess.Popen[bytes], url: str) -> bool:
    """Wait until a server responds; return False if its process ended."""
    while process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except urllib.error.HTTPError:
            break
        except OSError:
            time.sleep(0.05)
        else:
            break
    return process.poll() is None


#: Handles a request instead of the server, or returns False.
Fault = Callable[[BaseHTTPRequestHandler, bytes], bool]


class FaultyServer(ThreadingHTTPServer):
    """Serves a folder by plain GET, HEAD and PUT, with an index page for each folder, unless `fault` handles a request.

    Attributes:
        hidden: Names that are not listed (yet).
        fault: Called for each GET and HEAD with the bytes of the file, and for each PUT before its body is read.
        requests: (method, path) of each request.
    """

    daemon_threads = True

    def __init__(self, folder: Path, handler: type[BaseHTTPRequestHandler] | None = None) -> None:
        super().__init__((LOOPBACK, 0), handler or _FaultyHandler)
        self.folder = folder
        self.fault: Fault = lambda handler, data: False
        self.hidden: set[str] = set()
        self.requests: list[tuple[str, str]] = []
        self.url = f"http://{LOOPBACK}:{self.server_address[1]}"

    def fetched(self, part: str) -> list[str]:
        """Return the paths of GET requests for files that contain `part`, in order."""
        gets = [path for method, path in self.requests if method == "GET" and part in path]
        return [path for path in gets if not path.endswith("/")]

    def handle_error(self, request: object, client_address: object) -> None:
        """Do not report connections that were broken on purpose."""


class _FaultyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two packets: each response would be delayed by 40 ms
    server: FaultyServer

    def do_GET(self) -> None:
        self.server.requests.append((self.command, self.path))
        place = self.server.folder / self.path.strip("/")
        if place.is_dir():
            names = sorted(
                f"{one.name}/" if one.is_dir() else one.name
                for one in place.iterdir()
                if one.name not in self.server.hidden
            )
            self.answer("".join(f'<a href="{name}">{name}</a>\n' for name in names).encode(), kind="text/html")
        elif not place.is_file():
            self.answer(b"", 404)
        elif not self.server.fault(self, data := place.read_bytes()):
            start = int(self.headers.get("Range", "bytes=0-")[6:-1])
            self.answer(data[start:], 206 if start else 200)

    do_HEAD = do_GET  # noqa: N815 - as above

    def do_PUT(self) -> None:
        self.server.requests.append((self.command, self.path))
        place = self.server.folder / self.path.strip("/")
        if self.server.fault(self, b""):
            return
        body = self.sent()
        if self.headers.get("If-None-Match") and place.exists():
            self.answer(b"", 412)
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(body)
        self.answer(b"", 201)

    def sent(self) -> bytes:
        """Return the body of the request; it must be read before responding, or the client may not see the response."""
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_PROPFIND(self) -> None:
        self.sent()
        self.answer(b"", 405)

    def answer(self, data: bytes, status: int = 200, *, kind: str = "application/octet-stream", **more: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), "Content-Type": kind, **more}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def reset(handler: BaseHTTPRequestHandler, data: bytes) -> None:
    """Send half of a body and reset the connection, like a server that is killed."""
    start = int(handler.headers.get("Range", "bytes=0-")[6:-1])
    handler.send_response(206 if start else 200)
    handler.send_header("Content-Length", str(len(data) - start))
    handler.end_headers()
    handler.wfile.write(data[start : start + (len(data) - start) // 2])
    handler.wfile.flush()
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()
    handler.close_connection = True


def answers(status: int) -> Callable[[BaseHTTPRequestHandler, bytes], None]:
    def answer(handler: BaseHTTPRequestHandler, _data: bytes) -> None:
        if handler.command == "PUT":
            handler.sent()
        handler.answer(b"no", status, Retry_After="0")

    return answer


def cut(handler: BaseHTTPRequestHandler, _data: bytes) -> None:
    """Reset the connection after receiving half of a body."""
    handler.rfile.read(int(handler.headers["Content-Length"]) // 2)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()
    handler.close_connection = True


def truncated(handler: BaseHTTPRequestHandler, data: bytes) -> None:
    start = int(handler.headers.get("Range", "bytes=0-")[6:-1])
    handler.answer(data[start : len(data) - 10], 206 if start else 200)


def other_bytes(handler: BaseHTTPRequestHandler, data: bytes) -> None:
    handler.answer(bytes(len(data)))


def longer(handler: BaseHTTPRequestHandler, data: bytes) -> None:
    handler.answer(data + bytes(10))


def of_files(
    parts: list[str],
    fault: Callable[[BaseHTTPRequestHandler, bytes], None],
    *,
    times: int | None = None,
    method: str = "GET",
) -> Fault:
    """Apply a fault to requests for URLs that contain one of `parts`, always or only the first `times` times."""
    left = itertools.count() if times is None else iter(range(times))
    lock = threading.Lock()

    def apply(handler: BaseHTTPRequestHandler, data: bytes) -> bool:
        if handler.command != method or not any(part in handler.path for part in parts):
            return False
        with lock:
            if next(left, None) is None:
                return False
        fault(handler, data)
        return True

    return apply


@contextlib.contextmanager
def faulty(folder: Path) -> Iterator[FaultyServer]:
    """Serve a folder with injectable faults."""
    with served(FaultyServer(folder)) as server:
        yield server


def answering(answer: Callable[[Any], None]) -> type[BaseHTTPRequestHandler]:
    """Return a handler class that handles every request with `answer`."""

    class Answering(_FaultyHandler):
        do_GET = do_HEAD = do_PUT = do_PROPFIND = answer  # noqa: N815 - the names of the base class

    return Answering


@contextlib.contextmanager
def served(server: FaultyServer) -> Iterator[FaultyServer]:
    """Run a server in a thread."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def refusing(status: int, body: bytes) -> Iterator[str]:
    """Run a server with one response to everything; yield its URL."""

    class Refusing(_FaultyHandler):
        def do_GET(self) -> None:
            self.sent()
            self.answer(body, status, kind="application/xml")

        do_HEAD = do_GET  # noqa: N815 - as above
        do_PUT = do_GET  # noqa: N815 - as above

    with ThreadingHTTPServer((LOOPBACK, 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield f"http://{LOOPBACK}:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def deaf_port() -> Iterator[int]:
    """Yield a port that refuses all connections and is reserved for the test."""
    with socket.socket() as bound:
        bound.bind((LOOPBACK, 0))
        yield bound.getsockname()[1]


def unused_port() -> int:
    """Return a port on which nobody listens."""
    with socketserver.TCPServer((LOOPBACK, 0), socketserver.BaseRequestHandler) as server:
        return int(server.server_address[1])
