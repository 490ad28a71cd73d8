"""A store in an OCI registry: one tag of a repository is one store, by oras. Must not import torch.

Each file is a layer by its digest, so that tags share what they have in common. A layer is annotated with its name in
the store, and one of an entry with its place in a cache too, so that `oras pull` gives a folder that serves as a cache.
The manifest is written when an index or a unit is: a reader finds the old one or the new one. Registries know no
preconditions on tags, so of two pushes to one tag at the same moment the last wins: give each pusher a tag of its own.

What a tag holds is said in the words of GPU caches in images (`labels`), which MCV, GKM and `skopeo inspect` show. A
container image of a cache is another form, which is never read here: `cgtool.toolkit.image`.

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
from cgtool.remote.http import HttpStore, patient
from cgtool.remote.stores import CHUNK_BYTES, Item, read
from cgtool.store.bundle_index import INDEX_FILE, SIGNATURE_FILE, Limits, Member, parse_index
from cgtool.store.layout import CACHE_FOLDER, KEY_FILE, SIGNATURES
from cgtool.store.records import Key, parse_key

_MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
#: What else may be behind a tag, and is never ours.
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
#: As MCV's own "cache.triton.image/"; GKM adds up every label that ends with "cache-size-bytes".
LABEL = "cache.cgtool.image"
#: Stands for the manifest among the names of the store, none of which has a space.
_MANIFEST = "its manifest"
_MOST_MANIFEST_BYTES = 256 * 2**20


class Layer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A descriptor: the type, the digest ("sha256:...") and the size of a blob, and what is said of it."""

    mediaType: str  # noqa: N815 - the field's name in the specification
    digest: str
    size: int
    annotations: dict[str, str] = {}


class Manifest(msgspec.Struct, frozen=True):
    """What a tag leads to: a store of ours, or a container image."""

    config: Layer
    layers: tuple[Layer, ...] = ()
    annotations: dict[str, str] = {}
    schemaVersion: int = 2  # noqa: N815 - as above
    mediaType: str = _MANIFEST_TYPE  # noqa: N815 - as above
    artifactType: str | msgspec.UnsetType = msgspec.UNSET  # noqa: N815 - as above


class Target(msgspec.Struct, frozen=True, order=True, omit_defaults=True):
    """What an entry runs on, in MCV's words and with torch's version; a processor has no warps and no CUDA."""

    backend: str
    arch: str
    torch_version: str = ""
    warp_size: int = 0
    cuda_version: str = ""


def targets_of(key: Key) -> list[Target]:
    """Return what an entry was compiled for: each accelerator, or the processor where there was none."""
    build, target = key.factors.get("torch") or {}, key.factors.get("target") or {}
    version, cuda = build.get("version") or "", build.get("with_cuda") or ""
    found = []
    for accelerator in target.get("accelerators") or ():
        arch = accelerator.partition(" ")[0].partition(":")[0]  # "sm_90 x132", "gfx942:sramecc+:xnack- x304"
        if arch.startswith("sm_"):
            found.append(Target("cuda", arch.removeprefix("sm_"), version, 32, cuda))
        else:
            found.append(Target("hip", arch, version, 64 if arch.startswith("gfx9") else 32))
    return found or [Target("cpu", machine_of(key), version)]


def machine_of(key: Key) -> str:
    """Return the kind of processor that an entry was compiled for: "x86_64"; "" where the key does not say."""
    target = key.factors.get("target") or {}
    return str((target.get("cpu") or {}).get("machine") or "")


def labels(hashes: Iterable[str], targets: Iterable[Target], size_bytes: int) -> dict[str, str]:
    """Return what is said in a registry of a cache: of its entries, what they run on, and the size of all files."""
    named = sorted(set(hashes))
    summary = {"targets": sorted(set(targets))}
    return {
        f"{LABEL}/entry-count": str(len(named)),
        f"{LABEL}/cache-size-bytes": str(size_bytes),
        f"{LABEL}/summary": msgspec.json.encode(summary).decode(),
        "io.kserve.km/framework": "cgtool",
        "io.kserve.km/cache-hash": ",".join(named),
        "io.kserve.km/cache-mount-subpath": CACHE_FOLDER,
    }


