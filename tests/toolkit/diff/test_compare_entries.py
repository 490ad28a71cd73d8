"""Entries that differ in one thing: the root cause is reported first, its consequences after it."""

from __future__ import annotations

import json
import time

import pytest
from cache_samples import sealed
from compare_samples import ATTENTION, FACTORS, GRAPH_TEXT, GUARDS, HIDDEN, lay, piece, plan_of
from msgspec.structs import replace

from cgtool.errors import CacheCorruptError, CacheSchemaError
from cgtool.plan.pieces import SymbolRange
from cgtool.plan.records import Guard, Input
from cgtool.store.layout import PLAN_FILE
from cgtool.store.records import Fallback
from cgtool.toolkit.diff.entries import compare_entries


def compare(tmp_path, old=None, new=None):
    return compare_entries(lay(tmp_path / "old", **(old or {})), lay(tmp_path / "new", **(new or {})))


def sentences(found):
    return [(difference.what, difference.sentence) for difference in found]


def guards(*changed: Guard) -> tuple[Guard, ...]:
    places = {(guard.source, guard.kind): guard for guard in (*GUARDS, *changed)}
    return tuple(places.values())


def eps(layer: int, value: str = "1e-05") -> Guard:
    return Guard(source=f"self.layers.{layer}.eps", kind="value", expected=["f", value])


def test_entries_with_the_same_content_are_equal(tmp_path):
    assert compare(tmp_path) == []


@pytest.mark.parametrize(
    ("factor", "value", "path", "sentence"),
    [
        pytest.param(
            "config", {"level": 2, "adaptor": "eager"}, "config.level", "config.level was 3 and is 2 now", id="field"
        ),
        pytest.param(
            "torch", {"version": "2.14.0", "with_cuda": None}, "torch.version",
            'torch.version was "2.13.0" and is "2.14.0" now', id="package",
        ),
        pytest.param("triton", "3.4.0", "triton", 'triton was null and is "3.4.0" now', id="new package"),
        pytest.param(
            "inductor_environment", {"TORCH_X": "1"}, "inductor_environment.TORCH_X",
            'the environment variable TORCH_X was unset and is "1" now', id="variable",
        ),
        pytest.param(
            "target", {"accelerators": ["sm_90 x132"], "cpu": {"capability": "AVX512"}}, "target.accelerators",
            'target.accelerators was [] and is ["sm_90 x132"] now', id="gpu",
        ),
        pytest.param(
            "compiler", "(Debian) 13", "compiler", 'compiler was "(Debian) 12.2.0" and is "(Debian) 13" now',
            id="compiler",
        ),
    ],
)  # fmt: skip
def test_a_factor_is_reported_down_to_its_leaf(factor, value, path, sentence, tmp_path):
    (found,) = compare(tmp_path, new={"factors": {factor: value}})
    assert (found.what, found.path, found.sentence) == ("factor", path, sentence)


def test_a_changed_source_line_is_shown_before_and_after(tmp_path):
    text = GRAPH_TEXT.replace("z = y + self.eps", "z = y - self.eps").replace("toy.py:12", "toy.py:11")
    first, *_ = compare(tmp_path, new={"factors": {"sources": {"toy": "c" * 64}}, "graph_text": text})
    assert (first.what, first.path, first.old, first.new) == ("source", "sources.toy", "a" * 64, "c" * 64)
    change = "toy.py, line 13, in forward: `z = y + self.eps` is `z = y - self.eps` now"
    assert first.sentence == f"sources.toy has changed: {change}"
    assert first.detail == (
        "  in forward: y = x.sin()",
        "- in forward: z = y + self.eps",
        "+ in forward: z = y - self.eps",
    )


def test_without_changed_lines_the_functions_with_changed_code_are_reported(tmp_path):
    code = Guard(source="global:toy:Toy.forward", kind="code", expected="d" * 64)
    new = {"factors": {"sources": {"toy": "c" * 64}}, "plan": plan_of(model_guards=guards(code))}
    first, second = compare(tmp_path, new=new)
    assert first.sentence == "sources.toy has changed: the code of Toy.forward"
    assert sentences([second]) == [("guard", "the code of toy.Toy.forward has changed")]


