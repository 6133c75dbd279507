"""DeepSeek-V3: latent attention, sigmoid routing in groups, shared experts, extra predictors.

No model here runs latent attention yet: the fields that have no flag keep Megatron's names
where it has them, else the family's own.
"""

from collections.abc import Collection, Mapping
from typing import Any

from mcore_ckpt.families.decoder import ANGLES, around, tied_copies
from mcore_ckpt.families.experts import expert_layers, expert_rules, expert_setting
from mcore_ckpt.families.fields import (
    REQUIRED,
    Fields,
    Nullable,
    read_pairs,
    require_family,
    setting,
    write_pairs,
)
from mcore_ckpt.families.shapes import Shapes, gpt_shapes
from mcore_ckpt.mapping.rules import Rule, Table

PAIRS = (
    ("num_layers", "num_hidden_layers", REQUIRED),
    ("hidden_size", "hidden_size", REQUIRED),
    ("num_attention_heads", "num_attention_heads", REQUIRED),
    ("num_query_groups", "num_key_value_heads", Nullable(None)),
    ("ffn_hidden_size", "intermediate_size", REQUIRED),
    ("max_position_embeddings", "max_position_embeddings", 4096),
    ("norm_epsilon", "rms_norm_eps", 1e-6),
    ("attention_dropout", "attention_dropout", 0.0),
    ("init_method_std", "initializer_range", 0.02),
    ("q_lora_rank", "q_lora_rank", Nullable(1536)),
    ("kv_lora_rank", "kv_lora_rank", REQUIRED),
    ("qk_head_dim", "qk_nope_head_dim", REQUIRED),
    ("qk_pos_emb_head_dim", "qk_rope_head_dim", REQUIRED),
    ("v_head_dim", "v_head_dim", REQUIRED),
    ("rope_interleave", "rope_interleave", None),
    ("rope_parameters", "rope_parameters", None),
    ("rope_theta", "rope_theta", None),
    ("rope_scaling", "rope_scaling", None),
)
"""Our fields and theirs, of both versions."""

_ABSENT = {"n_group": 8, "topk_group": 4, "n_shared_experts": 1} | {
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
}


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields = Fields(config, absent=_ABSENT)
    fields.must_be("scoring_func", "sigmoid")
    fields.must_be("topk_method", "noaux_tc")
    fields.must_be("norm_topk_prob", True)
    described = read(fields, "deepseek_v3")
    described["config"]["mtp_num_layers"] = fields.take("num_nextn_predict_layers", 0)
    described["moe"] |= {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }
    fields.finish()
    return described


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: if it is of another family.
    """
    theirs = write(description, "deepseek_v3", "DeepseekV3ForCausalLM")
    return theirs | {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "num_nextn_predict_layers": description["config"]["mtp_num_layers"],
    }


def as_stored(description: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Leave out predictors that a folder lacks: transformers saves none of them."""
    there = f"model.layers.{setting(description, 'num_layers')}.eh_proj.weight"
    if there in names:
        return description
    return {**description, "config": {**description["config"], "mtp_num_layers": 0}}


def read(fields: Fields, family: str) -> dict[str, Any]:
    """Read what both versions say alike; the caller finishes the fields."""
    for name in ("attention_bias", "mlp_bias"):
        fields.must_be(name, False)
    fields.must_be("hidden_act", "silu")
    fields.must_be("moe_layer_freq", 1)
    for name in ("ep_size", "seq_aux", "head_dim", "qk_head_dim"):
        fields.maybe(name)
    ours = read_pairs(fields, PAIRS)
    tied = fields.take("tie_word_embeddings", False)
    ours["untie_embeddings_and_output_weights"] = not tied
    dense = fields.take("first_k_dense_replace", 0)
    count = ours["num_layers"]
    if not 0 <= dense <= count:
        raise ValueError(
            f"config.json has first_k_dense_replace={dense}: it must be from 0 to "
            f"num_hidden_layers, {count}."
        )
    width = fields.take("moe_intermediate_size")
    shared = fields.take("n_shared_experts", 0)
    moe = {
        "num_experts": fields.take("n_routed_experts"),
        "moe_router_topk": fields.take("num_experts_per_tok"),
        "moe_ffn_hidden_size": width,
        "moe_layer_freq": f"[0]*{dense}+[1]*{count - dense}" if dense else "1",
        "moe_shared_expert_intermediate_size": width * shared,
        "moe_router_num_groups": fields.take("n_group", 0),
        "moe_router_group_topk": fields.take("topk_group", 0),
        "moe_router_topk_scaling_factor": float(fields.take("routed_scaling_factor", 1.0)),
        "moe_aux_loss_coeff": fields.take("aux_loss_alpha", 0.0),
    }
    vocab_size = fields.take("vocab_size")
    return {"family": family, "vocab_size": vocab_size, "config": ours, "moe": moe}


