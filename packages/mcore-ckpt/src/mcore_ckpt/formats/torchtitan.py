"""torchtitan's names for our tensors: its Llama 3 and Qwen3, dense and with experts.

Its Llama rotates neighbouring channels, ours rotates halves, so the rows of its queries and
keys are interleaved; its Qwen3 rotates halves too. Experts lie stacked in one tensor.
"""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.common.experts import expert_layers, expert_setting
from mcore_ckpt.families.common.fields import (
    refuse_variants,
    require,
    require_family,
    setting,
    settings,
)
from mcore_ckpt.mapping.rules import Rule, Table
from mcore_parallel.logical_tensors import num_kv_heads

_FFN = {"fc1.gate": "w1", "fc2": "w2", "fc1.up": "w3"}


def table(description: Mapping[str, Any]) -> Table:
    """List the weights.

    Raises:
        ValueError: naming a flag that torchtitan's models do not have.
    """
    require_family(description, "gpt")
    refuse_variants(description)
    require(
        description,
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        add_qkv_bias=False,
        position_embedding_type="rope",
        rotary_interleaved=False,
        multi_latent_attention=False,
    )
    num_experts = expert_setting(description, "num_experts")
    pattern = expert_layers(description) if num_experts else []
    count = setting(description, "num_layers")
    sparse = tuple(layer for layer, has in enumerate(pattern) if has)
    dense = tuple(layer for layer in range(count) if layer not in sparse)
    if num_experts and not setting(description, "qk_layernorm"):
        raise ValueError("torchtitan has experts in models with --qk-layernorm only")
    rules = [
        *_attention(description),
        *(
            Rule(f"blocks.*.mlp.{a}.weight", f"layers.*.feed_forward.{b}.weight", layers=dense)
            for a, b in _FFN.items()
        ),
        Rule("blocks.*.moe.router.weight", "layers.*.moe.router.gate.weight", layers=sparse),
        *(
            Rule(
                f"blocks.*.moe.experts.*.{a}.weight",
                f"layers.*.moe.experts.{b}[*]",
                layers=sparse,
            )
            for a, b in _FFN.items()
        ),
    ]
    is_tied = not setting(description, "untie_embeddings_and_output_weights")
    head = [] if is_tied else [Rule("head.weight", "output.weight")]
    return Table(
        (
            Rule("embedding.weight", "tok_embeddings.weight"),
            *rules,
            Rule("final_norm.weight", "norm.weight"),
            *head,
        ),
        count,
        num_experts,
        # Counters of a balance without losses, which no Qwen3 or Llama 3 uses.
        droppable=("freqs_cis", "rope_cache", "layers.*.moe.tokens_per_expert"),
        copies={"output.weight": "tok_embeddings.weight"} if is_tied else {},
    )


def _attention(description: Mapping[str, Any]) -> list[Rule]:
    is_paired = not setting(description, "qk_layernorm")
    config = settings(description)
    heads, groups = config.num_attention_heads, num_kv_heads(config)
    here, there = "blocks.*.attention.", "layers.*.attention."
    rules = [
        Rule("blocks.*.attention_norm.weight", "layers.*.attention_norm.weight"),
        Rule("blocks.*.mlp_norm.weight", "layers.*.ffn_norm.weight"),
    ]
    for part, blocks in (("q", heads), ("k", groups)):
        names = (f"{here}qkv.{part}.weight", f"{there}w{part}.weight")
        rules.append(Rule(*names, groups=blocks if is_paired else 1, paired=is_paired))
        if not is_paired:
            rules.append(Rule(f"{here}{part}_norm.weight", f"{there}{part}_norm.weight"))
    rules.append(Rule(f"{here}qkv.v.weight", f"{there}wv.weight"))
    rules.append(Rule(f"{here}proj.weight", f"{there}wo.weight"))
    return rules
