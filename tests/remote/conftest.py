"""Fixtures for tests of remote stores: running stores of each kind, and short pauses between retries."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from remote_servers import nginx, registry, s3, webdav


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry failed requests almost immediately."""
    for module in ("stores", "http", "buckets"):
        with contextlib.suppress(ImportError):  # extras may be missing
            monkeypatch.setattr(f"cgtool.remote.{module}.BACKOFF_SECS", 0.01)


@pytest.fixture(scope="module", params=["folder", "webdav", "webdav with a password", "nginx", "s3", "oci"])
def store_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a running store."""
    folder = tmp_path_factory.mktemp("store")
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        match request.param:
            case "folder":
                yield (folder / "a b").as_uri()
            case "nginx":
                yield stack.enter_context(nginx(folder / "nginx"))
            case "s3":
                yield stack.enter_context(s3(patch))
            case "oci":
                yield stack.enter_context(registry(folder))
            case kind:
                yield stack.enter_context(webdav(folder, password="password" in kind)) + "/"
