"""T5 and T5 1.1: an encoder and a decoder with relative positions, RMSNorm, no biases.

No model here runs it yet: the fields that have no flag keep the family's own names.
"""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.families.fields import REQUIRED, Fields, read_pairs, require_family, write_pairs
from mcore_ckpt.families.shapes import Shapes, mlp_shapes
from mcore_ckpt.mapping.rules import Rule, Table

PAIRS = (
    ("encoder_num_layers", "num_layers", REQUIRED),
    ("decoder_num_layers", "num_decoder_layers", None),
    ("hidden_size", "d_model", REQUIRED),
    ("kv_channels", "d_kv", REQUIRED),
    ("ffn_hidden_size", "d_ff", REQUIRED),
    ("num_attention_heads", "num_heads", REQUIRED),
    ("relative_attention_num_buckets", "relative_attention_num_buckets", 32),
    ("relative_attention_max_distance", "relative_attention_max_distance", 128),
    ("hidden_dropout", "dropout_rate", 0.1),
    ("classifier_dropout", "classifier_dropout", 0.0),
    ("norm_epsilon", "layer_norm_epsilon", 1e-6),
    ("init_method_std", "initializer_factor", 1.0),
    ("feed_forward_proj", "feed_forward_proj", "relu"),
    ("scale_decoder_outputs", "scale_decoder_outputs", None),
)
_SELF = {"qkv.q": "q", "qkv.k": "k", "qkv.v": "v", "proj": "o"}
_CROSS = {"q": "q", "k": "k", "v": "v", "proj": "o"}


def to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json as a description.

    Raises:
        ValueError: naming a field that we cannot represent.
    """
    fields = Fields(config)
    fields.must_be("is_encoder_decoder", True)
    for name in ("dense_act_fn", "is_gated_act", "n_positions", "is_decoder", "output_past"):
        fields.maybe(name)
    ours = read_pairs(fields, PAIRS)
    if ours["decoder_num_layers"] is None:
        ours["decoder_num_layers"] = ours["encoder_num_layers"]
    tied = fields.take("tie_word_embeddings", True)
    ours["untie_embeddings_and_output_weights"] = not tied
    vocab_size = fields.take("vocab_size")
    fields.finish()
    return {"family": "t5", "vocab_size": vocab_size, "config": ours, "moe": {}}


def to_theirs(description: Mapping[str, Any]) -> dict[str, Any]:
    """Write a description as a config.json.

    Raises:
        ValueError: if it is of another family.
    """
    require_family(description, "t5")
    return {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "vocab_size": description["vocab_size"],
        **write_pairs(description, PAIRS),
        "is_encoder_decoder": True,
        "tie_word_embeddings": not _is_untied(description),
    }


def table(description: Mapping[str, Any]) -> Table:
    """List the weights."""
    config = description["config"]
    depths = (config["encoder_num_layers"], config["decoder_num_layers"])
    rules = [Rule("embedding.weight", "shared.weight")]
    for stack, depth in zip(("encoder", "decoder"), depths, strict=True):
        rules += _stack(description, stack, depth)
    if _is_untied(description):
        rules.append(Rule("head.weight", "lm_head.weight"))
    stacks = ("encoder", "decoder")
    copies = {f"{stack}.embed_tokens.weight": "shared.weight" for stack in stacks}
    if not _is_untied(description):
        copies["lm_head.weight"] = "shared.weight"
    # Some old folders have a bias of positions in the cross attention, which nothing reads.
    unread = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)
    return Table(tuple(rules), max(depths), droppable=unread, copies=copies)


def _stack(description: Mapping[str, Any], stack: str, depth: int) -> list[Rule]:
    here, there = f"{stack}.blocks.*.", f"{stack}.block.*.layer."
    names = {"attention_norm": "0.layer_norm"}
    names |= {f"attention.{mine}": f"0.SelfAttention.{name}" for mine, name in _SELF.items()}
    last = "1"
    if stack == "decoder":
        last = "2"
        names["cross_attention_norm"] = "1.layer_norm"
        names |= {
            f"cross_attention.{mine}": f"1.EncDecAttention.{name}"
            for mine, name in _CROSS.items()
        }
    dense = f"{last}.DenseReluDense."
    is_gated = description["config"]["feed_forward_proj"].startswith("gated-")
    fc1 = {"mlp.fc1.gate": "wi_0", "mlp.fc1.up": "wi_1"} if is_gated else {"mlp.fc1": "wi"}
    names |= {mine: dense + name for mine, name in {**fc1, "mlp.fc2": "wo"}.items()}
    names["mlp_norm"] = f"{last}.layer_norm"
    layers = tuple(range(depth))
    rules = [
        Rule(f"{here}{mine}.weight", f"{there}{name}.weight", layers=layers)
        for mine, name in names.items()
    ]
    bias = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return [
        Rule(f"{stack}.relative_position_bias.weight", f"{stack}.{bias}"),
        *rules,
        Rule(f"{stack}.final_norm.weight", f"{stack}.final_layer_norm.weight"),
    ]


def _is_untied(description: Mapping[str, Any]) -> bool:
    return description["config"]["untie_embeddings_and_output_weights"]


def shapes(description: Mapping[str, Any]) -> Shapes:
    """List the shapes of the weights, see ``families.shapes``."""
    config, vocab = description["config"], description["vocab_size"]
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    inner = heads * config["kv_channels"]
    norms = ("attention_norm", "cross_attention_norm", "mlp_norm", "final_norm")
    linears = [*(f"attention.{n}" for n in _SELF), *(f"cross_attention.{n}" for n in _CROSS)]
    return {
        "embedding": (vocab, hidden),
        "head": (vocab, hidden),
        "relative_position_bias": (config["relative_attention_num_buckets"], heads),
        **dict.fromkeys(norms, (hidden,)),
        **{n: (hidden, inner) if n.endswith("proj") else (inner, hidden) for n in linears},
        **mlp_shapes("mlp", config["ffn_hidden_size"], hidden),
    }
