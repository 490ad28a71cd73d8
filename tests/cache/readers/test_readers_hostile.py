"""Caches that are broken or meant to do harm: a warning or a problem that names it, never an error, never execution."""

from __future__ import annotations

import os
import random
import shutil
import struct
import zlib
from pathlib import Path

import pytest
from readers_samples import AOT, FX_KEY, HASH, PIECES, RANK, SAMPLES, SCALE, artifact_of, entry_of, unpack

from cgtool.cache.readers import binary, tree
from cgtool.cache.readers.detect import detect, read_cache
from cgtool.cache.readers.tree import MOST_DEPTH

INDEX = f"{PIECES}/vllm_compile_cache.py"
ARTIFACT = "artifact_compile_range_8_8_subgraph_0"
#: Unpickling this makes a file.
BOMB = b"\x80\x04cposix\nsystem\n(S'touch HARM'\ntR."


@pytest.fixture
def vllm(tmp_path):
    return unpack("vllm", tmp_path)


def _piece(cache, name=ARTIFACT):
    return artifact_of(entry_of(cache, "1572951577"), f"rank_0_0/backbone/{name}")


def _own_problems(cache, name="1572951577"):
    return [problem for problem in entry_of(cache, name).problems if "moved" not in problem]


def test_a_missing_artifact_is_named_with_its_shape_and_piece(vllm):
    (vllm / PIECES / ARTIFACT).unlink()
    piece = _piece(read_cache(vllm))
    assert piece.problems == ("the index names it and it is missing",)
    assert (piece.shape, piece.piece_index, piece.size_bytes) == (8, 0, 0)


def test_an_empty_artifact_is_named(vllm):
    (vllm / PIECES / ARTIFACT).write_bytes(b"")
    assert _piece(read_cache(vllm)).problems == ("zero bytes",)


def test_a_torn_artifact_is_named(vllm):
    path = vllm / PIECES / ARTIFACT
    path.write_bytes(path.read_bytes()[:-1])
    (problem,) = _piece(read_cache(vllm)).problems
    assert problem.startswith("its bytes differ from its checksum, which is ")


