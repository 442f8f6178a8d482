"""What the rules of `tiny` and `batches` do not find out by themselves.

SIZES: by type of model, or by task and type ("causal/NAME"), arguments of its configuration class that replace those of
the rules; by "default of TYPE", those without which not even the defaults can be had.
LEFT_OUT: architectures that are not run, by the same keys, and why.
REASONS: by the same keys, for docs/supported.md.
"""

from __future__ import annotations

from typing import Any

# Positions of three kinds share a head's 8 frequencies.
_MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}

# Of the encoders that turn an image into identifiers of tokens.
_VQ: dict[str, Any] = {
    "num_embeddings": 8, "codebook_size": 8, "embed_dim": 16, "latent_channels": 16, "channel_multiplier": [1, 1],
    "num_res_blocks": 1,
}  # fmt: skip

SIZES: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 128, "hidden_size_global": 64},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "dots3_note_text": {"shared_experts_intermediate_size": 32},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    **{name: {"text_config": {"rope_parameters": _MROPE}} for name in ("glm46v", "glm4v", "glm_ocr", "glmga")},
    "glm4v_moe": {
        "text_config": {"rope_parameters": {**_MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}
    },
    "cohere_compass": {
        "text_config": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}}
    },
    **{name: {"vision_config": {"window_size": 32}} for name in ("exaone4_5", "hyperclovax_vision_v2")},
    "qwen2_5_omni_thinker": {
        "vision_config": {"window_size": 32},
        "text_config": {"rope_parameters": _MROPE},
        "vision_start_token_id": 70,
    },
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 70},
    **{name: {"image_token_index": 64, "num_query_tokens": 4} for name in ("blip-2", "instructblip")},
    "mllama": {"vision_config": {"vision_output_dim": 128}},
    "step3p7": {"text_config": {"sliding_window": 8}},
    **{name: {"mm_tokens_per_image": 4} for name in ("gemma3", "shieldgemma2")},
    "t5gemma2": {"encoder": {"mm_tokens_per_image": 4}},
    # An image that fills one tile, which is there twice: cut from the whole, and as the whole.
    **{name: {"image_grid_pinpoints": [[32, 32]]} for name in ("llava_next", "llava_next_video", "llava_onevision")},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "paddleocr_vl": {"text_config": {"rope_parameters": _MROPE}},
    "hunyuan_vl": {"text_config": {"rope_parameters": {**_MROPE, "mrope_section": [2, 2, 2, 2]}}},
    "chameleon": {
        "vocabulary_map": {"<image>": 64, **{f"IMGIMG{letter}Z": 70 + n for n, letter in enumerate("ABCDEFGH")}},
        "vq_config": {**_VQ, "resolution": 32, "base_channels": 32},
    },
    "emu3": {
        "vocabulary_map": {"<image>": 64, **{f"<|visual token {n:06d}|>": 70 + n for n in range(8)}},
        "vq_config": {**_VQ, "base_channels": 32, "attn_resolutions": []},
    },
    "default of gemma4": {"vision_config": {}},
    "default of gemma4_unified": {"vision_config": {}},
    **{
        name: {"decoder_start_token_id": 1, "pad_token_id": 0}
        for name in ("cohere_asr", "speech-encoder-decoder", "udop")
    },
    **{name: {"feature_projection_input_dim": 16} for name in ("seamless_m4t", "seamless_m4t_v2")},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "wav2vec2-bert": {"vocab_size": 128},
    "wav2vec2-conformer": {"vocab_size": 128},
    "qwen2_vl": {"text_config": {"rope_parameters": _MROPE}},
    "qwen2_5_vl": {"vision_config": {"window_size": 32}, "text_config": {"rope_parameters": _MROPE}},
    "funnel": {"block_sizes": [1, 1], "num_decoder_layers": 1},
    "esm": {"vocab_size": 128, "pad_token_id": 0, "mask_token_id": 70},
    "esmc": {"num_key_value_heads": 4},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"expert_ffn_hidden_size": 32, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2},
    "reformer": {
        "hash_seed": 0,
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds": False,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 2,
        "num_hidden_layers": 2,
    },
    "masked/reformer": {"is_decoder": False},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "n_mamba_heads": 2},
    "zamba2": {
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "mamba_ngroups": 2,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "zaya": {"num_experts_per_tok": 1},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 128,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "intermediate_size": [96, 96],
        "activation_sparsity_pattern": [0.95, 0.0],
    },
    "gemma4_text": {
        "global_head_dim": 16,
        "num_kv_shared_layers": 2,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "t5": {"decoder_start_token_id": 0},
}

LEFT_OUT: dict[str, str] = {
    "gemma4_assistant": "drafts for another model, whose keys and values it takes",
    "gemma4_unified_assistant": "drafts for another model, whose keys and values it takes",
}

# Why an architecture is more than one graph, where the reason that Dynamo gives does not say it.
REASONS: dict[str, str] = {
    "reformer": "sets seeds in each layer, in an autograd function of its own",
}
