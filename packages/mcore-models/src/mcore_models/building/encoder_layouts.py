"""Checks whether a model with an encoder fits a layout: rules of BERT and T5 beyond GPT's.

Pure functions of configs; no torch here.
"""

from dataclasses import fields, replace

from mcore_models.building.layouts import layout_problems
from mcore_models.config import TransformerConfig
from mcore_models.encoder_config import BertConfig, T5Config, num_stack_layers
from mcore_moe.config import MoEConfig
from mcore_parallel.config import ParallelConfig

_NO_EXPERTS = MoEConfig()

_DEFAULTS = {field.name: field.default for field in fields(TransformerConfig)}
_DECODERS_ALONE = (
    *("norm_placement", "parallel_residual", "qk_l2_norm", "softmax_scale"),
    *("attn_logit_softcapping", "softmax_type", "attention_chunk_size"),
    "attention_output_gate",
    *("embedding_multiplier", "residual_multiplier", "logits_multiplier", "use_mup"),
    *("final_logit_softcapping", "multi_latent_attention", "hybrid_override_pattern"),
    *("mtp_num_layers", "embedding_layernorm", "value_norm", "num_kv_shared_layers"),
    *("per_layer_embedding_size", "layer_output_scale", "activation_sparsity_pattern"),
)
"""Fields that layers of encoder models (BERT, T5) ignore."""


def encoder_layout_problems(
    config: TransformerConfig,
    parallel: ParallelConfig,
    moe: MoEConfig = _NO_EXPERTS,
    seq_length: int = 0,
) -> list[str]:
    """Return the errors of a layout for a model with an encoder; see ``layout_problems``."""
    problems = layout_problems(config, parallel, moe, seq_length)
    if moe.num_experts:
        problems.append("--num-experts: BERT and T5 do not support experts; leave it out.")
    is_bert = isinstance(config, BertConfig)
    if config.window_size[0] >= 0 and not is_bert:
        problems.append("--window-size: T5 does not support windows; leave it out.")
    if config.qk_layernorm:
        problems.append("--qk-layernorm: BERT and T5 do not support it; leave it out.")
    for name in _DECODERS_ALONE:
        if is_bert and name == "embedding_layernorm":
            continue
        if getattr(config, name) != _DEFAULTS[name]:
            flag = "--" + name.replace("_", "-")
            problems.append(f"{flag}: this model has an encoder and ignores it; leave it out.")
    if parallel.context_parallel_size > 1 and parallel.cp_comm_type in (
        "p2p",
        "a2a",
        "a2a+p2p",
    ):
        problems.append(
            f"--cp-comm-type {parallel.cp_comm_type} supports causal models only: leave it out "
            "(keys and values are gathered)."
        )
    return problems


def t5_layout_problems(
    config: T5Config,
    parallel: ParallelConfig,
    moe: MoEConfig = _NO_EXPERTS,
    seq_length: int = 0,
) -> list[str]:
    """Return the errors of a layout for a T5; see ``layout_problems``."""
    stacked = replace(config, num_layers=num_stack_layers(config))
    return encoder_layout_problems(stacked, parallel, moe, seq_length)