@pytest.mark.parametrize("seed", range(8))
def test_one_flipped_bit_of_an_artifact_is_named(vllm, seed):
    path = vllm / PIECES / ARTIFACT
    data = bytearray(path.read_bytes())
    place = random.Random(seed).randrange(len(data) * 8)
    data[place // 8] ^= 1 << place % 8
    path.write_bytes(data)
    (problem,) = _piece(read_cache(vllm)).problems
    assert problem.startswith("its bytes differ from its checksum, which is ")


def test_artifacts_that_changed_places_are_named_by_their_keys(vllm):
    folder = vllm / PIECES
    shutil.copy(folder / "artifact_compile_range_8_8_subgraph_4", folder / ARTIFACT)
    (problem,) = _piece(read_cache(vllm)).problems
    assert problem == (
        "the index names the key atql4gxbgu6asza5uj5w3dpcotprewxku7zlyy6qhfb3k6jen3me, and the file holds "
        "aopckthd5hs3czxyz3sxrw5bpadirlfmukkzw4ztn7ihr6tj77ss"
    )


def test_a_row_that_names_the_artifact_of_another_piece_is_named(vllm):
    index = (vllm / INDEX).read_text()
    (vllm / INDEX).write_text(index.replace("((8, 8), 0, ", "((8, 8), 3, "))
    piece = _piece(read_cache(vllm))
    assert (piece.piece_index, piece.problems) == (3, ("its name says another shape or piece than the index does",))


def test_bytes_after_an_artifacts_end_are_named(vllm):
    path = vllm / PIECES / ARTIFACT
    path.write_bytes(_sealed(path.read_bytes()[4:], b"tail"))
    assert _piece(read_cache(vllm)).problems == ("4 bytes follow its end",)


def test_an_artifact_that_holds_no_mega_cache_is_named(vllm):
    header = _bytes(b"CacheCompiledArtifact") + _bytes(bytes(32)) + KEY
    path = vllm / PIECES / ARTIFACT
    for inside in (b"", b"1234", b"1234" + _number(2)):
        path.write_bytes(_sealed(header, _bytes(inside)))
        (problem,) = _piece(read_cache(vllm)).problems
        assert problem in (
            "it holds no mega-cache of a known version",
            "it ends too early: 8 bytes should follow, and 0 do",
        )


def test_an_artifact_of_torchs_other_form_is_described(vllm):
    path = vllm / PIECES / "artifact_compile_range_9_9_subgraph_0"
    path.write_bytes(_sealed(_bytes(b"AOTCompiledArtifact"), _bytes(bytes(32)), _bytes(BOMB)))
    piece = _piece(read_cache(vllm), path.name)
    assert (piece.holds_pickle, piece.members) == (True, (f"callable ({len(BOMB)} bytes, pickle protocol 4)",))


def test_an_artifact_that_no_row_names_is_listed_with_what_its_name_says(vllm):
    folder = vllm / PIECES
    shutil.copy(folder / ARTIFACT, folder / "artifact_compile_range_1_16_subgraph_7")
    piece = _piece(read_cache(vllm), "artifact_compile_range_1_16_subgraph_7")
    assert (piece.shape, piece.piece_index) == ((1, 16), 7)
    assert piece.problems == ("no row of the index names it",)


def test_an_artifact_of_another_torch_is_named(vllm):
    path = vllm / PIECES / ARTIFACT
    data = bytearray(path.read_bytes())
    start = 4 + 8 + len("CacheCompiledArtifact") + 8
    data[start : start + 32] = bytes(32)
    data[:4] = zlib.crc32(data[4:]).to_bytes(4, "big")
    path.write_bytes(data)
    assert _piece(read_cache(vllm)).problems == ("another torch wrote it than the others",)


@pytest.mark.parametrize("name", ["../../../../etc/passwd", "/etc/passwd", "..", "", "a/b"])
def test_an_index_that_names_a_path_outside_opens_nothing(vllm, name):
    (vllm / INDEX).write_text(repr({((8, 8), 0, "inductor_standalone"): (name, "/x")}))
    (row, *_) = entry_of(read_cache(vllm), "1572951577").artifacts
    assert (row.size_bytes, row.problems) == (0, (f"the index names {name}, which is no plain name",))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("", "zero bytes", id="empty"),
        pytest.param("{((1, 2048), 4, 'inductor", "no plain literal: line 1 goes on with 'inductor", id="torn"),
        pytest.param("__import__('os').system('touch HARM')", "no plain literal: line 1", id="a call"),
        pytest.param("[" * 100_000, "nested more than 32 deep", id="deep"),
        pytest.param("{'" + "a" * (9 << 20) + "': 1}", "8388608 are the limit", id="giant"),
        pytest.param("\0" * 100, "no plain literal: line 1", id="zeros"),
    ],
)
def test_a_broken_index_is_a_problem_and_its_artifacts_are_listed_all_the_same(
    vllm, tmp_path, monkeypatch, text, words
):
    monkeypatch.chdir(tmp_path)
    (vllm / INDEX).write_text(text)
    cache = read_cache(vllm)
    (problem,) = _own_problems(cache)
    assert problem.startswith("rank_0_0/backbone/vllm_compile_cache.py could not be read: it ")
    assert words in problem
    entry = entry_of(cache, "1572951577")
    assert [artifact.problems for artifact in entry.artifacts] == [("no row of the index names it",)] * 6
    assert not (tmp_path / "HARM").exists()


def test_torn_factors_are_a_problem(vllm):
    (vllm / PIECES / "cache_key_factors.json").write_text('{"env": ')
    cache = read_cache(vllm)
    assert entry_of(cache, "1572951577").factors is None
    (problem,) = _own_problems(cache)
    assert problem.startswith("cache_key_factors.json of rank_0_0/backbone could not be read: it is no whole JSON")


def test_ranks_whose_factors_differ_keep_them_by_rank(vllm):
    shutil.copytree(vllm / RANK, vllm / HASH / "rank_10_0")
    shutil.copytree(vllm / RANK, vllm / HASH / "rank_2_0")
    (vllm / HASH / "rank_2_0" / "backbone" / "cache_key_factors.json").write_text('{"env": 1}')
    entry = entry_of(read_cache(vllm), "1572951577")
    assert entry.ranks == ("0_0", "2_0", "10_0")
    assert list(entry.factors) == ["rank_0_0/backbone", "rank_2_0/backbone", "rank_10_0/backbone"]
    assert entry.factors["rank_2_0/backbone"] == {"env": 1}


