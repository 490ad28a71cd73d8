"""The decorator compiles instances separately, leaves classes alone, and refuses state that a graph would freeze."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

from cgtool.config import CompilationConfig
from cgtool.decorator import support_torch_compile
from cgtool.errors import GuardError, TraceError, UsageError
from cgtool.host import counters

pytestmark = pytest.mark.torch

CONFIG = CompilationConfig(adaptor="eager")


@pytest.fixture
def compiled(tmp_path):
    """Return the decorator with an empty cache."""
    return lambda **options: support_torch_compile(**{"config": CONFIG, "cache_dir": tmp_path, **options})


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    """Return the decorator with a cache that tests share."""
    root = tmp_path_factory.mktemp("shared")
    return lambda **options: support_torch_compile(**{"config": CONFIG, "cache_dir": root, **options})


class Scale(nn.Module):
    """x·w, plus bias if given."""

    def __init__(self, value=2.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), value), requires_grad=False)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = x * self.weight
        return out if bias is None else out + bias


class Doubling(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def made(before):
    return {name: counters()[name] - before[name] for name in ("traces", "compiles")}


def decorated(decorator, cls=Scale):
    """Return a decorated copy of a class, so that tests do not share a class."""
    return decorator(type(cls.__name__, (cls,), {"forward": cls.forward, "__module__": __name__}))


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_each_level_equals_eager(compiled, level):
    config = CompilationConfig(level=level, adaptor="eager")
    model = decorated(compiled(config=config))().eval()
    before = counters()
    for num_tokens in (3, 5, 1, 3):
        x = torch.randn(num_tokens, 4)
        assert torch.equal(model(x), x * 2)
    assert (made(before)["traces"] > 0) is (level > 0)
    before = counters()
    model(torch.randn(7, 4))
    assert made(before) == {"traces": 0, "compiles": 0}


def test_two_instances_have_separate_weights_and_share_the_cache(compiled):
    cls = decorated(compiled())
    one, two = cls(2.0).eval(), cls(3.0).eval()
    x = torch.ones(3, 4)
    before = counters()
    assert one(x).tolist() == [[2.0] * 4] * 3
    first = made(before)
    assert two(x).tolist() == [[3.0] * 4] * 3
    assert made(before) == first, "the second is a hit"
    assert one(x).tolist() == [[2.0] * 4] * 3


def test_a_subclass_runs_its_own_forward(compiled_once):
    parent = decorated(compiled_once())
    child = type("Child", (parent,), {"forward": lambda self, x: x * self.weight - 1, "__module__": __name__})
    x = torch.ones(3, 4)
    assert child().eval()(x).tolist() == [[1.0] * 4] * 3
    assert parent().eval()(x).tolist() == [[2.0] * 4] * 3


def test_a_model_inside_another_is_traced_into_it(compiled_once):
    inner = decorated(compiled_once())

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + 1

    assert compiled_once()(Outer)().eval()(torch.ones(3, 4)).tolist() == [[3.0] * 4] * 3


def test_threads_that_call_first_together_compile_once(compiled):
    model, meet, results = decorated(compiled())().eval(), threading.Barrier(6), []
    before = counters()

    def call(value):
        meet.wait(timeout=30)
        results.append((value, model(torch.full((3, 4), value))[0, 0].item()))

    threads = [threading.Thread(target=call, args=(float(i),)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [(float(i), 2.0 * i) for i in range(6)]
    assert made(before)["compiles"] <= 2, "a general variant and one for size 1"


def test_a_failed_compile_leaves_the_class_unchanged(compiled):
    broken = [True]

    class Breaking(Scale):
        count = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if broken:
                self.count += 1
            return x * self.weight

    cls = compiled()(Breaking)
    before, model, code = dict(vars(cls)), cls().eval(), cls.forward.__code__
    with pytest.raises(TraceError):
        model(torch.ones(3, 4))
    assert dict(vars(cls)) == before
    assert cls.forward.__code__ is code
    assert model.forward(torch.ones(3, 4)).tolist() == [[2.0] * 4] * 3
    broken.clear()
    assert model(torch.ones(3, 4)).tolist() == [[2.0] * 4] * 3


def test_an_instance_still_behaves_like_a_module(compiled_once):
    model = decorated(compiled_once())().eval()
    model(torch.ones(3, 4))
    assert list(model.state_dict()) == ["weight"]
    assert [name for name, _ in model.named_parameters()] == ["weight"]
    assert model.to(torch.device("cpu")) is model
    model.load_state_dict({"weight": torch.full((4,), 5.0)})
    assert model(torch.ones(3, 4)).tolist() == [[5.0] * 4] * 3
    model.recheck()
    twin = copy.deepcopy(model)
    twin.weight.fill_(7)
    assert twin(torch.ones(3, 4)).tolist() == [[7.0] * 4] * 3
    assert model(torch.ones(3, 4)).tolist() == [[5.0] * 4] * 3


def test_a_shallow_copy_uses_its_own_tensors(compiled_once):
    """`torch.nn.DataParallel` creates such copies."""
    model = decorated(compiled_once())().eval()
    model(torch.ones(3, 4))
    twin = copy.copy(model)
    twin._parameters = {"weight": nn.Parameter(torch.full((4,), 7.0), requires_grad=False)}
    assert twin(torch.ones(3, 4)).tolist() == [[7.0] * 4] * 3
    assert model(torch.ones(3, 4)).tolist() == [[2.0] * 4] * 3


def test_a_model_in_training_mode_runs_eagerly(compiled):
    model = decorated(compiled())().train()
    before = counters()
    assert model(torch.ones(3, 4)).tolist() == [[2.0] * 4] * 3
    assert made(before) == {"traces": 0, "compiles": 0}


def test_an_optional_tensor_is_dynamic_if_it_is_passed(compiled_once):
    model = decorated(compiled_once())().eval()
    assert model(torch.ones(3, 4), torch.ones(3, 4)).tolist() == [[3.0] * 4] * 3
    assert model(torch.ones(5, 4), torch.ones(5, 4)).tolist() == [[3.0] * 4] * 5


def test_dimensions_can_be_named_or_numbered(compiled):
    cls = decorated(compiled(dynamic_arg_dims={"x": {0: "rows"}}))
    assert cls().eval()(torch.ones(3, 4)).shape == (3, 4)
    last = decorated(compiled(dynamic_arg_dims={"x": [0, -2]}))
    assert last().eval()(torch.ones(3, 4)).shape == (3, 4)


def test_a_class_without_tensor_arguments_is_refused(compiled):
    class Untyped(nn.Module):
        def forward(self, x):
            return x

    with pytest.raises(UsageError, match="no argument annotated as a tensor"):
        compiled()(Untyped)
    with pytest.raises(UsageError, match="no argument y"):
        compiled(dynamic_arg_dims={"y": 0})(Untyped)


class Stateful(nn.Module):
    """One kind of write in forward, selected by `kind`."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.register_buffer("buffer", torch.zeros(4))
        self.plain = torch.zeros(4)
        self.count = 0
        self.notes = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "buffer":
            self.buffer = self.buffer + 1
        elif self.kind == "plain tensor":
            self.plain = x[0]
        elif self.kind == "counter":
            self.count += 1
        elif self.kind == "in place":
            self.buffer.add_(1)
        elif self.kind == "local":
            notes = {}
            notes.update(last=x)
            x = notes["last"]
        return x + self.buffer


def test_state_that_a_graph_would_freeze_is_refused_and_named(compiled):
    model = decorated(compiled(), Stateful)("counter").eval()
    with pytest.raises(TraceError, match=r"changes .*count"):
        model(torch.ones(3, 4))


@pytest.mark.parametrize(
    ("kind", "second"), [("in place", 3.0), ("local", 1.0), ("buffer", 3.0), ("plain tensor", 1.0)]
)
def test_state_that_a_call_leaves_is_seen_by_the_next(compiled, kind, second):
    model = decorated(compiled(), Stateful)(kind).eval()
    model(torch.ones(3, 4))
    assert model(torch.ones(3, 4))[0, 0].item() == second


def test_gradients_are_refused_rather_than_lost(compiled_once):
    model = decorated(compiled_once())().eval().requires_grad_()
    with pytest.raises(GuardError, match="requires grad"):
        model(torch.ones(3, 4))
