"""Options of QK-clip: which scores it bounds, and how queries and keys share the scaling."""

from dataclasses import dataclass

from mcore_base.options import ON, Because, Options, Rule, option


@dataclass(frozen=True, kw_only=True, slots=True)
class QKClipConfig(Options):
    """Scaling of query and key weights after a step with too large attention scores."""

    qk_clip: bool = option(
        False,
        excludes={
            "attn_logit_softcapping": Because("as both bound scores"),
            "peft": Because("which freezes the weights that it scales", "lora", "dora"),
        },
    )
    """After each step, scale query and key weights of heads whose largest attention score
    exceeded --qk-clip-threshold, so that this score becomes the threshold."""
    qk_clip_alpha: float = option(0.5, minimum=0, maximum=1, needs={"qk_clip": ON})
    """Exponent of the scaling factor for queries, 0 to 1; keys get 1 minus this exponent."""
    qk_clip_threshold: float = option(100.0, above=0, needs={"qk_clip": ON})
    """Largest attention score without scaling, above 0."""

    rules = (
        Rule(
            ("qk_clip", "qk_layernorm", "qk_l2_norm"),
            lambda v: (
                v.qk_clip
                and ((v.qk_layernorm and not v.multi_latent_attention) or v.qk_l2_norm)
            ),
            "--qk-clip has no effect with --qk-layernorm or --qk-l2-norm, which norm queries "
            "and keys after it scales them: leave it out.",
        ),
        Rule(
            ("qk_clip", "is_causal"),
            lambda v: v.qk_clip and not v.is_causal,
            "--qk-clip supports causal models only, not BERT or T5: leave it out.",
        ),
        Rule(
            ("qk_clip", "hybrid_override_pattern"),
            lambda v: (
                v.qk_clip and v.hybrid_override_pattern and "*" not in v.hybrid_override_pattern
            ),
            "--qk-clip has no effect without attention layers: leave it out.",
        ),
    )
