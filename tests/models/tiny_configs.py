"""Small configurations of every base model of transformers, derived from the defaults of its config class.

Depths, vocabularies, numbers of experts and images shrink. Widths shrink with the number of heads, so that the size of
a head, and every field that depends on it, stays. `OVERRIDES` corrects the rules for single models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

LAYERS = 2
VOCAB = 128

#: Sizes by the name of the field; the first match counts.
_RULES: list[tuple[str, Any]] = [
    (
        r"(.*_)?(num_)?(hidden_)?layers?|n_layers?|(.*_)?(num_)?(\w+_)?layers|(.*_)?depth|num_blocks|num_.*_blocks",
        LAYERS,
    ),
    (r"(.*_)?vocab_size(_.*)?|(.*_)?codebook_size|num_embeddings", VOCAB),
    (r"(num_|n_)?(local_|routed_)?experts|num_local_experts|moe_num_experts|num_routed_experts", 4),
    (r"num_experts_per_tok(en)?|moe_k|moe_topk|top_k_experts|num_selected_experts", 2),
    (r"(moe_)?(n|num|topk)_(expert_)?groups?", 1),
    (r"max_position_embeddings|n_positions|max_seq_len(gth)?|seq_length|max_target_positions", 128),
    (r"max_source_positions", 32),
    (r"image_size|input_size|crop_size|image_resolution", 64),
    (r"num_frames|frames_per_clip|tubelet.*frames", 4),
]
_WIDTHS = re.compile(
    r"(.*_)?hidden_(size|dim)|d_model|n_embd|(.*_)?embed(ding)?_(dim|size)|(.*_)?intermediate_(size|dim)|d_ff|"
    r"(.*_)?ffn_dim|(.*_)?ffn_hidden_size|dim|(.*_)?projection_(dim|size)|width|n_inner|inner_dim|(.*_)?mlp_dim|out_hidden_size|"
    r"(.*_)?linear_dim|lru_width|d_inner|(.*_)?output_dim"
)
_HEADS = re.compile(
    r"(num|n)_((attention|key_value|kv|query)_)?(attention_)?heads?(_kv)?|(en|de)coder_attention_heads|n_heads?"
)
_LIMIT = 256  # widths up to here are small enough

#: Corrections of the rules.
_MAMBA = {"hidden_size": 256, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_expand": 2, "mamba_n_groups": 1}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA,
    "granitemoehybrid": _MAMBA,
    # With so few positions, eager itself switches to this attention by replacing modules while it runs.
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "codegen": {"n_embd": 256, "n_head": 4, "rotary_dim": 32},
    "dbrx": {"attn_config": {"rope_theta": 10000.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "autoformer": {"prediction_length": 8},
    "informer": {"prediction_length": 8},
    "time_series_transformer": {"prediction_length": 8},
}


def candidates(config_class: Any) -> Iterator[dict[str, Any]]:
    """Yield fields for config.json, the smallest first: all rules, without widths, and the class's defaults."""
    fields = config_class().to_dict()
    model_type = fields["model_type"]
    own = OVERRIDES.get(model_type, {})
    for widths in (True, False):
        yield _merge(_shrunk(fields, widths=widths), own) | {"model_type": model_type}
    yield _merge({}, own) | {"model_type": model_type}


def _merge(fields: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(fields)
    for key, value in own.items():
        merged[key] = _merge(merged.get(key) or {}, value) if isinstance(value, Mapping) else value
    return merged


def _shrunk(fields: Mapping[str, Any], *, widths: bool) -> dict[str, Any]:
    heads = [v for k, v in fields.items() if _HEADS.fullmatch(k) and isinstance(v, int) and v > 0]
    width = max(
        (
            v
            for k, v in fields.items()
            if k in ("hidden_size", "d_model", "n_embd", "dim", "embed_dim") and isinstance(v, int)
        ),
        default=0,
    )
    factor = 1
    if widths:
        while (
            heads
            and max(heads) // factor >= 4
            and width // factor > _LIMIT // 2
            and all(v % (2 * factor) == 0 for v in (width, max(heads)))
        ):
            factor *= 2
    depths = {
        v for k, v in fields.items() if re.fullmatch(_RULES[0][0], k) and isinstance(v, int) and not isinstance(v, bool)
    }
    out: dict[str, Any] = {}
    for key, value in fields.items():
        if key in _DROPPED:
            continue
        if isinstance(value, Mapping):
            out[key] = _shrunk(value, widths=widths) if "model_type" in value or key.endswith("_config") else value
        elif isinstance(value, bool) or value is None:
            out[key] = value
        elif isinstance(value, int):
            out[key] = _number(key, value, factor)
        elif isinstance(value, (list, tuple)):
            shrunk = _list(key, list(value), depths)
            if shrunk is not None:
                out[key] = shrunk
        else:
            out[key] = value
    rope = out.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        head = out.get("head_dim") or out["hidden_size"] // out["num_attention_heads"]
        half = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
        out["rope_parameters"] = rope | {"mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    return _ids(out)


#: The class derives these from the other fields.
_DROPPED = {
    "architectures",
    "transformers_version",
    "id2label",
    "label2id",
    "num_labels",
    "problem_type",
    "dtype",
    "per_layer_config",
    "activation_sparsity_pattern",
    "out_features",
    "out_indices",
    "stage_names",
    "_out_features",
    "_out_indices",
}


def _number(key: str, value: int, factor: int) -> int:
    if _HEADS.fullmatch(key):
        return max(1, value // factor)
    if _WIDTHS.fullmatch(key):
        return max(8, value // factor) if value % factor == 0 else value
    for pattern, small in _RULES:
        if re.fullmatch(pattern, key) and value > 0:
            return min(value, small)
    return value


def _list(key: str, values: list[Any], depths: set[int]) -> list[Any] | None:
    if not values:
        return values
    if all(isinstance(v, str) for v in values) and len(values) in depths:
        kinds = list(dict.fromkeys(values))
        return (kinds * LAYERS)[: max(LAYERS, 2)]
    if re.search(r"depths$", key):
        return [1] * len(values)
    if len(values) in depths and all(isinstance(v, (int, bool)) for v in values):
        return values[:LAYERS]
    if re.search(r"(index|indexes|indices|idx|idxs|_layers|layer_ids)$", key) and all(
        isinstance(v, int) for v in values
    ):
        return [v for v in values if v < LAYERS] or [LAYERS - 1]
    return values


def _ids(fields: dict[str, Any]) -> dict[str, Any]:
    """Move the ids of special tokens into the vocabulary, keeping them distinct."""
    vocab = next((v for k, v in fields.items() if k == "vocab_size" and isinstance(v, int)), VOCAB)
    spare = iter(range(vocab - 1, 0, -1))
    for key, value in fields.items():
        if (
            re.search(r"(token|pad|bos|eos|start|end)_?(id|index|token)?s?$", key)
            and isinstance(value, int)
            and not isinstance(value, bool)
            and value >= vocab
        ):
            fields[key] = next(spare, 0)
    return fields