def test_a_source_file_may_change_in_no_traced_line(tmp_path):
    (found,) = compare(tmp_path, new={"factors": {"sources": {"toy": "c" * 64}}})
    assert found.sentence == (
        "sources.toy has changed (its digest was aaaaaaaaaa and is cccccccccc now), in no traced line: a comment, or "
        "code that adds no operation to the graph"
    )


def test_no_line_is_reported_for_an_entry_without_its_graph_file(tmp_path):
    new = {"factors": {"sources": {"toy": "c" * 64}}, "graph_text": None}
    first, *files = compare(tmp_path, new=new)
    assert first.sentence == "sources.toy has changed (its digest was aaaaaaaaaa and is cccccccccc now)"
    assert sentences(files) == [
        ("entry", "computation_graph.py is only in the first"),
        ("entry", "transformed_code.py is only in the first"),
    ]


def test_a_guard_precedes_its_consequences(tmp_path):
    plan = plan_of([piece(eps="1e-05"), ATTENTION, piece()], model_guards=guards(eps(0)))
    found = compare(tmp_path, new={"plan": plan, "data": b"other"})
    assert [difference.what for difference in found] == ["guard", "piece", "artifact"]
    assert (found[0].path, found[0].old, found[0].new) == ("self.layers.0.eps value", ["f", "1e-06"], ["f", "1e-05"])
    assert found[0].sentence == "layers.0.eps was 1e-06 and is 1e-05 now"


def test_the_same_change_in_several_layers_is_one_difference(tmp_path):
    (found,) = compare(tmp_path, new={"plan": plan_of(model_guards=guards(eps(0), eps(1)))})
    assert found.sentence == "layers.0.eps was 1e-06 and is 1e-05 now (also self.layers.1.eps value)"
    assert found.detail == ("also: self.layers.1.eps value",)


def test_different_changes_in_two_layers_are_two_differences(tmp_path):
    found = compare(tmp_path, new={"plan": plan_of(model_guards=guards(eps(0), eps(1, "2.0")))})
    assert [difference.sentence for difference in found] == [
        "layers.0.eps was 1e-06 and is 1e-05 now",
        "layers.1.eps was 1e-06 and is 2.0 now",
    ]


def test_a_configuration_field_precedes_the_structure_of_the_output(tmp_path):
    new = {"factors": {"config": {"level": 2, "adaptor": "eager"}}, "plan": plan_of(output=["v", 0])}
    assert [difference.path for difference in compare(tmp_path, new=new)] == ["config.level", "output"]


def test_another_python_precedes_the_code_digests(tmp_path):
    code = Guard(source="global:toy:Toy.forward", kind="code", expected="d" * 64)
    new = {"factors": {"python": "cpython 3.12"}, "plan": plan_of(model_guards=guards(code))}
    assert [difference.path for difference in compare(tmp_path, new=new)] == ["python", "global:toy:Toy.forward code"]


def test_a_newly_traced_file_follows_the_guard_that_explains_it(tmp_path):
    act = Guard(source="self.layers.0.act", kind="value", expected=["function", "other:act", "e" * 64])
    absent = Guard(source="self.layers.0", kind="absent:act", expected=True)
    old = {"plan": plan_of(model_guards=guards(absent))}
    new = {"plan": plan_of(model_guards=guards(act)), "factors": {"sources": {**FACTORS["sources"], "other": "f" * 64}}}
    assert sentences(compare(tmp_path, old=old, new=new)) == [
        ("guard", "layers.0.act is set on the object itself now, to other:act (code eeeeeeee), and was not before"),
        ("guard", "whether layers.0.act is set on the object itself was guarded before and is not now"),
        ("source", "sources.other is ffffffffff now and was not there before"),
    ]


def test_guards_that_only_one_side_has_are_one_difference(tmp_path):
    more = [Guard(source=f"self.x{i}", kind="value", expected=i) for i in range(50)]
    (found,) = compare(tmp_path, new={"plan": plan_of(model_guards=guards(*more))})
    assert found.sentence == "x0: 0 is guarded now and was not before (and 49 more guards)"
    assert len(found.detail) == 40


