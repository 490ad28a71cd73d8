"""Stores in OCI registries, using oras: each tag of a repository is a store. Must not import torch.

Each file is a layer, so that tags share equal files. A layer is annotated with its name in the store. Layers of entries
are also annotated with their place in a cache, so that `oras pull` gives a folder that can be used as a cache. The
manifest is written together with an index or a unit, so readers see the old or the new manifest. Registries have no
conditional writes of tags: if two machines push to the same tag at the same time, the last one wins. Give each pusher
its own tag.

The contents of a tag are described by the labels that MCV, GKM and `skopeo inspect` show for GPU caches in images
(`labels`). Container images of caches are a different form, which is not read here: `cgtool.toolkit.image`.

Credentials are those of `docker login`.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
import oras.auth
import requests
from oras.container import Container
from oras.provider import Registry

from cgtool.errors import CacheError, RefusedError, RemoteError, UsageError
from cgtool.plan.grammar import sha256_hex
from cgtool.remote.entries import member_path
from cgtool.remote.http import HttpStore, with_retries
from cgtool.remote.stores import CHUNK_BYTES, Item, read
from cgtool.store.bundle_index import INDEX_FILE, SIGNATURE_FILE, Limits, Member, parse_index
from cgtool.store.layout import CACHE_FOLDER, KEY_FILE, SIGNATURES
from cgtool.store.records import Key, parse_key

_MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
#: Other types of manifests that a tag may have, which cgtool never writes.
_OTHER_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_CONFIG_TYPE = "application/vnd.oci.empty.v1+json"
IMAGE_CONFIG_TYPES = ("application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json")
_ARTIFACT_TYPE = "application/vnd.cgtool.cache.v1"
_FILE_TYPE = "application/vnd.cgtool.file.v1"
_EMPTY = b"{}"
_NAME, _TARGETS, _TITLE = "dev.cgtool.name", "dev.cgtool.targets", "org.opencontainers.image.title"
#: Like MCV's "cache.triton.image/"; GKM sums up all labels that end with "cache-size-bytes".
LABEL = "cache.cgtool.image"
#: The manifest's pseudo-name in the store; real names contain no space.
_MANIFEST = "its manifest"
_MAX_MANIFEST_BYTES = 256 * 2**20


class Layer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A descriptor: media type, digest ("sha256:...") and size of a blob, and annotations."""

    mediaType: str  # noqa: N815 - the field's name in the specification
    digest: str
    size: int
    annotations: dict[str, str] = {}


class Manifest(msgspec.Struct, frozen=True):
    """The manifest of a tag, which is a store or a container image."""

    config: Layer
    layers: tuple[Layer, ...] = ()
    annotations: dict[str, str] = {}
    schemaVersion: int = 2  # noqa: N815 - as above
    mediaType: str = _MANIFEST_TYPE  # noqa: N815 - as above
    artifactType: str | msgspec.UnsetType = msgspec.UNSET  # noqa: N815 - as above


class Target(msgspec.Struct, frozen=True, order=True, omit_defaults=True):
    """The hardware that an entry was compiled for, in MCV's terms, and torch's version."""

    backend: str
    arch: str
    torch_version: str = ""
    warp_size: int = 0
    cuda_version: str = ""


def targets_of(key: Key) -> list[Target]:
    """Return the targets of an entry: each accelerator, or the processor if there is none."""
    build, target = key.factors.get("torch") or {}, key.factors.get("target") or {}
    version, cuda = build.get("version") or "", build.get("with_cuda") or ""
    targets = []
    for accelerator in target.get("accelerators") or ():
        arch = accelerator.partition(" ")[0].partition(":")[0]  # "sm_90 x132", "gfx942:sramecc+:xnack- x304"
        if arch.startswith("sm_"):
            targets.append(Target("cuda", arch.removeprefix("sm_"), version, 32, cuda))
        else:
            targets.append(Target("hip", arch, version, 64 if arch.startswith("gfx9") else 32))
    return targets or [Target("cpu", machine_of(key), version)]


def machine_of(key: Key) -> str:
    """Return the processor architecture that an entry was compiled for, such as "x86_64"; "" if unknown."""
    target = key.factors.get("target") or {}
    return str((target.get("cpu") or {}).get("machine") or "")


