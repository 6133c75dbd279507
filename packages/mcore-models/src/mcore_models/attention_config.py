"""Options of attention beyond heads and windows: YaRN's positions and latent attention.

``AttentionConfig`` is the base of ``TransformerConfig`` and never used alone. The standard
library only.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from mcore_base.field_checks import check_above_zero, check_at_least, flag
from mcore_models.hybrid_config import HybridConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig(HybridConfig):
    """How rotary wavelengths are stretched, and keys and values compressed."""

    rope_type: Literal["rope", "yarn", "dynamic", "longrope"] = "rope"
    """How rotary wavelengths are stretched for longer contexts: not, as YaRN does, by a base
    that grows with the sequence (dynamic), or by a factor for each channel (longrope).
    Megatron's default: yarn with latent attention."""

    rotary_scaling_factor: float = 40.0
    """By how much --rope-type stretches the longest wavelengths. Megatron's default: 1.0."""

    original_max_position_embeddings: int = 4096
    """Context, in tokens, that the model knew before --rope-type stretched it."""

    beta_fast: float = 32.0
    """Channels that turn more often than this within the original context stay."""

    beta_slow: float = 1.0
    """Channels that turn less often than this are stretched fully."""

    mscale: float = 1.0
    """YaRN multiplies cosines and sines by m(this) / m(--mscale-all-dim), where m(x) is
    0.1 x ln(--rotary-scaling-factor) + 1."""

    mscale_all_dim: float = 0.0
    """In latent attention YaRN multiplies all scores by the square of m(this)."""

    multi_latent_attention: bool = False
    """Compress keys and values of all heads to one latent vector a token. DeepSeek's models
    also have --qk-layernorm and --rotary-interleaved."""

    q_lora_rank: int = 0
    """Width of the latent vector of the queries; 0: they are not compressed."""

    kv_lora_rank: int = 512
    """Width of the latent vector of keys and values. Megatron's default: 32."""

    qk_head_dim: int = 128
    """Channels of a latent head's queries and keys that are not rotated."""

    qk_pos_emb_head_dim: int = 64
    """Channels of a latent head's queries that are rotated, and of the one rotated key that
    all heads share."""

    v_head_dim: int = 128
    """Channels of a latent head's values."""

    def check_attention(self) -> None:
        """Check the fields above, for ``TransformerConfig``."""
        check_above_zero(
            self,
            *("rotary_scaling_factor", "original_max_position_embeddings", "beta_slow"),
            *("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
        )
        check_at_least(self, 0, "q_lora_rank", "mscale", "mscale_all_dim")
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"--beta-fast {self.beta_fast} must be --beta-slow {self.beta_slow} or more."
            )


def check_latent(config: Any) -> None:
    """Compare latent attention with the other fields of a ``TransformerConfig``."""
    heads = config.num_attention_heads
    if not config.multi_latent_attention:
        return
    if config.qk_pos_emb_head_dim % 2:
        raise ValueError(
            f"--qk-pos-emb-head-dim {config.qk_pos_emb_head_dim} must be even: channels are "
            "rotated in pairs."
        )
    if config.position_embedding_type == "alibi":
        raise ValueError(
            "--position-embedding-type alibi is not known with --multi-latent-attention: use "
            "rope or none."
        )
    without_effect = {
        "kv_channels": 0,
        "rotary_percent": 1.0,
        "add_qkv_bias": False,
        "window_size": (-1, 0),
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
    }
    for name, value in without_effect.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"{flag(name)} has no effect with --multi-latent-attention: leave it out."
            )
    if config.num_query_groups not in (0, heads):
        raise ValueError(
            f"--num-query-groups {config.num_query_groups}: with --multi-latent-attention "
            f"every head has keys of its own. Use 0 or --num-attention-heads, {heads}."
        )


def yarn_magnitude(factor: float, scale: float) -> float:
    """How YaRN scales attention for positions stretched by ``factor``; 1 without stretching.

    Reference:
        Peng et al. 2023, YaRN, arXiv:2309.00071, equation 22.
    """
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
