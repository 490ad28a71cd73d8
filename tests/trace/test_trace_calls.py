"""Several example calls in one spec, optional arguments, other methods, ops that are slow to start."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from trace_harness import EAGER, agree, plan_of, served, spec_of

import cgtool
from cgtool import ExampleCall
from cgtool.compiler.pipeline import warm
from cgtool.errors import CacheMissError, GuardError, ModelError, UsageError

pytestmark = pytest.mark.torch


class Decoder(nn.Module):
    """Prefill over a whole prompt, and decode of one token with the cached states."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 4)
        self.out = nn.Linear(4, 4)

    def forward(self, ids, kept=None):
        hidden = self.embed(ids)
        if kept is not None:
            hidden = torch.cat([kept, hidden], dim=1)
        return self.out(hidden.cumsum(1)), hidden


def ids(batch, seq):
    return torch.arange(batch * seq).view(batch, seq) % 32


def decoder_calls():
    return [
        ExampleCall(name="prefill", args=(ids(2, 6),)),
        ExampleCall(name="decode", args=(ids(2, 1), torch.rand(2, 6, 4))),
    ]


DECODER = {"ids": {0: "batch", 1: "seq"}, "kept": {0: "batch", 1: "past"}}


def test_two_example_calls_serve_both(tmp_path):
    model = Decoder()
    dynamic = {"ids": {0: ("batch", 2, None), 1: "seq"}, "kept": {0: ("batch", 2, None), 1: "past"}}
    loaded = served(tmp_path, model, calls=decoder_calls(), dynamic=dynamic)
    for batch in (2, 5):
        for seq in (1, 2, 7):
            agree(loaded, model, ids(batch, seq))
            for past in (1, 2, 9):
                agree(loaded, model, ids(batch, seq), torch.rand(batch, past, 4))


@pytest.mark.slow
def test_each_call_has_variants_of_the_dimensions_that_it_passes():
    plan = plan_of(Decoder(), calls=decoder_calls(), dynamic=DECODER).plan
    by_call = {name: [v.fixed for v in plan.variants if v.name == name] for name in ("prefill", "decode")}
    assert len(by_call["prefill"]) == 4
    assert len(by_call["decode"]) == 8
    assert all("past" not in fixed for fixed in by_call["prefill"])


def test_example_calls_with_the_same_name_are_refused():
    calls = [ExampleCall(args=(ids(2, 6),)), ExampleCall(args=(ids(2, 1), torch.rand(2, 6, 4)))]
    with pytest.raises(UsageError, match="same name"):
        plan_of(Decoder(), calls=calls, dynamic=DECODER)


def test_an_example_that_does_not_match_the_method_is_refused():
    with pytest.raises(ModelError, match="The example call 'decode' does not match"):
        plan_of(Decoder(), calls=[ExampleCall(name="decode")], dynamic=DECODER)
    with pytest.raises(ModelError, match="The example call 'decode' does not match"):
        plan_of(Decoder(), calls=[ExampleCall(name="decode")])


class Masked(nn.Module):
    def forward(self, x, mask=None, *, scale=1.0):
        y = x * scale
        return y if mask is None else y.masked_fill(mask, 0.0)


def test_no_mask_and_none_are_the_same_call_and_a_mask_is_another(tmp_path):
    model = Masked()
    loaded = served(tmp_path, model, torch.rand(3, 4), dynamic={"x": {0: "n"}, "mask": {0: "n"}})
    x = torch.rand(5, 4)
    agree(loaded, model, x)
    agree(loaded, model, x, None)
    agree(loaded, model, x=x, mask=None, scale=1.0)
    with pytest.raises(GuardError, match="mask"):
        loaded(x, x > 0.5)
    with pytest.raises(GuardError, match="scale"):
        loaded(x, scale=2.0)


def test_an_optional_mask_needs_an_example_call_with_it(tmp_path):
    model = Masked()
    x = torch.rand(3, 4)
    calls = [ExampleCall(name="plain", args=(x,)), ExampleCall(name="masked", args=(x, x > 0.5))]
    loaded = served(tmp_path, model, calls=calls, dynamic={"x": {0: "n"}, "mask": {0: "n"}})
    for rows in (1, 2, 9):
        x = torch.rand(rows, 4)
        agree(loaded, model, x)
        agree(loaded, model, x, x > 0.5)