def test_the_order_of_guards_is_a_difference(tmp_path):
    found, file = compare(tmp_path, new={"plan": plan_of(model_guards=tuple(reversed(GUARDS)))})
    assert (found.what, found.path) == ("factor", "guards")
    assert file.sentence == "plan.json differs in ways that are not shown"
    assert found.sentence.endswith("only in their order")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        pytest.param(
            {"symbols": (SymbolRange(name="s0", min=2, max=512),)},
            "the size rows was 2 or more and is from 2 to 512 now",
            id="range",
        ),
        pytest.param(
            {"inputs": (Input(source="arg:x", meta=replace(HIDDEN, dtype="float16")),)},
            "the tensor x was float32[s0, 64] strides [64, 1] cpu and is float16[s0, 64] strides [64, 1] cpu now",
            id="dtype",
        ),
        pytest.param({"inputs": ()}, "the tensor x was float32[s0, 64] strides [64, 1] cpu and is gone now", id="gone"),
        pytest.param({"relations": ("s0 % 8 == 0",)}, "s0 % 8 == 0 is required of the sizes now", id="relation"),
        pytest.param({"output": ["v", 0]}, "the structure of the model's output has changed", id="output"),
    ],
)
def test_the_requirements_on_calls_are_compared(changes, sentence, tmp_path):
    (found,) = compare(tmp_path, new={"plan": plan_of(**changes)})
    assert sentences([found]) == [("guard", sentence)]


def test_a_piece_is_shown_as_a_diff_of_its_operations(tmp_path):
    (found,) = compare(tmp_path, new={"plan": plan_of([piece(), ATTENTION, piece("torch.cos")])})
    assert (found.what, found.path) == ("piece", "default/piece 2")
    assert (found.old, found.new) == (piece().identity(), piece("torch.cos").identity())
    assert found.detail == (
        "  s0: 2 or more",
        "  input %0: float32[s0, 64] strides [64, 1] cpu",
        "- %1 = torch.sin(%0)",
        "+ %1 = torch.cos(%0)",
        "  %2 = _operator.add(%1, 1e-06)",
        "  return %2: float32[s0, 64] strides [64, 1] cpu",
    )


def test_an_inserted_operation_does_not_rename_later_values(tmp_path):
    (found,) = compare(tmp_path, new={"plan": plan_of([piece(), ATTENTION, piece(more=True)])})
    assert [line for line in found.detail if line[0] != " "] == [
        "- %2 = _operator.add(%1, 1e-06)",
        "+ %new2 = %1.abs()",
        "+ %2 = _operator.add(%new2, 1e-06)",
    ]


def test_pieces_with_the_same_change_are_one_difference(tmp_path):
    (found,) = compare(tmp_path, new={"plan": plan_of([piece("torch.cos"), ATTENTION, piece("torch.cos")])})
    assert found.path == "default/pieces 0, 2"
    assert found.sentence.startswith("pieces 0, 2 of default have changed: 2 lines of the graph differ (")


def test_added_pieces_are_new(tmp_path):
    found = compare(tmp_path, new={"plan": plan_of([piece(), ATTENTION, piece(), ATTENTION, piece("torch.cos")])})
    pieces = [difference.sentence for difference in found if difference.what == "piece"]
    assert [sentence.rpartition(" (")[0] for sentence in pieces] == [
        "piece 3 of default is new",
        "piece 4 of default is new",
    ]


def test_sizes_that_only_one_side_has_are_coverage(tmp_path):
    (found,) = compare(tmp_path, new={"shapes": ("general", "num_tokens=8")})
    assert (found.what, found.path, found.old) == ("coverage", "default/num_tokens=8/pieces 0, 2", None)
    assert found.new == {"shape": {"num_tokens": (8, 8)}, "adaptor": "eager", "tuned": False, "pieces": [0, 2]}
    assert found.sentence == "pieces 0, 2 of default for num_tokens=8 by eager: only in the second"