class _Auth(oras.auth.TokenAuth):  # type: ignore[misc]  # Any, for extras are not looked into
    """Tokens, as oras gets them; user and password themselves where a registry asks for these, which oras does not."""

    _is_basic = False

    def get_auth_header(self) -> dict[str, str]:
        return {"Authorization": f"Basic {self.token}"} if self._is_basic else super().get_auth_header()

    def authenticate_request(self, original: requests.Response, headers: dict[str, str], **more: Any) -> Any:
        if not original.headers.get("Www-Authenticate", "").lower().startswith("basic"):
            try:
                return super().authenticate_request(original, headers, **more)
            except (AttributeError, TypeError, RecursionError) as error:  # what oras makes of a strange answer
                raise oras.auth.AuthenticationException(str(error)) from error
        self._is_basic, self.token = True, getattr(self, "_basic_auth", None)
        return {**headers, **self.get_auth_header()}, self.token is not None


oras.auth.auth_backends["cgtool"] = _Auth


class OciStore(HttpStore):
    """See `cgtool.remote.stores.Store`; of oci://HOST/REPOSITORY[:TAG], the tag being `latest` by default."""

    caveat = (
        "is a tag of a registry, and of two machines that push to one tag at the same moment the last wins. Give each "
        "machine a tag of its own, or push again what is missing."
    )

    def __init__(self, url: str) -> None:
        super().__init__(url)
        parts = urlsplit(url)
        try:
            self._container = Container(self.url.removeprefix("oci://"))
        except ValueError as error:
            message = f"{self.url} names no repository. Write oci://HOST/REPOSITORY:TAG."
            raise UsageError(message, path=self.url) from error
        insecure = _is_loopback(parts.hostname or "")
        self._registry = Registry(hostname=self._container.registry, insecure=insecure, auth_backend="cgtool")
        self._session = patient(self._registry.session)
        self._session.headers["Accept"] = ", ".join((_MANIFEST_TYPE, *_OTHER_TYPES, "*/*"))
        self._login = f"Log in there, as a user who may do that: docker login {self._container.registry}"
        self._no_method = "Ask who runs it whether it is read-only."
        self._registry.auth.load_configs(self._container)
        if parts.username is not None:
            self._registry.auth.set_basic_auth(unquote(parts.username), unquote(parts.password or ""))
        self._lock = threading.RLock()
        #: (name in the store, place in a cache or "") → layer, as the tag has them; None before it was asked.
        self._known: dict[tuple[str, str], Layer] | None = None
        self._added: dict[tuple[str, str], Layer] = {}

    def get(self, path: str, start: int = 0) -> Iterator[bytes] | None:
        """See `Store`."""
        return super().get(path, start) if path == _MANIFEST or self._layer(path) is not None else None

    def put(self, path: str, body: bytes | Path, *, if_absent: bool = False) -> bool:
        """See `Store`."""
        if if_absent and self._layer(path) is not None:
            return False
        layer = self.upload(body, _FILE_TYPE, _said_of(path, body))
        with self._lock:
            self._added[path, _signature_title(path)] = layer
            if path.endswith(f".{INDEX_FILE}"):
                self._add_members(path, body if isinstance(body, bytes) else body.read_bytes())
            if path.endswith(f".{INDEX_FILE}") or not path.startswith(("artifacts/", "entries/", "lookup/")):
                self._write()
        return True

    def size(self, path: str) -> int | None:
        """See `Store`."""
        layer = self._layer(path)
        return None if layer is None else layer.size

    def list(self, folder: str) -> Iterator[Item]:
        """See `Store`; a registry says of no layer when it came."""
        with self._lock:
            self._known = self._read()
            names = {name: layer.size for (name, _), layer in self._known.items() if name.startswith(f"{folder}/")}
        for name, size in names.items():
            yield Item(name, size, 0.0)

    def delete(self, path: str) -> None:
        """See `Store`; with an index go the layers of its entry."""
        with self._lock:
            hash_ = path.split("/")[1] if path.endswith(f".{INDEX_FILE}") else None
            entry = f"{CACHE_FOLDER}/{hash_}/"
            for name, title in list(self._read()):
                if name == path or (hash_ is not None and title.startswith(entry)):
                    self._added.pop((name, title), None)
                    self._write(without=(name, title))

    def _add_members(self, path: str, index: bytes) -> None:
        """Let the layers of an entry say where they lie in a cache."""
        members: tuple[Member, ...] = ()
        with contextlib.suppress(RefusedError):  # a torn one names nothing, and is passed over by whoever reads it
            members = parse_index(index, limits=Limits()).members
        there = {name: layer for (name, _), layer in {**(self._known or {}), **self._added}.items()}
        for member in members:
            name = member_path(member)
            self._added.pop((name, ""), None)
            layer = there.get(name) or _layer(_FILE_TYPE, member.sha256, member.size_bytes)
            self._added[name, member.path] = layer
        digest, hash_ = sha256_hex(index), path.split("/")[1]
        if any(title.endswith(f"/{digest}.sig") for _, title in self._added):
            title = f"{CACHE_FOLDER}/{hash_}/{SIGNATURES}/{digest}.json"
            self._added[f"{path}#signed", title] = _layer(_FILE_TYPE, digest, len(index))

    def _layer(self, path: str) -> Layer | None:
        with self._lock:
            if self._known is None:
                self._known = self._read()
            found = {**self._known, **self._added}
        return next((layer for (name, _), layer in found.items() if name == path), None)

    def _place(self, path: str) -> str:
        if path == _MANIFEST:
            return self._tag()
        layer = self._layer(path)
        return self._blob(layer.digest if layer is not None else "")

    def _blob(self, digest: str) -> str:
        return f"{self._registry.prefix}://{self._container.get_blob_url(digest)}"

    def _tag(self) -> str:
        return f"{self._registry.prefix}://{self._container.manifest_url()}"

    def manifest(self) -> Manifest | None:
        """Return what the tag leads to now; None where there is no such tag."""
        data = read(self, _MANIFEST, most=_MOST_MANIFEST_BYTES)
        if data is None:
            return None
        try:
            return msgspec.json.decode(data, type=Manifest)
        except (ValueError, RecursionError) as error:  # of msgspec, or of what is no UTF-8
            message = f"{self.url} is nothing that cgtool pushed: {error}. Name another tag."
            raise RemoteError(message, path=self.url) from error

    def write_manifest(self, manifest: Manifest) -> None:
        """Let the tag lead to a manifest, whose blobs are there."""
        headers = {"Content-Type": _MANIFEST_TYPE}
        answer = self._request("PUT", self._tag(), data=msgspec.json.encode(manifest), headers=headers)
        if not answer.ok:
            raise self._refused(answer, f"write {_MANIFEST}")

    def _read(self) -> dict[tuple[str, str], Layer]:
        """The layers of the tag as it is now."""
        manifest = self.manifest()
        if manifest is not None and manifest.config.mediaType in IMAGE_CONFIG_TYPES:
            message = f"{self.url} is a container image, and holds no entry for push and pull. Name another tag."
            raise RemoteError(message, path=self.url, actual=manifest.config.mediaType)
        layers = () if manifest is None else manifest.layers
        named = [(one.annotations.get(_NAME, ""), one.annotations.get(_TITLE, ""), one) for one in layers]
        return {(name, title): layer for name, title, layer in named if name}

    def _write(self, without: tuple[str, str] | None = None) -> None:
        """Add what was put to what the tag has by now."""
        known = {place: layer for place, layer in self._read().items() if place not in self._added}
        titles = {title for _, title in self._added}
        # Of two files that two pushes have for one place in a cache, the later one has it: `oras pull` takes no two.
        found = {(name, "" if title in titles else title): layer for (name, title), layer in known.items()}
        found |= self._added
        if without is not None:
            found.pop(without, None)
        layers, targets = [], []
        for (name, title), layer in sorted(found.items()):
            said = {_NAME: name, **({_TITLE: title} if title else {})}
            if _TARGETS in layer.annotations:
                said[_TARGETS] = layer.annotations[_TARGETS]
                with contextlib.suppress(ValueError, RecursionError):  # not of ours, and shown to nobody
                    targets += msgspec.json.decode(said[_TARGETS], type=list[Target])
            layers.append(Layer(layer.mediaType, layer.digest, layer.size, said))
        in_caches = {layer.digest: layer.size for (_, title), layer in found.items() if title}
        hashes = {hash_ for _, title in found for hash_ in title.split("/")[1:2]}
        self.write_manifest(
            Manifest(
                config=self.upload(_EMPTY, _CONFIG_TYPE),
                layers=tuple(layers),
                annotations=labels(hashes, targets, sum(in_caches.values())),
                artifactType=_ARTIFACT_TYPE,
            )
        )
        self._known, self._added = found, {}

    def upload(self, body: bytes | Path, kind: str, said: dict[str, str] | None = None) -> Layer:
        """Upload a blob of a media type, unless the repository has it; return its descriptor, annotated."""
        layer = _layer(kind, *_digest(body), said)
        if self._request("HEAD", self._blob(layer.digest)).ok:
            return layer
        begun = self._request("POST", f"{self._registry.prefix}://{self._container.upload_blob_url()}")
        if not begun.ok:
            raise self._refused(begun, "take a layer")
        place = str(self._registry._get_location(begun, self._container))  # noqa: SLF001 - some name no host
        place += ("&" if "?" in place else "?") + f"digest={layer.digest}"
        headers = {"Content-Type": "application/octet-stream"}
        if isinstance(body, bytes):
            answer = self._request("PUT", place, data=body, headers=headers)
        else:
            with body.open("rb") as file:
                answer = self._request("PUT", place, data=file, headers=headers)
        if not answer.ok:
            raise self._refused(answer, "take a layer")
        return layer

    def _request(self, method: str, place: str, **more: Any) -> requests.Response:
        more.pop("allow_redirects", None)
        try:
            # Without oras' own attempts, between which it sleeps for minutes.
            ask = Registry.do_request.__wrapped__
            answer: requests.Response = ask(self._registry, place, method, **more)
        except requests.RequestException as error:
            raise self._broken(error, f"answer {method}") from error
        except (ValueError, oras.auth.AuthenticationException) as error:
            raise RemoteError(f"{self.url} asks for other credentials. {self._login}", path=self.url) from error
        return answer


