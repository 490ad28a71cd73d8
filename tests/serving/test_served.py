"""A loaded model in every mode: outputs, exact counts, and no captures or compiles after start-up."""

from __future__ import annotations

import pytest
import torch
from graph_double import DoubleGraphs
from serving_models import step
from serving_traffic import LAYERS, Cached, Traffic, expected, paged_llama

import cgtool
from cgtool.config import CompilationConfig
from cgtool.errors import GraphError, UsageError
from cgtool.guards import _torch as private
from cgtool.host import counters
from cgtool.serving.model import GraphedModel

pytestmark = pytest.mark.torch

SIZES = (1, 2, 4)
CONFIG = CompilationConfig(adaptor="eager", cudagraph_capture_sizes=SIZES)
DYNAMIC = {"input_ids": {0: "num_tokens"}, "positions": {0: "num_tokens"}}


def double_into(x: torch.Tensor, output: torch.Tensor) -> None:
    torch.mul(x, 2, out=output)


cgtool.direct_register_custom_op(
    "double_into", double_into, mutates_args=["output"], namespace="serving_tests", splitting=True
)


class TwoAttentions(torch.nn.Module):
    """3·x + 1, doubled, ·5, doubled, ·7 - 1: 420·x + 139."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.full((4,), float(value)) for value in (3, 5, 7)])

    def forward(self, input_ids, positions):
        y = input_ids[:, None] * self.weights[0] + 1
        output = torch.empty_like(y)
        torch.ops.serving_tests.double_into(y, output)
        z = output * self.weights[1]
        output = torch.empty_like(z)
        torch.ops.serving_tests.double_into(z, output)
        return output * self.weights[2] - 1


def test_two_attentions_are_five_pieces_three_compiles_and_six_captures_for_two_sizes(tmp_path):
    module = TwoAttentions().eval().requires_grad_(requires_grad=False)
    config = CompilationConfig(adaptor="eager", cudagraph_mode="PIECEWISE", cudagraph_capture_sizes=[2, 4])
    at_least_two = {name: {0: ("num_tokens", 2, 64)} for name in DYNAMIC}
    before = counters()
    model = cgtool.compile(
        module, example_args=(torch.arange(8), torch.arange(8)), dynamic=at_least_two, config=config, cache_dir=tmp_path
    )
    assert (delta(before)["compiles"], delta(before)["captures"]) == (3, 0)
    assert [step.splitting for step in model.plan.variants[0].steps] == [False, True, False, True, False]
    runner = Cached(model, "cpu", config=config)
    before = counters()
    runner.capture()
    assert (delta(before)["captures"], delta(before)["replays"]) == (6, 0)
    for tokens in ([1, 2], [3, 4, 5], [6, 7, 8, 9]):
        requests = [cgtool.Request(token_ids=[token], num_computed=0, blocks=[i + 1]) for i, token in enumerate(tokens)]
        assert runner.run(requests)[:, 0].tolist() == [420.0 * token + 139 for token in tokens]
    assert delta(before) == NOTHING | {"captures": 6, "replays": 9}


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    """The model, a cache that has it, and the counters of creating the cache."""
    root, module = tmp_path_factory.mktemp("served"), paged_llama()
    before = counters()
    cgtool.compile(
        module,
        example_args=(torch.arange(8), torch.arange(8)),
        dynamic=DYNAMIC,
        config=CONFIG,
        cache_dir=root,
    )
    made = {name: value - before[name] for name, value in counters().items()}
    return module, root, made


@pytest.fixture
def double_is_unseen(monkeypatch):
    """Make guards ignore the dispatch mode that the double records with; CUDA graphs do not use one."""
    monkeypatch.setitem(private.SETTINGS, "torch_dispatch_mode", private.Setting("dispatch modes", lambda: 0, ()))


@pytest.fixture
def loaded(warmed, double_is_unseen):
    module, root, _ = warmed
    return module, cgtool.load(module, config=CONFIG, cache_dir=root)


NOTHING = dict.fromkeys(("traces", "compiles", "opens", "captures", "replays", "eager_calls"), 0)


def delta(before):
    return {name: value - before[name] for name, value in counters().items()}


def test_a_decoder_needs_three_compiles_per_variant(warmed):
    _, _, made = warmed
    assert made["compiles"] == 3 * 2, "a variant for a single token, and one for more"
    assert made["traces"] >= 2
    assert (made["captures"], made["replays"]) == (0, 0)


@pytest.mark.parametrize(
    ("mode", "captures"),
    [
        ("NONE", 0),
        ("PIECEWISE", len(SIZES) * (LAYERS + 1)),
        ("FULL_DECODE_ONLY", len(SIZES)),
        ("FULL_AND_PIECEWISE", len(SIZES) * (LAYERS + 2)),
    ],
)
def test_every_mode_equals_running_whole_sequences_and_captures_nothing_after_start_up(loaded, mode, captures):
    module, model = loaded
    runner = Cached(model, "cpu", config=CONFIG.replace(cudagraph_mode=mode))
    assert runner.mode_reasons == ()
    before = counters()
    runner.capture()
    assert delta(before)["captures"] == captures
    assert delta(before)["traces"] == delta(before)["compiles"] == delta(before)["replays"] == 0
    before, traffic, replays = counters(), Traffic(runner.limits), 0
    for _ in range(60):
        requests, wholes = traffic.step()
        torch.testing.assert_close(runner.run(requests), expected(module, requests, wholes), rtol=1e-4, atol=1e-4)
        num_tokens = sum(len(request.token_ids) for request in requests)
        if num_tokens == len(requests) and mode.startswith("FULL"):
            replays += 1
        elif num_tokens <= max(SIZES) and "PIECEWISE" in mode:
            replays += LAYERS + 1
    assert delta(before) == NOTHING | {"replays": replays}


def test_full_is_lowered_to_what_attention_supports(loaded):
    _, model = loaded
    runner = Cached(model, "cpu", config=CONFIG.replace(cudagraph_mode="FULL"))
    assert runner.dispatcher.mode.name == "FULL_AND_PIECEWISE"
    assert "not for mixed batches" in runner.mode_reasons[0]


#: Level 3 is the default, which the tests above use.
@pytest.mark.usefixtures("double_is_unseen")
@pytest.mark.parametrize(
    ("level", "expected_counts"),
    [
        (0, (0, "FULL_DECODE_ONLY", len(SIZES))),
        (1, (2, "FULL_DECODE_ONLY", len(SIZES))),
        (2, (2, "FULL_DECODE_ONLY", len(SIZES))),
    ],
)
def test_each_lower_level_compiles_and_captures_whole_graphs(level, expected_counts, tmp_path):
    config, module = CONFIG.replace(level=level), paged_llama()
    before = counters()
    model = cgtool.compile(
        module, example_args=(torch.arange(8), torch.arange(8)), dynamic=DYNAMIC, config=config, cache_dir=tmp_path
    )
    compiles = delta(before)["compiles"]
    runner = Cached(model, "cpu", config=config)
    before = counters()
    runner.capture()
    assert (compiles, runner.dispatcher.mode.name, delta(before)["captures"]) == expected_counts
    before, traffic = counters(), Traffic(runner.limits)
    for _ in range(10):
        requests, wholes = traffic.step()
        torch.testing.assert_close(runner.run(requests), expected(module, requests, wholes), rtol=1e-4, atol=1e-4)
    assert [name for name, number in delta(before).items() if number] == ["replays"]


def test_context_batches_have_separate_sizes(loaded):
    module, model = loaded
    runner = Cached(model, "cpu", config=CONFIG, context_sizes=(8, 16, 24))
    runner.capture()
    assert (runner.dispatcher.sizes, runner.dispatcher.decode_sizes) == ((8, 16, 24), SIZES)
    before, traffic = counters(), Traffic(runner.limits, seed=1)
    for _ in range(30):
        requests, wholes = traffic.step()
        torch.testing.assert_close(runner.run(requests), expected(module, requests, wholes), rtol=1e-4, atol=1e-4)
    assert delta(before)["replays"] > 30
    assert delta(before)["captures"] == 0


def test_an_op_that_returns_its_result_is_refused_unless_inputs_are_copied(tmp_path):
    class Attending(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(8, 8)

        def forward(self, input_ids, positions):
            x = self.inner(torch.nn.functional.one_hot(input_ids, 8).float())
            x = torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0]
            return self.inner(x) + positions[:, None]

    module = Attending().eval().requires_grad_(requires_grad=False)
    model = cgtool.compile(
        module, example_args=(torch.arange(8) % 8, torch.arange(8)), dynamic=DYNAMIC, config=CONFIG, cache_dir=tmp_path
    )
    piecewise = CONFIG.replace(cudagraph_mode="PIECEWISE")
    with pytest.raises(UsageError, match=r"of piece 2 is returned by .*scaled_dot_product_attention"):
        Cached(model, "cpu", config=piecewise).capture()


SHIFT = torch.full((4,), 11.0)


class ReadsTensors(torch.nn.Module):
    """Reads tensors from all the places where models keep them."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("buffer", torch.full((4,), 2.0))
        self.plain = torch.full((4,), 3.0)
        self.listed = [torch.full((4,), 5.0)]
        self.by_name = {"scale": torch.full((4,), 7.0)}

    def forward(self, x):
        return (self.linear(x) * self.buffer * self.plain + self.listed[0]) * self.by_name["scale"] + SHIFT


