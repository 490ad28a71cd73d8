"""Broken or malicious caches of vLLM: faults are reported as problems, and nothing is executed."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
from foreign_samples import AOT, BOMB, HASH, KEY, PIECES, RANK, artifact_of, entry_of, field, number, sealed, unpack

from cgtool.toolkit.foreign import tree
from cgtool.toolkit.foreign.detect import detect, read_foreign
from cgtool.toolkit.foreign.tree import MAX_DEPTH

INDEX = f"{PIECES}/vllm_compile_cache.py"
ARTIFACT = "artifact_compile_range_8_8_subgraph_0"


@pytest.fixture
def vllm(tmp_path):
    return unpack("vllm", tmp_path)


def _piece(cache, name=ARTIFACT):
    return artifact_of(entry_of(cache, "1572951577"), f"rank_0_0/backbone/{name}")


def _own_problems(cache, name="1572951577"):
    return [problem for problem in entry_of(cache, name).problems if "moved" not in problem]


def _with(data):
    return lambda path: path.write_bytes(data)


def _changed(change):
    return lambda path: path.write_bytes(change(path.read_bytes()))


def _flipped(seed):
    def flip(data):
        place = random.Random(seed).randrange(len(data) * 8)
        return data[: place // 8] + bytes([data[place // 8] ^ 1 << place % 8]) + data[place // 8 + 1 :]

    return _changed(flip)


def _of_another_torch(data):
    start = 4 + 8 + len("CacheCompiledArtifact") + 8
    return sealed(data[4:start], bytes(32), data[start + 32 :])


WRONG_SUM = "its checksum does not match: "
HEADER = field(b"CacheCompiledArtifact") + field(bytes(32)) + KEY
NO_MEGA_CACHE = "it does not hold a mega-cache of a known version"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        pytest.param(Path.unlink, "the index names it, but it is missing", id="missing"),
        pytest.param(_with(b""), "it is empty", id="empty"),
        pytest.param(_changed(lambda data: data[:-1]), WRONG_SUM, id="torn"),
        *(pytest.param(_flipped(seed), WRONG_SUM, id=f"bit {seed}") for seed in range(2)),
        pytest.param(
            lambda path: shutil.copy(path.with_name("artifact_compile_range_8_8_subgraph_4"), path),
            "the index names the key atql4gxbgu6asza5uj5w3dpcotprewxku7zlyy6qhfb3k6jen3me, and the file holds "
            "aopckthd5hs3czxyz3sxrw5bpadirlfmukkzw4ztn7ihr6tj77ss",
            id="of another piece",
        ),
        pytest.param(_changed(lambda data: sealed(data[4:], b"tail")), "4 bytes follow its end", id="tail"),
        pytest.param(_with(sealed(HEADER, field(b""))), NO_MEGA_CACHE, id="of nothing"),
        pytest.param(_with(sealed(HEADER, field(b"1234" + number(2)))), NO_MEGA_CACHE, id="of another version"),
        pytest.param(_with(sealed(HEADER, field(b"1234"))), "it is truncated: a field needs 8", id="only a checksum"),
        pytest.param(_changed(_of_another_torch), "it was written by another torch than", id="of another torch"),
    ],
)
def test_a_fault_of_an_artifact_is_reported_with_its_shape_and_piece(vllm, change, problem):
    change(vllm / PIECES / ARTIFACT)
    piece = _piece(read_foreign(vllm))
    (found,) = piece.problems
    assert found.startswith(problem)
    assert (piece.shape, piece.piece_index) == ({"num_tokens": (8, 8)}, 0)


def test_a_row_that_names_the_artifact_of_another_piece_is_reported(vllm):
    index = (vllm / INDEX).read_text()
    (vllm / INDEX).write_text(index.replace("((8, 8), 0, ", "((8, 8), 3, "))
    piece = _piece(read_foreign(vllm))
    assert (piece.piece_index, piece.problems) == (3, ("its name has another shape or piece than the index",))


def test_artifacts_that_no_row_names_are_listed_by_their_names_and_formats(vllm):
    folder = vllm / PIECES
    shutil.copy(folder / ARTIFACT, folder / "artifact_compile_range_1_16_subgraph_7")
    of_other_form = folder / "artifact_compile_range_9_9_subgraph_0"
    of_other_form.write_bytes(sealed(field(b"AOTCompiledArtifact"), field(bytes(32)), field(BOMB)))
    cache = read_foreign(vllm)
    piece = _piece(cache, "artifact_compile_range_1_16_subgraph_7")
    assert (piece.shape, piece.piece_index) == ({"num_tokens": (1, 16)}, 7)
    assert piece.problems == ("no row of the index names it",)
    piece = _piece(cache, of_other_form.name)
    assert (piece.holds_pickle, piece.members) == (True, (f"callable ({len(BOMB)} bytes, pickle protocol 4)",))


@pytest.mark.parametrize("name", ["../../../../etc/passwd", "/etc/passwd", "..", "", "a/b"])
def test_an_index_that_names_a_path_outside_opens_nothing(vllm, name):
    (vllm / INDEX).write_text(repr({((8, 8), 0, "inductor_standalone"): (name, "/x")}))
    (row, *_) = entry_of(read_foreign(vllm), "1572951577").artifacts
    assert (row.size_bytes, row.problems) == (0, (f"the index names {name}, which is not a plain file name",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "it is empty", id="empty"),
        pytest.param("{((1, 2048), 4, 'inductor", "not a plain literal: line 1 has 'inductor", id="torn"),
        pytest.param("__import__('os').system('touch HARM')", "not a plain literal: line 1", id="a call"),
        pytest.param("{'" + "a" * (9 << 20) + "': 1}", "the limit of 8388608", id="giant"),
    ],
)
def test_a_broken_index_is_a_problem_and_its_artifacts_are_listed(vllm, tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    (vllm / INDEX).write_text(text)
    cache = read_foreign(vllm)
    (problem,) = _own_problems(cache)
    assert problem.startswith("rank_0_0/backbone/vllm_compile_cache.py could not be read: it ")
    assert message in problem
    entry = entry_of(cache, "1572951577")
    assert [artifact.problems for artifact in entry.artifacts] == [("no row of the index names it",)] * 6
    assert not (tmp_path / "HARM").exists()


def test_torn_factors_are_a_problem(vllm):
    (vllm / PIECES / "cache_key_factors.json").write_text('{"env": ')
    cache = read_foreign(vllm)
    assert entry_of(cache, "1572951577").factors is None
    (problem,) = _own_problems(cache)
    assert problem.startswith("cache_key_factors.json of rank_0_0/backbone could not be read: it is not valid JSON")


def test_ranks_whose_factors_differ_keep_them_by_rank(vllm):
    shutil.copytree(vllm / RANK, vllm / HASH / "rank_10_0")
    shutil.copytree(vllm / RANK, vllm / HASH / "rank_2_0")
    (vllm / HASH / "rank_2_0" / "backbone" / "cache_key_factors.json").write_text('{"env": 1}')
    entry = entry_of(read_foreign(vllm), "1572951577")
    assert entry.ranks == ("0_0", "2_0", "10_0")
    assert list(entry.factors) == ["rank_0_0/backbone", "rank_2_0/backbone", "rank_10_0/backbone"]
    assert entry.factors["rank_2_0/backbone"] == {"env": 1}


def test_files_beside_the_entries_are_counted_and_not_deletable(vllm):
    base = vllm / "torch_compile_cache"
    (base / "torch_aot_compile" / "inductor_cache").mkdir()
    (base / "torch_aot_compile" / "inductor_cache" / "x").write_bytes(b"123")
    (base / "strange").mkdir()
    (base / "note.txt").write_text("hello")
    cache = read_foreign(vllm)
    shared = entry_of(cache, "torch_aot_compile/inductor_cache")
    assert (shared.kind, shared.size_bytes, shared.deletable) == ("shared", 3, False)
    assert shared.why_not == "compiled models beside it may load from it"
    strange = entry_of(cache, "strange")
    assert (strange.kind, strange.deletable, strange.why_not) == (
        "other",
        False,
        "vLLM did not write it in a known format",
    )
    assert cache.warnings == (f"{base / 'note.txt'} is not part of the cache and was skipped.",)
    assert cache.size_bytes == 1_639_373 + 3 + 5


def test_the_inductor_cache_of_an_entry_is_a_part_of_it(vllm):
    folder = vllm / "torch_compile_cache" / "torch_aot_compile" / AOT / "inductor_cache"
    folder.mkdir()
    (folder / "x").write_bytes(b"123")
    entry = entry_of(read_foreign(vllm), f"torch_aot_compile/{AOT}")
    shared = artifact_of(entry, "inductor_cache")
    assert (shared.what, shared.size_bytes, shared.members) == ("inductor_cache", 3, ("1 files",))
    assert entry.size_bytes == 486_529


def test_links_are_not_followed_and_loops_end(vllm, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 1000)
    folder = vllm / PIECES
    (folder / ARTIFACT).unlink()
    (folder / ARTIFACT).symlink_to(secret)
    (folder / "loop").symlink_to(folder)
    (vllm / "torch_compile_cache" / "elsewhere").symlink_to(vllm)
    cache = read_foreign(vllm)
    assert _piece(cache).problems == ("the index names it, but it is missing",)
    assert sorted(cache.warnings) == sorted(
        f"{path} is a link and was not followed."
        for path in (folder / ARTIFACT, folder / "loop", vllm / "torch_compile_cache" / "elsewhere")
    )


def test_a_link_to_a_cache_that_the_user_names_is_followed(vllm, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(vllm)
    assert detect(link) == "vllm"
    assert read_foreign(link).size_bytes == 1_639_373


def test_a_link_loop_is_not_a_cache(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert detect(loop) is None


def test_an_unrelated_folder_of_a_rank_is_not_a_part_of_the_model(vllm):
    (vllm / RANK / "__pycache__").mkdir()
    (vllm / RANK / "__pycache__" / "x.pyc").write_bytes(b"12")
    entry = entry_of(read_foreign(vllm), "1572951577")
    assert (entry.prefixes, entry.size_bytes) == (("backbone",), 1_126_002)


def test_files_beyond_the_limit_are_skipped(vllm, monkeypatch):
    monkeypatch.setattr(tree, "MAX_FILES", 5)
    cache = read_foreign(vllm)
    assert cache.warnings == (f"{vllm / 'torch_compile_cache'} has more than 5 files; the rest was skipped.",)


@pytest.mark.parametrize(
    ("name", "make", "warning"),
    [
        pytest.param("pipe", os.mkfifo, "pipe is neither a file nor a folder and was not opened.", id="a pipe"),
        pytest.param(
            "a\x1b[31m\nb", Path.touch, r"a\x1b[31m\nb has a name with unprintable characters.", id="escape codes"
        ),
        pytest.param(
            os.fsdecode(b"\xff\xfe"), Path.touch, "has a name with unprintable characters.", id="invalid UTF-8"
        ),
    ],
)
def test_strange_files_are_warnings(vllm, name, make, warning):
    make(vllm / PIECES / name)
    (found,) = read_foreign(vllm).warnings
    assert found.endswith(warning)


def test_folders_beyond_the_depth_limit_are_skipped(tmp_path):
    path = unpack("triton", tmp_path)
    deep = path.joinpath(*["d"] * (MAX_DEPTH + 3))
    deep.mkdir(parents=True)
    (warning,) = read_foreign(path).warnings
    assert warning.endswith(f"is nested more than {MAX_DEPTH} folders deep and was skipped.")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user and return")
def test_an_unreadable_file_is_a_warning(tmp_path_factory):
    folder = Path("/tmp") / f"cgtool-readers-{os.getpid()}"
    try:
        path = unpack("vllm", folder)
        (path / RANK).chmod(0)
        (path / "torch_compile_cache/2e78731c30/rank_0_0/backbone/cache_key_factors.json").chmod(0)
        os.seteuid(65534)
        try:
            cache = read_foreign(path)
        finally:
            os.seteuid(0)
    finally:
        shutil.rmtree(folder)
    assert cache.warnings == (f"{path / RANK} could not be listed: Permission denied.",)
    assert _own_problems(cache, "2e78731c30") == [
        "cache_key_factors.json of rank_0_0/backbone could not be read: it could not be read: Permission denied"
    ]
