"""`--cache static`: `generate()` of transformers with a compiled decode step gives the model's own tokens."""

from __future__ import annotations

import functools
import inspect

import pytest

pytest.importorskip("torch")

import torch

transformers = pytest.importorskip("transformers")

from cli_harness import run  # noqa: E402
from test_huggingface import DECODER  # noqa: E402

import cgtool  # noqa: E402
from cgtool.errors import CacheMissError, GuardError, ModelError, UsageError  # noqa: E402
from cgtool.models import resolve_model  # noqa: E402

pytestmark = pytest.mark.torch

LENGTH = 96
#: What this version of transformers calls the cache: `past_key_values` until 5.24.
CACHE = {"cache", "past_key_values"}.intersection(
    inspect.signature(transformers.LlamaForCausalLM.forward).parameters
).pop()
EAGER = cgtool.CompilationConfig(adaptor="eager", proof=False)
#: Without an end-of-sequence token: a small random model would emit it by chance.
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}

_SMALL = {**DECODER, "max_position_embeddings": 128, "head_dim": 8}
CONFIGS = {
    "llama": _SMALL | {"num_hidden_layers": 1},
    "gpt2": {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "qwen3": _SMALL,
    "mistral": _SMALL | {"sliding_window": 12},
    "gemma3_text": _SMALL | {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": _SMALL | {"num_hidden_layers": 1, "num_local_experts": 2, "sliding_window": 12},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the checkpoint of a model, saved once."""

    @functools.cache
    def save(name):
        folder = tmp_path_factory.mktemp(name)
        torch.manual_seed(0)
        config = transformers.CONFIG_MAPPING[name](**CONFIGS[name])
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="module")
def model_of(saved):
    return lambda name: transformers.AutoModelForCausalLM.from_pretrained(saved(name)).eval()


@pytest.fixture(scope="module")
def command(saved, tmp_path_factory):
    """Warm the decode step of a model with the command, once; return the cache and the output."""

    @functools.cache
    def warm(name, adaptor="eager"):
        root = tmp_path_factory.mktemp("cache")
        options = ("--cache", "static", "--cache-length", LENGTH, "--no-proof", "--adaptor", adaptor)
        ran = run("warm", f"hf:{saved(name)}", *options, "--cache-dir", root)
        assert ran.code == 0, ran.err
        return root, ran.out

    return warm


@pytest.fixture(scope="module")
def compiled(model_of, tmp_path_factory):
    """Compile the decode step of a model with `cgtool.compile`, once; return the cache and the compiled model."""

    @functools.cache
    def compile_once(name):
        root = tmp_path_factory.mktemp("cache")
        model = model_of(name)
        return root, cgtool.compile(model, cache="static", cache_length=LENGTH, config=EAGER, cache_dir=root)

    return compile_once


@pytest.fixture(scope="module")
def warmed(command, compiled):
    """A cache with the decode step of a model: of llama, warmed by the command."""
    return lambda name: (command if name == "llama" else compiled)(name)[0]


@pytest.fixture
def served(model_of, warmed):
    return cgtool.load(model_of("llama"), cache="static", cache_dir=warmed("llama"))


def prompt(batch=1, length=7):
    return torch.arange(batch * length).mul(17).remainder(120).add(3).view(batch, length)


def same_tokens(model, served, ids, **options):
    """Check that both generate the same tokens, and return how many calls ran the model eagerly."""
    before = cgtool.counters()["eager_calls"]
    expected = model.generate(ids, **GREEDY | options)
    got = served.generate(ids, **GREEDY | options)
    assert got.tolist() == expected.tolist()
    return cgtool.counters()["eager_calls"] - before


def same_generations(model, served):
    """Check that both generate the same tokens for one and several rows, padded rows, and beams."""
    for batch in (1, 3):
        same_tokens(model, served, prompt(batch), max_new_tokens=14)
    padded = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
    same_tokens(model, served, prompt(2), attention_mask=padded, max_new_tokens=12)
    same_tokens(model, served, prompt(), num_beams=3, max_new_tokens=8)


def test_generate_gives_the_models_own_tokens_from_what_the_command_warmed(model_of, served):
    same_generations(model_of("llama"), served)


#: The one with layers of two kinds is quick; the others are slow.
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "gemma3_text" else [pytest.mark.slow]) for name in CONFIGS],
)
def test_compile_warms_a_missing_entry_and_hits_it_the_next_time(model_of, compiled, name):
    model, (root, first) = model_of(name), compiled(name)
    same_tokens(model, first, prompt(), max_new_tokens=14)
    served = cgtool.compile(model, cache="static", cache_length=LENGTH, config=EAGER, cache_dir=root)
    same_generations(model, served)
    assert len(list((root / "torch_compile_cache").glob("*/key.json"))) == 1


