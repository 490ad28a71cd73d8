"""`hf:PATH`: base models of transformers from a small config, without network access."""

from __future__ import annotations

import functools
import json
import socket

import pytest

pytest.importorskip("torch")

import torch

transformers = pytest.importorskip("transformers")

import cgtool  # noqa: E402
from cgtool.compiler.pipeline import warm  # noqa: E402
from cgtool.errors import ModelError, UsageError  # noqa: E402
from cgtool.models import huggingface, resolve_model  # noqa: E402
from cgtool.models._torch import is_fake  # noqa: E402

pytestmark = pytest.mark.torch

DECODER = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
}
_TOKENS = {"bos_token_id": 0, "eos_token_id": 1}

CONFIGS = {
    "llama": DECODER,
    "qwen3": DECODER | {"head_dim": 8},
    "gemma": DECODER | {"head_dim": 8},
    "gpt2": {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96} | _TOKENS,
    "mixtral": DECODER | {"num_local_experts": 2},
    "bert": {key: value for key, value in DECODER.items() if key != "num_key_value_heads"},
    "vit": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    },
}
CLASSES = {
    "llama": "LlamaModel",
    "qwen3": "Qwen3Model",
    "gemma": "GemmaModel",
    "gpt2": "GPT2Model",
    "mixtral": "MixtralModel",
    "bert": "BertModel",
    "vit": "ViTModel",
}
TEXT = [name for name in CONFIGS if name != "vit"]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Fail the test if it opens a connection."""

    def refuse(*_args, **_kwargs):
        raise AssertionError("hf: reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def write_config(parent, model_type, **changes):
    folder = parent / model_type
    folder.mkdir(exist_ok=True)
    fields = {"model_type": model_type} | CONFIGS.get(model_type, {}) | changes
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.fixture
def write(tmp_path):
    return functools.partial(write_config, tmp_path)


@pytest.fixture(scope="module")
def fake_spec(tmp_path_factory):
    """Return the spec of a config as the default builds it, resolved once."""
    parent = tmp_path_factory.mktemp("configs")
    return functools.cache(lambda name: resolve_model(f"hf:{write_config(parent, name)}"))


@pytest.fixture(scope="module")
def real_spec(tmp_path_factory):
    """Return the spec of a config with real weights and a mask if it takes text, resolved once."""
    parent = tmp_path_factory.mktemp("configs")

    @functools.cache
    def resolve(name):
        arguments = {"attention_mask": True} if name in TEXT else {}
        return resolve_model(f"hf:{write_config(parent, name)}", factory_args=arguments, weights="real")

    return resolve


def tensors_of(spec):
    tensors = [*spec.module.parameters(), *spec.module.buffers()]
    return tensors + [value for value in spec.calls[0].kwargs.values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_base_model_is_built_fake_by_default_and_on_one_device(fake_spec, name):
    spec = fake_spec(name)
    assert type(spec.module).__name__ == CLASSES[name]
    assert not spec.module.training
    assert spec.module.config._attn_implementation == "sdpa"
    assert all(is_fake(tensor) for tensor in tensors_of(spec))
    assert len({id(tensor.fake_mode) for tensor in tensors_of(spec)}) == 1
    assert {tensor.device.type for tensor in tensors_of(spec)} == {"cpu"}


@pytest.mark.parametrize("name", CONFIGS)
def test_real_weights_run_and_have_the_shapes_of_the_fake_ones(fake_spec, real_spec, name):
    def metas(spec):
        named = [*spec.module.named_parameters(), *spec.module.named_buffers()]
        return {key: (value.shape, value.stride(), value.dtype, value.requires_grad) for key, value in named}

    real = real_spec(name)
    assert metas(real) == metas(fake_spec(name))
    with torch.no_grad():
        output = real.module(**real.calls[0].kwargs)
    assert output.last_hidden_state.isfinite().all()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_real_weights_are_the_same_each_time_and_leave_the_random_state_alone(write, name):
    folder = write(name)
    before = torch.get_rng_state()
    one, two = (resolve_model(f"hf:{folder}", weights="real") for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    for first, second in zip(one.module.parameters(), two.module.parameters(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("name", TEXT)
def test_text_is_dynamic_in_batch_and_sequence_up_to_the_models_limit(fake_spec, name):
    spec = fake_spec(name)
    (call,) = spec.calls
    assert call.args == ()
    assert set(call.kwargs) == {"input_ids", "use_cache"}
    assert call.kwargs["use_cache"] is False
    assert call.kwargs["input_ids"].shape == (2, 16)
    assert call.kwargs["input_ids"].dtype == torch.int64
    assert spec.dynamic == {"input_ids": {0: "batch", 1: ("seq", 1, 96)}}
    assert spec.splitting_ops is None


def test_images_are_dynamic_only_in_batch(write):
    spec = resolve_model(f"hf:{write('vit', num_channels=1)}")
    assert set(spec.calls[0].kwargs) == {"pixel_values"}
    assert spec.calls[0].kwargs["pixel_values"].shape == (2, 1, 32, 32)
    assert spec.dynamic == {"pixel_values": {0: "batch"}}


@pytest.mark.parametrize("name", TEXT)
def test_attention_mask_adds_a_mask_to_the_example(real_spec, name):
    spec = real_spec(name)
    kwargs = spec.calls[0].kwargs
    assert torch.equal(kwargs["attention_mask"], torch.ones(2, 16, dtype=torch.int64))
    assert spec.dynamic["attention_mask"] == spec.dynamic["input_ids"]


def test_a_model_that_creates_a_mask_only_in_eager_gets_one(write):
    sizes = {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    folder = write("longt5", **sizes)
    spec = resolve_model(f"hf:{folder}")
    assert spec.calls[0].kwargs["attention_mask"].shape == spec.calls[0].kwargs["input_ids"].shape
    assert spec.dynamic["attention_mask"] == spec.dynamic["input_ids"]
    without = resolve_model(f"hf:{folder}", factory_args={"attention_mask": False})
    assert "attention_mask" not in without.calls[0].kwargs


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_two_towers_take_text_and_images_with_separate_batch_dimensions(write, name):
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = tower | _TOKENS | {"vocab_size": 128, "max_position_embeddings": 12}
    folder = write(name, text_config=text, vision_config=tower | {"image_size": 32, "patch_size": 8})
    spec = resolve_model(f"hf:{folder}")
    shapes = {key: tuple(value.shape) for key, value in spec.calls[0].kwargs.items()}
    assert shapes == {"input_ids": (2, 12), "pixel_values": (2, 3, 32, 32)}
    assert spec.dynamic == {"input_ids": {0: "batch", 1: ("seq", 1, 12)}, "pixel_values": {0: "images"}}


#: Models that take more than ids or pixels: their config, and the shapes of the example.
OTHERS = {
    "fsmt": (
        {"src_vocab_size": 64, "tgt_vocab_size": 64, "d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
        | {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
        {"input_ids": (2, 16), "decoder_input_ids": (2, 16), "decoder_attention_mask": (2, 16)},
    ),
    "t5": (
        {"vocab_size": 64, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 1, "num_heads": 4},
        {"input_ids": (2, 16), "decoder_input_ids": (2, 16)},
    ),
    "whisper": (
        {"vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "max_source_positions": 24}
        | {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 8, "pad_token_id": 0},
        {"input_features": (2, 8, 48), "decoder_input_ids": (2, 16)},
    ),
    "wav2vec2": ({"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}, {"input_values": (2, 4000)}),
    "audio-spectrogram-transformer": (
        {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "max_length": 32, "num_mel_bins": 24},
        {"input_values": (2, 32, 24)},
    ),
    "videomae": (
        {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "num_frames": 4},
        {"pixel_values": (2, 4, 3, 32, 32)},
    ),
    "resnet": ({"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]}, {"pixel_values": (2, 3, 64, 64)}),
}


SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


@pytest.mark.parametrize("name", OTHERS)
def test_the_example_follows_the_models_signature_docstring_and_config(write, name):
    config, shapes = OTHERS[name]
    arguments = {"image_size": 64} if name == "resnet" else None
    spec = resolve_model(f"hf:{write(name, **config)}", weights="real", factory_args=arguments)
    kwargs = spec.calls[0].kwargs
    assert {key: tuple(value.shape) for key, value in kwargs.items() if key != "use_cache"} == shapes
    assert all(dims[0] == "batch" for dims in spec.dynamic.values())
    with torch.no_grad():
        assert spec.module(**kwargs)[0].isfinite().all()


@pytest.mark.parametrize(
    ("name", "task", "kind"),
    [
        ("llama", "causal-lm", "LlamaForCausalLM"),
        ("bert", "sequence-classification", "BertForSequenceClassification"),
        ("t5", "seq2seq-lm", "T5ForConditionalGeneration"),
        ("vit", "image-classification", "ViTForImageClassification"),
    ],
)
def test_a_task_builds_its_head(write, name, task, kind):
    folder = write(name, **(OTHERS[name][0] if name in OTHERS else {}))
    spec = resolve_model(f"hf:{folder}", factory_args={"task": task})
    assert type(spec.module).__name__ == kind


def test_attention_is_sdpa_if_supported_unless_the_user_chooses(write):
    def attention(name, **arguments):
        changes = SMALL if name == "deberta-v2" else {}
        return resolve_model(f"hf:{write(name, **changes)}", factory_args=arguments).module.config._attn_implementation

    assert attention("deberta-v2") == "eager"
    assert attention("llama") == "sdpa"
    assert attention("llama", attn_implementation="eager") == "eager"


@pytest.mark.parametrize(
    ("name", "field"), [("llama", "num_hidden_layers"), ("gpt2", "n_layer"), ("gpt2", "num_hidden_layers")]
)
def test_arguments_set_fields_of_the_config(write, name, field):
    spec = resolve_model(f"hf:{write(name)}", factory_args={field: 3})
    layers = spec.module.h if name == "gpt2" else spec.module.layers
    assert len(layers) == 3


@pytest.mark.parametrize("num_layers", [1, 5])
def test_the_pattern_of_layer_types_is_repeated_for_another_number_of_layers(write, num_layers):
    kinds = ["sliding_attention", "full_attention"]
    folder = write("qwen3", layer_types=kinds, use_sliding_window=True, sliding_window=8)
    config = resolve_model(f"hf:{folder}", factory_args={"num_hidden_layers": num_layers}).module.config
    assert config.layer_types == (kinds * 3)[:num_layers]


def test_the_dtype_is_the_requested_one_or_the_configs(write):
    def dtypes(**options):
        spec = resolve_model(f"hf:{write('llama', dtype='bfloat16')}", **options)
        return {parameter.dtype for parameter in spec.module.parameters()}

    assert dtypes() == {torch.bfloat16}
    assert dtypes(dtype="float16") == {torch.float16}
    assert dtypes(dtype="float16", weights="real") == {torch.float16}


def test_a_config_file_may_have_any_name(write):
    folder = write("llama")
    other = folder / "small.json"
    other.write_text((folder / "config.json").read_text())
    assert type(resolve_model(f"hf:{other}").module).__name__ == "LlamaModel"


def test_the_sequence_of_the_example_fits_the_model(write):
    spec = resolve_model(f"hf:{write('llama', max_position_embeddings=8)}")
    assert spec.calls[0].kwargs["input_ids"].shape == (2, 8)


class TestWrongInput:
    def test_no_such_folder(self, tmp_path):
        with pytest.raises(ModelError, match=r"does not exist.*nothing is downloaded"):
            resolve_model(f"hf:{tmp_path}/nowhere")

    def test_a_name_of_the_hub_is_not_downloaded(self):
        with pytest.raises(ModelError, match="nothing is downloaded"):
            resolve_model("hf:some-org/some-model")

    def test_a_folder_without_config(self, tmp_path):
        with pytest.raises(ModelError, match=r"config\.json does not exist"):
            resolve_model(f"hf:{tmp_path}")

    @pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": 3}'])
    def test_a_file_that_is_not_a_config(self, tmp_path, text):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"hf: takes a config\.json"):
            resolve_model(f"hf:{tmp_path}")

    def test_a_type_that_transformers_does_not_know(self, write):
        with pytest.raises(ModelError, match="has no model of type 'of_tomorrow'"):
            resolve_model(f"hf:{write('of_tomorrow')}")
        with pytest.raises(ModelError, match="hf: does not run such code"):
            resolve_model(f"hf:{write('of_tomorrow', auto_map={'AutoModel': 'modeling.Model'})}")

    @pytest.mark.parametrize(
        ("name", "arguments", "error", "message"),
        [
            pytest.param(
                *("llama", {"task": "chat"}, UsageError),
                r"'chat' is not a task\. For LlamaConfig, transformers has .*causal-lm",
                id="no such task",
            ),
            pytest.param(
                *("llama", {"task": "ctc"}, ModelError),
                r"no model for ctc for LlamaConfig .*Use --task .*causal-lm",
                id="a task of other models",
            ),
            pytest.param(
                *("qwen2_5_vl_vision", {"depth": 1}, ModelError),
                r"cannot derive the size num_images_or_videos of the argument grid_thw.*Write a factory",
                id="an input of unknown size",
            ),
            pytest.param(
                *("llama", {"num_hiden_layers": 3}, UsageError),
                r"LlamaConfig has no field num_hiden_layers\. Did you mean num_hidden_layers\?",
                id="no such field",
            ),
            pytest.param(
                "llama", {"attention_mask": 1}, UsageError, "attention_mask must be true or false", id="not a flag"
            ),
            pytest.param(
                "vit", {"attention_mask": True}, UsageError, "takes no attention_mask for ids", id="a mask for images"
            ),
            pytest.param("llama", {"hidden_act": "no_such_activation"}, ModelError, "--arg", id="no such activation"),
        ],
    )
    def test_arguments_that_no_model_can_be_built_from(self, write, name, arguments, error, message):
        with pytest.raises(error, match=message):
            resolve_model(f"hf:{write(name)}", factory_args=arguments)

    def test_without_transformers_the_extra_is_named(self, write, monkeypatch):
        def missing(name):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        monkeypatch.setattr(huggingface.importlib, "import_module", missing)
        with pytest.raises(ModelError, match=r"pip install 'cgtool\[transformers\]'"):
            resolve_model(f"hf:{write('llama')}")


EAGER = cgtool.CompilationConfig(adaptor="eager", proof=False)


def test_an_entry_warmed_from_a_checkpoint_serves_it_after_its_folder_moves(write, tmp_path):
    saved = tmp_path / "somewhere"
    config = transformers.AutoConfig.from_pretrained(write("llama"), num_hidden_layers=1)
    transformers.AutoModel.from_config(config).save_pretrained(saved)
    root = tmp_path / "cache"
    one_variant = {"input_ids": {1: ("seq", 2, 96)}}
    warm(resolve_model(f"hf:{saved}", dynamic=one_variant), config=EAGER, cache_dir=root)
    elsewhere = saved.rename(tmp_path / "elsewhere")
    model = transformers.AutoModel.from_pretrained(elsewhere).eval()
    served = cgtool.load(model, cache_dir=root)
    ids = torch.arange(10).reshape(2, 5)
    with torch.no_grad():
        assert torch.equal(served(input_ids=ids, use_cache=False)[0], model(input_ids=ids, use_cache=False)[0])


class ReadsItsName(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, x):
        return x * 2 if "large" in self.config._name_or_path else x


def test_the_name_of_a_checkpoint_is_guarded_if_the_model_reads_it(tmp_path):
    model = ReadsItsName(transformers.LlamaConfig()).eval()
    cgtool.compile(model, example_args=(torch.ones(3),), config=EAGER, cache_dir=tmp_path)
    model.config._name_or_path = "a-large-one"
    with pytest.raises(cgtool.CacheMissError, match="_name_or_path"):
        cgtool.load(model, cache_dir=tmp_path)
