"""DeepSeek-V3.2: DeepSeek-V3 with an indexer that selects the keys of each token."""

from dataclasses import replace

from mcore_ckpt.families.common.decoder import Description, pair
from mcore_ckpt.families.moe import deepseek_v3
from mcore_ckpt.families.moe.glm4_moe_lite import TYPED_EXPERTS
from mcore_ckpt.families.moe.mtp_layers import MTP
from mcore_ckpt.mapping.rules import Rule, Table

_INDEXER = {
    "q_up.weight": "wq_b.weight",
    "k.weight": "wk.weight",
    "k_norm.weight": "k_norm.weight",
    "k_norm.bias": "k_norm.bias",
    "weights.weight": "weights_proj.weight",
}


def _table(description: Description) -> Table:
    indexer = [
        Rule(f"blocks.*.mla.indexer.{ours}", f"model.layers.*.self_attn.indexer.{theirs}")
        for ours, theirs in _INDEXER.items()
    ]
    return deepseek_v3.table(description, indexer)


FAMILY = replace(
    deepseek_v3.FAMILY,
    model_type="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    fixed={**deepseek_v3.FAMILY.fixed, "rotary_interleaved": True},
    absent={**deepseek_v3.FAMILY.absent, "max_position_embeddings": 163840},
    parts=(
        *deepseek_v3.LATENT,
        pair("dsa_indexer_topk", "index_topk", 2048),
        pair("dsa_indexer_n_heads", "index_n_heads", 64),
        pair("dsa_indexer_head_dim", "index_head_dim", 128),
        MTP,
    ),
    experts=TYPED_EXPERTS,
    weights=_table,
)