def test_what_lies_beside_the_entries_is_counted_and_may_not_be_deleted(vllm):
    base = vllm / "torch_compile_cache"
    (base / "torch_aot_compile" / "inductor_cache").mkdir()
    (base / "torch_aot_compile" / "inductor_cache" / "x").write_bytes(b"123")
    (base / "strange").mkdir()
    (base / "note.txt").write_text("hello")
    cache = read_cache(vllm)
    shared = entry_of(cache, "torch_aot_compile/inductor_cache")
    assert (shared.kind, shared.size_bytes, shared.deletable) == ("shared", 3, False)
    assert shared.why_not == "compiled models beside it may load from it"
    strange = entry_of(cache, "strange")
    assert (strange.kind, strange.deletable, strange.why_not) == (
        "other",
        False,
        "vLLM did not write it in a form that is known",
    )
    assert cache.warnings == (f"{base / 'note.txt'} is not part of the cache and was skipped.",)
    assert cache.size_bytes == 1_639_373 + 3 + 5


def test_the_inductor_cache_of_an_entry_is_a_part_of_it(vllm):
    folder = vllm / "torch_compile_cache" / "torch_aot_compile" / AOT / "inductor_cache"
    folder.mkdir()
    (folder / "x").write_bytes(b"123")
    entry = entry_of(read_cache(vllm), f"torch_aot_compile/{AOT}")
    shared = artifact_of(entry, "inductor_cache")
    assert (shared.what, shared.size_bytes, shared.members) == ("inductor_cache", 3, ("1 files",))
    assert entry.size_bytes == 486_529


def test_older_indexes_name_what_is_missing_of_code_and_graph(tmp_path):
    path = unpack("vllm-old", tmp_path)
    cache = path / "torch_compile_cache" / "1517964802" / "rank_0_0" / "inductor_cache"
    shutil.rmtree(cache / "fxgraph")
    (cache / "5l" / "c5lx63dblzpjkzwsomda37ybbrxoiqdowok7da245wuy3huk2yvw.py").unlink()
    rows = entry_of(read_cache(path), "1517964802").artifacts
    assert {row.problems for row in rows} == {
        (
            "the index names its code and that is missing",
            f"the index names the compiled graph {FX_KEY} and that is missing",
        )
    }


def test_an_unpacked_artifact_that_lacks_its_graphs_is_named(tmp_path):
    path = unpack("atom", tmp_path)
    folder = path / "torch_compile_cache" / "9b41aa03d5" / "rank_0" / "backbone" / "artifact_shape_8_subgraph_0"
    shutil.rmtree(folder / "aotautograd")
    next((folder / "fxgraph").rglob("r*")).write_bytes(b"")
    row = artifact_of(entry_of(read_cache(path), "9b41aa03d5"), "rank_0/backbone/artifact_shape_8_subgraph_0")
    graph = "fxgraph/sy/fsy7i4gjlgxcswlf5eg2djs2i4kxfmvvy5xj7noglgwpypcgzuwy/"
    assert row.problems[0].removeprefix(graph) == "rlqy3nrbsztobcjb2kcmsknud4cn3dogz6yhe3mjach46do6jx4 has zero bytes"
    assert row.problems[1:] == ("it holds no graph of AOTAutograd, with which loading begins",)
    assert (row.holds_pickle, row.members) == (False, ("2 files, 0 of them pickle",))


def test_links_are_not_followed_and_loops_end(vllm, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 1000)
    folder = vllm / PIECES
    (folder / ARTIFACT).unlink()
    (folder / ARTIFACT).symlink_to(secret)
    (folder / "loop").symlink_to(folder)
    (vllm / "torch_compile_cache" / "elsewhere").symlink_to(vllm)
    cache = read_cache(vllm)
    assert _piece(cache).problems == ("the index names it and it is missing",)
    assert sorted(cache.warnings) == sorted(
        f"{path} is a link and was not followed."
        for path in (folder / ARTIFACT, folder / "loop", vllm / "torch_compile_cache" / "elsewhere")
    )


