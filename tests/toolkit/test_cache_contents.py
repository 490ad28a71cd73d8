"""Artifacts of each kind are read as data: genuine native code, and hostile bytes."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
import subprocess
import time
from pathlib import Path

import pytest
from artifact_samples import CUBIN
from hypothesis import example, given
from hypothesis import strategies as st

from cgtool.store.artifacts import Package, pack
from cgtool.store.compiled_code import Kernel, NativeCode, generated_sources, read_native
from cgtool.toolkit.contents import Source, contents_of

SOURCE = (
    "# AOT ID: ['0_inference']\nimport torch\n"
    "cpp_fused_add_0 = async_compile.cpp_pybinding(['const float*'], r'''\n// größe\n''')\n"
    "triton_poi_1 = async_compile.triton('triton_poi_1', '''...''')\n"
    "async_compile.wait(globals())\ndef call(args):\n    pass\n" + "# more\n" * 40
)
METADATA = {"AOTI_DEVICE_KEY": "cpu", "AOTI_MACHINE": "x86_64"}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A shared library with two kernels and another function, compiled on this machine."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("library")
    names = ("cpp_fused_add_0", "cpp_fused_mul_1", "other")
    (folder / "a.c").write_text("".join(f"int {name}(int a) {{ return a; }}" for name in names))
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "a.so", folder / "a.c"], check=True)
    return (folder / "a.so").read_bytes()


def test_a_cubin_states_its_kernels_registers_and_memory():
    kernel = Kernel(name="add_one", registers=8, shared_bytes=1536, constant_bytes=536)
    assert read_native(CUBIN) == NativeCode(target="sm_90", kernels=(kernel,))


def test_a_library_states_its_kernels_and_compiler(library):
    native = read_native(library)
    assert [kernel.name for kernel in native.kernels] == ["cpp_fused_add_0", "cpp_fused_mul_1"]
    assert native.target is None
    assert native.compiler


def test_a_package_has_members_kernels_and_target(library):
    package = Package(native=library, metadata=METADATA, extern=b'{"nodes": []}', kernels={"k.cubin": CUBIN})
    contents = contents_of(pack(package), "pt2")
    assert dict(contents.members) == {
        "model.wrapper.so": len(library),
        "model.wrapper_metadata.json": len(json.dumps(METADATA)),
        "model.wrapper.json": 13,
        "k.cubin": len(CUBIN),
    }
    assert [kernel.name for kernel in contents.kernels] == ["cpp_fused_add_0", "cpp_fused_mul_1", "add_one"]
    assert contents.target == {**METADATA, "architectures": ["sm_90"]}
    assert contents.sources == (Source(language="json", text='{\n "nodes": []\n}'),)
    assert contents.warnings == ()


def test_a_kernel_without_metadata_is_named_after_its_file():
    package = Package(native=b"no elf", metadata=METADATA, kernels={"k.hsaco": b"?"})
    contents = contents_of(pack(package), "pt2")
    assert contents.kernels == (Kernel(name="k.hsaco"),)
    assert contents.compiler is None


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"x" * 1000])
def test_an_invalid_package_is_a_warning(data):
    contents = contents_of(data, "pt2")
    assert (contents.size_bytes, contents.members, contents.kernels) == (len(data), (), ())
    assert contents.warnings[0].startswith("A package is corrupt")


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_generated_code_is_found_in_nested_pickles(protocol):
    inner = pickle.dumps({"key": "X" * 300, "source": SOURCE}, protocol=protocol)
    data = b"header" + pickle.dumps(("name", inner, [1, 2]), protocol=protocol)
    assert generated_sources(data) == (SOURCE,)
    contents = contents_of(data, "aot")
    assert contents.sources == (Source(language="python", text=SOURCE),)
    assert [kernel.name for kernel in contents.kernels] == ["cpp_fused_add_0", "triton_poi_1"]


def test_generated_modules_are_found_in_order_without_duplicates():
    other = SOURCE.replace("0_inference", "1_inference")
    assert generated_sources(pickle.dumps([SOURCE, other, str(SOURCE + "")])) == (SOURCE, other)


def test_reading_an_artifact_executes_none_of_it(tmp_path):
    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    data = pickle.dumps([SOURCE, Evil()])
    for kind in ("aot", "mega", "pt2", "json", "other"):
        contents_of(data, kind)
    assert list(tmp_path.iterdir()) == []


def test_many_false_markers_do_not_take_quadratic_time():
    data = b"X\xff\xff\x00\x00" * 200_000 + b"# AOT ID: " * 20_000
    start = time.process_time()
    generated_sources(data)
    assert time.process_time() - start < 5


def test_a_mega_cache_states_the_torch_that_wrote_it():
    header = b'{"schema": 1, "torch": "2.13.0", "tag": "t", "options": {}}'
    data = len(header).to_bytes(8, "big") + header + pickle.dumps(SOURCE)
    contents = contents_of(data, "mega")
    assert contents.target == {"torch": "2.13.0"}
    assert len(contents.sources) == 1
    assert contents_of(b"\xff" * 100, "mega").target == {}
    assert contents_of(b"", "mega").target == {}


def test_an_eager_graph_is_shown_as_json():
    assert contents_of(b'{"a":1}', "json").sources == (Source(language="json", text='{\n "a": 1\n}'),)
    assert contents_of(b"\xff{", "json").sources[0].text == "\\xff{"


def test_only_the_size_of_an_unknown_kind_is_known():
    contents = contents_of(b"12345", "new.kind")
    assert (contents.size_bytes, contents.sources, contents.kernels, contents.members) == (5, (), (), ())


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_not_an_error(data):
    for kind in ("pt2", "aot", "mega", "json", "x"):
        contents_of(data, kind)
    read_native(b"\x7fELF\x02\x01" + data)


@given(st.integers(0, len(CUBIN) - 1), st.binary(min_size=1, max_size=8))
@example(45, b"\x00\x00\x80")  # section headers at an offset beyond any address
def test_corrupted_native_code_is_not_an_error(at, change):
    data = CUBIN[:at] + change + CUBIN[at + len(change) :]
    read_native(data)
    read_native(data[:at])


def test_too_many_sections_are_not_read():
    header = bytearray(CUBIN)
    struct.pack_into("<H", header, 60, 0xFFFF)  # e_shnum
    assert read_native(bytes(header)).kernels == ()
