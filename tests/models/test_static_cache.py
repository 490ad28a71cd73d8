"""`--cache static`: `generate()` of transformers over a compiled decode step gives the tokens that the model gives."""

from __future__ import annotations

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
EAGER = cgtool.CompilationConfig(adaptor="eager", proof=False)
#: The end of a sequence is no token that a small random model means to say.
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}

_SMALL = {**DECODER, "max_position_embeddings": 128, "head_dim": 8}
CONFIGS = {
    "llama": _SMALL | {"num_hidden_layers": 1},
    "gpt2": {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "qwen3": _SMALL,
    "mistral": _SMALL | {"sliding_window": 12},
    "gemma3_text": _SMALL | {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": _SMALL | {"num_local_experts": 2},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of a model, made once."""
    made = {}

    def save(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            torch.manual_seed(0)
            config = transformers.CONFIG_MAPPING[name](**CONFIGS[name])
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(made[name])
        return made[name]

    return save


@pytest.fixture(scope="module")
def model_of(saved):
    return lambda name: transformers.AutoModelForCausalLM.from_pretrained(saved(name)).eval()


@pytest.fixture(scope="module")
def command(saved, tmp_path_factory):
    """What the command says that warms the decode step of a model, from its folder, and where it puts it."""
    done = {}

    def warmed(name, adaptor="eager"):
        if (name, adaptor) not in done:
            root = tmp_path_factory.mktemp("cache")
            options = ("--cache", "static", "--cache-length", LENGTH, "--no-proof", "--adaptor", adaptor)
            ran = run("warm", f"hf:{saved(name)}", *options, "--cache-dir", root)
            assert ran.code == 0, ran.err
            done[name, adaptor] = root, ran.out
        return done[name, adaptor]

    return warmed


@pytest.fixture(scope="module")
def warmed(command):
    """A cache with the decode step of a model."""
    return lambda *what: command(*what)[0]


@pytest.fixture
def served(model_of, warmed):
    return cgtool.load(model_of("llama"), cache="static", cache_dir=warmed("llama"))


def prompt(batch=1, length=7):
    return torch.arange(batch * length).mul(17).remainder(120).add(3).view(batch, length)


def same_tokens(model, served, ids, **options):
    """Compare what both say to a prompt, and return how many of the calls the model itself answered."""
    before = cgtool.counters()["eager_calls"]
    expected = model.generate(ids, **GREEDY | options)
    got = served.generate(ids, **GREEDY | options)
    assert got.tolist() == expected.tolist()
    return cgtool.counters()["eager_calls"] - before


def same_generations(model, served):
    """Compare what both say to prompts of one and several rows, padded, and by beams."""
    for batch in (1, 3):
        same_tokens(model, served, prompt(batch), max_new_tokens=14)
    padded = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
    same_tokens(model, served, prompt(2), attention_mask=padded, max_new_tokens=12)
    same_tokens(model, served, prompt(), num_beams=3, max_new_tokens=8)


def test_generate_gives_the_models_own_tokens_from_what_the_command_warmed(model_of, served):
    same_generations(model_of("llama"), served)


#: One whose layers differ in kind is quick.
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "gemma3_text" else [pytest.mark.slow]) for name in CONFIGS],
)
def test_compile_warms_what_is_missing_and_finds_it_again(model_of, tmp_path, name):
    model = model_of(name)
    for _ in range(2):
        served = cgtool.compile(model, cache="static", cache_length=LENGTH, config=EAGER, cache_dir=tmp_path)
        same_tokens(model, served, prompt(), max_new_tokens=14)
    same_generations(model, served)
    assert len(list((tmp_path / "torch_compile_cache").glob("*/key.json"))) == 1
    with pytest.raises(UsageError, match="defines its own example and dynamic dimensions"):
        cgtool.compile(model, cache="static", dynamic={"input_ids": {0: "batch"}}, cache_dir=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sixty_four_greedy_tokens_of_native_code_are_the_models_own(model_of, warmed, name):
    model = model_of(name)
    served = cgtool.load(model, cache="static", cache_dir=warmed(name, "aot_inductor"))
    for batch, length in ((1, 1), (1, 7), (2, 32)):
        same_tokens(model, served, prompt(batch, length), max_new_tokens=64)


def test_a_prefill_and_each_step_are_calls_of_one_entry_and_write_into_the_cache_in_place(served):
    cache = transformers.StaticCache(config=served.config, max_cache_len=LENGTH)
    with torch.no_grad():
        served(prompt(2), past_key_values=cache, logits_to_keep=1)
        keys = cache.layers[0].keys
        assert keys.shape == (2, 2, LENGTH, 8)
        assert keys[:, :, :7].abs().sum(-1).all()
        assert not keys[:, :, 7:].any()
        served(prompt(2, 1), past_key_values=cache)
    assert cache.layers[0].keys is keys
    assert keys[:, :, 7].any()
    assert [int(layer.cumulative_length) for layer in cache.layers] == [8]
    assert {tuple(variant.fixed) for variant in served.recheck.__self__.plan.variants} >= {(), ("seq",)}


def test_the_logits_are_the_models_own(model_of, served):
    model, ids = model_of("llama"), prompt(2)
    with torch.no_grad():
        expected = model(ids).logits[:, -1:]
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        got = served(ids, past_key_values=cache, logits_to_keep=1)
    torch.testing.assert_close(got.logits, expected)
    assert got.past_key_values is cache


@pytest.mark.parametrize("name", ["gemma3_text", "mistral", "mixtral"])
def test_windows_hold_and_outputs_are_the_models_own_where_a_call_has_no_mask(model_of, warmed, name):
    model = model_of(name)
    served = cgtool.load(model, cache="static", cache_dir=warmed(name))
    given = []
    for one in (model, served):
        cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH)
        with torch.no_grad():
            calls = [one(ids, past_key_values=cache, logits_to_keep=1) for ids in (prompt(1, 20), prompt(1, 1))]
        given.append(calls)
    for expected, got in zip(*given, strict=True):
        assert type(got) is type(expected)
        torch.testing.assert_close(got.logits, expected.logits)


@pytest.mark.parametrize("otherwise", ["raise", "eager"])
def test_hooks_of_the_model_run_once(model_of, warmed, otherwise):
    model = model_of("llama")
    handle = model.register_forward_hook(lambda _, args, output: output.__class__(logits=output.logits * 2))
    served = cgtool.load(model, cache="static", cache_dir=warmed("llama"), otherwise=otherwise)
    cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH)
    with torch.no_grad():
        got = served(prompt(), past_key_values=cache, logits_to_keep=1).logits
        got_without = served(prompt()).logits if otherwise == "eager" else None
        handle.remove()
        expected = model(prompt()).logits
    torch.testing.assert_close(got, expected[:, -1:] * 2)
    if got_without is not None:
        torch.testing.assert_close(got_without, expected * 2)


