"""Models of a few thousand parameters: the configuration class's own defaults, with small sizes.

A size is recognised by its name. Where that gives a model that cannot be built or run, `exceptions.SIZES` says what to
set instead.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from tests.zoo.architectures import WITH_MEDIA, Architecture
from tests.zoo.exceptions import SIZES

VOCABULARY = 128
# Identifiers below are what a batch's text has; special tokens of configurations come after it.
SPECIAL, FIRST, LAST = {"pad": 0, "bos": 1, "eos": 2}, 3, 63
HIDDEN, HEADS, HEAD_DIM = 64, 4, 16
LAYERS, MOST_LAYERS = 2, 4
MOST_PARAMETERS = 8_000_000

# The first pattern that matches a name decides. None: leave the default.
_RULES: list[tuple[str, Any]] = [
    (r"vocab_size(_per_layer_input)?|.*_vocab_size", VOCABULARY),
    (r"type_vocab_size|additional_vocab_size|pretraining_tp|num_labels", None),
    (r"(max|n)_(source_|target_)?positions?(_embeddings)?|max_seq_len|model_max_length|seq_length|n_ctx", 128),
    (r"(num_|n_)?(hidden_|encoder_|decoder_)?layers?|n_layer|depth|num_blocks|.*(encoder|decoder)_layers"
     r"|num_(encoder|decoder|hidden)_layers", LAYERS),
    (r".*(num_key_value|kv|num_kv)_heads|multi_query_group_num|num_kv", 2),
    (r"linear_num_key_heads", 2),
    (r"linear_num_value_heads|linear_num_heads", 4),
    (r".*(num|n)_(attention_|decoder_attention_|encoder_attention_)?heads?|.*_attention_heads|attention_heads", HEADS),
    (r"qk_head_dim", 2 * HEAD_DIM),
    (r"rotary_dim", 8),
    (r".*head_dim|d_kv|dim_head|d_head|head_size|kv_channels", HEAD_DIM),
    (r"(num|n)_(routed_|local_)?experts|moe_num_experts|num_local_experts", 4),
    (r"(num_)?experts_per_tok(en)?|num_experts_per_token|moe_topk|moe_k|num_selected_experts|moe_top_k", 2),
    (r"n_group|topk_group|num_expert_group|n_expert_groups", 1),
    (r"(q|kv|o)_lora_rank", 16),
    (r".*(intermediate|ffn_hidden|ffn|feed_forward)_?(size|dim|size_mlp)?|d_ff|ffn_dim|mlp_dim|n_inner|d_inner"
     r"|.*_ffn_dim|moe_dim|ffn_hidden_size", 96),
    (r"sliding_window(_size)?|attention_window|local_attention|window_size|attention_chunk_size", 8),
    (r"image_size", 32),
    (r"patch_size", 8),
    (r"(mamba_)?(d_state|state_size|ssm_state_size)|mamba_d_state", 8),
    (r"(mamba_)?chunk_size", 8),
    (r"num_mel_bins|input_feat_per_channel|mel_bins", 16),
    (r"time_step_rank|mamba_dt_rank", 8),
    (r"index_topk", 4),
    (r"index_n_heads", 2),
    (r"num_nextn_predict_layers", 0),
    (r"n_embd|d_model|dim|embed_dim|emb_dim|hidden_dim|hidden_sizes?|output_dim|.*hidden_size.*"
     r"|.*embed(ding)?_(size|dim)|.*projection_dim|word_embed_proj_dim|lru_width|embedding_size|classifier_proj_size"
     r"|out_hidden_size|hidden_channels|conv_channels|subsampling_conv_channels|adapter_(in|out)_dim"
     r"|adapter_input_size|projector_(in|out)put_dim|vision_output_dim|moe_hidden_size", HIDDEN),
]  # fmt: skip
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers")
_INDICES = re.compile(r".*(_idxs?|_indexes|_indices|_layers|_layer_ids)$")
_TOKEN = re.compile(r"(?P<name>.+?)_(token_)?(id|index)$")
_RANDOM = re.compile(r".*(dropout|drop_path|layerdrop|drop_rate|pdrop|drop_prob|jitter|mask_(time|feature)_prob).*")
_SKIPPED = {"model_type", "transformers_version", "id2label", "label2id", "architectures", "dtype", "torch_dtype"}


class Tokens:
    """Gives each special token of a model an identifier of its own, the same wherever its name recurs."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def of(self, name: str) -> int:
        for special, number in SPECIAL.items():
            if name == special or (name.endswith(f"_{special}") and len(name) < 8):
                return number
        if name == "decoder_start":
            return SPECIAL["bos"]
        return self.ids.setdefault(name, LAST + 1 + len(self.ids))


