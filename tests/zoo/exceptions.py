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

# Of the encoders that turn waves into frames of 32 samples.
_WAVES: dict[str, Any] = {"num_filters": 4, "downsampling_ratios": [2, 4, 4], "depths": [1, 1, 1, 1]}

_MAMBA: dict[str, Any] = {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2}

# The two parts of a head, with and without positions, are 16 wide each.
_SLIDING_MLA: dict[str, Any] = {"shared_experts_intermediate_size": 32, "head_dim": 32}

_INDEXER: dict[str, Any] = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}  # fmt: skip

SIZES: dict[str, dict[str, Any]] = {
    **{name: {"block_size": 2, "num_random_blocks": 1} for name in ("big_bird", "bigbird_pegasus")},
    "blt": {"encoder_hash_byte_group_vocab": 128, "hidden_size_global": 64},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "dots3_note_text": _SLIDING_MLA,
    "dots3_note": {"text_config": _SLIDING_MLA},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    **{name: {"text_config": {"rope_parameters": _MROPE}} for name in ("glm46v", "glm4v", "glm_ocr", "glmga")},
    **{
        name: {"encoder_config": {"input_dim": 16}, "window_size": 8, "downsample_rate": 4}
        for name in ("granite_speech", "granite_speech_plus")
    },
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}, "audio_config": {"num_stacked_frames": 2}},
    "moonshine_streaming": {"num_key_value_heads": 4, "encoder_config": {"num_key_value_heads": 4}},
    "kyutai_speech_to_text": {
        "num_codebooks": 4,
        "codec_config": {"num_filters": 4, "upsample_groups": 64, "num_key_value_heads": 4, "codebook_size": 16},
    },
    "voxtral": {"audio_config": {"intermediate_size": 256}},
    "wav2vec2-bert": {"vocab_size": 128, "feature_projection_input_dim": 16},
    "muse_glimmer": {"out_hidden_size": 256},
    "muse_spark": {"out_hidden_size": 256},
    "llama4": {"vision_config": {"intermediate_size": 256}},
    "qwen4_exp_text": _INDEXER,
    "qwen4_exp": {"text_config": _INDEXER},
    "instructblipvideo": {"video_token_index": 64, "num_query_tokens": 4},
    **{name: {"vision_config": {"pooling_kernel_size": 2}} for name in ("gemma4", "diffusion_gemma")},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_ocr2": {"text_config": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"]}},
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {**_MROPE, "mrope_section": [3, 3, 2]}}},
    "florence2": {
        "vision_config": {
            "depths": [1, 1],
            "patch_size": [7, 3],
            "patch_stride": [4, 2],
            "patch_padding": [3, 1],
            "patch_prenorm": [False, True],
            "embed_dim": [32, 64],
            "num_heads": [2, 4],
            "num_groups": [2, 4],
            "window_size": 4,
        }
    },
    "glm5_next": {"text_config": {"index_kpool": 2, "num_key_value_heads": 4}},
    "granite4_vision": {
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-2, 0]],
        "spatial_target_layers": [1],
        "image_grid_pinpoints": [[32, 32]],
    },
    "janus": {"vq_config": {**_VQ, "base_channels": 32}, "vision_config": {"num_image_tokens": 16}},
    "molmo2": {
        "adapter_config": {"vision_feature_layer": [-1, -2]},
        "vision_config": {"image_size": [32, 32], "num_position_embeddings": 16},
    },
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}, "text_config": _MAMBA},
    "nemo_speechlm": {
        "text_config": _MAMBA,
        "audio_config": {
            "asr_config": {"num_key_value_heads": 4},
            "diarization_config": {"audio_config": {"num_key_value_heads": 4}},
        },
    },
    "granite_speech5_ctc": {"encoder_config": {"context_size": 8, "num_mel_bins": 8, "num_key_value_heads": 4}},
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config": _WAVES,
        "semantic_tokenizer_encoder_config": _WAVES,
        "acoustic_tokenizer_chunk_size": 3200,
    },
    "vibevoice": {"audio_config": _WAVES, "semantic_model_config": _WAVES},
    "mistral4": {"head_dim": 32},
    "lilt": {"channel_shrink_ratio": 4, "hidden_size": 96},
    "layoutlmv3": {"coordinate_size": 10, "shape_size": 12, "input_size": 32},
    "mobilebert": {"intra_bottleneck_size": 64, "true_hidden_size": 64},
    "perceiver": {
        "num_latents": 8,
        "d_latents": 64,
        "num_self_attends_per_block": 2,
        "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
        "qk_channels": 64,
        "v_channels": 64,
    },
    "kosmos-2": {"latent_query_num": 4},
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
        "vocabulary_map": {
            "<image>": 64,
            "<|extra_200|>": 65,
            **{f"<|visual token {n:06d}|>": 70 + n for n in range(8)},
        },
        "vq_config": {**_VQ, "base_channels": 32, "hidden_size": 32, "attn_resolutions": []},
    },
    "gemma4_unified": {"vision_config": {"pooling_kernel_size": 1, "mm_embed_dim": 64, "output_proj_dims": 64}},
    "default of gemma4": {"vision_config": {}},
    "default of gemma4_unified": {"vision_config": {}},
    **{name: {"feature_projection_input_dim": 16} for name in ("seamless_m4t", "seamless_m4t_v2")},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
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
    "nemotron_h": _MAMBA,
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
    "masked/perceiver": {"max_position_embeddings": 16},
    "masked/reformer": {"is_decoder": False},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "n_mamba_heads": 2,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "zamba2": {
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "mamba_ngroups": 2,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "zaya": {"num_experts_per_tok": 1},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 128,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.95, 0.0] * 2,
    },
    "gemma4_text": {
        "global_head_dim": 16,
        "num_kv_shared_layers": 2,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}

LEFT_OUT: dict[str, str] = {
    **dict.fromkeys(("fast_vlm", "gemma3n", "perception_lm"), "needs timm"),
    "layoutlmv2": "needs detectron2",
    "causal/git": "its labels follow an image: see vision-language",
    "gemma4_assistant": "drafts for another model, whose keys and values it takes",
    "gemma4_unified_assistant": "drafts for another model, whose keys and values it takes",
}

# Why an architecture is more than one graph, where the reason that Dynamo gives does not say it.
REASONS: dict[str, str] = {
    "cosmos3_edge": "reads, in each step, the shapes of its images from a tensor that it has computed",
    "ctrl": "assigns a buffer that it has moved to the device it is on",
    "hunyuan_vl": "groups tokens by `itertools.groupby` over a tensor's elements",
    "ibert": "asks in each layer for the range of its activations",
    "qwen3_asr": "reads, in each step, the lengths of its sounds from a tensor that it has computed",
    "switch_transformers": "loops over the experts with tokens, after it has dropped those beyond an expert's capacity",
    "udop": "pads images to their numbers of patches outside the text's boxes, which depend on floating-point inputs",
    **dict.fromkeys(
        ("qwen4_exp", "qwen4_exp_text"), "asks, for each token, how many tokens it may attend to, in a loop over tokens"
    ),
    "reformer": "sets seeds in each layer, in an autograd function of its own",
    "yoso": "gives its mask twice to an autograd function",
}