def labels(hashes: Iterable[str], targets: Iterable[Target], size_bytes: int) -> dict[str, str]:
    """Return the labels that describe a cache in a registry: its entries, their targets, and the total file size."""
    distinct = sorted(set(hashes))
    summary = {"targets": sorted(set(targets))}
    return {
        f"{LABEL}/entry-count": str(len(distinct)),
        f"{LABEL}/cache-size-bytes": str(size_bytes),
        f"{LABEL}/summary": msgspec.json.encode(summary).decode(),
        "io.kserve.km/framework": "cgtool",
        "io.kserve.km/cache-hash": ",".join(distinct),
        "io.kserve.km/cache-mount-subpath": CACHE_FOLDER,
    }


class _Auth(oras.auth.TokenAuth):  # type: ignore[misc]  # Any: extras are not type-checked
    """Token authentication of oras, extended by basic authentication for registries that request it."""

    _is_basic = False

    def get_auth_header(self) -> dict[str, str]:
        return {"Authorization": f"Basic {self.token}"} if self._is_basic else super().get_auth_header()

    def authenticate_request(self, original: requests.Response, headers: dict[str, str], **kwargs: Any) -> Any:
        if not original.headers.get("Www-Authenticate", "").lower().startswith("basic"):
            try:
                return super().authenticate_request(original, headers, **kwargs)
            except (AttributeError, TypeError, RecursionError) as error:  # oras does not handle malformed responses
                raise oras.auth.AuthenticationException(str(error)) from error
        self._is_basic, self.token = True, getattr(self, "_basic_auth", None)
        return {**headers, **self.get_auth_header()}, self.token is not None


oras.auth.auth_backends["cgtool"] = _Auth


