"""GLM-4.5: partly rotated heads, sigmoid routing with a bias, a shared expert."""

from mcore_ckpt.families.common.decoder import Decoder, Description, attention_rules, pair
from mcore_ckpt.families.moe.deepseek_v3 import SIGMOID_EXPERTS, experts_table
from mcore_ckpt.families.moe.mtp_layers import MTP, without_absent
from mcore_ckpt.mapping.rules import Table


def _table(description: Description) -> Table:
    return experts_table(description, attention_rules(description))


FAMILY = Decoder(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    absent={
        "rms_norm_eps": 1e-5,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 131072,
    },
    parts=(
        MTP,
        pair("qk_layernorm", "use_qk_norm", False),
        pair("add_qkv_bias", "attention_bias", False),
    ),
    experts=SIGMOID_EXPERTS,
    partial=0.5,
    weights=_table,
    as_stored=without_absent,
)