def test_a_link_to_a_cache_that_the_user_names_is_followed(vllm, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(vllm)
    assert detect(link) == "vllm"
    assert read_cache(link).size_bytes == 1_639_373


def test_a_loop_of_links_is_no_cache(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert detect(loop) is None


def test_a_stranger_folder_of_a_rank_is_no_part_of_the_model(vllm):
    (vllm / RANK / "__pycache__").mkdir()
    (vllm / RANK / "__pycache__" / "x.pyc").write_bytes(b"12")
    entry = entry_of(read_cache(vllm), "1572951577")
    assert (entry.prefixes, entry.size_bytes) == (("backbone",), 1_126_002)


def test_more_files_than_any_cache_has_are_left(vllm, monkeypatch):
    monkeypatch.setattr(tree, "MOST_FILES", 5)
    cache = read_cache(vllm)
    assert cache.warnings == (f"{vllm / 'torch_compile_cache'} has more than 5 files; the rest was not looked at.",)


def test_a_pipe_is_not_opened(vllm):
    path = vllm / PIECES / ARTIFACT
    path.unlink()
    os.mkfifo(path)
    cache = read_cache(vllm)
    assert cache.warnings == (f"{path} is neither a file nor a folder and was not opened.",)


def test_names_that_a_terminal_obeys_are_spelled_out_in_warnings(vllm):
    (vllm / PIECES / "a\x1b[31m\nb").write_bytes(b"1")
    cache = read_cache(vllm)
    assert cache.warnings == (rf"{vllm / PIECES}/a\x1b[31m\nb has a name with characters that do not print.",)


def test_a_name_that_is_no_text_does_no_harm(vllm):
    (vllm / PIECES / os.fsdecode(b"\xff\xfe")).write_bytes(b"1")
    assert read_cache(vllm).warnings[0].endswith("has a name with characters that do not print.")


def test_folders_deeper_than_any_cache_are_left(tmp_path):
    path = unpack("triton", tmp_path)
    deep = path.joinpath(*["d"] * (MOST_DEPTH + 3))
    deep.mkdir(parents=True)
    (warning,) = read_cache(path).warnings
    assert warning.endswith(f"is deeper than {MOST_DEPTH} folders and was not looked into.")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who alone may become nobody and come back")
def test_what_may_not_be_read_is_a_warning(tmp_path_factory):
    folder = Path("/tmp") / f"cgtool-readers-{os.getpid()}"
    try:
        path = unpack("vllm", folder)
        (path / RANK).chmod(0)
        (path / "torch_compile_cache/2e78731c30/rank_0_0/backbone/cache_key_factors.json").chmod(0)
        os.seteuid(65534)
        try:
            cache = read_cache(path)
        finally:
            os.seteuid(0)
    finally:
        shutil.rmtree(folder)
    assert cache.warnings == (f"{path / RANK} could not be listed: Permission denied.",)
    assert _own_problems(cache, "2e78731c30") == [
        "cache_key_factors.json of rank_0_0/backbone could not be read: it could not be read: Permission denied"
    ]


def test_a_pickle_that_would_do_harm_is_described_and_not_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = unpack("torch_inductor", tmp_path)
    (path / "fxgraph" / FX_KEY[1:3] / FX_KEY / "bomb").write_bytes(BOMB)
    (path / "24" / "cbomb.so").write_bytes(BOMB)
    cache = read_cache(path)
    bomb = artifact_of(entry_of(cache, FX_KEY), "bomb")
    assert (bomb.holds_pickle, bomb.members, bomb.problems) == (True, ("pickle protocol 4",), ())
    native = artifact_of(entry_of(cache, "generated code"), "24/cbomb.so")
    assert (native.holds_pickle, native.problems) == (True, ("is no native code, by its beginning",))
    assert not (tmp_path / "HARM").exists()


def test_graphs_that_are_empty_or_no_pickle_are_named(tmp_path):
    path = unpack("torch_inductor", tmp_path)
    (path / "fxgraph" / FX_KEY[1:3] / FX_KEY / "empty").write_bytes(b"")
    (path / "fxgraph" / FX_KEY[1:3] / FX_KEY / "text").write_bytes(b"import os")
    (path / "aotautograd" / "anothing").mkdir()
    cache = read_cache(path)
    entry = entry_of(cache, FX_KEY)
    assert artifact_of(entry, "empty").problems == ("zero bytes",)
    assert artifact_of(entry, "text").problems == ("does not begin as a pickle does",)
    assert entry_of(cache, "anothing").problems == ("it holds no graph",)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        pytest.param(
            "scale.json", '{"name": ', "scale.json could not be read: it is no whole JSON", id="torn metadata"
        ),
        pytest.param(
            "scale.json", "[" * 40 + "]" * 40, "scale.json could not be read: it is nested", id="deep metadata"
        ),
        pytest.param("scale.json", "[]", "scale.json is not the metadata of a kernel", id="other metadata"),
        pytest.param("__grp__scale.json", "{", "__grp__scale.json could not be read: it is no", id="torn group"),
        pytest.param("__grp__scale.json", '{"child_paths": [1]}', "is not a group of files", id="another group"),
        pytest.param(
            "__grp__scale.json",
            '{"child_paths": {"a\\nb": "/x/a"}}',
            r"names a\nb, which is missing",
            id="a missing file",
        ),
    ],
)
def test_a_broken_record_of_tritons_is_named(tmp_path, name, text, words):
    path = unpack("triton", tmp_path)
    (path / SCALE / name).write_text(text)
    entry = entry_of(read_cache(path), SCALE)
    assert any(words in problem for problem in entry.all_problems())
    assert all(problem.isprintable() for problem in entry.all_problems())
    assert (entry.kind, entry.deletable) == ("kernel", True)