class OciStore(HttpStore):
    """A tag of a registry, oci://HOST/REPOSITORY[:TAG], `latest` by default; see `cgtool.remote.stores.Store`."""

    caveat = (
        "is a tag of a registry: if two machines push to it at the same time, the last one wins. Give each machine its "
        "own tag, or push again what is missing."
    )

    def __init__(self, url: str) -> None:
        super().__init__(url)
        parts = urlsplit(url)
        try:
            self._container = Container(self.url.removeprefix("oci://"))
        except ValueError as error:
            message = f"{self.url} does not name a repository. Use oci://HOST/REPOSITORY:TAG."
            raise UsageError(message, path=self.url) from error
        insecure = _is_loopback(parts.hostname or "")
        self._registry = Registry(hostname=self._container.registry, insecure=insecure, auth_backend="cgtool")
        self._session = with_retries(self._registry.session)
        self._session.headers["Accept"] = ", ".join((_MANIFEST_TYPE, *_OTHER_TYPES, "*/*"))
        self._login_advice = f"Log in as a user with the needed permission: docker login {self._container.registry}"
        self._method_advice = "The registry may be read-only; contact its operator."
        self._registry.auth.load_configs(self._container)
        if parts.username is not None:
            self._registry.auth.set_basic_auth(unquote(parts.username), unquote(parts.password or ""))
        self._lock = threading.RLock()
        #: Layers of the tag by (name in the store, path in a cache or ""); None until the manifest is read.
        self._known: dict[tuple[str, str], Layer] | None = None
        #: Layers that the manifest does not contain yet.
        self._added: dict[tuple[str, str], Layer] = {}

    def get(self, path: str, start: int = 0) -> Iterator[bytes] | None:
        """See `Store`."""
        return super().get(path, start) if path == _MANIFEST or self._layer(path) is not None else None

    def put(self, path: str, body: bytes | Path, *, if_absent: bool = False) -> bool:
        """See `Store`."""
        if if_absent and self._layer(path) is not None:
            return False
        layer = self.upload(body, _FILE_TYPE, _target_annotation(path, body))
        with self._lock:
            self._added[path, _signature_title(path)] = layer
            if path.endswith(f".{INDEX_FILE}"):
                self._add_members(path, body if isinstance(body, bytes) else body.read_bytes())
            if path.endswith(f".{INDEX_FILE}") or not path.startswith(("artifacts/", "entries/", "lookup/")):
                self._write_layers()
        return True

    def size(self, path: str) -> int | None:
        """See `Store`."""
        layer = self._layer(path)
        return None if layer is None else layer.size

    def list(self, folder: str) -> Iterator[Item]:
        """See `Store`; modification times are 0, because registries do not record them."""
        with self._lock:
            self._known = self._read_layers()
            names = {name: layer.size for (name, _), layer in self._known.items() if name.startswith(f"{folder}/")}
        for name, size in names.items():
            yield Item(name, size, 0.0)

    def delete(self, path: str) -> None:
        """See `Store`; removing an index also removes the layers of its entry."""
        with self._lock:
            hash_ = path.split("/")[1] if path.endswith(f".{INDEX_FILE}") else None
            entry = f"{CACHE_FOLDER}/{hash_}/"
            for name, title in list(self._read_layers()):
                if name == path or (hash_ is not None and title.startswith(entry)):
                    self._added.pop((name, title), None)
                    self._write_layers(without=(name, title))

    def _add_members(self, path: str, index: bytes) -> None:
        """Annotate the layers of an entry with their paths in a cache."""
        members: tuple[Member, ...] = ()
        with contextlib.suppress(RefusedError):  # readers skip an invalid index
            members = parse_index(index, limits=Limits()).members
        layers = {name: layer for (name, _), layer in {**(self._known or {}), **self._added}.items()}
        for member in members:
            name = member_path(member)
            self._added.pop((name, ""), None)
            layer = layers.get(name) or _layer(_FILE_TYPE, member.sha256, member.size_bytes)
            self._added[name, member.path] = layer
        digest, hash_ = sha256_hex(index), path.split("/")[1]
        if any(title.endswith(f"/{digest}.sig") for _, title in self._added):
            title = f"{CACHE_FOLDER}/{hash_}/{SIGNATURES}/{digest}.json"
            self._added[f"{path}#signed", title] = _layer(_FILE_TYPE, digest, len(index))

    def _layer(self, path: str) -> Layer | None:
        with self._lock:
            if self._known is None:
                self._known = self._read_layers()
            layers = {**self._known, **self._added}
        return next((layer for (name, _), layer in layers.items() if name == path), None)

    def _request_url(self, path: str) -> str:
        if path == _MANIFEST:
            return self._tag_url()
        layer = self._layer(path)
        return self._blob_url(layer.digest if layer is not None else "")

    def _blob_url(self, digest: str) -> str:
        return f"{self._registry.prefix}://{self._container.get_blob_url(digest)}"

    def _tag_url(self) -> str:
        return f"{self._registry.prefix}://{self._container.manifest_url()}"

    def manifest(self) -> Manifest | None:
        """Return the tag's current manifest, or None if there is no such tag."""
        data = read(self, _MANIFEST, most=_MAX_MANIFEST_BYTES)
        if data is None:
            return None
        try:
            return msgspec.json.decode(data, type=Manifest)
        except (ValueError, RecursionError) as error:  # from msgspec, or because it is not UTF-8
            message = f"{self.url} was not pushed by cgtool: {error}. Use another tag."
            raise RemoteError(message, path=self.url) from error

    def write_manifest(self, manifest: Manifest) -> None:
        """Set the tag to a manifest, whose blobs must have been uploaded."""
        headers = {"Content-Type": _MANIFEST_TYPE}
        response = self._request("PUT", self._tag_url(), data=msgspec.json.encode(manifest), headers=headers)
        if not response.ok:
            raise self._status_error(response, f"write {_MANIFEST}")

    def _read_layers(self) -> dict[tuple[str, str], Layer]:
        manifest = self.manifest()
        if manifest is not None and manifest.config.mediaType in IMAGE_CONFIG_TYPES:
            message = f"{self.url} is a container image, which push and pull do not use. Use another tag."
            raise RemoteError(message, path=self.url, actual=manifest.config.mediaType)
        layers = () if manifest is None else manifest.layers
        annotated = [(layer.annotations.get(_NAME, ""), layer.annotations.get(_TITLE, ""), layer) for layer in layers]
        return {(name, title): layer for name, title, layer in annotated if name}

    def _write_layers(self, without: tuple[str, str] | None = None) -> None:
        """Write a manifest with the tag's current layers and the added ones, except `without`."""
        known = {place: layer for place, layer in self._read_layers().items() if place not in self._added}
        titles = {title for _, title in self._added}
        # If two pushes have different files for the same path in a cache, the later one gets the path, because
        # `oras pull` cannot write two files to it.
        current = {(name, "" if title in titles else title): layer for (name, title), layer in known.items()}
        current |= self._added
        if without is not None:
            current.pop(without, None)
        layers, targets = [], []
        for (name, title), layer in sorted(current.items()):
            annotations = {_NAME: name, **({_TITLE: title} if title else {})}
            if _TARGETS in layer.annotations:
                annotations[_TARGETS] = layer.annotations[_TARGETS]
                with contextlib.suppress(ValueError, RecursionError):  # not written by cgtool, so not shown
                    targets += msgspec.json.decode(annotations[_TARGETS], type=list[Target])
            layers.append(Layer(layer.mediaType, layer.digest, layer.size, annotations))
        in_caches = {layer.digest: layer.size for (_, title), layer in current.items() if title}
        hashes = {hash_ for _, title in current for hash_ in title.split("/")[1:2]}
        self.write_manifest(
            Manifest(
                config=self.upload(_EMPTY, _CONFIG_TYPE),
                layers=tuple(layers),
                annotations=labels(hashes, targets, sum(in_caches.values())),
                artifactType=_ARTIFACT_TYPE,
            )
        )
        self._known, self._added = current, {}

    def upload(self, body: bytes | Path, media_type: str, annotations: dict[str, str] | None = None) -> Layer:
        """Upload a blob unless the repository has it already, and return its annotated descriptor."""
        layer = _layer(media_type, *_digest(body), annotations)
        if self._request("HEAD", self._blob_url(layer.digest)).ok:
            return layer
        started = self._request("POST", f"{self._registry.prefix}://{self._container.upload_blob_url()}")
        if not started.ok:
            raise self._status_error(started, "accept a layer")
        url = str(self._registry._get_location(started, self._container))  # noqa: SLF001 - a location may lack the host
        url += ("&" if "?" in url else "?") + f"digest={layer.digest}"
        headers = {"Content-Type": "application/octet-stream"}
        if isinstance(body, bytes):
            response = self._request("PUT", url, data=body, headers=headers)
        else:
            with body.open("rb") as file:
                response = self._request("PUT", url, data=file, headers=headers)
        if not response.ok:
            raise self._status_error(response, "accept a layer")
        return layer

    def _request(self, method: str, url: str, **kwargs: Any) -> requests.Response:
        kwargs.pop("allow_redirects", None)
        try:
            # Bypass the retries of oras, which sleep for minutes.
            do_request = Registry.do_request.__wrapped__
            response: requests.Response = do_request(self._registry, url, method, **kwargs)
        except requests.RequestException as error:
            raise self._connection_error(error, f"answer {method}") from error
        except (ValueError, oras.auth.AuthenticationException) as error:
            raise RemoteError(f"{self.url} requires other credentials. {self._login_advice}", path=self.url) from error
        return response