def test_the_model_itself_is_left_as_it_was_and_its_weights_are_shared(model_of, warmed):
    model = model_of("llama")
    served = cgtool.load(model, cache="static", cache_dir=warmed("llama"))
    assert isinstance(served, type(model))
    assert model.forward.__self__ is model
    assert served.lm_head.weight is model.lm_head.weight
    with torch.no_grad():
        model.lm_head.weight.neg_()
    same_tokens(model, served, prompt(), max_new_tokens=8)
    served.recheck()


def test_a_model_that_generated_before_is_served_after(model_of, warmed):
    model = model_of("llama")
    model.generate(prompt(), cache_implementation="static", disable_compile=True, max_new_tokens=4, **GREEDY)
    served = cgtool.load(model, cache="static", cache_dir=warmed("llama"))
    same_tokens(model, served, prompt(), max_new_tokens=8)


def test_a_generation_config_of_the_users_own_is_followed(model_of, served):
    asked = transformers.GenerationConfig(max_new_tokens=6, **GREEDY)
    got = served.generate(prompt(), generation_config=asked)
    assert got.tolist() == model_of("llama").generate(prompt(), generation_config=asked).tolist()
    assert asked.cache_implementation is None


def test_a_conversation_goes_on_in_its_cache(model_of, served):
    model, ids = model_of("llama"), prompt()
    said = []
    for one in (model, served):
        cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH)
        first = one.generate(ids, past_key_values=cache, disable_compile=True, max_new_tokens=5, **GREEDY)
        more = torch.cat([first, prompt(1, 3)], dim=1)
        said.append(one.generate(more, past_key_values=cache, disable_compile=True, max_new_tokens=5, **GREEDY))
    assert said[0].tolist() == said[1].tolist()