def test_a_static_cache_brings_its_own_dynamic_dimensions(model_of, tmp_path):
    with pytest.raises(UsageError, match="defines its own example and dynamic dimensions"):
        cgtool.compile(model_of("llama"), cache="static", dynamic={"input_ids": {0: "batch"}}, cache_dir=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sixty_four_greedy_tokens_of_native_code_are_the_models_own(model_of, command, name):
    model = model_of(name)
    served = cgtool.load(model, cache="static", cache_dir=command(name, "aot_inductor")[0])
    for batch, length in ((1, 1), (1, 7), (2, 32)):
        same_tokens(model, served, prompt(batch, length), max_new_tokens=64)


def test_prefill_and_decode_steps_use_one_entry_and_write_to_the_cache_in_place(served):
    cache = transformers.StaticCache(config=served.config, max_cache_len=LENGTH)
    with torch.no_grad():
        served(prompt(2), **{CACHE: cache}, logits_to_keep=1)
        keys = cache.layers[0].keys
        assert keys.shape == (2, 2, LENGTH, 8)
        assert keys[:, :, :7].abs().sum(-1).all()
        assert not keys[:, :, 7:].any()
        served(prompt(2, 1), **{CACHE: cache})
    assert cache.layers[0].keys is keys
    assert keys[:, :, 7].any()
    assert [int(layer.cumulative_length) for layer in cache.layers] == [8]
    assert {tuple(variant.fixed) for variant in served.recheck.__self__.plan.variants} >= {(), ("seq",)}


@pytest.mark.parametrize("name", sorted({CACHE, "past_key_values"}))
def test_the_logits_are_the_models_own(model_of, served, name):
    model, ids = model_of("llama"), prompt(2)
    with torch.no_grad():
        expected = model(ids).logits[:, -1:]
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        got = served(ids, **{name: cache}, logits_to_keep=1)
    torch.testing.assert_close(got.logits, expected)
    assert got[CACHE] is cache


@pytest.mark.parametrize("name", ["gemma3_text", "mixtral"])
def test_without_a_mask_sliding_windows_and_outputs_are_the_models_own(model_of, warmed, name):
    model = model_of(name)
    served = cgtool.load(model, cache="static", cache_dir=warmed(name))
    outputs = []
    for module in (model, served):
        cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH)
        with torch.no_grad():
            calls = [module(ids, **{CACHE: cache}, logits_to_keep=1) for ids in (prompt(1, 20), prompt(1, 1))]
        outputs.append(calls)
    for expected, got in zip(*outputs, strict=True):
        assert type(got) is type(expected)
        torch.testing.assert_close(got.logits, expected.logits)


@pytest.mark.parametrize("otherwise", ["raise", "eager"])
def test_hooks_of_the_model_run_once(model_of, warmed, otherwise):
    model = model_of("llama")
    handle = model.register_forward_hook(lambda _, args, output: output.__class__(logits=output.logits * 2))
    served = cgtool.load(model, cache="static", cache_dir=warmed("llama"), otherwise=otherwise)
    cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH)
    with torch.no_grad():
        got = served(prompt(), **{CACHE: cache}, logits_to_keep=1).logits
        got_without = served(prompt()).logits if otherwise == "eager" else None
        handle.remove()
        expected = model(prompt()).logits
    torch.testing.assert_close(got, expected[:, -1:] * 2)
    if got_without is not None:
        torch.testing.assert_close(got_without, expected * 2)


