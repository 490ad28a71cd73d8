"""Signatures of bundle indexes: keys, signing and verification. Must not import torch.

A signature is an Ed25519 signature of the exact bytes of `bundle.json`. `bundle.sig` contains one or more of them::

    {"schema": 1, "signatures": [{"key": key id, "signature": 64 bytes in base64}...]}     sorted by key id
    key id = SHA-256 of the raw 32 bytes of the public key, 64 hexadecimal digits

Keys are files: private keys in PEM (`openssl genpkey -algorithm ed25519`) or OpenSSH format (`ssh-keygen -t ed25519 -N
""`); public keys in PEM or as OpenSSH lines ("ssh-ed25519 AAAA... comment"). A file may contain several public keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cgtool.errors import RefusedError, UsageError
from cgtool.plan.grammar import Digest, Record, decode, encode, sha256_hex
from cgtool.store.files import read_bytes
from cgtool.store.layout import short

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

    PublicKeys = Mapping[str, Ed25519PublicKey]

_MAX_SIGNATURES = 64
_MAX_KEY_BYTES = 2**20
_PEM = re.compile(rb"-----BEGIN PUBLIC KEY-----.+?-----END PUBLIC KEY-----", re.DOTALL)
_PRIVATE = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----")
_HOW_TO_MAKE = "Create one with: openssl genpkey -algorithm ed25519 -out key.pem"
_HOW_TO_EXTRACT = "Extract the public key with: openssl pkey -in key.pem -pubout -out key.pub"


class Signature(Record, frozen=True, kw_only=True):
    """The signature of an index by one key.

    Args:
        key: The key's id.
        signature: 64 bytes, in base64.
    """

    key: Digest
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


class SignatureFile(Record, frozen=True, kw_only=True, omit_defaults=False):
    """`bundle.sig`.

    Args:
        schema: The version of this grammar.
        signatures: The signatures, sorted by key id.
    """

    schema: Literal[1] = 1
    signatures: Annotated[tuple[Signature, ...], Meta(min_length=1, max_length=_MAX_SIGNATURES)]


def load_private_key(path: Path) -> Ed25519PrivateKey:
    """Return the private key in a file.

    Raises:
        UsageError: The file does not contain an Ed25519 private key, or the key is encrypted.
        CacheError: The file cannot be read.
    """
    from cryptography.exceptions import UnsupportedAlgorithm  # imported lazily: takes tens of milliseconds
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key

    data = _read_key(path)
    read: Any = load_ssh_private_key if b"BEGIN OPENSSH" in data else load_pem_private_key
    try:
        key = read(data, password=None)
    except TypeError as error:
        raise UsageError(
            f"{path} is encrypted, but cgtool does not prompt for passphrases. Decrypt it for the export.", path=path
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(f"{path} does not contain a private key. {_HOW_TO_MAKE}", path=path) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{path} contains a private key that is not Ed25519. {_HOW_TO_MAKE}", path=path)
    return key


def load_public_keys(paths: Iterable[Path | str]) -> PublicKeys:
    """Return the public keys in files and folders, by key id.

    Raises:
        UsageError: A file does not contain an Ed25519 public key, or there are no keys.
        CacheError: A file cannot be read.
    """
    sources = [Path(path).expanduser() for path in paths]
    keys = {key_id(key): key for source in sources for file in _files(source) for key in _public_keys(file)}
    if not keys:
        searched = ", ".join(map(str, sources)) or "the empty list of key files"
        path = sources[0] if sources else None
        raise UsageError(f"There is no public key in {searched}. {_HOW_TO_EXTRACT}", path=path)
    return keys


def key_id(key: Ed25519PublicKey) -> str:
    """Return the SHA-256 of a public key's raw bytes, 64 hexadecimal digits."""
    return sha256_hex(key.public_bytes_raw())


