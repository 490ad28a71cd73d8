"""Keys and signatures, compared with OpenSSL's and OpenSSH's own tools if installed."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess

import pytest
from bundle_maker import make_keys
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from hypothesis import given
from hypothesis import strategies as st

from cgtool.errors import RefusedError, UsageError
from cgtool.plan.grammar import sha256_hex
from cgtool.store.signatures import check, key_id, load_private_key, load_public_keys, parse_signatures, sign

DATA = b'{"schema": 1}\n'


@pytest.fixture
def keys(tmp_path):
    make_keys(tmp_path / "keys", "one", "two")
    return tmp_path / "keys"


def reason(function, *arguments, **options) -> str:
    with pytest.raises(RefusedError) as refusal:
        function(*arguments, **options)
    return refusal.value.reason


def test_check_returns_the_trusted_key_that_signed(keys):
    private = load_private_key(keys / "one.pem")
    signed = sign(DATA, [private])
    public = load_public_keys([keys / "one.pub"])
    assert check(DATA, signed, public, what="It") == key_id(private.public_key()) == next(iter(public))
    assert next(iter(public)) == sha256_hex(private.public_key().public_bytes_raw())


def test_reasons_for_refusing_a_signature_are_distinguished(keys):
    one, two = load_private_key(keys / "one.pem"), load_private_key(keys / "two.pem")
    trusted = load_public_keys([keys / "one.pub"])
    assert reason(check, DATA, None, trusted, what="It") == "unsigned"
    assert reason(check, DATA, sign(DATA, [two]), trusted, what="It") == "untrusted_key"
    assert reason(check, DATA + b" ", sign(DATA, [one]), trusted, what="It") == "wrong_signature"
    assert reason(check, DATA, b"{}", trusted, what="It") == "bad_signature_file"


def test_one_of_several_signatures_is_enough(keys):
    both = sign(DATA, [load_private_key(keys / "one.pem"), load_private_key(keys / "two.pem")])
    two = load_public_keys([keys / "two.pub"])
    assert check(DATA, both, two, what="It") == next(iter(two))
    assert [s.key for s in parse_signatures(both)] == sorted(s.key for s in parse_signatures(both))


def test_signature_under_another_keys_id_is_wrong(keys):
    two = sign(DATA, [load_private_key(keys / "two.pem")])
    trusted = load_public_keys([keys / "one.pub"])
    record = json.loads(two)
    record["signatures"][0]["key"] = next(iter(trusted))
    assert reason(check, DATA, json.dumps(record).encode(), trusted, what="It") == "wrong_signature"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{",
        b"[" * 100_000,
        b'{"schema": 1}',
        b'{"schema": 1, "signatures": []}',
        b'{"schema": 1, "signatures": [{}]}',
        b'{"schema": 1, "signatures": [7]}',
        b'{"schema": 1, "signatures": [{"key": "../x", "signature": ""}]}',
        b'{"schema": 1, "signatures": 1e999}',
    ],
)
def test_malformed_signature_file_is_refused(text):
    assert reason(parse_signatures, text) == "bad_signature_file"


def test_newer_signature_file_is_refused():
    assert reason(parse_signatures, b'{"schema": 2, "signatures": []}') == "unknown_schema"
    assert reason(parse_signatures, b'{"schema": true, "signatures": []}') == "unknown_schema"


def test_duplicate_signatures_are_refused(keys):
    record = json.loads(sign(DATA, [load_private_key(keys / "one.pem")]))
    record["signatures"] *= 2
    assert reason(parse_signatures, json.dumps(record).encode()) == "bad_signature_file"


@given(
    st.binary(max_size=300)
    | st.recursive(st.none() | st.text() | st.integers(), st.lists).map(lambda v: json.dumps(v).encode())
)
def test_no_bytes_break_the_parser(data):
    try:
        parse_signatures(data)
    except RefusedError as error:
        assert error.reason in {"bad_signature_file", "unknown_schema"}  # noqa: PT017  either end is fine


@given(st.integers(0, 2000), st.integers(0, 255))
def test_no_mutated_signature_is_accepted(at, byte):
    key = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32))
    trusted = {key_id(key.public_key()): key.public_key()}
    signed = bytearray(sign(DATA, [key]))
    signed[at % len(signed)] = byte
    reason(check, DATA + b"x", bytes(signed), trusted, what="It")


def test_keys_are_read_from_folders_and_from_files_with_several_keys(keys, tmp_path):
    (keys / ".hidden").write_text("nothing")
    for name in ("one.pem", "two.pem"):
        (keys / name).rename(tmp_path / name)
    assert len(load_public_keys([keys])) == 2
    both = tmp_path / "both.pub"
    both.write_text("# ours\n" + (keys / "one.pub").read_text() + "\n" + (keys / "two.pub").read_text())
    assert load_public_keys([both]).keys() == load_public_keys([keys]).keys()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("nothing", "is not a valid public key file"),
        ("", "contains a key that is not Ed25519, or no key"),
        ("x" * 2**21, "is not a key file"),
    ],
)
def test_file_without_a_public_key_is_a_usage_error(tmp_path, content, sentence):
    (tmp_path / "k").write_text(content)
    with pytest.raises(UsageError, match=sentence):
        load_public_keys([tmp_path / "k"])


def test_private_and_public_keys_are_not_confused(keys):
    with pytest.raises(UsageError, match="contains a private key, but verification needs only the public key"):
        load_public_keys([keys])
    with pytest.raises(UsageError, match="does not contain a private key"):
        load_private_key(keys / "one.pub")
    with pytest.raises(UsageError, match="There is no key at"):
        load_private_key(keys / "absent")


def test_keys_other_than_ed25519_are_refused(tmp_path):
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (tmp_path / "rsa.pem").write_bytes(private)
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "rsa.pub").write_bytes(public)
    with pytest.raises(UsageError, match="not Ed25519"):
        load_private_key(tmp_path / "rsa.pem")
    with pytest.raises(UsageError, match="not Ed25519"):
        load_public_keys([tmp_path / "rsa.pub"])


def test_encrypted_key_is_refused(tmp_path):
    key = ed25519.Ed25519PrivateKey.generate()
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (tmp_path / "locked.pem").write_bytes(locked)
    with pytest.raises(UsageError, match="is encrypted, but cgtool does not prompt for passphrases"):
        load_private_key(tmp_path / "locked.pem")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")
def test_keys_and_signatures_are_compatible_with_openssl(tmp_path):
    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=tmp_path, check=True, capture_output=True)

    openssl("genpkey", "-algorithm", "ed25519", "-out", "key.pem")
    openssl("pkey", "-in", "key.pem", "-pubout", "-out", "key.pub")
    signed = sign(DATA, [load_private_key(tmp_path / "key.pem")])
    assert check(DATA, signed, load_public_keys([tmp_path / "key.pub"]), what="It")
    (tmp_path / "data").write_bytes(DATA)
    (tmp_path / "sig").write_bytes(base64.b64decode(json.loads(signed)["signatures"][0]["signature"]))
    openssl("pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", "key.pub", "-in", "data", "-sigfile", "sig")


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="no ssh-keygen here")
def test_openssh_keys_are_read(tmp_path):
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "id"], check=True, capture_output=True
    )
    signed = sign(DATA, [load_private_key(tmp_path / "id")])
    assert check(DATA, signed, load_public_keys([tmp_path / "id.pub"]), what="It")


def test_signing_with_more_keys_than_readers_accept_is_refused():
    keys = [ed25519.Ed25519PrivateKey.generate() for _ in range(65)]
    assert len(parse_signatures(sign(DATA, keys[:64]))) == 64
    with pytest.raises(UsageError, match="65 keys are too many: sign with at most 64"):
        sign(DATA, keys)
