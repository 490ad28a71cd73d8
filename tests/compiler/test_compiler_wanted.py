"""The artifacts that a plan needs: sizes, ranges, size_dim, variants, eager pieces; and errors for invalid sizes."""

from __future__ import annotations

import pytest

from cgtool.compiler.wanted import wanted
from cgtool.config import CompilationConfig
from cgtool.errors import UsageError
from cgtool.plan.pieces import Node, PieceGraph, SymbolRange, TensorMeta
from cgtool.plan.records import Input, Plan, Step, Variant
from cgtool.plan.shapes import of_sizes, shape_text
from cgtool.store.records import Fallback


def graph(*sizes):
    """Return a graph with one op on a tensor of these sizes, numbers or symbols."""
    symbols = tuple(SymbolRange(name=s, min=2, max=None) for s in sizes if isinstance(s, str))
    meta = TensorMeta(dtype="float32", shape=(*sizes, 4), stride=(*[1] * len(sizes), 1), device="cpu")
    node = Node(kind="function", target="torch.tanh", args=("%0",), kwargs={})
    return PieceGraph(
        symbols=symbols, facts=(), inputs=(meta,), aliases=(), nodes=(node,), outputs=("%1",), results=(meta,), ops={}
    )


def variant(dims, fixed, bounds):
    """Return a variant of three pieces, the second of which is splitting."""
    free = [name for name in dims if name not in fixed]
    symbols = {name: f"s{i}" for i, name in enumerate(free)}
    piece = graph(*(fixed.get(name, symbols.get(name)) for name in dims))
    identity = "".join(map(str, sorted(fixed.items()))) or "general"
    renamed = {s: s for s in symbols.values()}
    steps = [
        Step(piece=n, splitting=n == 1, graph=identity, symbols=renamed, inputs=(n,), outputs=(n + 1,))
        for n in range(3)
    ]
    made = Variant(
        name="default",
        fixed=fixed,
        dims={name: (symbols[name],) for name in free},
        symbols=tuple(SymbolRange(name=symbols[n], min=bounds[n][0], max=bounds[n][1]) for n in free),
        relations=(),
        inputs=(Input(source="arg:x", meta=piece.inputs[0]),),
        model_guards=(),
        call_guards=(),
        steps=tuple(steps),
        output=["v", 3],
    )
    return made, {identity: piece}


def plan_of(dims, *fixed_sets, **bounds):
    variants, graphs = [], {}
    for fixed in fixed_sets:
        made, found = variant(dims, fixed, {name: bounds.get(name, (2, None)) for name in dims})
        variants.append(made)
        graphs.update(found)
    return Plan(method="forward", qualname="m:M", variants=tuple(variants), graphs=graphs)


ONE = plan_of(["n"], {}, {"n": 1})
TWO = plan_of(["batch", "seq"], {}, {"batch": 1}, {"seq": 1}, {"batch": 1, "seq": 1})
NONE = plan_of([], {})


def shapes(plan, **fields):
    found = [[] for _ in plan.variants]
    for work in wanted(plan, CompilationConfig(adaptor="eager", **fields)):
        if work.piece_index == 0:
            found[work.variant].append(shape_text(work.shape))
    return found


#: A model that accepts 4 to 64 accepts two of these sizes.
CAPTURED = {"cudagraph_capture_sizes": [2, 4, 64, 128]}
SHAPES = [
    (ONE, {}, [["general"], ["n=1"]]),
    (NONE, {}, [["general"]]),
    (TWO, {}, [["general"], ["batch=1"], ["seq=1"], ["batch=1:seq=1"]]),
    (ONE, {"compile_sizes": [8, 2, 8]}, [["general", "n=2", "n=8"], ["n=1"]]),
    (ONE, {"compile_sizes": [1]}, [["general"], ["n=1"]]),
    (ONE, {"compile_sizes": [{"n": 8}]}, [["general", "n=8"], ["n=1"]]),
    (ONE, {"compile_sizes": [{"n": 8}, 8]}, [["general", "n=8"], ["n=1"]]),
    (ONE, {"compile_sizes": [8], "size_dim": "n"}, [["general", "n=8"], ["n=1"]]),
    (
        ONE,
        {"compile_sizes": ["cudagraph_capture_sizes"], "cudagraph_capture_sizes": [2, 4]},
        [["general", "n=2", "n=4"], ["n=1"]],
    ),
    (
        plan_of(["n"], {}, n=(4, 64)),
        {"compile_sizes": ["cudagraph_capture_sizes"], **CAPTURED},
        [["general", "n=4", "n=64"]],
    ),
    (ONE, {"compile_ranges": [[2, 16], [17, 64]]}, [["general", "n=2-16", "n=17-64"], ["n=1"]]),
    (ONE, {"compile_ranges": [[1, 16]]}, [["general", "n=1-16"], ["n=1"]]),
    (plan_of(["n"], {}, n=(4, 64)), {"compile_ranges": [[2, 8], [32, 999]]}, [["general", "n=2-8", "n=32-999"]]),
    (ONE, {"compile_sizes": [8], "compile_ranges": [[2, 16]]}, [["general", "n=8", "n=2-16"], ["n=1"]]),
    (
        TWO,
        {"compile_sizes": [{"batch": 2, "seq": 8}, {"batch": 1, "seq": 8}]},
        [["general", "batch=2:seq=8"], ["batch=1", "batch=1:seq=8"], ["seq=1"], ["batch=1:seq=1"]],
    ),
    (
        TWO,
        {"compile_sizes": [8], "size_dim": "seq"},
        [["general", "seq=8"], ["batch=1"], ["seq=1"], ["batch=1:seq=1"]],
    ),
    (
        TWO,
        {"compile_ranges": [[2, 16]], "size_dim": "seq"},
        [["general", "seq=2-16"], ["batch=1", "batch=1:seq=2-16"], ["seq=1"], ["batch=1:seq=1"]],
    ),
]


