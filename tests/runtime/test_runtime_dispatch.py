"""A concrete size wins over a range, and a range over the general shape; the choice is made once per call."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import hand_plans as hand
import pytest
import torch

from cgtool.errors import ArtifactError, GuardError
from cgtool.plan.shapes import dispatch_order, parse_shape, shape_text
from cgtool.runtime.call import LoadedModel
from cgtool.runtime.dispatch import Choice, PiecewiseBackend, ShapeTable, Unopened
from cgtool.runtime.op_by_op import piece_function

pytestmark = pytest.mark.torch


def named(name):
    return lambda _args: [name]


def choices(functions):
    """Choices by the text of their shapes, whose dimensions are symbols, in order of preference."""
    shapes = sorted(map(parse_shape, functions), key=dispatch_order)
    return [Choice(shape=shape, bounds=shape, function=functions[shape_text(shape)]) for shape in shapes]


BACKEND = PiecewiseBackend(
    general=named("general"),
    choices=choices({text: named(text) for text in ("s0=8", "s0=8:s1=2", "s0=4-16", "s0=17-99")}),
)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((3, 1), "general"),
        ((4, 1), "s0=4-16"),
        ((16, 9), "s0=4-16"),
        ((17, 9), "s0=17-99"),
        ((100, 9), "general"),
        ((8, 1), "s0=8"),
        ((8, 2), "s0=8:s1=2"),
    ],
)
def test_the_most_specific_function_is_chosen(sizes, expected):
    table = ShapeTable(["s0", "s1"], [BACKEND, PiecewiseBackend(general=named("same"))])
    for _ in range(2):
        assert [function([])[0] for function in table.choose(sizes)] == [expected, "same"]


def test_without_sizes_all_calls_share_one_table():
    table = ShapeTable(["s0"], [PiecewiseBackend(general=named("a"))] * 3)
    assert table.choose((5,)) is table.choose((6,))


def test_sizes_that_were_not_compiled_are_refused_and_named():
    model = hand.Model()
    plan = hand.plan()
    functions = {key: backend.general for key, backend in hand.opened(plan).items()}
    opened = {
        key: PiecewiseBackend(general=None, choices=choices({"s0=8": f, "s0=16-32": f})) for key, f in functions.items()
    }
    loaded = LoadedModel(model, plan, opened)
    with torch.no_grad():
        for rows in (8, 16, 32):
            x = torch.randn(rows, hand.WIDTH)
            assert torch.equal(loaded(x), model(x))
        with pytest.raises(GuardError, match=r"this call's sizes were not compiled \(compiled sizes: s0=16-32, s0=8"):
            loaded(torch.randn(9, hand.WIDTH))


def test_a_call_goes_to_the_next_variant_if_one_lacks_the_size():
    model = hand.Model()
    plan = hand.plan(hand.variant(name="sizes only"), hand.variant())
    used = []

    def noted(index, graph):
        function = piece_function(graph)

        def run(args):
            used.append(index)
            return function(args)

        return run

    opened = {}
    for index, item in enumerate(plan.variants):
        for step in item.steps:
            if not step.splitting:
                f = noted(index, plan.graphs[step.graph])
                opened[index, step.piece] = (
                    PiecewiseBackend(general=f)
                    if index
                    else PiecewiseBackend(general=None, choices=choices({"s0=8": f}))
                )
    loaded = LoadedModel(model, plan, opened)
    with torch.no_grad():
        loaded(torch.randn(8, hand.WIDTH))
        loaded(torch.randn(7, hand.WIDTH))
    assert used == [0, 0, 1, 1]


def test_a_function_is_opened_once_and_only_when_it_is_chosen():
    opened = []

    def later(name):
        return Unopened(lambda: opened.append(name) or named(name))

    table = ShapeTable(["s0"], [PiecewiseBackend(general=later("general"), choices=choices({"s0=8": later("8")}))])
    assert opened == []
    assert [function([]) for function in table.choose((8,))] == [["8"]]
    assert opened == ["8"]
    assert [table.choose((size,))[0]([]) for size in (3, 4, 8)] == [["general"], ["general"], ["8"]]
    assert opened == ["8", "general"]


def test_a_function_that_cannot_be_opened_raises_every_time():
    def refuse():
        raise ArtifactError("Torch could not open a package: no room.")

    table = ShapeTable(["s0"], [PiecewiseBackend(general=Unopened(refuse), choices=choices({"s0=8": named("8")}))])
    for _ in range(2):
        with pytest.raises(ArtifactError, match="could not open a package: no room"):
            table.choose((3,))
    assert table.choose((8,)) is not None


def test_concurrent_threads_get_the_same_function():
    def slowly():
        time.sleep(0.1)
        return named("one")

    function = Unopened(slowly)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: function.open(), range(4)))
    assert found == [found[0]] * 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_while_a_function_is_opened_does_not_block_the_child():
    parent, begun, go_on = os.getpid(), threading.Event(), threading.Event()

    def in_parent_slowly():
        if os.getpid() == parent:
            begun.set()
            go_on.wait(30)
        return named("one")

    function = Unopened(in_parent_slowly)
    thread = threading.Thread(target=function.open)
    thread.start()
    begun.wait(30)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends a child that hangs, which then does not exit with 7
        os._exit(7 if function.open()([]) == ["one"] else 1)
    _, status = os.waitpid(child, 0)
    go_on.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 7


def raising_at(event_number):
    """A profiler that raises where a signal handler could: on entry to a function, or on return from a C function."""
    seen = 0

    def profile(_frame, event, _argument):
        nonlocal seen
        seen += event in {"call", "c_return"}
        if seen == event_number:
            sys.setprofile(None)
            raise KeyboardInterrupt

    return profile


def test_ctrl_c_while_a_function_is_opened_does_not_block_other_threads():
    for event_number in range(1, 100):
        function = Unopened(lambda: named("one"))
        try:
            sys.setprofile(raising_at(event_number))
            function.open()
        except KeyboardInterrupt:
            found = []
            other = threading.Thread(target=lambda: found.append(function.open()([])), daemon=True)  # noqa: B023
            other.start()
            other.join(20)
            assert found == [["one"]]
        else:
            break
        finally:
            sys.setprofile(None)
    assert 1 < event_number < 99


def test_a_later_variant_is_opened_by_the_first_call_that_reaches_it():
    model = hand.Model()
    plan = hand.plan(hand.variant(), hand.one())
    opened = []

    def later(key, backend):
        return PiecewiseBackend(general=Unopened(lambda: opened.append(key[0]) or backend.general))

    loaded = LoadedModel(model, plan, {key: later(key, backend) for key, backend in hand.opened(plan).items()})
    with torch.no_grad():
        assert set(opened) == {0}
        for rows, expected in ((3, {0}), (1, {0, 1})):
            x = torch.randn(rows, hand.WIDTH)
            assert torch.equal(loaded(x), model(x))
            assert set(opened) == expected