def _layer(media_type: str, digest: str, size: int, annotations: dict[str, str] | None = None) -> Layer:
    return Layer(media_type, f"sha256:{digest}", size, annotations or {})


def _target_annotation(path: str, body: bytes | Path) -> dict[str, str]:
    """Return the annotation of a key with the targets of its entry; {} for other files."""
    match path.split("/"):
        case ["entries", hash_, file] if file.endswith(f".{KEY_FILE}") and isinstance(body, bytes):
            with contextlib.suppress(CacheError):  # a corrupt key has no targets
                targets = targets_of(parse_key(body, path=Path(path), hash_=hash_))
                return {_TARGETS: msgspec.json.encode(targets).decode()}
    return {}


def _digest(body: bytes | Path) -> tuple[str, int]:
    if isinstance(body, bytes):
        return sha256_hex(body), len(body)
    digest, size = hashlib.sha256(), 0
    with body.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return digest.hexdigest(), size


def _signature_title(path: str) -> str:
    """Return the path of a signature in a cache; "" for other files of the store."""
    match path.split("/"):
        case ["entries", hash_, file] if file.endswith(f".{SIGNATURE_FILE}"):
            return f"{CACHE_FOLDER}/{hash_}/{SIGNATURES}/{file.partition('.')[0]}.sig"
    return ""


def _is_loopback(host: str) -> bool:
    """Return whether a host is this machine, whose registries are used without TLS, as docker does."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
