"""Public checkpoints of transformers' own families, as their config.json describes them.

Data only: imports no library. Dimensions are as published, but for the towers, which have one
layer: these shapes are for what a decoder does with text, and nobody reads a tower's weights then.
LongRoPE's factors are made up; only their number counts.
"""

from __future__ import annotations

from typing import Any

Words = dict[str, Any]

LLAMA3_8B: Words = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
LLAMA3_SCALING: Words = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MISTRAL_7B: Words = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32003,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
MISTRAL_12B: Words = {
    **MISTRAL_7B,
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "vocab_size": 131072,
    "max_position_embeddings": 1024000,
    "sliding_window": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e9},
}
QWEN2_7B: Words = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
QWEN3_8B: Words = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
GEMMA2_9B: Words = {
    "model_type": "gemma2",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA2_27B: Words = {
    **GEMMA2_9B,
    "hidden_size": 4608,
    "intermediate_size": 36864,
    "num_hidden_layers": 46,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "query_pre_attn_scalar": 144,
}
GEMMA3_4B: Words = {
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window": 1024,
    "query_pre_attn_scalar": 256,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
GEMMA3_12B: Words = {
    **GEMMA3_4B,
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
PHI35_MINI: Words = {
    "model_type": "phi3",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32064,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "sliding_window": 262144,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 48,
        "long_factor": [2.0] * 48,
    },
}
PHI4: Words = {
    "model_type": "phi3",
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 10,
    "vocab_size": 100352,
    "max_position_embeddings": 16384,
    "original_max_position_embeddings": 16384,
    "sliding_window": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 250000.0},
}
PHI2: Words = {
    "model_type": "phi",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 51200,
    "max_position_embeddings": 2048,
    "partial_rotary_factor": 0.4,
}

SO400M: Words = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "patch_size": 14,
}
SIGLIP: Words = {"model_type": "siglip_vision_model", "vision_use_head": False, **SO400M}
PIXTRAL: Words = {
    "model_type": "pixtral",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "patch_size": 16,
    "image_size": 1024,
}


def _mrope(text: Words, model_type: str, section: list[int], theta: float, **more: Any) -> Words:
    """`text` with positions of three axes."""
    rope = {"rope_type": "default", "rope_theta": theta, "mrope_section": section}
    return {**text, "model_type": model_type, "rope_parameters": {**rope, **more}}


# In order of how far they are from Llama: what a cut budget loses is like what it has measured.
FAMILIES: dict[str, Words] = {
    "gemma3-4b": {
        "model_type": "gemma3",
        "text_config": GEMMA3_4B,
        "vision_config": {**SIGLIP, "image_size": 896},
        "mm_tokens_per_image": 256,
    },
    "gemma2-9b": GEMMA2_9B,
    "llama3.2-vision-11b": {
        "model_type": "mllama",
        "text_config": {
            **LLAMA3_8B,
            "model_type": "mllama_text_model",
            "num_hidden_layers": 40,
            "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
            "rope_parameters": LLAMA3_SCALING,
        },
        "vision_config": {
            "hidden_size": 1280,
            "intermediate_size": 5120,
            "num_hidden_layers": 1,
            "num_global_layers": 1,
            "attention_heads": 16,
            "patch_size": 14,
            "image_size": 560,
            "max_num_tiles": 4,
            "intermediate_layers_indices": [0],
            "vision_output_dim": 2560,
        },
        "tie_word_embeddings": False,
    },
    "qwen2.5-vl-7b": {
        "model_type": "qwen2_5_vl",
        "text_config": {
            **_mrope(QWEN2_7B, "qwen2_5_vl_text", [16, 24, 24], 1e6),
            "max_position_embeddings": 128000,
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "patch_size": 14,
            "window_size": 112,
            "out_hidden_size": 3584,
            "fullatt_block_indexes": [0],
        },
        "tie_word_embeddings": False,
    },
    "qwen3-vl-8b": {
        "model_type": "qwen3_vl",
        "text_config": {
            **_mrope(QWEN3_8B, "qwen3_vl_text", [24, 20, 20], 5e6, mrope_interleaved=True),
            "max_position_embeddings": 262144,
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "patch_size": 16,
            "out_hidden_size": 4096,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [0],
        },
        "tie_word_embeddings": False,
    },
    "phi3.5-mini": {**PHI35_MINI, "tie_word_embeddings": False},
    "paligemma2-10b": {
        "model_type": "paligemma",
        "text_config": {**GEMMA2_9B, "vocab_size": 257216},
        "vision_config": {**SIGLIP, "image_size": 448},
        "projection_dim": 3584,
        "hidden_size": 3584,
    },
    "internvl3-8b": {
        "model_type": "internvl",
        "text_config": {
            **QWEN2_7B,
            "vocab_size": 151674,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6},
        },
        "vision_config": {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 1,
            "num_attention_heads": 16,
            "patch_size": [14, 14],
            "image_size": [448, 448],
        },
        "tie_word_embeddings": False,
    },
    "pixtral-12b": {
        "model_type": "llava",
        "text_config": MISTRAL_12B,
        "vision_config": PIXTRAL,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "tie_word_embeddings": False,
    },
    "llava-onevision-7b": {
        "model_type": "llava_onevision",
        "text_config": {**QWEN2_7B, "vocab_size": 152000},
        "vision_config": {**SIGLIP, "image_size": 384},
        "tie_word_embeddings": False,
    },
    "idefics3-8b": {
        "model_type": "idefics3",
        "text_config": {**LLAMA3_8B, "vocab_size": 128259},
        "vision_config": {**SO400M, "image_size": 364},
        "scale_factor": 2,
        "tie_word_embeddings": False,
    },
    "smolvlm2-2.2b": {
        "model_type": "smolvlm",
        "text_config": {
            **LLAMA3_8B,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "num_key_value_heads": 32,
            "vocab_size": 49280,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 130000.0},
        },
        "vision_config": {**SO400M, "image_size": 384},
        "scale_factor": 3,
        "tie_word_embeddings": False,
    },
    "idefics2-8b": {
        "model_type": "idefics2",
        "text_config": MISTRAL_7B,
        "vision_config": {**SO400M, "image_size": 980},
        "perceiver_config": {"model_type": "idefics2_perceiver", "resampler_depth": 1},
        "tie_word_embeddings": False,
    },
    "llama3.1-8b": {**LLAMA3_8B, "rope_parameters": LLAMA3_SCALING, "tie_word_embeddings": False},
    "qwen3-8b": {**QWEN3_8B, "tie_word_embeddings": False},
    "phi4": {**PHI4, "tie_word_embeddings": False},
    "phi2": {**PHI2, "tie_word_embeddings": False},
    "gemma3-12b": {
        "model_type": "gemma3",
        "text_config": GEMMA3_12B,
        "vision_config": {**SIGLIP, "image_size": 896},
        "mm_tokens_per_image": 256,
    },
    "gemma2-27b": GEMMA2_27B,
    "paligemma2-28b": {
        "model_type": "paligemma",
        "text_config": {**GEMMA2_27B, "vocab_size": 257216},
        "vision_config": {**SIGLIP, "image_size": 896},
        "projection_dim": 4608,
        "hidden_size": 4608,
    },
    "mistral3-24b": {
        "model_type": "mistral3",
        "text_config": {
            **MISTRAL_12B,
            "intermediate_size": 32768,
            "max_position_embeddings": 131072,
        },
        "vision_config": {**PIXTRAL, "patch_size": 14, "image_size": 1540},
        "spatial_merge_size": 2,
        "tie_word_embeddings": False,
    },
}