def test_the_original_model_is_unchanged_and_shares_its_weights(model_of, warmed):
    model = model_of("llama")
    served = cgtool.load(model, cache="static", cache_dir=warmed("llama"))
    assert isinstance(served, type(model))
    assert model.forward.__self__ is model
    assert served.lm_head.weight is model.lm_head.weight
    with torch.no_grad():
        model.lm_head.weight.neg_()
    same_tokens(model, served, prompt(), max_new_tokens=8)
    served.recheck()


def test_a_model_that_has_generated_before_can_be_loaded(model_of, warmed):
    model = model_of("llama")
    model.generate(prompt(), cache_implementation="static", disable_compile=True, max_new_tokens=4, **GREEDY)
    served = cgtool.load(model, cache="static", cache_dir=warmed("llama"))
    same_tokens(model, served, prompt(), max_new_tokens=8)


def test_a_generation_config_of_the_user_is_followed_and_not_changed(model_of, served):
    config = transformers.GenerationConfig(max_new_tokens=6, **GREEDY)
    got = served.generate(prompt(), generation_config=config)
    assert got.tolist() == model_of("llama").generate(prompt(), generation_config=config).tolist()
    assert config.cache_implementation is None


def test_a_conversation_continues_in_its_cache(model_of, served):
    model, ids = model_of("llama"), prompt()
    generated = []
    for module in (model, served):
        cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH)
        options = {CACHE: cache, "disable_compile": True, "max_new_tokens": 5, **GREEDY}
        first = module.generate(ids, **options)
        more = torch.cat([first, prompt(1, 3)], dim=1)
        generated.append(module.generate(more, **options))
    assert generated[0].tolist() == generated[1].tolist()