def arguments(default: Any, tokens: Tokens) -> dict[str, Any]:
    """What to construct `default`'s class with, parts that are configurations themselves included, as dicts."""
    values = {name: _default(default, name) for name in default.to_dict() if name not in _SKIPPED}
    kept = _layers(values)
    given: dict[str, Any] = {}
    if layers := default.to_dict().get("per_layer_config"):
        given["per_layer_config"] = {
            new: {n: HEADS if n == "num_key_value_heads" else _size(n) or value for n, value in layers[key].items()}
            for new, old in enumerate(kept)
            for key in layers
            if int(key) == old
        }
    for name, value in values.items():
        if name.startswith("_") or name == "per_layer_config":
            continue
        if name == "head_dim" or (name == "num_key_value_heads" and ("kv_lora_rank" in values or value is None)):
            # With latent keys, each head has its own.
            given[name] = HEAD_DIM if name == "head_dim" else HEADS
            continue
        if value is None and name in ("image_token_id", "audio_token_id"):
            given[name] = tokens.of(name.removesuffix("_token_id"))
        elif hasattr(value, "to_dict"):
            given[name] = {"model_type": value.model_type, **arguments(value, tokens)}
        elif name == "apply_spec_augment":
            given[name] = False  # random, and needs longer sounds
        elif isinstance(value, bool) or value is None:
            continue
        elif isinstance(value, (int, float)) and _RANDOM.match(name):
            given[name] = type(value)(0)
        elif isinstance(value, int) and (token := _TOKEN.match(name)):
            given[name] = tokens.of(token["name"])
        elif isinstance(value, (list, tuple)):
            cut = _cut(name, value, values, kept)
            if cut is not None:
                given[name] = cut
        elif isinstance(value, int):
            size = _size(name)
            if size is not None and value > 0:
                given[name] = len(kept) if name in _LAYER_COUNTS else size
        elif isinstance(value, dict) and "mrope_section" in value:
            half = HEAD_DIM // 2
            given[name] = {**value, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    return given


def _size(name: str) -> int | None:
    return next((size for pattern, size in _RULES if re.fullmatch(pattern, name)), None)


def _default(configuration: Any, name: str) -> Any:
    """What differs between layers cannot be read from the whole: then it is what the class says."""
    try:
        return getattr(configuration, name, None)
    except (AttributeError, RuntimeError):
        return getattr(type(configuration), name, None)


def _depth(values: dict[str, Any]) -> int | None:
    return next((values[name] for name in _LAYER_COUNTS if isinstance(values.get(name), int)), None)


def _layers(values: dict[str, Any]) -> list[int]:
    """The layers to keep: one of each kind, where lists tell each layer's kind, and at least two."""
    depth = _depth(values)
    lists = [v for v in values.values() if isinstance(v, (list, tuple)) and depth and len(v) == depth]
    if not lists or depth is None:
        return list(range(LAYERS))
    first: dict[str, int] = {}
    for layer in range(depth):
        first.setdefault(str([each[layer] for each in lists]), layer)
    kept = list(first.values())[:MOST_LAYERS]
    return kept + kept[-1:] * (LAYERS - len(kept))


def _cut(name: str, value: Any, values: dict[str, Any], kept: list[int]) -> list[Any] | None:
    if name in ("conv_dim", "tdnn_dim"):
        return [HIDDEN // 2] * len(value)
    if name in ("hidden_sizes", "downsample_channels"):
        return [HIDDEN] * len(value)
    if value and len(value) == _depth(values):
        return [value[layer] for layer in kept]
    if _INDICES.match(name) and value and all(isinstance(layer, int) for layer in value):
        return [layer for layer in value if layer < len(kept)] or [len(kept) - 1]
    return None


def _merge(given: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(given.get(name), dict):
            _merge(given[name], value)
        else:
            given[name] = value
    return given


def configuration(architecture: Architecture) -> Any:
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[architecture.model_type]
    starts_from = SIZES.get(f"default of {architecture.model_type}", {})
    default = config_class(**starts_from)
    given = arguments(default, Tokens())
    if architecture.task in ("classification", *WITH_MEDIA):
        # A sequence's class is read at its last token, which is found by what is padding; so do some shift labels.
        if hasattr(config_class, "pad_token_id"):
            given.setdefault("pad_token_id", SPECIAL["pad"])
        for part in given.values():
            if isinstance(part, dict) and "vocab_size" in part:
                part.setdefault("pad_token_id", SPECIAL["pad"])
    if getattr(default, "is_encoder_decoder", False) or architecture.task in ("seq2seq", "speech"):
        given.setdefault("decoder_start_token_id", SPECIAL["bos"])
        given.setdefault("pad_token_id", SPECIAL["pad"])
    for key in (architecture.model_type, architecture.key):
        _merge(given, SIZES.get(key, {}))
    return config_class(**given)


def model(architecture: Architecture, experts: str | None = None) -> torch.nn.Module:
    """In training mode, with random parameters from seed 0; raises whatever the class raises.

    experts: how a mixture's experts are to run; None leaves the default.
    """
    import transformers

    model_class = getattr(transformers, architecture.class_name)

    def config() -> Any:
        whole = configuration(architecture)
        # A composite type stands in the mapping of causal models for its part that is one.
        parts = [whole, *(getattr(whole, name) for name in whole.sub_configs)]
        return next((part for part in parts if isinstance(part, model_class.config_class)), whole)

    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(config()).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"the configuration is not tiny: {size} parameters")
    torch.manual_seed(0)
    built = model_class(config())
    for parameter in built.parameters():
        # Some classes initialise to zeros, which would hide what multiplies them, or not at all.
        if parameter.is_floating_point() and (not parameter.isfinite().all() or not parameter.any()):
            torch.nn.init.normal_(parameter, std=0.02)
    if experts is not None:
        built.set_experts_implementation(experts)
    return built.float().train()


def has_experts(built: torch.nn.Module) -> bool:
    """Whether transformers can run the model's experts in more ways than one: its decorator sets these attributes."""
    return any(hasattr(module, "has_gate") and hasattr(module, "is_transposed") for module in built.modules())