def _layer(kind: str, digest: str, size: int, said: dict[str, str] | None = None) -> Layer:
    return Layer(kind, f"sha256:{digest}", size, said or {})


def _said_of(path: str, body: bytes | Path) -> dict[str, str]:
    """The annotation of a key: what its entry runs on."""
    match path.split("/"):
        case ["entries", hash_, file] if file.endswith(f".{KEY_FILE}") and isinstance(body, bytes):
            with contextlib.suppress(CacheError):  # one that is torn says nothing
                targets = targets_of(parse_key(body, path=Path(path), hash_=hash_))
                return {_TARGETS: msgspec.json.encode(targets).decode()}
    return {}


def _digest(body: bytes | Path) -> tuple[str, int]:
    if isinstance(body, bytes):
        return sha256_hex(body), len(body)
    found, size = hashlib.sha256(), 0
    with body.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            found.update(chunk)
            size += len(chunk)
    return found.hexdigest(), size


def _signature_title(path: str) -> str:
    """Where a signature lies in a cache; "" for any other name of the store."""
    match path.split("/"):
        case ["entries", hash_, file] if file.endswith(f".{SIGNATURE_FILE}"):
            return f"{CACHE_FOLDER}/{hash_}/{SIGNATURES}/{file.partition('.')[0]}.sig"
    return ""


def _is_loopback(host: str) -> bool:
    """Whether a registry is on this machine, where it is asked without TLS, as docker does."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
