"""Tiny random models of every decoder family of transformers, for ``test_families``."""

ODD = {
    "hidden_size": 20,
    "num_hidden_layers": 3,
    "vocab_size": 37,
    "intermediate_size": 12,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "pad_token_id": 36,  # its row of the embedding gets no gradient there, and no token is it
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHORT = {name: ODD[name] for name in ("vocab_size", "pad_token_id", "attn_implementation")}
# Their grouped GEMMs take no float64.
ODD_MOE = ODD | {"experts_implementation": "eager"}
# Heads x head dim is not the hidden size; two key/value heads for four queries.
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
EVEN = {"num_attention_heads": 2, "num_key_value_heads": 2}
HYBRID = {
    "mamba_n_heads": 4,
    "mamba_d_head": 10,
    "mamba_n_groups": 2,
    "mamba_d_state": 5,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 4,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 3,
}
LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 9,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 5000.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 100.0,
}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0],
    "long_factor": [1.0, 3.0, 5.0, 7.0, 9.0],
    "rope_theta": 1e4,
}


def rope(**parameters):
    """Say how positions rotate, in the spelling of today."""
    return {"rope_parameters": {"rope_theta": 1e4, **parameters}}


CASES = {
    "llama": ("Llama", {**ODD, **HEADS}),
    "llama tied, with biases, llama3 scaling": (
        "Llama",
        {**ODD, **HEADS, "tie_word_embeddings": True, "rope_parameters": LLAMA3}
        | {"attention_bias": True, "mlp_bias": True},
    ),
    "llama with attention biases, linear": (
        "Llama",
        {**ODD, **HEADS, "attention_bias": True, **rope(rope_type="linear", factor=2.0)},
    ),
    "mistral": ("Mistral", {**ODD, **HEADS, "sliding_window": 5}),
    "qwen2, windows above, yarn": (
        "Qwen2",
        {
            **ODD,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "rope_parameters": YARN,
        },
    ),
    "qwen3 with biases, yarn of a factor": (
        "Qwen3",
        {
            **ODD,
            **HEADS,
            "attention_bias": True,
            "rope_parameters": YARN | {"attention_factor": 1.3, "truncate": False},
        },
    ),
    "phi3 longrope": (
        "Phi3",
        {**ODD, **EVEN, "original_max_position_embeddings": 16, "rope_parameters": LONG},
    ),
    "nemotron": ("Nemotron", {**ODD, **HEADS, "head_dim": 8, "norm_eps": 1e-4}),
    "gpt2": (
        "GPT2",
        {
            "n_embd": 20,
            "n_layer": 3,
            "n_head": 2,
            "n_inner": 26,
            "n_positions": 64,
            "vocab_size": 37,
            "attn_implementation": "eager",
            "tie_word_embeddings": False,
        }
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        | {"bos_token_id": 1, "eos_token_id": 2, "activation_function": "relu"},
    ),
    "gemma2": ("Gemma2", {**ODD, **HEADS, "sliding_window": 5, "attn_logit_softcapping": 0.5}),
    "gemma3_text": (
        "Gemma3Text",
        {**ODD, **HEADS, "sliding_window": 5, "layer_types": None, "sliding_window_pattern": 2}
        | {"query_pre_attn_scalar": 7},
    ),
    "gemma4_text": (
        "Gemma4Text",
        {**ODD, **HEADS, "num_hidden_layers": 4, "sliding_window": 5, "global_head_dim": 10}
        | {"layer_types": [*["sliding_attention", "full_attention"] * 2]}
        | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True}
        | {"num_global_key_value_heads": 1, "final_logit_softcapping": 2.0},
    ),
    "gemma4_text with vectors for each layer": (
        "Gemma4Text",
        {**ODD, **HEADS, "num_hidden_layers": 5, "sliding_window": 5, "global_head_dim": 10}
        | {"layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"]}
        | {"hidden_size_per_layer_input": 3, "vocab_size_per_layer_input": 37}
        | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True},
    ),
    "gemma3n_text": (
        "Gemma3nText",
        {**ODD, **HEADS, "num_hidden_layers": 5, "sliding_window": 5, "laurel_rank": 3}
        | {"pad_token_id": -1}  # the last row of both tables
        | {"layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"]}
        | {"hidden_size_per_layer_input": 3, "vocab_size_per_layer_input": 41}
        | {"num_kv_shared_layers": 3, "altup_num_inputs": 3, "final_logit_softcapping": 2.0}
        | {"activation_sparsity_pattern": [0.8, 0.0, 0.3, 0.5, 0.0]},
    ),
    "olmo2": ("Olmo2", {**ODD, **EVEN, "attention_bias": True}),
    "olmo3": (
        "Olmo3",
        {**ODD, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
        | {"sliding_window": 5, "rope_scaling": YARN},
    ),
    "granite": (
        "Granite",
        {**ODD, "num_attention_heads": 2, "num_key_value_heads": 1}
        | {"embedding_multiplier": 12.0, "attention_multiplier": 0.3}
        | {"residual_multiplier": 0.22, "logits_scaling": 6.0}
        | {"attention_bias": True, "mlp_bias": True},
    ),
    "cohere": (
        "Cohere",
        {**ODD, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
        | {"use_qk_norm": True},
    ),
    "cohere2": ("Cohere2", {**ODD, **HEADS, "num_hidden_layers": 4, "sliding_window": 5}),
    "starcoder2": ("Starcoder2", {**ODD, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "gpt_neox": (
        "GPTNeoX",
        {**ODD, "num_attention_heads": 2, **rope(partial_rotary_factor=0.4)},
    ),
    # Heads that are no power of two.
    "gpt_neox in sequence": (
        "GPTNeoX",
        {**ODD, "num_attention_heads": 2, "use_parallel_residual": False},
    ),
    "smollm3": (
        "SmolLM3",
        {
            **ODD,
            **HEADS,
            "head_dim": None,
            "num_attention_heads": 2,
            "no_rope_layer_interval": 2,
        },
    ),
    "apertus": (
        "Apertus",
        {**ODD, **HEADS, "attention_bias": True, "hidden_act": "xielu"}
        | {"rope_parameters": LLAMA3},
    ),
    "arcee": ("Arcee", {**ODD, **EVEN, "attention_bias": True}),
    "cwm": ("Cwm", {**ODD, **HEADS, "sliding_window": 5, "rope_parameters": LLAMA3}),
    "ernie4_5": ("Ernie4_5", {**ODD, **HEADS, "use_bias": True}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {**ODD_MOE, **HEADS, "num_hidden_layers": 4, "moe_layer_start_index": 1}
        | {"moe_layer_interval": 2, "moe_num_experts": 4, "moe_k": 2}
        | {"moe_intermediate_size": 8, "moe_num_shared_experts": 2},
    ),
    "exaone4": (
        "Exaone4",
        {**ODD, **EVEN, "sliding_window": 5, "sliding_window_pattern": 2},
    ),
    "gemma": ("Gemma", {**ODD, **HEADS}),
    "glm": ("Glm", {**ODD, **HEADS, "head_dim": 8, "attention_bias": False}),
    "glm, an odd number of rotated channels": ("Glm", {**ODD, **HEADS}),
    "glm4": ("Glm4", {**ODD, **HEADS, "head_dim": 8}),
    "internlm3, a dynamic llama": (
        "InternLM3",
        {**ODD, **HEADS, "max_position_embeddings": 16} | rope(rope_type="dynamic", factor=4.0),
    ),
    "helium": ("Helium", {**ODD, **HEADS, "num_attention_heads": 2, "head_dim": 10}),
    "ministral": (
        "Ministral",
        {**ODD, **HEADS, "sliding_window": 5}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "ministral3": (
        "Ministral3",
        {**ODD, **HEADS, "max_position_embeddings": 32}
        | rope(**{**YARN, "original_max_position_embeddings": 8}, llama_4_scaling_beta=0.3),
    ),
    "llama gated by gelu": ("Llama", {**ODD, **HEADS, "hidden_act": "gelu_pytorch_tanh"}),
    "nanochat": ("NanoChat", {**ODD, **EVEN}),
    "olmo": ("Olmo", {**ODD, "num_attention_heads": 5, "num_key_value_heads": 1}),
    "opt": (
        "OPT",
        {**ODD, "ffn_dim": 26, "word_embed_proj_dim": 20, "num_attention_heads": 4}
        | {"dropout": 0.0, "intermediate_size": None},
    ),
    "opt without biases and weights of norms": (
        "OPT",
        {**ODD, "ffn_dim": 26, "word_embed_proj_dim": 20, "num_attention_heads": 5}
        | {"dropout": 0.0, "intermediate_size": None, "enable_bias": False}
        | {"layer_norm_elementwise_affine": False, "activation_function": "gelu"},
    ),
    "falcon with two norms": (
        "Falcon",
        {**ODD, "hidden_size": 24, "num_attention_heads": 6, "num_kv_heads": 2}
        | {"new_decoder_architecture": True, "intermediate_size": None, "ffn_hidden_size": 26}
        | {"tie_word_embeddings": False},
    ),
    "falcon with one key": (
        "Falcon",
        {**ODD, "num_attention_heads": 5, "intermediate_size": None, "bias": True},
    ),
    "phi": (
        "Phi",
        {**ODD, **EVEN, "num_key_value_heads": 1, **rope(partial_rotary_factor=0.4)},
    ),
    "seed_oss": (
        "SeedOss",
        {**ODD, **HEADS, **dict.fromkeys(("attention_dropout", "residual_dropout"), 0.0)},
    ),
    "vaultgemma": ("VaultGemma", {**ODD, **HEADS, "sliding_window": 5}),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1",
        {**ODD, **HEADS, "attention_bias": True, "tie_word_embeddings": True}
        | rope(rope_type="dynamic", alpha=50.0, factor=1.0),
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1",
        {**ODD_MOE, **HEADS, "num_key_value_heads": 1, "num_experts": 4, "moe_topk": 2},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {**ODD_MOE, **LATENT, "n_shared_experts": 2, "routed_scaling_factor": 1.3}
        | {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "rms_norm_eps": 1e-3},
    ),
    "deepseek_v32": (
        "DeepseekV32",
        {**ODD_MOE, **LATENT, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1}
        | {"n_routed_experts": 6, "num_experts_per_tok": 4, "moe_intermediate_size": 8}
        | {"index_topk": 5, "index_head_dim": 6, "index_n_heads": 12},
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {**ODD_MOE, **HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"rotary_dim": 4, "tie_word_embeddings": True},
    ),
    "phimoe": (
        "Phimoe",
        {**ODD_MOE, **HEADS, "num_local_experts": 4, "router_jitter_noise": 0.3}
        | {"attention_bias": True, "lm_head_bias": True, "sliding_window": 5},
    ),
    "phimoe longrope": (
        "Phimoe",
        {**ODD_MOE, **EVEN, "num_local_experts": 3}
        | {"router_jitter_noise": 0.1, "tie_word_embeddings": True}
        | rope(**LONG, short_mscale=1.3, long_mscale=1.3, original_max_position_embeddings=32),
    ),
    "dots1": (
        "Dots1",
        {**ODD_MOE, **HEADS, "first_k_dense_replace": 1, "n_shared_experts": 2}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
        | {"norm_topk_prob": False, "sliding_window": 5, "max_window_layers": 2},
    ),
    "olmoe": ("Olmoe", {**ODD_MOE, **EVEN, "num_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2Moe",
        {**ODD_MOE, **EVEN, "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 6},
    ),
    "gpt_oss": (
        "GptOss",
        {**ODD_MOE, **HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"sliding_window": 5, "rope_parameters": YARN | {"truncate": False}}
        | {"swiglu_limit": 0.5},
    ),
    "glm4_moe": (
        "Glm4Moe",
        {**ODD_MOE, **HEADS, "head_dim": 8, "attention_bias": True, "use_qk_norm": True}
        | {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
        | {"routed_scaling_factor": 1.5, "n_shared_experts": 1}
        | {"n_group": 3, "topk_group": 2},
    ),
    "llama4_text": (
        "Llama4Text",
        {**ODD_MOE, **HEADS, "num_hidden_layers": 4, "intermediate_size_mlp": 16}
        | {"num_local_experts": 3, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}
        | rope(**{**LLAMA3, "high_freq_factor": 1.0})
        | {"attention_chunk_size": 6, "floor_scale": 4, "attn_scale": 0.3},
    ),
    "mixtral": (
        "Mixtral",
        {**ODD_MOE, **HEADS, "num_local_experts": 3, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **ODD_MOE,
            **HEADS,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "moe_intermediate_size": 8,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_5_text": (
        "Qwen3_5Text",
        {**ODD, **HEADS, **DELTA, "head_dim": 12, "tie_word_embeddings": True}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeText",
        {**ODD_MOE, **HEADS, **DELTA, "head_dim": 8, "full_attention_interval": 2}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
        | {"shared_expert_intermediate_size": 6, "num_key_value_heads": 1},
    ),
    "qwen3_next": (
        "Qwen3Next",
        {**ODD_MOE, **HEADS, "head_dim": 8, "num_hidden_layers": 4}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
        | {"shared_expert_intermediate_size": 6, "mlp_only_layers": [1]}
        | {"full_attention_interval": 2, "intermediate_size": 12, **DELTA},
    ),
    "minimax": (
        "MiniMax",
        {**ODD_MOE, **HEADS, "num_hidden_layers": 4, "block_size": 8}
        | {"num_local_experts": 3, "num_experts_per_tok": 2, **rope()}
        | {"layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2]}
        | {"full_attn_alpha_factor": 1.3, "linear_attn_alpha_factor": 0.7}
        | {"mlp_alpha_factor": 1.1, "full_attn_beta_factor": 0.9}
        | {"linear_attn_beta_factor": 1.2, "mlp_beta_factor": 0.8},
    ),
    "kimi_linear": (
        "KimiLinear",
        {k: v for k, v in ODD_MOE.items() if k != "max_position_embeddings"}
        | {**LATENT, "q_lora_rank": None, "num_hidden_layers": 4, "rms_norm_eps": 1e-3}
        | {"layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2]}
        | {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"], "n_group": 2}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
        | {"topk_group": 1, "linear_num_heads": 2, "linear_head_dim": 5}
        | {"linear_conv_kernel_dim": 3},
    ),
    "lfm2": (
        "Lfm2",
        {**ODD, "num_attention_heads": 2, "num_key_value_heads": 1, "conv_bias": True}
        | {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 4}
        | {"block_multiple_of": 7, "block_ffn_dim_multiplier": 1.3},
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {**ODD_MOE, **EVEN, "num_experts": 4, "num_experts_per_tok": 2}
        | {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}
        | {"moe_intermediate_size": 8, "tie_word_embeddings": False}
        | {"routed_scaling_factor": 1.4},
    ),
    "bamba": (
        "Bamba",
        {**ODD, **HYBRID, "num_attention_heads": 5, "num_key_value_heads": 1}
        | {"attn_layer_indices": [1]},
    ),
    "granitemoe": (
        "GraniteMoe",
        {**ODD_MOE, **EVEN, "num_local_experts": 4, "attention_multiplier": 0.3}
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "granitemoeshared": (
        "GraniteMoeShared",
        {**ODD_MOE, **EVEN, "num_local_experts": 3, "shared_intermediate_size": 8},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {**ODD_MOE, **HYBRID, "num_attention_heads": 2, "num_key_value_heads": 1}
        | {"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 4}
        | {"shared_intermediate_size": 8, "attention_multiplier": 0.3}
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "granitemoehybrid, dense, rotated": (
        "GraniteMoeHybrid",
        {**ODD, **HYBRID, "num_attention_heads": 2, "num_key_value_heads": 1}
        | {"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0}
        | {"shared_intermediate_size": 8, "position_embedding_type": "rope"},
    ),
}
"""Class and config of each case."""

_EYES = {"hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 20}
SEEING = {
    "Qwen2_5_VL": (
        ODD | EVEN | rope(rope_type="default", mrope_section=[1, 2, 2]),
        _EYES | {"depth": 1, "fullatt_block_indexes": [0]},
    ),
    "Qwen3VL": (
        ODD
        | HEADS
        | rope(rope_type="default", mrope_section=[1, 1, 1])
        | {"tie_word_embeddings": True},
        _EYES | {"depth": 1, "deepstack_visual_indexes": [0], "num_position_embeddings": 4},
    ),
    "Gemma3": (
        ODD | HEADS | {"sliding_window": 5, "tie_word_embeddings": False},
        {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
        | {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14},
    ),
    "Mistral3": (
        ODD | HEADS | {"model_type": "mistral", "sliding_window": None},
        {"model_type": "pixtral", "hidden_size": 8, "intermediate_size": 8}
        | {"num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
        | {"head_dim": 4},
    ),
}
"""Text and vision configs of models that see; ``tie_word_embeddings`` of a text config is not
what the model does: its outer default stands."""

HEADED = {
    "GPT2": "GPT2LMHeadModel",
    "Gemma3Text": "Gemma3ForCausalLM",
    "Gemma3nText": "Gemma3nForCausalLM",
    "Gemma4Text": "Gemma4ForCausalLM",
    "Qwen3_5Text": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeText": "Qwen3_5MoeForCausalLM",
    "Llama4Text": "Llama4ForCausalLM",
    "InternLM3": "LlamaForCausalLM",
}


def build(name):
    """Make an untrained model of a case."""
    import transformers  # seconds that ranks of ``test_families`` need not spend

    architecture, values = CASES[name]
    values = {key: value for key, value in values.items() if value is not None}
    config = getattr(transformers, f"{architecture}Config")(**values)
    return getattr(transformers, HEADED.get(architecture, f"{architecture}ForCausalLM"))(config)


def build_seeing(name):
    """Make an untrained model of ``SEEING``."""
    import transformers

    text, vision = ({k: v for k, v in part.items() if v is not None} for part in SEEING[name])
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision)
    config._attn_implementation = "eager"
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)