def swap(module, place):
    """Replace a tensor of the model or of this module's globals; return its name in errors."""
    if place == "parameter":
        module.linear.weight = torch.nn.Parameter(torch.ones(4, 4), requires_grad=False)
        return "linear.weight"
    if place == "listed":
        module.listed[0] = torch.ones(4)
        return r"listed\[0\]"
    if place == "by_name":
        module.by_name["scale"] = torch.ones(4)
        return r'by_name\["scale"\]'
    if place == "global":
        globals()["SHIFT"] = torch.ones(4)
        return f"{__name__}.SHIFT"
    setattr(module, place, torch.ones(4))
    return place


@pytest.fixture(scope="module")
def tensors_cache(tmp_path_factory):
    """A cache that is filled by the first test for each level."""
    return tmp_path_factory.mktemp("tensors")


@pytest.mark.usefixtures("double_is_unseen")
@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.parametrize("place", ["parameter", "buffer", "plain", "listed", "by_name", "global"])
def test_a_full_graph_is_not_replayed_after_a_tensor_was_replaced(tensors_cache, monkeypatch, level, place):
    monkeypatch.setitem(globals(), "SHIFT", torch.full((4,), 11.0))
    module, x = ReadsTensors().eval().requires_grad_(requires_grad=False), torch.ones(2, 4)
    config = CompilationConfig(adaptor="eager", level=level)
    model = cgtool.compile(module, example_args=(x,), config=config, cache_dir=tensors_cache)
    graphed = GraphedModel(model, backend=DoubleGraphs(), piecewise=False)
    with step("FULL", 2, capturing=True):
        graphed(x)
    for tensor in (module.buffer, module.plain, module.listed[0], module.by_name["scale"], SHIFT):
        tensor.mul_(2)
    with step("FULL", 2):
        torch.testing.assert_close(graphed(x), module(x))
        name = swap(module, place)
        with pytest.raises(GraphError, match=f"^{name} was replaced after the model was captured"):
            graphed(x)
    graphed.clear()
    with step("FULL", 2, capturing=True):
        graphed(x)
    with step("FULL", 2):
        torch.testing.assert_close(graphed(x), module(x))