def sign(data: bytes, keys: Iterable[Ed25519PrivateKey]) -> bytes:
    """Return the contents of a `bundle.sig` with a signature of `data` by each of `keys`.

    Raises:
        UsageError: There are more keys than readers accept.
    """
    signed = {key_id(key.public_key()): key.sign(data) for key in keys}
    if len(signed) > _MAX_SIGNATURES:
        raise UsageError(f"{len(signed)} keys are too many: sign with at most {_MAX_SIGNATURES}.", actual=len(signed))
    signatures = tuple(Signature(key=name, signature=signature) for name, signature in sorted(signed.items()))
    return msgspec.json.format(encode(SignatureFile(signatures=signatures)), indent=1) + b"\n"


def parse_signatures(data: bytes) -> tuple[Signature, ...]:
    """Return the signatures in the contents of a `bundle.sig`.

    Raises:
        RefusedError: bad_signature_file or unknown_schema.
    """
    try:
        found = decode(data, SignatureFile).signatures
    except ValueError as error:
        if "`$.schema`" in str(error):
            raise _refused("unknown_schema", "has a schema that this cgtool does not know") from error
        raise _refused("bad_signature_file", f"is malformed ({error})") from error
    if len({signature.key for signature in found}) != len(found):
        raise _refused("bad_signature_file", "contains two signatures by the same key")
    return found


def check(data: bytes, signatures: bytes | None, keys: PublicKeys, *, what: str) -> str:
    """Return the id of a trusted key that signed `data`; `what` names the data in messages, such as "The bundle".

    Raises:
        RefusedError: unsigned, untrusted_key, wrong_signature, bad_signature_file or unknown_schema.
    """
    from cryptography.exceptions import InvalidSignature

    if signatures is None:
        raise RefusedError(f"{what} is not signed. Sign it with: cgtool export --sign KEY", reason="unsigned")
    found = parse_signatures(signatures)
    known = [signature for signature in found if signature.key in keys]
    if not known:
        names = ", ".join(short(signature.key) for signature in found[:8])
        message = f"{what} is not signed by a trusted key (but by {names}). Add the key if you trust its owner."
        raise RefusedError(
            message, reason="untrusted_key", expected=sorted(keys), actual=[signature.key for signature in found]
        )
    for signature in known:
        try:
            keys[signature.key].verify(signature.signature, data)
        except InvalidSignature:
            continue
        return signature.key
    message = f"{what} was changed after it was signed, or has a signature of something else. Get an intact copy."
    raise RefusedError(message, reason="wrong_signature", actual=[signature.key for signature in known])


def _refused(reason: str, why: str) -> RefusedError:
    return RefusedError(
        f"The signature file {why}. Get an intact copy of the bundle.", reason=reason, path="bundle.sig"
    )


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    try:
        return sorted(file for file in path.iterdir() if not file.name.startswith(".") and file.is_file())
    except OSError as error:
        raise UsageError(f"The keys in {path} cannot be listed: {error.strerror}.", path=path) from error


def _public_keys(path: Path) -> list[Ed25519PublicKey]:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key, load_ssh_public_key

    data = _read_key(path)
    if _PRIVATE.search(data):
        message = f"{path} contains a private key, but verification needs only the public key. {_HOW_TO_EXTRACT}"
        raise UsageError(message, path=path)
    lines = (line.strip() for line in _PEM.sub(b"", data).splitlines())
    try:
        keys = [load_pem_public_key(text) for text in _PEM.findall(data)]
        keys += [load_ssh_public_key(line) for line in lines if line and not line.startswith(b"#")]
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(f"{path} is not a valid public key file. {_HOW_TO_EXTRACT}", path=path) from error
    ed25519 = [key for key in keys if isinstance(key, Ed25519PublicKey)]
    if len(ed25519) != len(keys) or not ed25519:
        raise UsageError(f"{path} contains a key that is not Ed25519, or no key. {_HOW_TO_MAKE}", path=path)
    return ed25519


def _read_key(path: Path) -> bytes:
    data = read_bytes(path) if path.exists() else None
    if data is None:
        raise UsageError(f"There is no key at {path}. {_HOW_TO_MAKE}", path=path)
    if len(data) > _MAX_KEY_BYTES:
        raise UsageError(f"{path} is not a key file: it has {len(data)} bytes. {_HOW_TO_MAKE}", path=path)
    return data
