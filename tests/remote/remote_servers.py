"""Real stores on loopback, each started by the test that asks for one, and a server that fails as it is told."""

from __future__ import annotations

import contextlib
import shutil
import socket
import socketserver
import subprocess
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

LOOPBACK = "127.0.0.1"
USER, PASSWORD = "ann", "s3cret-word"
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


@contextlib.contextmanager
def webdav(folder: Path, *, password: bool = False) -> Iterator[str]:
    """WsgiDAV behind Cheroot; yields its URL, with user and password where it asks for them."""
    pytest.importorskip("requests", reason="requests is not installed")
    pytest.importorskip("wsgidav", reason="WsgiDAV is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from cheroot import wsgi
        from wsgidav.wsgidav_app import WsgiDAVApp

        folder.mkdir(parents=True, exist_ok=True)
        users = {USER: {"password": PASSWORD}} if password else True
        app = WsgiDAVApp(
            {
                "provider_mapping": {"/": str(folder)},
                "simple_dc": {"user_mapping": {"*": users}},
                "http_authenticator": {"accept_basic": True, "accept_digest": False, "default_to_digest": False},
                "verbose": 0,
                "logging": {"enable": False},
            }
        )
        server = wsgi.Server((LOOPBACK, 0), app, numthreads=12)
        server.prepare()
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        who = f"{USER}:{PASSWORD}@" if password else ""
        yield f"http://{who}{LOOPBACK}:{server.bind_addr[1]}"
    finally:
        server.stop()
        thread.join()


@contextlib.contextmanager
def nginx(folder: Path) -> Iterator[str]:
    """Nginx with its own DAV module, which knows no PROPFIND: what it holds is found by its pages of links."""
    pytest.importorskip("requests", reason="requests is not installed")
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed")
    (folder / "files").mkdir(parents=True)
    folder.chmod(0o755)
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        address = f"{LOOPBACK}:{probe.getsockname()[1]}"
    (folder / "nginx.conf").write_text(NGINX.format(root=folder, address=address))
    command = [program, "-c", str(folder / "nginx.conf"), "-p", str(folder), "-g", "user root;"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        _wait_for(f"http://{address}/")
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def s3(patch: pytest.MonkeyPatch) -> Iterator[str]:
    """Moto's S3, as a server of its own; the variables of AWS' tools lead to it."""
    pytest.importorskip("moto", reason="moto is not installed")
    pytest.importorskip("obstore", reason="obstore is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from moto.server import ThreadedMotoServer

        server = ThreadedMotoServer(ip_address=LOOPBACK, port=0, verbose=False)
        server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": USER,
        "AWS_SECRET_ACCESS_KEY": PASSWORD,
        "AWS_REGION": "us-east-1",
    }.items():
        patch.setenv(name, value)
    try:
        request = urllib.request.Request(f"http://{host}:{port}/models", method="PUT")
        urllib.request.urlopen(request, timeout=30).close()
        yield "s3://models/cgtool"
    finally:
        server.stop()


@contextlib.contextmanager
def registry(folder: Path) -> Iterator[str]:
    """docker-registry over a folder; yields the URL of a tag."""
    pytest.importorskip("oras", reason="oras is not installed")
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("docker-registry is not installed")
    address = f"{LOOPBACK}:{unused_port()}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yml").write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {folder}/data}}}}\nhttp: {{addr: '{address}'}}\n"
    )
    process = subprocess.Popen(
        [program, "serve", str(folder / "config.yml")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait_for(f"http://{address}/v2/")
        yield f"oci://{address}/team/models:v1"
    finally:
        process.terminate()
        process.wait(30)


#: Answers a request in place of the file, or returns False.
Fault = Callable[[BaseHTTPRequestHandler, bytes], bool]


class FaultyServer(ThreadingHTTPServer):
    """Serves a folder by plain GET and HEAD, with an index of each folder; `fault` has the first word.

    Attributes:
        hidden: Names that are not listed (yet).
        fault: Asked of each GET and HEAD with the bytes of the file.
        requests: (method, path) of each that came.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__((LOOPBACK, 0), _FaultyHandler)
        self.folder = folder
        self.fault: Fault = lambda handler, data: False
        self.hidden: set[str] = set()
        self.requests: list[tuple[str, str]] = []
        self.url = f"http://{LOOPBACK}:{self.server_address[1]}"

    def fetched(self, part: str) -> list[str]:
        """The paths of GET requests that hold `part`, in order; folders that were listed are left out."""
        gets = [path for method, path in self.requests if method == "GET" and part in path]
        return [path for path in gets if not path.endswith("/")]

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of a connection that was broken on purpose."""


class _FaultyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
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

    def do_PROPFIND(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer(b"", 405)

    def answer(self, data: bytes, status: int = 200, *, kind: str = "application/octet-stream", **more: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), "Content-Type": kind, **more}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextlib.contextmanager
def faulty(folder: Path) -> Iterator[FaultyServer]:
    """A folder behind a server that fails as it is told."""
    with FaultyServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def unused_port() -> int:
    """A port of loopback on which nobody listens."""
    with socketserver.TCPServer((LOOPBACK, 0), socketserver.BaseRequestHandler) as server:
        return int(server.server_address[1])


def _wait_for(url: str) -> None:
    for _ in range(300):
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.05)
        else:
            return
    pytest.fail(f"{url} does not answer")
