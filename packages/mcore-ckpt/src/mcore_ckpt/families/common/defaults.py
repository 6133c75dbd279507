"""Defaults of our own fields, as a test compares them with mcore-models'."""

from typing import Any

HYBRID_VARIANTS: dict[str, Any] = {
    "mamba_norm": "gated",
}
"""Defaults of what few hybrids' Mamba layers have."""

HYBRID: dict[str, Any] = {
    "hybrid_override_pattern": "",
    "mamba_state_dim": 128,
    "mamba_head_dim": 64,
    "mamba_num_heads": 0,
    "mamba_num_groups": 8,
    "mamba_conv_kernel": 4,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "mamba_chunk_size": 128,
    "mamba_dt_limit": (0.0, 0.0),
    "mamba_dt_min": 0.001,
    "mamba_dt_max": 0.1,
    "mamba_dt_init_floor": 1e-4,
}
"""Defaults of what says which layers a hybrid has, and of its Mamba layers."""

DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
"""Defaults of the sizes of gated delta nets."""

ROPE_VARIANTS: dict[str, Any] = {
    "rope_type": "rope",
    "rotary_scaling_factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": True,
    "rope_attention_factor": 0.0,
    "longrope_short_factor": (),
    "longrope_long_factor": (),
}
"""Defaults of how rotary wavelengths are stretched."""

MUP: dict[str, Any] = {
    "use_mup": False,
    "mup_base_hidden_size": 0,
    "mup_embedding_mult": 1.0,
    "mup_output_mult": 1.0,
    "mup_attn_scale_power": 1.0,
    "mup_base_head_dim": 0,
}
"""Defaults of what makes factors follow from the width."""

VARIANTS: dict[str, Any] = {
    **HYBRID,
    **HYBRID_VARIANTS,
    **DELTA_NET,
    **ROPE_VARIANTS,
    "norm_placement": "pre",
    "embedding_layernorm": False,
    "norm_bias": True,
    "parallel_residual": "off",
    "add_attention_bias": False,
    "qk_norm_width": "head",
    "qk_l2_norm": False,
    "attention_output_gate": False,
    "softmax_scale": 0.0,
    "attn_logit_softcapping": 0.0,
    "softmax_type": "vanilla",
    "attention_chunk_size": 0,
    "rope_skip_freq": "0",
    "rotary_base_local": 0.0,
    "attention_temperature_span": 0,
    "attention_temperature_scale": 0.1,
    "attention_temperature_layers": "unrotated",
    "geglu": False,
    "exact_geglu": False,
    "activation_func_clamp_value": 0.0,
    "glu_linear_offset": 0.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_multiplier": 1.0,
    **MUP,
    "final_logit_softcapping": 0.0,
    "mtp_num_layers": 0,
}
"""Defaults of what few families have: others refuse them, see ``refuse_variants``."""

DEFAULTS: dict[str, Any] = {
    "num_query_groups": 0,
    "ffn_hidden_size": 0,
    "kv_channels": 0,
    "max_position_embeddings": 0,
    "position_embedding_type": "rope",
    "rotary_base": 10000.0,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": 1.0,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "rope_scaling_low_freq_factor": 1.0,
    "rope_scaling_high_freq_factor": 4.0,
    "rope_scaling_original_max_position_embeddings": 8192,
    "multi_latent_attention": False,
    "q_lora_rank": 0,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-5,
    "apply_layernorm_1p": False,
    "qk_layernorm": False,
    "swiglu": True,
    "quick_geglu": False,
    "squared_relu": False,
    "openai_gelu": False,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "untie_embeddings_and_output_weights": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "window_size": (-1, 0),
    "window_attn_skip_freq": "0",
    "init_method_std": 0.02,
    **VARIANTS,
}
"""TransformerConfig's defaults; a test holds them equal to mcore-models'."""