@pytest.mark.parametrize(("plan", "fields", "expected"), SHAPES)
def test_the_shapes_of_each_variant(plan, fields, expected):
    assert shapes(plan, **fields) == expected


def test_a_compile_size_that_equals_a_variant_tunes_it():
    work = wanted(ONE, CompilationConfig(compile_sizes=[1, 8]))
    assert [(shape_text(w.shape), w.tuned) for w in work if w.piece_index == 0] == [
        ("general", False),
        ("n=8", True),
        ("n=1", True),
    ]


MEANINGLESS = [
    (NONE, {"compile_sizes": [8]}, r"no dynamic dimension, so the compile size 8 cannot apply"),
    (NONE, {"compile_ranges": [[2, 8]]}, r"compile_ranges needs a dynamic dimension, and this model has none"),
    (NONE, {"compile_sizes": [{"n": 8}]}, r"names the dimension 'n'; this model's dynamic dimensions are: none"),
    (ONE, {"compile_sizes": [{"m": 8}]}, r"names the dimension 'm'; this model's dynamic dimensions are: n\."),
    (ONE, {"compile_sizes": [8], "size_dim": "m"}, r"size_dim is 'm'; this model's dynamic dimensions are: n\."),
    (TWO, {"compile_sizes": [8]}, r"2 dynamic dimensions \(batch, seq\).*compile size 8.*size_dim.*\"batch\": 8"),
    (TWO, {"compile_ranges": [[2, 8]]}, r"2 dynamic dimensions .*the range \[2, 8\] is ambiguous"),
    (TWO, {"compile_sizes": [8], "size_dim": "n"}, r"size_dim is 'n'; this model's dynamic dimensions are: batch, seq"),
    (plan_of(["n"], {}, n=(4, 64)), {"compile_sizes": [2]}, r"No variant of this model accepts n=2"),
    (plan_of(["n"], {}, n=(4, 64)), {"compile_sizes": [65]}, r"No variant of this model accepts n=65"),
    (plan_of(["n"], {}), {"compile_sizes": [1]}, r"No variant of this model accepts n=1"),
    (plan_of(["n"], {}, n=(4, 64)), {"compile_ranges": [[65, 128]]}, r"accepts n=65-128: `dynamic` or the model's"),
]


@pytest.mark.parametrize(("plan", "fields", "message"), MEANINGLESS)
def test_sizes_and_ranges_that_do_not_apply_are_errors(plan, fields, message):
    with pytest.raises(UsageError, match=message):
        wanted(plan, CompilationConfig(adaptor="eager", **fields))


def rows(plan, *fallbacks, **fields):
    return wanted(plan, CompilationConfig(**fields), fallbacks)


def test_every_compiled_piece_of_every_variant_and_shape_is_needed_once():
    work = rows(ONE, compile_sizes=[8])
    assert [(w.variant, w.piece_index, shape_text(w.shape)) for w in work] == [
        (0, 0, "general"),
        (0, 2, "general"),
        (0, 0, "n=8"),
        (0, 2, "n=8"),
        (1, 0, "n=1"),
        (1, 2, "n=1"),
    ]
    assert all(w.adaptor == "aot_inductor" for w in work)
    assert [w.is_base for w in work] == [True, True, False, False, True, True]
    assert [w.tuned for w in work] == [False, False, True, True, False, False]


def test_graphs_are_specialized_to_their_shapes():
    work = {shape_text(w.shape): w.graph for w in rows(ONE, compile_sizes=[8], compile_ranges=[[2, 16]])}
    assert work["general"].symbols == (SymbolRange(name="s0", min=2, max=None),)
    assert work["n=8"].symbols == ()
    assert work["n=8"].inputs[0].shape == (8, 4)
    assert work["n=2-16"].symbols == (SymbolRange(name="s0", min=2, max=16),)
    assert work["n=1"].inputs[0].shape == (1, 4)


def test_an_eager_piece_needs_one_artifact_for_all_sizes():
    fallback = Fallback(variant=0, piece_index=2, shape={}, adaptor="eager", reason="it draws random numbers")
    work = rows(ONE, fallback, compile_sizes=[1, 8], compile_ranges=[[2, 16]])
    found = [(shape_text(w.shape), w.adaptor, w.tuned) for w in work if (w.variant, w.piece_index) == (0, 2)]
    assert found == [("general", "eager", False)]
    assert {w.adaptor for w in work if (w.variant, w.piece_index) != (0, 2)} == {"aot_inductor"}


def test_a_fallback_at_one_size_uses_its_adaptor_only_there():
    fallback = Fallback(
        variant=0, piece_index=2, shape=of_sizes({"n": 8}), adaptor="inductor_standalone", reason="no kernel"
    )
    found = {(w.piece_index, shape_text(w.shape)): w.adaptor for w in rows(ONE, fallback, compile_sizes=[8])}
    assert found.pop((2, "n=8")) == "inductor_standalone"
    assert set(found.values()) == {"aot_inductor"}


def test_a_further_size_adds_only_that_size():
    before = {(w.variant, w.piece_index, shape_text(w.shape)) for w in rows(TWO, compile_sizes=[{"seq": 8}])}
    after = {
        (w.variant, w.piece_index, shape_text(w.shape)) for w in rows(TWO, compile_sizes=[{"seq": 8}, {"batch": 4}])
    }
    assert before < after
    assert {shape for _, _, shape in after - before} == {"batch=4"}