class TestRefused:
    def test_a_cache_that_must_hold_more(self, served):
        with pytest.raises(
            GuardError, match=r"for 1\d\d tokens, but the model was compiled for 96.*--cache-length 1\d\d"
        ):
            served.generate(prompt(), max_new_tokens=100, **GREEDY)

    def test_more_tokens_than_the_cache_has_room_for(self, served):
        cache = transformers.StaticCache(config=served.config, max_cache_len=LENGTH)
        with torch.no_grad():
            served(prompt(1, 90), **{CACHE: cache}, logits_to_keep=1)
            with pytest.raises(GuardError, match="need room for 97 tokens, but the model was compiled for 96"):
                served(prompt(1, 7), **{CACHE: cache}, logits_to_keep=1)
            cache.reset()
            served(prompt(1, 7), **{CACHE: cache}, logits_to_keep=1)

    def test_a_cache_of_another_kind(self, served):
        with pytest.raises(GuardError, match=r'has a DynamicCache, .*cache_implementation="static"'):
            served.generate(prompt(), cache_implementation="dynamic", max_new_tokens=4, **GREEDY)
        with pytest.raises(GuardError, match="has no cache"):
            served(prompt())

    def test_arguments_that_a_step_does_not_take(self, served):
        cache = transformers.StaticCache(config=served.config, max_cache_len=LENGTH)
        with pytest.raises(GuardError, match="passes output_hidden_states"):
            served(prompt(), **{CACHE: cache}, logits_to_keep=1, output_hidden_states=True)
        with pytest.raises(GuardError, match="logits_to_keep=1"):
            served(prompt(), **{CACHE: cache})

    def test_another_output_than_logits_and_a_cache(self, served):
        options = {CACHE: transformers.StaticCache(config=served.config, max_cache_len=LENGTH)}
        with pytest.raises(GuardError, match=r"return_dict=False\. A compiled step returns only"):
            served(prompt(), logits_to_keep=1, return_dict=False, **options)
        served.config.output_hidden_states = True
        with pytest.raises(GuardError, match=r"configuration sets output_hidden_states\. A compiled step returns only"):
            served(prompt(), logits_to_keep=1, **options)

    def test_training(self, served):
        served.train()
        with pytest.raises(GuardError, match=r"in training mode.* call model\.eval\(\) first"):
            served.generate(prompt(), max_new_tokens=2, **GREEDY)

    def test_a_single_mask_for_layers_of_two_kinds(self, model_of, warmed):
        served = cgtool.load(model_of("gemma3_text"), cache="static", cache_dir=warmed("gemma3_text"))
        cache = transformers.StaticCache(config=served.config, max_cache_len=LENGTH)
        mask = torch.ones(1, 1, 7, LENGTH, dtype=torch.bool)
        with pytest.raises(GuardError, match="Pass a dict of full_attention and sliding_attention, or a 2-D"):
            served(prompt(), **{CACHE: cache}, logits_to_keep=1, attention_mask=mask)

    def test_a_length_that_was_not_warmed(self, model_of, warmed):
        with pytest.raises(CacheMissError, match="compiled for a cache of 96 tokens, and 64 are requested"):
            cgtool.load(model_of("llama"), cache="static", cache_length=64, cache_dir=warmed("llama"))

    def test_a_model_that_does_not_decode(self, saved, tmp_path):
        model = transformers.AutoModel.from_pretrained(saved("llama"))
        with pytest.raises(ModelError, match="a causal language model of transformers; LlamaModel is not one"):
            cgtool.load(model, cache="static", cache_dir=tmp_path)
        with pytest.raises(UsageError, match="no cache 'dynamic'"):
            cgtool.load(model, cache="dynamic", cache_dir=tmp_path)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"cache": "paged"}, "'paged' is not a cache.*--cache static"),
            ({"cache_length": 64}, "--cache-length needs --cache static"),
            ({"cache": "static", "cache_length": "long"}, "'long' is not a number of tokens"),
            (
                {"cache": "static", "cache_length": 4096},
                "cache length 4096 is out of range for LlamaForCausalLM",
            ),
            (
                {"cache": "static", "task": "sequence-classification"},
                "--task sequence-classification cannot be combined with --cache static",
            ),
            ({"cache": "static", "attention_mask": True}, "--arg attention_mask cannot be combined with --cache"),
        ],
    )
    def test_options_that_contradict_each_other(self, saved, arguments, message):
        with pytest.raises(UsageError, match=message):
            resolve_model(f"hf:{saved('llama')}", factory_args=arguments)

    def test_a_model_whose_cache_holds_more_than_keys_and_values(self, tmp_path):
        config = transformers.CONFIG_MAPPING["mamba"](vocab_size=64, hidden_size=32, num_hidden_layers=1)
        config.save_pretrained(tmp_path)
        with pytest.raises(ModelError, match=r"static"):
            resolve_model(f"hf:{tmp_path}", factory_args={"cache": "static"})


def test_otherwise_eager_runs_the_model_for_a_refused_call(model_of, warmed):
    model = model_of("llama")
    served = cgtool.load(model, cache="static", cache_dir=warmed("llama"), otherwise="eager")
    assert same_tokens(model, served, prompt(), max_new_tokens=8) == 0
    assert same_tokens(model, served, prompt(), max_new_tokens=100) == 100


def test_the_command_warms_the_decode_step_and_prints_the_line_that_loads_it(model_of, saved, command):
    root, out = command("llama")
    call = f"cgtool.load(module, cache_dir='{root}', cache='static')"
    assert call in out
    model = model_of("llama")
    served = eval(call, {"cgtool": cgtool, "module": model})  # the line that the user is told to write
    assert same_tokens(model, served, prompt(), max_new_tokens=8) == 0
    check = ("warm", f"hf:{saved('llama')}", "--cache", "static", "--adaptor", "eager", "--check", "--cache-dir", root)
    assert run(*check, "--cache-length", LENGTH).code == 0
    other = run(*check, "--cache-length", 64)
    assert other.code == 3
    assert "dynamic dimensions are not those of the entry" in other.out
    shown = run("inspect", "cache", "--cache-dir", root)
    assert "LlamaForCausalLM" in shown.out
    assert "static_cache" in shown.out
