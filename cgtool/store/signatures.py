"""Signatures over the index of a bundle: keys, signing and checking. Must not import torch.

A signature is one of Ed25519 over the bytes of `bundle.json` as they stand. `bundle.sig` holds any number of them::

    {"schema": 1, "signatures": [{"key": key id, "signature": 64 bytes in base64}...]}     by key id
    key id = SHA-256 of the raw 32 bytes of the public key, 64 hexadecimal digits

Keys are files: private ones in PEM (`openssl genpkey -algorithm ed25519`) or as OpenSSH has them (`ssh-keygen -t
ed25519 -N ""`); public ones in PEM, or lines of OpenSSH ("ssh-ed25519 AAAA... who"), several in one file if need be.
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

_MOST_SIGNATURES = 64
_MOST_KEY_BYTES = 2**20
_PEM = re.compile(rb"-----BEGIN PUBLIC KEY-----.+?-----END PUBLIC KEY-----", re.DOTALL)
_PRIVATE = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----")
_HOW_TO_MAKE = "Make one with: openssl genpkey -algorithm ed25519 -out key.pem"
_HOW_TO_EXTRACT = "Write the public half with: openssl pkey -in key.pem -pubout -out key.pub"


class Signature(Record, frozen=True, kw_only=True):
    """What one key says of an index.

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
        signatures: By key id.
    """

    schema: Literal[1] = 1
    signatures: Annotated[tuple[Signature, ...], Meta(min_length=1, max_length=_MOST_SIGNATURES)]


def load_private_key(path: Path) -> Ed25519PrivateKey:
    """Return the private key in a file.

    Raises:
        UsageError: There is none of Ed25519 in it, or it is encrypted.
        CacheError: The file cannot be read.
    """
    from cryptography.exceptions import UnsupportedAlgorithm  # tens of milliseconds, and only for who signs
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key

    data = _file(path)
    read: Any = load_ssh_private_key if b"BEGIN OPENSSH" in data else load_pem_private_key
    try:
        key = read(data, password=None)
    except TypeError as error:
        raise UsageError(
            f"{path} is encrypted, and cgtool asks for no passphrase. Decrypt it for the export.", path=path
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(f"{path} holds no private key. {_HOW_TO_MAKE}", path=path) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{path} holds a private key of another kind than Ed25519. {_HOW_TO_MAKE}", path=path)
    return key


def load_public_keys(paths: Iterable[Path | str]) -> PublicKeys:
    """Return the public keys in files and folders, by key id.

    Raises:
        UsageError: A file holds no public key of Ed25519, or there is none at all.
        CacheError: A file cannot be read.
    """
    found: dict[str, Ed25519PublicKey] = {}
    asked = [Path(path).expanduser() for path in paths]
    for path in asked:
        for file in _files(path):
            for key in _public_keys(file):
                found[key_id(key)] = key
    if not found:
        named = ", ".join(map(str, asked)) or "nothing"
        raise UsageError(f"There is no public key in {named}. {_HOW_TO_EXTRACT}", path=asked[0] if asked else None)
    return found


def key_id(key: Ed25519PublicKey) -> str:
    """Return the SHA-256 of a public key's raw bytes, 64 hexadecimal digits."""
    return sha256_hex(key.public_bytes_raw())


def sign(data: bytes, keys: Iterable[Ed25519PrivateKey]) -> bytes:
    """Return the text of the `bundle.sig` in which each of `keys` signs `data`.

    Raises:
        UsageError: There are more keys than a reader takes.
    """
    signed = {key_id(key.public_key()): key.sign(data) for key in keys}
    if len(signed) > _MOST_SIGNATURES:
        raise UsageError(f"{len(signed)} keys are too many: sign with at most {_MOST_SIGNATURES}.", actual=len(signed))
    signatures = tuple(Signature(key=name, signature=signature) for name, signature in sorted(signed.items()))
    return msgspec.json.format(encode(SignatureFile(signatures=signatures)), indent=1) + b"\n"


def parse_signatures(data: bytes) -> tuple[Signature, ...]:
    """Return the signatures in the text of a `bundle.sig`.

    Raises:
        RefusedError: bad_signature_file or unknown_schema.
    """
    try:
        found = decode(data, SignatureFile).signatures
    except ValueError as error:
        if "`$.schema`" in str(error):
            raise _refused("unknown_schema", "has a schema that this cgtool does not know") from error
        raise _refused("bad_signature_file", f"is not spelled as signatures are ({error})") from error
    if len({signature.key for signature in found}) != len(found):
        raise _refused("bad_signature_file", "holds two signatures of one key")
    return found


def check(data: bytes, signatures: bytes | None, keys: PublicKeys, *, what: str) -> str:
    """Return the id of a trusted key that signed `data`; `what` names that in a message: "The bundle".

    Raises:
        RefusedError: unsigned, untrusted_key, wrong_signature, or what is wrong with the file.
    """
    from cryptography.exceptions import InvalidSignature

    if signatures is None:
        raise RefusedError(f"{what} is not signed. Sign it with: cgtool export --sign KEY", reason="unsigned")
    found = parse_signatures(signatures)
    known = [signature for signature in found if signature.key in keys]
    if not known:
        names = ", ".join(short(signature.key) for signature in found[:8])
        message = f"{what} is signed by no key that is trusted here (by {names}). Add its key if you trust its owner."
        raise RefusedError(
            message, reason="untrusted_key", expected=sorted(keys), actual=[signature.key for signature in found]
        )
    for signature in known:
        try:
            keys[signature.key].verify(signature.signature, data)
        except InvalidSignature:
            continue
        return signature.key
    message = f"{what} was changed after it was signed, or its signature is another's. Ask its owner for a whole one."
    raise RefusedError(message, reason="wrong_signature", actual=[signature.key for signature in known])


def _refused(reason: str, why: str) -> RefusedError:
    return RefusedError(f"The file of signatures {why}. Ask for a whole bundle.", reason=reason, path="bundle.sig")


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

    data = _file(path)
    if _PRIVATE.search(data):
        message = f"{path} holds a private key, and checking needs the public one alone. {_HOW_TO_EXTRACT}"
        raise UsageError(message, path=path)
    lines = (line.strip() for line in _PEM.sub(b"", data).splitlines())
    try:
        keys = [load_pem_public_key(text) for text in _PEM.findall(data)]
        keys += [load_ssh_public_key(line) for line in lines if line and not line.startswith(b"#")]
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(f"{path} holds something that is no public key. {_HOW_TO_EXTRACT}", path=path) from error
    ours = [key for key in keys if isinstance(key, Ed25519PublicKey)]
    if len(ours) != len(keys) or not ours:
        raise UsageError(f"{path} holds a key of another kind than Ed25519, or none. {_HOW_TO_MAKE}", path=path)
    return ours


def _file(path: Path) -> bytes:
    data = read_bytes(path) if path.exists() else None
    if data is None:
        raise UsageError(f"There is no key at {path}. {_HOW_TO_MAKE}", path=path)
    if len(data) > _MOST_KEY_BYTES:
        raise UsageError(f"{path} is no file of keys: it has {len(data)} bytes. {_HOW_TO_MAKE}", path=path)
    return data
