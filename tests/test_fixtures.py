"""The example models: each traces to one graph that covers every size."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from cgtool.models import resolve_model
from cgtool.ops import registered_splitting_ops

pytestmark = pytest.mark.torch

FOLDER = Path(__file__).parent.parent / "fixtures"
#: The default number of layers of each model.
MODELS = {"tiny_llama": 4, "tiny_moe": 2, "tiny_encoder": 2, "tiny_vision": 2}
ATTENTION = "cgtool_fixtures::attention_with_output"


def build(name, *, weights="real", **arguments):
    return resolve_model(f"{FOLDER / name}.py:build", factory_args=arguments, weights=weights)


def bound(spec):
    """The example's arguments by name."""
    call = spec.calls[0]
    return inspect.signature(getattr(spec.module, spec.method)).bind(*call.args, **call.kwargs).arguments


def resized(spec, sizes):
    """Arguments like the example's with other sizes of named dimensions, filled with a pattern."""
    arguments = {}
    for name, tensor in bound(spec).items():
        dims = {index: dim if isinstance(dim, str) else dim[0] for index, dim in spec.dynamic[name].items()}
        shape = [sizes[dims[index]] if index in dims else size for index, size in enumerate(tensor.shape)]
        numel = torch.Size(shape).numel()
        if name == "positions":
            arguments[name] = torch.arange(numel)
        elif name == "attention_mask":
            # Each row keeps at least one token, and the first rows keep different numbers of tokens.
            arguments[name] = (torch.arange(shape[1]) <= torch.arange(shape[0]).unsqueeze(1)).to(torch.int64)
        elif tensor.is_floating_point():
            arguments[name] = torch.linspace(-2, 3, numel, dtype=tensor.dtype).cos().view(shape)
        else:
            arguments[name] = ((torch.arange(numel) * 11 + 5) % 256).view(shape)
    return arguments