def write(description: Mapping[str, Any], family: str, architecture: str) -> dict[str, Any]:
    """Write what both versions say alike.

    Raises:
        ValueError: if it is of another family.
    """
    require_family(description, family)
    width = expert_setting(description, "moe_ffn_hidden_size")
    shared = expert_setting(description, "moe_shared_expert_intermediate_size")
    return {
        "model_type": family,
        "architectures": [architecture],
        "vocab_size": description["vocab_size"],
        **write_pairs(description, PAIRS),
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": not setting(description, "untie_embeddings_and_output_weights"),
        "first_k_dense_replace": expert_layers(description).count(0),
        "moe_intermediate_size": width,
        "n_shared_experts": shared // width,
        "n_routed_experts": expert_setting(description, "num_experts"),
        "num_experts_per_tok": expert_setting(description, "moe_router_topk"),
        "n_group": expert_setting(description, "moe_router_num_groups"),
        "topk_group": expert_setting(description, "moe_router_group_topk"),
        "routed_scaling_factor": expert_setting(description, "moe_router_topk_scaling_factor"),
        "aux_loss_alpha": expert_setting(description, "moe_aux_loss_coeff"),
    }


def table(description: Mapping[str, Any]) -> Table:
    """List the weights, those of both versions."""
    pattern = expert_layers(description)
    sparse = tuple(layer for layer, has in enumerate(pattern) if has)
    dense = tuple(layer for layer, has in enumerate(pattern) if not has)
    layers = [
        *_attention(description),
        *_mlp("mlp.", "mlp.", dense),
        *_router(description, sparse),
        *expert_rules("model.layers.*.mlp.experts.*.", _MLP_NAMES, sparse),
        *_mlp("moe.shared.", "mlp.shared_experts.", sparse),
    ]
    count = setting(description, "num_layers")
    copies = dict(tied_copies(description))
    extra: list[Rule] = []
    for number in range(description["config"].get("mtp_num_layers", 0)):
        there = f"model.layers.{count + number}."
        extra += _predictor(description, layers, number, there)
        copies |= {
            f"{there}embed_tokens.weight": "model.embed_tokens.weight",
            f"{there}shared_head.head.weight": "lm_head.weight",
        }
    rules = (*around(description, layers), *extra)
    experts = expert_setting(description, "num_experts")
    return Table(rules, count, experts, droppable=ANGLES, copies=copies)


_MLP_NAMES = ("gate_proj", "up_proj", "down_proj")


def _attention(description: Mapping[str, Any]) -> list[Rule]:
    names = {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_norm": "self_attn.kv_a_layernorm",
        "attention.kv_up": "self_attn.kv_b_proj",
        "attention.proj": "self_attn.o_proj",
    }
    if description["config"]["q_lora_rank"]:
        names |= {
            "attention.q_down": "self_attn.q_a_proj",
            "attention.q_norm": "self_attn.q_a_layernorm",
            "attention.q_up": "self_attn.q_b_proj",
        }
    else:
        names["attention.q"] = "self_attn.q_proj"
    return [
        Rule(f"blocks.*.{ours}.weight", f"model.layers.*.{theirs}.weight")
        for ours, theirs in names.items()
    ]


def _mlp(ours: str, theirs: str, layers: tuple[int, ...]) -> list[Rule]:
    return [
        Rule(
            f"blocks.*.{ours}{mine}.weight",
            f"model.layers.*.{theirs}{name}.weight",
            layers=layers,
        )
        for mine, name in zip(("fc1.gate", "fc1.up", "fc2"), _MLP_NAMES, strict=True)
    ]


def _router(description: Mapping[str, Any], layers: tuple[int, ...]) -> list[Rule]:
    gate = "model.layers.*.mlp.gate."
    rules = [Rule("blocks.*.moe.router.weight", f"{gate}weight", layers=layers)]
    if expert_setting(description, "moe_router_enable_expert_bias"):
        there = f"{gate}e_score_correction_bias"
        rules.append(Rule("blocks.*.moe.router.expert_bias", there, layers=layers))
    return rules


def _predictor(
    description: Mapping[str, Any], layers: list[Rule], number: int, there: str
) -> list[Rule]:
    """Rules of one layer that predicts a token further: a sparse layer with a front."""
    names = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj"}
    names["final_norm"] = "shared_head.norm"
    mine = f"mtp.{number}."
    rules = [Rule(f"{mine}{a}.weight", f"{there}{b}.weight") for a, b in names.items()]
    sparse = [rule for rule in layers if rule.layers is None or ".moe." in str(rule.ours)]
    for rule in sparse:
        a = str(rule.ours).replace("blocks.*.", f"{mine}block.", 1)
        b = rule.theirs.replace("model.layers.*.", there, 1)
        many = "*" in b
        for expert in range(expert_setting(description, "num_experts") if many else 1):
            rules.append(Rule(a.replace("*", str(expert)), b.replace("*", str(expert))))
    return rules


def shapes(description: Mapping[str, Any]) -> Shapes:
    """List the shapes of the weights, see ``families.shapes``."""
    config = description["config"]
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rank, rotated = config["kv_lora_rank"], config["qk_pos_emb_head_dim"]
    query = heads * (config["qk_head_dim"] + rotated)
    q_rank = config["q_lora_rank"] or 0
    # The number of heads need not divide the hidden size.
    found = gpt_shapes({**description, "config": {**config, "kv_channels": 1}})
    return found | {
        "attention.kv_down": (rank + rotated, hidden),
        "attention.kv_norm": (rank,),
        "attention.kv_up": (heads * (config["qk_head_dim"] + config["v_head_dim"]), rank),
        "attention.q": (query, hidden),
        "attention.q_down": (q_rank, hidden),
        "attention.q_norm": (q_rank,),
        "attention.q_up": (query, q_rank),
        "attention.proj": (hidden, heads * config["v_head_dim"]),
        "enorm": (hidden,),
        "hnorm": (hidden,),
        "eh_proj": (hidden, 2 * hidden),
    }