def test_a_changed_artifact_is_reported_with_digest_and_size(tmp_path):
    (found,) = compare(tmp_path, new={"data": b"other code"})
    assert (found.what, found.path) == ("artifact", "default/general/pieces 0, 2")
    assert found.new["size_bytes"] - found.old["size_bytes"] == 6
    assert found.sentence == (
        f"the artifact of pieces 0, 2 of default for general by eager was {found.old['digest'][:10]} "
        f"({found.old['size_bytes']} bytes) and is {found.new['digest'][:10]} ({found.new['size_bytes']} bytes) now"
    )


def test_a_missing_proof_is_a_difference(tmp_path):
    (found,) = compare(tmp_path, new={"proved": False})
    assert found.sentence == ("the artifact of pieces 0, 2 of default for general by eager was proved and is not now")


def test_equal_numbers_of_pieces_are_compared_by_position(tmp_path):
    old, new = plan_of([piece(), ATTENTION, piece("torch.cos")]), plan_of([piece("torch.cos"), ATTENTION, piece()])
    found = compare(tmp_path, old={"plan": old}, new={"plan": new})
    assert [difference.path for difference in found] == ["default/piece 0", "default/piece 2"]
    assert all(difference.old and difference.new for difference in found)


def test_an_op_precedes_a_configuration_field(tmp_path):
    new = {"factors": {"ops": {"toy::attention": "1" * 64}, "config": {"level": 2, "adaptor": "eager"}}}
    old = {"factors": {"ops": {"toy::attention": "0" * 64}}}
    paths = [difference.path for difference in compare(tmp_path, old=old, new=new)]
    assert paths == ["ops.toy::attention", "config.level"]


def test_a_fallback_is_reported_with_its_reason(tmp_path):
    fallback = Fallback(variant=0, piece_index=2, shape={}, adaptor="eager", reason="g++ crashed")
    (found,) = compare(tmp_path, new={"fallbacks": (fallback,)})
    assert found.what == "fallback"
    assert found.sentence == "piece 2 of default (general) falls back to eager now and did not before: g++ crashed"
    assert (found.old, found.new) == (None, {"adaptor": "eager", "reason": "g++ crashed"})


def test_ranks_of_one_side_are_coverage_and_shared_ranks_are_compared(tmp_path):
    for rank in (0, 1):
        old = lay(tmp_path / "old", rank=rank)
    lay(tmp_path / "new", rank=1, data=b"other")
    new = lay(tmp_path / "new", rank=2)
    assert [(difference.what, difference.path) for difference in compare_entries(old, new)] == [
        ("coverage", "rank_0/backbone"),
        ("coverage", "rank_2/backbone"),
        ("artifact", "rank 1 backbone: default/general/pieces 0, 2"),
    ]


def test_a_torn_plan_is_an_error(tmp_path):
    old, new = lay(tmp_path / "old"), lay(tmp_path / "new", data=b"other")
    path = new.layout.rank_dir(new.parts[0, "backbone"].name) / PLAN_FILE
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CacheCorruptError, match=r"plan\.json"):
        compare_entries(old, new)


def test_a_newer_schema_is_an_error(tmp_path):
    old, new = lay(tmp_path / "old"), lay(tmp_path / "new", factors={"triton": "3"})
    path = new.layout.key_file(new.hash)
    path.write_bytes(sealed({**json.loads(path.read_bytes()), "record": "key-99"}))
    with pytest.raises(CacheSchemaError, match="99"):
        compare_entries(old, new)


def test_eighty_layers_are_compared_in_half_a_second(tmp_path):
    def model(value):
        graphs = [graph for i in range(80) for graph in (piece(eps="1e-06" if i else value), ATTENTION)]
        own = tuple(
            Guard(source=f"self.layers.{layer}.part{part}.eps", kind="value", expected=["f", value])
            for layer in range(80)
            for part in range(40)
        )
        text = GRAPH_TEXT * 800
        return {"plan": plan_of(graphs, model_guards=own), "graph_text": text, "factors": {"sources": {"toy": value}}}

    old, new = lay(tmp_path / "old", **model("1e-06")), lay(tmp_path / "new", **model("1e-05"))
    secs = []
    for _ in range(3):  # even CPU time grows on a busy machine
        began = time.process_time()
        found = compare_entries(old, new)
        secs.append(time.process_time() - began)
    assert min(secs) < 0.5
    assert [difference.what for difference in found] == ["source", "guard", "piece"]