def test_another_example_call_is_another_entry(tmp_path):
    model = Masked()
    x = torch.rand(3, 4)
    first = warm(spec_of(model, x), config=EAGER, cache_dir=tmp_path)
    second = warm(spec_of(model, x, x > 0.5), config=EAGER, cache_dir=tmp_path)
    assert (first.hit, second.hit) == (False, False)
    assert first.hash != second.hash
    assert warm(spec_of(model, x + 1), config=EAGER, cache_dir=tmp_path).hit
    assert warm(spec_of(model, x=x), config=EAGER, cache_dir=tmp_path).hit


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)

    def encode(self, tokens, *, depth=2):
        for _ in range(depth):
            tokens = torch.tanh(self.layer(tokens))
        return {"tokens": tokens}


def test_a_method_other_than_forward_is_compiled_and_called(tmp_path):
    model = Two()
    loaded = served(tmp_path, model, torch.rand(3, 4), method="encode", dynamic={"tokens": {0: "n"}})
    for rows in (1, 2, 9):
        agree(loaded, model.encode, torch.rand(rows, 4))
        agree(loaded, model.encode, tokens=torch.rand(rows, 4), depth=2)
    with pytest.raises(GuardError, match="depth"):
        loaded(torch.rand(3, 4), depth=3)


def test_a_missing_method_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"no method .*decode"):
        warm(spec_of(Two(), torch.rand(3, 4), method="decode"), config=EAGER, cache_dir=tmp_path)


@torch.library.custom_op("cgtool_trace_test::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x):
    return torch.empty_like(x)


class UsesOp(nn.Module):
    def forward(self, x):
        return doubled(x) + 1


def test_an_op_made_with_custom_op_works_with_a_note(tmp_path):
    model = UsesOp()
    result = warm(spec_of(model, torch.rand(3, 4), dynamic={"x": {0: "n"}}), config=EAGER, cache_dir=tmp_path)
    (note,) = [note for note in result.notes if "custom_op" in note]
    assert "cgtool_trace_test::doubled" in note
    assert "imports Dynamo" in note
    assert "cgtool.direct_register_custom_op" in note
    loaded = cgtool.load(model, cache_dir=tmp_path)
    for rows in (1, 2, 9):
        agree(loaded, model, torch.rand(rows, 4))


class Counting(nn.Module):
    """Writes to a buffer, which is an inference tensor if the model was created in inference mode."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x):
        self.calls.add_(1)
        return self.layer(x) + self.calls


@pytest.mark.parametrize("made", [False, True], ids=["called", "made and called"])
def test_a_model_is_compiled_and_loaded_under_inference_mode(tmp_path, made):
    with torch.inference_mode(mode=made):
        model, eager = Counting().eval(), Counting().eval()
        eager.load_state_dict(model.state_dict())
    with torch.inference_mode():
        x = torch.rand(3, 4)
        compiled = cgtool.compile(model, config=EAGER, cache_dir=tmp_path)
        torch.testing.assert_close(compiled(x), eager(x))
        loaded = cgtool.load(model, cache_dir=tmp_path)
        torch.testing.assert_close(loaded(x), eager(x))
        assert loaded(x).is_inference()


class Scaling:
    """A user-defined argument, whose `repr` contains an address."""

    def __init__(self, gain):
        self.gain = gain


class Scaled(nn.Module):
    def forward(self, x, scaling, table):
        return x * scaling.gain * table[torch.float32].gain


def test_an_object_argument_is_identified_by_its_content_not_its_address(tmp_path):
    def spec(gain, other=1.0):
        return spec_of(Scaled(), torch.rand(3), Scaling(gain), {torch.float32: Scaling(other)})

    first = spec(2.0)  # kept alive, so that no other object gets its address
    with torch.no_grad():
        warm(first, config=EAGER, cache_dir=tmp_path)
        assert warm(spec(2.0), config=EAGER, cache_dir=tmp_path, check=True).hit
        with pytest.raises(CacheMissError, match="example calls"):
            warm(spec(2.0, other=3.0), config=EAGER, cache_dir=tmp_path, check=True)
    assert " at 0x" not in "".join(path.read_text() for path in tmp_path.rglob("*.json"))