def test_a_kernel_without_code_that_runs_is_not_whole(tmp_path):
    path = unpack("triton", tmp_path)
    (path / SCALE / "scale.cubin").unlink()
    (path / SCALE / "tmp.pid_1_x").mkdir()
    problems = list(entry_of(read_cache(path), SCALE).all_problems())
    assert problems[0] == "it has no code that runs: the kernel is not whole"
    assert problems[1] == "__grp__scale.json names scale.cubin, which is missing"
    assert problems[3] == "it holds what a process was writing and did not finish" or problems[-1].startswith(
        "it holds"
    )


def _sealed(*parts: bytes) -> bytes:
    rest = b"".join(parts)
    return zlib.crc32(rest).to_bytes(4, "big") + rest


def _number(value: int) -> bytes:
    return struct.pack(">Q", value)


def _bytes(data: bytes) -> bytes:
    return _number(len(data)) + data


KIND = _bytes(b"aW5kdWN0b3I=")
KEY = _bytes(b"Zm9v")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        pytest.param(_sealed(_number(1), KIND, _number(1 << 63)), "ends too early: 8 bytes", id="a giant count"),
        pytest.param(
            _sealed(_number(1), KIND, _number(1), KEY, _number(1 << 62)), "ends too early", id="a giant member"
        ),
        pytest.param(_sealed(_number(1), KIND, _number(1), KEY, _bytes(b"12"), b"x"), "ends too early", id="a tail"),
        pytest.param(_sealed(_number(1), KIND, _number(1), _bytes(b"*" * 8)), "is not base64", id="a key of no base64"),
        pytest.param(
            _sealed(_number(1), KIND, _number(1), _bytes(b"a" * 5000)), "4096 are the limit", id="a giant key"
        ),
        pytest.param(b"\0\0\0\0" + _number(1) + KIND + _number(0), "differ from its checksum", id="a wrong checksum"),
    ],
)
def test_a_mega_cache_that_breaks_its_form_is_a_problem(tmp_path, data, words):
    path = tmp_path / "mega"
    path.write_bytes(data)
    cache = read_cache(path)
    (entry,) = cache.entries
    assert (cache.system, entry.artifacts, entry.size_bytes) == ("mega_cache", (), len(data))
    (problem,) = entry.problems
    assert words in problem


def test_a_mega_cache_of_too_many_members_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(binary, "_MOST_MEMBERS", 3)
    path = tmp_path / "mega"
    path.write_bytes(_sealed(_number(1), KIND, _number(4), (KEY + _bytes(b"")) * 4))
    (entry,) = read_cache(path).entries
    assert entry.problems == ("it holds more than 3 members",)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x80\x04N.", id="a pickle"),
        pytest.param(_sealed(_number(2), KIND), id="another version"),
        pytest.param(_sealed(_number(1), _bytes(b"!!!!")), id="a kind of no base64"),
        pytest.param(_sealed(_number(1), _number(1 << 60)), id="a kind without end"),
        pytest.param(b"PK\x03\x04" + bytes(100), id="an archive"),
    ],
)
def test_other_files_are_no_cache(tmp_path, data):
    path = tmp_path / "file"
    path.write_bytes(data)
    assert detect(path) is None


@pytest.mark.parametrize("name", SAMPLES)
def test_no_mutation_of_any_file_is_an_error(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = unpack(name, tmp_path)
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    seeded = random.Random(name)
    texts = (b"", b"{", b"\xff" * 9, b"[" * 5000, b"None", BOMB, b"{'a': open('HARM', 'w')}")
    for _ in range(40):
        file = seeded.choice(files)
        data = file.read_bytes()
        place = seeded.randrange(len(data) + 1)
        changed = seeded.choice(
            [data[:place], data[:place] + bytes([seeded.randrange(256)]) + data[place + 1 :], seeded.choice(texts)]
        )
        file.write_bytes(changed)
        if detect(path) is not None:
            cache = read_cache(path)
            assert cache.to_json()["schema"] == 1
            assert cache.size_bytes >= len(changed)
        file.write_bytes(data)
    assert not (tmp_path / "HARM").exists()
    assert read_cache(path).warnings == ()
