"""``QKClipConfig``: the score above which query and key weights are scaled."""

from dataclasses import dataclass

from mcore_base.options import ON, Because, Options, Rule, option


@dataclass(frozen=True, kw_only=True, slots=True)
class QKClipConfig(Options):
    """Scaling of queries and keys after a step whose attention scores grew too large."""

    qk_clip: bool = option(
        False,
        excludes={
            "attn_logit_softcapping": Because("as both bound scores"),
            "peft": Because("which freezes what is scaled", "lora", "dora"),
        },
    )
    """After each step, scale queries and keys of heads whose largest attention score exceeded
    --qk-clip-threshold, so that the score falls to it."""
    qk_clip_alpha: float = option(0.5, minimum=0, maximum=1, needs={"qk_clip": ON})
    """Share of the scaling's exponent for queries, 0 to 1; keys get the rest."""
    qk_clip_threshold: float = option(100.0, above=0, needs={"qk_clip": ON})
    """Largest attention score without scaling, above 0."""

    rules = (
        Rule(
            ("qk_clip", "qk_layernorm", "qk_l2_norm"),
            lambda v: (
                v.qk_clip
                and ((v.qk_layernorm and not v.multi_latent_attention) or v.qk_l2_norm)
            ),
            "--qk-clip scales what --qk-layernorm or --qk-l2-norm normalizes again, without "
            "effect: leave it out.",
        ),
        Rule(
            ("qk_clip", "is_causal"),
            lambda v: v.qk_clip and not v.is_causal,
            "--qk-clip scales causal models alone, not BERT or T5: leave it out.",
        ),
        Rule(
            ("qk_clip", "hybrid_override_pattern"),
            lambda v: (
                v.qk_clip and v.hybrid_override_pattern and "*" not in v.hybrid_override_pattern
            ),
            "--qk-clip has no effect without attention layers: leave it out.",
        ),
    )
