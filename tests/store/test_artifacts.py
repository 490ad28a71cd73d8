"""AOTInductor packages: packing is deterministic, and anything else is refused."""

from __future__ import annotations

import io
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgtool.errors import ArtifactError
from cgtool.store.artifacts import METADATA_FILE, NATIVE_FILE, Package, archive_with_source, pack, unpack

MODEL = "piece/data/aotinductor/model/"
WHOLE = Package(native=b"\x7fELF native", metadata={"AOTI_DEVICE_KEY": "cpu"}, extern=b'{"nodes": []}')

packages = st.builds(
    Package,
    native=st.binary(max_size=3000),
    metadata=st.dictionaries(st.text(max_size=20), st.text(max_size=50), max_size=5),
    extern=st.none() | st.binary(max_size=300),
    kernels=st.dictionaries(
        st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,30}\.(cubin|fatbin|hsaco|spv)", fullmatch=True),
        st.binary(max_size=300),
        max_size=4,
    ),
)


def members(data):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [(info.filename, archive.read(info)) for info in archive.infolist()]


def archived(entries, **options):
    """An archive of these members, in order, as `pack` writes them."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", options.pop("method", zipfile.ZIP_STORED)) as archive:
        for name, body in entries:
            info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            info.compress_type = archive.compression
            archive.writestr(info, body)
    return out.getvalue()


@given(packages)
def test_unpack_returns_what_was_packed(package):
    data = pack(package)
    assert unpack(data) == package
    again = Package(
        native=package.native,
        metadata=dict(reversed(package.metadata.items())),
        extern=package.extern,
        kernels=dict(reversed(package.kernels.items())),
    )
    assert pack(again) == data


def test_package_contains_exactly_the_members_of_the_grammar():
    package = Package(native=b"n", metadata={}, extern=b"e", kernels={"k.cubin": b"k"})
    assert [name for name, _ in members(pack(package))] == [
        "piece/archive_format",
        "piece/archive_version",
        "piece/.data/version",
        MODEL + "k.cubin",
        MODEL + "model.wrapper.json",
        MODEL + "model.wrapper_metadata.json",
        MODEL + "model.wrapper.so",
    ]
    assert archived(members(pack(package))) == pack(package)


ADDED = {
    "a second native code": "other.wrapper.so",
    "a source": "model.wrapper.cpp",
    "a source of kernels": "model.kernel.cpp",
    "Python": "setup.py",
    "a header": "model.h",
    "an object": "weights.o",
    "a folder": "sub/",
    "a file in a folder": "sub/k.cubin",
    "a way out": "../k.cubin",
    "a way out and back": "../model/k.cubin",
    "a hidden file": ".k.cubin",
    "an empty name": "",
    "a name that ends in a line": "k.cubin\n",
    "a name of other letters": "ké.cubin",
    "a name without an end": "k" * 300 + ".cubin",
}


@pytest.mark.parametrize("name", ADDED.values(), ids=ADDED)
def test_member_outside_the_grammar_is_refused(name):
    with pytest.raises(ArtifactError, match="member"):
        unpack(archived([*members(pack(WHOLE)), (MODEL + name, b"x")]))


@pytest.mark.parametrize("name", ["/etc/k.cubin", "k.cubin", "data/aotinductor/model/k.cubin", "piece/data/weights/w"])
def test_member_in_another_folder_is_refused(name):
    with pytest.raises(ArtifactError, match="contains the unexpected member"):
        unpack(archived([*members(pack(WHOLE)), (name, b"x")]))


def test_package_with_a_source_is_refused():
    with pytest.raises(ArtifactError, match=r"model\.wrapper\.cpp"):
        unpack(archive_with_source(WHOLE))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_duplicate_member_is_refused():
    with pytest.raises(ArtifactError, match="twice"):
        unpack(archived([*members(pack(WHOLE)), (MODEL + NATIVE_FILE, b"other")]))


def test_compressed_members_are_refused():
    with pytest.raises(ArtifactError, match="compressed"):
        unpack(archived(members(pack(WHOLE)), method=zipfile.ZIP_DEFLATED))


@pytest.mark.parametrize("missing", range(6))
def test_missing_member_is_refused(missing):
    kept = members(pack(WHOLE))
    name, _ = kept.pop(missing)
    if name.endswith("model.wrapper.json"):  # the calls of custom ops, which need not be there
        assert unpack(archived(kept)).extern is None
        return
    with pytest.raises(ArtifactError, match=r"has no member|format"):
        unpack(archived(kept))


def test_unknown_archive_format_is_refused():
    for at, body in ((0, b"pt3"), (1, b"1"), (2, b"7\n")):
        changed = members(pack(WHOLE))
        changed[at] = (changed[at][0], body)
        with pytest.raises(ArtifactError, match="does not know"):
            unpack(archived(changed))


@given(st.integers(min_value=0, max_value=len(pack(WHOLE)) - 1))
def test_truncated_package_is_refused(length):
    with pytest.raises(ArtifactError):
        unpack(pack(WHOLE)[:length])


@given(st.binary(min_size=1, max_size=100))
def test_bytes_before_and_after_the_archive_are_refused(more):
    for data in (more + pack(WHOLE), pack(WHOLE) + more):
        with pytest.raises(ArtifactError):
            unpack(data)


@given(st.data())
def test_changed_byte_is_refused_or_affects_only_dates(data):
    whole = bytearray(pack(WHOLE))
    at = data.draw(st.integers(min_value=0, max_value=len(whole) - 1))
    whole[at] ^= data.draw(st.integers(min_value=1, max_value=255))
    try:
        found = unpack(bytes(whole))
    except ArtifactError:
        return
    assert found == WHOLE


@given(st.binary(max_size=300))
def test_bytes_that_are_not_an_archive_are_refused(data):
    with pytest.raises(ArtifactError):
        unpack(data)


def test_archive_with_a_comment_is_refused():
    out = io.BytesIO(pack(WHOLE))
    with zipfile.ZipFile(out, "a") as archive:
        archive.comment = b"hello"
    with pytest.raises(ArtifactError, match="none of its members"):
        unpack(out.getvalue())


@pytest.mark.parametrize(
    "metadata",
    [b"", b"{", b"[]", b"null", b'"cpu"', b'{"a": 1}', b'{"a": null}', b'{"a": ["b"]}', b"\xff", b"[" * 100_000],
)
def test_metadata_of_another_type_is_refused(metadata):
    entries = [(name, metadata if name.endswith(METADATA_FILE) else body) for name, body in members(pack(WHOLE))]
    with pytest.raises(ArtifactError, match="metadata"):
        unpack(archived(entries))