def leaves(value):
    """The tensors of a nested output, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return [leaf for field in dataclasses.fields(value) for leaf in leaves(getattr(value, field.name))]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    return [leaf for item in value for leaf in leaves(item)]


def assert_close(actual, expected):
    actual, expected = leaves(actual), leaves(expected)
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


class Recorder:
    """A backend that records the graphs and the guards on sizes."""

    def __init__(self):
        self.graphs = []
        self.guards = []

    def __call__(self, gm, _inputs):
        self.graphs.append(gm)
        shape_env = torch._guards.TracingContext.get().fake_mode.shape_env
        self.guards += [str(guard.expr) for guard in shape_env.guards]
        return gm


@cache
def traced(name):
    """The graphs and guards of a model with real weights and its default arguments."""
    return trace(build(name))


def trace(spec, arguments=None, mode=None):
    recorder = Recorder()
    arguments = bound(spec) if arguments is None else arguments
    for name, dims in spec.dynamic.items():
        for index in dims:
            if arguments[name].shape[index] > 1:
                torch._dynamo.mark_dynamic(arguments[name], index)
    torch._dynamo.reset()
    with torch.no_grad(), torch.fx.experimental._config.patch(use_duck_shape=False):
        compiled = torch.compile(spec.module.forward, backend=recorder, fullgraph=True)
        if mode is None:
            compiled(**arguments)
        else:
            with mode:
                compiled(**arguments)
    return recorder


def text_of(gm):
    """The graph as text without the types of placeholders, which differ between fake and real weights."""
    for node in gm.graph.nodes:
        node.type = None
    return str(gm.graph)


def attention_nodes(graph):
    return [
        node
        for node in graph.nodes
        if "attention_with_output" in str(node.target) or "scaled_dot_product_attention" in str(node.target)
        if node.op == "call_function"
    ]


@pytest.mark.parametrize("name", MODELS)
def test_weights_depend_on_the_seed_and_not_on_the_global_generator(name):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = build(name), build(name), build(name, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    for (key, one), two in zip(first.module.state_dict().items(), again.module.state_dict().values(), strict=True):
        assert torch.equal(one, two), key
    drawn = [key for key, value in first.module.state_dict().items() if value.unique().numel() > 1]
    assert drawn
    assert not any(torch.equal(first.module.state_dict()[key], other.module.state_dict()[key]) for key in drawn)


@pytest.mark.parametrize("name", MODELS)
def test_fake_and_real_weights_trace_to_the_same_graph(name):
    fake = build(name, weights="fake")
    tensors = [*fake.module.parameters(), *fake.module.buffers(), *bound(fake).values()]
    modes = {id(tensor.fake_mode) for tensor in tensors}  # a real tensor has no such attribute
    assert len(modes) == 1
    recorded = trace(fake, mode=tensors[0].fake_mode)
    assert len(recorded.graphs) == 1
    assert text_of(recorded.graphs[0]) == text_of(traced(name).graphs[0])


@pytest.mark.parametrize("name", MODELS)
def test_it_traces_to_one_graph_with_an_attention_per_layer_and_no_guards_on_sizes(name):
    recorded = traced(name)
    assert len(recorded.graphs) == 1
    assert len(attention_nodes(recorded.graphs[0].graph)) == MODELS[name]
    # Only equality of dimensions with one name, and the length of the encoder's position table, 128, are guarded.
    others = [guard for guard in recorded.guards if not guard.startswith("Eq(s")]
    assert [guard.split(" ", 1)[1] for guard in others] == (["<= 128"] if name == "tiny_encoder" else [])
    assert all(
        guard.removeprefix("Eq(").replace(", ", "").replace("s", "").rstrip(")").isdigit()
        for guard in recorded.guards
        if guard not in others
    )


ONES = {
    "tiny_llama": [{"num_tokens": 1}],
    "tiny_moe": [{"num_tokens": 1}],
    "tiny_encoder": [{"batch": 1, "seq": 9}, {"batch": 4, "seq": 1}, {"batch": 1, "seq": 1}],
    "tiny_vision": [{"batch": 1}],
}


@pytest.mark.parametrize("name", MODELS)
def test_the_dtype_applies_to_weights_and_output(name):
    spec = build(name, dtype="bfloat16")
    assert {parameter.dtype for parameter in spec.module.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        output = spec.module(**bound(spec))
    assert {leaf.dtype for leaf in leaves(output)} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_moe"])
def test_all_pieces_between_two_attentions_are_equal(name):
    graph = trace(build(name, num_layers=3)).graphs[0].graph
    segments, lines, ids = [], [], {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node in attention_nodes(graph):
            segments.append(lines)
            lines, ids = [], {}
            continue

        def spelled(other, ids=ids):
            return f"%{ids.setdefault(other, len(ids))}"

        lines.append(str((node.target, torch.fx.map_arg((node.args, node.kwargs), spelled))))
        ids.setdefault(node, len(ids))
    assert len(segments) == 3
    assert len(segments[1]) > 10
    assert segments[1] == segments[2]
    assert segments[0] != segments[1] != lines


def test_llama_attention_is_a_splitting_op_with_the_name_of_its_layer():
    graph = traced("tiny_llama").graphs[0].graph
    assert ATTENTION in registered_splitting_ops()
    assert [node.args[-1] for node in attention_nodes(graph)] == [f"layers.{index}.self_attn" for index in range(4)]


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 64])
def test_llama_attention_is_causal_and_grouped(num_tokens):
    build("tiny_llama")
    q, k, v = (torch.randn(num_tokens, heads, 8) for heads in (4, 2, 2))
    output = torch.full_like(q, float("nan"))
    torch.ops.cgtool_fixtures.attention_with_output(q, k, v, output, "any")
    for head in range(4):
        scores = q[:, head] @ k[:, head // 2].t() / 8**0.5
        scores = scores.masked_fill(torch.ones(num_tokens, num_tokens).triu(1).bool(), float("-inf"))
        torch.testing.assert_close(output[:, head], scores.softmax(-1) @ v[:, head // 2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_moe"])
def test_a_decoder_depends_on_positions_and_not_on_later_tokens(name):
    spec = build(name)
    arguments = resized(spec, {"num_tokens": 8})
    with torch.no_grad():
        whole = spec.module(**arguments)
        torch.testing.assert_close(spec.module(*(x[:5] for x in arguments.values())), whole[:5], rtol=1e-4, atol=1e-5)
        stretched = spec.module(arguments["input_ids"], 3 * arguments["positions"])
    assert (stretched - whole).abs().max() > 0.01


def test_moe_computes_the_weighted_sum_of_its_experts():
    spec = build("tiny_moe")
    layer = spec.module.layers[0].mlp
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        scores = layer.router(x).softmax(-1)
        expected = torch.zeros_like(x)
        used = set()
        for token in range(20):
            best = scores[token].topk(2)
            for share, expert in zip(best.values / best.values.sum(), best.indices.tolist(), strict=True):
                gate, up = (x[token] @ layer.gate_up_proj[expert]).chunk(2)
                expected[token] += share * ((torch.nn.functional.silu(gate) * up) @ layer.down_proj[expert])
                used.add(expert)
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)
    assert used == {0, 1, 2, 3}


def test_the_encoder_returns_a_dataclass_and_ignores_padding():
    spec = build("tiny_encoder")
    arguments = bound(spec)
    with torch.no_grad():
        output = spec.module(**arguments)
        padding = arguments["attention_mask"] == 0
        assert padding.any()
        other = spec.module(arguments["input_ids"].masked_fill(padding, 1), arguments["attention_mask"])
    assert type(output).__name__ == "EncoderOutput"
    assert list(output.states) == ["embedding", "layers"]
    assert output.states["layers"][-1] is output.last_hidden_state
    assert len(output.states["layers"]) == 2
    torch.testing.assert_close(output.pooled, other.pooled)
    assert (output.last_hidden_state - other.last_hidden_state)[padding].abs().max() > 0.01


def test_a_fixture_runs_without_importing_dynamo():
    code = (
        "import sys, tiny_llama, torch\n"
        "spec = tiny_llama.build(num_layers=1)\n"
        "with torch.no_grad(): spec.module(*spec.calls[0].args)\n"
        "heavy = ('torch._dynamo', 'torch._inductor', 'sympy', 'triton')\n"
        "print([name for name in sys.modules if name.startswith(heavy)])\n"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(FOLDER)!r}, {str(root)!r}]\n{code}"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", MODELS)
def test_cuda_has_the_same_weights_and_results(name):
    def on(device, weights="real"):
        return resolve_model(f"{FOLDER / name}.py:build", device=device, weights=weights)

    here, there, fake = on("cpu"), on("cuda"), on("cuda", "fake")
    for spec in (there, fake):
        tensors = [*spec.module.parameters(), *spec.module.buffers(), *bound(spec).values()]
        assert {tensor.device.type for tensor in tensors} == {"cuda"}
    for one, two in zip(here.module.parameters(), there.module.parameters(), strict=True):
        assert torch.equal(one, two.cpu())
    with torch.no_grad():
        expected, actual = here.module(**bound(here)), there.module(**bound(there))
        for one, two in zip(leaves(expected), leaves(actual), strict=True):
            torch.testing.assert_close(one, two.cpu(), rtol=1e-3, atol=1e-3)
        for sizes in ONES[name]:
            arguments = {key: value.cuda() for key, value in resized(there, sizes).items()}
            assert all(leaf.isfinite().all() for leaf in leaves(there.module(**arguments)))
    recorded = trace(fake, mode=next(fake.module.parameters()).fake_mode)
    assert len(recorded.graphs) == 1