class TestRefused:
    def test_a_cache_that_must_hold_more(self, served):
        with pytest.raises(GuardError, match=r"holds 1\d\d tokens, and this was compiled for 96.*--cache-length 1\d\d"):
            served.generate(prompt(), max_new_tokens=100, **GREEDY)

    def test_more_tokens_than_the_cache_holds(self, served):
        cache = transformers.StaticCache(config=served.config, max_cache_len=LENGTH)
        with torch.no_grad():
            served(prompt(1, 90), past_key_values=cache, logits_to_keep=1)
            with pytest.raises(GuardError, match="would hold 97 tokens, and this was compiled for 96"):
                served(prompt(1, 7), past_key_values=cache, logits_to_keep=1)
            cache.reset()
            served(prompt(1, 7), past_key_values=cache, logits_to_keep=1)

    def test_a_cache_of_another_kind(self, served):
        with pytest.raises(GuardError, match=r'brings a DynamicCache, .*cache_implementation="static"'):
            served.generate(prompt(), cache_implementation="dynamic", max_new_tokens=4, **GREEDY)
        with pytest.raises(GuardError, match="brings no cache"):
            served(prompt())

    def test_what_a_step_does_not_take(self, served):
        cache = transformers.StaticCache(config=served.config, max_cache_len=LENGTH)
        with pytest.raises(GuardError, match="brings output_hidden_states"):
            served(prompt(), past_key_values=cache, logits_to_keep=1, output_hidden_states=True)
        with pytest.raises(GuardError, match="logits_to_keep=1"):
            served(prompt(), past_key_values=cache)

    def test_another_output_than_logits_and_a_cache(self, served):
        options = {"past_key_values": transformers.StaticCache(config=served.config, max_cache_len=LENGTH)}
        with pytest.raises(GuardError, match="return_dict=False asks for another output"):
            served(prompt(), logits_to_keep=1, return_dict=False, **options)
        served.config.output_hidden_states = True
        with pytest.raises(GuardError, match="output_hidden_states of the model's configuration asks for another"):
            served(prompt(), logits_to_keep=1, **options)

    def test_training(self, served):
        served.train()
        with pytest.raises(GuardError, match=r"in training mode.* call model\.eval\(\) first"):
            served.generate(prompt(), max_new_tokens=2, **GREEDY)

    def test_one_mask_where_layers_differ(self, model_of, warmed):
        served = cgtool.load(model_of("gemma3_text"), cache="static", cache_dir=warmed("gemma3_text"))
        cache = transformers.StaticCache(config=served.config, max_cache_len=LENGTH)
        mask = torch.ones(1, 1, 7, LENGTH, dtype=torch.bool)
        with pytest.raises(GuardError, match="pass a dict of full_attention and sliding_attention, or a mask of"):
            served(prompt(), past_key_values=cache, logits_to_keep=1, attention_mask=mask)

    def test_a_length_that_was_not_warmed(self, model_of, warmed):
        with pytest.raises(CacheMissError, match="its cache holds 96 tokens, and one of 64 is asked for"):
            cgtool.load(model_of("llama"), cache="static", cache_length=64, cache_dir=warmed("llama"))

    def test_a_model_that_does_not_decode(self, saved, tmp_path):
        model = transformers.AutoModel.from_pretrained(saved("llama"))
        with pytest.raises(ModelError, match="for a causal language model of transformers, and LlamaModel is none"):
            cgtool.load(model, cache="static", cache_dir=tmp_path)
        with pytest.raises(UsageError, match="no cache 'dynamic'"):
            cgtool.load(model, cache="dynamic", cache_dir=tmp_path)

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ({"cache": "paged"}, "no cache 'paged'.*--cache static"),
            ({"cache_length": 64}, "--cache-length needs --cache static"),
            ({"cache": "static", "cache_length": "long"}, "'long' is no number of tokens"),
            (
                {"cache": "static", "cache_length": 4096},
                "4096 tokens does not fit LlamaForCausalLM",
            ),
            (
                {"cache": "static", "task": "sequence-classification"},
                "--task sequence-classification is not for a decode",
            ),
            ({"cache": "static", "attention_mask": True}, "--arg attention_mask is not for a decode step"),
        ],
    )
    def test_options_that_make_no_sense(self, saved, arguments, said):
        with pytest.raises(UsageError, match=said):
            resolve_model(f"hf:{saved('llama')}", factory_args=arguments)

    def test_a_model_whose_cache_is_more_than_keys_and_values(self, tmp_path):
        config = transformers.CONFIG_MAPPING["mamba"](vocab_size=64, hidden_size=32, num_hidden_layers=1)
        config.save_pretrained(tmp_path)
        with pytest.raises(ModelError, match=r"static"):
            resolve_model(f"hf:{tmp_path}", factory_args={"cache": "static"})


def test_the_model_itself_answers_what_is_refused_where_the_user_says_so(model_of, warmed):
    model = model_of("llama")
    served = cgtool.load(model, cache="static", cache_dir=warmed("llama"), otherwise="eager")
    assert same_tokens(model, served, prompt(), max_new_tokens=8) == 0
    assert same_tokens(model, served, prompt(), max_new_tokens=100) == 100


def test_the_command_warms_it_and_says_what_a_program_writes(model_of, saved, command):
    root, said = command("llama")
    call = f"cgtool.load(module, cache_dir='{root}', cache='static')"
    assert call in said
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
